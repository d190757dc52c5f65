"""Fixtures: a tiny BERT made here, and real processes over gloo."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rapidformer import session

WORDS = [
    "good",
    "bad",
    "fine",
    "poor",
    "great",
    "awful",
    "film",
    "food",
    "phone",
    "movie",
    "is",
    "the",
    "a",
    "not",
    "very",
    "it",
    "was",
]


@pytest.fixture(autouse=True)
def fresh_session(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    session.clear()
    yield
    session.clear()


@pytest.fixture(scope="session")
def needs_easyckpt() -> None:
    """Skip a test that saves checkpoints where the extra is not installed."""
    if importlib.util.find_spec("easyckpt_core") is None:
        pytest.skip("the extra is not installed: pip install 'rapidformer-engine[easyckpt]'")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random BERT of 2 layers with a WordPiece vocabulary of a few words, saved to a folder."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder = tmp_path_factory.mktemp("tiny-bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def run_ranks() -> Callable[..., None]:
    """Run a Python text on several ranks, each a process of its own; fails if one of them does."""

    def run(text: str, *, world_size: int = 2, arguments: tuple[str, ...] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", text, *arguments],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = []
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        codes = [process.returncode for process in processes]
        assert codes == [0] * world_size, "\n".join(outputs)

    return run
