"""Checkpoints of a run: the one file that knows easyckpt_core."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rapidformer.config import RunConfig
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import MissingExtraError, ResumeError, TrainingError
from rapidformer.run_folder import RunFolder


class Progress:
    """How far a run has come; saved with every checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = int(state["step"])


def is_installed() -> bool:
    """Return whether the package that writes checkpoints is installed."""
    return importlib.util.find_spec("easyckpt_core") is not None


def check_is_available(config: RunConfig) -> None:
    """Check that what `config` asks for can be saved.

    Raises:
        MissingExtraError: an interval was given and the extra is not installed.
    """
    for name, value in (
        ("--save-mem-interval", config.save_mem_interval),
        ("--save-storage-interval", config.save_storage_interval),
    ):
        if value is not None and not is_installed():
            raise MissingExtraError(
                f"{name} {value} needs the checkpoint package, which is not installed; "
                "pip install 'rapidformer-engine[easyckpt]', or leave the flag out"
            )


def live_process_ids(folder: RunFolder) -> list[int]:
    """Return the processes of another job that train in `folder`; starts nothing."""
    if not is_installed() or not folder.checkpoints.is_dir():
        return []
    from easyckpt_core import live_processes

    return sorted({process.pid for process in live_processes(str(folder.checkpoints))})


class RunCheckpoints:
    """Saves and restores a composed engine in `<save>/checkpoints`.

    Does nothing when no interval is set and there is nothing to go on from.
    """

    def __init__(
        self, engine: RapidformerEngine, folder: RunFolder, *, say: Callable[[str], None]
    ) -> None:
        self.last_saved = "none yet"
        self._engine = engine
        self._folder = folder
        self._say = say
        self._progress = Progress()
        self._checkpointer: Any = None
        self._sources: dict[str, Any] = {}

    def start(self, total_steps: int) -> int:
        """Attach, restore the newest checkpoint, and return its step; 0 if there is none.

        Collective: call on every rank, after compose().
        """
        config = self._engine.config
        check_is_available(config)
        wants_saves = config.save_mem_interval or config.save_storage_interval
        if not wants_saves and not (is_installed() and self._has_checkpoints()):
            if config.resume == "must":
                raise ResumeError(f"--resume must: no checkpoint in {self._folder.checkpoints}")
            return 0
        self._attach(config, total_steps)
        snapshot = self._checkpointer.latest()
        if snapshot is None:
            if config.resume == "must":
                raise ResumeError(
                    f"--resume must: no complete checkpoint in memory or in "
                    f"{self._folder.checkpoints}; give --resume auto to start anew"
                )
        else:
            self._checkpointer.restore(snapshot, self._sources)
            self._tell_resumed(snapshot.step, snapshot.tier)
        self._checkpointer.watch(self._engine.optimizer)
        return 0 if snapshot is None else int(snapshot.step)

    def after_step(self, step: int, *, is_last: bool) -> None:
        """Save what is due; the last step goes to storage. Every rank, after every step."""
        if self._checkpointer is None:
            return
        self._progress.step = step
        if is_last:
            self._save_last(step)
            return
        saved = self._checkpointer.maybe_save(step, self._sources)
        if saved is not None and not saved.is_skipped:
            self.last_saved = f"step {step}"

    def close(self) -> None:
        """Wait for what is being written and detach, at a normal end. Idempotent."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def abandon(self) -> None:
        """Detach after an error: the memory tier stays for a restart. Idempotent."""
        if self._checkpointer is not None:
            self._checkpointer.abandon()
            self._checkpointer = None

    def _save_last(self, step: int) -> None:
        # In between, a save that comes due while storage is busy may be skipped; not this one.
        report = self._checkpointer.save(step, self._sources, storage=True, wait=True)
        self._checkpointer.before_update()
        if report.is_skipped or not report.is_storage_due:
            raise TrainingError(
                f"rank {self._engine.rank}: storage was busy for too long, so the last step {step} "
                f"is not saved; look at {self._folder.checkpoints}"
            )
        self.last_saved = f"step {step}"

    def _attach(self, config: RunConfig, total_steps: int) -> None:
        from easyckpt_core import CheckpointConfig, Checkpointer, PerRank, RngState, StepLayout

        storage_interval = config.save_storage_interval
        if config.save_mem_interval is None and storage_interval is None:
            storage_interval = total_steps
        checkpoint_config = CheckpointConfig(
            directory=str(self._folder.checkpoints),
            save_mem_interval=config.save_mem_interval,
            save_storage_interval=storage_interval,
            max_checkpoints=config.max_ckpt_num,
        )
        engine = self._engine
        self._checkpointer = Checkpointer(
            checkpoint_config, StepLayout(), rank=engine.rank, world_size=engine.world_size
        )
        self._sources = {
            "model": engine.module,
            "optimizer": engine.optimizer,
            "lr_scheduler": engine.lr_scheduler,
            "rng": PerRank(RngState()),
            "progress": self._progress,
        }
        self._checkpointer.start()

    def _has_checkpoints(self) -> bool:
        folder = self._folder.checkpoints
        return folder.is_dir() and any(folder.iterdir())

    def _tell_resumed(self, step: int, tier: str) -> None:
        if self._engine.rank != 0:
            return
        self._say(f"resumed from {tier} at step {step}")
        record = {"step": step, "tier": tier, "time": time.time()}
        append_line(self._folder.log / "resume.jsonl", record)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
