"""EasyCkpt for Megatron-LM."""

from easyckpt_megatron.__about__ import __version__
from easyckpt_megatron.errors import (
    EasyCkptMegatronError,
    InvalidArgumentError,
    MegatronNotFoundError,
    UnsupportedMegatronError,
)
from easyckpt_megatron.session import (
    initialize_easyckpt,
    load_checkpoint,
    save_checkpoint_if_needed,
)

__all__ = [
    "EasyCkptMegatronError",
    "InvalidArgumentError",
    "MegatronNotFoundError",
    "UnsupportedMegatronError",
    "__version__",
    "initialize_easyckpt",
    "load_checkpoint",
    "save_checkpoint_if_needed",
]
