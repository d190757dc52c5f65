"""The optimizer that the engine builds: AdamW, fused, with weight decay where it belongs."""

from __future__ import annotations

import torch
from torch import nn

from rapidformer.config import RunConfig


def build_optimizer(module: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of `module`.

    The fused kernel is used where every parameter is a floating point tensor on CPU or CUDA; both
    have one in every torch version that is allowed here.
    """
    decayed, plain = split_by_decay(module)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    parameters = decayed + plain
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters),
    )


def split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable parameters (with, without) weight decay, each shared one once.

    Vectors and scalars (biases, scales of LayerNorm and RMSNorm) are not decayed.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 else plain).append(parameter)
    return decayed, plain
