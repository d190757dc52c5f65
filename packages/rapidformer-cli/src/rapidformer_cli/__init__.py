"""The rapidformer command."""

from rapidformer_cli.__about__ import __version__
from rapidformer_cli.main import main

__all__ = ["__version__", "main"]
