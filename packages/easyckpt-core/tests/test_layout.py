"""StepLayout: one file a source, and everything comes back."""

import random

import numpy as np
import pytest
import torch

from easyckpt_core import LayoutError, PerRank, RestoreError, RngState, StepLayout, unique_tensors


def test_each_source_gets_the_file_that_fits_it():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sources = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": PerRank(RngState()),
    }
    files = StepLayout().files(sources, step=1, rank=0)
    assert set(files) == {"model.safetensors", "optimizer.pt", "scheduler.json", "rng_rank0.pt"}
    assert set(StepLayout().files(sources, step=1, rank=1)) == {"rng_rank1.pt"}


def test_tied_weights_are_stored_once_and_named_in_the_metadata():
    weight = torch.nn.Parameter(torch.randn(3))
    kept, metadata = unique_tensors({"b": weight, "a": weight})
    assert set(kept) == {"a"} and metadata["b"] == "a"


def test_a_source_without_state_is_refused():
    with pytest.raises(LayoutError, match="'what' is a object"):
        StepLayout().files({"what": object()}, step=1, rank=0)


def test_a_missing_file_names_what_is_there(tmp_path):
    (tmp_path / "other.pt").touch()
    with pytest.raises(RestoreError, match=r"rng_rank1.pt.*other.pt"):
        StepLayout().load(tmp_path, {"rng": PerRank(RngState())}, rank=1)


def test_random_state_comes_back_in_every_generator():
    rng = RngState()
    random.gauss(0, 1)
    state = rng.state_dict()
    drawn = [random.random(), float(np.random.rand()), torch.rand(1).item(), random.gauss(0, 1)]
    rng.load_state_dict(state)
    again = [random.random(), float(np.random.rand()), torch.rand(1).item(), random.gauss(0, 1)]
    assert drawn == again


def test_random_state_loads_without_unpickling(tmp_path):
    torch.save(RngState().state_dict(), tmp_path / "rng.pt")
    torch.load(tmp_path / "rng.pt", weights_only=True)
