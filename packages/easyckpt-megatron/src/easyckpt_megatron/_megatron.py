"""Which Megatron is installed, found without running any of its code."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from easyckpt_megatron.errors import MegatronNotFoundError, UnsupportedMegatronError

# What the training loop of each layout is called, newest layout first. The last entry is Megatron's
# library alone, which has no training loop.
LAYOUTS = {
    "megatron.training": "Megatron-LM",
    "megatron.checkpointing": "Megatron-LM in its layout of 2023",
    "megatron.core": "megatron-core without Megatron-LM",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMegatron:
    """A Megatron that can be imported."""

    module: str
    """The module that tells the layout: a key of LAYOUTS."""

    version: str | None
    """Version of its megatron.core; None where neither a file nor a package says it."""

    def __str__(self) -> str:
        version = f"version {self.version}" if self.version else "of unknown version"
        return f"{LAYOUTS[self.module]} {version} (module {self.module})"


def refusal(feature: str) -> MegatronNotFoundError | UnsupportedMegatronError:
    """Return the error that this release owes to whoever uses `feature`."""
    found = find_megatron()
    if found is None:
        return MegatronNotFoundError(
            f"easyckpt_megatron: {feature} needs Megatron, and none of "
            f"{', '.join(LAYOUTS)} can be imported. Install its library with "
            "pip install 'easyckpt-megatron[megatron]', and put your checkout of Megatron-LM "
            "on PYTHONPATH."
        )
    return UnsupportedMegatronError(
        f"easyckpt_megatron: {feature} found {found}, but this release has the published names "
        "only: it can neither save nor load checkpoints under Megatron, a later release will. "
        "Nothing was saved or loaded; keep Megatron's own --save and --load until then."
    )


def find_megatron() -> FoundMegatron | None:
    """Return the installed Megatron, or None. Imports none of it."""
    locations = _search_locations()
    for module in LAYOUTS:
        if PathFinder.find_spec(module, locations) is not None:
            return FoundMegatron(module=module, version=_core_version(locations))
    return None


def _search_locations() -> Sequence[str]:
    # Looked up from the top package: importlib.util.find_spec("megatron.core") would import
    # `megatron` first, which runs code in the layout of 2023.
    loaded = sys.modules.get("megatron")
    if loaded is not None:
        return list(getattr(loaded, "__path__", ()))
    spec = importlib.util.find_spec("megatron")
    return list(spec.submodule_search_locations or ()) if spec else ()


def _core_version(locations: Sequence[str]) -> str | None:
    # A checkout on PYTHONPATH goes before an installed package, so its own file is asked first.
    spec = PathFinder.find_spec("megatron.core", locations)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        info = Path(folder, "package_info.py")
        if info.is_file():
            text = info.read_text(encoding="utf-8")
            numbers = [_assigned(text, name) for name in ("MAJOR", "MINOR", "PATCH")]
            if all(numbers):
                return ".".join(filter(None, numbers))
    if spec is None:
        return None
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def _assigned(text: str, name: str) -> str | None:
    match = re.search(rf"^{name} *= *(\d+)", text, flags=re.MULTILINE)
    return match.group(1) if match else None
