"""The keeper's writer thread: takes complete snapshots to storage, one at a time, and prunes.

Also answers questions that read storage (which step is the newest good one), so that the keeper's
loop never waits for a disk. Torch-free.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from easyckpt_core.commit import (
    CommittedStep,
    SourceFile,
    clear_leftovers,
    commit_step,
    find_damage,
    list_committed,
    list_unfinished,
    prune,
)
from easyckpt_core.storage import Storage

logger = logging.getLogger(__name__)

Event = dict[str, Any]


class PersistThread:
    """Runs jobs in order on one thread; results come back through `on_done` callbacks.

    `on_done` is called on the writer thread: hand over, do not work there.
    """

    def __init__(self, storage: Storage, directory: str, on_event: Callable[[Event], None]) -> None:
        self._storage = storage
        self._directory = directory
        self._on_event = on_event
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="easyckpt-persist", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Finish the queued jobs and join. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def submit_clean(self) -> None:
        """Queue the removal of what torn saves left behind."""

        def job() -> None:
            names = clear_leftovers(self._storage)
            if names:
                self._on_event({"event": "leftovers_removed", "names": names})

        self._jobs.put(job)

    def submit_commit(
        self,
        files: list[SourceFile],
        *,
        step: int,
        directory_name: str,
        run: str,
        world_size: int,
        keep: int | None,
        on_done: Callable[[str | None], None],
    ) -> None:
        """Queue a commit; `on_done(error)` follows, with None for success."""

        def job() -> None:
            begun = time.monotonic()
            self._on_event({"event": "persist_started", "step": step})
            try:
                commit_step(
                    self._storage,
                    files,
                    step=step,
                    directory_name=directory_name,
                    run=run,
                    world_size=world_size,
                )
            except Exception as err:
                message = (
                    f"step {step} was not written to {self._directory}/{directory_name}: {err}"
                )
                self._on_event({"event": "persist_failed", "step": step, "error": message})
                on_done(message)
                return
            self._on_event(
                {
                    "event": "committed",
                    "step": step,
                    "directory": directory_name,
                    "size_bytes": sum(file.size_bytes for file in files),
                    "seconds": time.monotonic() - begun,
                }
            )
            try:
                if keep is not None:
                    for doomed in prune(self._storage, run=run, keep=keep):
                        self._on_event({"event": "pruned", "step": doomed.step})
            except OSError as err:
                self._on_event({"event": "prune_failed", "step": step, "error": str(err)})
            on_done(None)

        self._jobs.put(job)

    def submit_search(
        self,
        run: str,
        newer_than: int,
        on_done: Callable[[CommittedStep | None, list[str]], None],
    ) -> None:
        """Queue the search for the newest good step above `newer_than`.

        `on_done(found, faults)` follows; `faults` says what is wrong with newer ones.
        """

        def job() -> None:
            found: CommittedStep | None = None
            faults: list[str] = []
            try:
                found, faults = self._newest_good(run, newer_than)
            except OSError as err:
                faults.append(f"storage cannot be read: {err}")
            for fault in faults:
                self._on_event({"event": "damaged", "error": fault})
            on_done(found, faults)

        self._jobs.put(job)

    def _newest_good(self, run: str, newer_than: int) -> tuple[CommittedStep | None, list[str]]:
        committed = list_committed(self._storage)
        ours = [step for step in committed if step.run == run]
        faults = [
            f"{name} has a manifest but no valid marker and is skipped"
            for name in list_unfinished(self._storage)
        ]
        for candidate in reversed(ours or committed):
            if candidate.step <= newer_than:
                break
            damage = find_damage(self._directory, candidate)
            if damage is None:
                return candidate, faults
            faults.append(f"step {candidate.step} is damaged and is skipped: {damage}")
        return None, faults

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a job of the writer thread failed")
