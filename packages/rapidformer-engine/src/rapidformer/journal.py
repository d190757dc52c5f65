"""JSON lines of a run, one a step, that stay true when the run dies and goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO


class Journal:
    """A file of JSON lines with a `step` in each; what a lost part of a run wrote is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def start(self, step: int) -> list[dict[str, Any]]:
        """Open the file for appending after `step`, dropping later lines; returns those kept."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_lines(self._path) if record["step"] <= step]
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(temporary, self._path)
        self._file = self._path.open("a")
        return kept

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; it has left this process when the call returns."""
        assert self._file is not None, "start() opens the journal"
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of `path`; a line that a dying process left unfinished is skipped."""
    records = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records
