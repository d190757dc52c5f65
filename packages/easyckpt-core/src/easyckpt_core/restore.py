"""Finding committed steps without a Checkpointer: for tools and plain scripts. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from easyckpt_core.commit import find_damage, list_committed
from easyckpt_core.run_identity import load_run
from easyckpt_core.storage import LocalStorage


def find_latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest committed step on storage whose bytes match its manifest, or None.

    Steps of the directory's current history are preferred to those of earlier ones.
    """
    committed = list_committed(LocalStorage(os.fspath(directory)))
    identity = load_run(directory)
    ours = [step for step in committed if identity is not None and step.run == identity.run]
    for step in reversed(ours or committed):
        if find_damage(directory, step) is None:
            return Path(directory) / step.directory_name
    return None
