"""RunConfig: rules of single settings and between settings."""

from __future__ import annotations

import pytest

from rapidformer import ConfigError, RunConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "sequence_clasification"}, "Did you mean sequence_classification"),
        ({"task": "causal_lm"}, "--task causal_lm is not in this version"),
        ({"lr": 0.0}, "--lr 0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"lr": 1e-5, "min_lr": 1e-3}, "--min-lr 0.001 is above --lr 1e-05"),
        ({"lr_decay_style": "linaer"}, "Did you mean linear"),
        ({"resume": "maybe"}, "auto, never, must"),
        ({"epochs": 0}, "Nearest: --epochs 1"),
        ({"micro_batch_size": -1}, "--micro-batch-size -1"),
        ({"save_mem_interval": 0}, "--save-mem-interval 0"),
        ({"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, "exclude each other"),
        ({"lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0"),
        ({"lr_warmup_iters": 10, "lr_decay_iters": 10}, "nearest: --lr-warmup-iters 9"),
        ({"text_column": ("a", "b", "c")}, "two for pairs"),
        ({"text_column": ("a",), "label_column": "a"}, "cannot be both"),
        ({"adam_beta2": 1.0}, "--adam-beta2 1.0"),
    ],
)
def test_a_bad_setting_is_refused_with_its_flag_and_what_is_allowed(settings, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        RunConfig(**settings)


def test_the_default_folder_names_task_and_model():
    config = RunConfig(task="sequence_classification", pretrained_model_name_or_path="models/tiny/")
    assert config.save_path == "runs/sequence_classification-tiny"


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        RunConfig().lr = 1.0
