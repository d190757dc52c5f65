"""A complete step that can be loaded, on whichever tier it is."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from easyckpt_core.keeper_link import KeeperLink


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A step in host memory or on storage; the same on every rank."""

    step: int
    tier: str
    """'memory' or 'storage'."""
    world_size: int
    """Ranks of the job that saved it."""
    directory: Path
    """Where it is, or would be, on storage."""
    link: KeeperLink = field(repr=False)

    @contextlib.contextmanager
    def open(self) -> Iterator[Path]:
        """Give a directory with the step's files, for any loader, until the block ends.

        For a snapshot in memory it is a directory of links to the memory files. What is loaded from
        it must be copies: the memory is written again afterwards.
        """
        if self.tier == "storage":
            yield self.directory
            return
        files = self.link.lease(self.step)
        identity = self.link.identity
        assert identity is not None
        view = Path(identity.node_path(f".view-{os.getpid()}-{secrets.token_hex(4)}"))
        try:
            view.mkdir(mode=0o700)
            for name, (fd, _size_bytes) in files.items():
                target = view / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            yield view
        finally:
            shutil.rmtree(view, ignore_errors=True)
            for fd, _size_bytes in files.values():
                os.close(fd)
            self.link.request("release", step=self.step)
