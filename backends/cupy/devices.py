"""CUDA devices in CuPy: names, options, memory, and the scope in which work runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import cupy
import numpy as np

from backends.placement import asked_devices, check_once
from ml.devices import DeviceInfo
from ml.errors import DeviceError, MLError


class Place:
    """A device of an open backend, and the stream of its work.

    ``stream`` None: the stream that is current in the calling thread, as everywhere in CuPy.
    """

    def __init__(self, index: int, stream: Any = None) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self.stream = stream

    def info(self) -> DeviceInfo:
        described = cupy.cuda.runtime.getDeviceProperties(self.index)["name"]
        return DeviceInfo(self.name, "cuda", described.decode(errors="replace"))

    def work(self, op: str, asked: str = "") -> _Work:
        """Run a block on this device and stream; errors of CuPy and CUDA become DeviceError. NumPy's warnings
        are off, since bounds and factors are rounded to a dtype on the host.
        """
        return _Work(self, op, asked)

    def synchronize(self) -> None:
        with self.work("synchronize"):
            cupy.cuda.get_current_stream().synchronize()

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes according to CUDA; memory that the pool keeps for reuse is not free."""
        with self.work("memory"):
            free, total = cupy.cuda.runtime.memGetInfo()
            return int(free), int(total)

    def pool(self) -> tuple[int, int]:
        """(used, kept) bytes of CuPy's memory pool, which the whole process shares."""
        with self.work("memory"):
            pool = cupy.get_default_memory_pool()
            return int(pool.used_bytes()), int(pool.total_bytes())

    def release(self) -> None:
        """Give the pool's unused blocks back to the device, once the work on them is done."""
        with self.work("close"):
            cupy.cuda.get_current_stream().synchronize()
            cupy.get_default_memory_pool().free_all_blocks()


class _Work:
    """See ``Place.work``. Device and stream are entered only if they are not current."""

    __slots__ = ("_asked", "_entered", "_op", "_place", "_quiet")

    def __init__(self, place: Place, op: str, asked: str) -> None:
        self._place, self._op, self._asked = place, op, asked
        self._entered: list[Any] = []
        self._quiet = np.errstate(all="ignore")

    def __enter__(self) -> None:
        place = self._place
        try:
            if cupy.cuda.runtime.getDevice() != place.index:
                self._enter(cupy.cuda.Device(place.index))
            if place.stream is not None and cupy.cuda.get_current_stream() != place.stream:
                self._enter(place.stream)
        except BaseException as error:
            self._leave(type(error), error, None)
            raise self._translated(error) from error
        self._quiet.__enter__()

    def _enter(self, scope: Any) -> None:
        scope.__enter__()
        self._entered.append(scope)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quiet.__exit__(kind, error, trace)
        self._leave(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, MLError):
            raise self._translated(error) from error

    def _leave(self, *raised: Any) -> None:
        while self._entered:
            self._entered.pop().__exit__(*raised)

    def _translated(self, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            return error
        if isinstance(error, MemoryError):
            return DeviceError(f"{self._op}: {self._asked}out of memory on {self._place.name}: {error}")
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        return DeviceError(f"{self._op}: {self._asked}CuPy failed on {self._place.name}: {reason}")


def find_places(device: Any, devices: Sequence[Any] | None, stream: Any) -> tuple[Place, ...]:
    """The requested places. Raises DeviceError for one that does not exist."""
    asked = asked_devices(device, devices)
    indices = [_index(one) for one in (["cuda"] if asked is None else asked)]
    check_once([f"cuda:{index}" for index in indices])
    _check_stream(stream, indices)
    return tuple(Place(index, stream) for index in indices)


def _index(wanted: Any) -> int:
    """The index of a device named as "cuda", "cuda:1", 1 or ``cupy.cuda.Device(1)``."""
    count = int(cupy.cuda.runtime.getDeviceCount())
    named = {f"cuda:{i}": i for i in range(count)} | ({"cuda": 0} if count else {})
    if isinstance(wanted, cupy.cuda.Device):
        wanted = wanted.id
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        wanted = f"cuda:{wanted}"
    if not isinstance(wanted, str) or wanted not in named:
        there = ", ".join(f"cuda:{i}" for i in range(count))
        raise DeviceError(f"open_backend: cupy has no device {wanted!r} here; available: {there}")
    return named[wanted]


def _check_stream(stream: Any, indices: Sequence[int]) -> None:
    if stream is None:
        return
    if not isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
        raise DeviceError(f"open_backend: stream={stream!r}; it must be a cupy.cuda.Stream")
    if stream.device_id >= 0 and any(index != stream.device_id for index in indices):
        raise DeviceError(
            f"open_backend: a stream of cuda:{stream.device_id} for "
            f"{', '.join(f'cuda:{index}' for index in indices)}; a stream belongs to one device"
        )
