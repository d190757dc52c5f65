"""Runs that are killed, and what the next one makes of what is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from easyckpt_core.testing import events, keeper_pids

KILLED = -signal.SIGKILL


def latest_event(output: Path) -> dict:
    return [event for event in events(output) if event["event"] == "latest"][-1]


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [5, 7, 9], ids=["mid-epoch", "end of epoch", "second epoch"])
def test_a_killed_run_resumes_from_memory_at_the_killed_step(train, plain, tmp_path, step):
    output = tmp_path / "run"
    assert train(output, kill_at=step).status == KILLED
    outcome = train(output, resume=True)
    found = latest_event(output)
    assert (found["tier"], found["step"]) == ("memory", step)
    lost = [event["event"] for event in events(output)].index("trainer_lost")
    committed = [e["step"] for e in events(output)[:lost] if e["event"] == "committed"]
    assert step not in committed
    assert outcome.first_step == step + 1
    assert outcome.losses == plain.outcome.losses
    assert outcome.digest == plain.outcome.digest
    assert outcome.lines_with(f"resuming from memory at step {step}")
    assert keeper_pids(tmp_path) == []
    assert not train.runtime_folder.exists() or not any(train.runtime_folder.iterdir())


def test_the_interval_from_the_environment_decides_which_steps_are_in_memory(
    train, plain, tmp_path, steps_in
):
    train.environment["EASYCKPT_SAVE_MEM_INTERVAL"] = "3"
    arguments = {"save_strategy": "no"}
    train(tmp_path / "run", kill_at=8, arguments=arguments)
    outcome = train(tmp_path / "run", resume=True, arguments=arguments)
    assert latest_event(tmp_path / "run")["tier"] == "memory"
    assert outcome.first_step == 7
    assert outcome.digest == plain.outcome.digest
    # The keeper wrote what was newest when the trainer died, and nothing asked for another.
    assert steps_in(tmp_path / "run") == [6]


@pytest.mark.parametrize("model", ["gpt2", "module"])
def test_tied_weights_and_plain_modules_resume_bit_for_bit(train, tmp_path, model):
    reference = train(tmp_path / "plain", wrapped=False, model=model)
    train(tmp_path / "run", kill_at=5, model=model)
    outcome = train(tmp_path / "run", resume=True, model=model)
    assert outcome.first_step == 6
    assert outcome.losses == reference.losses
    assert outcome.digest == reference.digest


def test_two_ranks_resume_bit_for_bit_after_one_kills_itself(train, tmp_path):
    arguments = {"per_device_train_batch_size": 2, "ddp_backend": "gloo"}
    reference = train.ranks(tmp_path / "plain", 2, wrapped=False, arguments=arguments)
    output = tmp_path / "run"
    options = train.options(output, resume=True, kill_at=5, kill_rank=1, arguments=arguments)
    script = Path(__file__).with_name("training_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", str(script), json.dumps(options)]
    environment = {
        **os.environ,
        **train.environment,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # torch 2.13 keeps one store for all attempts without a prefix: gloo may then read the
        # address of a process that is gone, and wait for it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with open(options["log"], "w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=240)
    outcome = train.outcome(options, done.returncode)
    found = latest_event(output)
    assert found["tier"] == "memory"
    # The other rank may not have sealed the last step when the launcher ends it.
    assert found["step"] in (4, 5)
    assert outcome.first_step == found["step"] + 1
    assert outcome.losses == reference.losses
    assert outcome.digest == reference.digest
    names = {path.name for path in (output / "checkpoint-10").iterdir()}
    native = {path.name for path in (tmp_path / "plain" / "checkpoint-10").iterdir()}
    assert names == native | {"easyckpt_manifest.json", "easyckpt_complete"}
    assert {"rng_state_0.pth", "rng_state_1.pth"} < native
    assert len(outcome.lines_with("EasyCkpt: resuming from memory")) == 1
    assert keeper_pids(tmp_path) == []


# -- storage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keeper_killed(shared_train):
    """A run whose keeper and trainer were both killed after step 7; storage has 2, 4 and 6."""
    output = shared_train.folder / "keeper-killed"
    arguments = {"save_steps": 2}
    assert shared_train(output, kill_at=7, kills_keeper=True, arguments=arguments).status == KILLED
    return output


@pytest.fixture
def left_over(keeper_killed, tmp_path):
    """A copy of that directory, to be damaged."""
    return shutil.copytree(keeper_killed, tmp_path / "run")


def test_without_a_keeper_the_newest_step_on_storage_is_resumed(train, plain, left_over, steps_in):
    assert steps_in(left_over) == [2, 4, 6]
    outcome = train(left_over, resume=True)
    assert latest_event(left_over)["tier"] == "storage"
    assert outcome.first_step == 7
    assert outcome.losses == plain.outcome.losses
    assert outcome.digest == plain.outcome.digest


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: cut(path / "model.safetensors"), "the manifest says"),
        (lambda path: (path / "optimizer.pt").unlink(), "optimizer.pt"),
        (lambda path: (path / "easyckpt_complete").unlink(), "no valid marker"),
    ],
    ids=["cut", "missing file", "no marker"],
)
def test_a_damaged_newest_step_is_skipped_and_told_once(train, plain, left_over, damage, reason):
    damage(left_over / "checkpoint-6")
    outcome = train(left_over, resume=True)
    assert outcome.first_step == 5
    assert outcome.losses == plain.outcome.losses
    assert outcome.digest == plain.outcome.digest
    assert len(outcome.lines_with("checkpoint-6", reason)) == 1


# -- to and from the plain Trainer -----------------------------------------------------------------


def test_the_plain_trainer_resumes_where_easyckpt_is_not_installed(train, plain, left_over):
    outcome = train(left_over, wrapped=False, resume=True, without_easyckpt=True)
    assert outcome.first_step == 7
    assert outcome.losses == plain.outcome.losses
    assert outcome.digest == plain.outcome.digest


@pytest.fixture(scope="module")
def plain_killed(shared_train):
    """A plain Trainer's run that was killed after step 7: steps 2, 4, 6 are on storage."""
    output = shared_train.folder / "plain-killed"
    shared_train(output, wrapped=False, kill_at=7, arguments={"save_steps": 2})
    return output


