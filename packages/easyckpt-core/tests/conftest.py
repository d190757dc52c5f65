"""Fixtures: a private runtime folder for each test, so that leftovers show."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyckpt_core.testing import keeper_pids


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a node-local folder of its own and end every keeper in it afterwards."""
    folder = tmp_path / "rt"
    monkeypatch.setenv("EASYCKPT_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield folder
    for pid in keeper_pids(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"
