"""Tensor on ``torch.Tensor``: torch keeps the geometry, so a view is one ``as_strided``.

In ``from_native``, ``view``, ``slice`` and ``copy``, torch's own checks come first; only if it refuses or
does not check do the checks of ``ml.base.BaseTensor`` run and name the reason. The KV cache's decode loop has
its own path: store.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import torch
from torch.nn import functional

from backends.torch.convert import TO_TORCH, exactly, share_memory, to_host, translated, write
from ml.base import BaseBackend, BaseTensor, Storage
from ml.base.checks import flat
from ml.dtypes import DType
from ml.protocols import Tensor
from ml.strided import LARGEST_NDIM, Shape, contiguous_strides, overlaps_itself

_EVERYWHERE = 1 << 64
_GELU_LARGEST = 1e38
"""Beyond it, torch's vectorized gelu on the CPU is infinite, and NaN for infinity, since it doubles, then
halves.
"""
_GELU_LINEAR = 10.0
"""From here on, gelu(x) is x in every dtype."""
_PUBLIC = {"alias": "view", "write_from": "copy", "gather": "rows", "scatter": "set_rows"}
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Placement(Protocol):
    """The properties of a context that results need."""

    torch_device: torch.device
    moves: bool
    """Whether operands may be on a different device from results."""
    device_index: int

    @property
    def backend(self) -> BaseBackend: ...
    def from_numpy(self, array: Any, dtype: DType | None = None) -> BaseTensor: ...


class TorchStorage(Storage):
    """Counts one allocation in ``Backend.memory()``; torch itself owns the memory. Addresses in ``[low,
    high)`` belong to this allocation: tensors that start elsewhere do not overlap it. All tensors of users on
    one device share one storage, whose addresses are unknown.
    """

    __slots__ = ("high", "low")

    def __init__(self, backend: BaseBackend, device: int, owned: torch.Tensor | None) -> None:
        # Storage.__init__, inlined, since every result of an operation has one.
        self.low, self.high = 0, _EVERYWHERE
        self.backend, self.device = backend, device
        self.array, self.size = None, 0
        if owned is not None:
            backend.allocations[id(self)] = device, owned.nbytes

    def locate(self, array: torch.Tensor) -> None:
        """Record the addresses, when a write first needs them."""
        if self.high == _EVERYWHERE and id(self) in self.backend.allocations:
            memory = array.untyped_storage()
            self.low = memory.data_ptr()
            self.high = self.low + memory.nbytes()


class UploadedStorage(TorchStorage):
    """Tensors uploaded in one transfer and never written; indices are widened once for all layers."""

    __slots__ = ("_spacing", "_wide")

    def spacing(self, indices: torch.Tensor) -> tuple[int, int] | None:
        """The first of ``indices`` on the CPU, of this storage, and how far apart they are; None if that
        differs or is not positive.
        """
        if not hasattr(self, "_spacing"):
            self._spacing: dict[tuple[int, int], tuple[int, int] | None] = {}
        key = int(indices.storage_offset()), indices.numel()
        if key not in self._spacing:
            rows = indices.numpy()
            steps = np.diff(rows)
            even = steps.size > 0 and steps[0] > 0 and (steps == steps[0]).all()
            self._spacing[key] = (int(rows[0]), int(steps[0])) if even else None
        return self._spacing[key]

    def widened(self, indices: torch.Tensor, device: torch.device) -> torch.Tensor:
        """``indices``, of this storage, as I64, which torch's scatter needs."""
        if not hasattr(self, "_wide"):
            self._wide: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        key = int(indices.storage_offset()), indices.numel(), device
        wide = self._wide.get(key)
        if wide is None:
            wide = self._wide[key] = indices.to(device, torch.int64)
        return wide


def wide_indices(indices: TorchTensor, device: torch.device) -> torch.Tensor:
    """I32 indices as I64, which torch's scatter needs, on ``device``."""
    if isinstance(indices.storage, UploadedStorage):
        return indices.storage.widened(indices.native, device)
    return indices.native.to(device, torch.int64)


def _guarded(method: _Method) -> _Method:
    """Wrap ``method`` to translate torch's errors, naming the operation and the device."""
    name = method.__name__.removeprefix("_")

    @functools.wraps(method)
    def call(self: TorchTensor, *args: Any) -> Any:
        try:
            return method(self, *args)
        except (RuntimeError, IndexError, MemoryError) as error:
            op = args[1] if name in ("unary", "binary", "reduce") else _PUBLIC.get(name, name)
            raise translated(op, error, self.device) from error

    return cast("_Method", call)


