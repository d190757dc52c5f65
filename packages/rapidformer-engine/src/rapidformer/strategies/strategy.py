"""The seam: one way to spread training over devices."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Strategy(Protocol):
    """How a module is spread over ranks. A loss is a mean over the samples of the rank."""

    def wrap(self, module: nn.Module) -> nn.Module:
        """Called once by compose(), with the module on its device, before the optimizer is built.

        Collective: call on every rank. Afterwards all ranks hold the same weights.
        """
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Called to evaluate, save and export. Returns the module that was wrapped; no copy."""
        ...

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Called before a forward pass: whether its backward pass averages gradients over ranks."""
        ...

    def clip_gradients(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Called once a step after the last backward pass. Returns the norm before clipping."""
        ...
