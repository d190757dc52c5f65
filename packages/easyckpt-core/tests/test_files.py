"""Each format: the bytes are what the format's own library writes and reads."""

import io

import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from easyckpt_core import LayoutError, RawBytes, Safetensors, TorchZip, freeze


def fill(plan):
    """Put the tensors of a plan in their holes, as the stager does."""
    data = bytearray(plan.size_bytes)
    for offset, segment in plan.segments:
        data[offset : offset + len(segment)] = segment
    for hole in plan.holes:
        raw = hole.source.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert len(raw) == hole.size_bytes
        data[hole.offset_bytes : hole.offset_bytes + hole.size_bytes] = raw
    return bytes(data)


def load(data):
    return torch.load(io.BytesIO(data), weights_only=True)


TENSORS = {
    "f32": torch.randn(3, 5),
    "bf16": torch.randn(7).bfloat16(),
    "f16": torch.randn(4, 2).half(),
    "f64": torch.randn(2, dtype=torch.float64),
    "i64": torch.arange(6).reshape(2, 3),
    "u8": torch.arange(9, dtype=torch.uint8),
    "bool": torch.tensor([True, False]),
    "zero_dim": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "f8": torch.randn(5).to(torch.float8_e4m3fn),
}


def test_safetensors_bytes_are_those_of_the_reference_implementation():
    plan = Safetensors({"format": "pt"}).plan(TENSORS, None)
    assert fill(plan) == save_safetensors(TENSORS, metadata={"format": "pt"})


def test_safetensors_stores_a_transposed_tensor_in_row_major_order():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    loaded = load_safetensors(fill(Safetensors().plan({"t": tensor}, None)))
    assert torch.equal(loaded["t"], tensor)


def test_safetensors_refuses_names_that_share_memory():
    tensor = torch.randn(4)
    with pytest.raises(LayoutError, match=r"a and b share memory"):
        Safetensors().plan({"a": tensor, "b": tensor}, None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.empty(2, device="meta"), "meta tensor"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.quantize_per_tensor(torch.randn(2), 0.1, 0, torch.qint8), "quantised"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_without_plain_bytes_are_refused_with_a_way_out(make, said):
    tensor = make()
    for file_format in (Safetensors(), TorchZip()):
        with pytest.raises(LayoutError, match=said):
            file_format.plan({"w": tensor}, None)


def test_torch_zip_loads_with_torch_alone():
    tree = {"tensors": TENSORS, "numbers": [1, 2.5, "three", None], "nested": {"deep": (1, 2)}}
    loaded = load(fill(TorchZip().plan(tree, None)))
    assert loaded["numbers"] == tree["numbers"]
    assert loaded["nested"] == tree["nested"]
    for name, tensor in TENSORS.items():
        assert loaded["tensors"][name].dtype == tensor.dtype
        assert torch.equal(loaded["tensors"][name].float(), tensor.float()), name


def test_torch_zip_loads_mapped_too(tmp_path):
    path = tmp_path / "file.pt"
    path.write_bytes(fill(TorchZip().plan(TENSORS, None)))
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert torch.equal(loaded["f32"], TENSORS["f32"])


def test_torch_zip_keeps_ties_and_views():
    base = torch.arange(10.0)
    loaded = load(fill(TorchZip().plan({"a": base, "b": base, "view": base[2:5]}, None)))
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["view"], base[2:5])


def test_torch_zip_offsets_stay_when_a_number_grows():
    format_ = TorchZip()
    tree = {"step": 1, "w": torch.randn(8), "state": {0: {"m": torch.randn(3)}}}
    first = format_.plan(tree, None)
    later = format_.plan({**tree, "step": 10**12}, first)
    assert later.size_bytes == first.size_bytes
    assert [hole.offset_bytes for hole in later.holes] == [h.offset_bytes for h in first.holes]
    assert load(fill(later))["step"] == 10**12


def test_torch_zip_grows_when_the_tree_does():
    format_ = TorchZip()
    first = format_.plan({"w": torch.randn(8)}, None)
    tree = {f"name-{index}" * 10: torch.randn(2) for index in range(200)}
    assert load(fill(format_.plan(tree, first))).keys() == tree.keys()


def test_torch_zip_says_what_cannot_be_pickled():
    with pytest.raises(LayoutError, match="cannot be pickled"):
        TorchZip().plan({"f": lambda: None}, None)


def test_raw_bytes_are_kept_as_they_are():
    assert fill(RawBytes().plan(b"{}", None)) == b"{}"


def test_freezing_keeps_tensors_and_copies_containers():
    weight = torch.nn.Parameter(torch.randn(2))
    tree = {"groups": [{"lr": 1.0, "params": [0]}], "w": weight}
    frozen = freeze(tree)
    tree["groups"][0]["lr"] = 2.0
    tree["groups"][0]["params"].append(1)
    assert frozen["groups"] == [{"lr": 1.0, "params": [0]}]
    assert frozen["w"].data_ptr() == weight.data_ptr()
