"""One training process of a run: `python -m rapidformer_cli.worker <flags>`."""

from __future__ import annotations

import os
import runpy
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from rapidformer_cli.main import EXIT_FAILED, EXIT_INTERRUPTED, quiet_libraries

ATTEMPT = "RAPIDFORMER_ATTEMPT"
"""Set by our launcher, which shows the first traceback itself: how often the run was restarted."""


@record
def run_worker(words: list[str]) -> None:
    """Train as one rank of the run that the command line `words` describes."""
    from rapidformer import RapidformerEngine, session
    from rapidformer.arguments import read_arguments
    from rapidformer_cli.preflight import check_run
    from rapidformer_cli.tasks.sequence_classification import SequenceClassification

    parsed = read_arguments(words, keep_unknown=_has_script(words))
    if parsed.config.user_script is not None:
        sys.argv = [parsed.config.user_script, *words]
        runpy.run_path(parsed.config.user_script, run_name="__main__")
        return
    source = check_run(parsed.config, is_worker=True).source
    assert source is not None
    folder = source.prepare()
    session.set_current(parsed.config, parsed.extra)
    engine = RapidformerEngine(config=parsed.config)
    try:
        SequenceClassification(engine, source, folder).train()
    except BaseException:
        engine.close(waits=False)
        raise
    engine.close()


def _has_script(words: list[str]) -> bool:
    return any(word.split("=")[0] == "--user-script" for word in words)


def main() -> int:
    """Run as a child of the launcher; a failure is left in its error file."""
    quiet_libraries()
    if ATTEMPT in os.environ:
        # Our launcher makes a new agent for each attempt, which counts from 0 again.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ[ATTEMPT]
    try:
        run_worker(sys.argv[1:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        if ATTEMPT in os.environ and os.environ.get("RANK") == "0":
            return EXIT_FAILED
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
