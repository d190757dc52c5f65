"""Finetuner: one clear error for each way to fill it in wrong."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from rapidformer import (
    Finetuner,
    MissingExtraError,
    ProviderError,
    RapidformerEngine,
    ResumeError,
    RunConfig,
    TrainingError,
)


class Linear(Finetuner):
    """Fits a line; parts of it are replaced in the tests."""

    def train_valid_test_datasets_provider(self):
        data = [{"x": torch.tensor([float(i)]), "y": torch.tensor(float(i))} for i in range(10)]
        return data, data[:3], None, None

    def model_optimizer_lr_scheduler_provider(self):
        return torch.nn.Linear(1, 1), None, None

    def run_forward_step(self, batch, model):
        return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).mean()

    def run_compute_metrics(self, model, eval_dataloader):
        assert isinstance(model, list) and not model[0].training
        num_samples = sum(len(self.gather(batch["y"])) for batch in eval_dataloader)
        return {"num_samples": num_samples, "noise": float(torch.rand(()))}


def make(kind, tmp_path, **settings):
    settings = {"epochs": 2, "micro_batch_size": 4, "save": str(tmp_path / "run"), **settings}
    return kind(engine=RapidformerEngine(config=RunConfig(**settings)))


def test_a_filled_in_finetuner_trains_evaluates_and_exports(tmp_path):
    metrics = make(Linear, tmp_path).train()
    assert metrics["steps"] == 6
    assert [record["step"] for record in metrics["history"]] == [3, 6]
    assert metrics["final"]["num_samples"] == 3
    recorded = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert recorded["model_sha256"] == metrics["model_sha256"] != ""
    lines = (tmp_path / "run" / "log" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_methods_that_are_missing_are_named(tmp_path):
    with pytest.raises(ProviderError, match="run_forward_step, run_compute_metrics"):

        class Half(Finetuner):
            train_valid_test_datasets_provider = Linear.train_valid_test_datasets_provider
            model_optimizer_lr_scheduler_provider = Linear.model_optimizer_lr_scheduler_provider

        make(Half, tmp_path).train()


@pytest.mark.parametrize(
    ("method", "returned", "words"),
    [
        ("train_valid_test_datasets_provider", ([1], None, None), "returned 3 values; return 4"),
        ("train_valid_test_datasets_provider", None, "returned NoneType; return 4"),
        ("train_valid_test_datasets_provider", (iter([]), None, None, None), "a length"),
        ("model_optimizer_lr_scheduler_provider", torch.nn.Linear(1, 1), "return 3"),
        ("model_optimizer_lr_scheduler_provider", ("bert", None, None), "str as model"),
        ("run_forward_step", 1.0, "returned float"),
        ("run_forward_step", torch.zeros(4), r"shape \(4,\)"),
        ("run_forward_step", torch.zeros(()), "without a gradient"),
        ("run_compute_metrics", 0.5, "return a dict"),
    ],
)
def test_a_wrong_return_value_is_refused(tmp_path, method, returned, words):
    kind = type("Wrong", (Linear,), {method: lambda self, *_: returned})
    with pytest.raises(ProviderError, match=words):
        make(kind, tmp_path).train()


def test_a_loss_function_may_be_returned_with_its_output(tmp_path):
    class Megatron(Linear):
        def run_forward_step(self, batch, model):
            def loss_func(output):
                return ((output - batch["y"]) ** 2).mean(), {"mse": 0.0}

            return model(batch["x"])[:, 0], loss_func

    plain, paired = make(Linear, tmp_path / "a").train(), make(Megatron, tmp_path / "b").train()
    assert plain["model_sha256"] == paired["model_sha256"]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    class Broken(Linear):
        def run_forward_step(self, batch, model):
            return model(batch["x"]).mean() * float("nan")

    with pytest.raises(TrainingError, match="the loss of step 1 is nan"):
        make(Broken, tmp_path).train()


def test_an_interval_without_the_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "easyckpt_core", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rapidformer-engine\[easyckpt\]'"):
        make(Linear, tmp_path, save_mem_interval=1).train()


def test_a_finished_run_is_told_and_another_configuration_refused(tmp_path):
    first = make(Linear, tmp_path).train()
    assert make(Linear, tmp_path, log_interval=3).train()["model_sha256"] == first["model_sha256"]
    with pytest.raises(ResumeError, match=r"--lr: recorded 5e-05, now 0.1"):
        make(Linear, tmp_path, lr=0.1).train()


def test_must_needs_a_run_and_never_needs_an_unused_folder(tmp_path):
    with pytest.raises(ResumeError, match="--resume must"):
        make(Linear, tmp_path, resume="must").train()
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    with pytest.raises(ResumeError, match="nothing is deleted for you"):
        make(Linear, tmp_path, resume="never").train()
    assert folder.is_dir()


STOPS = """
import sys, torch
from rapidformer import Finetuner, RapidformerEngine, RunConfig
class Dropout(Finetuner):
    calls = 0
    def train_valid_test_datasets_provider(self):
        data = [{"x": torch.tensor([float(i)]), "y": torch.tensor(float(i))} for i in range(10)]
        return data, None, None, None
    def model_optimizer_lr_scheduler_provider(self):
        return torch.nn.Linear(1, 1), None, None
    def run_forward_step(self, batch, model):
        self.calls += 1
        if sys.argv[2] == "stops" and self.calls == 5:
            raise RuntimeError("power is out")
        predicted = model(torch.nn.functional.dropout(batch["x"], 0.3))
        return ((predicted[:, 0] - batch["y"]) ** 2).mean()
    def run_compute_metrics(self, model, eval_dataloader):
        return {}
engine = RapidformerEngine(config=RunConfig(
    epochs=2, micro_batch_size=4, lr=0.1, save=sys.argv[1], save_mem_interval=1,
    save_storage_interval=int(sys.argv[3])))
try:
    Dropout(engine=engine).train()
except RuntimeError as err:
    assert str(err) == "power is out"
"""


@pytest.mark.parametrize("storage_interval", [2, 100])
def test_a_run_that_stops_half_way_goes_on_bit_for_bit(
    run_ranks, tmp_path, needs_easyckpt, storage_interval
):
    interval = str(storage_interval)
    for folder, how in (("whole", "whole"), ("parts", "stops"), ("parts", "goes on")):
        run_ranks(STOPS, world_size=1, arguments=(str(tmp_path / folder), how, interval))
    losses, hashes = [], []
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        lines = (folder / "log" / "train.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
        hashes.append(json.loads((folder / "metrics.json").read_text())["model_sha256"])
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert hashes[0] == hashes[1] != ""
    resumed = (tmp_path / "parts" / "log" / "resume.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in resumed] == [4]
