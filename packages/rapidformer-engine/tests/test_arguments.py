"""The command line."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rapidformer import ArgumentsError, ConfigError, RunConfig, get_args, parse_args, session
from rapidformer.arguments import build_parser, field_help, read_arguments


def test_the_documented_command_line_is_read():
    config = parse_args(
        [
            "--task",
            "sequence_classification",
            "--pretrained-model-name-or-path",
            "bert-base-cased",
            "--data-path",
            "glue",
            "--data-name",
            "mrpc",
            "--epochs",
            "3",
            "--micro-batch-size",
            "16",
            "--global-batch-size",
            "64",
            "--lr",
            "2e-5",
            "--lr-decay-style",
            "linear",
            "--lr-warmup-iters",
            "100",
            "--weight-decay",
            "1e-2",
            "--clip-grad",
            "1.0",
            "--seed",
            "42",
        ]
    )
    assert (config.lr, config.weight_decay, config.seed) == (2e-5, 0.01, 42)
    assert (config.data_path, config.data_name) == ("glue", "mrpc")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--data-dir glue", {"data_path": "glue"}),
        ("--dataset-name glue", {"data_path": "glue"}),
        ("--data-path glue --dataset-name mrpc", {"data_path": "glue", "data_name": "mrpc"}),
        ("--save-interval 5", {"save_storage_interval": 5}),
        ("--text-column a b", {"text_column": ("a", "b")}),
    ],
)
def test_other_spellings_mean_the_same(line, expected):
    config = parse_args(line.split())
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--micro-batchsize 4",
            "--micro-batchsize is not a known flag. Did you mean --micro-batch-size",
        ),
        ("--mixed-precision", "--mixed-precision is not in this version"),
        ("--lr fast", "--lr: 'fast' is not a number"),
        ("--epochs 1.5", "--epochs: '1.5' is not a whole number"),
        ("--epochs", "--epochs: expected one argument"),
        ("--epo 3", "--epo is not a known flag"),
        ("--save-interval 0", "--save-interval 0 is too small"),
        ("--data-name a --data-path b --dataset-name c", "give one of the two"),
        ("stray", "'stray' belongs to no flag"),
        ("--task casual_lm", "--task causal_lm is not in this version"),
    ],
)
def test_a_bad_line_is_refused_in_words_that_name_it(line, words):
    with pytest.raises(ConfigError) as caught:
        parse_args(line.split())
    assert words in str(caught.value)


def test_unknown_flags_are_judged_after_a_script_declared_its_own():
    def provider(parser):
        parser.add_argument("--keep-top", type=int, default=3)
        return parser

    parsed = read_arguments(["--keep-top", "5", "--lr", "1e-4"], provider)
    assert parsed.extra == {"keep_top": 5}
    with pytest.raises(ArgumentsError, match="Did you mean --keep-top"):
        read_arguments(["--keep-tops", "5"], provider)


def test_every_setting_has_help_and_a_flag():
    names = {field.name for field in fields(RunConfig)}
    assert set(field_help()) == names
    shown = build_parser().format_help()
    for name in names:
        assert "--" + name.replace("_", "-") in shown


def test_get_args_has_every_published_name():
    session.set_current(
        parse_args(["--data-path", "glue", "--data-name", "mrpc", "--save-interval", "7"])
    )
    args = get_args()
    assert args.data_path == args.dataset_path == args.data_dir == "glue"
    assert args.data_name == args.dataset_name == "mrpc"
    assert args.save_interval == args.save_storage_interval == 7
