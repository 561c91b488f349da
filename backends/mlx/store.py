"""Writes K and V of one layer together, as floats or as codes, with one slice assignment each and little
overhead.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from backends.mlx.errors import MLX_ERRORS
from backends.mlx.formats import blocks_of
from backends.mlx.storage import MlxStorage
from backends.mlx.tensor import MlxTensor
from backends.mlx.work import MlxWork
from ml.base import BaseBackend, Storage
from ml.protocols import Tensor
from ml.strided import Shape, contiguous_strides

_new = object.__new__


class Half:
    """The keys or the values: a whole storage, and its axis of rows."""

    __slots__ = (
        "axis", "before", "dtype", "one", "order", "ref", "row", "shape", "storage", "strides",
    )  # fmt: skip

    def __init__(self, tensor: MlxTensor, order: Shape) -> None:
        self.storage: MlxStorage = tensor.storage
        self.ref: weakref.ref[Storage] = weakref.ref(self.storage)
        self.dtype = tensor.dtype
        self.shape: Shape = tensor.shape[1:]
        self.row: Shape = (1, *self.shape)
        self.strides: Shape = tensor.strides
        sizes = self.storage.shape
        self.order = order
        """The storage's axis k is the tensor's axis ``order[k]``."""
        self.axis = order.index(0)
        self.before = (slice(None),) * self.axis
        heads_first = order.index(1) < order.index(2)
        self.one: Shape = (*sizes[: self.axis], 1, *sizes[self.axis + 1 :]) if heads_first else ()
        """The shape of one row in the storage, if rows are put in that order."""

    @classmethod
    def each(cls, *tensors: MlxTensor) -> list[Half] | None:
        """None unless each tensor covers its own whole storage, with rows along the same axis."""
        if len({id(tensor.storage) for tensor in tensors}) < len(tensors):
            return None
        halves: list[Half] = []
        for tensor in tensors:
            order = _order_of(tensor)
            if order is None:
                return None
            halves.append(cls(tensor, order))
        if any(half.axis != halves[0].axis for half in halves):
            return None
        for half, tensor in zip(halves, tensors, strict=True):
            if half.order != (0, 1, 2):
                half.storage.permuted = half.strides, tensor.shape
        return halves

    def accept(self, source: Any, count: int, backend: BaseBackend) -> Any:
        """The array of ``source`` with its axes in the storage's order; None unless it is the plain case."""
        if type(source) is not MlxTensor or source.dtype is not self.dtype or source.backend is not backend:
            return None
        storage, strides, shape = source.storage, source.strides, source.shape
        if shape != (self.row if count == 1 else (count, *self.shape)):
            return None
        if storage is self.storage or storage.array is None:
            return None
        if (
            count == 1
            and self.one
            and storage.size == shape[1] * shape[2]
            and strides[2] == 1
            and strides[1] == shape[2]
        ):
            storage.read_at = storage.work.epoch
            if storage.shape == self.one:
                return storage.array
            return mx.reshape(storage.array, self.one, stream=storage.work.stream)
        i, j, k = self.order
        return storage.read(
            source.offset, (shape[i], shape[j], shape[k]), (strides[i], strides[j], strides[k])
        )

    def view(self, start: int, count: int) -> MlxTensor:
        """Rows ``[start, start + count)``; MlxTensor's constructor, inlined."""
        made = _new(MlxTensor)
        made.storage = storage = self.storage
        made.backend = storage.backend
        made.dtype = self.dtype
        made.strides = strides = self.strides
        made.offset = start * strides[0]
        made.shape = (count, *self.shape)
        return made


def _order_of(tensor: MlxTensor) -> Shape | None:
    """The tensor's axis at each axis of its storage; None unless it covers all of it. There may be a single
    head, whose stride says nothing.
    """
    shape, strides, sizes = tensor.shape, tensor.strides, tensor.storage.shape
    if len(shape) != 3 or len(sizes) != 3 or min(shape[0], shape[2]) < 2 or tensor.offset:
        return None
    steps = contiguous_strides(sizes)
    for order in itertools.permutations(range(3)):
        if all(
            shape[axis] == size and (strides[axis] == step or size == 1)
            for axis, size, step in zip(order, sizes, steps, strict=True)
        ):
            return order
    return None


