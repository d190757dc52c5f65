"""Learning rate over steps."""

from __future__ import annotations

import pytest

from rapidformer import ConfigError, RunConfig
from rapidformer.schedule import resolve_learning_rate


def test_warm_up_rises_from_zero_and_linear_decay_ends_at_the_lowest_rate():
    config = RunConfig(lr=1.0, min_lr=0.2, lr_warmup_iters=4)
    rate = resolve_learning_rate(config, 12)
    assert [rate.at(step) for step in (0, 2, 4)] == [0.0, 0.5, 1.0]
    assert rate.at(8) == pytest.approx(0.6)
    assert rate.at(12) == rate.at(50) == 0.2


def test_cosine_is_half_way_in_the_middle_and_constant_stays():
    assert resolve_learning_rate(RunConfig(lr=1.0, lr_decay_style="cosine"), 10).at(5) == (
        pytest.approx(0.5)
    )
    assert resolve_learning_rate(RunConfig(lr=1.0, lr_decay_style="constant"), None).at(99) == 1.0


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="nearest: --lr-warmup-iters 9"):
        resolve_learning_rate(RunConfig(lr_warmup_iters=10), 10)


def test_a_decay_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="give --train-iters"):
        resolve_learning_rate(RunConfig(), None)
