"""Fine-tune Transformer models over several processes with a loop of yours or ours."""

from rapidformer.__about__ import __version__
from rapidformer.arguments import parse_args
from rapidformer.batch import BatchPlan, resolve_batch
from rapidformer.config import RunConfig
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import (
    ArgumentsError,
    ConfigError,
    DataError,
    EngineError,
    MissingExtraError,
    ProviderError,
    RapidformerError,
    ResumeError,
    TrainingError,
)
from rapidformer.session import get_args, get_logger, get_timers
from rapidformer.trainer import Finetuner

__all__ = [
    "ArgumentsError",
    "BatchPlan",
    "ConfigError",
    "DataError",
    "EngineError",
    "Finetuner",
    "MissingExtraError",
    "ProviderError",
    "RapidformerEngine",
    "RapidformerError",
    "ResumeError",
    "RunConfig",
    "TrainingError",
    "__version__",
    "get_args",
    "get_logger",
    "get_timers",
    "parse_args",
    "resolve_batch",
]
