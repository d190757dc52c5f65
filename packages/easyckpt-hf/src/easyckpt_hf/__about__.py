"""Version of easyckpt-hf."""

__version__ = "0.1.0"
