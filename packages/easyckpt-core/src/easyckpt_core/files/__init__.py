"""File formats: an object tree becomes the bytes of a native file, with holes where tensors go."""

from easyckpt_core.files.plan import FileContent, FileFormat, FilePlan, Hole, freeze, tensors_in
from easyckpt_core.files.raw import RawBytes
from easyckpt_core.files.safetensors import Safetensors
from easyckpt_core.files.torch_zip import TorchZip

__all__ = [
    "FileContent",
    "FileFormat",
    "FilePlan",
    "Hole",
    "RawBytes",
    "Safetensors",
    "TorchZip",
    "freeze",
    "tensors_in",
]