class TorchTensor(BaseTensor):
    """A view of a storage. ``native`` is the torch.Tensor and aliases the memory."""

    __slots__ = ("backend", "dtype", "known_shape", "native", "on_cpu", "storage")

    native: torch.Tensor
    on_cpu: Any
    """The cached argument of the CPU kernels: see backends.cpu_attention.stored_of."""

    def __init__(self, native: torch.Tensor, dtype: DType, storage: TorchStorage) -> None:
        self.native = native
        self.dtype = dtype
        self.storage = storage
        self.backend = storage.backend
        self.known_shape: Shape | None = None
        """``shape``, cached on first use, since converting torch's shape takes longer than making a view."""

    @classmethod
    def own(cls, ctx: Placement, array: torch.Tensor, dtype: DType) -> Self:
        """Wrap a new allocation of torch; C-contiguous, so that ``view`` has the expected offsets."""
        array = array.contiguous()
        made = _new(TorchTensor)
        made.native = array
        made.dtype = dtype
        made.backend = backend = ctx.backend
        made.storage = TorchStorage(backend, ctx.device_index, array)
        made.known_shape = None
        return cast("Self", made)

    @property
    def shape(self) -> Shape:
        if self.known_shape is None:
            self.known_shape = tuple(self.native.size())
        return self.known_shape

    @property
    def strides(self) -> Shape:
        strides: Shape = self.native.stride()
        return strides

    @property
    def device(self) -> str:
        """The name of this tensor's device."""
        return self.backend.devices[self.storage.device].name

    def to_numpy(self) -> np.ndarray:
        self.backend.check("to_numpy")
        settle = self.backend.settle  # type: ignore[attr-defined]
        if settle is not None:  # the value may depend on lost ranks
            settle("to_numpy")
        return to_host(self.native, self.dtype)

    # Movement.

    def _storage_size(self) -> int:
        return self.native.untyped_storage().nbytes() // self.dtype.itemsize

    def _first(self) -> int:
        return int(self.native.storage_offset())

    @_guarded
    def _alias(self, offset: int, shape: Shape, strides: Shape) -> Self:
        return type(self)(self.native.as_strided(shape, strides, offset), self.dtype, self.storage)

    def view(self, ctx: Any, offset: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Self:
        if ctx.active_backend is not self.backend or self.backend.closed:
            ctx.check("view", self)
        try:
            sizes = shape if type(shape) is tuple else tuple(shape)
            if 0 not in sizes and len(sizes) <= LARGEST_NDIM:  # torch does not check empty views
                native = self.native
                if strides is None:
                    steps = contiguous_strides(sizes)
                else:
                    steps = strides if type(strides) is tuple else tuple(strides)
                shown = _new(TorchTensor)
                shown.native = native.as_strided(sizes, steps, native.storage_offset() + offset)
                shown.dtype = self.dtype
                shown.storage = self.storage
                shown.backend = self.backend
                shown.known_shape = None
                return cast("Self", shown)
        except Exception:  # any error: the checks below name the reason
            pass
        return super().view(ctx, offset, shape, strides)

    def slice(self, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Self:
        if ctx.active_backend is not self.backend or self.backend.closed:
            ctx.check("slice", self)
        try:
            if step == 1 and type(step) is int and 0 <= start < stop and self.native.numel():
                shown = _new(TorchTensor)
                shown.native = self.native.narrow(axis, start, stop - start)
                shown.dtype = self.dtype
                shown.storage = self.storage
                shown.backend = self.backend
                shown.known_shape = None
                return cast("Self", shown)
        except Exception:
            pass
        return super().slice(ctx, axis, start, stop, step)

    def permute(self, ctx: Any, *axes: int) -> Self:
        if ctx.active_backend is not self.backend or self.backend.closed:
            ctx.check("permute", self)
        try:
            if axes:  # without axes they are reversed, which torch does not do
                return type(self)(self.native.permute(axes), self.dtype, self.storage)
        except Exception:
            pass
        return super().permute(ctx, *axes)

    def reshape(self, ctx: Any, *shape: int) -> Self:
        if ctx.active_backend is not self.backend or self.backend.closed:
            ctx.check("reshape", self)
        sizes = flat(shape)
        try:
            if 0 not in sizes and len(sizes) <= LARGEST_NDIM:  # torch does not check empty shapes
                return type(self)(self.native.view(sizes), self.dtype, self.storage)
        except Exception:
            pass
        return super().reshape(ctx, *shape)

    # Writes.

    def copy(self, ctx: Any, dst: Tensor) -> Self:
        if ctx.active_backend is not self.backend or self.backend.closed:
            ctx.check("copy", self)
        if type(dst) is TorchTensor and dst.backend is self.backend:
            source, target, storage = self.native, dst.native, dst.storage
            sizes = source.size()
            if (
                sizes == target.size()
                and not storage.low <= source.data_ptr() < storage.high
                and not overlaps_itself(sizes, target.stride())
            ):
                try:
                    target.copy_(source)
                    return cast("Self", dst)
                except RuntimeError:
                    pass
        return super().copy(ctx, dst)

    def _read_first(self, src: Self) -> torch.Tensor:
        """The source of a write, cloned if it overlaps, since torch leaves such a write undefined."""
        storage, source = self.storage, src.native
        storage.locate(self.native)
        if storage.low <= source.data_ptr() < storage.high and share_memory(source, self.native):
            return source.clone()
        return source

    @_guarded
    def write_from(self, src: Self) -> None:
        write(self.native, self.native.copy_, self._read_first(src))

    @_guarded
    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        native, source = self.native, self._read_first(src)
        if not source.numel():
            return
        if source.dtype is not native.dtype or source.device != native.device:
            source = source.to(native.device, native.dtype)
        if isinstance(indices, TorchTensor):
            rows = wide_indices(indices, native.device)
        else:
            rows = self._rows(indices, native.device).to(native.device, torch.int64)
        write(native, native.index_copy_, axis, rows, source)

    # New storage.

    @_guarded
    def _cast(self, ctx: Placement, dtype: DType) -> Self:
        array = self.native.to(
            ctx.torch_device, TO_TORCH[dtype], copy=True, memory_format=torch.contiguous_format
        )
        return self.own(ctx, array, dtype)

    @_guarded
    def _gather(self, ctx: Placement, indices: Any, axis: int) -> Self:
        native = self.native  # selected on its own device: only the rows move to the context's
        gathered = native.index_select(axis, self._rows(indices, native.device))
        return self.own(ctx, gathered.to(ctx.torch_device) if ctx.moves else gathered, self.dtype)

    @_guarded
    def _concat(self, ctx: Placement, other: Self, axis: int) -> Self:
        return self.own(ctx, torch.cat((self.native_on(ctx), other.native_on(ctx)), axis), self.dtype)

    @_guarded
    def _repeat(self, ctx: Placement, axis: int, n: int) -> Self:
        times = [1] * self.native.dim()
        times[axis] = n
        return self.own(ctx, self.native_on(ctx).repeat(times), self.dtype)

    # Compute: torch's kernels widen F16 and BF16 to F32 and round once, except as noted.

    @_guarded
    def _binary(self, ctx: Placement, op: str, other: Self) -> Self:
        return self.own(ctx, _BINARY[op](self.native_on(ctx), other.native_on(ctx)), self.dtype)

    @_guarded
    def _unary(self, ctx: Placement, op: str) -> Self:
        return self.own(ctx, _UNARY[op](self.native_on(ctx)), self.dtype)

    @_guarded
    def _scale(self, ctx: Placement, x: float) -> Self:
        return self.own(ctx, self.native_on(ctx) * x, self.dtype)

    @_guarded
    def _gelu(self, ctx: Placement, tanh: bool) -> Self:
        x = self.native_on(ctx)
        flat = x.flatten()  # oneDNN supports 12 axes
        if tanh:
            return self.own(ctx, functional.gelu(flat, approximate="tanh").view(x.shape), self.dtype)
        result = functional.gelu(flat).view(x.shape)
        if x.is_cpu and x.numel() and not bool(x.amax() <= _GELU_LARGEST):
            result = torch.where(x > _GELU_LINEAR, x, result)
        return self.own(ctx, result, self.dtype)

    @_guarded
    def _clamp(self, ctx: Placement, lo: float | None, hi: float | None) -> Self:
        if lo is None and hi is None:
            return self._cast(ctx, self.dtype)
        return self.own(ctx, torch.clamp(self.native_on(ctx), lo, hi), self.dtype)

    @_guarded
    def _matmul(self, ctx: Placement, other: Self) -> Self:
        a, b = self.native_on(ctx), other.native_on(ctx)
        if a.is_cuda and self.dtype in _NARROW:
            return self.own(ctx, exactly(torch.matmul, a, b), self.dtype)
        return self.own(ctx, torch.matmul(a, b), self.dtype)

    @_guarded
    def _softmax(self, ctx: Placement, axis: int) -> Self:
        x = self.native_on(ctx)
        if self.dtype in _NARROW and axis != x.dim() - 1:  # torch then rounds the exponentials too
            x = x.to(torch.float32)
        return self.own(ctx, x.softmax(axis).to(TO_TORCH[self.dtype]), self.dtype)

    @_guarded
    def _reduce(self, ctx: Placement, op: str, axis: int, keepdims: bool) -> Self:
        x = self.native_on(ctx)
        if op == "sum":
            return self.own(ctx, x.sum(axis, keepdims), self.dtype if self.dtype.is_float else DType.I64)
        if op == "max":
            return self.own(ctx, x.amax(axis, keepdims), self.dtype)
        if op == "mean":  # for F16 and BF16, torch rounds the sum before dividing
            mean = x.mean(axis, keepdims, dtype=torch.float32)
            return self.own(ctx, mean.to(TO_TORCH[self.dtype]), self.dtype)
        return self.own(ctx, _ordered(x).argmax(axis, keepdims).to(torch.int32), DType.I32)

    @_guarded
    def _argsort(self, ctx: Placement, axis: int) -> Self:
        order = torch.sort(_ordered(self.native_on(ctx)), dim=axis, stable=True).indices
        return self.own(ctx, order.to(torch.int32), DType.I32)

    @_guarded
    def _top_k(self, ctx: Placement, k: int) -> tuple[Self, Self]:
        x = self.native_on(ctx)
        values, order = _top_k(_ordered(x), k)
        values = values.to(x.dtype, copy=True, memory_format=torch.contiguous_format)
        return self.own(ctx, values, self.dtype), self.own(ctx, order.to(torch.int32), DType.I32)

    @_guarded
    def _rms_norm(self, ctx: Placement, weight: Self | None, eps: float) -> Self:
        x = self.native_on(ctx)
        scale = None if weight is None else weight.native_on(ctx)
        return self.own(ctx, functional.rms_norm(x, x.shape[-1:], scale, eps), self.dtype)

    @_guarded
    def _compare(self, ctx: Placement, op: str, other: Self) -> Self:
        return self.own(ctx, _COMPARE[op](self.native_on(ctx), other.native_on(ctx)), DType.BOOL)

    @_guarded
    def _where(self, ctx: Placement, a: Self, b: Self) -> Self:
        return self.own(ctx, torch.where(self.native_on(ctx), a.native_on(ctx), b.native_on(ctx)), a.dtype)

    # Helpers.

    def native_on(self, ctx: Placement) -> torch.Tensor:
        """The native tensor on the context's device; operands are moved if there are several devices."""
        return self.native.to(ctx.torch_device) if ctx.moves else self.native

    def _rows(self, indices: Any, device: torch.device) -> torch.Tensor:
        if isinstance(indices, TorchTensor):
            return indices.native.to(device)
        rows = torch.from_numpy(indices.copy())  # a copy: torch rejects read-only and reversed arrays
        return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """BOOL as numbers: torch has no maximum of BOOL, and CUDA does not sort it."""
    return x.to(torch.uint8) if x.dtype is torch.bool else x


def _top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's topk leaves the order of ties open; a stable sort is needed only if there are ties. This is not
    checked on a device, since that would wait for it.
    """
    if not x.is_cpu:
        values, order = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k], order[..., :k].contiguous()
    values, order = torch.topk(x, min(k + 1, x.shape[-1]), dim=-1)
    if bool((values[..., 1:] == values[..., :-1]).any()) or bool((values != values).any()):
        values, order = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], order[..., :k].contiguous()


_new = object.__new__
_NARROW = (DType.F16, DType.BF16)
_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}
_COMPARE: dict[str, Callable[..., torch.Tensor]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "relu": torch.relu,
    "abs": torch.abs,
    "round": torch.round,
}
