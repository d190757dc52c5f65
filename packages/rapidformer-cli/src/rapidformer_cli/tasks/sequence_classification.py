"""Task sequence_classification: one text, or a pair, to one of several labels."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rapidformer import Finetuner, RapidformerEngine, get_args
from rapidformer.config import RunConfig
from rapidformer.metrics import classification_metrics
from rapidformer.run_folder import RunFolder, write_json
from rapidformer_cli.tasks.columns import Columns, find_columns
from rapidformer_cli.tasks.pretrained import PretrainedModel, open_pretrained
from rapidformer_cli.tasks.text_data import TextData, open_text_data


class ClassificationInput:
    """Model and data of a run, opened and checked; nothing is written until prepare()."""

    def __init__(self, config: RunConfig) -> None:
        self.pretrained: PretrainedModel = open_pretrained(config)
        self.data: TextData = open_text_data(config)
        self.columns: Columns = find_columns(config, self.data)
        self._cache = RunFolder(config.save_path).cache

    def facts(self) -> dict[str, Any]:
        """Return what of the data decides the result."""
        return {
            "data_sha256": self.data.sha256,
            "text_columns": list(self.columns.text),
            "label_column_found": self.columns.label,
            "labels": list(self.columns.labels),
            "tokens_at_most": self.pretrained.seq_length,
        }

    def prepare(self) -> Path:
        """Tokenise into the run's cache, unless it is there, and return the folder.

        Safe to call from several processes at once: one does the work, the others wait.
        """
        self._cache.mkdir(parents=True, exist_ok=True)
        folder = self._cache / self._fingerprint()
        with (self._cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                temporary = self._cache / f".{secrets.token_hex(6)}.tmp"
                for name in ("train", "validation"):
                    self._tokenise(getattr(self.data, name)).save_to_disk(str(temporary / name))
                write_json(temporary / "facts.json", self.facts())
                os.rename(temporary, folder)
        return folder

    def _tokenise(self, split: Any) -> Any:
        columns, tokenizer = self.columns, self.pretrained.tokenizer
        numbers = {value: number for number, value in enumerate(columns.values)}
        longest = self.pretrained.seq_length

        def encode(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
            texts = [rows[name] for name in columns.text]
            encoded = dict(tokenizer(*texts, truncation=True, max_length=longest))
            encoded["labels"] = [numbers[value] for value in rows[columns.label]]
            return encoded

        return split.map(
            encode,
            batched=True,
            remove_columns=split.column_names,
            load_from_cache_file=False,
            keep_in_memory=True,
            new_fingerprint=secrets.token_hex(8),
        )

    def _fingerprint(self) -> str:
        tokenizer = self.pretrained.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        spelled = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab())
        parts = [json.dumps(self.facts(), sort_keys=True), spelled]
        parts += [split._fingerprint for split in (self.data.train, self.data.validation)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


class SequenceClassification(Finetuner):
    """The task as a Finetuner; `folder` is what ClassificationInput.prepare() returned."""

    def __init__(
        self, engine: RapidformerEngine, source: ClassificationInput, folder: Path
    ) -> None:
        super().__init__(engine=engine)
        self.tokenizer = source.pretrained.tokenizer
        self._source = source
        self._folder = folder

    def facts(self) -> Mapping[str, Any]:
        return self._source.facts()

    def train_valid_test_datasets_provider(self) -> tuple[Any, Any, Any, Any]:
        from datasets import load_from_disk
        from transformers import DataCollatorWithPadding

        train = load_from_disk(str(self._folder / "train"))
        validation = load_from_disk(str(self._folder / "validation"))
        return train, validation, None, DataCollatorWithPadding(self.tokenizer)

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        from transformers import AutoModelForSequenceClassification

        labels = self._source.columns.labels
        model = AutoModelForSequenceClassification.from_pretrained(
            get_args().pretrained_model_name_or_path,
            num_labels=len(labels),
            id2label=dict(enumerate(labels)),
            label2id={name: number for number, name in enumerate(labels)},
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
        )
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        model.config.problem_type = "single_label_classification"
        return model, None, None

    def run_forward_step(self, batch: Any, model: torch.nn.Module) -> torch.Tensor:
        return model(**batch).loss

    def run_compute_metrics(self, model: list[torch.nn.Module], eval_dataloader: Any) -> dict:
        predictions, references = [], []
        for batch in eval_dataloader:
            logits = model[0](**batch).logits
            predictions += self.gather(logits.argmax(dim=-1)).tolist()
            references += self.gather(batch["labels"]).tolist()
        num_labels = len(self._source.columns.labels)
        return classification_metrics(predictions, references, num_labels=num_labels)
