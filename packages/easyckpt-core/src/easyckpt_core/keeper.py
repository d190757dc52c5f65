"""The keeper: one small process per node and run that owns the snapshots in host memory.

It outlives the trainers (its own session, no inherited descriptors), writes complete snapshots to
storage, flushes the newest one when a trainer dies, serves it to the restarted trainer, and ends
when the run is over. It imports neither torch nor user classes. One thread runs the loop below;
a second one (persist.py) touches storage.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from easyckpt_core import wire
from easyckpt_core.commit import CommittedStep
from easyckpt_core.errors import EasyCkptError
from easyckpt_core.host_memory import available_memory_bytes
from easyckpt_core.persist import PersistThread
from easyckpt_core.run_identity import RunIdentity, load_run, make_runtime_folder, renew_run
from easyckpt_core.slots import Slot, SlotTable
from easyckpt_core.storage import open_storage

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25
_HELLO_PATIENCE_SECONDS = 10.0
_FIRST_CLIENT_SECONDS = 30.0
_DIRECTORY_CHECK_SECONDS = 2.0


@dataclass(slots=True, eq=False)
class Client:
    """A connected process: a trainer (it has a rank) or a tool."""

    sock: socket.socket
    pid: int
    rank: int | None = None
    group: str = ""
    pidfd: int = -1
    num_latest_calls: int = 0
    leases: list[Slot] = field(default_factory=list)
    said_bye: bool = False
    errors_seen: int = 0


class Keeper:
    """State and loop of the keeper process; `run` returns when the run is over."""

    def __init__(self, identity: RunIdentity, settings: dict[str, Any]) -> None:
        self.identity = identity
        self.settings = settings
        self.table = SlotTable(int(settings["num_slots"]))
        self.storage = open_storage(identity.directory, settings["storage_factory"])
        self.persist = PersistThread(self.storage, identity.directory, self._post_event)
        self.clients: list[Client] = []
        self.group = ""
        self.group_is_new = True
        self.group_is_broken = False
        self.joined: set[int] = set()
        self.restores: dict[int, Callable[[], dict[str, Any]] | None] = {}
        self.errors: list[str] = []
        self.num_queued = 0
        self.last_committed = -1
        self.queued_steps: set[int] = set()
        self.num_skipped = 0
        self.stopping = False
        self.had_trainer = False
        self._parked: list[tuple[float, Client, Callable[[bool], dict[str, Any] | None]]] = []
        self._calls: list[Callable[[], None]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._idle_since = time.monotonic()
        self._directory_seen = time.monotonic()

    # -- loop ------------------------------------------------------------------------------------

    def run(self, listener: socket.socket) -> None:
        """Serve until every trainer said goodbye, the linger time passed, or the run vanished."""
        self._wake_read.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, ("listen", None))
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", None))
        self.persist.start()
        self.persist.submit_clean()
        self._post_event({"event": "keeper_started", "pid": os.getpid()})
        try:
            while not self._is_over():
                for key, _mask in self._selector.select(_TICK_SECONDS):
                    kind, client = key.data
                    if kind == "listen":
                        self._accept(listener)
                    elif kind == "wake":
                        with contextlib.suppress(BlockingIOError):
                            self._wake_read.recv(4096)
                    elif client in self.clients:
                        self._read(client, died=kind == "pidfd")
                self._run_calls()
                self._answer_parked()
        finally:
            self.persist.close()
            self._run_calls()
            self._post_event({"event": "keeper_ended"})
            self._run_calls()
            for client in list(self.clients):
                self._drop(client)
            self.table.close()

    def _is_over(self) -> bool:
        trainers = [client for client in self.clients if client.rank is not None]
        if trainers or self.num_queued:
            self._idle_since = time.monotonic()
            return not self._directory_lives()
        if self.stopping:
            return True
        idle_seconds = time.monotonic() - self._idle_since
        limit = self.settings["linger_seconds"] if self.had_trainer else _FIRST_CLIENT_SECONDS
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

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop. The one method that other threads may call."""
        self._calls.append(function)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"x")

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.pop(0)()

    def _post_event(self, event: dict[str, Any]) -> None:
        record = {"time": time.time(), **event}

        def append() -> None:
            with contextlib.suppress(OSError), open(self.identity.events_path, "a") as file:
                file.write(json.dumps(record) + "\n")

        self.call_soon(append)

    # -- clients ---------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        sock, _address = listener.accept()
        pid, uid = wire.peer_credentials(sock)
        if uid != os.getuid():
            sock.close()
            return
        sock.settimeout(5.0)
        client = Client(sock, pid)
        self.clients.append(client)
        self._selector.register(sock, selectors.EVENT_READ, ("socket", client))
        # A forked child of the trainer (a data-loading worker) keeps the socket open after the
        # trainer died; the kernel's word about the process itself is what counts.
        with contextlib.suppress(OSError):
            client.pidfd = os.pidfd_open(pid)
            self._selector.register(client.pidfd, selectors.EVENT_READ, ("pidfd", client))

    def _read(self, client: Client, *, died: bool) -> None:
        if died:
            self._drop(client)
            return
        try:
            message, fds = wire.receive(client.sock)
        except (OSError, ValueError):
            self._drop(client)
            return
        try:
            answer = self._handle(client, message, fds)
        except MemoryError as err:
            answer = {"ok": False, "error": "memory", "message": str(err)}
        except Exception as err:
            logger.exception("request %r of pid %s failed", message.get("op"), client.pid)
            answer = {"ok": False, "error": "request", "message": str(err)}
        if answer is not None:
            self._answer(client, answer)

    def _answer(self, client: Client, answer: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if client.rank is not None and client.errors_seen < len(self.errors):
            answer = {**answer, "errors": self.errors[client.errors_seen :]}
            client.errors_seen = len(self.errors)
        try:
            wire.send(client.sock, answer, fds)
        except OSError:
            self._drop(client)

    def _park(
        self, client: Client, seconds: float, attempt: Callable[[bool], dict[str, Any] | None]
    ) -> dict[str, Any] | None:
        """Answer when `attempt(is_late)` returns something; it must once `is_late` is true."""
        answer = attempt(False)
        if answer is None:
            self._parked.append((time.monotonic() + seconds, client, attempt))
        return answer

    def _answer_parked(self) -> None:
        waiting, self._parked = self._parked, []
        for deadline, client, attempt in waiting:
            if client not in self.clients:
                continue
            answer = attempt(time.monotonic() >= deadline)
            if answer is None:
                self._parked.append((deadline, client, attempt))
            else:
                self._answer(client, answer)

    def _drop(self, client: Client) -> None:
        if client not in self.clients:
            return
        self.clients.remove(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.pidfd >= 0:
            self._selector.unregister(client.pidfd)
            os.close(client.pidfd)
        for slot in client.leases:
            slot.pins -= 1
        client.leases.clear()
        if client.rank is not None and not client.said_bye:
            self.group_is_broken = True
            self._post_event({"event": "trainer_lost", "rank": client.rank, "pid": client.pid})
            self._flush("a trainer died")

    # -- requests --------------------------------------------------------------------------------

    def _handle(
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
            if others and not is_late:
                return None
            if others:
                holders = [{"rank": other.rank, "pid": other.pid} for other in others]
                return {"ok": False, "error": "in_use", "holders": holders}
            if message["group"] != self.group:
                self._new_group(message)
            client.rank, client.group = message["rank"], message["group"]
            self.joined.add(message["rank"])
            self.had_trainer = True
            client.errors_seen = len(self.errors)
            return {"ok": True, "pid": os.getpid(), "run": self.identity.run}

        return self._park(client, _HELLO_PATIENCE_SECONDS, attempt)

    def _new_group(self, message: dict[str, Any]) -> None:
        self.group, self.group_is_new = message["group"], True
        self.group_is_broken = False
        self.joined = set()
        self.restores = {}
        self.stopping = False
        self.table.new_group(message["num_ranks"], message["world_size"])

    def _begin(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Give the slot for a step. One decision for all ranks: the first to ask makes it."""
        step = message["step"]

        def attempt(is_late: bool) -> dict[str, Any] | None:
            is_decided, index = self.table.decided(step)
            if not is_decided:
                index = self._decide(message, is_late)
                if index == -1:
                    return None
            return {"ok": True, "slot": index}

        waits = message["storage"] and message["patience_seconds"] > 0
        return self._park(client, message["patience_seconds"] if waits else 0.0, attempt)

    def _decide(self, message: dict[str, Any], is_late: bool) -> int | None:
        """Return a slot index, None to skip the step, or -1 to be asked again."""
        step, storage_due = message["step"], message["storage"]
        if self.group_is_new:
            discarded = self.table.discard_from(step)
            if discarded:
                self._post_event({"event": "memory_discarded", "steps": discarded})
            self.group_is_new = False
        reason = None
        if len(self.joined) < self.table.num_ranks:
            reason = "not every rank has joined this keeper yet"
        elif not self._has_memory_for(message):
            reason = "host memory does not allow another slot"
        slot = None
        if reason is None:
            slot = self.table.open_slot(step, message["directory"], storage_due=storage_due)
            reason = None if slot else "every slot is in use (a persist is still running)"
        if slot is not None:
            return slot.index
        if storage_due and message["patience_seconds"] > 0 and not is_late:
            return -1
        self.num_skipped += 1
        self._post_event(
            {"event": "skipped", "step": step, "storage": storage_due, "reason": reason}
        )
        if storage_due:
            self.errors.append(f"the storage save of step {step} was skipped: {reason}")
        self.table.skip(step)
        return None

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
        budget = self.settings["memory_budget_bytes"]
        room_bytes = available_memory_bytes()
        if budget is not None:
            room_bytes = min(room_bytes, budget - sum(slot.size_bytes for slot in used))
        if len(used) >= 2 or need_bytes <= room_bytes:
            return need_bytes <= room_bytes
        raise MemoryError(
            f"a snapshot takes {need_bytes:,} bytes of host memory and two are needed; "
            f"{room_bytes:,} bytes are left. Raise memory_budget_bytes, free memory, or save "
            "less (see the sizes in the plan)"
        )

    def _seal(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        step, index = message["step"], message["slot"]
        assert client.rank is not None
        is_complete = self.table.seal(client.rank, index, step, message["sizes"])
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
        self.table.adopt(
            client.rank, message["slot"], message["step"], message["directory"], message["sizes"]
        )
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

    def _flush(self, reason: str) -> None:
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
            if newest is not None and newest.step is not None and newest.step >= self.last_committed:
                self._decide_restore(call, newest, None)
            else:
                newer_than = None if newest is None else newest.step
                self.persist.submit_search(
                    self.identity.run,
                    newer_than,
                    lambda found: self.call_soon(lambda: self._decide_restore(call, newest, found)),
                )

        def attempt(is_late: bool) -> dict[str, Any] | None:
            decision = self.restores[call]
            return decision() if decision is not None else None

        return self._park(client, float("inf"), attempt)

    def _decide_restore(
        self, call: int, newest: Slot | None, committed: CommittedStep | None
    ) -> None:
        answer: dict[str, Any] = {"ok": True, "tier": None}
        if committed is not None:
            answer = {
                "ok": True,
                "tier": "storage",
                "step": committed.step,
                "directory": committed.directory_name,
                "world_size": committed.world_size,
            }
        elif newest is not None:
            answer = {
                "ok": True,
                "tier": "memory",
                "step": newest.step,
                "directory": newest.directory_name,
                "world_size": newest.world_size,
            }
        self._post_event({"event": "latest", "tier": answer["tier"], "step": answer.get("step")})
        self.restores[call] = lambda: answer

    def _lease(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        """Hand the files of a snapshot to a reader; its slot is not reused before `release`."""
        slot = self.table.complete_at(message["step"])
        if slot is None:
            return {"ok": False, "error": "gone", "message": "the snapshot is no longer in memory"}
        slot.pins += 1
        client.leases.append(slot)
        files = slot.source_files()
        self._answer(client, {"ok": True, "num_files": len(files)})
        for file in files:
            self._answer(client, {"name": file.path, "bytes": file.size_bytes}, (file.fd,))
        return None

    def _release(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        for slot in [slot for slot in client.leases if slot.step == message["step"]]:
            slot.pins -= 1
            client.leases.remove(slot)
        return {"ok": True}

    def _fresh(self, client: Client, message: dict[str, Any]) -> dict[str, Any]:
        """A declined resume: forget the memory, start a new history. Once per group."""
        if self.restores.get(-1) is None:
            self.restores[-1] = lambda: {}
            self.table.discard_from(0)
            self.identity = renew_run(self.identity)
            self.last_committed = -1
            self._post_event({"event": "fresh_start", "run": self.identity.run})
        return {"ok": True, "run": self.identity.run}

    def _drain(self, client: Client, message: dict[str, Any]) -> dict[str, Any] | None:
        def attempt(is_late: bool) -> dict[str, Any] | None:
            if self.num_queued and not is_late:
                return None
            return {"ok": True, "is_done": self.num_queued == 0}

        return self._park(client, message["patience_seconds"], attempt)

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


def serve(directory: str, settings: dict[str, Any]) -> int:
    """Be the keeper of `directory`, or return at once when one is alive. Returns an exit status."""
    make_runtime_folder()
    identity = load_run(directory)
    if identity is None:
        return 1
    lock_path, socket_path = identity.node_path(".lock"), identity.node_path(".sock")
    lock_fd = _lock(lock_path)
    if lock_fd is None:
        return 0
    listener = wire.new_socket()
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket_path)
        listener.bind(socket_path)
        listener.listen(128)
        keeper = Keeper(identity, settings)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: keeper.call_soon(lambda: _stop(keeper)))
        keeper.run(listener)
        return 0
    finally:
        listener.close()
        for path in (socket_path, identity.node_path(".log"), lock_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os.close(lock_fd)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(lock_path))


def _stop(keeper: Keeper) -> None:
    keeper._flush("the keeper got SIGTERM")
    for client in [client for client in keeper.clients if client.rank is not None]:
        client.said_bye = True
        keeper._drop(client)
    keeper.stopping = True


def _lock(path: str) -> int | None:
    """Take the life-long lock of a run; None when another keeper has it."""
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # A keeper that is just ending unlinks the file: a lock on the unlinked one protects nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def main() -> None:
    """Entry point of the keeper process: `keeper.py DIRECTORY SETTINGS-AS-JSON`."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    os.chdir("/")
    os.nice(10)
    sys.exit(serve(sys.argv[1], json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
