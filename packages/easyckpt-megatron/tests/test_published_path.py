import importlib
import importlib.util
import subprocess
import sys

import pytest

import easyckpt_megatron

PUBLISHED = "aimaster.python.torch.easyckpt.megatron"
HOOKS = ("easyckpt_megatron.hook", f"{PUBLISHED}.hook")


def test_the_published_path_gives_the_same_functions():
    published = importlib.import_module(PUBLISHED)
    for name in published.__all__:
        assert getattr(published, name) is getattr(easyckpt_megatron, name)


def test_importing_the_names_imports_no_megatron():
    code = f"import sys, easyckpt_megatron, {PUBLISHED}; sys.exit('megatron' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("module", HOOKS)
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is not None, reason="a real Megatron is installed here"
)
def test_importing_the_hook_says_what_to_install_without_megatron(module):
    with pytest.raises(ImportError, match=r"pip install 'easyckpt-megatron\[megatron\]'"):
        importlib.import_module(module)


@pytest.mark.parametrize("module", HOOKS)
def test_importing_the_hook_refuses_when_megatron_is_there(module, fake_megatron):
    fake_megatron("core", "training", version="0.16.1")
    with pytest.raises(NotImplementedError, match=r"Megatron-LM version 0\.16\.1"):
        importlib.import_module(module)


def test_the_published_path_has_no_package_files_above_its_own():
    for name in ("aimaster", "aimaster.python", "aimaster.python.torch"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is None
