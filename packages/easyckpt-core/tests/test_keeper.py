"""Who survives what: real trainers, real keepers, real SIGKILLs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from easyckpt_core import find_latest, live_processes
from easyckpt_core.testing import events, keeper_pids, wait_until


def run_trainer(*args: str, **environment: str) -> subprocess.Popen[str]:
    """Start tests/trainer.py, a small training loop, as a process of its own."""
    script = Path(__file__).parent / "trainer.py"
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process, expect=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == expect, err
    return [json.loads(line) for line in out.splitlines()], err


def follow(process, step):
    """Read a trainer's lines until it has done `step`; return its first line."""
    first = json.loads(process.stdout.readline())
    for line in process.stdout:
        if json.loads(line).get("step") == step:
            return first
    pytest.fail(process.stderr.read())


def undisturbed(tmp_path, steps):
    lines, _ = finish(run_trainer(str(tmp_path / "plain"), "--steps", str(steps)))
    return lines[-1]


def test_a_killed_trainer_resumes_from_memory_and_ends_as_if_nothing_happened(run_folder, tmp_path):
    expected = undisturbed(tmp_path, 12)
    finish(run_trainer(str(run_folder), "--steps", "12", "--die-at", "7"), -signal.SIGKILL)
    lines, _ = finish(run_trainer(str(run_folder), "--steps", "12"))
    assert lines[0]["resumed"] == {"step": 7, "tier": "memory"}
    assert lines[-1] == expected


def test_the_newest_snapshot_is_flushed_when_the_trainer_dies(run_folder):
    finish(run_trainer(str(run_folder), "--die-at", "7"), -signal.SIGKILL)
    wait_until(lambda: find_latest(run_folder))
    assert find_latest(run_folder).name == "step-7"


def test_an_exception_flushes_too_and_keeps_the_memory(run_folder):
    finish(run_trainer(str(run_folder), "--raise-at", "3"), 1)
    wait_until(lambda: find_latest(run_folder))
    lines, _ = finish(run_trainer(str(run_folder), "--steps", "4"))
    assert lines[0]["resumed"] == {"step": 3, "tier": "memory"}


def test_sigterm_to_the_trainer_flushes(run_folder):
    trainer = run_trainer(str(run_folder), "--hang-at", "4")
    follow(trainer, 4)
    trainer.terminate()
    finish(trainer, -signal.SIGTERM)
    assert wait_until(lambda: find_latest(run_folder)).name == "step-4"


def test_keeper_and_trainer_killed_resumes_from_storage(run_folder, tmp_path):
    expected = undisturbed(tmp_path, 12)
    trainer = run_trainer(str(run_folder), "--storage", "3", "--hang-at", "8", "--steps", "12")
    follow(trainer, 8)
    wait_until(lambda: (run_folder / "step-6").exists())
    for pid in keeper_pids(tmp_path):
        os.kill(pid, signal.SIGKILL)
    trainer.kill()
    finish(trainer, -signal.SIGKILL)
    lines, _ = finish(run_trainer(str(run_folder), "--steps", "12"))
    assert lines[0]["resumed"] == {"step": 6, "tier": "storage"}
    assert lines[-1] == expected


def test_a_killed_keeper_is_replaced_and_handed_the_memory(run_folder, tmp_path):
    trainer = run_trainer(str(run_folder), "--steps", "400", "--step-seconds", "0.01")
    follow(trainer, 5)
    (old,) = keeper_pids(tmp_path)
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: [pid for pid in keeper_pids(tmp_path) if pid != old])
    follow(trainer, 60)
    drain = threading.Thread(target=trainer.stdout.read)
    drain.start()
    trainer.kill()
    drain.join()
    trainer.communicate()
    lines, _ = finish(run_trainer(str(run_folder), "--steps", "400"))
    assert lines[0]["resumed"]["tier"] == "memory"
    assert lines[0]["resumed"]["step"] >= 59


def test_a_second_live_job_is_refused_and_the_first_is_named(run_folder):
    first = run_trainer(str(run_folder), "--hang-at", "2")
    pid = follow(first, 2)["pid"]
    assert [(live.rank, live.pid) for live in live_processes(run_folder)] == [(0, pid)]
    _, err = finish(run_trainer(str(run_folder)), 1)
    assert "RunInUseError" in err and f"rank 0 (pid {pid})" in err and f"kill {pid}" in err
    first.kill()
    first.communicate()
    assert live_processes(run_folder) == []


