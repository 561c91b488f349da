"""CUDA devices as CuPy sees them: names, options, memory, and the scope that work runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from backends.placement import asked_devices, check_once
from ml.devices import DeviceInfo
from ml.errors import DeviceError, MLError

__all__ = ["Place", "find_places"]


class Place:
    """A device of an open backend, and the stream that its work goes to.

    ``stream`` None: the stream that is current in the calling thread, as everywhere in CuPy.
    """

    def __init__(self, index: int, stream: Any = None) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self._stream = contextlib.nullcontext() if stream is None else stream

    def info(self) -> DeviceInfo:
        described = cupy.cuda.runtime.getDeviceProperties(self.index)["name"]
        return DeviceInfo(self.name, "cuda", described.decode(errors="replace"))

    @contextlib.contextmanager
    def work(self, op: str, asked: str = "") -> Iterator[None]:
        """Run a block on this device and stream; what CuPy and CUDA raise in it becomes a DeviceError.

        NumPy's warnings are off: bounds and factors are rounded to a dtype on the host.
        """
        try:
            with cupy.cuda.Device(self.index), self._stream, np.errstate(all="ignore"):
                yield
        except MLError:
            raise
        except MemoryError as error:
            raise DeviceError(f"{op}: {asked}out of memory on {self.name}: {error}") from error
        except Exception as error:
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise DeviceError(f"{op}: {asked}CuPy failed on {self.name}: {reason}") from error

    def synchronize(self) -> None:
        with self.work("synchronize"):
            cupy.cuda.get_current_stream().synchronize()

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, as CUDA counts them: what the pool keeps for reuse is not free."""
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


def find_places(device: Any, devices: Sequence[Any] | None, stream: Any) -> tuple[Place, ...]:
    """The places that ``open_backend`` was asked for. DeviceError for one that does not exist."""
    asked = asked_devices(device, devices)
    indices = [_index(one) for one in (["cuda"] if asked is None else asked)]
    check_once([f"cuda:{index}" for index in indices])
    _check_stream(stream, indices)
    return tuple(Place(index, stream) for index in indices)


def _index(wanted: Any) -> int:
    """The number of "cuda", "cuda:1", 1 or ``cupy.cuda.Device(1)``."""
    count = int(cupy.cuda.runtime.getDeviceCount())
    named = {f"cuda:{i}": i for i in range(count)} | ({"cuda": 0} if count else {})
    if isinstance(wanted, cupy.cuda.Device):
        wanted = wanted.id
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        wanted = f"cuda:{wanted}"
    if not isinstance(wanted, str) or wanted not in named:
        there = ", ".join(f"cuda:{i}" for i in range(count))
        raise DeviceError(f"open_backend: cupy has no device {wanted!r} here; there are: {there}")
    return named[wanted]


def _check_stream(stream: Any, indices: Sequence[int]) -> None:
    if stream is None:
        return
    if not isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
        raise DeviceError(f"open_backend: stream={stream!r}; it is a cupy.cuda.Stream")
    if stream.device_id >= 0 and any(index != stream.device_id for index in indices):
        raise DeviceError(
            f"open_backend: a stream of cuda:{stream.device_id} for "
            f"{', '.join(f'cuda:{index}' for index in indices)}; a stream belongs to one device"
        )
