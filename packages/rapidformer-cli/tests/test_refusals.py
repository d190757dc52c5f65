"""What is refused before a process is started: one message, exit code 2, no traceback."""

from __future__ import annotations

import json
import os

import pytest

from rapidformer_cli import main


def refused(words, capsys):
    assert main(words) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err + shown.out
    assert shown.err.startswith("rapidformer: error: ")
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "sequence_clasification"}, "Did you mean sequence_classification?"),
        ({"task": "pretraining"}, "--task pretraining is not in this version"),
        ({"task": None}, "--task is missing"),
        ({"micro_batchsize": 4}, "Did you mean --micro-batch-size?"),
        ({"mixed_precision": True}, "--mixed-precision is not in this version"),
        ({"lr": "fast"}, "--lr: 'fast' is not a number"),
        ({"epochs": None}, "give --epochs"),
        ({"pretrained_model_name_or_path": None}, "--pretrained-model-name-or-path is missing"),
        ({"pretrained_model_name_or_path": "/no/such/model"}, "/no/such/model does not exist"),
        ({"pretrained_model_name_or_path": "no-such-name"}, "neither a model folder here nor"),
        ({"data_path": None}, "--data-path is missing"),
        ({"data_path": "./no-such.jsonl"}, "--data-path ./no-such.jsonl does not exist"),
        ({"data_path": "no-such-set"}, "neither a file or folder here nor a data set"),
        ({"label_column": "lable"}, "Did you mean label?"),
        ({"label_column": "lable"}, "columns: text (string), label (string)"),
        ({"text_column": "txt"}, "--text-column txt is not in the data"),
        ({"global_batch_size": 10, "nproc_per_node": 2}, "--global-batch-size 8 or 16"),
        ({"seq_length": 99}, "nearest: --seq-length 32"),
        ({"lr_warmup_iters": 5000}, "nearest: --lr-warmup-iters 21"),
        ({"resume": "must"}, "holds no run to go on from"),
        ({"user_script": "no-such.py"}, "--user-script no-such.py does not exist"),
        ({"save": "/dev/null/run"}, "is a file; give a folder"),
    ],
)
def test_a_wrong_flag_is_refused(flags, capsys, changes, words):
    assert words in refused(flags(**changes), capsys)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"text": "good"}] * 2, "no label column found; columns: text (string)"),
        ([{"text": "good", "label": 0.5}, {"text": "bad", "label": 1.5}], "fractional numbers"),
        ([{"text": "good", "label": [1]}, {"text": "bad", "label": [2]}], "lists or records"),
        ([{"text": "good", "label": 1}, {"text": "bad", "label": 1}], "at least two labels"),
        ([{"text": "good", "label": 1}, {"text": None, "label": 2}] * 9, "is empty in"),
        ([{"a": "x", "b": "y", "label": 1}, {"a": "x", "b": "z", "label": 2}], "not clear"),
        ([{"text": "good", "label": 1}], "at least 2 are needed"),
    ],
)
def test_wrong_data_is_refused(flags, capsys, tmp_path, rows, words):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert words in refused(flags(data_path=file), capsys)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("mine.jsonl", "", "is an empty file"),
        ("mine.jsonl", "{not json", "cannot be read as json"),
        ("mine.txt", "good", "files ending in .txt cannot be read"),
    ],
)
def test_an_unreadable_file_is_refused(flags, capsys, tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    assert words in refused(flags(data_path=tmp_path / name), capsys)


def test_a_folder_without_data_or_model_is_refused(flags, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is an empty folder" in refused(flags(data_path=tmp_path / "empty"), capsys)
    words = flags(pretrained_model_name_or_path=tmp_path / "empty")
    assert "has no config.json" in refused(words, capsys)


def test_several_machines_are_refused(flags, capsys, monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    assert "this version trains on one machine" in refused(flags(), capsys)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(flags, capsys, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "no permission" in refused(flags(save=tmp_path / "locked" / "run"), capsys)


def test_a_folder_of_another_configuration_is_refused(flags, capsys, tmp_path):
    from rapidformer import parse_args
    from rapidformer.run_folder import RunFolder
    from rapidformer_cli.preflight import check_run

    checked = check_run(parse_args(flags()))
    RunFolder(tmp_path / "run-folder").record(
        checked.config, {"processes": 1, **checked.source.facts()}
    )
    assert main([*flags(), "--dry-run"]) == 0
    capsys.readouterr()
    shown = refused(flags(lr=1e-3, nproc_per_node=2), capsys)
    assert "--lr: recorded 0.01, now 0.001" in shown
    assert "processes: recorded 1, now 2" in shown


def test_a_dry_run_shows_the_plan_and_writes_nothing(flags, capsys, tmp_path):
    words = flags(nproc_per_node=2, dry_run=True, save_mem_interval=1, save_storage_interval=5)
    assert main(words) == 0
    shown = capsys.readouterr().out
    for part in (
        "83 training rows, 21 for evaluation",
        "text text; label label",
        "2: negative, positive",
        "8 = 4 samples x 1 accumulated x 2 processes",
        "22 (2 epochs)",
        "memory every step; storage every 5 steps, newest 5 kept",
    ):
        assert part in shown
    assert not (tmp_path / "run-folder").exists()


def test_a_single_file_is_split_and_the_plan_says_so(flags, capsys, tiny_data):
    assert main([*flags(data_path=tiny_data / "train.jsonl"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "75 training rows, 8 for evaluation" in shown
    assert "8 of 83 rows are held out for evaluation (seed 42)" in shown


def test_help_teaches_by_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "example (two processes" in shown and "--micro-batch-size N" in shown
