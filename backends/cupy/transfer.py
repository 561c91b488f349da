"""Pages between CUDA devices and page-locked host memory, on separate streams."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import cupy
import numpy as np

from backends.cupy.devices import Place
from backends.cupy.tensor import CupyTensor
from backends.page_streams import PageStreams, StreamTransfer, runs
from ml.errors import DeviceError

LEAST = 4096
"""Bytes; shorter runs are first gathered on the device."""


class _Queue:
    """See ``backends.page_streams.CopyQueue``."""

    def __init__(self, place: Place) -> None:
        self._place = place
        with place.work("page"):
            self._stream = cupy.cuda.Stream(non_blocking=True)  # the default stream does not wait for it

    @contextlib.contextmanager
    def after_compute(self, op: str) -> Iterator[None]:
        with self._place.work(op):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.get_current_stream())
            self._stream.wait_event(event)
            with self._stream:
                yield

    def mark(self) -> Any:
        # block: a waiting thread yields the processor.
        event = cupy.cuda.Event(block=True, disable_timing=True)
        event.record(self._stream)
        return event

    def reached(self, event: Any) -> bool:
        with self._place.work("page"):
            return bool(event.done)

    def wait(self, event: Any) -> None:
        with self._place.work("page"):
            event.synchronize()

    def join(self, event: Any) -> None:
        with self._place.work("page"):
            cupy.cuda.get_current_stream().wait_event(event)


class CupyPages:
    """The pages of one backend."""

    def __init__(self, place: Place) -> None:
        """``place``: the device for page-locked memory that is not requested for a tensor."""
        self._streams = PageStreams(_Queue)
        self.close = self._streams.close
        self._place = place

    def pinned_memory(self, nbytes: int, place: Place | None = None) -> np.ndarray:
        with (place or self._place).work("page", f"no page-locked host memory for {nbytes} bytes: "):
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(1, nbytes)), np.uint8, nbytes)

    def page_out(self, tensors: Sequence[CupyTensor]) -> tuple[list[np.ndarray], StreamTransfer]:
        arrays = [self._array(tensor) for tensor in tensors]
        copies: list[tuple[Place, Callable[[], None]]] = [
            (tensor.place, partial(_out, tensor, array))
            for tensor, array in zip(tensors, arrays, strict=True)
            if tensor.nbytes
        ]
        return arrays, self._streams.begin("page_out", copies, (arrays, tensors))

    def _array(self, tensor: CupyTensor) -> np.ndarray:
        return self.pinned_memory(tensor.nbytes, tensor.place).view(tensor.dtype.numpy).reshape(tensor.shape)

    def page_in(self, arrays: Sequence[np.ndarray], tensors: Sequence[CupyTensor]) -> StreamTransfer:
        sources = [_source(array, tensor) for array, tensor in zip(arrays, tensors, strict=True)]
        copies: list[tuple[Place, Callable[[], None]]] = [
            (tensor.place, partial(_in, source, tensor))
            for source, tensor in zip(sources, tensors, strict=True)
            if tensor.nbytes
        ]
        return self._streams.begin("page_in", copies, (sources, tensors))


def _out(tensor: CupyTensor, array: np.ndarray) -> None:
    source = tensor.bits()
    if _rows(source) is None:
        source = cupy.ascontiguousarray(source)  # belongs to the stream: reused only after the copy
    _copy(source, array, out=True)


def _in(array: np.ndarray, tensor: CupyTensor) -> None:
    target = tensor.bits()
    if _rows(target) is not None:
        _copy(target, array, out=False)
        return
    whole = cupy.ndarray(target.shape, target.dtype)
    _copy(whole, array, out=False)
    cupy.copyto(target, whole)


def _source(array: np.ndarray, tensor: CupyTensor) -> np.ndarray:
    """The array, or a copy without gaps if its rows differ from those of the tensor."""
    if array.flags.c_contiguous or any(s < 0 or s % array.itemsize for s in array.strides):
        return np.ascontiguousarray(array)
    ours, theirs = _rows(tensor.bits()), _rows(array)
    alike = ours is not None and theirs is not None and (ours[0] == 1 or ours[:2] == theirs[:2])
    return array if alike else np.ascontiguousarray(array)


def _rows(array: Any) -> tuple[int, int, int] | None:
    """(rows, bytes per row, bytes between rows) of an array in evenly spaced rows."""
    size = array.dtype.itemsize
    strides = [stride // size for stride in array.strides]
    outer = runs(array.shape, strides, size, LEAST)
    count = math.prod(array.shape[:outer])
    if outer is None or sum(n > 1 for n in array.shape[:outer]) > 1:
        return None
    width = array.nbytes // count
    pitch = max((s for n, s in zip(array.shape[:outer], array.strides, strict=False) if n > 1), default=width)
    return (count, width, pitch) if width <= pitch < 1 << 31 or count == 1 else None


def _copy(device: Any, host: np.ndarray, out: bool) -> None:
    """One copy between a device's rows and a host array that is contiguous or has the same rows."""
    layout = _rows(device)
    if layout is None:
        raise DeviceError(f"page: {device.shape} with strides {device.strides} is not in evenly spaced rows")
    rows, width, pitch = layout
    there = None if host.flags.c_contiguous else _rows(host)
    apart = width if there is None else there[2]
    if rows == 1 and there is not None:  # one device row is as many as the host has
        rows, width, _ = there
        pitch = width
    runtime = cupy.cuda.runtime
    ours, theirs = (device.data.ptr, pitch), (host.ctypes.data, apart)
    kind = runtime.memcpyDeviceToHost if out else runtime.memcpyHostToDevice
    stream = cupy.cuda.get_current_stream().ptr
    to, source = (theirs, ours) if out else (ours, theirs)
    runtime.memcpy2DAsync(*to, *source, width, rows, kind, stream)
