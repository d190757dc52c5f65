"""Commits: all or nothing, marked, pruned by our own rules only."""

import os

import pytest

from easyckpt_core import find_latest, open_storage
from easyckpt_core.commit import (
    MANIFEST_NAME,
    MARKER_NAME,
    SourceFile,
    clear_leftovers,
    commit_step,
    find_damage,
    list_committed,
    list_unfinished,
    prune,
    read_committed,
)
from easyckpt_core.run_identity import open_run


@pytest.fixture
def storage(run_folder):
    open_run(run_folder)
    return open_storage(str(run_folder))


def commit(storage, step, run="r", files=None):
    sources = []
    for path, data in (files or {"a.bin": b"x" * 100, "sub/b.bin": b"y" * 9}).items():
        fd = os.memfd_create("test")
        os.write(fd, data)
        sources.append(SourceFile(path=path, fd=fd, size_bytes=len(data)))
    try:
        return commit_step(
            storage, sources, step=step, directory_name=f"step-{step}", run=run, world_size=1
        )
    finally:
        for source in sources:
            os.close(source.fd)


def test_a_committed_step_has_its_files_manifest_and_marker(storage, run_folder):
    commit(storage, 3)
    assert (run_folder / "step-3/a.bin").read_bytes() == b"x" * 100
    assert (run_folder / "step-3/sub/b.bin").read_bytes() == b"y" * 9
    found = read_committed(storage, "step-3")
    assert found.step == 3 and set(found.files) == {"a.bin", "sub/b.bin"}
    assert find_damage(run_folder, found) is None
    assert find_latest(run_folder) == run_folder / "step-3"


def test_a_failing_write_publishes_nothing_and_leaves_nothing(run_folder, tmp_path, monkeypatch):
    open_run(run_folder)
    storage = open_storage(str(run_folder), "easyckpt_core.testing:faulty_storage")
    fault = tmp_path / "fault"
    fault.write_text("b.bin")
    monkeypatch.setenv("EASYCKPT_TEST_FAULT_FILE", str(fault))
    with pytest.raises(OSError, match="No space left"):
        commit(storage, 1)
    assert not (run_folder / "step-1").exists()
    assert os.listdir(run_folder / ".easyckpt/staging") == []
    fault.write_text("")
    commit(storage, 2)
    assert [step.step for step in list_committed(storage)] == [2]


def test_a_directory_of_the_same_name_is_replaced_whole(storage, run_folder):
    (run_folder / "step-1").mkdir()
    (run_folder / "step-1/torn.bin").write_bytes(b"?")
    commit(storage, 1)
    assert sorted(os.listdir(run_folder / "step-1")) == [
        "a.bin",
        MARKER_NAME,
        MANIFEST_NAME,
        "sub",
    ]


@pytest.mark.parametrize("name", [MANIFEST_NAME, MARKER_NAME])
def test_a_step_without_manifest_or_marker_does_not_count(storage, run_folder, name):
    commit(storage, 1)
    (run_folder / "step-1" / name).unlink()
    assert list_committed(storage) == []


def test_a_missing_marker_is_reported(storage, run_folder):
    commit(storage, 1)
    (run_folder / "step-1" / MARKER_NAME).unlink()
    assert list_unfinished(storage) == ["step-1"]


def test_a_changed_manifest_does_not_match_its_marker(storage, run_folder):
    commit(storage, 1)
    path = run_folder / "step-1" / MANIFEST_NAME
    path.write_text(path.read_text().replace('"step": 1', '"step": 9'))
    assert list_committed(storage) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damaged_bytes_are_found_and_the_older_step_is_used(storage, run_folder, damage):
    commit(storage, 1)
    commit(storage, 2)
    path = run_folder / "step-2/a.bin"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[50] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    assert "a.bin" in find_damage(run_folder, read_committed(storage, "step-2"))
    assert find_latest(run_folder) == run_folder / "step-1"


def test_pruning_keeps_the_newest_and_touches_only_this_run(storage, run_folder):
    (run_folder / "checkpoint-1").mkdir()
    commit(storage, 1, run="other")
    for step in (2, 3, 4):
        commit(storage, step, run="ours")
    assert [step.step for step in prune(storage, run="ours", keep=2)] == [2]
    assert [step.step for step in list_committed(storage)] == [1, 3, 4]
    assert (run_folder / "checkpoint-1").is_dir()


def test_leftovers_of_torn_saves_are_cleared(storage, run_folder):
    torn = run_folder / ".easyckpt/staging/step-5.abc"
    torn.mkdir(parents=True)
    (run_folder / ".removing-step-1-99").mkdir()
    commit(storage, 1)
    clear_leftovers(storage)
    assert not torn.exists()
    assert sorted(os.listdir(run_folder)) == [".easyckpt", "step-1"]


@pytest.mark.parametrize("path", ["../out", "/etc/x", "a/../../b"])
def test_names_that_leave_the_directory_are_refused(storage, run_folder, path):
    with pytest.raises(ValueError, match="leaves"):
        commit(storage, 1, files={path: b""})


def test_two_ranks_with_one_file_name_are_refused(storage):
    fd = os.memfd_create("test")
    twice = [SourceFile(path="same", fd=fd, size_bytes=0)] * 2
    with pytest.raises(ValueError, match="same"):
        commit_step(storage, twice, step=1, directory_name="step-1", run="r", world_size=2)
    os.close(fd)
