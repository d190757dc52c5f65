"""The names of transformers that are not part of its public interface, in one place.

Each is looked up, so that a version without it gives a clear error and not an ImportError deep in
a run.
"""

from __future__ import annotations

import importlib
from typing import Any

import transformers

from easyckpt_core import UnsupportedError


def without_tied_weights(state: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the state as `save_pretrained` writes it: one name for each set of tied weights."""
    module = importlib.import_module("transformers.modeling_utils")
    remove = getattr(module, "remove_tied_weights_from_state_dict", None)
    if remove is None:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no remove_tied_weights_from_state_dict; "
            "this version of easyckpt-hf supports 5.20.2 to 5.24"
        )
    result: dict[str, Any] = remove(state, model)
    return result


def rewrites_weights(model: Any) -> bool:
    """Whether `save_pretrained` would write other tensors than the model's state has."""
    return bool(getattr(model, "_weight_conversions", None)) or (
        getattr(model, "hf_quantizer", None) is not None
    )


def exportable_states(trainer: Any) -> dict[str, Any]:
    """Return the states of callbacks as `Trainer._save_checkpoint` records them."""
    exportable = importlib.import_module("transformers.trainer_callback").ExportableState
    states: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if not isinstance(callback, exportable):
            continue
        name = type(callback).__name__
        if name not in states:
            states[name] = callback.state()
        elif isinstance(states[name], list):
            states[name].append(callback.state())
        else:
            states[name] = [states[name], callback.state()]
    return states
