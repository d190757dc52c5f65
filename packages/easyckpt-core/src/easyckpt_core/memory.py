"""A trainer's side of the slots: memory files that are mapped once and written again and again.

Torch-free. Memory files are memfds: they need no /dev/shm (64 MB in a default container), belong to
whoever holds a descriptor, and vanish with the last one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable

from easyckpt_core.errors import MemoryBudgetError


class MemoryFile:
    """A memfd and its shared mapping, `size_bytes` long."""

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(f"easyckpt:{name}", os.MFD_CLOEXEC)
        self.size_bytes = 0
        self.before_unmap: Callable[[], None] | None = None
        """Called before the mapping goes: whoever pinned it must let go of the address first."""
        self._map: mmap.mmap | None = None

    def resize(self, size_bytes: int) -> None:
        """Set the file's length. The keeper's descriptor sees the same file: nothing to re-attach.

        Memory is taken here, with an error when there is none, and not at first touch, with SIGBUS.

        Raises:
            MemoryBudgetError: the kernel has no memory for it.
        """
        if size_bytes > self.size_bytes:
            try:
                os.posix_fallocate(self.fd, 0, size_bytes)
            except OSError as err:
                if err.errno not in (errno.ENOSPC, errno.ENOMEM):
                    raise
                raise MemoryBudgetError(
                    f"no host memory for {size_bytes:,} bytes of a snapshot ({err.strerror})"
                ) from err
        if size_bytes != self.size_bytes:
            self._unmap()
            os.ftruncate(self.fd, size_bytes)
            self.size_bytes = size_bytes

    def view(self) -> memoryview:
        """Return the writable bytes of the file, `size_bytes` long."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size_bytes, flags=mmap.MAP_SHARED)
        return memoryview(self._map)

    def _unmap(self) -> None:
        if self._map is not None:
            if self.before_unmap is not None:
                self.before_unmap()
                self.before_unmap = None
            # A view that is still exported keeps the mapping; it goes with the last view.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None

    def close(self) -> None:
        """Give the memory back unless the keeper holds it too. Idempotent."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class MemorySlots:
    """This rank's memory files: slot index -> file name -> MemoryFile."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[str, MemoryFile]] = {}

    def prepare(self, index: int, sizes: dict[str, int]) -> tuple[dict[str, MemoryFile], list[str]]:
        """Return the slot's files in the given sizes, and the names of those that are new."""
        files = self.slots.setdefault(index, {})
        for name in set(files) - set(sizes):
            files.pop(name).close()
        fresh = [name for name in sizes if name not in files]
        for name, size_bytes in sizes.items():
            if name not in files:
                files[name] = MemoryFile(name)
            files[name].resize(size_bytes)
        return files, fresh

    def close(self) -> None:
        """Close every file. Idempotent."""
        for files in self.slots.values():
            for file in files.values():
                file.close()
        self.slots.clear()
