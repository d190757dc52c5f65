"""Exceptions of easyckpt_megatron.

easyckpt_core.EasyCkptError
 +-- EasyCkptMegatronError
      +-- InvalidArgumentError (ValueError)               an argument that can never work
      +-- MegatronNotFoundError (ImportError)             Megatron is not installed
      +-- UnsupportedMegatronError (NotImplementedError)  it is, and this release cannot serve it
"""

from __future__ import annotations

from easyckpt_core import EasyCkptError


class EasyCkptMegatronError(EasyCkptError):
    """Base of every exception that easyckpt_megatron raises on purpose."""


class InvalidArgumentError(EasyCkptMegatronError, ValueError):
    """An argument has a value that can never work."""


class MegatronNotFoundError(EasyCkptMegatronError, ImportError):
    """No Megatron can be imported; the message names what to install."""


class UnsupportedMegatronError(EasyCkptMegatronError, NotImplementedError):
    """A Megatron was found that this release cannot checkpoint; the message names it."""
