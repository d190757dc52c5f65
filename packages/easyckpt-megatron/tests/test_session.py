import importlib.util
import inspect
from pathlib import Path

import pytest

import easyckpt_megatron
from easyckpt_megatron import (
    InvalidArgumentError,
    MegatronNotFoundError,
    UnsupportedMegatronError,
    initialize_easyckpt,
    load_checkpoint,
    save_checkpoint_if_needed,
)

MODEL = [object()]

CALLS = {
    "initialize_easyckpt": lambda: initialize_easyckpt(1, 5, 5, log_file_path="./test.log"),
    "load_checkpoint": lambda: load_checkpoint(MODEL, None, None),
    "save_checkpoint_if_needed": lambda: save_checkpoint_if_needed(1, MODEL, None, None),
}


def test_the_published_signatures_do_not_change():
    published = {
        "initialize_easyckpt": "save_mem_interval, save_storage_interval, max_ckpt_num, "
        "log_file_path=None",
        "load_checkpoint": "model, optimizer, opt_param_scheduler, load_arg='load', strict=True, "
        "concat=False",
        "save_checkpoint_if_needed": "iteration, model, optimizer, opt_param_scheduler",
    }
    for name, expected in published.items():
        parameters = inspect.signature(getattr(easyckpt_megatron, name)).parameters.values()
        written = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        assert written == expected


def test_the_front_door_lists_what_it_has():
    names = easyckpt_megatron.__all__
    assert names == sorted(names)
    assert all(hasattr(easyckpt_megatron, name) for name in names)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is not None, reason="a real Megatron is installed here"
)
def test_each_call_says_what_to_install_without_megatron(name):
    with pytest.raises(MegatronNotFoundError, match=name):
        CALLS[name]()


@pytest.mark.parametrize("name", CALLS)
def test_each_call_refuses_when_megatron_is_there(name, fake_megatron):
    fake_megatron("core", "training", version="0.16.1")
    with pytest.raises(UnsupportedMegatronError, match=rf"{name} found Megatron-LM"):
        CALLS[name]()


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "5", None])
@pytest.mark.parametrize("name", ["save_mem_interval", "save_storage_interval", "max_ckpt_num"])
def test_intervals_are_whole_numbers_from_1(name, value):
    settings = {"save_mem_interval": 1, "save_storage_interval": 5, "max_ckpt_num": 5}
    with pytest.raises(InvalidArgumentError, match=f"{name}={value!r}"):
        initialize_easyckpt(**settings | {name: value})


@pytest.mark.parametrize("value", ["", 3, b"log"])
def test_the_log_file_is_a_path(value):
    with pytest.raises(InvalidArgumentError, match="log_file_path"):
        initialize_easyckpt(1, 5, 5, value)


def test_the_log_file_is_not_a_directory(tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="is a directory"):
        initialize_easyckpt(1, 5, 5, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [{"load_arg": ""}, {"load_arg": "--load"}, {"load_arg": None}, {"strict": 1}, {"concat": None}],
)
def test_load_settings_are_checked(settings):
    with pytest.raises(InvalidArgumentError, match=next(iter(settings))):
        load_checkpoint(MODEL, None, None, **settings)


def test_a_model_is_needed():
    with pytest.raises(InvalidArgumentError, match="model=None"):
        save_checkpoint_if_needed(1, None, None, None)
    with pytest.raises(InvalidArgumentError, match=r"model=\[\]"):
        load_checkpoint([], None, None)


@pytest.mark.parametrize("value", [0, -3, 2.0, True])
def test_the_iteration_is_a_whole_number_from_1(value):
    with pytest.raises(InvalidArgumentError, match="iteration="):
        save_checkpoint_if_needed(value, MODEL, None, None)
