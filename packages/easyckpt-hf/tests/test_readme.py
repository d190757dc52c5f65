"""The code in README.md runs."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_runs_again(train, tmp_path, steps_in):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    train(tmp_path, code=code)
    assert steps_in(tmp_path / "run") == [10, 20]
    assert train(tmp_path, code=code).lines_with("resuming from storage at step 20")
