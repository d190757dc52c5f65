"""Collect a tensor from all ranks, without what only filled a batch up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rapidformer.errors import DataError


def gather_real(
    tensor: torch.Tensor, real_counts: Sequence[int] | None, *, world_size: int
) -> torch.Tensor:
    """Return the rows of `tensor` of all ranks, in rank order, on every rank.

    Collective: call on every rank. `real_counts` says how many leading rows of each rank count;
    None: all. A scalar counts once for each rank that has any sample.

    Raises:
        DataError: the tensors of the ranks differ in more than their number of rows; on all ranks.
    """
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach().contiguous()
    if tensor.ndim == 0 and real_counts is not None:
        real_counts = [min(1, count) for count in real_counts]
    if world_size == 1:
        return rows if real_counts is None else _real_rows([rows], real_counts)
    shapes: list[tuple[int, ...] | None] = [None] * world_size
    dist.all_gather_object(shapes, tuple(rows.shape))
    known = [shape for shape in shapes if shape is not None]
    if len({shape[1:] for shape in known}) != 1:
        raise DataError(
            f"gather() got tensors of shapes {known} from ranks 0 to {world_size - 1}; only the "
            "first dimension may differ. Pad the others to one length first"
        )
    longest = max(shape[0] for shape in known)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    parts = [part[: shape[0]] for part, shape in zip(parts, known, strict=True)]
    return torch.cat(parts) if real_counts is None else _real_rows(parts, real_counts)


def _real_rows(parts: list[torch.Tensor], real_counts: Sequence[int]) -> torch.Tensor:
    for rank, (part, count) in enumerate(zip(parts, real_counts, strict=True)):
        if part.shape[0] != max(count, 1):
            raise DataError(
                f"gather() got {part.shape[0]} rows from rank {rank} for a batch of "
                f"{max(count, 1)} samples; give a tensor with one row a sample"
            )
    return torch.cat([part[:count] for part, count in zip(parts, real_counts, strict=True)])
