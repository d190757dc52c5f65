"""Which files a step consists of: the seam between what is saved and how it is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import load_model

from easyckpt_core.errors import LayoutError, RestoreError
from easyckpt_core.files import FileContent, RawBytes, Safetensors, TorchZip, freeze


class Layout(Protocol):
    """Names the files of a step and says what is in them. One instance serves a whole run."""

    def directory_name(self, step: int) -> str:
        """Return the directory of a step, relative to the checkpoint directory."""
        ...

    def files(self, sources: Any, *, step: int, rank: int) -> dict[str, FileContent]:
        """Return this rank's files. Called on the training thread at each save: freeze, don't copy.

        Names are unique over all ranks. The caller may change containers afterwards, and tensors
        after the fence.
        """
        ...


@runtime_checkable
class LoadingLayout(Layout, Protocol):
    """A layout that can also load, where no framework does it."""

    def load(self, directory: Path, sources: Any, *, rank: int) -> None:
        """Load a step into `sources` in place. Nothing loaded may alias the files' memory."""
        ...


class PerRank:
    """Marks a source of which every rank has its own: random state, data position of a worker."""

    def __init__(self, source: Any) -> None:
        self.source = source


class StepLayout:
    """`step-<n>/` with one file a source, each loadable with torch and safetensors alone.

    A module becomes `<name>.safetensors`, an optimizer `<name>.pt`, another object with
    `state_dict` `<name>.json` when its state is plain JSON, else `<name>.pt`; a `PerRank` source
    becomes `<name>_rank<r>` of these.
    Sources that are not `PerRank` are the same on every rank, and rank 0 writes them.
    """

    def directory_name(self, step: int) -> str:
        return f"step-{step}"

    def files(self, sources: Mapping[str, Any], *, step: int, rank: int) -> dict[str, FileContent]:
        contents: dict[str, FileContent] = {}
        for name, source in sources.items():
            if isinstance(source, PerRank):
                contents.update(_content(f"{name}_rank{rank}", source.source))
            elif rank == 0:
                contents.update(_content(name, source))
        return contents

    def load(self, directory: Path, sources: Mapping[str, Any], *, rank: int) -> None:
        for name, source in sources.items():
            if isinstance(source, PerRank):
                _load(directory, f"{name}_rank{rank}", source.source)
            else:
                _load(directory, name, source)


def _content(name: str, source: Any) -> dict[str, FileContent]:
    if isinstance(source, torch.nn.Module):
        tensors, metadata = unique_tensors(source.state_dict())
        return {f"{name}.safetensors": FileContent(Safetensors(metadata), tensors)}
    if not hasattr(source, "state_dict") or not hasattr(source, "load_state_dict"):
        raise LayoutError(
            f"source {name!r} is a {type(source).__name__}; allowed are modules and objects with "
            "state_dict() and load_state_dict()"
        )
    state = source.state_dict()
    if _is_json(state) and not isinstance(source, torch.optim.Optimizer):
        text = json.dumps(state, indent=1).encode()
        return {f"{name}.json": FileContent(RawBytes(), text)}
    return {f"{name}.pt": FileContent(TorchZip(), freeze(state))}


def unique_tensors(
    state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Keep one name of each set of tied tensors; the metadata maps the others to it.

    That is how `safetensors.torch.save_model` does it, and `load_model` reads it.
    """
    kept: dict[str, torch.Tensor] = {}
    metadata = {"format": "pt"}
    names: dict[tuple[Any, ...], str] = {}
    for name in sorted(state):
        tensor = state[name]
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"{name} of the module's state is not a tensor; use another source")
        key = (str(tensor.device), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and not tensor.is_meta and key in names:
            metadata[name] = names[key]
            continue
        names[key] = name
        kept[name] = tensor.detach()
    return kept, metadata


def _load(directory: Path, name: str, source: Any) -> None:
    if isinstance(source, torch.nn.Module):
        load_model(source, str(_require(directory, f"{name}.safetensors")))
        return
    plain = directory / f"{name}.json"
    if plain.exists():
        source.load_state_dict(json.loads(plain.read_text()))
        return
    path = _require(directory, f"{name}.pt")
    source.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


def _require(directory: Path, file_name: str) -> Path:
    path = directory / file_name
    if not path.exists():
        present = ", ".join(sorted(entry.name for entry in directory.iterdir()))
        raise RestoreError(
            f"{file_name} is not in the checkpoint; it holds {present}. Was it saved with other "
            "sources or another number of ranks?"
        )
    return path


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(_is_json(entry) for entry in value)
    return value is None or type(value) in (bool, int, float, str)
