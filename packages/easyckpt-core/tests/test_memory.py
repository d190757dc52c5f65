"""A rank's memory files."""

from __future__ import annotations

import os

from easyckpt_core.memory import MemoryFile, MemorySlots


def test_whoever_pinned_a_mapping_is_told_before_it_goes():
    file = MemoryFile("weights")
    file.resize(4096)
    told: list[int] = []
    file.view()[:3] = b"abc"
    file.before_unmap = lambda: told.append(file.size_bytes)
    file.resize(4096)
    assert told == []
    file.resize(8192)
    assert told == [4096]
    assert bytes(file.view()[:3]) == b"abc"
    file.close()
    assert told == [4096]


def test_a_file_that_is_no_longer_saved_gives_its_memory_back():
    slots = MemorySlots()
    files, fresh = slots.prepare(0, {"a": 10, "b": 20})
    assert sorted(fresh) == ["a", "b"] and os.fstat(files["b"].fd).st_size == 20
    dropped = files["b"]
    _, fresh = slots.prepare(0, {"a": 30})
    assert fresh == [] and dropped.fd == -1
    slots.close()
