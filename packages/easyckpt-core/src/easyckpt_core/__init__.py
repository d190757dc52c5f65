"""EasyCkpt's core: native files in host memory, a keeper process, atomic commits."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from easyckpt_core.__about__ import __version__

if TYPE_CHECKING:
    from easyckpt_core.checkpointer import Checkpointer
    from easyckpt_core.config import CheckpointConfig
    from easyckpt_core.errors import (
        ConfigurationError,
        EasyCkptError,
        KeeperError,
        LayoutError,
        MemoryBudgetError,
        PersistError,
        RestoreError,
        RunInUseError,
        UnsupportedError,
    )
    from easyckpt_core.files import FileContent, RawBytes, Safetensors, TorchZip, freeze
    from easyckpt_core.keeper_link import LiveProcess, live_processes
    from easyckpt_core.layout import Layout, PerRank, StepLayout, unique_tensors
    from easyckpt_core.report import SaveReport
    from easyckpt_core.restore import find_latest
    from easyckpt_core.rng import RngState
    from easyckpt_core.snapshot import Snapshot
    from easyckpt_core.storage import Storage, open_storage

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "ConfigurationError",
    "EasyCkptError",
    "FileContent",
    "KeeperError",
    "Layout",
    "LayoutError",
    "LiveProcess",
    "MemoryBudgetError",
    "PerRank",
    "PersistError",
    "RawBytes",
    "RestoreError",
    "RngState",
    "RunInUseError",
    "Safetensors",
    "SaveReport",
    "Snapshot",
    "StepLayout",
    "Storage",
    "TorchZip",
    "UnsupportedError",
    "__version__",
    "find_latest",
    "freeze",
    "live_processes",
    "open_storage",
    "unique_tensors",
]

_HOMES = {
    "CheckpointConfig": "config",
    "Checkpointer": "checkpointer",
    "FileContent": "files",
    "Layout": "layout",
    "LiveProcess": "keeper_link",
    "PerRank": "layout",
    "RawBytes": "files",
    "RngState": "rng",
    "Safetensors": "files",
    "SaveReport": "report",
    "Snapshot": "snapshot",
    "StepLayout": "layout",
    "Storage": "storage",
    "TorchZip": "files",
    "find_latest": "restore",
    "freeze": "files",
    "live_processes": "keeper_link",
    "open_storage": "storage",
    "unique_tensors": "layout",
}


def __getattr__(name: str) -> Any:
    # Lazy, because the keeper imports this package and must not pay for torch (224 MB of memory).
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
