"""For tests of the guarantees: storages that misbehave, and a look at keepers from outside.

Torch-free, because the keeper loads this module.

Give one to a run by name: `CheckpointConfig(storage_factory="easyckpt_core.testing:slow_storage")`.
The variables below reach the keeper through its environment.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from easyckpt_core.run_identity import PRIVATE_FOLDER
from easyckpt_core.storage import LocalStorage

SLOW_SECONDS_VARIABLE = "EASYCKPT_TEST_SECONDS_PER_FILE"
FAULT_FILE_VARIABLE = "EASYCKPT_TEST_FAULT_FILE"


class SlowStorage(LocalStorage):
    """Takes a fixed time more for each file."""

    def write_file(self, path: str, source_fd: int, size_bytes: int) -> str:
        time.sleep(float(os.environ.get(SLOW_SECONDS_VARIABLE, "0.2")))
        return super().write_file(path, source_fd, size_bytes)


class FaultyStorage(LocalStorage):
    """Fails as a full disk does on files whose name contains the text in the fault file.

    The fault file lies outside the checkpoint directory; a test writes and empties it at run time.
    """

    def write_file(self, path: str, source_fd: int, size_bytes: int) -> str:
        fault_file = os.environ.get(FAULT_FILE_VARIABLE, "")
        text = ""
        if fault_file and os.path.exists(fault_file):
            with open(fault_file) as file:
                text = file.read().strip()
        if text and text in path:
            # Half of it first: a full disk leaves a torn file behind.
            super().write_file(path, source_fd, size_bytes // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root / path))
        return super().write_file(path, source_fd, size_bytes)


def slow_storage(directory: str) -> SlowStorage:
    """Factory for `storage_factory`."""
    return SlowStorage(directory)


def faulty_storage(directory: str) -> FaultyStorage:
    """Factory for `storage_factory`."""
    return FaultyStorage(directory)


def keeper_pids(folder: Path) -> list[int]:
    """Return the process ids of the keepers of runs below `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"easyckpt_core.keeper_process" in words and any(
                os.fsencode(folder) in word for word in words
            ):
                found.append(int(entry.name))
    return found


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the event log of a run."""
    path = folder / PRIVATE_FOLDER / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Poll until `condition` holds and return it; AssertionError when it never does."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds} s")
        time.sleep(0.01)
    return result
