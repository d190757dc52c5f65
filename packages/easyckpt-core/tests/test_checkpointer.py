"""The front door, with a real keeper."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from easyckpt_core import (
    CheckpointConfig,
    Checkpointer,
    ConfigurationError,
    KeeperError,
    LayoutError,
    MemoryBudgetError,
    PersistError,
    UnsupportedError,
    find_latest,
)
from easyckpt_core.testing import events, keeper_pids, wait_until


@contextlib.contextmanager
def opened(folder, **fields):
    with Checkpointer(CheckpointConfig(directory=str(folder), **fields)) as checkpointer:
        yield checkpointer


def model_and_sources(value=0.0):
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, {"model": model}


def test_a_snapshot_comes_back_from_memory(run_folder):
    model, sources = model_and_sources(1.0)
    with opened(run_folder) as checkpointer:
        checkpointer.save(1, sources)
        model.weight.data.fill_(2.0)
        snapshot = checkpointer.latest()
        assert (snapshot.step, snapshot.tier) == (1, "memory")
        checkpointer.restore(snapshot, sources)
    assert torch.equal(model.weight.data, torch.ones(4, 4))


def test_what_was_restored_does_not_alias_the_memory(run_folder):
    model, sources = model_and_sources(1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    sources["optimizer"] = optimizer
    with opened(run_folder, num_slots=2) as checkpointer:
        checkpointer.save(1, sources)
        checkpointer.restore(checkpointer.latest(), sources)
        tensors = [*model.parameters(), *optimizer.state[model.weight].values()]
        before = [tensor.clone() for tensor in tensors]
        other, other_sources = model_and_sources(7.0)
        other_optimizer = torch.optim.AdamW(other.parameters())
        other(torch.ones(1, 4)).sum().mul(100).backward()
        other_optimizer.step()
        other_sources["optimizer"] = other_optimizer
        for step in (2, 3, 4, 5):
            checkpointer.save(step, other_sources)
        assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_later_changes_do_not_reach_a_snapshot(run_folder):
    model, sources = model_and_sources(1.0)
    with opened(run_folder) as checkpointer:
        checkpointer.save(1, sources)
        model.weight.data.fill_(9.0)
        checkpointer.restore(checkpointer.latest(), sources)
        assert model.weight.data.max() == 1.0


def test_a_due_storage_save_is_a_native_directory(run_folder):
    _model, sources = model_and_sources(3.0)
    with opened(run_folder, save_storage_interval=2) as checkpointer:
        assert not checkpointer.maybe_save(1, sources).is_storage_due
        assert checkpointer.maybe_save(2, sources).is_storage_due
    from safetensors.torch import load_file

    assert find_latest(run_folder).name == "step-2"
    assert load_file(run_folder / "step-2/model.safetensors")["weight"].max() == 3.0


def test_nothing_is_left_behind_after_a_normal_end(run_folder, runtime_folder, tmp_path):
    _model, sources = model_and_sources()
    with opened(run_folder, save_storage_interval=1) as checkpointer:
        checkpointer.maybe_save(1, sources)
        assert len(keeper_pids(tmp_path)) == 1
    wait_until(lambda: not keeper_pids(tmp_path))
    assert not runtime_folder.exists() or not os.listdir(runtime_folder)
    assert sorted(os.listdir(run_folder)) == [".easyckpt", "step-1"]
    assert sorted(os.listdir(run_folder / ".easyckpt")) == ["events.jsonl", "run.json", "staging"]
    assert os.listdir(run_folder / ".easyckpt/staging") == []


def test_no_growth_over_many_saves(run_folder):
    _model, sources = model_and_sources()
    with opened(run_folder) as checkpointer:
        for step in range(1, 30):
            checkpointer.save(step, sources)
        open_before = len(os.listdir("/proc/self/fd"))
        for step in range(30, 330):
            checkpointer.save(step, sources)
        assert len(os.listdir("/proc/self/fd")) == open_before
        assert set(checkpointer._memory.slots) == {0, 1}


def test_a_shape_that_changes_is_saved_too(run_folder):
    with opened(run_folder, save_storage_interval=1, when_storage_busy="wait") as checkpointer:
        for step, width in enumerate((2, 50, 3), start=1):
            checkpointer.maybe_save(step, {"model": torch.nn.Linear(width, width)})
    from safetensors.torch import load_file

    for step, width in enumerate((2, 50, 3), start=1):
        tensors = load_file(run_folder / f"step-{step}/model.safetensors")
        assert tensors["weight"].shape == (width, width)


def test_check_finds_what_cannot_be_saved_and_the_size(run_folder):
    checkpointer = Checkpointer(CheckpointConfig(directory=str(run_folder)))
    assert checkpointer.check({"model": torch.nn.Linear(100, 100)}) > 100 * 100 * 4
    with pytest.raises(LayoutError, match="meta tensor"):
        checkpointer.check({"model": torch.nn.Linear(2, 2, device="meta")})


def test_a_budget_too_small_for_two_snapshots_is_said_with_numbers(run_folder):
    _model, sources = model_and_sources()
    with (
        pytest.raises(MemoryBudgetError, match=r"two are needed; 100 bytes are left"),
        opened(run_folder, memory_budget_bytes=100) as checkpointer,
    ):
        checkpointer.save(1, sources)


def test_a_budget_for_two_of_three_slots_is_enough(run_folder):
    model = torch.nn.Linear(256, 256)
    with opened(run_folder, memory_budget_bytes=600_000) as checkpointer:
        for step in range(1, 6):
            assert not checkpointer.save(step, {"model": model}).is_skipped


def test_several_nodes_are_refused(run_folder):
    config = CheckpointConfig(directory=str(run_folder))
    checkpointer = Checkpointer(config, rank=0, world_size=16, local_rank=0, local_world_size=8)
    with pytest.raises(UnsupportedError, match="several nodes"):
        checkpointer.start()


def test_a_directory_that_cannot_be_made_is_said_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(CheckpointConfig(directory=str(tmp_path / "file/run")))
    with pytest.raises(ConfigurationError, match="cannot be written"):
        checkpointer.start()


def test_saving_before_start_is_a_clear_error(run_folder):
    checkpointer = Checkpointer(CheckpointConfig(directory=str(run_folder)))
    with pytest.raises(KeeperError, match="was not started or is closed"):
        checkpointer.save(1, {"model": torch.nn.Linear(1, 1)})


def test_closing_twice_is_harmless(run_folder):
    checkpointer = Checkpointer(CheckpointConfig(directory=str(run_folder)))
    checkpointer.start()
    checkpointer.close()
    checkpointer.close()


def test_a_fresh_start_forgets_memory_and_leaves_storage(run_folder):
    _model, sources = model_and_sources()
    with opened(run_folder, save_storage_interval=5, max_checkpoints=1) as checkpointer:
        checkpointer.maybe_save(5, sources)
    with opened(run_folder, save_storage_interval=1, max_checkpoints=1) as checkpointer:
        checkpointer.start_fresh()
        checkpointer.maybe_save(1, sources)
        assert checkpointer.latest().step == 1
    with opened(run_folder) as checkpointer:
        # The earlier history's step 5 has a higher number and does not win.
        assert checkpointer.latest().step == 1
    assert (run_folder / "step-5").is_dir()


def test_a_damaged_step_is_skipped_with_a_warning(run_folder, caplog):
    _model, sources = model_and_sources()
    with opened(run_folder, save_storage_interval=1, when_storage_busy="wait") as checkpointer:
        checkpointer.maybe_save(1, sources)
        checkpointer.maybe_save(2, sources)
    path = run_folder / "step-2/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with opened(run_folder) as checkpointer:
        assert checkpointer.latest().step == 1
    assert "step 2 is damaged" in caplog.text and "model.safetensors" in caplog.text


def test_a_full_disk_is_said_and_training_and_memory_go_on(
    run_folder, tmp_path, monkeypatch, caplog
):
    fault = tmp_path / "fault"
    fault.write_text("model")
    monkeypatch.setenv("EASYCKPT_TEST_FAULT_FILE", str(fault))
    _model, sources = model_and_sources()
    factory = "easyckpt_core.testing:faulty_storage"
    with opened(run_folder, save_storage_interval=1, storage_factory=factory) as checkpointer:
        checkpointer.maybe_save(1, sources)
        wait_until(lambda: any(event["event"] == "persist_failed" for event in events(run_folder)))
        fault.write_text("")
        checkpointer.maybe_save(2, sources)
        assert "step 1 was not written" in caplog.text and "No space left" in caplog.text
        assert checkpointer.latest().step == 2
    assert find_latest(run_folder).name == "step-2"
    assert not (run_folder / "step-1").exists()


def test_closing_says_that_the_last_storage_save_failed(run_folder, tmp_path, monkeypatch):
    fault = tmp_path / "fault"
    fault.write_text("model")
    monkeypatch.setenv("EASYCKPT_TEST_FAULT_FILE", str(fault))
    _model, sources = model_and_sources()
    factory = "easyckpt_core.testing:faulty_storage"
    with (
        pytest.raises(PersistError, match=r"step 1 was not written to .*step-1.*No space left"),
        opened(run_folder, save_storage_interval=1, storage_factory=factory) as checkpointer,
    ):
        checkpointer.maybe_save(1, sources)


def test_a_slow_storage_never_stops_the_memory_tier(run_folder, monkeypatch, caplog):
    monkeypatch.setenv("EASYCKPT_TEST_SECONDS_PER_FILE", "0.5")
    _model, sources = model_and_sources()
    factory = "easyckpt_core.testing:slow_storage"
    with opened(run_folder, save_storage_interval=1, storage_factory=factory) as checkpointer:
        reports = [checkpointer.maybe_save(step, sources) for step in range(1, 30)]
        assert not [report.step for report in reports if report.is_skipped]
        assert checkpointer.latest().step == 29
        last = checkpointer.save(30, sources, storage=True, wait=True)
        assert last.is_storage_due
    committed = [event["step"] for event in events(run_folder) if event["event"] == "committed"]
    assert committed == [report.step for report in [*reports, last] if report.is_storage_due]
    assert committed[0] == 1 and committed[-1] == 30 and len(committed) < 10
    assert "the storage save of step 2 was skipped" in caplog.text


def test_waiting_for_a_slow_storage_skips_nothing(run_folder, monkeypatch):
    monkeypatch.setenv("EASYCKPT_TEST_SECONDS_PER_FILE", "0.1")
    _model, sources = model_and_sources()
    with opened(
        run_folder,
        save_storage_interval=1,
        storage_factory="easyckpt_core.testing:slow_storage",
        when_storage_busy="wait",
    ) as checkpointer:
        for step in range(1, 6):
            assert checkpointer.maybe_save(step, sources).is_storage_due
    committed = [event["step"] for event in events(run_folder) if event["event"] == "committed"]
    assert committed == [1, 2, 3, 4, 5]
