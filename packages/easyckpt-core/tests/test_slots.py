"""The table of slots: what may be reused when."""

import os

import pytest

from easyckpt_core.slots import SealedPart, SlotTable


def open_and_seal(table, take, step, ranks=(0,), storage=False):
    slot = table.open_slot(take, step, f"step-{step}", storage_due=storage)
    if slot is None:
        return None
    for rank in ranks:
        if "file" not in slot.memory.get(rank, {}):
            table.attach(rank, slot.index, "file", os.memfd_create("test"), 8)
        table.seal(rank, slot.index, take, {"file": 8})
    return slot


@pytest.fixture
def table():
    made = SlotTable(3)
    made.new_group(1, 1)
    yield made
    made.close()


def test_the_newest_complete_slot_is_never_given_away(table):
    for step in range(1, 20):
        newest = table.newest()
        slot = table.open_slot(step, step, f"step-{step}", storage_due=False)
        assert slot is not newest
        table.attach(0, slot.index, "file", os.memfd_create("test"), 8)
        assert table.seal(0, slot.index, step, {"file": 8})
        assert table.newest().step == step


def test_two_slots_are_used_until_a_pin_needs_the_third(table):
    slots = {open_and_seal(table, step, step).index for step in range(1, 6)}
    assert slots == {0, 1}
    table.newest().pins += 1
    slots |= {open_and_seal(table, step, step).index for step in range(6, 10)}
    assert slots == {0, 1, 2}


def test_no_slot_is_left_when_a_persist_and_the_newest_hold_two_of_two():
    table = SlotTable(2)
    table.new_group(1, 1)
    open_and_seal(table, 1, 1).pins += 1
    open_and_seal(table, 2, 2)
    assert table.open_slot(3, 3, "step-3", storage_due=False) is None
    assert table.newest().step == 2
    table.close()


def test_a_slot_is_complete_only_with_every_rank(table):
    table.new_group(2, 2)
    slot = open_and_seal(table, 1, 1, ranks=(0,))
    assert not slot.is_complete
    assert table.newest() is None
    table.attach(1, slot.index, "other", os.memfd_create("test"), 8)
    assert table.seal(1, slot.index, 1, {"other": 8})
    assert table.newest() is slot


def test_every_rank_gets_the_same_decision(table):
    slot = table.open_slot(1, 1, "step-1", storage_due=False)
    assert table.decided(1) == (True, slot.index)
    table.skip(2)
    assert table.decided(2) == (True, None)
    assert table.decided(3) == (False, None)


def test_a_half_written_slot_is_freed_when_a_later_one_completes(table):
    table.new_group(2, 2)
    half = open_and_seal(table, 1, 1, ranks=(0,))
    open_and_seal(table, 2, 2, ranks=(0, 1))
    assert half.step is None


def test_new_trainers_find_complete_slots_and_no_half_written_ones(table):
    done = open_and_seal(table, 1, 1)
    half = table.open_slot(2, 2, "step-2", storage_due=False)
    table.new_group(1, 1)
    assert table.newest() is done
    assert half.step is None and not half.memory


def test_memory_of_earlier_trainers_is_closed_when_its_slot_is_reused(table):
    first = open_and_seal(table, 1, 1)
    fd = first.memory[0]["file"].fd
    open_and_seal(table, 2, 2)
    table.new_group(1, 1)
    reused = table.open_slot(1, 3, "step-3", storage_due=False)
    assert reused is first and not reused.memory
    with pytest.raises(OSError):
        os.fstat(fd)


def test_a_later_save_of_the_same_step_is_the_newest(table):
    open_and_seal(table, 1, 7)
    second = open_and_seal(table, 2, 7)
    assert table.newest() is second
    assert table.complete_at(7) is second


def test_resuming_from_an_earlier_step_forgets_what_came_after(table):
    open_and_seal(table, 1, 5)
    open_and_seal(table, 2, 6)
    assert table.discard_from(6) == [6]
    assert table.newest().step == 5


def test_a_late_part_for_a_reused_slot_is_dropped(table):
    table.new_group(2, 2)
    slot = open_and_seal(table, 1, 1, ranks=(0,))
    slot.step = None
    assert table.open_slot(2, 2, "step-2", storage_due=False) is slot
    assert not table.seal(1, slot.index, 1, {"file": 8})
    assert slot.parts == {}


def test_sealing_a_file_that_was_never_attached_is_an_error(table):
    slot = table.open_slot(1, 1, "step-1", storage_due=False)
    with pytest.raises(ValueError, match="never attached"):
        table.seal(0, slot.index, 1, {"ghost": 8})


def test_parts_are_taken_back_from_trainers_after_a_keeper_died(table):
    table.attach(0, 1, "file", os.memfd_create("test"), 8)
    part = SealedPart(take=9, step=4, directory_name="step-4", sizes={"file": 8})
    table.adopt(0, 1, part)
    assert table.newest().step == 4


def test_memory_that_a_persist_still_reads_stays_open_for_new_trainers(table):
    slot = open_and_seal(table, 1, 5)
    slot.pins += 1
    fd = slot.memory[0]["file"].fd
    table.discard_from(5)
    table.new_group(1, 1)
    os.fstat(fd)
    assert table.open_slot(1, 1, "step-1", storage_due=False) is not slot
