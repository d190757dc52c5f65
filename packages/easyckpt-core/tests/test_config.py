"""Settings are refused before anything starts, with what is allowed."""

import pytest

from easyckpt_core import CheckpointConfig, ConfigurationError
from easyckpt_core.policy import decide


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"directory": ""}, "path of a directory"),
        ({"save_mem_interval": 0}, "save_mem_interval=0"),
        ({"save_mem_interval": True}, "save_mem_interval=True"),
        ({"save_storage_interval": -5}, "save_storage_interval=-5"),
        ({"save_storage_interval": 2.5}, "save_storage_interval=2.5"),
        ({"max_checkpoints": 0}, "max_checkpoints=0"),
        ({"save_mem_interval": None}, "nothing would ever be saved"),
        ({"num_slots": 1}, "at least 2"),
        ({"memory_budget_bytes": 0}, "memory_budget_bytes=0"),
        ({"when_storage_busy": "block"}, "'skip' and 'wait'"),
        ({"linger_seconds": -1}, "linger_seconds=-1"),
        ({"storage_factory": "module"}, "'module:function'"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(fields, said):
    with pytest.raises(ConfigurationError) as caught:
        CheckpointConfig(**{"directory": "run", **fields})
    assert said in str(caught.value)


def test_a_storage_save_takes_a_snapshot_of_its_own():
    config = CheckpointConfig(directory="run", save_mem_interval=4, save_storage_interval=6)
    due = {step: decide(step, config) for step in range(13)}
    assert [step for step, decision in due.items() if decision.memory] == [4, 6, 8, 12]
    assert [step for step, decision in due.items() if decision.storage] == [6, 12]
