"""EasyCkpt for the Hugging Face Trainer."""

from easyckpt_hf.__about__ import __version__
from easyckpt_hf.trainer_wrapper import TrainerWrapper

__all__ = ["TrainerWrapper", "__version__"]
