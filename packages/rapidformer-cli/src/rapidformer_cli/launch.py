"""Start one process a device through torch's elastic agent, and start them again when one dies."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rapidformer import ConfigError, RapidformerError, errors
from rapidformer_cli.main import EXIT_FAILED, EXIT_REFUSED
from rapidformer_cli.preflight import Checked
from rapidformer_cli.worker import ATTEMPT

_SHUTDOWN_SECONDS = 10


def launch(words: list[str], checked: Checked) -> int:
    """Run the workers until they are done; returns the exit code of the command.

    The agent restarts nothing by itself: between two attempts the cause is shown, and what
    would only fail again (a refused setting, a method that returns wrong) is not tried again.
    """
    _quiet_agent()
    _set_environment(checked.num_processes)
    for attempt in range(checked.config.max_restarts + 1):
        # A restart goes on from what the first attempt saved, whatever --resume allowed it.
        given = words if attempt == 0 else [*words, "--resume", "auto"]
        os.environ[ATTEMPT] = str(attempt)
        try:
            _run_once(given, checked)
            return 0
        except SignalException as err:
            print(f"rapidformer: ended by {err.sigval.name}", file=sys.stderr)
            return 128 + int(err.sigval)
        except ConfigError as err:
            print(f"rapidformer: error: {err}", file=sys.stderr)
            return EXIT_REFUSED
        except ChildFailedError as err:
            rank, failure = first_failure(err.failures)
        final = _final_error(failure)
        is_last = final is not None or attempt == checked.config.max_restarts
        _show_failure(rank, failure, final, checked, with_traceback=is_last)
        if final is not None:
            is_refusal = issubclass(final, errors.ConfigError | errors.DataError)
            return EXIT_REFUSED if is_refusal else EXIT_FAILED
        if not is_last:
            print(
                f"rapidformer: restart {attempt + 1} of {checked.config.max_restarts}",
                file=sys.stderr,
            )
    return EXIT_FAILED


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed by itself: the others fail because it left.

    A process ended by a signal comes first, then the earliest error that is no lost connection.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int]:
        failure = item[1]
        is_signal = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        return (not is_signal, "Connection" in _message(failure), failure.timestamp)

    return min(failures.items(), key=order)


def _run_once(words: list[str], checked: Checked) -> None:
    address = os.environ.get("MASTER_ADDR", "localhost")
    address = "127.0.0.1" if address == "localhost" else address
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=checked.num_processes,
        run_id="rapidformer",
        rdzv_backend="static",
        rdzv_endpoint=f"{address}:{_port(address)}",
        rdzv_configs={"rank": 0, "timeout": 900},
        local_addr=address,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=_RankLogs(checked.folder.log),
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    elastic_launch(config, sys.executable)("-u", "-m", "rapidformer_cli.worker", *words)


class _RankLogs(LogsSpecs):
    """Rank 0 on the terminal; the output of rank k in `<save>/log/rank<k>.out` and `.err`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self._folder.mkdir(parents=True, exist_ok=True)
        outputs, errs, error_files = {}, {}, {}
        for rank, environment in envs.items():
            outputs[rank] = "" if rank == 0 else str(self._folder / f"rank{rank}.out")
            errs[rank] = "" if rank == 0 else str(self._folder / f"rank{rank}.err")
            error_file = self._folder / f"rank{rank}.error.json"
            error_file.unlink(missing_ok=True)
            error_files[rank] = environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        return LogsDest(
            stdouts=outputs,
            stderrs=errs,
            error_files=error_files,
            filtered_stdout=os.devnull,
            filtered_stderr=os.devnull,
        )


def _quiet_agent() -> None:
    # The agent's modules set a level on loggers of their own, so a parent's does not reach them.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _set_environment(num_processes: int) -> None:
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _port(address: str) -> int:
    wanted = os.environ.get("MASTER_PORT", "0")
    if not wanted.isdigit() or int(wanted) > 65535:
        raise ConfigError(f"MASTER_PORT={wanted}: allowed are 0 (any free port) to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, int(wanted)))
        except OSError as err:
            raise ConfigError(
                f"MASTER_ADDR={address} MASTER_PORT={wanted} cannot be listened on "
                f"({err.strerror}); unset both, or choose a free port of this machine"
            ) from err
        return int(probe.getsockname()[1])


def _final_error(failure: ProcessFailure) -> type[RapidformerError] | None:
    """Return the class of an error that a restart would only repeat, or None."""
    found = getattr(errors, _message(failure).split(":", 1)[0], None)
    is_ours = isinstance(found, type) and issubclass(found, RapidformerError)
    return found if is_ours else None


def _show_failure(
    rank: int,
    failure: ProcessFailure,
    final: type[RapidformerError] | None,
    checked: Checked,
    *,
    with_traceback: bool,
) -> None:
    message = _message(failure)
    if failure.exitcode < 0:
        message = f"ended by {signal.Signals(-failure.exitcode).name}"
    if final is not None:
        message = message.split(": ", 1)[-1]
    elif with_traceback and (trace := _traceback(failure)):
        print(trace, file=sys.stderr)
    if not message:
        message = f"exit code {failure.exitcode}; its output is in {checked.folder.log}"
    print(f"rapidformer: error: rank {rank}: {message}", file=sys.stderr)


def _message(failure: ProcessFailure) -> str:
    content: Any = failure.message
    if isinstance(content, dict):
        return str(content.get("message", ""))
    return str(content or "") if failure.exitcode >= 0 else ""


def _traceback(failure: ProcessFailure) -> str:
    content: Any = failure.message
    if isinstance(content, dict):
        return str(content.get("extraInfo", {}).get("py_callstack", "")).rstrip()
    return ""
