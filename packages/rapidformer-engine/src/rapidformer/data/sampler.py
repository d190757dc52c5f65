"""Which samples each rank trains on in each step: a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rapidformer.batch import BatchPlan
from rapidformer.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one rank takes in one forward pass."""

    indices: tuple[int, ...]
    """Samples to load; never empty, so that every rank takes part in every collective."""

    num_real: int
    """How many of `indices` count: all of them, or 0 for a stand-in."""

    num_global: int
    """Samples of the whole step over all ranks and micro batches."""

    is_last: bool
    """Whether the step ends with this micro batch, on every rank alike."""


class DistributedSeekableSampler:
    """Orders the samples of every epoch and shares each global batch among ranks.

    The order is a permutation seeded with (seed, epoch), so any step can be found without
    walking through those before it. The last step of an epoch has what is left: each rank gets as
    even a share as possible, and a rank without any gets one sample that counts 0.
    """

    def __init__(
        self, num_samples: int, batch: BatchPlan, *, rank: int, seed: int, shuffle: bool = True
    ) -> None:
        if num_samples < 1:
            raise DataError("the training data has no samples; at least one is needed")
        self.num_samples = num_samples
        self.steps_per_epoch = math.ceil(num_samples / batch.global_size)
        self._batch = batch
        self._rank = rank
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, torch.Tensor] | None = None

    def step(self, step: int) -> list[MicroBatch]:
        """Return the micro batches of this rank in step `step`, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        size, ranks = self._batch.global_size, self._batch.data_parallel_size
        samples = self._epoch_order(epoch)[within * size : (within + 1) * size].tolist()
        share, rest = divmod(len(samples), ranks)
        start = self._rank * share + min(self._rank, rest)
        mine = samples[start : start + share + (self._rank < rest)]
        largest = share + (rest > 0)
        passes = math.ceil(largest / self._batch.micro)
        micro_batches = []
        for number in range(passes):
            part = mine[number * self._batch.micro : (number + 1) * self._batch.micro]
            micro_batches.append(
                MicroBatch(
                    indices=tuple(part or samples[:1]),
                    num_real=len(part),
                    num_global=len(samples),
                    is_last=number == passes - 1,
                )
            )
        return micro_batches

    def steps(self, first: int, stop: int) -> Iterator[MicroBatch]:
        """Yield the micro batches of this rank from step `first` to before step `stop`."""
        for step in range(first, stop):
            yield from self.step(step)

    def _epoch_order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.num_samples)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(self.num_samples, generator=generator))
        return self._order[1]


class InOrderSampler:
    """Shares samples among ranks for evaluation: each once, in the order of the data set.

    Ranks get the same number of batches; in the last one ranks may have fewer samples, or one
    stand-in that counts 0.
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, rank: int, world_size: int, order: list[int]
    ) -> None:
        assert len(order) == num_samples
        self._order = order
        self._batch_size = batch_size
        self._rank = rank
        self._world_size = world_size
        self.num_batches = math.ceil(num_samples / (batch_size * world_size))

    def real_counts(self, number: int) -> list[int]:
        """Return how many samples each rank has in batch `number`."""
        left = len(self._order) - number * self._batch_size * self._world_size
        return [
            min(self._batch_size, max(0, left - rank * self._batch_size))
            for rank in range(self._world_size)
        ]

    def indices(self, number: int) -> list[int]:
        """Return the samples to load on this rank in batch `number`; never empty."""
        first = (number * self._world_size + self._rank) * self._batch_size
        part = self._order[first : first + self._batch_size]
        return part or self._order[number * self._world_size * self._batch_size :][:1]
