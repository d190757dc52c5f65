"""Published import path of easyckpt-hf."""

from easyckpt_hf import TrainerWrapper

__all__ = ["TrainerWrapper"]
