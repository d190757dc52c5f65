"""What makes a directory a run, and where this node keeps the run's socket, lock and log.

`<directory>/.easyckpt/run.json` holds two random names. `token` names the memory tier: a node-local
socket is derived from it and from the real path, so that a copied directory never reaches the
memory of its original. `run` names the history: steps committed under another `run` are not
pruned, and are not preferred on resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from easyckpt_core.errors import ConfigurationError, KeeperError

PRIVATE_FOLDER = ".easyckpt"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """The two names of a run and the node-local paths that follow from them."""

    directory: str
    token: str
    run: str

    @property
    def private_folder(self) -> Path:
        return Path(self.directory) / PRIVATE_FOLDER

    @property
    def events_path(self) -> Path:
        return self.private_folder / "events.jsonl"

    def node_path(self, suffix: str) -> str:
        """Return the node-local path with `suffix` (socket, lock, log). Creates nothing."""
        key = hashlib.sha256(f"{self.token}\0{self.directory}".encode()).hexdigest()[:20]
        return os.path.join(runtime_folder(), key + suffix)


def runtime_folder() -> str:
    """Return the node-local folder of sockets and locks: EASYCKPT_RUNTIME_DIR or one per user."""
    chosen = os.environ.get("EASYCKPT_RUNTIME_DIR")
    return chosen or os.path.join(tempfile.gettempdir(), f"easyckpt-{os.getuid()}")


def make_runtime_folder() -> str:
    """Create the node-local folder for this user alone.

    Raises:
        KeeperError: the folder belongs to somebody else or is a link.
    """
    folder = runtime_folder()
    os.makedirs(folder, mode=0o700, exist_ok=True)
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise KeeperError(
            f"{folder} belongs to another user or is not a directory; set EASYCKPT_RUNTIME_DIR to "
            "a node-local directory of your own"
        )
    return folder


def load_run(directory: str | os.PathLike[str]) -> RunIdentity | None:
    """Return the identity recorded in `directory`, or None where no run has been."""
    real = os.path.realpath(directory)
    try:
        record = json.loads((Path(real) / PRIVATE_FOLDER / "run.json").read_text())
        return RunIdentity(directory=real, token=str(record["token"]), run=str(record["run"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as err:
        raise ConfigurationError(
            f"{real}/{PRIVATE_FOLDER}/run.json is damaged ({err}); delete that file to start a new "
            "history in this directory (checkpoints stay)"
        ) from err


def open_run(directory: str | os.PathLike[str]) -> RunIdentity:
    """Return the identity of `directory`, making it on first use. Safe to race: one maker wins."""
    real = os.path.realpath(directory)
    folder = Path(real) / PRIVATE_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigurationError(
            f"directory {directory}: cannot be written ({err.strerror})"
        ) from err
    known = load_run(real)
    if known is not None:
        return known
    record = {"token": secrets.token_hex(16), "run": secrets.token_hex(8)}
    temporary = folder / f"run.{secrets.token_hex(6)}.tmp"
    temporary.write_text(json.dumps(record))
    try:
        # A hard link fails where a rename would replace what another rank has just made.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, folder / "run.json")
    finally:
        temporary.unlink()
    made = load_run(real)
    assert made is not None
    return made


def renew_run(identity: RunIdentity) -> RunIdentity:
    """Start a new history in the same directory (a declined resume); the memory tier stays ours."""
    renewed = RunIdentity(
        directory=identity.directory, token=identity.token, run=secrets.token_hex(8)
    )
    temporary = identity.private_folder / f"run.{secrets.token_hex(6)}.tmp"
    temporary.write_text(json.dumps({"token": renewed.token, "run": renewed.run}))
    os.replace(temporary, identity.private_folder / "run.json")
    return renewed
