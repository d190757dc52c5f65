"""Timers in Megatron's call form."""

from __future__ import annotations

import pytest

from rapidformer import EngineError, get_args, get_logger, get_timers


def test_a_timer_counts_between_start_and_stop():
    timers = get_timers()
    timers("forward", log_level=0).start()
    timers("forward").stop()
    assert timers("forward").elapsed(reset=False) > 0
    assert set(timers.elapsed()) == {"forward"}
    with pytest.raises(EngineError, match="without a start"):
        timers("forward").stop()


def test_args_need_an_engine_and_the_logger_does_not():
    with pytest.raises(EngineError, match="RapidformerEngine"):
        get_args()
    assert get_logger().name == "rapidformer"
