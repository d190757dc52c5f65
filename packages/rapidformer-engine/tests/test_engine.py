"""compose, backward and step; gradients equal those of one big batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from rapidformer import EngineError, RapidformerEngine, RunConfig

PARITY = """
import sys, torch
from rapidformer import Finetuner, RapidformerEngine, RunConfig
micro, total, size, save = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
generator = torch.Generator().manual_seed(3)
inputs, targets = torch.randn(size, 6, generator=generator), torch.randn(size, generator=generator)
class Mine(Finetuner):
    def train_valid_test_datasets_provider(self):
        return [{"x": inputs[i], "y": targets[i]} for i in range(size)], None, None, None
    def model_optimizer_lr_scheduler_provider(self):
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return model.double(), None, None
    def run_forward_step(self, batch, model):
        return ((model(batch["x"].double())[:, 0] - batch["y"].double()) ** 2).mean()
    def run_compute_metrics(self, model, eval_dataloader):
        return {}
engine = RapidformerEngine(config=RunConfig(
    micro_batch_size=micro, global_batch_size=total, epochs=2, lr=1e-2, save=save, clip_grad=0.05))
Mine(engine=engine).train()
engine.close()
"""


def train(run_ranks, folder, *, ranks, micro, total, size):
    import json

    from safetensors.torch import load_file

    arguments = (str(micro), str(total), str(size), str(folder))
    run_ranks(PARITY, world_size=ranks, arguments=arguments)
    lines = (folder / "log" / "train.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    return losses, load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("micro", "total", "size"),
    [(2, 8, 24), (2, 8, 21), (2, 8, 17), (4, 8, 19), (3, 6, 13)],
)
def test_micro_batches_and_ranks_give_the_gradient_of_one_batch(
    run_ranks, tmp_path, micro, total, size
):
    alone = train(run_ranks, tmp_path / "a", ranks=1, micro=total, total=total, size=size)
    shared = train(run_ranks, tmp_path / "b", ranks=2, micro=micro, total=total, size=size)
    assert shared[0] == pytest.approx(alone[0], rel=1e-12)
    for name, weight in alone[1].items():
        torch.testing.assert_close(shared[1][name], weight, rtol=1e-9, atol=1e-12)


def model_and_data():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2), [(torch.randn(3), torch.tensor(1)) for _ in range(8)]


def test_compose_returns_three_for_the_short_form_and_five_for_the_long():
    engine = RapidformerEngine(config=RunConfig(lr_decay_style="constant"))
    model, data = model_and_data()
    assert len(engine.compose(model_obj=model)) == 3
    loader = DataLoader(data, batch_size=4, shuffle=True)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    composed = engine.compose(
        model=model,
        train_dataloader=loader,
        eval_dataloader=None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        lr_scheduler_fn=schedule,
    )
    assert len(composed) == 5
    assert isinstance(composed[1], torch.optim.SGD)
    assert isinstance(composed[2], torch.optim.lr_scheduler.StepLR)
    assert composed[2].optimizer is composed[1]
    assert sum(len(batch[0]) for batch in composed[3]) == 8
    assert composed[4] is None


def test_weight_decay_spares_vectors():
    engine = RapidformerEngine(config=RunConfig(weight_decay=0.1, lr_decay_style="constant"))
    _, optimizer, _ = engine.compose(
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    )
    groups = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert [p.ndim for p in groups[0.1]] == [2]
    assert [p.ndim for p in groups[0.0]] == [1, 1, 1]
    assert optimizer.defaults["fused"]


def test_step_waits_for_the_whole_global_batch():
    engine = RapidformerEngine(
        config=RunConfig(micro_batch_size=2, global_batch_size=4, lr_decay_style="constant")
    )
    model, optimizer, _ = engine.compose(torch.nn.Linear(3, 1))
    before = model.weight.detach().clone()
    engine.backward(model(torch.ones(2, 3)).mean())
    assert engine.step() is False
    assert torch.equal(model.weight, before)
    with pytest.raises(EngineError, match=r"call engine.step\(\) instead"):
        optimizer.step()
    engine.backward(model(torch.ones(2, 3)).mean())
    assert engine.step() is True
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_calls_out_of_order_are_refused():
    engine = RapidformerEngine(config=RunConfig(lr_decay_style="constant"))
    with pytest.raises(EngineError, match="compose"):
        engine.step()
    with pytest.raises(EngineError, match="one model"):
        engine.compose()


CUSTOM_LOOP = """
import torch
from rapidformer import RapidformerEngine, RunConfig
def train(use_engine):
    config = RunConfig(lr_decay_style="constant", micro_batch_size=4, lr=0.1)
    engine = RapidformerEngine(config=config)
    model, optimizer, scheduler = engine.compose(torch.nn.Linear(3, 1))
    for number in range(3):
        x = torch.full((4, 3), float(engine.rank + number))
        loss = ((model(x) - 1) ** 2).mean()
        if use_engine:
            engine.backward(loss); engine.step()
        else:
            loss.backward(); torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
    parts = [torch.empty(1, 3) for _ in range(2)]
    torch.distributed.all_gather(parts, engine.module.weight.detach())
    assert torch.equal(*parts), "ranks drifted apart"
    return engine, parts[0]
first, a = train(True)
second, b = train(False)
assert torch.equal(a, b)
first.close(); second.close()
"""


def test_a_plain_backward_after_compose_is_still_right_on_two_ranks(run_ranks):
    run_ranks(CUSTOM_LOOP)
