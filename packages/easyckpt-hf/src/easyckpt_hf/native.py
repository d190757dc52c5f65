"""Checkpoints that a plain Trainer left: which is the newest whole one.

A plain Trainer writes in place and marks nothing, so what can be judged is the structure: the files
that its loader needs are there, and each of them is whole by its own format.
"""

from __future__ import annotations

import json
import logging
import struct
import zipfile
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

_OURS = ("easyckpt_manifest.json", "easyckpt_complete")


def newest_native(directory: str | Path, newer_than: int) -> tuple[int, Path] | None:
    """Return (step, path) of the newest whole checkpoint that EasyCkpt did not write.

    Torn ones are skipped with one warning each that says what is wrong.
    """
    found: dict[int, Path] = {}
    for path in Path(directory).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.rpartition("-")[2]
        if path.is_dir() and number.isdigit() and int(number) > newer_than:
            found[int(number)] = path
    for step in sorted(found, reverse=True):
        if any((found[step] / name).exists() for name in _OURS):
            # Marked steps are judged by their manifest; this one was and is not the newest good.
            continue
        fault = find_fault(found[step])
        if fault is None:
            return step, found[step]
        logger.warning("checkpoint %s is not whole and is skipped: %s", found[step], fault)
    return None


def find_fault(path: Path) -> str | None:
    """Return what keeps the Trainer from resuming from `path`, or None."""
    try:
        json.loads((path / "trainer_state.json").read_text())
    except (OSError, ValueError) as err:
        return f"trainer_state.json: {err}"
    archives = [path / name for name in ("optimizer.pt", "scheduler.pt", "scaler.pt")]
    for archive in [*archives, *sorted(path.glob("rng_state*.pth"))]:
        if archive.exists() and not zipfile.is_zipfile(archive):
            return f"{archive.name} is cut off"
    try:
        weights = _weight_files(path)
    except (OSError, ValueError, KeyError, AttributeError) as err:
        return f"the index of the weights cannot be read: {err!r}"
    if not weights:
        return "it has no model weights"
    for file in weights:
        if not file.exists():
            return f"{file.name} is missing"
        fault = _safetensors_fault(file) if file.suffix == ".safetensors" else None
        if fault is not None:
            return fault
    return None


def _weight_files(path: Path) -> list[Path]:
    """Return the files of the weights that the Trainer would load: one, or every shard."""
    names = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
    found = [path / name for name in names if (path / name).exists()]
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if not found and (path / name).exists():
            shards = json.loads((path / name).read_text())["weight_map"].values()
            found = sorted({path / shard for shard in shards})
    return found


def _safetensors_fault(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                return f"{path.name} is empty"
            header_bytes = struct.unpack("<Q", prefix)[0]
            actual_bytes = path.stat().st_size
            if header_bytes > actual_bytes:
                return f"{path.name} is cut off"
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected_bytes = 8 + header_bytes + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        # A file whose blocks never reached the disk is full of zeros.
        return f"{path.name} has no readable header"
    if actual_bytes != expected_bytes:
        return f"{path.name} has {actual_bytes:,} bytes, its header says {expected_bytes:,}"
    return None
