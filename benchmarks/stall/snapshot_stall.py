"""Seconds that one snapshot adds to training, on one GPU, beside torch.save and DCP's async_save.

    python benchmarks/stall/snapshot_stall.py --out result.json

The model has Llama's shape and 1.26 B parameters: fp32 weights, fused AdamW, bf16 autocast and
activation checkpointing, 15.1 GB of state. Steps with and without a snapshot alternate, the order
drawn at random, and every step ends with a synchronisation, so that work which a snapshot pushes
past its own step is seen by the following one: the figure is over pairs of steps. The restored
state is compared bit by bit with the state at the call.

Floor: reading 15.1 GB of device memory costs 3.5 ms at 4,300 GB/s; the copy itself takes
0.28 s at 54 GB/s (PCIe 5 x16) and hides behind a step of 0.4 s or more.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

from easyckpt_core import CheckpointConfig, Checkpointer, StepLayout


def main() -> None:
    args = _parse()
    torch.manual_seed(0)
    job = Job(args)
    folder = Path(tempfile.mkdtemp(prefix="easyckpt-bench-", dir=args.directory))
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "state_bytes": job.state_bytes(),
    }
    try:
        result |= measure_easyckpt(job, folder / "easyckpt", args)
        result |= measure_torch_save(job, folder)
        result |= measure_dcp_async(job, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result, indent=1))
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


class Job:
    """The training job that is measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = LlamaConfig(
            hidden_size=args.hidden,
            intermediate_size=int(args.hidden * 2.75),
            num_hidden_layers=args.layers,
            num_attention_heads=16,
            num_key_value_heads=16,
            vocab_size=32000,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).cuda()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        shape = (args.batch, args.sequence)
        self.tokens = torch.randint(0, 32000, shape, device="cuda")
        self.sources = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> float:
        """Train one step; return its loss (a small read, as a log line makes it)."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state_bytes(self) -> int:
        self.step()
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        states = [list(state.values()) for state in self.optimizer.state.values()]
        return [*self.model.parameters(), *(value for state in states for value in state)]


def timed_steps(job: Job, count: int, save: Any = None) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    if save is not None:
        save()
    for _ in range(count):
        job.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure_easyckpt(job: Job, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    config = CheckpointConfig(directory=str(directory), save_storage_interval=10**9)
    with Checkpointer(config, StepLayout()) as checkpointer:
        checkpointer.watch(job.optimizer)
        warm_seconds = []
        for step in range(1, 4):
            begun = time.perf_counter()
            checkpointer.save(step, job.sources)
            job.step()
            checkpointer.before_update()
            warm_seconds.append(time.perf_counter() - begun)
        memory_before = torch.cuda.max_memory_allocated()
        with_save, without, calls, copies = [], [], [], []
        order = [True, False] * args.pairs
        random.Random(0).shuffle(order)
        step = 10
        for saves in order:
            step += 1
            if not saves:
                without.append(timed_steps(job, 2))
                continue
            reports: list[Any] = []
            with_save.append(
                timed_steps(
                    job,
                    2,
                    lambda: reports.append(checkpointer.save(step, job.sources)),  # noqa: B023
                )
            )
            calls.append(reports[0].added_seconds)
            copies.append(reports[0].copy_seconds)
        every = every_step(job, checkpointer, step, args.every)
        check = check_bits(job, checkpointer, step + 2 * args.every + 1)
        persisted = measure_persist(job, checkpointer, directory)
        base = statistics.median(without)
        added = sorted(seconds - base for seconds in with_save)
        return {
            "step_seconds": base / 2,
            "first_saves_seconds": warm_seconds,
            "added_seconds_median": statistics.median(added),
            "added_seconds_p90": added[int(0.9 * len(added))],
            "added_seconds_max": added[-1],
            "noise_seconds_p90": sorted(without)[int(0.9 * len(without))] - base,
            "call_and_fence_seconds_median": statistics.median(calls),
            "copy_gb_per_second": job_bytes(job) / statistics.median(copies) / 1e9,
            "added_device_bytes": torch.cuda.max_memory_allocated() - memory_before,
            **every,
            **check,
            **persisted,
        }


def every_step(job: Job, checkpointer: Checkpointer, step: int, count: int) -> dict[str, Any]:
    plain = timed_steps(job, count)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for index in range(count):
        job.step()
        checkpointer.save(step + 1 + index, job.sources)
    checkpointer.before_update()
    torch.cuda.synchronize()
    return {"every_step_slowdown": (time.perf_counter() - begun) / plain - 1}


def check_bits(job: Job, checkpointer: Checkpointer, step: int) -> dict[str, Any]:
    before = [tensor.detach().cpu().clone() for tensor in job.tensors()]
    checkpointer.save(step, job.sources)
    job.step()
    job.step()
    checkpointer.save(step + 1, job.sources)
    job.step()
    torch.cuda.synchronize()
    checkpointer.before_update()
    checkpointer._join()
    with checkpointer.latest().open() as path:  # the second one: restored over the third state
        assert path.exists()
    checkpointer.save(step + 2, job.sources)
    expected = [tensor.detach().cpu().clone() for tensor in job.tensors()]
    job.step()
    checkpointer._join()
    begun = time.perf_counter()
    checkpointer.restore(checkpointer.latest(), job.sources)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    equal = all(
        torch.equal(tensor.cpu().view(torch.uint8), wanted.view(torch.uint8))
        for tensor, wanted in zip(job.tensors(), expected, strict=True)
        if tensor.dim()
    )
    moved = any(not torch.equal(a, b) for a, b in zip(before, expected, strict=True))
    return {"restored_equals_state": equal and moved, "restore_seconds": seconds}


def measure_persist(job: Job, checkpointer: Checkpointer, directory: Path) -> dict[str, Any]:
    checkpointer.save(10**6, job.sources, storage=True)
    checkpointer.before_update()
    beside = timed_steps(job, 8)
    checkpointer.close()
    log = (directory / ".easyckpt/events.jsonl").read_text()
    events = [json.loads(line) for line in log.splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "committed"]
    return {
        "persist_gb_per_second": job_bytes(job) / seconds[-1] / 1e9,
        "step_seconds_beside_persist": beside / 8,
    }


def measure_torch_save(job: Job, folder: Path) -> dict[str, Any]:
    base = timed_steps(job, 4)

    def save() -> None:
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        torch.save(state, folder / "plain.pt")

    added = timed_steps(job, 4, save) - base
    (folder / "plain.pt").unlink()
    return {"torch_save_added_seconds": added}


def measure_dcp_async(job: Job, folder: Path) -> dict[str, Any]:
    base = timed_steps(job, 30)
    pending = []

    def save() -> None:
        state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
        pending.append(dcp.async_save(state, checkpoint_id=str(folder / "dcp"), no_dist=True))

    added = timed_steps(job, 30, save) - base
    pending[0].result()
    return {"dcp_async_added_seconds": added}


def job_bytes(job: Job) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in job.tensors())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="snapshot_stall.json", help="result file (JSON)")
    parser.add_argument("--directory", default=None, help="where checkpoints go")
    parser.add_argument("--pairs", type=int, default=30, help="measurements with a snapshot")
    parser.add_argument("--every", type=int, default=40, help="steps with a snapshot at each")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    return parser.parse_args()


if __name__ == "__main__":
    main()
