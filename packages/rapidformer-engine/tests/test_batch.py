"""Batch arithmetic."""

from __future__ import annotations

import pytest

from rapidformer import ConfigError, RunConfig, resolve_batch


@pytest.mark.parametrize(
    ("micro", "total", "ranks", "expected"),
    [
        (16, 64, 4, (16, 1)),
        (16, 128, 4, (16, 2)),
        (8, None, 2, (8, 1)),
        (16, 16, 4, (4, 1)),
        (16, 16, 1, (16, 1)),
        (5, 15, 1, (5, 3)),
    ],
)
def test_a_global_batch_is_cut_evenly(micro, total, ranks, expected):
    plan = resolve_batch(RunConfig(micro_batch_size=micro, global_batch_size=total), ranks)
    assert (plan.micro, plan.accumulation) == expected
    assert plan.global_size == (total or micro * ranks)


def test_lowering_the_micro_batch_is_said_and_nothing_else_is():
    lowered = resolve_batch(RunConfig(micro_batch_size=16, global_batch_size=16), 4)
    assert "lowered from 16 to 4" in lowered.notes[0]
    assert resolve_batch(RunConfig(micro_batch_size=4, global_batch_size=16), 4).notes == ()


@pytest.mark.parametrize(
    ("micro", "total", "ranks", "words"),
    [
        (16, 40, 2, "Nearest: --global-batch-size 32 or 64; or --micro-batch-size 10 or 20$"),
        (16, 15, 2, "Nearest: --global-batch-size 32$"),
        (4, 18, 2, "Nearest: --global-batch-size 16 or 24; or --micro-batch-size 1 or 3$"),
    ],
)
def test_an_uneven_batch_is_refused_with_the_nearest_sizes(micro, total, ranks, words):
    with pytest.raises(ConfigError, match=words):
        resolve_batch(RunConfig(micro_batch_size=micro, global_batch_size=total), ranks)


def test_every_size_that_an_error_names_works():
    import re

    for total in range(1, 60):
        config = RunConfig(micro_batch_size=6, global_batch_size=total)
        try:
            resolve_batch(config, 2)
        except ConfigError as err:
            found = re.search(r"--global-batch-size ([\d or]+)", str(err).split("Nearest:")[1])
            for size in re.findall(r"\d+", found[1]):
                resolve_batch(RunConfig(micro_batch_size=6, global_batch_size=int(size)), 2)
            for size in re.findall(r"--micro-batch-size ([\d or]+)$", str(err)):
                for micro in re.findall(r"\d+", size):
                    resolve_batch(
                        RunConfig(micro_batch_size=int(micro), global_batch_size=total), 2
                    )
