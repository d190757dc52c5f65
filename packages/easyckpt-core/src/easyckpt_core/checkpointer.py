"""The front door: one object per rank that saves steps on both tiers and finds them again."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from easyckpt_core.config import CheckpointConfig
from easyckpt_core.errors import PersistError, UnsupportedError
from easyckpt_core.files import FileContent, FilePlan, tensors_in
from easyckpt_core.keeper_link import KeeperLink, Place
from easyckpt_core.layout import Layout, LoadingLayout, StepLayout
from easyckpt_core.memory import MemoryFile, MemorySlots
from easyckpt_core.policy import decide
from easyckpt_core.report import SaveReport
from easyckpt_core.slots import SealedPart
from easyckpt_core.snapshot import Snapshot
from easyckpt_core.staging import Copy, DeviceStager, HostRegistry, copy_now, target_for

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves the state of a training loop without stopping it.

    Every rank makes one and calls the same methods at the same steps; there is no collective among
    them. Not thread-safe: call it from the training thread.

        config = CheckpointConfig(directory="run", save_storage_interval=100)
        with Checkpointer(config) as checkpointer:
            sources = {"model": model, "optimizer": optimizer}
            start = checkpointer.resume(sources)
            checkpointer.watch(optimizer)
            for step in range(start + 1, num_steps + 1):
                ...
                checkpointer.maybe_save(step, sources)
    """

    def __init__(
        self,
        config: CheckpointConfig,
        layout: Layout | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        local_world_size: int | None = None,
    ) -> None:
        found = Place.from_environment()
        self.config = config
        self.layout: Layout = layout or StepLayout()
        self.place = Place(
            rank=found.rank if rank is None else rank,
            world_size=found.world_size if world_size is None else world_size,
            local_rank=found.local_rank if local_rank is None else local_rank,
            local_world_size=(
                found.local_world_size if local_world_size is None else local_world_size
            ),
        )
        self._link = KeeperLink(config, self.place)
        self._memory = MemorySlots()
        self._registry = HostRegistry()
        self._plans: dict[str, FilePlan] = {}
        self._takes = 0
        self._patience_seconds = 0.0
        self._parts: dict[int, SealedPart] = {}
        self._stager: DeviceStager | None = None
        self._shape: tuple[Any, ...] | None = None
        self._report: SaveReport | None = None
        self._hooks: list[Any] = []
        self._is_started = False

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Attach to this run's keeper, starting it on first use. Call on every rank.

        Raises:
            UnsupportedError: several nodes, or a system without memory files (not Linux).
            RunInUseError: another job is alive on the directory; the message names its processes.
            KeeperError: the keeper cannot be started.
            ConfigurationError: the directory cannot be written.
        """
        if self._is_started:
            return
        if self.place.world_size != self.place.local_world_size:
            raise UnsupportedError(
                f"world_size={self.place.world_size} over several nodes (local_world_size="
                f"{self.place.local_world_size}): this version checkpoints on one node only"
            )
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            raise UnsupportedError("this version needs Linux 5.3 or later (memfd and pidfd)")
        self._link.on_rejoin = self._rejoin_messages
        self._link.start()
        self._is_started = True

    def close(self, *, wait_seconds: float = 3600.0) -> None:
        """Wait until due storage saves are committed, then free the memory. Idempotent.

        Call it at a normal end only: the last rank's goodbye ends the run and its memory tier.
        After an exception call `abandon`, or leave the `with` block through it.

        Raises:
            PersistError: the last storage save failed, or takes longer than `wait_seconds`.
        """
        if not self._is_started:
            return
        self.before_update()
        self._join()
        answer = self._link.request(
            "drain", wait_seconds=wait_seconds + 30.0, patience_seconds=wait_seconds
        )
        self._log_errors()
        self._release(is_normal=True)
        if not answer["is_done"]:
            raise PersistError(f"what is due is not on storage after {wait_seconds:.0f} s")
        if answer["last_failure"] is not None:
            raise PersistError(answer["last_failure"])

    def abandon(self) -> None:
        """Part from the keeper as a crash would: it flushes the newest snapshot and waits."""
        if self._is_started:
            self._release(is_normal=False)

    def __enter__(self) -> Checkpointer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    # -- finding and loading -----------------------------------------------------------------------

    def latest(self) -> Snapshot | None:
        """Return the newest complete step over memory and storage, the same on every rank.

        A step on storage counts when it is marked and all its bytes match their checksums. The
        n-th call of each rank gets the same answer: call it equally often everywhere.
        """
        answer = self._link.request("latest", wait_seconds=3600.0)
        if self.place.rank == 0:
            for fault in answer["faults"]:
                logger.warning("%s", fault)
        if answer["tier"] is None:
            return None
        assert self._link.identity is not None
        return Snapshot(
            step=answer["step"],
            tier=answer["tier"],
            world_size=answer["world_size"],
            directory=Path(self._link.identity.directory) / answer["directory"],
            link=self._link,
        )

    def restore(self, snapshot: Snapshot, sources: Any) -> None:
        """Load `snapshot` into `sources` in place.

        Raises:
            RestoreError: the checkpoint does not hold what a source needs.
            UnsupportedError: the layout leaves loading to its framework.
        """
        if not isinstance(self.layout, LoadingLayout):
            raise UnsupportedError(
                f"{type(self.layout).__name__} leaves loading to its framework: give the directory "
                "of `snapshot.open()` to the framework's own loader"
            )
        with snapshot.open() as directory:
            self.layout.load(directory, sources, rank=self.place.rank)

    def resume(self, sources: Any) -> int:
        """Load the newest complete step into `sources`; return it, or 0 when there is none."""
        snapshot = self.latest()
        if snapshot is None:
            return 0
        self.restore(snapshot, sources)
        if self.place.rank == 0:
            logger.info("resumed from %s at step %d", snapshot.tier, snapshot.step)
        return snapshot.step

    def start_fresh(self) -> None:
        """Decline to resume: forget what is in memory and begin a new history.

        Steps on storage stay, are no longer preferred by `latest`, and are not pruned. Call on
        every rank, before the first save.
        """
        self._link.request("fresh")

    # -- saving ------------------------------------------------------------------------------------

    def check(self, sources: Any) -> int:
        """Lay out `sources` without saving; return this rank's bytes. Finds what cannot be saved.

        Raises:
            LayoutError: a tensor or object that the formats cannot hold.
        """
        contents = self.layout.files(sources, step=0, rank=self.place.rank)
        return sum(plan.size_bytes for plan in self._plan(contents).values())

    def maybe_save(self, step: int, sources: Any) -> SaveReport | None:
        """Save when the intervals say so. Call on every rank after every completed step.

        Returns at once where copies run beside training. None when nothing was due.
        """
        due = decide(step, self.config)
        return self.save(step, sources, storage=due.storage) if due.memory else None

    def save(
        self, step: int, sources: Any, *, storage: bool = False, wait: bool | None = None
    ) -> SaveReport:
        """Take a snapshot of `sources` as the state after `step`; commit it too if `storage`.

        `wait` says whether a storage save waits while an earlier one is still being written, or is
        taken in memory only; None: as `when_storage_busy` has it. Call alike on every rank.

        Raises:
            LayoutError: the state cannot be laid out.
            MemoryBudgetError: two snapshots do not fit in host memory.
            KeeperError: the keeper cannot be reached or restarted.
        """
        begun = time.perf_counter()
        self.before_update()
        self._join()
        if wait is None:
            wait = self.config.when_storage_busy == "wait"
        self._patience_seconds = self.config.busy_wait_seconds if wait and storage else 0.0
        report = SaveReport(step=step, is_storage_due=storage)
        self._takes += 1
        contents = self.layout.files(sources, step=step, rank=self.place.rank)
        device = _accelerator_of(contents)
        if device is None:
            copies = self._lay_out(report, contents)
            if copies is not None:
                copy_now(copies)
                report.copy_seconds = time.perf_counter() - begun
                report.added_seconds = report.copy_seconds
                self._seal(report)
        else:
            self._start_staging(report, contents, device, begun)
        self._log_errors()
        report.added_seconds = time.perf_counter() - begun
        self._report = report
        return report

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Fence `optimizer`: copies under way are submitted before it changes a weight.

        Give the innermost torch optimizer. Without it every save waits for its own copies.
        """
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.before_update()))

    def before_update(self) -> None:
        """Call before anything changes saved tensors that no watched optimizer would announce."""
        if self._stager is None:
            return
        begun = time.perf_counter()
        self._stager.fence()
        if self._report is not None and not self._report.is_complete:
            self._report.added_seconds += time.perf_counter() - begun

    # -- private -----------------------------------------------------------------------------------

    def _start_staging(
        self,
        report: SaveReport,
        contents: dict[str, FileContent],
        device: torch.device,
        begun: float,
    ) -> None:
        if self._stager is None:
            self._stager = DeviceStager(device)
            # Laying out makes many small objects, and every dozen saves they set off a full
            # collection: 0.2 s over all objects of a Transformers process, in the middle of a step
            # (measured on an H200). What exists now is long-lived: leave it out from here on.
            gc.collect()
            gc.freeze()
        stager = self._stager

        def prepare() -> list[Copy] | None:
            copies = self._lay_out(report, contents)
            if copies is None:
                return None
            copy_now([copy for copy in copies if copy.source.device.type == "cpu"])
            return [copy for copy in copies if copy.source.device.type != "cpu"]

        def finish(is_good: bool) -> None:
            report.copy_seconds = time.perf_counter() - begun
            if is_good:
                self._seal(report)
            else:
                report.is_skipped = True

        shape = _shape_of(contents)
        is_new_shape, self._shape = shape != self._shape, shape
        stager.start(prepare, finish, is_new_shape=is_new_shape)
        if not self._hooks:
            stager.fence()

    def _plan(self, contents: dict[str, FileContent]) -> dict[str, FilePlan]:
        return {
            name: content.format.plan(content.tree, self._plans.get(name))
            for name, content in contents.items()
        }

    def _lay_out(self, report: SaveReport, contents: dict[str, FileContent]) -> list[Copy] | None:
        """Get a slot and write everything but the tensors into it; None when it is skipped."""
        plans = self._plan(contents)
        self._plans = plans
        sizes = {name: plan.size_bytes for name, plan in plans.items()}
        report.size_bytes = sum(sizes.values())
        answer = self._link.request(
            "begin",
            wait_seconds=self._patience_seconds + 60.0,
            take=self._takes,
            step=report.step,
            directory=self.layout.directory_name(report.step),
            storage=report.is_storage_due,
            bytes=report.size_bytes,
            patience_seconds=self._patience_seconds,
        )
        report.is_storage_due = answer["storage"]
        slot = answer["slot"]
        if slot is None:
            report.is_skipped = True
            return None
        self._parts.pop(slot, None)
        files, fresh = self._memory.prepare(slot, sizes)
        for name in fresh:
            self._link.attach(slot, name, files[name].fd, sizes[name])
        report.slot = slot
        return list(self._fill(plans, files))

    def _fill(self, plans: dict[str, FilePlan], files: dict[str, MemoryFile]) -> Iterator[Copy]:
        for name, plan in plans.items():
            if plan.size_bytes == 0:
                continue
            view = files[name].view()
            for offset, data in plan.segments:
                view[offset : offset + len(data)] = data
            if self._stager is not None and plan.holes:
                files[name].before_unmap = self._registry.register(view)
            for hole in plan.holes:
                target = target_for(hole.source, view, hole.offset_bytes)
                yield Copy(f"{name}+{hole.offset_bytes}", hole.source, target)

    def _seal(self, report: SaveReport) -> None:
        assert report.slot is not None
        part = SealedPart(
            take=self._takes,
            step=report.step,
            directory_name=self.layout.directory_name(report.step),
            sizes={name: plan.size_bytes for name, plan in self._plans.items()},
        )
        self._link.request(
            "seal",
            slot=report.slot,
            take=part.take,
            step=part.step,
            sizes=part.sizes,
            added_seconds=report.added_seconds,
            copy_seconds=report.copy_seconds,
        )
        self._parts[report.slot] = part
        report.is_complete = True

    def _rejoin_messages(self) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        """Hand all memory files and sealed parts to a keeper that replaced a dead one."""
        for slot, files in self._memory.slots.items():
            for name, file in files.items():
                message = {"op": "file", "slot": slot, "name": name, "bytes": file.size_bytes}
                yield message, (file.fd,)
            part = self._parts.get(slot)
            if part is not None:
                yield (
                    {
                        "op": "adopt",
                        "slot": slot,
                        "take": part.take,
                        "step": part.step,
                        "directory": part.directory_name,
                        "sizes": part.sizes,
                    },
                    (),
                )

    def _join(self) -> None:
        if self._stager is not None:
            self._stager.join()

    def _log_errors(self) -> None:
        for error in self._link.take_errors():
            logger.error("rank %d: %s", self.place.rank, error)

    def _release(self, *, is_normal: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._link.close(is_normal=is_normal)
        self._registry.close()
        self._memory.close()
        self._is_started = False


def _accelerator_of(contents: dict[str, FileContent]) -> torch.device | None:
    """Return the device of the first tensor that is not on the CPU, or None."""
    for content in contents.values():
        for tensor in tensors_in(content.tree):
            if tensor.device.type == "cuda":
                return tensor.device
    return None


def _shape_of(contents: dict[str, FileContent]) -> tuple[Any, ...]:
    return tuple(
        (name, *(tensor.numel() for tensor in tensors_in(content.tree)))
        for name, content in contents.items()
    )
