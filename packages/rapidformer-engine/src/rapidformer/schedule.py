"""Learning rate over steps: warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rapidformer.config import RunConfig
from rapidformer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """The learning rate as a function of the number of steps already done."""

    highest: float
    lowest: float
    style: str
    warmup_steps: int
    decay_steps: int

    def at(self, step: int) -> float:
        """Return the rate of step `step`, counted from 0. The first step of a warm-up has 0."""
        if step < self.warmup_steps:
            return self.highest * step / self.warmup_steps
        if self.style == "constant":
            return self.highest
        if step >= self.decay_steps:
            return self.lowest
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        rest = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.lowest + (self.highest - self.lowest) * rest


def resolve_learning_rate(config: RunConfig, total_steps: int | None) -> LearningRate:
    """Return the learning rate of `config` in a run of `total_steps`.

    Raises:
        ConfigError: the number of steps is needed and unknown, or the warm-up does not fit in it.
    """
    decay_steps = config.lr_decay_iters or total_steps or config.train_iters
    warms_up_by_fraction = bool(config.lr_warmup_fraction)
    if decay_steps is None and (config.lr_decay_style != "constant" or warms_up_by_fraction):
        raise ConfigError(
            f"--lr-decay-style {config.lr_decay_style} needs the number of steps; give "
            "--train-iters, --lr-decay-iters, or an lr_scheduler_fn to compose()"
        )
    warmup = config.lr_warmup_iters or 0
    if config.lr_warmup_fraction is not None and decay_steps is not None:
        warmup = int(config.lr_warmup_fraction * decay_steps)
    if decay_steps is not None and warmup and warmup >= decay_steps:
        raise ConfigError(
            f"--lr-warmup-iters {warmup} does not fit into {decay_steps} steps; "
            f"nearest: --lr-warmup-iters {decay_steps - 1}"
        )
    return LearningRate(
        highest=config.lr,
        lowest=config.min_lr,
        style=config.lr_decay_style,
        warmup_steps=warmup,
        decay_steps=decay_steps or 0,
    )


def build_lr_scheduler(optimizer: Optimizer, rate: LearningRate) -> LambdaLR:
    """Return a scheduler that sets `rate` on all parameter groups of `optimizer`."""
    return LambdaLR(optimizer, lambda step: rate.at(step) / rate.highest)
