"""The command line: the one place where flags are spelled."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from rapidformer.__about__ import __version__
from rapidformer.config import DECAY_STYLES, RESUME_CHOICES, TASKS, RunConfig, flag, nearest
from rapidformer.errors import ArgumentsError, ConfigError

ExtraArgsProvider = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]

EXAMPLE = """\
example (two processes, memory checkpoint every step, one on disk every 20 steps):
  rapidformer --task sequence_classification \\
      --pretrained-model-name-or-path ./my-bert --data-path ./reviews \\
      --epochs 3 --micro-batch-size 16 --global-batch-size 32 \\
      --lr 2e-5 --lr-decay-style linear --lr-warmup-iters 100 \\
      --nproc-per-node 2 --save runs/reviews \\
      --save-mem-interval 1 --save-storage-interval 20
"""

_GROUPS = {
    "what to train": ("task", "user_script", "pretrained_model_name_or_path"),
    "data": ("data_path", "data_name", "text_column", "label_column", "seq_length", "num_workers"),
    "length and batches": ("epochs", "train_iters", "micro_batch_size", "global_batch_size"),
    "learning rate": (
        "lr",
        "lr_decay_style",
        "lr_decay_iters",
        "lr_warmup_iters",
        "lr_warmup_fraction",
        "min_lr",
    ),
    "optimizer": ("weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps", "seed"),
    "saving and going on": (
        "save",
        "save_mem_interval",
        "save_storage_interval",
        "max_ckpt_num",
        "resume",
    ),
    "watching": ("log_interval", "eval_interval"),
    "processes": ("nproc_per_node", "max_restarts", "dry_run"),
}
_ALIASES = {
    "data_path": ("--data-dir",),
    "seq_length": ("--max-seq-length",),
    "save_storage_interval": ("--save-interval",),
}
_SHOWN_CHOICES = {"task": TASKS, "lr_decay_style": DECAY_STYLES, "resume": RESUME_CHOICES}
_TASK_SPELLINGS = {"casual_lm": "causal_lm"}
_LATER_FLAGS = (
    "--mixed-precision",
    "--onnx-runtime-training",
    "--zero-1-memory-optimization",
    "--zero-2-memory-optimization",
    "--zero-3-memory-optimization",
    "--fsdp-memory-optimization",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--checkpoint-activations",
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--max-position-embeddings",
    "--tokenizer-type",
    "--split",
    "--data-impl",
    "--vocab-file",
    "--merge-file",
    "--graph-backend",
    "--keep-last",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedArguments:
    """A command line, read: our settings and what a script of the user declared besides."""

    config: RunConfig
    extra: dict[str, Any]
    unknown: tuple[str, ...] = ()


def parse_args(
    argv: Sequence[str] | None = None, extra_args_provider: ExtraArgsProvider | None = None
) -> RunConfig:
    """Return the settings of a command line; `argv` defaults to that of the process.

    Raises:
        ArgumentsError: a flag is unknown, or its value has the wrong type.
        ConfigError: a value is out of range, or two values contradict each other.
    """
    return read_arguments(argv, extra_args_provider).config


def read_arguments(
    argv: Sequence[str] | None = None,
    extra_args_provider: ExtraArgsProvider | None = None,
    *,
    keep_unknown: bool = False,
) -> ParsedArguments:
    """Like parse_args, and returns what `extra_args_provider(parser)` declared besides.

    With `keep_unknown`, unknown flags are returned, not judged: a script may declare them later.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    own = {action.dest for action in parser._actions}
    if extra_args_provider is not None:
        parser = extra_args_provider(parser) or parser
    namespace, unknown = parser.parse_known_args(words)
    if unknown and not keep_unknown:
        raise ArgumentsError(_about_unknown(unknown, parser))
    values = vars(namespace)
    extra = {name: value for name, value in values.items() if name not in own}
    try:
        config = RunConfig(**_settings({k: v for k, v in values.items() if k in own}))
    except ConfigError as err:
        raise type(err)(_as_typed(str(err), words)) from None
    return ParsedArguments(config=config, extra=extra, unknown=tuple(unknown))


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process, in words that name flag and value."""

    def error(self, message: str) -> typing.NoReturn:
        words = message.removeprefix("argument ").split(": ", 1)
        text = ": ".join([words[0].split("/")[0], *words[1:]])
        raise ArgumentsError(f"{text}. See rapidformer --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: one flag a field of RunConfig, grouped, with the field's text as help."""
    parser = _Parser(
        prog="rapidformer",
        description="Fine-tune a Transformer model on your data, over one or several devices.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"rapidformer {__version__}")
    hints, helps = typing.get_type_hints(RunConfig), field_help()
    defaults = {f.name: None if f.default is MISSING else f.default for f in fields(RunConfig)}
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_flag(group, name, hints[name], helps[name], defaults[name])
            if name == "data_name":
                group.add_argument(
                    "--dataset-name",
                    metavar="NAME",
                    help="Alone: the same as --data-path. Beside --data-path: as --data-name.",
                )
    return parser


def _add_flag(group: Any, name: str, hint: Any, text: str, default: Any) -> None:
    spellings = (flag(name), *_ALIASES.get(name, ()))
    if default not in (None, (), False):
        text = f"{text} [{default}]"
    text = text.replace("%", "%%")
    if hint is bool:
        group.add_argument(*spellings, dest=name, action="store_true", help=text)
        return
    kind = _plain_type(hint)
    metavar = {int: "N", float: "X"}.get(kind, "NAME")
    if name in _SHOWN_CHOICES:
        metavar = "{" + ",".join(_SHOWN_CHOICES[name]) + "}"
    several = {"nargs": "+"} if typing.get_origin(hint) is tuple else {}
    reader = {int: _whole_number, float: _number}.get(kind, str)
    group.add_argument(*spellings, dest=name, type=reader, metavar=metavar, help=text, **several)


def _plain_type(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def _whole_number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number") from None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number, such as 2e-5") from None


def field_help() -> dict[str, str]:
    """Return the string under each field of RunConfig, on one line."""
    body = ast.parse(inspect.getsource(RunConfig)).body[0]
    assert isinstance(body, ast.ClassDef)
    helps = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(node.target, ast.Name) and isinstance(after.value, ast.Constant)
            helps[node.target.id] = " ".join(str(after.value.value).split())
    return helps


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of RunConfig from parsed values: spellings and aliases resolved."""
    values = dict(values)
    if (name := values.pop("dataset_name", None)) is not None:
        target = "data_path" if "data_path" not in values else "data_name"
        if target in values:
            raise ConfigError(
                f"--dataset-name {name} beside --data-path means --data-name, which is also given "
                f"({values[target]}); give one of the two"
            )
        values[target] = name
    if "text_column" in values:
        values["text_column"] = tuple(values["text_column"])
    if "task" in values:
        values["task"] = _TASK_SPELLINGS.get(values["task"], values["task"])
    return values


def _as_typed(message: str, words: list[str]) -> str:
    """Return `message` with each flag spelled as the user did."""
    typed = {word.split("=")[0] for word in words if word.startswith("--")}
    for name, aliases in _ALIASES.items():
        for alias in aliases:
            if alias in typed and flag(name) not in typed:
                message = message.replace(flag(name), alias)
    return message


def _about_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    flags = [word.split("=")[0] for word in unknown if word.startswith("--")]
    if not flags:
        return f"{unknown[0]!r} belongs to no flag; quote values that contain spaces"
    first = flags[0]
    if first in _LATER_FLAGS:
        return f"{first} is not in this version ({__version__}); leave it out"
    known = [option for action in parser._actions for option in action.option_strings]
    return f"{first} is not a known flag.{nearest(first, known)} See rapidformer --help"
