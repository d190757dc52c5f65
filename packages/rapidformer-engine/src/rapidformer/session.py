"""The one module with state: the arguments, timers and logger that scripts ask for by function."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict
from typing import Any

from rapidformer.config import RunConfig
from rapidformer.errors import EngineError
from rapidformer.timers import Timers

_config: RunConfig | None = None
_args: argparse.Namespace | None = None
_timers: Timers | None = None


def get_args() -> argparse.Namespace:
    """Return the settings of the run as a namespace, under every name that scripts use for them.

    Raises:
        EngineError: no RapidformerEngine was made yet.
    """
    if _args is None:
        raise EngineError("get_args() has nothing to return yet; make a RapidformerEngine() first")
    return _args


def get_logger() -> logging.Logger:
    """Return the logger of rapidformer. How and where it writes is the program's choice."""
    return logging.getLogger("rapidformer")


def get_timers() -> Timers:
    """Return the timers of this process: `get_timers()("forward", log_level=0).start()`."""
    global _timers
    if _timers is None:
        _timers = Timers()
    return _timers


def set_current(config: RunConfig, extra: dict[str, Any] | None = None) -> None:
    """Make `config` the settings that get_args() returns and that the next engine takes."""
    global _config, _args
    _config = config
    values = asdict(config)
    values["save"] = config.save_path
    values["dataset_path"] = values["data_dir"] = values["data_path"]
    values["dataset_name"] = values["data_name"]
    values["save_interval"] = values["save_storage_interval"]
    values["max_seq_length"] = values["seq_length"]
    _args = argparse.Namespace(**{**(extra or {}), **values})


def current_config() -> RunConfig | None:
    """Return the settings made current, or None."""
    return _config


def clear() -> None:
    """Forget settings and timers, as in a fresh process."""
    global _config, _args, _timers
    _config = _args = _timers = None
