"""The pretrained model of a task: is it there, and how long may its inputs be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rapidformer import ConfigError
from rapidformer.config import RunConfig

_LONGEST_BY_DEFAULT = 512
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedModel:
    """A model that can be loaded; its weights are not read yet."""

    name: str
    config: Any
    tokenizer: Any
    seq_length: int
    """Longest input in tokens."""


def open_pretrained(config: RunConfig) -> PretrainedModel:
    """Read configuration and tokenizer of --pretrained-model-name-or-path.

    Raises:
        ConfigError: it is not there, lacks a part, or cannot take --seq-length tokens.
    """
    from transformers import AutoConfig, AutoTokenizer

    name = config.pretrained_model_name_or_path
    flag = "--pretrained-model-name-or-path"
    if name is None:
        raise ConfigError(f"{flag} is missing; give a folder with a Hugging Face model, or a name")
    _check_folder(name, flag)
    try:
        model_config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as err:
        raise ConfigError(
            f"{flag} {name} is neither a model folder here nor a model that can be loaded: "
            f"{str(err).splitlines()[0]}"
        ) from err
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return PretrainedModel(
        name=name,
        config=model_config,
        tokenizer=tokenizer,
        seq_length=_seq_length(config, model_config, tokenizer),
    )


def _check_folder(name: str, flag: str) -> None:
    path = Path(name)
    if path.is_file():
        raise ConfigError(f"{flag} {name} is a file; give the folder that it is in")
    if not path.exists():
        if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
            raise ConfigError(f"{flag} {name} does not exist; give a folder with a model")
        return
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{flag} {name} has no config.json; give a folder with a Hugging Face model"
        )
    if not any((path / file).is_file() for file in _WEIGHTS):
        raise ConfigError(f"{flag} {name} has no weights; expected one of: {', '.join(_WEIGHTS)}")
    if not any(path.glob("*token*")) and not any(path.glob("*vocab*")):
        raise ConfigError(f"{flag} {name} has no tokenizer; save it there with save_pretrained()")


def _seq_length(config: RunConfig, model_config: Any, tokenizer: Any) -> int:
    positions = getattr(model_config, "max_position_embeddings", None) or tokenizer.model_max_length
    # RoBERTa's tables hold two positions that no token takes.
    longest = min(positions, tokenizer.model_max_length)
    if config.seq_length is None:
        return min(longest, _LONGEST_BY_DEFAULT)
    if config.seq_length > longest:
        raise ConfigError(
            f"--seq-length {config.seq_length} is longer than the model takes; "
            f"nearest: --seq-length {longest}"
        )
    return config.seq_length
