"""Find and open the data of a task: a folder, one file, or a data set's name on the Hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer import DataError
from rapidformer.config import RunConfig

_BUILDERS = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
}
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
_HELD_OUT = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Opened splits, not yet changed in any way."""

    train: Any
    validation: Any
    test: Any
    """None if there is no such split."""

    sha256: str
    """Hash of the bytes of all files, or of what identifies a data set on the Hub."""

    notes: tuple[str, ...]
    """What the user should know, one sentence each."""


def open_text_data(config: RunConfig) -> TextData:
    """Open --data-path. Without a validation split, a seeded tenth of the training data is one.

    Raises:
        DataError: nothing readable is there.
    """
    if config.data_path is None:
        raise DataError(
            "--data-path is missing; give a folder with train and validation files, or a file"
        )
    splits, sha256 = _open_splits(config, Path(config.data_path))
    if "train" not in splits:
        raise DataError(
            f"--data-path {config.data_path} has no training split; found: "
            f"{', '.join(sorted(splits))}. Name a file train.jsonl, .json, .csv, .tsv or .parquet"
        )
    for name, split in splits.items():
        if len(split) == 0:
            raise DataError(f"--data-path {config.data_path}: the {name} split has no rows")
    train, validation = splits["train"], splits.get("validation")
    notes: tuple[str, ...] = ()
    if validation is None:
        if len(train) < 2:
            raise DataError(
                f"--data-path {config.data_path} has {len(train)} row; at least 2 are needed "
                "to keep one for evaluation"
            )
        parts = train.train_test_split(test_size=_held_out(len(train)), seed=config.seed)
        train, validation = parts["train"], parts["test"]
        notes = (
            f"no validation split: {len(validation)} of {len(train) + len(validation)} rows are "
            f"held out for evaluation (seed {config.seed})",
        )
    return TextData(
        train=train, validation=validation, test=splits.get("test"), sha256=sha256, notes=notes
    )


def _held_out(num_rows: int) -> int:
    return max(1, round(num_rows * _HELD_OUT))


def _open_splits(config: RunConfig, path: Path) -> tuple[dict[str, Any], str]:
    if path.is_file():
        return {"train": _open_file(path)}, _hash_files([path])
    if path.is_dir():
        if config.data_name is not None and (path / config.data_name).is_dir():
            path = path / config.data_name
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return _open_saved(path), _hash_files(_files_below(path))
        files = _split_files(path)
        if files:
            opened = {name: _open_file(file) for name, file in files.items()}
            return opened, _hash_files(list(files.values()))
        if not any(_files_below(path)):
            raise DataError(
                f"--data-path {path} is an empty folder; put train.jsonl and validation.jsonl in it"
            )
        return _load(str(path), config.data_name), _hash_files(_files_below(path))
    looks_local = os.sep in str(path) and (path.is_absolute() or str(path).count(os.sep) > 1)
    if looks_local or str(path).startswith(".") or path.suffix in _BUILDERS:
        raise DataError(f"--data-path {config.data_path} does not exist; give a folder or a file")
    splits = _load(str(config.data_path), config.data_name)
    identity = "".join(str(split._fingerprint) for split in splits.values())
    return splits, hashlib.sha256(identity.encode()).hexdigest()


def _split_files(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, spellings in _SPLITS.items():
        files = [
            folder / f"{spelling}{suffix}"
            for spelling in spellings
            for suffix in _BUILDERS
            if (folder / f"{spelling}{suffix}").is_file()
        ]
        if len(files) > 1:
            raise DataError(
                f"--data-path {folder} has several {name} files: "
                f"{', '.join(file.name for file in files)}; keep one of them there"
            )
        if files:
            found[name] = files[0]
    return found


def _open_file(path: Path) -> Any:
    from datasets import load_dataset

    if path.suffix not in _BUILDERS:
        raise DataError(
            f"--data-path {path}: files ending in {path.suffix or 'nothing'} cannot be read; "
            f"allowed: {', '.join(_BUILDERS)}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"--data-path {path} is an empty file")
    builder, options = _BUILDERS[path.suffix]
    try:
        return load_dataset(builder, data_files=str(path), split="train", **options)
    except Exception as err:  # the readers of datasets raise many unrelated classes
        cause = str(err.__cause__ or err).splitlines()[0]
        raise DataError(f"--data-path {path} cannot be read as {builder}: {cause}") from err


def _open_saved(path: Path) -> dict[str, Any]:
    from datasets import Dataset, load_from_disk

    opened = load_from_disk(str(path))
    return {"train": opened} if isinstance(opened, Dataset) else dict(opened)


def _load(name: str, configuration: str | None) -> dict[str, Any]:
    from datasets import load_dataset

    try:
        return dict(load_dataset(name, configuration))
    except Exception as err:  # the loaders of datasets raise many unrelated classes
        raise DataError(
            f"--data-path {name} is neither a file or folder here nor a data set that can be "
            f"loaded: {str(err).splitlines()[0]}"
        ) from err


def _files_below(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.rglob("*")) if file.is_file())


def _hash_files(files: list[Path] | Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
