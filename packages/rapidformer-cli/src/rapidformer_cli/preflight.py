"""Everything that can be checked before a process is started."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rapidformer import BatchPlan, ConfigError, ResumeError, RunConfig, resolve_batch
from rapidformer.checkpoint import check_is_available, live_process_ids
from rapidformer.run_folder import RunFolder
from rapidformer.schedule import LearningRate, resolve_learning_rate
from rapidformer.trainer import count_steps
from rapidformer_cli.tasks.sequence_classification import ClassificationInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A run that may start."""

    config: RunConfig
    folder: RunFolder
    num_processes: int
    batch: BatchPlan
    source: ClassificationInput | None
    """None for a script of the user, whose data only the script knows."""

    total_steps: int | None
    learning_rate: LearningRate | None
    finished: dict[str, Any] | None
    """Metrics, if the run in this folder has finished."""


def check_run(config: RunConfig, *, is_worker: bool = False) -> Checked:
    """Check `config` against this machine, the data and the folder of the run. Writes nothing.

    Raises:
        ConfigError, DataError, MissingExtraError: something cannot work; says what to do.
    """
    num_processes = count_processes(config)
    check_is_available(config)
    batch = resolve_batch(config, num_processes)
    folder = RunFolder(config.save_path)
    if not is_worker:
        _check_free(folder)
        _check_writable(folder.path)
    source, total_steps, rate = None, None, None
    if config.user_script is None:
        source = _open_task(config)
        steps_per_epoch = -(-len(source.data.train) // batch.global_size)
        total_steps = count_steps(config, steps_per_epoch)
        rate = resolve_learning_rate(config, total_steps)
        if not is_worker:
            folder.check(config, {"processes": num_processes, **source.facts()})
    else:
        _check_script(config)
    return Checked(
        config=config,
        folder=folder,
        num_processes=num_processes,
        batch=batch,
        source=source,
        total_steps=total_steps,
        learning_rate=rate,
        finished=folder.finished_metrics() if source is not None else None,
    )


def count_processes(config: RunConfig) -> int:
    """Return the number of processes of the run; torchrun's, if it started this one.

    Raises:
        ConfigError: several nodes are asked for, or more processes than devices.
    """
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    for name, allowed in (("NNODES", "1"), ("NODE_RANK", "0")):
        value = os.environ.get(name, allowed)
        if value != allowed:
            raise ConfigError(
                f"{name}={value} asks for several machines; this version trains on one machine: "
                f"set {name}={allowed}, or start the command with torchrun"
            )
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = config.nproc_per_node or max(1, num_devices)
    if num_devices and wanted > num_devices:
        raise ConfigError(
            f"--nproc-per-node {wanted} is more than the {num_devices} visible CUDA devices; "
            f"nearest: --nproc-per-node {num_devices}"
        )
    return wanted


def under_torchrun() -> bool:
    """Return whether a launcher has already started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _open_task(config: RunConfig) -> ClassificationInput:
    if config.task is None:
        raise ConfigError(
            "--task is missing; give --task sequence_classification, or --user-script with a "
            "Finetuner of your own"
        )
    count_steps(config, 1)
    return ClassificationInput(config)


def _check_script(config: RunConfig) -> None:
    script = Path(config.user_script or "")
    if not script.is_file():
        raise ConfigError(f"--user-script {script} does not exist; give the path of a Python file")
    if importlib.util.spec_from_file_location("user_script", script) is None:
        raise ConfigError(f"--user-script {script} is not a Python file; its name must end in .py")


def _check_free(folder: RunFolder) -> None:
    ids = live_process_ids(folder)
    if ids:
        raise ResumeError(
            f"--save {folder.path} is in use by live processes {', '.join(map(str, ids))}; "
            "wait for them, end them, or give another --save"
        )


def _check_writable(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--save {path} is a file; give a folder")
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise ConfigError(f"--save {path}: {parent} is a file; give a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--save {path} cannot be written: no permission in {parent}")