def test_a_copied_directory_does_not_reach_the_memory_of_its_original(run_folder, tmp_path):
    finish(run_trainer(str(run_folder), "--die-at", "5"), -signal.SIGKILL)
    wait_until(lambda: find_latest(run_folder))
    shutil.copytree(run_folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/step-5")
    lines, _ = finish(run_trainer(str(tmp_path / "copy"), "--steps", "2"))
    assert lines[0]["resumed"] is None


def test_a_declined_resume_discards_the_memory(run_folder):
    finish(run_trainer(str(run_folder), "--die-at", "5"), -signal.SIGKILL)
    finish(run_trainer(str(run_folder), "--fresh", "--die-at", "2"), -signal.SIGKILL)
    lines, _ = finish(run_trainer(str(run_folder), "--steps", "3"))
    assert lines[0]["resumed"] == {"step": 2, "tier": "memory"}


def test_the_keeper_ends_after_its_linger_time(run_folder, tmp_path, runtime_folder):
    finish(run_trainer(str(run_folder), "--die-at", "5", "--linger", "0.5"), -signal.SIGKILL)
    wait_until(lambda: not keeper_pids(tmp_path))
    assert find_latest(run_folder).name == "step-5"
    assert not runtime_folder.exists() or not os.listdir(runtime_folder)


def test_the_keeper_ends_when_its_directory_vanishes(run_folder, tmp_path):
    finish(run_trainer(str(run_folder), "--die-at", "5"), -signal.SIGKILL)
    wait_until(lambda: find_latest(run_folder))
    shutil.rmtree(run_folder)
    wait_until(lambda: not keeper_pids(tmp_path))
    assert not run_folder.exists()


def test_the_keeper_is_small_and_has_a_session_of_its_own(run_folder, tmp_path):
    trainer = run_trainer(str(run_folder), "--hang-at", "1")
    follow(trainer, 1)
    (pid,) = keeper_pids(tmp_path)
    assert os.getsid(pid) == pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps and "libcuda" not in maps
    trainer.kill()
    trainer.communicate()


def test_sigterm_to_the_keeper_flushes_and_ends_it(run_folder, tmp_path):
    finish(run_trainer(str(run_folder), "--die-at", "5"), -signal.SIGKILL)
    for pid in keeper_pids(tmp_path):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not keeper_pids(tmp_path))
    assert find_latest(run_folder).name == "step-5"


def test_a_kill_in_the_middle_of_a_persist_leaves_no_torn_step(run_folder, tmp_path):
    environment = {"EASYCKPT_TEST_SECONDS_PER_FILE": "0.5"}
    factory = ["--factory", "easyckpt_core.testing:slow_storage"]
    trainer = run_trainer(
        str(run_folder), "--storage", "2", "--hang-at", "4", *factory, **environment
    )
    follow(trainer, 4)
    wait_until(lambda: any((run_folder / ".easyckpt/staging").glob("*/*")))
    for pid in keeper_pids(tmp_path):
        os.kill(pid, signal.SIGKILL)
    trainer.kill()
    trainer.communicate()
    assert find_latest(run_folder) is None
    lines, _ = finish(run_trainer(str(run_folder), "--steps", "3", "--storage", "3"))
    assert lines[0]["resumed"] is None
    assert os.listdir(run_folder / ".easyckpt/staging") == []


def test_random_kills_never_lose_a_commit_or_more_than_a_step(run_folder, tmp_path):
    import random

    chance = random.Random(7)
    expected = undisturbed(tmp_path, 40)
    reached = 0
    for _ in range(6):
        trainer = run_trainer(str(run_folder), "--steps", "40", "--storage", "5", "--keep", "2")
        first = json.loads(trainer.stdout.readline())
        resumed = first["resumed"] or {"step": 0}
        assert resumed["step"] >= reached - 1
        for line in trainer.stdout:
            reached = json.loads(line).get("step", reached)
            if reached >= resumed["step"] + chance.randrange(1, 8):
                break
        trainer.kill()
        rest = [json.loads(line) for line in trainer.stdout.read().splitlines() if line[-1] == "}"]
        reached = max([reached, *(line.get("step", 0) for line in rest)])
        trainer.communicate()
    lines, _ = finish(run_trainer(str(run_folder), "--steps", "40", "--storage", "5"))
    assert lines[-1] == expected
    assert not [event for event in events(run_folder) if event["event"] == "damaged"]


TWO_RANKS = """
import os, signal, sys, torch, json
import torch.distributed as dist
from easyckpt_core import CheckpointConfig, Checkpointer, PerRank, RngState
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with Checkpointer(CheckpointConfig(directory=sys.argv[1])) as checkpointer:
    sources = {"model": model, "rng": PerRank(RngState())}
    start = checkpointer.resume(sources)
    with open(f"{sys.argv[2]}/rank{rank}-{start}.json", "w") as file:
        json.dump({"rank": rank, "start": start, "draw": torch.rand(1).item()}, file)
    for step in range(start + 1, 9):
        dist.all_reduce(torch.ones(1))
        if first and rank == 1 and step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(step, sources)
dist.destroy_process_group()
"""


def test_ranks_agree_on_the_newest_step_that_all_of_them_hold(run_folder, tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1"),
            *(str(script), str(run_folder), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
        # torch 2.13 keeps one store for all attempts without a prefix: gloo may then read the
        # address of a process that is gone, and wait for it.
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    lines = [json.loads(path.read_text()) for path in tmp_path.glob("rank*.json")]
    starts = sorted((line["rank"], line["start"]) for line in lines)
    assert starts == [(0, 0), (0, 5), (1, 0), (1, 5)]
    draws = {(line["rank"], line["start"]): line["draw"] for line in lines}
    assert draws[0, 5] != draws[1, 5]
    wait_until(lambda: not keeper_pids(tmp_path))
