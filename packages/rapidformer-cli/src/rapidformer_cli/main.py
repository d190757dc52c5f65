"""The rapidformer command: check everything, show the plan, start the processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0: done. 1: training failed. 2: refused before training, with one message. 130 and 143: ended by
    Ctrl-C and SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    quiet_libraries()
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("rapidformer: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(words: list[str]) -> int:
    from rapidformer import ConfigError, DataError, MissingExtraError
    from rapidformer.arguments import read_arguments
    from rapidformer_cli.launch import launch
    from rapidformer_cli.plan import plan_lines
    from rapidformer_cli.preflight import check_run, under_torchrun
    from rapidformer_cli.worker import run_worker

    try:
        parsed = read_arguments(words, keep_unknown=_names_script(words))
        checked = check_run(parsed.config)
    except (ConfigError, DataError, MissingExtraError) as err:
        if os.environ.get("RANK", "0") == "0":
            print(f"rapidformer: error: {err}", file=sys.stderr)
        return EXIT_REFUSED
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(plan_lines(checked)), flush=True)
    if parsed.config.dry_run:
        return 0
    if checked.finished is not None:
        print(f"{checked.folder.path} holds this run, and it has finished:")
        print(json.dumps(checked.finished["final"], indent=2))
        return 0
    if under_torchrun():
        run_worker(words)
        return 0
    if checked.source is not None:
        checked.source.prepare()
    return launch(words, checked)


def _names_script(words: list[str]) -> bool:
    return any(word.split("=")[0] == "--user-script" for word in words)


def quiet_libraries() -> None:
    """Keep progress bars and advice of the libraries off the terminal, unless asked for."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    datasets = sys.modules.get("datasets")
    if datasets is not None and os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1":
        # It has read its environment already, in a process that did other things before.
        datasets.disable_progress_bars()
