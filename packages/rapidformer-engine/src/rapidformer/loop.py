"""The training loop. There is no other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from rapidformer.checkpoint import RunCheckpoints
from rapidformer.data import TrainLoader
from rapidformer.engine import RapidformerEngine, random_state_kept
from rapidformer.errors import TrainingError
from rapidformer.journal import Journal
from rapidformer.progress import ProgressReport
from rapidformer.run_folder import RunFolder

ForwardStep = Callable[[Any], torch.Tensor]
Evaluate = Callable[[], dict[str, Any]]


class TrainingLoop:
    """Trains a composed engine from a step to the last one, and evaluates on the way."""

    def __init__(
        self,
        engine: RapidformerEngine,
        *,
        loader: TrainLoader,
        total_steps: int,
        forward_step: ForwardStep,
        evaluate: Evaluate | None,
        report: ProgressReport,
        folder: RunFolder,
    ) -> None:
        self.total_steps = total_steps
        self.history: list[dict[str, Any]] = []
        self._engine = engine
        self._loader = loader
        self._forward_step = forward_step
        self._evaluate = evaluate
        self._report = report
        self._steps_journal = Journal(folder.log / "train.jsonl")
        self._evaluations_journal = Journal(folder.log / "eval.jsonl")

    def run(self, checkpoints: RunCheckpoints) -> None:
        """Train from the newest checkpoint to the last step. Collective: call on every rank."""
        first_step = checkpoints.start(self.total_steps)
        self._open_journals(first_step)
        assert self._engine.model is not None, "compose() comes first"
        self._engine.model.train()
        self._report.start(first_step)
        try:
            if first_step > 0 and self._is_evaluation_due(first_step):
                self._evaluate_at(first_step)
            self._train(first_step, checkpoints)
        finally:
            self._report.close()
            self._steps_journal.close()
            self._evaluations_journal.close()

    def _train(self, first_step: int, checkpoints: RunCheckpoints) -> None:
        engine, step = self._engine, first_step
        loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
        for micro, batch in self._loader.micro_batches(first_step, self.total_steps):
            engine.begin_micro_batch(is_last=micro.is_last)
            loss = self._forward_step(batch)
            weight = micro.num_real / micro.num_global
            engine.backward(loss, weight=weight * engine.world_size)
            loss_sum += loss.detach().double() * weight
            if micro.is_last:
                assert engine.optimizer is not None
                lr = engine.optimizer.param_groups[0]["lr"]
                engine.update()
                step += 1
                mean_loss = self._global_loss(step, loss_sum)
                epoch = (step - 1) // self._loader.sampler.steps_per_epoch + 1
                record = {"step": step, "epoch": epoch, "loss": mean_loss, "lr": lr}
                if engine.rank == 0:
                    # Before the checkpoint: a run that goes on from it must find this line.
                    self._steps_journal.write({**record, "time": time.time()})
                checkpoints.after_step(step, is_last=step == self.total_steps)
                self._report.step(
                    **record, num_samples=micro.num_global, saved=checkpoints.last_saved
                )
                if self._is_evaluation_due(step):
                    self._evaluate_at(step)
                loss_sum.zero_()

    def _global_loss(self, step: int, loss_sum: torch.Tensor) -> float:
        loss = float(self._engine.sum_over_ranks(loss_sum))
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {step} is {loss}; lower --lr {self._engine.config.lr}, "
                "lengthen the warm-up, or look for broken samples"
            )
        return loss

    def _is_evaluation_due(self, step: int) -> bool:
        if self._evaluate is None or any(record["step"] == step for record in self.history):
            return False
        interval = self._engine.config.eval_interval
        return (
            step % self._loader.sampler.steps_per_epoch == 0
            or step == self.total_steps
            or (interval is not None and step % interval == 0)
        )

    def _evaluate_at(self, step: int) -> None:
        assert self._evaluate is not None and self._engine.model is not None
        self._engine.model.eval()
        with random_state_kept(), torch.no_grad():
            metrics = self._evaluate()
        self._engine.model.train()
        record = {"step": step, "metrics": metrics, "time": time.time()}
        self.history.append(record)
        if self._engine.rank == 0:
            self._evaluations_journal.write(record)
        shown = " ".join(
            f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in metrics.items()
        )
        self._report.say(f"evaluation at step {step}: {shown}")

    def _open_journals(self, first_step: int) -> None:
        """Let rank 0 cut the journals; every rank knows then which evaluations are done."""
        if self._engine.rank == 0:
            self._steps_journal.start(first_step)
            self.history = self._evaluations_journal.start(first_step)
        if self._engine.world_size > 1:
            box = [self.history]
            torch.distributed.broadcast_object_list(box, src=0, device=self._engine.device)
            self.history = box[0]
