"""A step on storage: written aside, described by a manifest, marked, and renamed into place.

The rename is the commit. Manifest and marker travel inside the directory, so that a copy of it made
by other means can still be judged: nothing unmarked counts as ours. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from easyckpt_core.run_identity import PRIVATE_FOLDER
from easyckpt_core.storage.local import Storage, file_checksum

MANIFEST_NAME = "easyckpt_manifest.json"
MARKER_NAME = "easyckpt_complete"
_FORMAT = 1
_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedStep:
    """A marked step on storage."""

    step: int
    directory_name: str
    run: str
    world_size: int
    files: dict[str, tuple[int, str]]
    """Relative path -> (size in bytes, checksum)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of a snapshot: `size_bytes` from the start of the memory file `fd`."""

    path: str
    fd: int
    size_bytes: int


def commit_step(
    storage: Storage,
    files: list[SourceFile],
    *,
    step: int,
    directory_name: str,
    run: str,
    world_size: int,
) -> CommittedStep:
    """Write `files` and publish them as `directory_name`. On any error nothing is published.

    Raises:
        OSError: the storage failed; the temporary directory has been removed if it could be.
        ValueError: two ranks gave a file of the same name, or a name leaves the directory.
    """
    _check_names([file.path for file in files] + [directory_name])
    temporary = f"{PRIVATE_FOLDER}/staging/{directory_name}.{secrets.token_hex(6)}"
    try:
        written = {
            file.path: (
                file.size_bytes,
                storage.write_file(f"{temporary}/{file.path}", file.fd, file.size_bytes),
            )
            for file in files
        }
        committed = CommittedStep(
            step=step, directory_name=directory_name, run=run, world_size=world_size, files=written
        )
        manifest = _manifest_bytes(committed)
        _write_bytes(storage, f"{temporary}/{MANIFEST_NAME}", manifest)
        _write_bytes(storage, f"{temporary}/{MARKER_NAME}", _marker_bytes(manifest))
        storage.publish(temporary, directory_name)
    except BaseException:
        with contextlib.suppress(OSError):
            storage.remove(temporary)
        raise
    return committed


def read_committed(storage: Storage, directory_name: str) -> CommittedStep | None:
    """Return the step in `directory_name` when it is marked and well formed, else None."""
    try:
        manifest = storage.read_file(f"{directory_name}/{MANIFEST_NAME}")
        marker = storage.read_file(f"{directory_name}/{MARKER_NAME}")
        if len(manifest) > _MAX_MANIFEST_BYTES or marker != _marker_bytes(manifest):
            return None
        record = json.loads(manifest)
        files = {
            str(entry["path"]): (int(entry["size_bytes"]), str(entry["checksum"]))
            for entry in record["files"]
        }
        _check_names(list(files))
        return CommittedStep(
            step=int(record["step"]),
            directory_name=directory_name,
            run=str(record["run"]),
            world_size=int(record["world_size"]),
            files=files,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_committed(storage: Storage) -> list[CommittedStep]:
    """Return every marked step, oldest first."""
    steps = [
        committed
        for name in storage.list_directories()
        if not name.startswith(".") and (committed := read_committed(storage, name)) is not None
    ]
    return sorted(steps, key=lambda committed: committed.step)


def list_unfinished(storage: Storage) -> list[str]:
    """Return the directories that carry our manifest but are not marked, or not validly."""
    names = []
    for name in storage.list_directories():
        if name.startswith(".") or read_committed(storage, name) is not None:
            continue
        with contextlib.suppress(OSError):
            storage.read_file(f"{name}/{MANIFEST_NAME}")
            names.append(name)
    return sorted(names)


def find_damage(directory: str | os.PathLike[str], committed: CommittedStep) -> str | None:
    """Compare the files of a step with its manifest; return what is wrong, or None.

    Reads every byte: call it where waiting for storage is fine.
    """
    for path, (size_bytes, checksum) in committed.files.items():
        target = Path(directory) / committed.directory_name / path
        try:
            actual_bytes = os.stat(target, follow_symlinks=False).st_size
            if actual_bytes != size_bytes:
                return f"{target}: {actual_bytes} bytes, the manifest says {size_bytes}"
            if file_checksum(target) != checksum:
                return f"{target}: content does not match the checksum {checksum}"
        except OSError as err:
            return f"{target}: {err.strerror or err}"
    return None


def prune(storage: Storage, *, run: str, keep: int) -> list[CommittedStep]:
    """Delete this run's oldest steps beyond the `keep` newest; others are never touched.

    Call only after a commit: the newest marked step is always among those kept.
    """
    ours = [committed for committed in list_committed(storage) if committed.run == run]
    doomed = ours[: max(0, len(ours) - keep)]
    for committed in doomed:
        storage.remove(committed.directory_name)
    return doomed


def clear_leftovers(storage: Storage) -> list[str]:
    """Remove temporary directories of torn saves. Only the keeper that owns the run may call it."""
    folder = f"{PRIVATE_FOLDER}/staging"
    names = storage.list_directories(folder)
    for name in names:
        storage.remove(f"{folder}/{name}")
    hidden = [name for name in storage.list_directories() if name.startswith(".removing-")]
    for name in hidden:
        storage.remove(name)
    return names + hidden


def _manifest_bytes(committed: CommittedStep) -> bytes:
    record: dict[str, Any] = {
        "format": _FORMAT,
        "step": committed.step,
        "run": committed.run,
        "world_size": committed.world_size,
        "committed_at": time.time(),
        "files": [
            {"path": path, "size_bytes": size_bytes, "checksum": checksum}
            for path, (size_bytes, checksum) in sorted(committed.files.items())
        ],
    }
    return json.dumps(record, indent=1).encode()


def _marker_bytes(manifest: bytes) -> bytes:
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def _write_bytes(storage: Storage, path: str, data: bytes) -> None:
    fd = os.memfd_create("easyckpt-small")
    try:
        os.pwrite(fd, data, 0)
        storage.write_file(path, fd, len(data))
    finally:
        os.close(fd)


def _check_names(names: list[str]) -> None:
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ValueError(f"file name {name!r} leaves the checkpoint's directory")
    if len(set(names)) != len(names):
        doubled = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"several ranks gave the same file: {', '.join(doubled)}")
