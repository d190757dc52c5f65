"""The storage seam, and storage on a POSIX file system.

Torch-free: the keeper uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import shutil
import zlib
from pathlib import Path
from typing import Protocol, cast

_CHUNK_BYTES = 8 << 20
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Storage(Protocol):
    """Bytes and paths, nothing about steps. Paths are relative to the storage's root."""

    def write_file(self, path: str, source_fd: int, size_bytes: int) -> str:
        """Copy `size_bytes` from the start of `source_fd`; return a checksum. Durable then."""
        ...

    def read_file(self, path: str) -> bytes:
        """Return a small file whole. Raises FileNotFoundError."""
        ...

    def publish(self, temporary: str, final: str) -> None:
        """Make the directory `temporary` appear as `final`, whole or not at all; durable on return.

        A directory that stood at `final` is gone afterwards.
        """
        ...

    def list_directories(self, path: str = "") -> list[str]:
        """Return the names of the directories below `path`, in no order; links are left out."""
        ...

    def remove(self, path: str) -> None:
        """Delete a directory tree. Missing is fine; a crash in the middle leaves no marked step."""
        ...


def open_storage(directory: str, factory: str | None = None) -> Storage:
    """Return the Storage of `directory`; `factory` is 'module:function', None the file system."""
    if factory is None:
        return LocalStorage(directory)
    module, _, function = factory.partition(":")
    return cast(Storage, getattr(importlib.import_module(module), function)(directory))


class LocalStorage:
    """A directory on a POSIX file system: fsync for durability, rename as the commit."""

    def __init__(self, directory: str) -> None:
        self.root = Path(directory)

    def write_file(self, path: str, source_fd: int, size_bytes: int) -> str:
        target = self.root / path
        if not self.root.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "the checkpoint directory is gone", str(self.root)
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        checksum = 0
        with open(target, "wb", buffering=0) as file:
            position = 0
            while position < size_bytes:
                chunk = os.pread(source_fd, min(_CHUNK_BYTES, size_bytes - position), position)
                if not chunk:
                    raise OSError(
                        errno.EIO, f"source ended {size_bytes - position} bytes early", path
                    )
                checksum = zlib.crc32(chunk, checksum)
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
                position += len(chunk)
            os.fsync(file.fileno())
        return f"crc32:{checksum:08x}"

    def read_file(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def publish(self, temporary: str, final: str) -> None:
        source, target = self.root / temporary, self.root / final
        for folder, _names, _files in os.walk(source):
            _sync_directory(folder)
        try:
            os.rename(source, target)
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _exchange(source, target)
            self.remove(temporary)
        _sync_directory(self.root)

    def list_directories(self, path: str = "") -> list[str]:
        try:
            with os.scandir(self.root / path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        target = self.root / path
        # Out of sight first: whoever looks during the deletion must not find half a step.
        hidden = target.parent / f".removing-{target.name}-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(target, hidden)
            shutil.rmtree(hidden)


def file_checksum(path: str | os.PathLike[str]) -> str:
    """Return the checksum of a file in the form that `Storage.write_file` returns."""
    checksum = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return f"crc32:{checksum:08x}"


def _sync_directory(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(first: Path, second: Path) -> None:
    """Swap two directories in one step (renameat2, Linux 3.15)."""
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))
