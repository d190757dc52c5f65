"""Finetuner: fill in data, model, loss and metric; train() does the rest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rapidformer.checkpoint import RunCheckpoints, check_is_available
from rapidformer.config import RunConfig
from rapidformer.data import DataParallelLoader, DistributedSeekableSampler, TrainLoader
from rapidformer.engine import RapidformerEngine
from rapidformer.errors import ConfigError, DataError, ProviderError
from rapidformer.export import export_model
from rapidformer.loop import TrainingLoop
from rapidformer.progress import ProgressReport
from rapidformer.run_folder import RunFolder, write_json

_TO_FILL = (
    "train_valid_test_datasets_provider",
    "model_optimizer_lr_scheduler_provider",
    "run_forward_step",
    "run_compute_metrics",
)


class Finetuner:
    """Subclass it and fill in four methods; or use it as it is for its data loaders.

    ```python
    class Mine(Finetuner):
        def train_valid_test_datasets_provider(self): return train, valid, test, collate_fn
        def model_optimizer_lr_scheduler_provider(self): return model, None, None
        def run_forward_step(self, batch, model): return model(**batch).loss
        def run_compute_metrics(self, model, eval_dataloader): return {"accuracy": ...}

    Mine(engine=RapidformerEngine()).train()
    ```
    """

    tokenizer: Any = None
    """Set it in a provider to have it exported beside the model."""

    def __init__(self, engine: RapidformerEngine) -> None:
        self.engine = engine

    def train_valid_test_datasets_provider(self) -> tuple[Any, Any, Any, Any]:
        """Return (train, valid, test, collate_fn); all but the first may be None."""
        raise NotImplementedError

    def model_optimizer_lr_scheduler_provider(self) -> tuple[Any, Any, Any]:
        """Return (model, optimizer, lr_scheduler); for None the engine makes its own."""
        raise NotImplementedError

    def run_forward_step(self, batch: Any, model: torch.nn.Module) -> Any:
        """Return the mean loss over the samples of `batch`, or (output, loss_func) for
        `loss_func(output) -> (loss, values)`."""
        raise NotImplementedError

    def run_compute_metrics(self, model: list[torch.nn.Module], eval_dataloader: Any) -> dict:
        """Return the metrics of `model[0]`, which is in eval mode, by name. Runs on every rank."""
        raise NotImplementedError

    def facts(self) -> Mapping[str, Any]:
        """Return what decides the result besides the settings; recorded and compared on resume."""
        return {}

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, each sample once. Collective: call on every rank."""
        return self.engine.gather(tensor)

    def build_data_loader(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
    ) -> DataParallelLoader:
        """Return a loader that shares `dataset` among ranks; batches come on the device."""
        return self.engine.build_data_loader(
            dataset, collate_fn=collate_fn, batch_size=batch_size, shuffle=shuffle
        )

    def train(self) -> dict[str, Any]:
        """Train, evaluate, export; returns the metrics. Collective: call on every rank.

        A run in the same --save that was interrupted goes on where it was; a finished one is told
        and not repeated.

        Raises:
            ProviderError: a method is missing or returns something unusable.
            ConfigError: settings do not fit the data, or the folder holds another run.
        """
        self._check_methods()
        config, folder = self.engine.config, RunFolder(self.engine.config.save_path)
        check_is_available(config)
        train_set, valid_set, _, collate_fn = self._datasets()
        sampler = DistributedSeekableSampler(
            len(train_set), self.engine.batch, rank=self.engine.rank, seed=config.seed
        )
        total_steps = count_steps(config, sampler.steps_per_epoch)
        report = ProgressReport(
            is_shown=self.engine.rank == 0,
            log_interval=config.log_interval,
            total_steps=total_steps,
            log_path=folder.log / "rank0.log",
        )
        if (done := self._claim(folder, config)) is not None:
            report.say(f"{folder.path} holds this run, and it has finished: {done.get('final')}")
            return done
        self._compose(total_steps)
        loop = TrainingLoop(
            self.engine,
            loader=TrainLoader(
                train_set,
                sampler,
                collate_fn=collate_fn,
                num_workers=config.num_workers,
                device=self.engine.device,
            ),
            total_steps=total_steps,
            forward_step=self._forward_step,
            evaluate=None if valid_set is None else partial(self._evaluate, valid_set, collate_fn),
            report=report,
            folder=folder,
        )
        return self._run(loop, folder, report)

    def _run(self, loop: TrainingLoop, folder: RunFolder, report: ProgressReport) -> dict[str, Any]:
        """Train between checkpoints, then export and write the metrics."""
        started = time.time()
        checkpoints = RunCheckpoints(self.engine, folder, say=report.say)
        try:
            loop.run(checkpoints)
        except BaseException:
            checkpoints.abandon()
            raise
        summary = {
            "finished": True,
            "steps": loop.total_steps,
            "world_size": self.engine.world_size,
            "final": loop.history[-1]["metrics"] if loop.history else {},
            "history": loop.history,
            "seconds": time.time() - started,
            "samples_per_second": report.samples_per_second(),
        }
        summary = self._conclude(summary, folder, report)
        checkpoints.close()
        return summary

    def _conclude(
        self, summary: dict[str, Any], folder: RunFolder, report: ProgressReport
    ) -> dict[str, Any]:
        """Export the model and write the metrics, on rank 0; the others wait."""
        if self.engine.rank == 0:
            summary["model_sha256"] = export_model(self.engine.module, self.tokenizer, folder.model)
            write_json(folder.metrics_path, summary)
            report.say(f"model in {folder.model}, metrics in {folder.metrics_path}")
        self.engine.barrier()
        return summary

    def _claim(self, folder: RunFolder, config: RunConfig) -> dict[str, Any] | None:
        """Check the folder on every rank, then record the run in it; returns a finished run."""
        facts = {"processes": self.engine.world_size, **self.facts()}
        folder.check(config, facts)
        done = folder.finished_metrics()
        self.engine.barrier()
        if done is None and self.engine.rank == 0:
            folder.record(config, facts)
        return done

    def _check_methods(self) -> None:
        missing = [
            name for name in _TO_FILL if getattr(type(self), name) is getattr(Finetuner, name)
        ]
        if missing:
            raise ProviderError(
                f"{type(self).__name__} cannot train yet; define {', '.join(missing)} "
                f"({len(_TO_FILL) - len(missing)} of {len(_TO_FILL)} methods are there)"
            )

    def _datasets(self) -> tuple[Any, Any, Any, Any]:
        name = f"{type(self).__name__}.train_valid_test_datasets_provider()"
        found = _tuple_of(
            self.train_valid_test_datasets_provider(), 4, name, "(train, valid, test, collate_fn)"
        )
        for label, dataset in zip(("train", "valid", "test"), found, strict=False):
            if dataset is None and label != "train":
                continue
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                raise ProviderError(
                    f"{name} returned {type(dataset).__name__} as {label} data set; "
                    "allowed are data sets with a length and an index"
                )
            if label == "train" and len(dataset) == 0:
                raise DataError(f"{name} returned an empty training set")
        valid = found[1] if found[1] is not None and len(found[1]) > 0 else None
        return found[0], valid, found[2], found[3]

    def _compose(self, total_steps: int) -> None:
        name = f"{type(self).__name__}.model_optimizer_lr_scheduler_provider()"
        model, optimizer, lr_scheduler = _tuple_of(
            self.model_optimizer_lr_scheduler_provider(),
            3,
            name,
            "(model, optimizer, lr_scheduler)",
        )
        if not isinstance(model, torch.nn.Module):
            raise ProviderError(f"{name} returned {type(model).__name__} as model; give a Module")
        if lr_scheduler is not None and optimizer is None:
            raise ProviderError(
                f"{name} returned an lr_scheduler without its optimizer; return both, or neither"
            )
        self.engine.compose(
            model, optimizer=optimizer, lr_scheduler=lr_scheduler, total_steps=total_steps
        )

    def _forward_step(self, batch: Any) -> torch.Tensor:
        model = self.engine.model
        assert model is not None
        loss = self.run_forward_step(batch, model)
        if isinstance(loss, tuple) and len(loss) == 2 and callable(loss[1]):
            loss = loss[1](loss[0])[0]
        name = f"{type(self).__name__}.run_forward_step()"
        if not isinstance(loss, torch.Tensor):
            raise ProviderError(f"{name} returned {type(loss).__name__}; return the loss, a tensor")
        if loss.numel() != 1:
            raise ProviderError(
                f"{name} returned a loss of shape {tuple(loss.shape)}; return its mean, one number"
            )
        if not loss.requires_grad:
            raise ProviderError(
                f"{name} returned a loss without a gradient; compute it from the model's output, "
                "outside of torch.no_grad() and without .detach() or .item()"
            )
        return loss.reshape(())

    def _evaluate(self, dataset: Any, collate_fn: Any) -> dict[str, Any]:
        loader = self.build_data_loader(dataset, collate_fn=collate_fn)
        metrics = self.run_compute_metrics([self.engine.module], loader)
        if not isinstance(metrics, Mapping):
            raise ProviderError(
                f"{type(self).__name__}.run_compute_metrics() returned {type(metrics).__name__}; "
                "return a dict of names and values"
            )
        return {name: _plain(value) for name, value in metrics.items()}


def count_steps(config: RunConfig, steps_per_epoch: int) -> int:
    """Return the number of steps of a run.

    Raises:
        ConfigError: neither --epochs nor --train-iters says when to stop.
    """
    if config.epochs is None and config.train_iters is None:
        raise ConfigError(
            "nothing says when to stop; give --epochs, such as --epochs 3, or --train-iters"
        )
    by_epochs = math.inf if config.epochs is None else config.epochs * steps_per_epoch
    by_steps = math.inf if config.train_iters is None else config.train_iters
    return int(min(by_epochs, by_steps))


def _tuple_of(value: Any, length: int, name: str, wanted: str) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list) or len(value) != length:
        count = f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__
        raise ProviderError(f"{name} returned {count}; return {length}: {wanted}")
    return tuple(value)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
