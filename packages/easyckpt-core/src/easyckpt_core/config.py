"""Settings of a Checkpointer, checked before a device or a process is touched."""

from __future__ import annotations

from dataclasses import dataclass

from easyckpt_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved where, and how often.

    Raises:
        ConfigurationError: a value is out of range or two values contradict each other.
    """

    directory: str
    """Directory of the checkpoints. Created when missing."""

    save_mem_interval: int | None = 1
    """Steps between two snapshots in host memory; None: only when a storage save is due."""

    save_storage_interval: int | None = None
    """Steps between two commits to storage; None: storage is written only when asked or flushed."""

    max_checkpoints: int | None = None
    """Newest committed steps that stay on storage; None: all."""

    num_slots: int = 3
    """Snapshots held in host memory: being written, newest complete, being persisted."""

    memory_budget_bytes: int | None = None
    """Most host memory that the slots of this node may take; None: what the machine has free."""

    when_storage_busy: str = "skip"
    """A storage save comes due while one is being written: 'wait', or 'skip' to memory only."""

    busy_wait_seconds: float = 600.0
    """Longest wait for storage; the step is taken in memory only afterwards."""

    linger_seconds: float = 600.0
    """How long the keeper holds its memory for a restart after every trainer is gone."""

    storage_factory: str | None = None
    """'module:function' that makes the Storage from the directory; None: the local file system."""

    def __post_init__(self) -> None:
        if not self.directory or "\0" in self.directory:
            raise ConfigurationError(f"directory={self.directory!r}: give the path of a directory")
        for name in ("save_mem_interval", "save_storage_interval", "max_checkpoints"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigurationError(
                    f"{name}={value!r}: allowed are whole numbers from 1 on, or None"
                )
        if self.save_mem_interval is None and self.save_storage_interval is None:
            raise ConfigurationError(
                "save_mem_interval=None and save_storage_interval=None: nothing would ever be "
                "saved; set at least one of them"
            )
        if not _is_int(self.num_slots) or self.num_slots < 2:
            raise ConfigurationError(
                f"num_slots={self.num_slots!r}: at least 2 are needed, one complete snapshot "
                "and one being written"
            )
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 1:
            raise ConfigurationError(
                f"memory_budget_bytes={self.memory_budget_bytes!r}: must be positive, or None"
            )
        if self.when_storage_busy not in ("skip", "wait"):
            raise ConfigurationError(
                f"when_storage_busy={self.when_storage_busy!r}: allowed are 'skip' and 'wait'"
            )
        for name in ("busy_wait_seconds", "linger_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: must be 0 or more")
        if self.storage_factory is not None and self.storage_factory.count(":") != 1:
            raise ConfigurationError(
                f"storage_factory={self.storage_factory!r}: expected 'module:function'"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
