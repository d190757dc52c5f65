"""What a run is: every setting of it, checked before a device or a process is touched."""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass

from rapidformer.errors import ConfigError

TASKS = ("sequence_classification",)
LATER_TASKS = (
    "token_classification",
    "question_answering",
    "masked_lm",
    "causal_lm",
    "seq2seq_lm",
    "pretraining",
)
DECAY_STYLES = ("constant", "linear", "cosine")
RESUME_CHOICES = ("auto", "never", "must")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The settings of one training run. The string under each field is also its flag's help.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    task: str | None = None
    """What is trained. This version knows sequence_classification."""

    user_script: str | None = None
    """A script of yours with a Finetuner; every process runs it in place of a built-in task."""

    pretrained_model_name_or_path: str | None = None
    """The model to start from: a folder with a Hugging Face model, or its name on the Hub."""

    data_path: str | None = None
    """The data: a folder with train/validation/test files, one file, or a name on the Hub."""

    data_name: str | None = None
    """Which configuration of the data set, such as mrpc of glue; or a sub-folder of --data-path."""

    text_column: tuple[str, ...] = ()
    """Column with the text, or two columns for pairs. Found by name and type if not given."""

    label_column: str | None = None
    """Column with the label. Found by name if not given."""

    seq_length: int | None = None
    """Longest input in tokens, the rest is cut; default: what the model allows, at most 512."""

    num_workers: int = 0
    """Loader processes for each training process. It does not change the result."""

    epochs: int | None = None
    """Passes over the training data."""

    train_iters: int | None = None
    """Steps to train; with --epochs too, whichever ends first."""

    micro_batch_size: int = 8
    """Samples that one device takes at once."""

    global_batch_size: int | None = None
    """Samples of one step over all devices; default: micro batch size x devices."""

    lr: float = 5e-5
    """Highest learning rate."""

    lr_decay_style: str = "linear"
    """How the learning rate falls after the warm-up: constant, linear or cosine."""

    lr_decay_iters: int | None = None
    """Step at which --min-lr is reached; default: the last step."""

    lr_warmup_iters: int | None = None
    """Steps in which the learning rate rises from 0 to --lr."""

    lr_warmup_fraction: float | None = None
    """The same as a part of --lr-decay-iters, 0 to below 1. Excludes --lr-warmup-iters."""

    min_lr: float = 0.0
    """Lowest learning rate after the decay."""

    weight_decay: float = 0.01
    """Decoupled weight decay; not applied to biases and normalisation weights."""

    clip_grad: float = 1.0
    """Longest allowed gradient (global L2 norm); 0 switches clipping off."""

    adam_beta1: float = 0.9
    """AdamW's decay of the first moment."""

    adam_beta2: float = 0.999
    """AdamW's decay of the second moment."""

    adam_eps: float = 1e-8
    """AdamW's epsilon."""

    seed: int = 1234
    """Seed of initialisation, order of samples and dropout."""

    save: str | None = None
    """Folder of the run; default: runs/<task or script>-<model>."""

    save_mem_interval: int | None = None
    """Steps between two checkpoints in host memory, which survive the death of a process."""

    save_storage_interval: int | None = None
    """Steps between two checkpoints in the folder of the run."""

    max_ckpt_num: int = 5
    """Newest checkpoints that are kept in the folder of the run."""

    resume: str = "auto"
    """auto: go on where the folder of the run stands; must: fail if there is nothing to go on from;
    never: fail if there are checkpoints."""

    log_interval: int = 10
    """Steps between two printed lines when the output is not a terminal."""

    eval_interval: int | None = None
    """Steps between two evaluations, beside the one at the end of every epoch."""

    nproc_per_node: int | None = None
    """Processes to start; default: the number of visible CUDA devices, 1 without."""

    max_restarts: int = 3
    """How often a run is restarted after one of its processes died."""

    dry_run: bool = False
    """Check everything, print the plan and stop."""

    def __post_init__(self) -> None:
        _check_task(self)
        _check_counts(self)
        _check_numbers(self)
        _check_schedule(self)

    @property
    def save_path(self) -> str:
        """Folder of the run: --save, or a name made of task (or script) and model."""
        if self.save is not None:
            return self.save
        what = self.task or "run"
        if self.user_script is not None:
            what = os.path.splitext(os.path.basename(self.user_script))[0]
        model = os.path.basename(os.path.normpath(self.pretrained_model_name_or_path or "model"))
        return os.path.join("runs", f"{what}-{model}")


