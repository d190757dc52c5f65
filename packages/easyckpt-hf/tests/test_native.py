"""What counts as a whole checkpoint of a plain Trainer."""

from __future__ import annotations

import json
import shutil

import pytest

from easyckpt_hf.native import find_fault, newest_native


@pytest.fixture
def native(plain, tmp_path):
    return shutil.copytree(plain.output, tmp_path / "native") / "checkpoint-8"


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def test_a_whole_checkpoint_has_no_fault(native):
    assert find_fault(native) is None


@pytest.mark.parametrize("damage", [cut, zero])
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"],
)
def test_a_torn_file_is_named(native, name, damage):
    damage(native / name)
    assert name in find_fault(native)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("model.safetensors", "no model weights"), ("trainer_state.json", "trainer_state.json")],
)
def test_a_missing_file_is_named(native, name, reason):
    (native / name).unlink()
    assert reason in find_fault(native)


def test_every_shard_of_the_weights_is_looked_at(native):
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        shutil.copy(native / "model.safetensors", native / shard)
    (native / "model.safetensors").unlink()
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (native / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_fault(native) is None
    cut(native / shards[1])
    assert shards[1] in find_fault(native)
    (native / shards[1]).unlink()
    assert shards[1] in find_fault(native)
    (native / "model.safetensors.index.json").write_text("{")
    assert "index" in find_fault(native)


def test_the_newest_whole_one_is_found_and_each_torn_one_is_told_once(native, caplog):
    cut(native.parent / "checkpoint-10" / "model.safetensors")
    assert newest_native(native.parent, -1) == (8, native)
    (record,) = caplog.records
    assert "checkpoint-10" in record.getMessage()
    assert "model.safetensors" in record.getMessage()
    assert newest_native(native.parent, 8) is None


def test_other_directories_and_files_are_left_out(tmp_path):
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert newest_native(tmp_path, -1) is None
    assert newest_native(tmp_path / "missing", -1) is None
