"""Entry point of the keeper process, and the lock that makes it the only one of its run.

Started as `python -m easyckpt_core.keeper_process DIRECTORY SETTINGS-AS-JSON`. Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
from glob import escape as glob_escape
from glob import glob
from typing import Any

from easyckpt_core import wire
from easyckpt_core.keeper import Keeper
from easyckpt_core.run_identity import load_run, make_runtime_folder


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
        signal.signal(signal.SIGTERM, lambda *_: keeper.call_soon(lambda: keeper.stop("SIGTERM")))
        keeper.run(listener)
        return 0
    finally:
        listener.close()
        # A reader that was killed leaves its directory of links behind.
        for folder in glob(glob_escape(identity.node_path(".view-")) + "*"):
            shutil.rmtree(folder, ignore_errors=True)
        for path in (socket_path, identity.node_path(".log"), lock_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        os.close(lock_fd)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(lock_path))


def _lock(path: str) -> int | None:
    """Take the life-long lock of a run; None when another keeper has it."""
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        # A keeper that is just ending unlinks the file: a lock on it protects nothing then.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def main() -> None:
    """Be a keeper until the run is over."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    os.chdir("/")
    os.nice(10)
    sys.exit(serve(sys.argv[1], json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