def flag(field: str) -> str:
    """Return the command line flag of a field of RunConfig."""
    return "--" + field.replace("_", "-")


def nearest(given: str, allowed: tuple[str, ...] | list[str]) -> str:
    """Return ' Did you mean X?' for the allowed word nearest to `given`, or an empty string."""
    found = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    return f" Did you mean {found[0]}?" if found else ""


def _check_task(config: RunConfig) -> None:
    task = config.task
    if task is not None and task not in TASKS:
        if task in LATER_TASKS:
            raise ConfigError(
                f"--task {task} is not in this version; allowed: {', '.join(TASKS)}. Other "
                "training goes through --user-script with a Finetuner of your own"
            )
        hint = nearest(task, TASKS + LATER_TASKS)
        raise ConfigError(f"--task {task} is unknown; allowed: {', '.join(TASKS)}.{hint}")
    if len(config.text_column) > 2:
        raise ConfigError(
            f"--text-column {' '.join(config.text_column)}: {len(config.text_column)} columns "
            "given; allowed are one column, or two for pairs of texts"
        )
    if len(set(config.text_column)) != len(config.text_column):
        raise ConfigError(
            f"--text-column {' '.join(config.text_column)} names one column twice; "
            "give two different columns, or one"
        )
    if config.label_column is not None and config.label_column in config.text_column:
        raise ConfigError(
            f"--label-column {config.label_column} is also given as --text-column; "
            "one column cannot be both"
        )
    for name, allowed in (("lr_decay_style", DECAY_STYLES), ("resume", RESUME_CHOICES)):
        value = getattr(config, name)
        if value not in allowed:
            raise ConfigError(
                f"{flag(name)} {value} is not allowed; allowed: {', '.join(allowed)}."
                f"{nearest(str(value), allowed)}"
            )


def _check_counts(config: RunConfig) -> None:
    lowest = {
        "seq_length": 1,
        "num_workers": 0,
        "epochs": 1,
        "train_iters": 1,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "lr_decay_iters": 1,
        "lr_warmup_iters": 0,
        "seed": 0,
        "save_mem_interval": 1,
        "save_storage_interval": 1,
        "max_ckpt_num": 1,
        "log_interval": 1,
        "eval_interval": 1,
        "nproc_per_node": 1,
        "max_restarts": 0,
    }
    for name, bound in lowest.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ConfigError(
                f"{flag(name)} {value} is too small; allowed: whole numbers from {bound} on. "
                f"Nearest: {flag(name)} {bound}"
            )
    if config.seed >= 2**32:
        raise ConfigError(f"--seed {config.seed} is too large; allowed: 0 to {2**32 - 1}")


def _check_numbers(config: RunConfig) -> None:
    for name in (
        "lr",
        "min_lr",
        "weight_decay",
        "clip_grad",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
    ):
        value = getattr(config, name)
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{flag(name)} {value}: allowed are finite numbers from 0 on")
    if config.lr == 0:
        raise ConfigError("--lr 0 would not train; give a positive number such as --lr 2e-5")
    if config.adam_eps == 0:
        raise ConfigError("--adam-eps 0 divides by zero; give a positive number such as 1e-8")
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(config, name) >= 1:
            raise ConfigError(f"{flag(name)} {getattr(config, name)}: allowed: 0 to below 1")
    if config.min_lr > config.lr:
        raise ConfigError(
            f"--min-lr {config.min_lr} is above --lr {config.lr}; "
            f"nearest: --min-lr {config.lr} or lower"
        )


def _check_schedule(config: RunConfig) -> None:
    if config.lr_warmup_iters is not None and config.lr_warmup_fraction is not None:
        raise ConfigError(
            f"--lr-warmup-iters {config.lr_warmup_iters} and --lr-warmup-fraction "
            f"{config.lr_warmup_fraction} exclude each other; give one of them"
        )
    fraction = config.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        raise ConfigError(f"--lr-warmup-fraction {fraction}: allowed: 0 to below 1, such as 0.1")
    decay_iters = config.lr_decay_iters
    if decay_iters is not None and (config.lr_warmup_iters or 0) >= decay_iters:
        raise ConfigError(
            f"--lr-warmup-iters {config.lr_warmup_iters} leaves no step to decay in "
            f"--lr-decay-iters {decay_iters}; nearest: --lr-warmup-iters {decay_iters - 1}"
        )
