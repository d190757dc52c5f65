"""Random state as tensors and numbers, so that it loads with `weights_only=True`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RngState:
    """The generators of this process: python, numpy, torch on the CPU and on each CUDA device."""

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss_next = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": {
                "version": version,
                "internal": torch.tensor(internal, dtype=torch.int64),
                "gauss_next": gauss_next,
            },
            "numpy": {
                "name": str(name),
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached_gaussian": float(cached),
            },
            "torch_cpu": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["torch_cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        python = state["python"]
        random.setstate(
            (python["version"], tuple(python["internal"].tolist()), python["gauss_next"])
        )
        numpy = state["numpy"]
        np.random.set_state(
            (
                numpy["name"],
                numpy["keys"].numpy().astype(np.uint32),
                numpy["position"],
                numpy["has_gauss"],
                numpy["cached_gaussian"],
            )
        )
        torch.set_rng_state(state["torch_cpu"].cpu())
        if "torch_cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([device.cpu() for device in state["torch_cuda"]])
