"""Loaders: batches of samples, on the device of the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from rapidformer.data.sampler import DistributedSeekableSampler, InOrderSampler, MicroBatch

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShare:
    """How the samples of the current batch are shared: what the engine weighs a loss by."""

    rank: int
    real_counts: tuple[int, ...]

    @property
    def loss_weight(self) -> float:
        """Factor that turns DDP's mean over ranks into the mean over samples; 1.0 when even."""
        return self.real_counts[self.rank] * len(self.real_counts) / sum(self.real_counts)


class TrainLoader:
    """The micro batches of this rank from any step on."""

    def __init__(
        self,
        dataset: Any,
        sampler: DistributedSeekableSampler,
        *,
        collate_fn: Collate | None,
        num_workers: int,
        device: torch.device,
    ) -> None:
        self.sampler = sampler
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._num_workers = num_workers
        self._device = device

    def micro_batches(self, first: int, stop: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield (micro batch, loaded samples) from step `first` to before step `stop`."""
        loader = _plain_loader(
            self._dataset,
            _Indices(self.sampler, first, stop),
            self._collate_fn,
            self._num_workers,
        )
        plan = self.sampler.steps(first, stop)
        for micro, batch in zip(plan, loader, strict=True):
            yield micro, to_device(batch, self._device)


class _Indices:
    """The index lists of a range of steps, for DataLoader."""

    def __init__(self, sampler: DistributedSeekableSampler, first: int, stop: int) -> None:
        self._sampler, self._first, self._stop = sampler, first, stop

    def __iter__(self) -> Iterator[list[int]]:
        for micro in self._sampler.steps(self._first, self._stop):
            yield list(micro.indices)


class DataParallelLoader:
    """Every sample of a data set once, shared among ranks; tells which samples count.

    While it is iterated, `on_batch` gets the share of each batch before the batch is handed out,
    and None when the last one is done.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        collate_fn: Collate | None,
        shuffle: bool,
        num_workers: int,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        on_batch: Callable[[BatchShare | None], None],
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self._collate_fn = collate_fn
        self._shuffle = shuffle
        self._num_workers = num_workers
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._on_batch = on_batch
        self._epoch = 0

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return -(-len(self.dataset) // (self.batch_size * self._world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass of a shuffled loader; by default it counts passes."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.dataset)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
            order = torch.randperm(len(self.dataset), generator=generator).tolist()
        self._epoch += 1
        sampler = InOrderSampler(
            len(self.dataset),
            self.batch_size,
            rank=self._rank,
            world_size=self._world_size,
            order=order,
        )
        batches = [sampler.indices(number) for number in range(sampler.num_batches)]
        loader = _plain_loader(self.dataset, batches, self._collate_fn, self._num_workers)
        try:
            for number, batch in enumerate(loader):
                counts = tuple(sampler.real_counts(number))
                self._on_batch(BatchShare(rank=self._rank, real_counts=counts))
                yield to_device(batch, self._device)
        finally:
            self._on_batch(None)


def _plain_loader(
    dataset: Any, batches: Any, collate_fn: Collate | None, num_workers: int
) -> DataLoader[Any]:
    # A generator of its own: DataLoader draws a seed when it is iterated, and drawn from the global
    # state that would make a resumed run differ from an undisturbed one.
    return DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=collate_fn,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(0),
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor in it, however nested, on `device`."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
