"""The keeper's table of snapshots in host memory: which slot is written, complete, pinned, free.

Pure bookkeeping, torch-free, no clock and no sockets. File descriptors are owned here. A slot is
reused only when a newer one is complete on every local rank, so a death at any instant leaves the
newest complete snapshot whole.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from easyckpt_core.commit import SourceFile


@dataclass(slots=True)
class MemoryFile:
    """One file of one rank in one slot."""

    fd: int
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedPart:
    """What one rank wrote into one slot."""

    take: int
    step: int
    directory_name: str
    sizes: dict[str, int]


@dataclass(slots=True)
class Slot:
    """One snapshot: the parts of all local ranks."""

    index: int
    step: int | None = None
    take: int = 0
    """Which save of its group this is: two saves of one step are two takes."""
    directory_name: str = ""
    storage_due: bool = False
    world_size: int = 1
    num_parts: int = 1
    parts: dict[int, dict[str, int]] = field(default_factory=dict)
    """Sealed ranks -> file name -> size in bytes."""
    memory: dict[int, dict[str, MemoryFile]] = field(default_factory=dict)
    """Rank -> file name -> memory, sealed or not."""
    pins: int = 0
    """Persists and readers that still need the bytes."""
    generation: int = 0
    """Group of trainers that the memory belongs to."""

    @property
    def is_complete(self) -> bool:
        return self.step is not None and len(self.parts) == self.num_parts

    def age_key(self) -> tuple[int, int, int]:
        """Orders slots from old to young."""
        return (self.step or 0, self.generation, self.take)

    @property
    def size_bytes(self) -> int:
        return sum(file.capacity_bytes for files in self.memory.values() for file in files.values())

    def source_files(self) -> list[SourceFile]:
        """Return the files of a complete slot, with the sizes that were sealed."""
        return [
            SourceFile(path=name, fd=self.memory[rank][name].fd, size_bytes=size_bytes)
            for rank, sizes in sorted(self.parts.items())
            for name, size_bytes in sorted(sizes.items())
        ]


class SlotTable:
    """All slots of a run on this node.

    Decisions are cached by take, so that every local rank of a group gets the same answer.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot(index) for index in range(num_slots)]
        self.num_ranks = 1
        self.world_size = 1
        self._generation = 0
        self._decisions: dict[int, int | None] = {}

    def new_group(self, num_ranks: int, world_size: int) -> None:
        """A fresh set of trainers: forget half-written slots, keep the complete ones."""
        self.num_ranks, self.world_size = num_ranks, world_size
        self._generation += 1
        self._decisions.clear()
        for slot in self.slots:
            if not slot.is_complete:
                self._forget(slot)
                if slot.pins == 0:
                    self._close_memory(slot)

    def decided(self, take: int) -> tuple[bool, int | None]:
        """Return (whether `take` was decided, its slot or None for a skip)."""
        return take in self._decisions, self._decisions.get(take)

    def skip(self, take: int) -> None:
        """Decide for every rank that `take` gets no slot."""
        self._remember(take, None)

    def open_slot(
        self, take: int, step: int, directory_name: str, *, storage_due: bool
    ) -> Slot | None:
        """Choose the slot for a take, or None when each one is still needed."""
        newest = self.newest()
        free = [slot for slot in self.slots if slot.step is None and slot.pins == 0]
        old = [
            slot
            for slot in self.slots
            if slot.is_complete and slot is not newest and slot.pins == 0
        ]
        used = [slot for slot in free if slot.memory]
        candidates = used or sorted(old, key=Slot.age_key) or free
        if not candidates:
            return None
        slot = candidates[0]
        slot.take, slot.step = take, step
        slot.directory_name, slot.storage_due = directory_name, storage_due
        slot.world_size, slot.num_parts = self.world_size, self.num_ranks
        slot.parts = {}
        if slot.generation != self._generation:
            # Restarted trainers cannot map the memory of those before them: they bring their own.
            self._close_memory(slot)
            slot.generation = self._generation
        self._remember(take, slot.index)
        return slot

    def attach(self, rank: int, index: int, name: str, fd: int, capacity_bytes: int) -> None:
        """Take over a memory file that `rank` will write in slot `index`."""
        self.slots[index].generation = self._generation
        files = self.slots[index].memory.setdefault(rank, {})
        if name in files:
            os.close(files[name].fd)
        files[name] = MemoryFile(fd, capacity_bytes)

    def seal(self, rank: int, index: int, take: int, sizes: dict[str, int]) -> bool:
        """Record that `rank` has written its part; return whether that completed the slot.

        A part that comes late, for a slot that was given to another take, is dropped.
        """
        slot = self.slots[index]
        if slot.step is None or slot.take != take or slot.is_complete:
            return False
        missing = sorted(set(sizes) - set(slot.memory.get(rank, {})))
        if missing:
            raise ValueError(f"rank {rank} sealed files that it never attached: {missing}")
        slot.parts[rank] = dict(sizes)
        if not slot.is_complete:
            return False
        for other in self.slots:
            # Ranks seal in order: a slot that an older take left half-written stays so for ever.
            if other.step is not None and not other.is_complete and other.take < take:
                self._forget(other)
        return True

    def adopt(self, rank: int, index: int, sealed: SealedPart) -> None:
        """Take back a sealed part from a trainer after the keeper before this one died."""
        slot = self.slots[index]
        if slot.step is not None and slot.take != sealed.take:
            return
        slot.take, slot.step, slot.directory_name = sealed.take, sealed.step, sealed.directory_name
        slot.world_size, slot.num_parts = self.world_size, self.num_ranks
        slot.parts[rank] = dict(sealed.sizes)

    def newest(self) -> Slot | None:
        """Return the complete slot of the highest step."""
        complete = [slot for slot in self.slots if slot.is_complete]
        return max(complete, key=Slot.age_key, default=None)

    def complete_at(self, step: int) -> Slot | None:
        """Return the youngest complete slot of `step`."""
        found = [slot for slot in self.slots if slot.is_complete and slot.step == step]
        return max(found, key=Slot.age_key, default=None)

    def discard_from(self, step: int) -> list[int]:
        """Forget snapshots of `step` and later (a resume from before them); return their steps."""
        doomed = [slot for slot in self.slots if slot.step is not None and slot.step >= step]
        steps = sorted(slot.step for slot in doomed if slot.step is not None)
        for slot in doomed:
            self._forget(slot)
        return steps

    def close(self) -> None:
        """Free all memory. Idempotent."""
        for slot in self.slots:
            self._clear(slot)

    def _remember(self, take: int, index: int | None) -> None:
        self._decisions[take] = index
        for old in sorted(self._decisions)[:-16]:
            del self._decisions[old]

    def _forget(self, slot: Slot) -> None:
        slot.step, slot.storage_due, slot.parts = None, False, {}

    def _clear(self, slot: Slot) -> None:
        self._forget(slot)
        self._close_memory(slot)

    def _close_memory(self, slot: Slot) -> None:
        for files in slot.memory.values():
            for file in files.values():
                os.close(file.fd)
        slot.memory = {}
