"""A trainer's connection to the keeper: starts it on first use, talks to it, survives its death."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import easyckpt_core
from easyckpt_core import wire
from easyckpt_core.config import CheckpointConfig
from easyckpt_core.errors import KeeperError, MemoryBudgetError, RunInUseError
from easyckpt_core.run_identity import RunIdentity, load_run, make_runtime_folder, open_run

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 20.0
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where this process stands among its peers."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Place:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE as torchrun sets them."""
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", str(rank))),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        )

    def group_name(self) -> str:
        """Name the set of processes that train together: one attempt of one parent process."""
        if self.local_world_size == 1:
            return f"{os.getpid()}:{secrets.token_hex(4)}"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return f"{os.getppid()}:{attempt}:{os.environ.get('MASTER_PORT', '')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveProcess:
    """A process that trains in a directory right now."""

    rank: int
    pid: int


class KeeperLink:
    """Requests to the keeper. Thread-safe; every wait is bounded.

    `on_rejoin` gives the messages that hand this rank's memory to the keeper after a dead one.
    """

    def __init__(self, config: CheckpointConfig, place: Place) -> None:
        self.config = config
        self.place = place
        self.group = place.group_name()
        self.identity: RunIdentity | None = None
        self.errors: list[str] = []
        self.on_rejoin: Callable[[], Iterable[tuple[dict[str, Any], tuple[int, ...]]]] = tuple
        self._sock: Any = None
        self._reaper: threading.Thread | None = None
        self._lock = threading.RLock()

    def start(self) -> None:
        """Connect, starting the keeper if there is none.

        Raises:
            RunInUseError: another job's processes are alive on the directory.
            KeeperError: the keeper does not start.
        """
        self.identity = open_run(self.config.directory)
        make_runtime_folder()
        self._connect()

    def request(
        self, op: str, *, wait_seconds: float = _ANSWER_SECONDS, **fields: Any
    ) -> dict[str, Any]:
        """Send one request and return its answer; reconnect once when the keeper died.

        Raises:
            KeeperError: no answer in time, or a refusal.
            MemoryBudgetError: the keeper has no memory for another slot.
        """
        message = {"op": op, **fields}
        with self._lock:
            try:
                answer = self._exchange(message, (), wait_seconds)
            except OSError as err:
                if self._sock is None and self.identity is None:
                    raise KeeperError("the checkpointer was not started or is closed") from err
                logger.warning("the keeper is gone (%s); starting another one", err)
                self._reconnect()
                answer = self._exchange(message, (), wait_seconds)
        return self._checked(answer)

    def attach(self, slot: int, name: str, fd: int, capacity_bytes: int) -> None:
        """Hand a memory file to the keeper, which holds it from now on too."""
        message = {"op": "file", "slot": slot, "name": name, "bytes": capacity_bytes}
        with self._lock:
            self._checked(self._exchange(message, (fd,), _ANSWER_SECONDS))

    def lease(self, step: int) -> dict[str, tuple[int, int]]:
        """Return {file name: (descriptor, size in bytes)} of a snapshot, until `release`."""
        with self._lock:
            first = self._checked(
                self._exchange({"op": "lease", "step": step}, (), _ANSWER_SECONDS)
            )
            files = {}
            for _ in range(first["num_files"]):
                entry, fds = wire.receive(self._sock)
                files[entry["name"]] = (fds[0], entry["bytes"])
        return files

    def take_errors(self) -> list[str]:
        """Return, once, what went wrong in the keeper since the last call."""
        errors, self.errors = self.errors, []
        return errors

    def close(self, *, is_normal: bool) -> None:
        """Part from the keeper. A normal goodbye of every rank ends the run. Idempotent."""
        with self._lock:
            if self._sock is None:
                return
            with contextlib.suppress(OSError, KeeperError):
                if is_normal:
                    self._exchange({"op": "bye"}, (), 5.0)
            self._sock.close()
            self._sock = None
            self.identity = None
        if self._reaper is not None and is_normal:
            # The keeper ends when the last rank has said goodbye: usually at once.
            self._reaper.join(timeout=5.0)

    # -- private ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        assert self.identity is not None
        deadline = time.monotonic() + _CONNECT_SECONDS
        path = self.identity.node_path(".sock")
        self._reaper = None
        while True:
            self._sock = wire.new_socket()
            self._sock.settimeout(_ANSWER_SECONDS)
            try:
                self._sock.connect(path)
                self._hello()
                return
            except (FileNotFoundError, ConnectionError) as err:
                self._sock.close()
                if time.monotonic() > deadline:
                    raise KeeperError(
                        f"the keeper of {self.config.directory} cannot be reached: {err}. "
                        f"{self._log_tail()}"
                    ) from err
            if self._reaper is None or not self._reaper.is_alive():
                # Waiting on a thread takes the keeper's exit status, whenever it ends: no zombie.
                child = self._spawn()
                self._reaper = threading.Thread(
                    target=child.wait, name="easyckpt-reaper", daemon=True
                )
                self._reaper.start()
            time.sleep(0.02)

    def _hello(self) -> None:
        message = {
            "op": "hello",
            "rank": self.place.rank,
            "group": self.group,
            "num_ranks": self.place.local_world_size,
            "world_size": self.place.world_size,
        }
        answer = self._exchange(message, (), _ANSWER_SECONDS)
        if answer.get("error") == "in_use":
            raise RunInUseError(in_use_message(self.config.directory, answer["holders"]))
        self._checked(answer)

    def _reconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._connect()
        for message, fds in self.on_rejoin():
            self._checked(self._exchange(message, fds, _ANSWER_SECONDS))

    def _exchange(
        self, message: dict[str, Any], fds: tuple[int, ...], wait_seconds: float
    ) -> dict[str, Any]:
        if self._sock is None:
            raise ConnectionError("not connected")
        self._sock.settimeout(wait_seconds)
        wire.send(self._sock, message, fds)
        answer, stray = wire.receive(self._sock)
        for fd in stray:
            os.close(fd)
        return answer

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        self.errors.extend(answer.get("errors", []))
        if answer["ok"]:
            return answer
        if answer["error"] == "memory":
            raise MemoryBudgetError(answer["message"])
        raise KeeperError(f"rank {self.place.rank}: the keeper refused: {answer['message']}")

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self.identity is not None
        config = self.config
        settings = {
            "num_slots": config.num_slots,
            "memory_budget_bytes": config.memory_budget_bytes,
            "max_checkpoints": config.max_checkpoints,
            "linger_seconds": config.linger_seconds,
            "storage_factory": config.storage_factory,
        }
        source = str(Path(easyckpt_core.__file__).parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).strip(":"),
            "PYTHONSAFEPATH": "1",
        }
        with open(self.identity.node_path(".log"), "ab") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "easyckpt_core.keeper_process",
                    self.identity.directory,
                    json.dumps(settings),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                close_fds=True,
                start_new_session=True,
                env=environment,
            )

    def _log_tail(self) -> str:
        assert self.identity is not None
        try:
            text = Path(self.identity.node_path(".log")).read_text()[-2000:]
        except OSError:
            text = ""
        return f"Its log ends with:\n{text}" if text.strip() else "It wrote no log."


def in_use_message(directory: str, holders: list[dict[str, Any]]) -> str:
    """Say who trains in `directory` and what to do about it."""
    who = ", ".join(f"rank {holder['rank']} (pid {holder['pid']})" for holder in holders)
    pids = " ".join(str(holder["pid"]) for holder in holders)
    return (
        f"{directory} is in use by a live job: {who}. Wait for it, end it with `kill {pids}` "
        "(its newest snapshot is then resumed), or save somewhere else."
    )


def keeper_status(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Ask the keeper of `directory` on this node how it is; None when none is alive."""
    identity = load_run(directory)
    if identity is None:
        return None
    with wire.new_socket() as sock:
        sock.settimeout(10.0)
        try:
            sock.connect(identity.node_path(".sock"))
            wire.send(sock, {"op": "status"})
            return wire.receive(sock)[0]
        except (FileNotFoundError, ConnectionError):
            return None


def live_processes(directory: str | os.PathLike[str]) -> list[LiveProcess]:
    """Return the processes that train in `directory` on this node right now. Starts nothing."""
    status = keeper_status(directory)
    if status is None:
        return []
    return [LiveProcess(rank=entry["rank"], pid=entry["pid"]) for entry in status["trainers"]]
