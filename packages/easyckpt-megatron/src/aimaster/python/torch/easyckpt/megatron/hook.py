"""Published path of easyckpt_megatron.hook."""

from easyckpt_megatron import hook

__all__ = ["hook"]
