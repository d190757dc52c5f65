"""Metrics of a classification, and what guessing the most frequent label would get."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def classification_metrics(
    predictions: Sequence[int], references: Sequence[int], *, num_labels: int
) -> dict[str, float | int]:
    """Return accuracy, F1 and the majority baseline over all samples given.

    F1 is that of label 1 where there are two labels, and the unweighted mean over labels otherwise.
    """
    from sklearn.metrics import accuracy_score, f1_score

    predicted, wanted = np.asarray(predictions), np.asarray(references)
    if num_labels == 2:
        f1 = f1_score(wanted, predicted, pos_label=1, average="binary", zero_division=0.0)
    else:
        f1 = f1_score(wanted, predicted, average="macro", zero_division=0.0)
    counts = np.bincount(wanted, minlength=num_labels)
    return {
        "accuracy": float(accuracy_score(wanted, predicted)),
        "f1": float(f1),
        "majority_accuracy": float(counts.max() / len(wanted)),
        "num_samples": len(wanted),
    }
