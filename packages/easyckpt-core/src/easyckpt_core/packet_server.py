"""The keeper's loop: connections, requests, answers that must wait. One thread, torch-free.

`PacketServer` knows sockets and processes and nothing about snapshots; a subclass fills its hooks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from easyckpt_core import wire
from easyckpt_core.slots import Slot

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.25

Attempt = Callable[[bool], wire.Message | None]


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


class PacketServer:
    """Serves clients on one thread until `is_over`.

    Hooks: `handle` answers a request, `lost` hears of a process that is gone, `is_over` ends the
    loop. They run on the loop and must not block.
    """

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self._parked: list[tuple[float, Client, Attempt]] = []
        self._calls: list[Callable[[], None]] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()

    def handle(self, client: Client, message: wire.Message, fds: list[int]) -> wire.Message | None:
        """Answer a request; None when the answer is parked or sent already. Owns `fds`."""
        raise NotImplementedError

    def lost(self, client: Client) -> None:
        """A client is gone, by a closed socket or because its process died."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether the loop should end. Asked several times a second."""
        raise NotImplementedError

    def serve(self, listener: socket.socket) -> None:
        """Run the loop; returns when `is_over`."""
        self._wake_read.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, ("listen", None))
        self._selector.register(self._wake_read, selectors.EVENT_READ, ("wake", None))
        while not self.is_over():
            for key, _mask in self._selector.select(_TICK_SECONDS):
                kind, client = key.data
                if kind == "listen":
                    self._accept(listener)
                elif kind == "wake":
                    with contextlib.suppress(BlockingIOError):
                        self._wake_read.recv(4096)
                elif client in self.clients:
                    self._read(client, died=kind == "pidfd")
            self.run_calls()
            self._answer_parked()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for client in list(self.clients):
            self.drop(client)
        self._wake_read.close()
        self._wake_write.close()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run `function` on the loop. The one method that other threads may call."""
        self._calls.append(function)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"x")

    def run_calls(self) -> None:
        """Run what `call_soon` queued."""
        while self._calls:
            self._calls.pop(0)()

    def answer(self, client: Client, answer: wire.Message, fds: tuple[int, ...] = ()) -> None:
        """Send an answer; a client that does not take it is dropped."""
        try:
            wire.send(client.sock, answer, fds)
        except OSError:
            self.drop(client)

    def park(self, client: Client, seconds: float, attempt: Attempt) -> wire.Message | None:
        """Answer when `attempt(is_late)` returns something; it must once `is_late` is true."""
        answer = attempt(seconds <= 0)
        if answer is None:
            self._parked.append((time.monotonic() + seconds, client, attempt))
        return answer

    def drop(self, client: Client) -> None:
        """Close a connection and tell `lost`. Idempotent."""
        if client not in self.clients:
            return
        self.clients.remove(client)
        self._selector.unregister(client.sock)
        client.sock.close()
        if client.pidfd >= 0:
            self._selector.unregister(client.pidfd)
            os.close(client.pidfd)
        self.lost(client)

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
            self.drop(client)
            return
        try:
            message, fds = wire.receive(client.sock)
        except (OSError, ValueError):
            self.drop(client)
            return
        answer = self._guarded(client, lambda: self.handle(client, message, fds))
        if answer is not None:
            self.answer(client, answer)

    def _answer_parked(self) -> None:
        waiting, self._parked = self._parked, []
        for deadline, client, attempt in waiting:
            if client not in self.clients:
                continue
            is_late = time.monotonic() >= deadline
            answer = self._guarded(client, lambda: attempt(is_late))  # noqa: B023
            if answer is None:
                self._parked.append((deadline, client, attempt))
            else:
                self.answer(client, answer)

    def _guarded(
        self, client: Client, work: Callable[[], wire.Message | None]
    ) -> wire.Message | None:
        """Turn an exception into an answer: one bad request must not end the keeper."""
        try:
            return work()
        except MemoryError as err:
            return {"ok": False, "error": "memory", "message": str(err)}
        except Exception as err:
            logger.exception("a request of pid %s failed", client.pid)
            return {"ok": False, "error": "request", "message": str(err)}
