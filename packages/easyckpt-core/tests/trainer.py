"""A small training loop under EasyCkpt, run by the tests as a real process.

It prints one JSON line for what it resumed and one for each step, so that a test can follow and
kill it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time

import torch

from easyckpt_core import CheckpointConfig, Checkpointer, PerRank, RngState


class Progress:
    """Plain numbers as a source."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.losses = list(state["losses"])


def digest(model: torch.nn.Module) -> str:
    data = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--storage", type=int, default=None)
    parser.add_argument("--keep", type=int, default=None)
    parser.add_argument("--die-at", type=int, default=-1, help="SIGKILL itself after this step")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--hang-at", type=int, default=-1, help="wait for ever after this step")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--factory", default=None)
    parser.add_argument("--when-busy", default="skip")
    parser.add_argument("--linger", type=float, default=60.0)
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(64)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    progress = Progress()
    sources = {
        "model": model,
        "optimizer": optimizer,
        "rng": PerRank(RngState()),
        "progress": progress,
    }
    config = CheckpointConfig(
        directory=args.directory,
        save_storage_interval=args.storage,
        max_checkpoints=args.keep,
        storage_factory=args.factory,
        when_storage_busy=args.when_busy,
        linger_seconds=args.linger,
    )
    with Checkpointer(config) as checkpointer:
        if args.fresh:
            checkpointer.start_fresh()
        snapshot = None if args.fresh else checkpointer.latest()
        if snapshot is not None:
            checkpointer.restore(snapshot, sources)
        found = {"step": snapshot.step, "tier": snapshot.tier} if snapshot else None
        print(json.dumps({"resumed": found, "pid": os.getpid()}), flush=True)
        for step in range(snapshot.step + 1 if snapshot else 1, args.steps + 1):
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            progress.losses.append(loss.item())
            report = checkpointer.maybe_save(step, sources)
            assert report is not None
            line = {"step": step, "loss": loss.item(), "skipped": report.is_skipped}
            print(json.dumps(line), flush=True)
            if step == args.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == args.raise_at:
                raise RuntimeError("planned")
            if step == args.hang_at:
                signal.pause()
            time.sleep(args.step_seconds)
    print(json.dumps({"digest": digest(model), "losses": progress.losses}), flush=True)


if __name__ == "__main__":
    main()