def test_a_plain_checkpoint_is_resumed(train, plain, plain_killed, tmp_path, steps_in):
    output = shutil.copytree(plain_killed, tmp_path / "run")
    outcome = train(output, resume=True)
    assert outcome.first_step == 7
    assert outcome.losses == plain.outcome.losses
    assert outcome.digest == plain.outcome.digest
    assert steps_in(output) == [2, 4, 6, 8, 10]


def test_a_torn_plain_checkpoint_is_skipped_and_told_once(train, plain, plain_killed, tmp_path):
    output = shutil.copytree(plain_killed, tmp_path / "run")
    cut(output / "checkpoint-6" / "model.safetensors")
    outcome = train(output, resume=True)
    assert outcome.first_step == 5
    assert outcome.digest == plain.outcome.digest
    assert len(outcome.lines_with("checkpoint-6", "model.safetensors", "not whole")) == 1


def test_a_given_path_is_resumed(train, plain, left_over):
    outcome = train(left_over, resume=str(left_over / "checkpoint-2"))
    assert outcome.first_step == 3
    assert outcome.losses == plain.outcome.losses
    assert outcome.digest == plain.outcome.digest


# -- from scratch ----------------------------------------------------------------------------------


def test_resume_without_any_checkpoint_trains_from_scratch(train, plain, tmp_path):
    outcome = train(tmp_path / "run", resume=True)
    assert outcome.first_step == 1
    assert outcome.digest == plain.outcome.digest
    assert len(outcome.lines_with("no checkpoint in", "from scratch")) == 1


@pytest.mark.parametrize("resume", [None, False])
def test_without_resume_nothing_of_the_earlier_run_is_used(
    train, plain, tmp_path, steps_in, resume
):
    output = tmp_path / "run"
    train(output, kill_at=5)
    outcome = train(output, resume=resume)
    assert outcome.first_step == 1
    assert outcome.losses == plain.outcome.losses
    assert "fresh_start" in [event["event"] for event in events(output)]
    manifests = {
        step: json.loads((output / f"checkpoint-{step}" / "easyckpt_manifest.json").read_text())
        for step in steps_in(output)
    }
    assert sorted(manifests) == [4, 5, 8, 10]
    # Step 5 is the earlier run's, and stays; step 4 was replaced.
    runs = {step: manifest["run"] for step, manifest in manifests.items()}
    assert runs[4] == runs[8] == runs[10] != runs[5]
