"""Copies from a device; the parts that need one are marked."""

from __future__ import annotations

import pytest
import torch

from easyckpt_core import CheckpointConfig, Checkpointer
from easyckpt_core.staging import Copy, _chunks, copy_now, target_for

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_chunks_group_small_copies_and_split_large_ones():
    sources = [torch.arange(float(size)) for size in (1, 2, 3, 1000, 5)]
    copies = [Copy(str(i), source, torch.empty_like(source)) for i, source in enumerate(sources)]
    chunks = _chunks(copies, 400)
    assert all(sum(source.numel() * 4 for source, _ in chunk) <= 400 for chunk in chunks)
    for chunk in chunks:
        for source, target in chunk:
            target.copy_(source)
    assert all(torch.equal(copy.source, copy.target) for copy in copies)


def test_a_strided_tensor_is_copied_whole():
    source = torch.arange(12.0).reshape(3, 4).t()
    memory = bytearray(48)
    copy_now([Copy("t", source, target_for(source, memoryview(memory), 0))])
    assert torch.frombuffer(memory, dtype=torch.float32).reshape(4, 3).equal(source)


class Loop:
    """A little training loop on the device."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(512, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Linear(2048, 512)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.sources = {"model": self.model, "optimizer": self.optimizer}
        self.step()

    def step(self) -> None:
        self.model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *states]

    def copy(self) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for tensor in self.tensors()]


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_snapshot_is_the_state_at_the_call_whatever_training_does_next(run_folder, is_watched):
    loop = Loop()
    with Checkpointer(CheckpointConfig(directory=str(run_folder))) as checkpointer:
        if is_watched:
            checkpointer.watch(loop.optimizer)
        for step in range(1, 12):
            expected = loop.copy()
            checkpointer.save(step, loop.sources)
            loop.step()
            checkpointer._join()
            newest = checkpointer.latest()
            assert newest.step == step
            now = loop.copy()
            checkpointer.restore(newest, loop.sources)
            assert all(torch.equal(a, b) for a, b in zip(loop.copy(), expected, strict=True))
            assert not all(torch.equal(a, b) for a, b in zip(now, expected, strict=True))
            loop.step()


@needs_cuda
@pytest.mark.gpu
def test_tensors_that_change_in_the_forward_pass_are_found_and_named(run_folder, caplog):
    caplog.set_level("INFO")
    loop = Loop()
    with Checkpointer(CheckpointConfig(directory=str(run_folder))) as checkpointer:
        checkpointer.watch(loop.optimizer)
        for step in (1, 2, 3):
            checkpointer.save(step, loop.sources)
            loop.step()
        # running_mean, running_var and num_batches_tracked
        assert len(checkpointer._stager.restless) == 3
    assert "3 tensors change outside the optimizer" in caplog.text


@needs_cuda
@pytest.mark.gpu
def test_snapshots_take_no_device_memory(run_folder):
    loop = Loop()
    with Checkpointer(CheckpointConfig(directory=str(run_folder))) as checkpointer:
        checkpointer.watch(loop.optimizer)
        for step in range(1, 5):
            checkpointer.save(step, loop.sources)
            loop.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for step in range(5, 105):
            checkpointer.save(step, loop.sources)
            loop.step()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
