"""One process: the module as it is."""

from __future__ import annotations

import torch
from torch import nn


class SingleStrategy:
    """Training in one process."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        """Nothing to do: there is no other rank."""

    def clip_gradients(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
