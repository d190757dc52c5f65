"""How much host memory a snapshot may take: free RAM and the limits of the control group."""

from __future__ import annotations

import contextlib
from pathlib import Path


def available_memory_bytes() -> int:
    """Return the bytes that can still be taken on this machine without swapping or an OOM kill."""
    rooms = [_free_ram_bytes()]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit_bytes = int((group / "memory.max").read_text())
        used_bytes = int((group / "memory.current").read_text())
        # Pages of files count as used but give way under pressure.
        used_bytes -= _statistic(group / "memory.stat", "inactive_file")
        rooms.append(max(0, limit_bytes - used_bytes))
    return min(rooms)


def _free_ram_bytes() -> int:
    return _statistic(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _statistic(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value.split()[0])
    raise OSError(f"{path} has no {key}")
