"""The directories are the Trainer's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

OURS = {"easyckpt_manifest.json", "easyckpt_complete"}


@pytest.fixture(scope="module", params=["bert", "gpt2", "module"])
def directories(request, shared_train, plain, wrapped):
    """Two directories of the same step, by the plain and by the wrapped Trainer."""
    if request.param == "bert":
        outputs = [plain.output, wrapped.output]
    else:
        outputs = [shared_train.folder / f"{request.param}-{kind}" for kind in ("plain", "wrapped")]
        for output in outputs:
            is_wrapped = output.name.endswith("wrapped")
            shared_train(output, model=request.param, wrapped=is_wrapped)
    return [output / "checkpoint-8" for output in outputs]


def names_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*")}


def test_the_files_have_the_same_names(directories):
    plain, wrapped = directories
    assert names_in(wrapped) == names_in(plain) | OURS
    assert {"tokenizer.json", "training_args.bin", "rng_state.pth"} < names_in(plain)


def test_every_file_but_three_is_the_same_byte_for_byte(directories):
    plain, wrapped = directories
    # torch writes the name of the file into archives, and the arguments hold the output directory.
    by_content = {"optimizer.pt", "scheduler.pt", "training_args.bin"}
    for name in names_in(plain) - by_content:
        assert (wrapped / name).read_bytes() == (plain / name).read_bytes(), name


def test_optimizer_and_scheduler_are_equal_when_loaded(directories):
    plain, wrapped = directories
    for name in ("optimizer.pt", "scheduler.pt"):
        ours, theirs = (torch.load(path / name, weights_only=True) for path in (wrapped, plain))
        assert_same(ours, theirs)


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for name in ours:
            assert_same(ours[name], theirs[name])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def test_the_arguments_differ_in_the_output_directory_only(directories):
    plain, wrapped = (
        torch.load(path / "training_args.bin", weights_only=False).to_dict() for path in directories
    )
    assert {name for name in plain if plain[name] != wrapped[name]} == {"output_dir"}


def test_the_manifest_lists_every_file_but_itself(directories):
    _, wrapped = directories
    manifest = json.loads((wrapped / "easyckpt_manifest.json").read_text())
    assert manifest["step"] == 8
    assert {entry["path"] for entry in manifest["files"]} == names_in(wrapped) - OURS
