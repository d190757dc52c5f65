"""The keeper: one small process per node and run that owns the snapshots in host memory.

It outlives the trainers (its own session, no inherited descriptors), writes complete snapshots to
storage, flushes the newest one when a trainer dies, serves it to the restarted trainer, and ends
when the run is over. It imports neither torch nor user classes. One thread runs the loop below;
a second one (persist.py) touches storage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from typing import Any

from easyckpt_core import wire
from easyckpt_core.commit import CommittedStep
from easyckpt_core.errors import EasyCkptError
from easyckpt_core.host_memory import available_memory_bytes
from easyckpt_core.packet_server import Client, PacketServer
from easyckpt_core.persist import PersistThread
from easyckpt_core.run_identity import RunIdentity, load_run, renew_run
from easyckpt_core.slots import SealedPart, Slot, SlotTable
from easyckpt_core.storage import open_storage

logger = logging.getLogger(__name__)

_HELLO_PATIENCE_SECONDS = 10.0
_FIRST_CLIENT_SECONDS = 30.0
_DIRECTORY_CHECK_SECONDS = 2.0


class Keeper(PacketServer):
    """What the keeper knows and answers; `run` returns when the run is over."""

    def __init__(self, identity: RunIdentity, settings: dict[str, Any]) -> None:
        super().__init__()
        self.identity = identity
        self.settings = settings
        self.linger_seconds = float(settings["linger_seconds"])
        self.table = SlotTable(int(settings["num_slots"]))
        self.storage = open_storage(identity.directory, settings["storage_factory"])
        self.persist = PersistThread(self.storage, identity.directory, self._post_event)
        self.group = ""
        self.group_is_new = True
        self.group_is_broken = False
        self.joined: dict[int, int] = {}
        """Rank -> process id, of the group that trains now."""
        self.restores: dict[int, dict[str, Any] | None] = {}
        self.is_fresh = False
        self.errors: list[str] = []
        self.last_failure: str | None = None
        self.num_queued = 0
        self.last_committed = -1
        self.queued_steps: set[int] = set()
        self.num_skipped = 0
        self.stopping = False
        self.had_trainer = False
        self._idle_since = time.monotonic()
        self._directory_seen = time.monotonic()

    def run(self, listener: socket.socket) -> None:
        """Serve until every trainer said goodbye, the linger time passed, or the run vanished."""
        self.persist.start()
        self.persist.submit_clean()
        self._post_event({"event": "keeper_started", "pid": os.getpid()})
        try:
            self.serve(listener)
        finally:
            self.persist.close()
            self.run_calls()
            self._post_event({"event": "keeper_ended"})
            self.run_calls()
            self.close()
            self.table.close()

    def is_over(self) -> bool:
        trainers = [client for client in self.clients if client.rank is not None]
        if trainers or self.num_queued:
            self._idle_since = time.monotonic()
            return not self._directory_lives()
        if self.stopping:
            return True
        idle_seconds = time.monotonic() - self._idle_since
        limit = self.linger_seconds if self.had_trainer else _FIRST_CLIENT_SECONDS
        return idle_seconds > limit or not self._directory_lives()

    def _directory_lives(self) -> bool:
        now = time.monotonic()
        if now - self._directory_seen < _DIRECTORY_CHECK_SECONDS:
            return True
        self._directory_seen = now
        try:
            run = load_run(self.identity.directory)
        except EasyCkptError:
            return False
        return run is not None and run.token == self.identity.token

    def _post_event(self, event: dict[str, Any]) -> None:
        record = {"time": time.time(), **event}

        def append() -> None:
            with contextlib.suppress(OSError), open(self.identity.events_path, "a") as file:
                file.write(json.dumps(record) + "\n")

        self.call_soon(append)

    def answer(self, client: Client, answer: wire.Message, fds: tuple[int, ...] = ()) -> None:
        """Send an answer, with the errors that this trainer has not heard of yet."""
        if client.rank is not None and client.errors_seen < len(self.errors):
            answer = {**answer, "errors": self.errors[client.errors_seen :]}
            client.errors_seen = len(self.errors)
        super().answer(client, answer, fds)

    def lost(self, client: Client) -> None:
        for slot in client.leases:
            slot.pins -= 1
        client.leases.clear()
        if client.rank is not None and not client.said_bye:
            self.group_is_broken = True
            self._post_event({"event": "trainer_lost", "rank": client.rank, "pid": client.pid})
            self.flush("a trainer died")

    def stop(self, reason: str) -> None:
        """Flush, part from the trainers and end; they start another keeper if they live on."""
        self.flush(reason)
        for client in [client for client in self.clients if client.rank is not None]:
            client.said_bye = True
            self.drop(client)
        self.stopping = True

    # -- requests --------------------------------------------------------------------------------

    def handle(
        self, client: Client, message: dict[str, Any], fds: list[int]
    ) -> dict[str, Any] | None:
        op = message["op"]
        if op == "file":
            self.table.attach(
                client.rank or 0, message["slot"], message["name"], fds[0], message["bytes"]
            )
            return {"ok": True}
        for fd in fds:
            os.close(fd)
        requests = {
            "hello": self._hello,
            "begin": self._begin,
            "seal": self._seal,
            "adopt": self._adopt,
            "latest": self._latest,
            "lease": self._lease,
            "release": self._release,
            "fresh": self._fresh,
            "drain": self._drain,
            "status": self._status,
            "bye": self._bye,
        }
        return requests[op](client, message)

    def _hello(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Admit a trainer once the trainers of every earlier group are gone."""

        def attempt(is_late: bool) -> dict[str, Any] | None:
            others = [
                other
                for other in self.clients
                if other.rank is not None
                and (other.group != message["group"] or other.rank == message["rank"])
            ]
            for other in [other for other in others if other.pid == client.pid]:
                # The same process connects anew after an answer that took too long.
                other.said_bye = True
                self.drop(other)
                others.remove(other)
            if others and not is_late:
                return None
            if others:
                holders = [{"rank": other.rank, "pid": other.pid} for other in others]
                return {"ok": False, "error": "in_use", "holders": holders}
            rank = message["rank"]
            # A launcher may start processes anew under the name of those before them.
            is_replaced = self.joined.get(rank, client.pid) != client.pid
            if message["group"] != self.group or is_replaced:
                self._new_group(message)
            client.rank, client.group = rank, message["group"]
            self.joined[rank] = client.pid
            self.had_trainer = True
            client.errors_seen = len(self.errors)
            return {"ok": True, "pid": os.getpid(), "run": self.identity.run}

        return self.park(client, _HELLO_PATIENCE_SECONDS, attempt)

    def _new_group(self, message: dict[str, Any]) -> None:
        self.group, self.group_is_new = message["group"], True
        self.group_is_broken = False
        self.joined = {}
        self.restores = {}
        self.is_fresh = False
        self.stopping = False
        self.table.new_group(message["num_ranks"], message["world_size"])

    def _begin(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Give the slot for a save. One decision for all ranks: the first to ask makes it."""

        def attempt(is_late: bool) -> dict[str, Any] | None:
            is_decided, index = self.table.decided(message["take"])
            if not is_decided:
                if message["storage"] and self.num_queued and not is_late:
                    return None
                index = self._decide(message)
            storage_due = index is not None and self.table.slots[index].storage_due
            return {"ok": True, "slot": index, "storage": storage_due}

        return self.park(client, message["patience_seconds"], attempt)

    def _decide(self, message: dict[str, Any]) -> int | None:
        """Return the slot for a take, or None to skip it on every rank.

        One step is on its way to storage at a time: a save that comes due meanwhile is taken in
        memory only, so that memory never runs out of slots because storage is slow.
        """
        step, storage_due = message["step"], message["storage"]
        if self.group_is_new:
            discarded = self.table.discard_from(step)
            if discarded:
                self._post_event({"event": "memory_discarded", "steps": discarded})
            self.group_is_new = False
        if storage_due and self.num_queued:
            self._skip(step, "storage save", "an earlier one is still being written")
            storage_due = False
        reason = None
        if len(self.joined) < self.table.num_ranks:
            reason = "not every rank has joined this keeper yet"
        elif not self._has_memory_for(message):
            reason = "host memory does not allow another slot"
        slot = None
        if reason is None:
            slot = self.table.open_slot(
                message["take"], step, message["directory"], storage_due=storage_due
            )
            reason = "every slot is in use: one is being written to storage"
        if slot is not None:
            return slot.index
        self.table.skip(message["take"])
        self._skip(step, "storage save" if storage_due else "snapshot", reason)
        return None

    def _skip(self, step: int, what: str, reason: str | None) -> None:
        self.num_skipped += 1
        self._post_event({"event": "skipped", "step": step, "what": what, "reason": reason})
        if what == "storage save":
            self.errors.append(f"the storage save of step {step} was skipped: {reason}")

    def _has_memory_for(self, message: dict[str, Any]) -> bool:
        """Whether a slot can be opened without memory that the node does not have.

        Only a slot that was never written needs new memory; two are required, a third is taken
        when there is room.
        """
        used = [slot for slot in self.table.slots if slot.memory]
        if any(slot.step is None and slot.pins == 0 for slot in used):
            return True
        newest = self.table.newest()
        if any(slot.is_complete and slot is not newest and slot.pins == 0 for slot in used):
            return True
        need_bytes = max([message["bytes"], *(slot.size_bytes for slot in used)])
        budget: int | None = self.settings["memory_budget_bytes"]
        room_bytes = available_memory_bytes()
        if budget is not None:
            room_bytes = min(room_bytes, budget - sum(slot.size_bytes for slot in used))
        if len(used) >= 2 or need_bytes <= room_bytes:
            return bool(need_bytes <= room_bytes)
        raise MemoryError(
            f"a snapshot takes {need_bytes:,} bytes of host memory and two are needed; "
            f"{room_bytes:,} bytes are left. Raise memory_budget_bytes, free memory, or save "
            "less (see the sizes in the plan)"
        )

    def _seal(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        step, index = message["step"], message["slot"]
        assert client.rank is not None
        is_complete = self.table.seal(client.rank, index, message["take"], message["sizes"])
        if is_complete:
            slot = self.table.slots[index]
            size_bytes = sum(sum(sizes.values()) for sizes in slot.parts.values())
            self._post_event(
                {
                    "event": "snapshot",
                    "step": step,
                    "size_bytes": size_bytes,
                    "added_seconds": message["added_seconds"],
                    "copy_seconds": message["copy_seconds"],
                }
            )
            if slot.storage_due:
                self._queue_commit(slot)
        return {"ok": True, "complete": is_complete}

    def _adopt(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        assert client.rank is not None
        part = SealedPart(
            take=message["take"],
            step=message["step"],
            directory_name=message["directory"],
            sizes=message["sizes"],
        )
        self.table.adopt(client.rank, message["slot"], part)
        self.group_is_new = False
        return {"ok": True}

    def _queue_commit(self, slot: Slot) -> None:
        step = slot.step
        assert step is not None
        if step in self.queued_steps or step == self.last_committed:
            return
        slot.pins += 1
        self.num_queued += 1
        self.queued_steps.add(step)

        def finished(error: str | None) -> None:
            slot.pins -= 1
            self.num_queued -= 1
            self.queued_steps.discard(step)
            self.last_failure = error
            if error is None:
                self.last_committed = max(step, self.last_committed)
            else:
                self.errors.append(error)

        self.persist.submit_commit(
            slot.source_files(),
            step=step,
            directory_name=slot.directory_name,
            run=self.identity.run,
            world_size=slot.world_size,
            keep=self.settings["max_checkpoints"],
            on_done=lambda error: self.call_soon(lambda: finished(error)),
        )

    def flush(self, reason: str) -> None:
        """Write the newest complete snapshot to storage unless storage has it already."""
        newest = self.table.newest()
        if newest is None or newest.step is None or newest.step <= self.last_committed:
            return
        self._post_event({"event": "flush", "step": newest.step, "reason": reason})
        self._queue_commit(newest)

    def _latest(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Answer what to resume from; the n-th call of every rank gets the same answer."""
        call = client.num_latest_calls
        client.num_latest_calls += 1
        if call not in self.restores:
            self.restores[call] = None
            newest = self.table.newest()
            newest_step = -1 if newest is None or newest.step is None else newest.step
            if newest is not None and newest_step >= self.last_committed:
                self._decide_restore(call, newest, None, [])
            else:
                asked_by = self.group

                def found_on_storage(found: CommittedStep | None, faults: list[str]) -> None:
                    if self.group == asked_by:
                        self._decide_restore(call, newest, found, faults)

                self.persist.submit_search(
                    self.identity.run,
                    newest_step,
                    lambda found, faults: self.call_soon(lambda: found_on_storage(found, faults)),
                )
        return self.park(client, float("inf"), lambda is_late: self.restores[call])

    def _decide_restore(
        self, call: int, newest: Slot | None, committed: CommittedStep | None, faults: list[str]
    ) -> None:
        answer: dict[str, Any] = {"ok": True, "tier": None, "faults": faults}
        best = committed or newest
        if best is not None:
            answer |= {
                "tier": "memory" if committed is None else "storage",
                "step": best.step,
                "directory": best.directory_name,
                "world_size": best.world_size,
            }
        self._post_event({"event": "latest", "tier": answer["tier"], "step": answer.get("step")})
        self.restores[call] = answer

    def _lease(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Hand the files of a snapshot to a reader; its slot is not reused before `release`."""
        slot = self.table.complete_at(message["step"])
        if slot is None:
            return {"ok": False, "error": "gone", "message": "the snapshot is no longer in memory"}
        slot.pins += 1
        client.leases.append(slot)
        files = slot.source_files()
        self.answer(client, {"ok": True, "num_files": len(files)})
        for file in files:
            self.answer(client, {"name": file.path, "bytes": file.size_bytes}, (file.fd,))
        return None

    def _release(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        for slot in [slot for slot in client.leases if slot.step == message["step"]]:
            slot.pins -= 1
            client.leases.remove(slot)
        return {"ok": True}

    def _fresh(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """A declined resume: forget the memory, start a new history. Once per group."""
        if not self.is_fresh:
            self.is_fresh = True
            self.table.discard_from(0)
            self.identity = renew_run(self.identity)
            self.last_committed = -1
            self._post_event({"event": "fresh_start", "run": self.identity.run})
        return {"ok": True, "run": self.identity.run}

    def _drain(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        def attempt(is_late: bool) -> dict[str, Any] | None:
            if self.num_queued and not is_late:
                return None
            is_done = self.num_queued == 0
            return {"ok": True, "is_done": is_done, "last_failure": self.last_failure}

        return self.park(client, message["patience_seconds"], attempt)

    def _status(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        newest = self.table.newest()
        return {
            "ok": True,
            "pid": os.getpid(),
            "trainers": [
                {"rank": other.rank, "pid": other.pid}
                for other in self.clients
                if other.rank is not None
            ],
            "newest_step": None if newest is None else newest.step,
            "memory_bytes": sum(slot.size_bytes for slot in self.table.slots),
            "last_committed": None if self.last_committed < 0 else self.last_committed,
            "num_queued": self.num_queued,
            "num_skipped": self.num_skipped,
        }

    def _bye(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """A normal end. When the last trainer says it, the run is over and the memory is freed."""
        client.said_bye = True
        trainers = [other for other in self.clients if other.rank is not None]
        self.stopping = not self.group_is_broken and all(other.said_bye for other in trainers)
        return {"ok": True}
