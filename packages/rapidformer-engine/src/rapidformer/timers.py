"""Named stopwatches, called the way Megatron-LM's are."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from rapidformer.errors import EngineError


class Timers:
    """Stopwatches by name: `timers("forward").start()`, `timers("forward").stop()`."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the stopwatch `name`. `log_level` is accepted for Megatron's call form."""
        return self._timers.setdefault(name, Timer(name))

    def elapsed(self) -> dict[str, float]:
        """Return the seconds of every stopwatch since it was last reset."""
        return {name: timer.elapsed(reset=False) for name, timer in self._timers.items()}


class Timer:
    """One stopwatch; it counts device work too, by waiting for CUDA at start and stop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seconds = 0.0
        self._started: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start counting. Collective if `barrier`: call on every rank."""
        if self._started is not None:
            raise EngineError(f"timer {self.name!r} was started twice; stop it first")
        self._started = _now(barrier)

    def stop(self, barrier: bool = False) -> None:
        """Stop counting. Collective if `barrier`: call on every rank."""
        if self._started is None:
            raise EngineError(f"timer {self.name!r} was stopped without a start")
        self._seconds += _now(barrier) - self._started
        self._started = None

    def reset(self) -> None:
        """Set the counted seconds to 0 and stop."""
        self._seconds, self._started = 0.0, None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the counted seconds, including those of a running stopwatch."""
        now = _now(barrier)
        running = 0.0 if self._started is None else now - self._started
        total = self._seconds + running
        if reset:
            self._seconds = 0.0
            self._started = None if self._started is None else now
        return total


def _now(barrier: bool) -> float:
    if barrier and dist.is_available() and dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
