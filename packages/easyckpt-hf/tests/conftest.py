"""Fixtures: runs as processes of their own, and a private runtime folder for each test."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TRAINING_RUN = Path(__file__).with_name("training_run.py")
RUN_SECONDS = 240.0


@dataclass(frozen=True)
class Outcome:
    """What came of a run. A run that was killed has no losses and no digest."""

    status: int
    log: str
    losses: list[float] = field(default_factory=list)
    digest: str = ""
    first_step: int = -1

    def lines_with(self, *texts: str) -> list[str]:
        lines = self.log.splitlines()
        return [line for line in lines if all(text in line for text in texts)]


class RunServer:
    """Forks runs from a process that has imported transformers already."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINING_RUN), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, requests: list[dict[str, Any]]) -> list[int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(requests).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], RUN_SECONDS)
        if not ready:
            self.close()
            raise AssertionError(f"no end within {RUN_SECONDS:.0f} s: {requests}")
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(scope="session")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("PYTHONPATH", "")
        server = RunServer()
    yield server
    server.close()


class Train:
    """Run one training after the other below a folder; `environment` reaches all of them."""

    def __init__(self, server: RunServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.runtime_folder = folder / "rt"
        self.temporary_folder = folder / "tmp"
        self.temporary_folder.mkdir()
        self.environment = {
            "EASYCKPT_RUNTIME_DIR": str(self.runtime_folder),
            "TMPDIR": str(self.temporary_folder),
        }
        self.num_runs = 0

    def __call__(self, output: Path, **options: Any) -> Outcome:
        return self.ranks(output, 1, **options)

    def ranks(self, output: Path, num_ranks: int, **options: Any) -> Outcome:
        """Train with `num_ranks` processes and without a launcher."""
        options = self.options(output, **options)
        ranks = [{}] if num_ranks == 1 else rank_environments(num_ranks)
        requests = [
            options | {"environment": self.environment | options.get("environment", {}) | rank}
            for rank in ranks
        ]
        statuses = self.server.run(requests)
        return self.outcome(options, min(statuses) or max(statuses))

    def options(self, output: Path, **options: Any) -> dict[str, Any]:
        self.num_runs += 1
        log, result = (self.folder / f"{self.num_runs}.{kind}" for kind in ("log", "json"))
        return {"output_dir": str(output), "log": str(log), "result": str(result), **options}

    def outcome(self, options: dict[str, Any], status: int) -> Outcome:
        log, result = Path(options["log"]), Path(options["result"])
        text = log.read_text() if log.exists() else ""
        assert status in (0, -signal.SIGKILL), text
        if result.exists():
            return Outcome(status=status, log=text, **json.loads(result.read_text()))
        return Outcome(status=status, log=text)

    def close(self) -> None:
        kill_processes_of(self.folder)


def kill_processes_of(folder: Path) -> None:
    """End what a test started and left: its keepers and workers name its folder."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            names_it = os.fsencode(folder) in (entry / "cmdline").read_bytes()
            if names_it and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)


def rank_environments(num_ranks: int) -> list[dict[str, str]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    common = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


@pytest.fixture(autouse=True)
def own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what a test does in this process away from the user's keepers."""
    monkeypatch.setenv("EASYCKPT_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.delenv("EASYCKPT_SAVE_MEM_INTERVAL", raising=False)
    yield
    kill_processes_of(tmp_path)


@pytest.fixture
def train(run_server: RunServer, tmp_path: Path) -> Iterator[Train]:
    train = Train(run_server, tmp_path)
    yield train
    train.close()


@pytest.fixture(scope="session")
def shared_train(
    run_server: RunServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Train]:
    """Runs that several tests look at and none changes."""
    train = Train(run_server, tmp_path_factory.mktemp("shared"))
    yield train
    train.close()


@dataclass(frozen=True)
class Finished:
    """A run that came to its end undisturbed."""

    output: Path
    outcome: Outcome


@pytest.fixture(scope="session")
def plain(shared_train: Train) -> Finished:
    """The plain Trainer, where EasyCkpt cannot be imported: what every run should come to."""
    output = shared_train.folder / "plain"
    return Finished(output, shared_train(output, wrapped=False, without_easyckpt=True))


@pytest.fixture
def steps_in() -> Callable[[Path], list[int]]:
    """Return the steps that have a checkpoint directory."""

    def steps(output: Path) -> list[int]:
        return sorted(int(path.name.partition("-")[2]) for path in output.glob("checkpoint-*"))

    return steps


@pytest.fixture(scope="session")
def wrapped(shared_train: Train) -> Finished:
    """The same run with EasyCkpt."""
    output = shared_train.folder / "wrapped"
    return Finished(output, shared_train(output))


@pytest.fixture(scope="session")
def training_run() -> ModuleType:
    """The script of the runs as a module: its models, data and arguments."""
    spec = importlib.util.spec_from_file_location("easyckpt_hf_training_run", TRAINING_RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
