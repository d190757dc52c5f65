import importlib
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def fake_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put an importable package tree named megatron in front of everything else."""

    def make(*modules: str, version: str | None = None, regular_package: bool = False) -> Path:
        root = tmp_path / "checkout" / "megatron"
        root.mkdir(parents=True)
        for module in modules:
            folder = root / module
            folder.mkdir()
            (folder / "__init__.py").write_text("raise AssertionError('Megatron was imported')\n")
        if version is not None:
            major, minor, patch = version.split(".")
            (root / "core" / "package_info.py").write_text(
                f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
            )
        if regular_package:
            (root / "__init__.py").write_text("raise AssertionError('Megatron was imported')\n")
        monkeypatch.syspath_prepend(root.parent)
        importlib.invalidate_caches()
        return root

    return make
