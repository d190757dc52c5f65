"""Exceptions of rapidformer.

RapidformerError
 +-- ConfigError (ValueError)          a setting that cannot work; raised before a device is touched
 |    +-- ArgumentsError               a command line that cannot be read
 |    +-- ResumeError                  the folder of the run does not allow what --resume asks for
 +-- DataError (ValueError)            a data set that cannot be read or lacks what the task needs
 +-- ProviderError (TypeError)         a method of a Finetuner is missing or returns wrong
 +-- EngineError (RuntimeError)        engine methods called in an order that cannot work
 +-- TrainingError (ArithmeticError)   training itself went wrong, such as a loss that is not finite
 +-- MissingExtraError (ImportError)   a feature needs an optional dependency that is missing
"""

from __future__ import annotations


class RapidformerError(Exception):
    """Base of every exception that rapidformer raises on purpose."""


class ConfigError(RapidformerError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class ArgumentsError(ConfigError):
    """The command line cannot be read."""


class ResumeError(ConfigError):
    """The folder of the run does not allow what was asked for."""


class DataError(RapidformerError, ValueError):
    """A data set cannot be read or lacks what the task needs."""


class ProviderError(RapidformerError, TypeError):
    """A method of a Finetuner subclass is missing or returned something unusable."""


class EngineError(RapidformerError, RuntimeError):
    """The engine was called in an order that cannot work."""


class TrainingError(RapidformerError, ArithmeticError):
    """Training cannot go on."""


class MissingExtraError(RapidformerError, ImportError):
    """An optional dependency is needed and not installed."""
