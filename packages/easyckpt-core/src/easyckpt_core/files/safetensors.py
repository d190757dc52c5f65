"""The safetensors format: an 8-byte length, a JSON header, then the tensors back to back.

Source of the format: the safetensors project's README, "Format". The order of tensors (by
alignment, then by name) and the header's padding with spaces are those of the reference
implementation, so the bytes are the same as `safetensors.torch.save`'s.
"""

from __future__ import annotations

import json
import struct

import torch

from easyckpt_core.errors import LayoutError
from easyckpt_core.files.plan import FilePlan, Hole, require_plain

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Rank of each type in the reference implementation, whose files are sorted by it, descending.
_DTYPE_ORDER = [
    "BOOL",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
]


class Safetensors:
    """The tree is a flat dict of names to tensors; no two may share memory."""

    def __init__(self, metadata: dict[str, str] | None = None) -> None:
        self.metadata = metadata

    def plan(self, tree: dict[str, torch.Tensor], previous: FilePlan | None) -> FilePlan:
        for name, tensor in tree.items():
            require_plain(name, tensor)
            if tensor.dtype not in _DTYPE_NAMES:
                raise LayoutError(f"{name}: safetensors has no type for {tensor.dtype}")
        _refuse_shared(tree)
        names = sorted(
            tree, key=lambda name: (-_DTYPE_ORDER.index(_DTYPE_NAMES[tree[name].dtype]), name)
        )
        header: dict[str, object] = {}
        if self.metadata:
            header["__metadata__"] = dict(sorted(self.metadata.items()))
        offsets, position = {}, 0
        for name in names:
            tensor = tree[name]
            size_bytes = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, position + size_bytes],
            }
            offsets[name] = position
            position += size_bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        holes = tuple(
            Hole(start + offsets[name], tree[name]) for name in names if tree[name].numel()
        )
        return FilePlan(start + position, ((0, struct.pack("<Q", len(text)) + text),), holes)


def _refuse_shared(tree: dict[str, torch.Tensor]) -> None:
    owners: dict[tuple[str, int], str] = {}
    for name, tensor in tree.items():
        if tensor.numel() == 0:
            continue
        key = (str(tensor.device), tensor.data_ptr())
        if key in owners:
            raise LayoutError(
                f"{owners[key]} and {name} share memory; safetensors stores each name on its own, "
                "so give only one of them"
            )
        owners[key] = name