class MlxKVStore:
    """See ``ml.KVStore``; over two tensors (rows, heads, dim), each covering its whole storage."""

    __slots__ = ("_backend", "_bytes", "_key", "_rows", "_value", "_work")

    def __init__(self, backend: BaseBackend, work: MlxWork, key: Half, value: Half, rows: int) -> None:
        self._backend = backend
        self._work = work
        self._key, self._value, self._rows = key, value, rows
        self._bytes = sum(math.prod(half.shape) * half.dtype.itemsize for half in (key, value))

    @classmethod
    def over(cls, backend: BaseBackend, work: MlxWork, key: MlxTensor, value: MlxTensor) -> MlxKVStore | None:
        """None unless both cover their own whole storage, with rows along the same axis."""
        halves = Half.each(key, value)
        return None if halves is None else cls(backend, work, halves[0], halves[1], key.shape[0])

    def write(self, ctx: Any, start: int, count: int, key: Any, value: Any) -> bool:
        backend = self._backend
        if ctx.active_backend is not backend or backend.closed:
            return False
        if not 0 <= start <= self._rows - count or count < 1:
            return False
        keys, values = self._key, self._value
        new_key, new_value = keys.accept(key, count, backend), values.accept(value, count, backend)
        if (
            new_key is None
            or new_value is None
            or key.storage is values.storage
            or value.storage is keys.storage
        ):
            return False
        index = (*keys.before, slice(start, start + count))
        storage, other = keys.storage, values.storage
        try:
            work = self._work
            with work.lock:
                if not (storage.claim() and other.claim()):
                    storage.prepare_write(new_key)
                    other.prepare_write(new_value)
                # In place, if these Python objects are not referenced beyond one operation, not even by a
                # local variable; otherwise MLX would copy the buffer.
                if work.shared_by is None:
                    with work.on_stream:
                        storage.array[index] = new_key
                        other.array[index] = new_value
                else:  # this thread, which holds the lock, is on the stream
                    storage.array[index] = new_key
                    other.array[index] = new_value
                if count == self._rows:
                    storage.raw = other.raw = True  # MLX takes a value that covers everything as it lies
                work.defer_pair(keys.ref, values.ref, count * self._bytes)
        except MLX_ERRORS:
            return False
        return True

    def read(self, ctx: Any, start: int, count: int) -> tuple[Tensor, Tensor] | None:
        backend = self._backend
        if ctx.active_backend is not backend or backend.closed:
            return None
        if not 0 <= start <= self._rows - count or count < 1:
            return None
        return self._key.view(start, count), self._value.view(start, count)


class MlxQuantizedStore:
    """See ``ml.SupportsKVStorage``; over parts (rows, heads, ...), each covering its whole storage."""

    def __init__(
        self, backend: BaseBackend, work: MlxWork, halves: list[Half], eight: tuple[bool, bool]
    ) -> None:
        self._backend, self._work = backend, work
        self._halves, self._eight = halves, eight
        self._shapes = [(half.shape[0], half.shape[1] * 32) for half in halves[1::2]]
        """The shapes of a row of K and of V."""
        self._alike = self._shapes[0] == self._shapes[1] and eight[0] == eight[1]
        self._rows = halves[0].storage.shape[halves[0].axis]

    @classmethod
    def over(
        cls, backend: BaseBackend, work: MlxWork, parts: Sequence[MlxTensor], formats: tuple[str, str]
    ) -> MlxQuantizedStore | None:
        """``parts``: codes and scales of K and then of V. None if their strides differ from this case."""
        if not {"Q8_0", "Q4_0"}.issuperset(formats):
            return None
        halves = Half.each(*parts)
        if halves is None or any(half.order != halves[0].order or half.order[2] != 2 for half in halves):
            return None
        return cls(backend, work, halves, (formats[0] == "Q8_0", formats[1] == "Q8_0"))

    def write(self, ctx: Any, start: int, count: int, key: Any, value: Any) -> bool:
        backend, work, halves = self._backend, self._work, self._halves
        if ctx.active_backend is not backend or backend.closed:
            return False
        if not 0 <= start <= self._rows - count or count < 1:
            return False
        try:
            with work.lock, work.on_stream:
                sources = [
                    self._floats(x, count, shape) for x, shape in zip((key, value), self._shapes, strict=True)
                ]
                if sources[0] is None or sources[1] is None:
                    return False
                encoded = self._encoded(sources[0], sources[1])
                for half, new in zip(halves, encoded, strict=True):
                    if not half.storage.claim():
                        half.storage.prepare_write(new)
                    half.storage.array[(*half.before, slice(start, start + count))] = new
                nbytes = sum(new.nbytes for new in encoded)
                work.defer_pair(halves[0].ref, halves[1].ref, nbytes)
                work.defer_pair(halves[2].ref, halves[3].ref, 0)
        except MLX_ERRORS:
            return False
        return True

    def read(self, ctx: Any, start: int, count: int) -> None:
        """None: codes are decoded elsewhere."""
        return

    def _floats(self, source: Any, count: int, shape: tuple[int, int]) -> Any:
        """The array of ``source`` with its axes in the storages' order; None unless it is the plain case."""
        if type(source) is not MlxTensor or source.backend is not self._backend or not source.dtype.is_float:
            return None
        storage = source.storage
        if source.shape != (count, *shape) or storage.array is None:
            return None
        i, j, k = self._halves[0].order
        sizes, steps = source.shape, source.strides
        return storage.read(source.offset, (sizes[i], sizes[j], sizes[k]), (steps[i], steps[j], steps[k]))

    def _encoded(self, key: Any, value: Any) -> tuple[Any, Any, Any, Any]:
        """Codes and scales of both, encoded together if they have the same format."""
        if self._alike and key.dtype == value.dtype:
            codes, scales = (mx.split(x, 2) for x in blocks_of(mx.concatenate([key, value]), self._eight[0]))
            return codes[0], scales[0], codes[1], scales[1]
        return *blocks_of(key, self._eight[0]), *blocks_of(value, self._eight[1])
