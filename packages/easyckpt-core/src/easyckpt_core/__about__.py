"""Version of easyckpt-core."""

__version__ = "0.1.0"
