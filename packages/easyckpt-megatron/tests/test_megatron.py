import importlib.util

import pytest

from easyckpt_megatron._megatron import find_megatron, refusal
from easyckpt_megatron.errors import MegatronNotFoundError, UnsupportedMegatronError

needs_no_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is not None, reason="a real Megatron is installed here"
)


@needs_no_megatron
def test_nothing_is_found_without_megatron():
    assert find_megatron() is None


@needs_no_megatron
def test_the_error_without_megatron_names_feature_extra_and_command():
    error = refusal("save_checkpoint_if_needed")
    assert isinstance(error, MegatronNotFoundError)
    assert isinstance(error, ImportError)
    assert "save_checkpoint_if_needed" in str(error)
    assert "pip install 'easyckpt-megatron[megatron]'" in str(error)


@needs_no_megatron
def test_an_unrelated_package_of_that_name_is_not_megatron(fake_megatron):
    fake_megatron("torrents", regular_package=True)
    assert find_megatron() is None


@pytest.mark.parametrize(
    ("modules", "regular_package", "expected"),
    [
        (("core", "training"), False, "megatron.training"),
        (("core", "checkpointing"), True, "megatron.checkpointing"),
    ],
)
def test_each_layout_is_found_without_being_imported(
    fake_megatron, modules, regular_package, expected
):
    fake_megatron(*modules, version="0.16.1", regular_package=regular_package)
    found = find_megatron()
    assert found is not None
    assert (found.module, found.version) == (expected, "0.16.1")


@needs_no_megatron
def test_the_library_alone_is_found(fake_megatron):
    fake_megatron("core", version="0.17.0")
    assert str(find_megatron()) == (
        "megatron-core without Megatron-LM version 0.17.0 (module megatron.core)"
    )


@needs_no_megatron
def test_a_checkout_without_a_version_is_still_named(fake_megatron):
    fake_megatron("checkpointing", regular_package=True)
    assert "of unknown version (module megatron.checkpointing)" in str(find_megatron())


def test_the_error_with_megatron_says_what_was_found_and_that_nothing_was_saved(fake_megatron):
    fake_megatron("core", "training", version="0.16.1")
    error = refusal("initialize_easyckpt")
    assert isinstance(error, UnsupportedMegatronError)
    assert isinstance(error, RuntimeError)
    assert "Megatron-LM version 0.16.1 (module megatron.training)" in str(error)
    assert "Nothing was saved or loaded" in str(error)
