"""Batch arithmetic: how a global batch is cut into micro batches over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rapidformer.config import RunConfig
from rapidformer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """Sizes of one full step; the last step of an epoch may have fewer samples."""

    micro: int
    """Samples of one forward pass on one rank."""

    accumulation: int
    """Forward passes on each rank in one step."""

    data_parallel_size: int
    """Ranks that share the samples of a step."""

    notes: tuple[str, ...] = ()
    """What was adjusted, one sentence each; to be shown to the user."""

    @property
    def global_size(self) -> int:
        return self.micro * self.accumulation * self.data_parallel_size


def resolve_batch(config: RunConfig, data_parallel_size: int) -> BatchPlan:
    """Return the batch plan of `config` on `data_parallel_size` ranks.

    A global batch that is smaller than one micro batch on every rank, but can be shared evenly,
    lowers the micro batch and says so. Every other mismatch is an error.

    Raises:
        ConfigError: the global batch cannot be cut evenly; names the nearest sizes that can.
    """
    micro, ranks = config.micro_batch_size, data_parallel_size
    total = micro * ranks if config.global_batch_size is None else config.global_batch_size
    if total % (micro * ranks) == 0:
        return BatchPlan(
            micro=micro, accumulation=total // (micro * ranks), data_parallel_size=ranks
        )
    if total < micro * ranks and total % ranks == 0:
        lowered = total // ranks
        note = (
            f"--micro-batch-size lowered from {micro} to {lowered}: --global-batch-size {total} "
            f"over {ranks} processes leaves {lowered} samples for each"
        )
        return BatchPlan(micro=lowered, accumulation=1, data_parallel_size=ranks, notes=(note,))
    raise ConfigError(
        f"--global-batch-size {total} cannot be cut into micro batches of --micro-batch-size "
        f"{micro} on {ranks} process{'es' if ranks > 1 else ''} ({micro} x {ranks} = "
        f"{micro * ranks} samples at once). {_nearest_sizes(total, micro, ranks)}"
    )


def _nearest_sizes(total: int, micro: int, ranks: int) -> str:
    unit = micro * ranks
    below, above = total // unit * unit, (total // unit + 1) * unit
    sizes = " or ".join(str(size) for size in (below, above) if size > 0)
    hints = [f"Nearest: --global-batch-size {sizes}"]
    if total % ranks == 0:
        share = total // ranks
        fitting = sorted(
            (size for size in range(1, share + 1) if share % size == 0),
            key=lambda size: (abs(size - micro), size),
        )[:2]
        hints.append("or --micro-batch-size " + " or ".join(str(size) for size in sorted(fitting)))
    return "; ".join(hints)
