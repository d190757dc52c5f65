"""`TrainerWrapper(trainer)`: the same Trainer, with asynchronous checkpoints and exact resume."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from transformers import Trainer

from easyckpt_core import CheckpointConfig, Checkpointer, ConfigurationError, UnsupportedError
from easyckpt_hf._transformers import rewrites_weights
from easyckpt_hf.layout import TrainerLayout
from easyckpt_hf.native import newest_native

logger = logging.getLogger(__name__)


class TrainerWrapper:
    """Give a Trainer checkpoints in host memory and background saving, in its own format.

        trainer = TrainerWrapper(trainer)
        trainer.train(resume_from_checkpoint=True)

    The returned object is the given Trainer, whose class became a subclass of its own class and of
    this one: every attribute, method and isinstance check keeps working. `save_strategy`,
    `save_steps` and `save_total_limit` decide what reaches storage, as before; a snapshot in host
    memory is taken every `save_mem_interval` steps besides.

    Args:
        trainer: any `transformers.Trainer`, before `train` is called.
        save_mem_interval: steps between snapshots in host memory; the variable
            EASYCKPT_SAVE_MEM_INTERVAL is the default, else 1.

    Raises:
        ConfigurationError: what was given is no Trainer, or no interval.
        UnsupportedError: the Trainer uses something that this version cannot checkpoint.
    """

    # What the class has from the Trainer that it is combined with.
    args: Any
    control: Any
    model: Any
    optimizer: Any
    state: Any
    store_flos: Any

    def __new__(cls, trainer: Any, *, save_mem_interval: int | None = None) -> Any:
        if not isinstance(trainer, Trainer):
            raise ConfigurationError(
                f"TrainerWrapper got a {type(trainer).__name__}; give it a transformers.Trainer"
            )
        if not isinstance(trainer, TrainerWrapper):
            kind = type(trainer)
            trainer.__class__ = type(f"EasyCkpt{kind.__name__}", (TrainerWrapper, kind), {})
        return trainer

    def __init__(self, trainer: Any, *, save_mem_interval: int | None = None) -> None:
        # Python calls this on the Trainer that __new__ returned, which is made already.
        if save_mem_interval is None:
            # A Trainer that is wrapped again keeps its interval.
            save_mem_interval = vars(self).get("save_mem_interval") or _interval_from_environment()
        if not isinstance(save_mem_interval, int) or save_mem_interval < 1:
            raise ConfigurationError(
                f"save_mem_interval={save_mem_interval!r}: allowed are whole numbers from 1 on"
            )
        self.save_mem_interval = save_mem_interval
        self._checkpointer: Checkpointer | None = None
        self._view = contextlib.ExitStack()
        self._is_watching = False
        refuse_unsupported(self)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as the Trainer does; `True` resumes from the newest step on any tier, else scratch.

        Call on every rank. A path, False and None mean what they mean to the Trainer; without a
        resume the snapshots of an earlier run in the same directory are forgotten.
        """
        refuse_unsupported(self)
        checkpointer = Checkpointer(
            CheckpointConfig(
                directory=self.args.output_dir,
                save_mem_interval=self.save_mem_interval,
                max_checkpoints=_limit_of(self.args),
                # A storage save that must wait is still cheaper than the Trainer's own, which
                # always waits; and the user asked for these directories.
                when_storage_busy="wait",
            ),
            TrainerLayout(),
            rank=self.args.process_index,
            world_size=self.args.world_size,
            local_rank=max(self.args.local_process_index, 0),
        )
        with checkpointer, self._view:
            self._checkpointer, self._is_watching = checkpointer, False
            self._announce()
            try:
                source = self._find_resume(resume_from_checkpoint)
                return super().train(source, *args, **kwargs)  # type: ignore[misc]
            finally:
                self._checkpointer = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Take the Trainer's due save: a snapshot now, the directory in the background."""
        if self._checkpointer is None or trial is not None:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        self.store_flos()
        self._note_best()
        self._snapshot(storage=True)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """After the Trainer has logged, evaluated and saved: the state of this step is final."""
        due_before = self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        is_due = self.state.global_step % self.save_mem_interval == 0
        if self._checkpointer is not None and is_due and not due_before:
            self._snapshot(storage=False)

    def _snapshot(self, *, storage: bool) -> None:
        assert self._checkpointer is not None
        # The Trainer has loaded everything by now: the memory it resumed from may be reused.
        self._view.close()
        if not self._is_watching:
            self._checkpointer.watch(getattr(self.optimizer, "optimizer", self.optimizer))
            self._is_watching = True
        self._checkpointer.save(self.state.global_step, self, storage=storage)

    def _note_best(self) -> None:
        """Record the directory of the best step as the Trainer does: once it has one, or now."""
        best = self.state.best_global_step
        if best:
            path = os.path.join(self.args.output_dir, TrainerLayout().directory_name(best))
            if best == self.state.global_step or os.path.isdir(path):
                self.state.best_model_checkpoint = path

    def _find_resume(self, asked: str | bool | None) -> str | bool | None:
        """Return what the Trainer should resume from: a directory, or None for scratch."""
        assert self._checkpointer is not None
        if asked is not True:
            if not asked:
                self._checkpointer.start_fresh()
            return asked
        snapshot = self._checkpointer.latest()
        native = newest_native(self.args.output_dir, -1 if snapshot is None else snapshot.step)
        if native is not None:
            self._say(f"resuming from {native[1]} (step {native[0]})")
            return str(native[1])
        if snapshot is None:
            self._say(f"no checkpoint in {self.args.output_dir}: training starts from scratch")
            return None
        self._say(f"resuming from {snapshot.tier} at step {snapshot.step}")
        return str(self._view.enter_context(snapshot.open()))

    def _announce(self) -> None:
        steps = self.save_mem_interval
        every = "every step" if steps == 1 else f"every {steps} steps"
        self._say(
            f"snapshots in host memory {every}; {self.args.output_dir} is written when "
            f"save_strategy={self.args.save_strategy.value!r} says so, in the background"
        )

    def _say(self, text: str) -> None:
        if self.args.process_index == 0:
            logger.warning("EasyCkpt: %s", text)


