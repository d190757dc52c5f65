"""A full copy of the module on every rank, gradients averaged by PyTorch's DDP."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DdpStrategy:
    """Data parallelism with `torch.nn.parallel.DistributedDataParallel`.

    A resumed run repeats an undisturbed one bit for bit at one and two ranks. DDP sets its
    buckets anew after its first step, so at three ranks and more the first step after a resume may
    add the same gradients in another order, which can differ in the last bit.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def wrap(self, module: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        ids = [self._device.index] if self._device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def set_gradient_sync(self, model: nn.Module, enabled: bool) -> None:
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = enabled

    def clip_gradients(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
