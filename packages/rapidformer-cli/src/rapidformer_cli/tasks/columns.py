"""Which columns are text and label, and which labels there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rapidformer import DataError
from rapidformer.config import RunConfig, nearest
from rapidformer_cli.tasks.text_data import TextData

_PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
)
_TEXTS = ("text", "sentence", "content", "review", "document", "body", "title")
_LABELS = ("label", "labels", "class", "category", "target", "sentiment")
_LABEL_TYPES = "whole numbers, strings, booleans"


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns a classifier is trained from."""

    text: tuple[str, ...]
    """One column, or two for pairs."""

    label: str
    """Column of the labels."""

    labels: tuple[str, ...]
    """Names of the labels; the place in this tuple is the number the model gives."""

    values: tuple[Any, ...]
    """What stands for each label in the data."""


def find_columns(config: RunConfig, data: TextData) -> Columns:
    """Find or check the columns of `data`.

    Raises:
        DataError: a column is missing, of a wrong type, or has empty rows; lists the columns.
    """
    features = data.train.features
    label = _label_column(config, features)
    text = _text_columns(config, features, label)
    splits = {"train": data.train, "validation": data.validation}
    for name, split in splits.items():
        for column in (*text, label):
            _check_filled(split, name, column)
    values, labels = _labels_of(data.train, label)
    unknown = sorted({str(v) for v in set(data.validation.unique(label)) - set(values)})
    if unknown:
        raise DataError(
            f"column {label} of the validation split has labels that the training split lacks: "
            f"{', '.join(unknown[:5])}; the training split has {', '.join(labels[:10])}"
        )
    return Columns(text=text, label=label, labels=labels, values=values)


def _label_column(config: RunConfig, features: Any) -> str:
    wanted = config.label_column
    if wanted is not None and wanted not in features:
        raise DataError(
            f"--label-column {wanted} is not in the data; columns: {_listed(features)}."
            f"{nearest(wanted, list(features))}"
        )
    label = wanted or next((name for name in _LABELS if name in features), None)
    if label is None:
        raise DataError(
            f"no label column found; columns: {_listed(features)}. Name it with --label-column"
        )
    if not _is_label(features[label]):
        usable = [name for name, feature in features.items() if _is_label(feature)]
        raise DataError(
            f"label column {label} holds {_type_name(features[label])}; allowed: {_LABEL_TYPES}. "
            f"Columns of such a type: {', '.join(usable) or 'none'}; choose with --label-column"
        )
    return label


def _text_columns(config: RunConfig, features: Any, label: str) -> tuple[str, ...]:
    for name in config.text_column:
        if name not in features:
            raise DataError(
                f"--text-column {name} is not in the data; columns: {_listed(features)}."
                f"{nearest(name, list(features))}"
            )
        if not _is_text(features[name]):
            raise DataError(
                f"--text-column {name} holds {_type_name(features[name])}; allowed: strings. "
                f"Columns: {_listed(features)}"
            )
    if config.text_column:
        return config.text_column
    texts = [name for name in features if name != label and _is_text(features[name])]
    for pair in _PAIRS:
        if all(name in texts for name in pair):
            return pair
    for name in _TEXTS:
        if name in texts:
            return (name,)
    if len(texts) == 1:
        return (texts[0],)
    raise DataError(
        f"the text column is not clear; columns: {_listed(features)}. Name it with --text-column "
        "(two names for pairs of texts)"
    )


def _check_filled(split: Any, split_name: str, column: str) -> None:
    if column not in split.features:
        raise DataError(
            f"column {column} is missing in the {split_name} split; it has "
            f"{_listed(split.features)}"
        )
    missing = split.data.column(column).null_count if split._indices is None else None
    if missing is None:
        missing = sum(value is None for value in split[column])
    if missing:
        raise DataError(
            f"column {column} is empty in {missing} of {len(split)} rows of the {split_name} "
            "split; fill or remove those rows"
        )


def _labels_of(train: Any, label: str) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    feature = train.features[label]
    if hasattr(feature, "names"):
        names = tuple(feature.names)
        return tuple(range(len(names))), names
    values = tuple(sorted(set(train.unique(label))))
    if len(values) < 2:
        raise DataError(
            f"label column {label} has the one value {values[0]!r}; at least two labels are needed"
        )
    return values, tuple(str(value) for value in values)


def _is_label(feature: Any) -> bool:
    kind = getattr(feature, "dtype", "")
    return isinstance(kind, str) and (kind.startswith(("int", "uint", "bool")) or _is_text(feature))


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _type_name(feature: Any) -> str:
    kind = getattr(feature, "dtype", None)
    return {
        "float64": "fractional numbers",
        "float32": "fractional numbers",
        "null": "nothing",
    }.get(
        kind if isinstance(kind, str) else "", kind if isinstance(kind, str) else "lists or records"
    )


def _listed(features: Any) -> str:
    return ", ".join(f"{name} ({_type_name(feature)})" for name, feature in features.items())
