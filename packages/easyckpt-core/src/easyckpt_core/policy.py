"""Which tiers a step goes to: a pure decision, the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

from easyckpt_core.config import CheckpointConfig


class SaveDecision(NamedTuple):
    """Tiers that are due at a step; a storage save always takes a snapshot of its own."""

    memory: bool
    storage: bool


def decide(step: int, config: CheckpointConfig) -> SaveDecision:
    """Return what is due after `step` completed steps."""
    storage = _is_due(step, config.save_storage_interval)
    return SaveDecision(memory=storage or _is_due(step, config.save_mem_interval), storage=storage)


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step > 0 and step % interval == 0
