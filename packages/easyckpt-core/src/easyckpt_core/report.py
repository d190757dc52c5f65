"""What a save did, for the caller of `Checkpointer.save`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SaveReport:
    """One save on this rank. Filled in as the save proceeds; final once `is_complete` is true."""

    step: int
    is_storage_due: bool
    """The step will be committed to storage; False when that part was skipped."""
    slot: int | None = None
    """Memory slot that the snapshot went to."""
    size_bytes: int = 0
    """Bytes of this rank's files."""
    added_seconds: float = 0.0
    """Time on the training thread: the call, and waiting at the fence."""
    copy_seconds: float = 0.0
    """From the call until the last byte was in host memory."""
    is_skipped: bool = False
    """No slot was free; the reason is in the event log."""
    is_complete: bool = False
    """This rank's part is sealed."""
