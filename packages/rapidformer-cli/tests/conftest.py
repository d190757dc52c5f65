"""Fixtures: a tiny BERT and tiny data made here, and the command in processes of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

POSITIVE, NEGATIVE = ("good", "fine", "great"), ("bad", "poor", "awful")
NEUTRAL = ("film", "food", "phone", "movie", "is", "the", "a", "not", "very", "it", "was")


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("EASYCKPT_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random BERT of 2 layers with a WordPiece vocabulary of a few words, saved to a folder."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("tiny-bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *POSITIVE, *NEGATIVE, *NEUTRAL]
    BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """83 training and 21 validation rows whose label follows from one word."""
    folder = tmp_path_factory.mktemp("tiny-data")
    draw = random.Random(0)
    for name, num_rows in (("train", 83), ("validation", 21)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(num_rows):
                is_good = number % 2 == 0
                words = draw.sample(NEUTRAL, draw.randint(3, 8))
                words.insert(draw.randint(0, 3), draw.choice(POSITIVE if is_good else NEGATIVE))
                row = {"text": " ".join(words), "label": "positive" if is_good else "negative"}
                file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def flags(tiny_model, tiny_data, tmp_path) -> Callable[..., list[str]]:
    """Return a command line that works, with flags replaced or (None) left out."""

    def make(**changes: object) -> list[str]:
        settings: dict[str, object] = {
            "task": "sequence_classification",
            "pretrained-model-name-or-path": tiny_model,
            "data-path": tiny_data,
            "epochs": 2,
            "micro-batch-size": 4,
            "global-batch-size": 8,
            "lr": 1e-2,
            "seed": 42,
            "save": tmp_path / "run-folder",
            "log-interval": 1,
        }
        settings.update({name.replace("_", "-"): value for name, value in changes.items()})
        words = []
        for name, value in settings.items():
            if value is not None:
                words += [f"--{name}", *([] if value is True else str(value).split())]
        return words

    return make


@pytest.fixture
def start() -> Callable[[list[str]], subprocess.Popen]:
    """Start the command in a process of its own, which is ended with the test."""
    started = []

    def run(words: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "rapidformer_cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=30)
