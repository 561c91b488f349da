"""The Context contract: creation, placement, and when work happens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import numpy as np

from ml.base.backend import BaseBackend
from ml.base.checks import as_host, as_raw, cast_host, element, foreign, number
from ml.base.tensor import BaseTensor
from ml.dtypes import DType
from ml.errors import BoundsError, ClosedError, DeviceError, DTypeError, NotSupportedError, ShapeError
from ml.protocols import Tensor
from ml.strided import LARGEST_COUNT, Shape, as_shape, check_count, integers

_RANGE = ("start", "stop", "step")


class BaseContext(ABC):
    """Creation of tensors, on one device of its backend."""

    def __init__(self, backend: BaseBackend, max_graph_nodes: int, device: int = 0) -> None:
        self.backend = backend
        self.max_graph_nodes = max_graph_nodes
        self.device_index = device
        """The index in ``backend.devices`` of the device of results."""
        self.active_backend: BaseBackend | None = backend
        """``backend`` while this context is open, then None: one comparison tells both."""

    # To be implemented by a backend.

    @abstractmethod
    def _from_array(self, array: np.ndarray, dtype: DType) -> BaseTensor:
        """A copy of a host array of exactly this dtype and any strides; the caller may change the array
        immediately.
        """

    def _empty(self, shape: Shape, dtype: DType) -> BaseTensor:
        """New, uninitialized storage; override it if the framework supports that."""
        return self._full(shape, 0, dtype)

    def _full(self, shape: Shape, value: float, dtype: DType) -> BaseTensor:
        """New storage filled with a value that the dtype represents exactly; -0.0 keeps its sign."""
        try:
            with np.errstate(all="ignore"):
                host = np.full(shape, value, dtype.numpy)
        except (MemoryError, ValueError) as error:
            raise DeviceError(f"allocate: {shape} of {dtype!r} on the host: {error}") from error
        return self._from_array(host, dtype)

    def _arange(self, start: float, step: float, count: int, dtype: DType) -> BaseTensor:
        """``start + i * step`` for i in ``range(count)``, each computed individually and rounded once.

        For an integer dtype, both are ints that it can represent, apart from the sign of ``step``.
        """
        try:
            places = np.arange(count, dtype=np.int64)
            if dtype.is_float:
                # Counted from the element nearest to 0: no digits are lost if start and i * step cancel.
                first, by = Fraction(start), Fraction(step)
                nearest = min(max(round(-first / by), 0), max(count - 1, 0))
                with np.errstate(over="ignore"):
                    values = (places - nearest) * np.float64(step) + float(first + nearest * by)
                    values = cast_host(values, dtype)
            else:
                values = (places * np.int64(step) + np.int64(start)).astype(dtype.numpy)
        except (MemoryError, ValueError) as error:
            raise DeviceError(f"arange: {count} elements of {dtype!r} on the host: {error}") from error
        return self._from_array(values, dtype)

    def _from_native(self, array: Any) -> BaseTensor:
        """A tensor over a framework's own array without a copy, whose Storage is created with
        ``owned=False``.

        If the array has strides, they are kept, and ``storage.array`` is the array that it is a view of, from
        its first element on. Evaluation of a lazy array is started, so that its arguments can be freed, and
        its result is the storage; errors of this work may be raised as late as ``compute`` or ``to_numpy``.

        Raises ShapeError for strides that are negative or not whole elements, DTypeError for anything but an
        array of the framework and for a dtype without a DType, DeviceError for an array on a device that the
        backend does not have.
        """
        raise NotSupportedError(f"from_native: backend {self.backend.name!r} has no native arrays")

    def _on_device(self, device: int) -> BaseContext:
        """A context like this one on another device; override it if there are several devices."""
        return self

    def _device_of_layer(self, i: int) -> int:
        """The index in ``backend.devices`` of the device of layer ``i`` >= 0 of a model."""
        return self.device_index

    def __repr__(self) -> str:
        return f"<{'closed ' if self.closed else ''}context of {self.backend!r}>"

    # The contract.

    @property
    def closed(self) -> bool:
        return self.active_backend is None or self.backend.closed

    def check(self, op: str, tensor: BaseTensor | None = None) -> None:
        """Raise ClosedError unless this context and its backend are open, and own ``tensor``."""
        if self.active_backend is None or self.backend.closed:
            self.backend.check(op)
            raise ClosedError(f"{op}: this context is closed; make a new one with backend.new_context()")
        if tensor is not None and tensor.backend is not self.backend:
            raise foreign(op, tensor, self.backend)

    def empty(self, shape: Sequence[int], dtype: DType) -> BaseTensor:
        return self._empty(self._creation("empty", shape, dtype), dtype)

    def zeros(self, shape: Sequence[int], dtype: DType) -> BaseTensor:
        return self._full(self._creation("zeros", shape, dtype), 0, dtype)

    def full(self, shape: Sequence[int], value: float, dtype: DType) -> BaseTensor:
        sizes = self._creation("full", shape, dtype)
        return self._full(sizes, element("full", "value", value, dtype), dtype)

    def arange(self, start: float, stop: float, step: float, dtype: DType) -> BaseTensor:
        self._creation("arange", (), dtype)
        if dtype is DType.BOOL:
            raise DTypeError("arange: a range of BOOL; use an integer or float dtype")
        limits = {
            name: number("arange", name, x) for name, x in zip(_RANGE, (start, stop, step), strict=True)
        }
        for name, value in limits.items():
            if not math.isfinite(value):
                raise ShapeError(f"arange: {name}={value}; it must be finite")
        if not limits["step"]:
            raise ShapeError("arange: step 0; a step must not be zero")
        if not dtype.is_float:
            limits["start"] = element("arange", "start", start, dtype)
            limits["step"] = element("arange", "step", step, dtype, signed=True)
        first, end, by = (x if isinstance(x, int) else Fraction(x) for x in limits.values())
        count = max(0, -((first - end) // by))
        if count > LARGEST_COUNT:
            raise ShapeError(
                f"arange: [{start}, {stop}) by {step} has more than {LARGEST_COUNT} elements, the maximum"
            )
        if count and not dtype.is_float:
            element("arange", "its last value", first + (count - 1) * by, dtype)
        return self._arange(limits["start"], limits["step"], count, dtype)

    def from_numpy(self, array: Any, dtype: DType | None = None) -> BaseTensor:
        self.check("from_numpy")
        host = as_host("from_numpy", array)
        target = self._natural_dtype(host) if dtype is None else dtype
        self.backend.check_dtype("from_numpy", target)
        if host.dtype != target.numpy:
            if host.dtype.kind not in "biuf" and host.dtype != DType.BF16.numpy:
                raise DTypeError(f"from_numpy: cannot convert NumPy's {host.dtype} to {target!r}")
            with np.errstate(all="ignore"):
                host = cast_host(host, target)
        return self._from_array(host, target)

    def from_native(self, array: Any) -> BaseTensor:
        self.check("from_native")
        return self._from_native(array)

    def from_bytes(
        self, data: bytes | bytearray | memoryview, shape: Sequence[int], dtype: DType
    ) -> BaseTensor:
        sizes = self._creation("from_bytes", shape, dtype)
        raw = as_raw("from_bytes", data)
        wanted = math.prod(sizes) * dtype.itemsize
        if raw.size != wanted:
            raise ShapeError(
                f"from_bytes: {raw.size} bytes for shape {sizes} of {dtype!r}, which takes {wanted}"
            )
        if dtype is DType.BOOL and raw.size and raw.max() > 1:
            raise DTypeError("from_bytes: a BOOL byte must be 0 or 1")
        return self._from_array(raw.view(dtype.numpy).reshape(sizes), dtype)

    def forward(self, *tensors: Tensor) -> Self:
        self.check("forward")
        for tensor in tensors:
            self._owns("forward", tensor)
        self._forward(cast("tuple[BaseTensor, ...]", tensors))
        return self

    def compute(self, *tensors: Tensor) -> None:
        self.check("compute")
        for tensor in tensors:
            self._owns("compute", tensor)
        self._compute(cast("tuple[BaseTensor, ...]", tensors))

    def reserve(self) -> None:
        self.check("reserve")

    # Eager frameworks have nothing to record or run.
    def _forward(self, tensors: tuple[BaseTensor, ...]) -> None:  # noqa: B027
        """Record tensors for the next ``_compute``."""

    def _compute(self, tensors: tuple[BaseTensor, ...]) -> None:  # noqa: B027
        """Evaluate the recorded tensors and ``tensors``."""

    def input(self) -> BaseContext:
        self.check("input")
        return self if self.device_index == 0 else self._on_device(0)

    def layer(self, i: int) -> BaseContext:
        if self.active_backend is None or self.backend.closed:
            self.check("layer")
        if type(i) is not int:
            (i,) = integers("layer", i)
        if i < 0:
            raise BoundsError(f"layer: {i}; layers count from 0")
        device = self._device_of_layer(i)
        return self if device == self.device_index else self._on_device(device)

    def close(self) -> None:
        self.active_backend = None

    def __enter__(self) -> Self:
        self.check("enter")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise NotSupportedError("pickle: a context belongs to an open backend; make one in each process")

    # Checks.

    def _creation(self, op: str, shape: Sequence[int], dtype: DType) -> Shape:
        self.check(op)
        self.backend.check_dtype(op, dtype)
        sizes = as_shape(op, shape)
        check_count(op, sizes)
        return sizes

    def _natural_dtype(self, host: np.ndarray) -> DType:
        if host.dtype == np.float64:
            return self.backend.dtype
        if host.dtype.kind in "iu" and host.dtype not in (np.int8, np.uint8, np.int32, np.int64):
            if host.dtype == np.uint64 and host.size and host.max() > np.iinfo(np.int64).max:
                raise DTypeError(f"from_numpy: uint64 value {host.max()} does not fit I64")
            return DType.I64
        return DType.from_numpy(host.dtype)

    def _owns(self, op: str, tensor: object) -> None:
        if not isinstance(tensor, BaseTensor) or tensor.backend is not self.backend:
            raise foreign(op, tensor, self.backend)
