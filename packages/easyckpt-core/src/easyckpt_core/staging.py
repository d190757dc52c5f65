"""Copies of tensors from where training has them to their final place in host memory.

On the CPU the copy happens at the call. From an accelerator it runs on a side stream beside the
next forward and backward pass, in chunks: the copy engine's queue runs dry between two chunks, so
that the training loop's own small reads (`.item()`, a loss for the log) never wait behind the whole
snapshot. Before the optimizer changes a weight, `fence()` submits what is left at once and lets the
compute stream wait for it; the exposed stall is max(0, copy time - forward and backward).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_BYTES = 64 << 20
"""Measured on an H200: 32 to 64 MB add nothing measurable to a step and copy at 47-49 GB/s."""

_COMPARE_BYTES = 64 << 20
_SWITCH_SECONDS = 0.0002
_HEAD_START = 0.1
"""Share of the time until the fence that is left to the training thread before files are laid out.

Laying out is Python work: at the start of a step it would compete for the interpreter with the
launching of kernels, while the device has nothing queued. Measured on an H200.
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor on its way."""

    name: str
    """For messages: file and position."""
    source: torch.Tensor
    target: torch.Tensor
    """CPU tensor of the same shape and dtype, over the mapped memory of a slot."""


def target_for(source: torch.Tensor, view: memoryview, offset_bytes: int) -> torch.Tensor:
    """Return a tensor shaped like `source` over `view` from `offset_bytes` on."""
    num_bytes = source.numel() * source.element_size()
    flat = torch.frombuffer(view, dtype=torch.uint8, count=num_bytes, offset=offset_bytes)
    if flat.data_ptr() % source.element_size():
        raise AssertionError(f"offset {offset_bytes} is not aligned for {source.dtype}")
    return flat.view(source.dtype).view(source.shape)


def copy_now(copies: list[Copy]) -> None:
    """Copy on the calling thread; the bytes are there on return."""
    for copy in copies:
        copy.target.copy_(copy.source)


class HostRegistry:
    """Registers mapped memory with CUDA once, so that copies into it are real DMA."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def register(self, view: memoryview) -> Callable[[], None]:
        """Pin `view` unless it is pinned; return what unpins it, to be called before unmapping.

        Memory that went away pinned would take copies in pages that nobody sees, as soon as another
        mapping gets its address.

        Raises:
            RuntimeError: CUDA refuses (for example the locked-memory limit).
        """
        pointer = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        if self._sizes.get(pointer) == len(view):
            return functools.partial(self._unregister, pointer)
        self._unregister(pointer)
        status = torch.cuda.cudart().cudaHostRegister(pointer, len(view), 0)
        if int(status) != 0:
            raise RuntimeError(f"cudaHostRegister of {len(view):,} bytes failed with {status}")
        self._sizes[pointer] = len(view)
        return functools.partial(self._unregister, pointer)

    def close(self) -> None:
        """Unpin everything. Idempotent."""
        for pointer in list(self._sizes):
            self._unregister(pointer)

    def _unregister(self, pointer: int) -> None:
        if self._sizes.pop(pointer, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(pointer)


@dataclass(slots=True)
class _Job:
    prepare: Callable[[], list[Copy] | None]
    finish: Callable[[bool], None]
    call_event: Any
    is_new_shape: bool
    started: float = field(default_factory=time.perf_counter)
    rush: threading.Event = field(default_factory=threading.Event)
    submitted: threading.Event = field(default_factory=threading.Event)
    compared: threading.Event = field(default_factory=threading.Event)
    fenced: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    fence_event: Any = None
    last_event: Any = None
    error: BaseException | None = None


class DeviceStager:
    """Runs one snapshot at a time on a thread and a side stream of its own.

    `start`, `fence` and `join` are called on the training thread.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.restless: set[str] = set()
        """Names of tensors that change before the fence: copied at the call."""
        self._stream = torch.cuda.Stream(device)
        self._window_seconds = 0.0
        self._job: _Job | None = None

    def start(
        self,
        prepare: Callable[[], list[Copy] | None],
        finish: Callable[[bool], None],
        *,
        is_new_shape: bool,
    ) -> None:
        """Begin a snapshot; returns at once, except for the first one of a shape.

        `prepare` lays out files and returns the copies, or None to drop the snapshot; `finish(ok)`
        seals it. Both run on the staging thread; `prepare` runs here where the call must copy.
        Restless tensors are copied in the compute stream, before anything can change them. Of a new
        shape nothing is known yet: all its copies come before later work of the compute stream, and
        the fence compares them with their sources. What differs there is restless from then on.
        """
        self.join()
        if self.restless and not is_new_shape:
            prepare = self._copy_restless(prepare)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        job = self._job = _Job(prepare, finish, event, is_new_shape)
        threading.Thread(
            target=self._run, args=(job,), name="easyckpt-staging", daemon=True
        ).start()
        if is_new_shape:
            self._submit_all(job)

    def fence(self) -> None:
        """Return when every copy is submitted and the compute stream will wait for the last one."""
        job = self._job
        if job is None or job.done.is_set():
            return
        if not job.rush.is_set():
            self._window_seconds = time.perf_counter() - job.started
        self._submit_all(job)
        self._let_compare(job)
        job.compared.wait()

    def join(self) -> None:
        """Wait for the snapshot under way, and raise what went wrong in it."""
        job = self._job
        if job is None:
            return
        job.rush.set()
        self._let_compare(job)
        job.done.wait()
        self._job = None
        if job.error is not None:
            raise job.error

    def _submit_all(self, job: _Job) -> None:
        job.rush.set()
        job.submitted.wait()
        if job.last_event is not None:
            torch.cuda.current_stream(self.device).wait_event(job.last_event)

    def _let_compare(self, job: _Job) -> None:
        if job.is_new_shape and job.fence_event is None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            job.fence_event = event
            job.fenced.set()

    def _copy_restless(
        self, prepare: Callable[[], list[Copy] | None]
    ) -> Callable[[], list[Copy] | None]:
        copies = prepare()
        if copies is None:
            return lambda: None
        for copy in copies:
            if copy.name in self.restless:
                copy.target.copy_(copy.source, non_blocking=True)
        rest = [copy for copy in copies if copy.name not in self.restless]
        return lambda: rest

    def _run(self, job: _Job) -> None:
        is_good = False
        try:
            torch.cuda.set_device(self.device)
            job.rush.wait(_HEAD_START * self._window_seconds)
            copies = job.prepare()
            if copies is not None:
                with _quick_handover():
                    self._copy(job, copies)
                if not job.is_new_shape:
                    job.compared.set()
                job.submitted.set()
                job.last_event.synchronize()
                is_good = True
                if job.is_new_shape:
                    job.fenced.wait()
                    self._compare(job, copies)
            job.finish(is_good)
        except BaseException as err:
            job.error = err
        finally:
            job.submitted.set()
            job.compared.set()
            job.done.set()

    def _copy(self, job: _Job, copies: list[Copy]) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.call_event)
            for chunk in _chunks(copies, self.chunk_bytes):
                for source, target in chunk:
                    target.copy_(source, non_blocking=True)
                if not job.rush.is_set():
                    # blocking=True: the thread sleeps instead of spinning with the GIL in reach.
                    event = torch.cuda.Event(blocking=True)
                    event.record(self._stream)
                    event.synchronize()
            job.last_event = torch.cuda.Event(blocking=True)
            job.last_event.record(self._stream)

    def _compare(self, job: _Job, copies: list[Copy]) -> None:
        """Find sources that changed between the call and the fence: no optimizer announced that."""
        changed = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.fence_event)
            for copy in copies:
                for source, target in _pieces(copy, _COMPARE_BYTES):
                    there = target.to(source.device, non_blocking=True)
                    if not torch.equal(_bits(there), _bits(source)):
                        changed.append(copy.name)
                        break
        self.restless = set(changed)
        job.compared.set()
        if changed:
            logger.info(
                "%d tensors change outside the optimizer; from now on copied at the call: %s",
                len(changed),
                ", ".join(changed[:8]),
            )


@contextlib.contextmanager
def _quick_handover() -> Iterator[None]:
    """Let threads change places more often while chunks are submitted.

    After each chunk this thread needs the interpreter for microseconds; by default a thread that
    launches kernels keeps it for 5 ms, and 236 chunks of 64 MB then take longer than a step.
    """
    usual_seconds = sys.getswitchinterval()
    sys.setswitchinterval(min(usual_seconds, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(usual_seconds)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View as bytes, so that NaN equals NaN."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _chunks(copies: list[Copy], chunk_bytes: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Group small copies and split large ones, so that every chunk has about `chunk_bytes`."""
    chunks: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
    filled_bytes = 0
    for copy in copies:
        for source, target in _pieces(copy, chunk_bytes):
            size_bytes = source.numel() * source.element_size()
            if filled_bytes and filled_bytes + size_bytes > chunk_bytes:
                chunks.append([])
                filled_bytes = 0
            chunks[-1].append((source, target))
            filled_bytes += size_bytes
    return chunks


def _pieces(copy: Copy, piece_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size_bytes = copy.source.numel() * copy.source.element_size()
    if size_bytes <= piece_bytes or not copy.source.is_contiguous():
        return [(copy.source, copy.target)]
    count = max(1, piece_bytes // copy.source.element_size())
    source, target = copy.source.reshape(-1), copy.target.reshape(-1)
    return list(zip(source.split(count), target.split(count), strict=True))
