"""torch.save's own files, laid out without their data.

`torch.save` under `torch.serialization.skip_data()` (torch 2.5 and later) writes everything but the
tensors and seeks over their places; a recording file object keeps what it writes and where it
seeks. So the format is torch's by construction, whatever the version.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from easyckpt_core.errors import LayoutError
from easyckpt_core.files.plan import FilePlan, Hole, require_plain, tensors_in

_PICKLE_STEP_BYTES = 1024
_PICKLE_SLACK_BYTES = 128


class TorchZip:
    """The tree is anything that `torch.save` takes."""

    def plan(self, tree: Any, previous: FilePlan | None) -> FilePlan:
        recorder = _Recorder()
        pickler = _padding_pickler(0 if previous is None else previous.reserved_bytes)
        for tensor in tensors_in(tree):
            require_plain("a tensor of the state", tensor)
        try:
            with torch.serialization.skip_data():
                torch.save(tree, recorder, pickle_module=pickler)  # type: ignore[arg-type]
        except (pickle.PicklingError, TypeError, AttributeError) as err:
            raise LayoutError(f"the state holds something that cannot be pickled: {err}") from err
        sizes = [size_bytes for _, size_bytes in recorder.holes]
        # The walk sees tensors in dicts, lists and tuples, the order in which pickle does. Where
        # one hides in another object it finds too few, and the slower way is taken.
        filled = _filled(_storages_of_walk(tree))
        if [storage.nbytes() for storage in filled] != sizes:
            filled = _filled(_storages_of_pickle(tree))
        if [storage.nbytes() for storage in filled] != sizes:
            raise LayoutError(
                "torch.save laid out other tensors than were found in the state; "
                f"torch {torch.__version__} is not supported by this version of easyckpt-core"
            )
        holes = tuple(
            Hole(offset, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            for (offset, _), storage in zip(recorder.holes, filled, strict=True)
        )
        return FilePlan(recorder.size_bytes, recorder.segments(), holes, pickler.reserved_bytes)


class _Recorder:
    """A file object that keeps what is written and notes what is skipped by seeking."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.holes: list[tuple[int, int]] = []
        self._segments: list[tuple[int, bytearray]] = []

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._segments and self._end_of_last() == self.size_bytes:
            self._segments[-1][1].extend(view)
        else:
            self._segments.append((self.size_bytes, bytearray(view)))
        self.size_bytes += view.nbytes
        return view.nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or offset < 0:
            raise LayoutError(
                f"torch.save moved in the file in an unknown way ({offset}, {whence})"
            )
        if offset:
            self.holes.append((self.size_bytes, offset))
        self.size_bytes += offset
        return self.size_bytes

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        pass

    def segments(self) -> tuple[tuple[int, bytes], ...]:
        return tuple((offset, bytes(data)) for offset, data in self._segments)

    def _end_of_last(self) -> int:
        offset, data = self._segments[-1]
        return offset + len(data)


class _StorageFinder(pickle.Pickler):
    """Walks a tree as torch.save does and collects its distinct storages in that order."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        self.storages: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            storage: torch.UntypedStorage = obj._untyped_storage
        elif isinstance(obj, torch.UntypedStorage):
            storage = obj
        else:
            return None
        self.storages.setdefault(storage._cdata, storage)
        return storage._cdata

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            require_plain("a tensor of the state", obj)
        return NotImplemented


def _filled(storages: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    distinct = {storage._cdata: storage for storage in storages}
    return [storage for storage in distinct.values() if storage.nbytes()]


def _storages_of_walk(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors_in(tree):
        if not tensor.is_meta and tensor.layout == torch.strided:
            yield tensor.untyped_storage()


def _storages_of_pickle(tree: Any) -> Iterable[torch.UntypedStorage]:
    finder = _StorageFinder()
    finder.dump(tree)
    return finder.storages.values()


def _padding_pickler(reserved_bytes: int) -> Any:
    """Return a `pickle_module` whose Pickler pads its output after the STOP opcode.

    Unpicklers stop there. A number that takes one byte more at the next save (a step count) then
    leaves every offset behind it where it was.
    """
    module = SimpleNamespace(__name__="pickle", reserved_bytes=reserved_bytes)

    class PaddingPickler(pickle.Pickler):
        def __init__(self, file: io.BytesIO, protocol: int | None = None) -> None:
            super().__init__(file, protocol=protocol)
            self._file = file

        def dump(self, obj: Any) -> None:
            super().dump(obj)
            used_bytes = self._file.tell()
            if used_bytes > module.reserved_bytes:
                wanted = used_bytes + _PICKLE_SLACK_BYTES
                module.reserved_bytes = -(-wanted // _PICKLE_STEP_BYTES) * _PICKLE_STEP_BYTES
            self._file.write(b"\0" * (module.reserved_bytes - used_bytes))

    module.Pickler = PaddingPickler
    return module
