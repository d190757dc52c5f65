"""The command, end to end, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

WAIT_SECONDS = 120


def finish(process, code=0):
    out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
    return out, err


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(folder):
    return [(line["step"], line["loss"]) for line in lines(folder / "log" / "train.jsonl")]


def worker_ids(process):
    """Return the training processes that `process` has started, in order of rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [word for word in environment if word.startswith(b"RANK=")]
        if ranks:
            found[int(ranks[0][5:])] = child
    return [found[rank] for rank in sorted(found)]


def wait_for_step(process, folder, step):
    deadline = time.monotonic() + WAIT_SECONDS
    path = folder / "log" / "train.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run-folder"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_learns_and_exports_a_model_that_loads(flags, start, folder, num_processes):
    out, _ = finish(start(flags(nproc_per_node=num_processes, epochs=4)))
    assert "step 44/44" in out and "resumed" not in out
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["final"]["num_samples"] == 21
    assert metrics["final"]["majority_accuracy"] == pytest.approx(11 / 21)
    assert metrics["final"]["accuracy"] > 0.9
    assert [record["step"] for record in metrics["history"]] == [11, 22, 33, 44]
    assert [step for step, _ in losses(folder)] == list(range(1, 45))

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert model.config.id2label == {0: "negative", 1: "positive"}
    logits = model(**tokenizer("the film was great", return_tensors="pt")).logits
    assert model.config.id2label[int(logits.argmax())] == "positive"

    again, _ = finish(start(flags(nproc_per_node=num_processes, epochs=4)))
    assert "it has finished" in again and '"accuracy"' in again


def test_a_killed_run_goes_on_from_memory_bit_for_bit(flags, start, tmp_path):
    saving = {"nproc_per_node": 2, "save_mem_interval": 1, "save_storage_interval": 100}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(flags(save=whole, **saving, epochs=6)))
    process = start(flags(save=killed, **saving, epochs=6))
    wait_for_step(process, killed, 5)
    os.kill(worker_ids(process)[1], signal.SIGKILL)
    out, err = finish(process)
    assert "rank 1: ended by SIGKILL" in err and "restart 1 of 3" in err
    resumed = lines(killed / "log" / "resume.jsonl")
    assert [record["tier"] for record in resumed] == ["memory"]
    assert resumed[0]["step"] >= 4
    assert f"resumed from memory at step {resumed[0]['step']}" in out
    assert losses(killed) == losses(whole)
    hashes = [
        json.loads((folder / "metrics.json").read_text())["model_sha256"]
        for folder in (whole, killed)
    ]
    assert hashes[0] == hashes[1]


def test_a_run_that_was_terminated_goes_on_when_started_again(flags, start, tmp_path):
    saving = {"save_mem_interval": 1, "save_storage_interval": 100, "epochs": 6}
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    finish(start(flags(save=whole, **saving)))
    process = start(flags(save=ended, **saving))
    wait_for_step(process, ended, 5)
    workers = worker_ids(process)
    process.terminate()
    _, err = finish(process, 128 + signal.SIGTERM)
    assert err == "rapidformer: ended by SIGTERM\n"
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    finish(start(flags(save=ended, **saving, resume="must")))
    assert lines(ended / "log" / "resume.jsonl")[0]["step"] >= 4
    assert losses(ended) == losses(whole)


def test_a_folder_in_use_is_refused_with_the_processes(flags, start, folder):
    saving = {"save_mem_interval": 1, "epochs": 60}
    process = start(flags(**saving))
    wait_for_step(process, folder, 2)
    _, err = finish(start(flags(**saving)), 2)
    assert "is in use by live processes" in err
    assert str(worker_ids(process)[0]) in err


SCRIPT = """
import sys, torch
from rapidformer import Finetuner, RapidformerEngine, get_args
class Mine(Finetuner):
    def train_valid_test_datasets_provider(self):
        data = [{"x": torch.tensor([float(i)]), "y": torch.tensor(float(i))} for i in range(16)]
        return data, None, None, None
    def model_optimizer_lr_scheduler_provider(self):
        return torch.nn.Linear(1, 1), None, None
    def run_forward_step(self, batch, model):
        if get_args().how == "raises" and self.engine.rank == 1:
            raise LookupError("the shelf is empty")
        loss = ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()
        return loss.item() if get_args().how == "returns" else loss
    def run_compute_metrics(self, model, eval_dataloader):
        return {}
def provider(parser):
    parser.add_argument("--how", default="works")
    return parser
engine = RapidformerEngine(extra_args_provider=provider)
Mine(engine=engine).train()
engine.close()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_with_flags_of_its_own_is_trained(flags, start, script, folder):
    words = flags(user_script=script, data_path=None, nproc_per_node=2, how="works")
    finish(start(words))
    assert [step for step, _ in losses(folder)] == [1, 2, 3, 4]


def test_the_first_failing_rank_is_shown_once(flags, start, script):
    words = flags(user_script=script, how="raises", nproc_per_node=2, max_restarts=0)
    out, err = finish(start(words), 1)
    assert err.count("Traceback") == 1
    assert err.count("LookupError: the shelf is empty") == 2
    assert "rank 1: LookupError" in err
    assert "Traceback" not in out


def test_what_would_fail_again_is_not_tried_again(flags, start, script):
    _, err = finish(start(flags(user_script=script, how="returns", nproc_per_node=2)), 1)
    assert "returned float; return the loss, a tensor" in err
    assert "restart" not in err and "Traceback" not in err


def test_an_unknown_flag_beside_a_script_is_refused(flags, start, script):
    _, err = finish(start(flags(user_script=script, hwo="works")), 2)
    assert "Did you mean --how?" in err and "Traceback" not in err
