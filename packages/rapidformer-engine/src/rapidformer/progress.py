"""What a run shows while it trains: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


class ProgressReport:
    """Shows steps on rank 0 and nothing on others; every plain line also goes to `log_path`."""

    def __init__(
        self, *, is_shown: bool, log_interval: int, total_steps: int, log_path: Path
    ) -> None:
        self._is_shown = is_shown
        self._log_interval = log_interval
        self._total_steps = total_steps
        self._log_path = log_path
        self._live: Any = None
        self._task: Any = None
        self._first_step = 0
        self._started = time.monotonic()
        self._num_samples = 0

    def start(self, step: int) -> None:
        """Begin at `step`; speed is measured from here."""
        self._first_step, self._started, self._num_samples = step, time.monotonic(), 0
        if not self._is_shown or not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, Progress, TextColumn

        self._live = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
        )
        self._task = self._live.add_task("", total=self._total_steps, completed=step)
        self._live.start()

    def say(self, text: str) -> None:
        """Show a line of text."""
        if not self._is_shown:
            return
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("a") as file:
            file.write(text + "\n")
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def step(
        self, step: int, *, epoch: int, loss: float, lr: float, num_samples: int, saved: str
    ) -> None:
        """Show that `step` steps are done."""
        self._num_samples += num_samples
        seconds = max(time.monotonic() - self._started, 1e-9)
        speed = self._num_samples / seconds
        left = (self._total_steps - step) * seconds / max(step - self._first_step, 1)
        text = (
            f"epoch {epoch} loss {loss:.4f} lr {lr:.2e} {speed:.1f} samples/s "
            f"ETA {_clock(left)} checkpoint {saved}"
        )
        if self._live is not None:
            self._live.update(self._task, completed=step, description=text)
        elif step % self._log_interval == 0 or step == self._total_steps:
            self.say(f"step {step}/{self._total_steps} {text}")

    def samples_per_second(self) -> float:
        """Return the speed since start()."""
        return self._num_samples / max(time.monotonic() - self._started, 1e-9)

    def close(self) -> None:
        """Take the live line down. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
