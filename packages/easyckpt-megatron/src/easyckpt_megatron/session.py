"""The three calls of a Megatron training script.

This release has the names and checks their arguments. It saves and loads nothing: each call ends in
an error that says so, so that no training runs on in the belief that it is being checkpointed.
"""

from __future__ import annotations

import os
from typing import Any

from easyckpt_megatron._megatron import refusal
from easyckpt_megatron.errors import InvalidArgumentError


def initialize_easyckpt(
    save_mem_interval: int,
    save_storage_interval: int,
    max_ckpt_num: int,
    log_file_path: str | os.PathLike[str] | None = None,
) -> None:
    """Set how often checkpoints are taken. To be called on every rank before the training loop.

    Args:
        save_mem_interval: iterations between two snapshots in host memory.
        save_storage_interval: iterations between two commits to storage.
        max_ckpt_num: committed iterations that stay on storage.
        log_file_path: file for a readable log of checkpoint events; None: no such file.

    Raises:
        InvalidArgumentError: an argument can never work.
        MegatronNotFoundError: Megatron is not installed.
        UnsupportedMegatronError: always, when Megatron is installed, in this release.
    """
    _check_count("save_mem_interval", save_mem_interval)
    _check_count("save_storage_interval", save_storage_interval)
    _check_count("max_ckpt_num", max_ckpt_num)
    _check_log_file(log_file_path)
    raise refusal("initialize_easyckpt")


def load_checkpoint(
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    concat: bool = False,
) -> Any:
    """Load the newest checkpoint, in the place of Megatron's function of this name.

    Args:
        model: the model, or Megatron's list of model chunks.
        optimizer: Megatron's optimizer, or None when only weights are wanted.
        opt_param_scheduler: Megatron's scheduler, or None.
        load_arg: the attribute of Megatron's arguments that names the directory.
        strict: passed on to ``load_state_dict``.
        concat: join the optimizer shards of all data-parallel ranks before they are split again.

    Raises:
        InvalidArgumentError: an argument can never work.
        MegatronNotFoundError: Megatron is not installed.
        UnsupportedMegatronError: always, when Megatron is installed, in this release.
    """
    _check_model(model)
    if not isinstance(load_arg, str) or not load_arg.isidentifier():
        raise InvalidArgumentError(
            f"load_arg={load_arg!r}: give the name of an attribute of Megatron's arguments, "
            "such as 'load'"
        )
    _check_switch("strict", strict)
    _check_switch("concat", concat)
    raise refusal("load_checkpoint")


def save_checkpoint_if_needed(
    iteration: int,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
) -> None:
    """Save what is due after `iteration` completed iterations. To be called on every rank.

    Args:
        iteration: completed iterations, 1 after the first.
        model: the model, or Megatron's list of model chunks.
        optimizer: Megatron's optimizer.
        opt_param_scheduler: Megatron's scheduler.

    Raises:
        InvalidArgumentError: an argument can never work.
        MegatronNotFoundError: Megatron is not installed.
        UnsupportedMegatronError: always, when Megatron is installed, in this release.
    """
    _check_count("iteration", iteration)
    _check_model(model)
    raise refusal("save_checkpoint_if_needed")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{name}={value!r}: allowed are whole numbers from 1 on")


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}={value!r}: allowed are True and False")


def _check_model(model: object) -> None:
    if model is None or model == []:
        raise InvalidArgumentError(
            f"model={model!r}: give the model, or the list of model chunks that Megatron made"
        )


def _check_log_file(path: object) -> None:
    if path is None:
        return
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgumentError(f"log_file_path={path!r}: give the path of a file, or None")
    if os.path.isdir(path):
        raise InvalidArgumentError(
            f"log_file_path={os.fspath(path)!r} is a directory: give the path of a file in it"
        )
