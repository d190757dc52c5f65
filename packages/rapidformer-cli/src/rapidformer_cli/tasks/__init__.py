"""Built-in tasks."""

from rapidformer_cli.tasks.sequence_classification import SequenceClassification

__all__ = ["SequenceClassification"]
