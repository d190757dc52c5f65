"""What the libraries print stays off the terminal."""

from __future__ import annotations

import subprocess
import sys


def test_progress_bars_are_off_also_where_datasets_was_imported_before(monkeypatch):
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS", raising=False)
    code = (
        "import datasets; from rapidformer_cli.main import quiet_libraries;"
        "before = datasets.are_progress_bars_disabled(); quiet_libraries();"
        "print(before, datasets.are_progress_bars_disabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
