"""Backend, Context and Tensor on NumPy arrays.

A storage is a flat run of bytes, so that a strided view of any dtype is one ``numpy.ndarray`` over it
(bfloat16 has no buffer interface).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import numpy as np

from backends import cpu_attention
from backends.cpu_attention import BITS, Array, Repeated, Stored, address
from backends.cpu_store import Codes, CodesStore, floats
from backends.cpu_store import encoded as compiled
from backends.host_memory import aligned
from backends.numpy.erf import erf
from backends.numpy.formats import decoded, encoded
from backends.numpy.store import NumpyKVStore
from backends.numpylike import ArrayTensor, element_strides
from backends.placement import only_device
from ml.base import BaseBackend, BaseContext, BaseTensor, Storage
from ml.base.checks import check_peers
from ml.devices import DeviceInfo, DeviceMemory
from ml.dtypes import DType
from ml.errors import DeviceError, DTypeError, ReadOnlyError, ShapeError
from ml.nn.grouped import runs
from ml.ragged import RaggedPlan
from ml.strided import Shape, contiguous_strides, extent, overlaps_itself

ALIGNED = 1 << 16
"""Bytes; smaller allocations are not aligned."""


class NumpyBackend(BaseBackend):
    """``open_backend("numpy", device="cpu", dtype=DType.F32)``.

    ``devices=["cpu"], layers=32`` is equivalent; several devices are refused.
    """

    def __init__(
        self,
        device: str | None = None,
        dtype: DType = DType.F32,
        devices: Sequence[str] | None = None,
        layers: int | None = None,
    ) -> None:
        device = only_device("numpy", device, devices, layers)
        if device not in (None, "cpu"):
            raise DeviceError(f"open_backend: numpy has no device {device!r}; its one device is 'cpu'")
        super().__init__("numpy", (DeviceInfo("cpu", "cpu", f"NumPy {np.__version__}"),), dtype)

    def _new_context(self, max_graph_nodes: int) -> NumpyContext:
        return NumpyContext(self, max_graph_nodes)

    def quantize(self, ctx: NumpyContext, x: NumpyTensor, format: str) -> tuple[NumpyTensor, ...] | None:
        """See ``ml.SupportsKVStorage``."""
        ctx.check("quantize", x)
        parts = compiled(x.native, format) or encoded(x.native, format)
        if parts is None:
            return None
        return tuple(NumpyTensor.own(ctx, part, DType.from_numpy(part.dtype)) for part in parts)

    def dequantize(self, ctx: NumpyContext, parts: Sequence[NumpyTensor], format: str) -> NumpyTensor | None:
        """See ``ml.SupportsKVStorage``."""
        ctx.check("dequantize", parts[0])
        values = decoded([part.native for part in parts], format)
        return None if values is None else NumpyTensor.own(ctx, values, DType.F32)

    def ragged_attention(
        self,
        ctx: NumpyContext,
        query: NumpyTensor,
        key: NumpyTensor | Sequence[NumpyTensor],
        value: NumpyTensor | Sequence[NumpyTensor],
        plan: RaggedPlan,
        scale: float,
        sinks: NumpyTensor | None = None,
        formats: tuple[str, str] | None = None,
    ) -> NumpyTensor | None:
        """See ``ml.SupportsRaggedAttention``. On one thread, by numba; None without it."""
        ctx.check("ragged_attention")
        stored: Sequence[Any] = [key, value] if formats is None else [*cast("Any", key), *cast("Any", value)]
        check_peers("ragged_attention", self, query, *stored, sinks)
        keys, values = _stored(key, value, formats, query.dtype)
        if keys is None or values is None or not query.dtype.is_float or cpu_attention.kernels() is None:
            return None
        q = query.native
        if q.ndim == 3 and q.strides[2] != q.itemsize:
            q = np.ascontiguousarray(q)
        asked = Stored.of([Array.of(q)], query.dtype.name)
        if asked is None:
            return None
        launch = cpu_attention.launch_of("ragged_attention", plan, asked.shape, keys.shape, values.shape)
        logits = None if sinks is None else floats(sinks.native)
        out = np.empty((*asked.shape[:2], launch.v_dim), np.float32)
        launch.run(asked.arguments[:4], keys.arguments, values.arguments, scale, logits, 1, address(out))
        if formats is None:
            plan.again = _Again(plan, query, key, value)
        return NumpyTensor.own(ctx, out.astype(q.dtype, copy=False), query.dtype)

    def kv_store(
        self, key: Any, value: Any, formats: tuple[str, str] | None = None
    ) -> NumpyKVStore | CodesStore | None:
        """See ``ml.SupportsKVStorage``."""
        if formats is None:
            return NumpyKVStore.over(self, key, value)
        return CodesStore.over(self, self._host, _codes(key, formats[0]), _codes(value, formats[1]))

    def _host(self, tensor: object) -> np.ndarray | None:
        if type(tensor) is not NumpyTensor or tensor.backend is not self or not tensor.dtype.is_float:
            return None
        return tensor.native

    def borrow(self, ctx: NumpyContext, array: np.ndarray) -> BaseTensor:
        """See ``ml.SupportsHostMemory``. Arrays with negative strides are copied."""
        try:
            return ctx.from_native(array)
        except ShapeError:  # strides that a view cannot have
            return ctx.from_numpy(array, DType.from_numpy(array.dtype))

    def overwrite(self, ctx: NumpyContext, tensor: NumpyTensor) -> np.ndarray | None:
        """See ``ml.SupportsHostMemory``."""
        ctx.check("overwrite", tensor)
        native = tensor.native
        return (
            native if native.flags.writeable and not overlaps_itself(tensor.shape, tensor.strides) else None
        )

    def grouped_matmul(
        self, ctx: NumpyContext, x: NumpyTensor, weight: NumpyTensor, groups: NumpyTensor
    ) -> NumpyTensor:
        """See ``ml.SupportsGroupedMatmul``."""
        ctx.check("grouped_matmul")
        result = np.empty((x.shape[0], weight.shape[2]), x.dtype.numpy)
        rows, matrices = x.wide(), weight.native
        with np.errstate(all="ignore"):
            for i, start, stop in runs(groups.native):
                result[start:stop] = rows[start:stop] @ matrices[i].astype(rows.dtype, copy=False)
        return NumpyTensor.own(ctx, result, x.dtype)

    def _device_memory(self, index: int, device: DeviceInfo, allocated: int) -> DeviceMemory:
        from ml.host import host_memory

        free, total = host_memory()
        return DeviceMemory(device.name, allocated, free, total)


class NumpyTensor(ArrayTensor):
    __slots__ = ("on_cpu",)

    on_cpu: Any
    """The cached argument of the CPU kernels: see backends.cpu_attention.stored_of."""

    @classmethod
    def own(cls, ctx: BaseContext, array: Any, dtype: DType) -> Self:
        whole = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        # bfloat16 has no buffer interface, so its bytes are used; other dtypes avoid this.
        raw = whole.reshape(-1).view(np.uint8) if dtype is DType.BF16 else whole
        storage = Storage(ctx.backend, raw, whole.size, whole.nbytes)
        shape = whole.shape
        return cls(storage, dtype, 0, shape, contiguous_strides(shape), whole)

    @property
    def native(self) -> np.ndarray:
        """An ndarray that aliases the storage."""
        if self._native is None:
            itemsize = self.dtype.itemsize
            self._native = np.ndarray(  # built once, then kept
                self.shape,
                self.dtype.numpy,
                self.storage.array,
                self.offset * itemsize if self.storage.size else 0,
                tuple(stride * itemsize for stride in self.strides),
            )
        native: np.ndarray = self._native
        return native

    def to_numpy(self) -> np.ndarray:
        self.backend.check("to_numpy")
        return np.array(self.native, order="C")

    def check_writable(self, op: str) -> None:
        super().check_writable(op)
        if not self.storage.array.flags.writeable:
            raise ReadOnlyError(f"{op}: the destination wraps a NumPy array that is not writeable")

    def _gather(self, ctx: BaseContext, indices: Any, axis: int) -> Self:
        if self.native.flags.c_contiguous:
            return super()._gather(ctx, indices, axis)
        rows = (slice(None),) * axis + (self._index(indices),)  # take would copy the whole view first
        return self.own(ctx, self.native[rows], self.dtype)

    def _erf(self, x: np.ndarray) -> np.ndarray:
        return erf(x)


class _Again(Repeated):
    __slots__ = ()

    def __call__(
        self, ctx: NumpyContext, query: NumpyTensor, key: NumpyTensor, value: NumpyTensor, scale: float
    ) -> NumpyTensor | None:
        stored = self.operands(ctx, query, key, value)
        if stored is None:
            return None
        q = query.native
        steps = q.strides
        if steps[2] != q.itemsize:
            return None
        out = np.empty((*q.shape[:2], self.v_dim), np.float32)
        self.run((self.kind, address(q), steps[0], steps[1]), stored, scale, 1, address(out))
        if q.dtype != np.float32:
            out = out.astype(q.dtype)
        return NumpyTensor.own(ctx, out, query.dtype)


def _stored(
    key: Any, value: Any, formats: tuple[str, str] | None, plain: DType
) -> tuple[Stored | None, Stored | None]:
    """K and V as arguments of the kernel: numbers of the dtype ``plain``, or codes; None for anything
    else.
    """
    if formats is None:
        if not key.dtype is value.dtype is plain:
            return None, None
        key, value, formats = [key], [value], (plain.name, plain.name)
    elif not BITS.keys() >= set(formats):
        return None, None
    keys, values = (
        cpu_attention.stored_of(parts, name, Array.of)
        for parts, name in zip((key, value), formats, strict=True)
    )
    return keys, values


def _codes(parts: Sequence[NumpyTensor], name: str) -> Codes | None:
    return Codes.of([part.native for part in parts], name)


def _quiet(name: str) -> Callable[..., Any]:
    """The inherited method without NumPy's warnings (inf and NaN are values), with memory errors
    translated.
    """
    quiet: Callable[..., Any] = np.errstate(all="ignore")(getattr(ArrayTensor, name))

    def method(self: NumpyTensor, *args: Any) -> Any:
        try:
            return quiet(self, *args)
        except MemoryError as error:
            raise DeviceError(f"{name.lstrip('_')}: {self.dtype!r} {self.shape}: {error}") from error

    return method


for _name in (
    "write_from", "_scatter", "_gather", "_concat", "_repeat", "_cast", "_binary", "_unary", "_scale",
    "_gelu", "_clamp", "_matmul", "_softmax", "_reduce", "_argsort", "_top_k", "_rms_norm", "_compare",
    "_where",
):  # fmt: skip
    setattr(NumpyTensor, _name, _quiet(_name))


class NumpyContext(BaseContext):
    def _empty(self, shape: Shape, dtype: DType) -> NumpyTensor:
        return self._allocate(np.empty, shape, dtype)

    def _full(self, shape: Shape, value: float, dtype: DType) -> NumpyTensor:
        if value == 0 and math.copysign(1, value) > 0:
            return self._allocate(np.zeros, shape, dtype)
        tensor = self._allocate(np.empty, shape, dtype)
        with np.errstate(all="ignore"):
            tensor.native[...] = value
        return tensor

    def _allocate(self, make: Callable[..., Any], shape: Sequence[int], dtype: DType) -> NumpyTensor:
        size = math.prod(shape)
        nbytes = size * dtype.itemsize
        try:
            raw = make(nbytes, np.uint8) if nbytes < ALIGNED else aligned(nbytes, make)
        except (MemoryError, ValueError) as error:  # NumPy raises ValueError for more than it can index
            raise DeviceError(f"allocate: {nbytes} bytes for {tuple(shape)} of {dtype!r}: {error}") from error
        storage = Storage(self.backend, raw, size, nbytes)
        return NumpyTensor.whole(storage, dtype, tuple(shape))

    def _from_array(self, array: np.ndarray, dtype: DType) -> NumpyTensor:
        return NumpyTensor.own(self, np.array(array, order="C"), dtype)

    def _from_native(self, array: Any) -> NumpyTensor:
        if not isinstance(array, np.ndarray):
            raise DTypeError(f"from_native: {type(array).__name__} is not a numpy.ndarray; use from_numpy")
        if isinstance(array, np.ma.MaskedArray):
            raise DTypeError("from_native: a masked array, which has no masked elements here; fill it first")
        array = array.view(np.ndarray)  # np.matrix and similar classes compute differently
        dtype = DType.from_numpy(array.dtype)
        strides = element_strides(array, dtype.itemsize)
        size = extent(array.shape, strides)
        flat = np.lib.stride_tricks.as_strided(
            array, (size,), (dtype.itemsize,), writeable=array.flags.writeable
        )
        storage = Storage(self.backend, flat.view(np.uint8), size, 0, owned=False)
        return NumpyTensor(storage, dtype, 0, array.shape, strides, array)
