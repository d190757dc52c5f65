"""gather(): each sample once, at any tail."""

from __future__ import annotations

import pytest
import torch

from rapidformer import DataError, Finetuner, RapidformerEngine, RunConfig
from rapidformer.data import gather_real

GATHER = """
import torch
from rapidformer import Finetuner, RapidformerEngine, RunConfig, DataError
engine = RapidformerEngine(config=RunConfig(micro_batch_size=3))
tuner = Finetuner(engine=engine)
for size in (1, 2, 3, 4, 6, 7, 9, 12, 13):
    data = [{"x": i, "pair": [i, -i]} for i in range(size)]
    rows, pairs = [], []
    for batch in tuner.build_data_loader(data):
        rows += tuner.gather(batch["x"]).tolist()
        pairs += tuner.gather(torch.stack(batch["pair"], dim=1)).tolist()
    assert rows == list(range(size)), (size, rows)
    assert pairs == [[i, -i] for i in range(size)], (size, pairs)
shuffled = tuner.build_data_loader([{"x": i} for i in range(11)], shuffle=True)
rows = [v for batch in shuffled for v in tuner.gather(batch["x"]).tolist()]
assert sorted(rows) == list(range(11)) and rows != list(range(11))
assert tuner.gather(torch.tensor([engine.rank])).tolist() == [0, 1]
try:
    tuner.gather(torch.zeros(2, 3 + engine.rank))
    raise SystemExit("uneven widths were accepted")
except DataError as err:
    assert "only the first dimension may differ" in str(err)
engine.close()
"""


def test_gather_is_exact_at_uneven_tails_on_two_ranks(run_ranks):
    run_ranks(GATHER)


def test_gather_in_one_process_returns_the_batch():
    tuner = Finetuner(engine=RapidformerEngine(config=RunConfig(micro_batch_size=3)))
    data = [{"x": i} for i in range(7)]
    rows = [tuner.gather(batch["x"]).tolist() for batch in tuner.build_data_loader(data)]
    assert rows == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_tensor_that_has_not_one_row_a_sample_is_refused():
    with pytest.raises(DataError, match="one row a sample"):
        gather_real(torch.zeros(5), [3], world_size=1)
