from __future__ import annotations

import importlib
import importlib.util

import easyckpt_hf

PUBLISHED = "aimaster.python.torch.easyckpt.transformers"


def test_the_published_path_gives_the_same_class():
    assert importlib.import_module(PUBLISHED).TrainerWrapper is easyckpt_hf.TrainerWrapper


def test_the_published_path_has_no_package_files():
    for name in ("aimaster", "aimaster.python", "aimaster.python.torch"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is None


def test_the_list_of_names_is_sorted_and_each_is_there():
    assert easyckpt_hf.__all__ == sorted(easyckpt_hf.__all__)
    for name in easyckpt_hf.__all__:
        assert getattr(easyckpt_hf, name) is not None


def test_importing_imports_no_other_framework(train, tmp_path):
    code = (
        f"import sys, easyckpt_hf, {PUBLISHED}\n"
        "print('found', sorted({name.split('.')[0] for name in sys.modules}"
        " & {'megatron', 'deepspeed', 'fairscale', 'rapidformer'}))"
    )
    assert train(tmp_path, code=code).lines_with("found []")
