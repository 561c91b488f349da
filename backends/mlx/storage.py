"""MLX's storage, which refers to the current array.

MLX arrays are values. A write makes a new array, and MLX reuses the memory of the old one
("donation") if, at the moment the write is scheduled, nothing else refers to that memory: no
other Python object, no node of a graph, no work in flight. Everything here serves that condition:

- a view is geometry only; its array is built when it is read, and dropped after;
- a write replaces the array in the storage, so that only the graph refers to the old one;
- before a write to a large storage is scheduled, reads and earlier writes in flight must finish, since MLX
  would otherwise copy the whole buffer. This wait happens only after the graph of a pass is built
  (``MlxWork.hold``). Unscheduled writes are chained without a copy.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, Self

import mlx.core as mx
import numpy as np

from backends.mlx.regions import Region, is_contiguous, may_overlap, region_of
from backends.mlx.work import MlxWork
from ml.base import BaseBackend, Storage
from ml.errors import ClosedError, DeviceError
from ml.strided import Shape, contiguous_strides

WAIT_BYTES = 1 << 20
"""Copying a smaller storage takes less time than waiting for work in flight."""


SIZE_LIMIT = 2**31 - 1
"""The most elements of a storage: MLX uses 32 bits for the size of an axis, and so for a flat storage."""


class MlxStorage(Storage):
    """The current array of an allocation, in its allocated shape.

    ``raw``: the array is an operation's result, whose memory layout MLX does not expose. It is put in C order
    once, when a strided view or a write first needs it; nothing is copied if it already is. ``borrowed``: it
    came through ``from_native``, and is not counted. ``private_at``: from this epoch on, the array's memory
    is not shared, unless an operation has used it since. ``permuted``: the strides and the shape of a tensor
    that covers all of it, with its axes in another order; views with that tuple of strides are read at once.
    """

    __slots__ = (
        "borrowed", "nbytes", "permuted", "private_at", "raw", "read_at", "shape", "work", "written_at",
    )  # fmt: skip

    array: Any

    def __init__(
        self, backend: BaseBackend, work: MlxWork, array: Any, raw: bool = True, owned: bool = True
    ) -> None:
        super().__init__(backend, array, array.size, array.nbytes, owned=owned)
        self.work = work
        self.nbytes: int = array.nbytes
        self.shape: Shape = array.shape
        self.raw = raw
        self.borrowed = not owned
        self.read_at = self.private_at = 0
        self.permuted: tuple[Shape | None, Shape] = None, (0, 0, 0)
        self.written_at = work.epoch
        work.storages[id(self)] = weakref.ref(self)

    def __del__(self) -> None:
        super().__del__()
        if hasattr(self, "work"):  # an interrupt may occur before __init__ has finished
            self.work.storages.pop(id(self), None)

    @classmethod
    def around(cls, backend: BaseBackend, work: MlxWork, array: Any, raw: bool = True) -> Self:
        """A storage of a pending result. Raises DeviceError if it exceeds this machine's memory."""
        if array.nbytes > work.limit or array.size > SIZE_LIMIT:
            # The system may overcommit memory, and kill the process when it is touched.
            raise DeviceError(
                f"allocate: {array.nbytes} bytes for {array.shape} of {array.dtype}; "
                f"the device has {work.limit}, and MLX supports up to {SIZE_LIMIT} elements"
            )
        storage = cls(backend, work, array, raw)
        work.defer(storage)
        return storage

    def read(self, offset: int, shape: Shape, strides: Shape) -> Any:
        """The array of a view, which aliases the buffer: drop it before the next write."""
        self.read_at = self.work.epoch
        stream = self.work.stream
        known, (rows, heads, dim) = self.permuted
        if (
            strides is known
            and not self.raw
            and 0 < shape[0] <= rows
            and 0 < shape[1] <= heads
            and 0 < shape[2] <= dim
        ):
            return mx.as_strided(self.array, shape, strides, offset, stream=stream)
        if 0 in shape:
            return mx.zeros(shape, self.array.dtype, stream=stream)
        if offset == 0 and is_contiguous(shape, strides):
            if shape == self.shape:
                return self.array
            if math.prod(shape) == self.size:
                return mx.reshape(self.array, shape, stream=stream)
        self.settle()
        if math.prod(shape) > SIZE_LIMIT:  # a repeating view; MLX would crash
            raise DeviceError(f"read: {shape} has {math.prod(shape)} elements; MLX supports {SIZE_LIMIT}")
        view = mx.as_strided(self.array, shape, strides, offset, stream=stream)
        # MLX's reductions treat axes of stride 1 as separate rows, and write beyond their result.
        return mx.contiguous(view, stream=stream) if may_overlap(shape, strides) else view

    def put_block(self, region: Region, value: Any) -> None:
        """``self[region] = value``. ``value`` has the region's sizes, and does not alias this buffer."""
        with self.work.lock:
            self.prepare_write(value)
            self.array = self._with_block(region, value)
            self.work.defer(self, value.nbytes)

    def put_layers(self, axis: int, indices: Any, value: Any) -> None:
        """``self[..., indices, ...] = value`` along an axis of the allocation."""
        with self.work.lock:
            self.prepare_write(value)
            column = tuple(-1 if k == axis else 1 for k in range(len(self.shape)))
            layers = mx.reshape(indices, column, stream=self.work.stream)
            self.array = mx.put_along_axis(self.array, layers, value, axis, stream=self.work.stream)
            self.work.defer(self, value.nbytes)

    def put_elements(self, offsets: Any, value: Any) -> None:
        """Write each element of ``value`` at its offset in the storage."""
        with self.work.lock:
            self.prepare_write(value)
            self.array = self._with_elements(offsets, value)
            self.work.defer(self, value.nbytes)

    def memory(self, offset: int) -> Any:
        """The array's bytes in host memory (uint8, flat); the element at ``offset`` is lost. MLX's arrays may
        share memory: a result with its operand, a value with an array that it was written to entirely. Only
        MLX's own writes detect this and copy, so one element is written before the memory is touched from
        outside.
        """
        with self.work.lock:
            if self.private_at <= max(self.read_at, self.written_at):
                size = (1,) * len(self.shape)
                region = region_of(self.shape, offset, size, contiguous_strides(self.shape))
                assert region is not None
                self.put_block(region, mx.zeros(region.sizes, self.array.dtype, stream=self.work.stream))
                self.work.drain(self.work.epoch)
                self.private_at = self.work.epoch
            return np.frombuffer(self.array, np.uint8)

    # Separate functions, so that no local variable keeps the old array beyond the assignment.

    def _with_block(self, region: Region, value: Any) -> Any:
        array, stream = self.array, self.work.stream
        if region.base != self.shape:
            array = mx.reshape(array, region.base, stream=stream)
        array = mx.slice_update(array, value, region.start, region.axes, stream=stream)
        return array if region.base == self.shape else mx.reshape(array, self.shape, stream=stream)

    def _with_elements(self, offsets: Any, value: Any) -> Any:
        stream = self.work.stream
        flat = mx.reshape(self.array, (-1,), stream=stream)
        offsets, value = (mx.reshape(x, (-1,), stream=stream) for x in (offsets, value))
        return mx.reshape(
            mx.put_along_axis(flat, offsets, value, 0, stream=stream), self.shape, stream=stream
        )

    def claim(self) -> bool:
        """Record a write that needs no preparation; otherwise False, and ``prepare_write`` is needed."""
        work, written = self.work, self.written_at
        if self.raw or self.borrowed or self.read_at > work.drained or self.array is None:
            return False
        if work.drained < written < work.epoch:
            return False
        self.written_at = work.epoch
        return True

    def prepare_write(self, value: Any) -> None:
        """Record the write of ``value``, after readers of the array if MLX would otherwise copy it."""
        work = self.work
        if self.array is None:
            raise ClosedError(
                "write: the backend of this tensor is closed; open it again with ml.open_backend"
            )
        self.settle()
        if self.borrowed:  # the write moves it to our own memory, or the lender has released it
            self.borrowed = False
            self.backend.allocations[id(self)] = (self.device, self.nbytes)
        read, written = self.read_at > work.drained, work.drained < self.written_at < work.epoch
        if (read or written) and self.nbytes >= WAIT_BYTES:
            work.hold(self.written_at if written else 0)
            work.hold(self.read_at, value)
        self.written_at = work.epoch

    def settle(self) -> None:
        """Put the array in C order."""
        if self.raw:
            with self.work.lock:
                self.array = mx.contiguous(self.array, stream=self.work.stream)
                self.raw = False
