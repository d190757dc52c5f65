"""What a file will look like before its tensors are there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from easyckpt_core.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Hole:
    """A place in a file where a tensor's bytes belong."""

    offset_bytes: int
    source: torch.Tensor
    """Any shape and dtype, on any device; its row-major bytes go to the hole."""

    @property
    def size_bytes(self) -> int:
        return self.source.numel() * self.source.element_size()


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file of `size_bytes`: literal segments, holes for tensors, zeros in between."""

    size_bytes: int
    segments: tuple[tuple[int, bytes], ...]
    """(offset in bytes, content)."""
    holes: tuple[Hole, ...] = ()
    reserved_bytes: int = 0
    """Room kept for the part that may grow, so that the next save has the same offsets."""


class FileFormat(Protocol):
    """Turns a frozen tree into a FilePlan; knows nothing about memory, devices or storage."""

    def plan(self, tree: Any, previous: FilePlan | None) -> FilePlan:
        """Lay out `tree`. Called once a save, on any thread; tensors are not read.

        `previous` is the plan of the same file at the save before: a format keeps offsets and size
        where it can. Raises LayoutError for what the format cannot hold.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file of a snapshot: its format and the tree that goes into it."""

    format: FileFormat
    tree: Any


def freeze(tree: Any) -> Any:
    """Copy the containers of a tree and keep its tensors, so that later changes do not show.

    Tensors stay references: their values are protected by the fence, not by this copy.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        frozen = copy.copy(tree)
        for key, value in tree.items():
            frozen[key] = freeze(value)
        return frozen
    if type(tree) in (list, tuple):
        return type(tree)(freeze(value) for value in tree)
    if tree is None or isinstance(tree, (bool, int, float, str, bytes)):
        return tree
    return copy.deepcopy(tree)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the dicts, lists and tuples of a tree, depth first."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that have no bytes of their own to copy.

    Raises:
        LayoutError: meta, sparse, quantised or nested tensors.
    """
    kind = None
    if tensor.is_meta:
        kind = "a meta tensor (it has no data yet; materialise the model first)"
    elif tensor.layout != torch.strided:
        kind = f"a {tensor.layout} tensor (call .to_dense())"
    elif tensor.is_quantized:
        kind = "a quantised tensor (call .dequantize() or save its int_repr())"
    elif tensor.is_nested:
        kind = "a nested tensor (call .unbind())"
    if kind is not None:
        raise LayoutError(f"{name} is {kind}; only dense tensors with data can be checkpointed")
