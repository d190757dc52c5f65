"""The engine: a facade that spreads a model over devices and leaves the loop to its user."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from rapidformer import session
from rapidformer.arguments import ExtraArgsProvider, read_arguments
from rapidformer.batch import BatchPlan, resolve_batch
from rapidformer.config import RunConfig
from rapidformer.data import BatchShare, DataParallelLoader, gather_real
from rapidformer.errors import EngineError
from rapidformer.optim import build_optimizer
from rapidformer.schedule import build_lr_scheduler, resolve_learning_rate
from rapidformer.strategies import DdpStrategy, SingleStrategy, Strategy

_LEAVE_SECONDS = 60
"""Longest wait for slower ranks at the end, such as one that is still writing."""


class RapidformerEngine:
    """Distributed training around a loop of yours.

    ```python
    engine = RapidformerEngine()
    model, optimizer, lr_scheduler = engine.compose(model_obj=model)
    for batch in Finetuner(engine=engine).build_data_loader(dataset, shuffle=True):
        engine.backward(model(**batch).loss)
        engine.step()
    ```

    Settings come from `config`, or those already made current by the command line, or the
    arguments of the process. Collective when started by torchrun: make it on every rank. Seeds all
    random generators alike; compose() then gives every rank a stream of its own.

    Raises:
        ConfigError: the arguments cannot be read or cannot work.
    """

    def __init__(
        self,
        extra_args_provider: ExtraArgsProvider | None = None,
        *,
        config: RunConfig | None = None,
    ) -> None:
        if config is not None:
            session.set_current(config)
        elif session.current_config() is None:
            parsed = read_arguments(extra_args_provider=extra_args_provider)
            session.set_current(parsed.config, parsed.extra)
        current = session.current_config()
        assert current is not None
        self.config: RunConfig = current
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = _pick_device(self.local_rank)
        self.batch: BatchPlan = resolve_batch(self.config, self.world_size)
        self._owns_group = self.world_size > 1 and not dist.is_initialized()
        if self._owns_group:
            _join_group("nccl" if self.device.type == "cuda" else "gloo")
            atexit.register(self._close_at_exit)
        self.strategy: Strategy = (
            DdpStrategy(self.device) if self.world_size > 1 else SingleStrategy()
        )
        seed_everything(self.config.seed)
        self.model: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.lr_scheduler: Any = None
        self._share: BatchShare | None = None
        self._num_backward = 0
        self._is_stepping = False

    def compose(
        self,
        model_obj: nn.Module | None = None,
        *,
        model: nn.Module | None = None,
        train_dataloader: DataLoader[Any] | None = None,
        eval_dataloader: DataLoader[Any] | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        lr_scheduler_fn: Callable[[Optimizer], Any] | None = None,
        total_steps: int | None = None,
    ) -> tuple[Any, ...]:
        """Put the model on its device, spread it, and give it optimizer and schedule.

        Returns (model, optimizer, lr_scheduler); with `model=` or a data loader given,
        (model, optimizer, lr_scheduler, train_dataloader, eval_dataloader), whose loaders are
        shared among the ranks. An optimizer that is not given is AdamW; a schedule that is neither
        given nor made by `lr_scheduler_fn(optimizer)` follows the settings. Collective: call on
        every rank.
        """
        module = model_obj if model_obj is not None else model
        if module is None or (model_obj is not None and model is not None):
            raise EngineError("compose() takes one model: give either model_obj= or model=")
        if lr_scheduler is not None and lr_scheduler_fn is not None:
            raise EngineError("compose() got lr_scheduler and lr_scheduler_fn; give one of them")
        is_long_form = (
            model is not None or train_dataloader is not None or eval_dataloader is not None
        )
        self.model = self.strategy.wrap(module.to(self.device))
        self.optimizer = optimizer or build_optimizer(self.strategy.unwrap(self.model), self.config)
        if lr_scheduler is None:
            lr_scheduler = (
                lr_scheduler_fn(self.optimizer)
                if lr_scheduler_fn is not None
                else build_lr_scheduler(
                    self.optimizer, resolve_learning_rate(self.config, total_steps)
                )
            )
        self.lr_scheduler = lr_scheduler
        self.optimizer.register_step_pre_hook(self._refuse_foreign_step)
        seed_everything(self.config.seed, rank=self.rank)
        short = (self.model, self.optimizer, self.lr_scheduler)
        if not is_long_form:
            return short
        return (*short, self._share_loader(train_dataloader), self._share_loader(eval_dataloader))

    def backward(self, loss: torch.Tensor, *, weight: float | None = None) -> None:
        """Compute gradients of `loss`, a mean over the samples of this rank's micro batch.

        The loss is weighed so that a step has the gradient of the mean over the global batch:
        by `weight` if given, else evenly over accumulation and by the rank's share of the batch
        that the current loader of this engine has handed out.
        """
        self._composed()
        if weight is None:
            weight = 1.0 if self._share is None else self._share.loss_weight
            weight /= self.batch.accumulation
        self._num_backward += 1
        (loss if weight == 1.0 else loss * weight).backward()

    def step(self) -> bool:
        """Clip, update the weights, move the learning rate on, and clear the gradients.

        While a global batch is still being accumulated it does nothing and returns False.
        """
        self._composed()
        if 0 < self._num_backward < self.batch.accumulation:
            return False
        self.update()
        return True

    def update(self) -> float:
        """Do what step() does, whatever was accumulated. Returns the gradient's norm, or 0.0."""
        model, norm = self._composed(), 0.0
        if self.config.clip_grad > 0:
            norm = float(self.strategy.clip_gradients(model, self.config.clip_grad))
        assert self.optimizer is not None
        self._is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False
        self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._num_backward = 0
        return norm

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Say before a forward pass whether its backward pass ends the step and averages gradients.

        A loop of your own need not call it: gradients are then averaged in every backward pass,
        which gives the same result.
        """
        self.strategy.set_gradient_sync(self._composed(), is_last)

    @property
    def module(self) -> nn.Module:
        """The model as it was before compose() spread it."""
        return self.strategy.unwrap(self._composed())

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of `tensor` from all ranks, each sample of the current batch once.

        Collective: call on every rank. `tensor` has one row a sample of the batch that a loader of
        this engine has just handed out; outside of such a loop all rows are returned.
        """
        counts = None if self._share is None else self._share.real_counts
        return gather_real(tensor, counts, world_size=self.world_size)

    def build_data_loader(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
    ) -> DataParallelLoader:
        """Return a loader that shares `dataset` among the ranks and puts batches on the device."""
        return DataParallelLoader(
            dataset,
            batch_size=batch_size or self.batch.micro,
            collate_fn=collate_fn,
            shuffle=shuffle,
            num_workers=self.config.num_workers,
            seed=self.config.seed,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            on_batch=self._set_share,
        )

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of `value` over ranks. Collective: call on every rank."""
        if self.world_size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def barrier(self) -> None:
        """Wait for every rank. Collective: call on every rank."""
        if self.world_size > 1:
            dist.barrier()

    def close(self, *, waits: bool = True) -> None:
        """Leave the process group, if this engine joined it. Idempotent; called at exit too.

        Collective with `waits`: a rank that leaves while another still talks to it can end that one
        (gloo: "terminate called without an active exception"). Without, for a rank that failed.
        """
        if self._owns_group and dist.is_initialized():
            if waits:
                with contextlib.suppress(RuntimeError):
                    self._meet()
            dist.destroy_process_group()
        self._owns_group = False

    def _meet(self) -> None:
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=timedelta(seconds=_LEAVE_SECONDS))
        else:
            dist.barrier()

    def _close_at_exit(self) -> None:
        # After an exception that nobody caught the others may be stuck: do not wait for them.
        self.close(waits=not hasattr(sys, "last_type"))

    def _composed(self) -> nn.Module:
        if self.model is None:
            raise EngineError("call engine.compose(model_obj=...) before this")
        return self.model

    def _set_share(self, share: BatchShare | None) -> None:
        self._share = share

    def _refuse_foreign_step(self, *_: Any) -> None:
        if self._is_stepping or self.batch.accumulation == 1 or self._num_backward == 0:
            return
        raise EngineError(
            f"optimizer.step() was called while a global batch of {self.batch.global_size} is "
            f"accumulated over {self.batch.accumulation} micro batches; call engine.step() "
            f"instead, or give --global-batch-size {self.batch.micro * self.world_size}"
        )

    def _share_loader(self, loader: DataLoader[Any] | None) -> DataParallelLoader | None:
        if loader is None:
            return None
        is_shuffled = isinstance(loader.sampler, torch.utils.data.RandomSampler)
        return self.build_data_loader(
            loader.dataset,
            collate_fn=loader.collate_fn,
            batch_size=loader.batch_size,
            shuffle=is_shuffled,
        )


def seed_everything(seed: int, *, rank: int | None = None) -> None:
    """Seed Python, NumPy and torch; with `rank`, with a stream of its own for each rank."""
    if rank is not None:
        seed = (seed * 1_000_003 + 7919 * (rank + 1)) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random generators of this process as they were, whatever the body draws."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def _join_group(backend: str) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        dist.init_process_group(backend)
        return
    # torchrun keeps one store for all attempts (torch 2.13), and keys without a prefix: a restarted
    # rank could read the address of a process that is gone, and wait for it.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Any = dist.TCPStore(*address)  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def _pick_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise EngineError(
            f"rank with LOCAL_RANK={local_rank} has no device of its own: "
            f"{torch.cuda.device_count()} CUDA devices are visible. Start fewer processes "
            "(--nproc-per-node) or show more devices"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
