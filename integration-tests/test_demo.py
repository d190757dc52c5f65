"""The demo in its short form, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from easyckpt_core.testing import keeper_pids

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_killed_worker_changes_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.delenv("EASYCKPT_RUNTIME_DIR", raising=False)
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "demo/run_demo.py"), "--short", "--seed", "11"),
            *("--report", str(tmp_path / "report")),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    match = re.fullmatch(
        r"demo: accuracy=\d\.\d\d majority=\d\.\d\d killed_at=(\d+) resumed_at=(\d+) "
        r"resumed_from=memory",
        last,
    )
    assert match is not None, last
    assert int(match[1]) - int(match[2]) in (0, 1)
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["losses_equal"] and report["weights_equal"]
    assert len(report["killed"]) == report["num_steps"] == 12
    assert (tmp_path / "report/loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert keeper_pids(scratch) == []
    leftovers = [path.name for path in scratch.iterdir() if "demo" in path.name]
    leftovers += [path.name for path in scratch.glob("easyckpt-*/*")]
    assert leftovers == []