def refuse_unsupported(trainer: Any) -> None:
    """Raise for what this version cannot checkpoint, before training has spent any time.

    Raises:
        UnsupportedError: names the setting and what to do.
    """
    args = trainer.args
    reasons = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "PEFT adapters": hasattr(trainer.model, "peft_config"),
        "a model whose save_pretrained rewrites its weights": rewrites_weights(trainer.model),
        "load_best_model_at_end=True": args.load_best_model_at_end,
        "save_strategy='best'": str(args.save_strategy.value) == "best",
        "save_only_model=True": args.save_only_model,
        "push_to_hub=True": args.push_to_hub,
        "metric_for_best_model with save_total_limit": (
            args.metric_for_best_model is not None and _limit_of(args) is not None
        ),
    }
    reasons |= {f"a Trainer class with its own {name}": True for name in _overridden(type(trainer))}
    found = [name for name, is_there in reasons.items() if is_there]
    if found:
        raise UnsupportedError(
            f"this version of easyckpt-hf does not support {', '.join(found)}; train without it or "
            "without TrainerWrapper"
        )


def _overridden(kind: type) -> list[str]:
    """Return what a subclass replaced of the Trainer's saving: it would not be called."""
    theirs = [cls for cls in kind.__mro__ if issubclass(cls, Trainer) and cls is not Trainer]
    names = ("_save_checkpoint", "_save", "save_model")
    return [
        name
        for name in names
        if any(name in vars(cls) for cls in theirs if not issubclass(cls, TrainerWrapper))
    ]


def _limit_of(args: Any) -> int | None:
    limit: int | None = args.save_total_limit
    return limit if limit is not None and limit > 0 else None


def _interval_from_environment() -> int:
    text = os.environ.get("EASYCKPT_SAVE_MEM_INTERVAL", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"EASYCKPT_SAVE_MEM_INTERVAL={text!r}: allowed are whole numbers from 1 on"
        )
    return int(text)
