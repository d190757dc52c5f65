"""The Trainer's own checkpoint directory, file for file."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from easyckpt_core import FileContent, LayoutError, RawBytes, Safetensors, TorchZip, freeze
from easyckpt_hf._transformers import exportable_states, without_tied_weights


class TrainerLayout:
    """`checkpoint-<step>/` as `Trainer._save_checkpoint` writes it. The source is the Trainer.

    The Trainer loads these directories itself; nothing here reads them.
    """

    def __init__(self) -> None:
        self._fixed: dict[str, bytes] | None = None

    def directory_name(self, step: int) -> str:
        return f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def files(self, sources: Any, *, step: int, rank: int) -> dict[str, FileContent]:
        trainer = sources
        contents = _written_by_trainer(trainer)
        if rank == 0:
            contents["model.safetensors"] = FileContent(
                Safetensors({"format": "pt"}), _weights(trainer)
            )
            contents["optimizer.pt"] = FileContent(
                TorchZip(), freeze(trainer.optimizer.state_dict())
            )
            contents["scheduler.pt"] = FileContent(
                TorchZip(), freeze(trainer.lr_scheduler.state_dict())
            )
            contents["trainer_state.json"] = FileContent(RawBytes(), _trainer_state(trainer))
            if self._fixed is None:
                self._fixed = _fixed_files(trainer)
            for name, data in self._fixed.items():
                contents[name] = FileContent(RawBytes(), data)
        return contents


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    loose = [name for name, tensor in state.items() if not isinstance(tensor, torch.Tensor)]
    if loose:
        raise LayoutError(f"the model's state holds things that are no tensors: {loose[:5]}")
    return without_tied_weights(state, model)


def _written_by_trainer(trainer: Any) -> dict[str, FileContent]:
    """Let the Trainer write what is small and differs by device: random state and loss scaler."""
    with tempfile.TemporaryDirectory(prefix="easyckpt-hf-") as folder:
        trainer._save_rng_state(folder)
        trainer._save_scaler(folder)
        return _read_folder(folder)


def _trainer_state(trainer: Any) -> bytes:
    state = dataclasses.asdict(trainer.state)
    state["stateful_callbacks"] = exportable_states(trainer)
    return (json.dumps(state, indent=2, sort_keys=True) + "\n").encode()


def _fixed_files(trainer: Any) -> dict[str, bytes]:
    """Files that stay the same for the whole run: configuration, tokenizer, arguments.

    The Trainer writes them itself, of a model without weights.
    """
    with tempfile.TemporaryDirectory(prefix="easyckpt-hf-") as folder:
        trainer._save(folder, state_dict={})
        written = _read_folder(folder)
    written.pop("model.safetensors", None)
    return {name: content.tree for name, content in written.items()}


def _read_folder(folder: str) -> dict[str, FileContent]:
    return {
        path.relative_to(folder).as_posix(): FileContent(RawBytes(), path.read_bytes())
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
