"""The package's names, and what importing it costs."""

import subprocess
import sys

import easyckpt_core


def test_every_exported_name_is_there_and_the_list_is_sorted():
    assert easyckpt_core.__all__ == sorted(easyckpt_core.__all__)
    for name in easyckpt_core.__all__:
        assert getattr(easyckpt_core, name) is not None


def test_the_keeper_imports_neither_torch_nor_numpy():
    code = (
        "import sys, easyckpt_core.keeper_process, easyckpt_core.testing;"
        "print(sorted({name.split('.')[0] for name in sys.modules}"
        " & {'torch', 'numpy', 'safetensors', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
