"""Exceptions of easyckpt_core.

EasyCkptError
 +-- ConfigurationError (ValueError)          a setting that cannot work, before anything starts
 +-- LayoutError (ValueError)                 a state tree that cannot be laid out as files
 +-- MemoryBudgetError (MemoryError)          the snapshots do not fit in host memory
 +-- RunInUseError (RuntimeError)             another live job trains in the same directory
 +-- KeeperError (RuntimeError)               the keeper process cannot be started or reached
 +-- PersistError (OSError)                   a step could not be written to storage
 +-- RestoreError (RuntimeError)              a checkpoint exists but does not fit what asks for it
 +-- UnsupportedError (NotImplementedError)   several nodes, or a system without memory files
"""

from __future__ import annotations


class EasyCkptError(Exception):
    """Base of every exception that easyckpt_core raises on purpose."""


class ConfigurationError(EasyCkptError, ValueError):
    """A setting was given that cannot work."""


class LayoutError(EasyCkptError, ValueError):
    """The state cannot be written as the files that were asked for."""


class MemoryBudgetError(EasyCkptError, MemoryError):
    """Two snapshots do not fit in the host memory that may be used."""


class RunInUseError(EasyCkptError, RuntimeError):
    """Processes of another job are alive on this directory."""


class KeeperError(EasyCkptError, RuntimeError):
    """The keeper could not be started, reached, or it refused a request."""


class PersistError(EasyCkptError, OSError):
    """Writing a step to storage failed; the memory tier is not affected."""


class RestoreError(EasyCkptError, RuntimeError):
    """A checkpoint was found but cannot be loaded into what was given."""


class UnsupportedError(EasyCkptError, NotImplementedError):
    """The situation is known and not supported by this version."""
