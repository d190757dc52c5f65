"""Published path of easyckpt_megatron."""

from easyckpt_megatron import initialize_easyckpt, load_checkpoint, save_checkpoint_if_needed

__all__ = ["initialize_easyckpt", "load_checkpoint", "save_checkpoint_if_needed"]
