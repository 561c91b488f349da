"""The Tensor contract over a handful of underscored methods."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Any, Literal, NoReturn, Self, cast

import numpy as np

from ml.base.backend import BaseBackend
from ml.base.checks import as_host, check_matmul, element, flat, foreign, number, truth
from ml.dtypes import DType
from ml.errors import (
    BoundsError,
    DTypeError,
    ExportError,
    MLError,
    NotSupportedError,
    ReadOnlyError,
    ShapeError,
)
from ml.protocols import Indices, Tensor
from ml.strided import (
    Shape,
    broadcast_shapes,
    check_count,
    integers,
    normalize_axes,
    normalize_axis,
    overlaps_itself,
    reshape_strides,
    resolve_shape,
    slice_length,
    view_geometry,
)

COMPARISONS = {
    "eq": "eq", "==": "eq", "ne": "ne", "!=": "ne", "lt": "lt", "<": "lt", "le": "le", "<=": "le",
    "gt": "gt", ">": "gt", "ge": "ge", ">=": "ge",
}  # fmt: skip

_GELUS = ("none", "tanh")


def _is_one_of(name: object, names: Container[str]) -> bool:
    """Whether ``name`` is one of ``names``, for any object: it may be unhashable, or an array without a plain
    comparison.
    """
    return isinstance(name, str) and name in names


class BaseTensor(ABC):
    """The Tensor contract over a handful of underscored methods.

    A backend must implement ``_storage_size``, ``_first``, ``_alias``, ``write_from``, ``_gather`` and
    ``_scatter``; concat, repeat, cast and contiguous then work, and may be overridden with faster versions.

    Arguments of these methods have been checked: axes count from the front, tensors have this class and
    backend, and dtypes are supported by the operation. A returned tensor has new, C-contiguous storage that
    shares nothing with an argument, even if the operation changes nothing. Any size may be 0. Integers wrap.
    F16 and BF16 are computed in F32 and rounded once; infinities and NaN are values and cause no warnings.
    """

    __slots__ = ()

    dtype: DType
    backend: BaseBackend
    shape: Any  # tuple[int, ...]: a slot here, a property there
    strides: Any
    native: Any

    # To be implemented by a backend: storage.

    @abstractmethod
    def _storage_size(self) -> int:
        """The number of elements of the whole storage."""

    @abstractmethod
    def _first(self) -> int:
        """The offset of this tensor's first element in the storage, in elements."""

    @abstractmethod
    def _alias(self, offset: int, shape: Shape, strides: Shape) -> Self:
        """A view of the same storage at an absolute offset, in elements. It lies inside the storage, and may
        be empty.
        """

    @abstractmethod
    def write_from(self, src: Self) -> None:
        """Write ``src`` to the elements of this view, converted as by ``cast``.

        ``src`` has the same shape, any dtype and strides, and may overlap this view: the result must be as if
        it were read completely first. No two elements of this view share memory.
        """

    @abstractmethod
    def _gather(self, ctx: Any, indices: Any, axis: int) -> Self:
        """The slices at ``indices`` along ``axis``, in that order and of this dtype; indices may repeat.

        ``indices``: a NumPy intp array of one axis with values in ``[0, size)``, or an I32 tensor of one
        axis, whose range the caller guarantees.
        """

    @abstractmethod
    def _scatter(self, src: Self, indices: Any, axis: int) -> None:
        """Write slice i of ``src`` along ``axis`` to slice ``indices[i]`` of this view.

        ``indices`` as in ``_gather``, but distinct; ``src`` as in ``write_from``.
        """

    @abstractmethod
    def to_numpy(self) -> np.ndarray:
        """A host copy in C order of the current content: pending work is completed first.

        It must call ``self.backend.check("to_numpy")``, which raises after ``close``.
        """

    # To be implemented by a backend: compute.

    def _binary(self, ctx: Any, op: str, other: Self) -> Self:
        """``op``: add, sub, mul, or div (floats). This dtype, broadcast as in NumPy."""
        raise self._unsupported(op)

    def _unary(self, ctx: Any, op: str) -> Self:
        """``op``: exp log sqrt sin cos tanh sigmoid silu for floats; neg abs relu round also for integers.

        The result has this dtype. round rounds halves to even, silu(x) is x * sigmoid(x).
        """
        raise self._unsupported(op)

    def _scale(self, ctx: Any, x: float) -> Self:
        """Multiply by ``x``, which is an int within the range of an integer dtype; the result has this
        dtype.
        """
        raise self._unsupported("scale")

    def _gelu(self, ctx: Any, tanh: bool) -> Self:
        """x * Phi(x), with the error function, or ``tanh``, with its approximation. Floats; the result has
        this dtype.
        """
        raise self._unsupported("gelu")

    def _clamp(self, ctx: Any, lo: float | None, hi: float | None) -> Self:
        """Clamp to ``[lo, hi]``, which the dtype can represent; None means no bound; with two of them it
        copies.

        NaN stays NaN; the result has this dtype.
        """
        raise self._unsupported("clamp")

    def _matmul(self, ctx: Any, other: Self) -> Self:
        """As ``numpy.matmul``, for floats with at least one axis, accumulated in F32; the result has this
        dtype.
        """
        raise self._unsupported("matmul")

    def _softmax(self, ctx: Any, axis: int) -> Self:
        """exp(x - max) / sum along ``axis``, which may be empty; floats; the result has this dtype."""
        raise self._unsupported("softmax")

    def _reduce(self, ctx: Any, op: str, axis: int, keepdims: bool) -> Self:
        """``op``: sum, mean (floats), max, argmax along ``axis``, which may be empty only for a sum.

        The result has this dtype, except that a sum of integers or BOOL is I64, and argmax, the first
        maximum, is I32. The max with NaN is NaN; its argmax is unspecified. ``keepdims`` keeps the axis with
        size 1.
        """
        raise self._unsupported(op)

    def _argsort(self, ctx: Any, axis: int) -> Self:
        """I32 indices in ascending order along ``axis``: stable, NaN last."""
        raise self._unsupported("argsort")

    def _top_k(self, ctx: Any, k: int) -> tuple[Self, Self]:
        """The k largest of the last axis, 1 <= k <= its size, descending; ties are in index order.

        NaN comes before all numbers. Returns (values of this dtype, I32 indices).
        """
        raise self._unsupported("top_k")

    def _rms_norm(self, ctx: Any, weight: Self | None, eps: float) -> Self:
        """x / sqrt(mean(x * x) + eps) * weight along the last axis, in F32; floats; the result has this
        dtype.

        ``weight`` is of this dtype, (size of the last axis,), or None for 1.
        """
        raise self._unsupported("rms_norm")

    def _compare(self, ctx: Any, op: str, other: Self) -> Self:
        """``op``: eq ne lt le gt ge, on operands of one dtype, broadcast; BOOL. For NaN only ``ne`` is
        true.
        """
        raise self._unsupported("compare")

    def _where(self, ctx: Any, a: Self, b: Self) -> Self:
        """``a`` where this BOOL tensor is true, else ``b``; all three broadcast, of ``a``'s dtype."""
        raise self._unsupported("where")

    # Movement.

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.shape)) * self.dtype.itemsize

    def view(self, ctx: Any, offset: int, shape: Sequence[int], strides: Sequence[int] | None = None) -> Self:
        ctx.check("view")
        return self._alias(*view_geometry(self._storage_size(), self._first(), offset, shape, strides))

    def slice(self, ctx: Any, axis: int, start: int, stop: int, step: int = 1) -> Self:
        ctx.check("slice")
        shape, strides = self.shape, self.strides
        axis = self._axis("slice", axis)
        start, stop, step = integers("slice", start, stop, step)
        size = slice_length(shape[axis], axis, start, stop, step)
        stride = strides[axis]
        shown = (*shape[:axis], size, *shape[axis + 1 :])
        offset = self._first() + (0 if 0 in shown else start * stride)  # an empty view stays inside
        if size > 1:  # otherwise its stride does not matter
            stride *= step
        return self._alias(offset, shown, (*strides[:axis], stride, *strides[axis + 1 :]))

    def permute(self, ctx: Any, *axes: int) -> Self:
        ctx.check("permute")
        shape, strides = self.shape, self.strides
        order = normalize_axes("permute", flat(axes), len(shape))
        return self._alias(
            self._first(), tuple(shape[axis] for axis in order), tuple(strides[axis] for axis in order)
        )

    def reshape(self, ctx: Any, *shape: int) -> Self:
        ctx.check("reshape")
        target = resolve_shape("reshape", math.prod(self.shape), flat(shape))
        strides = reshape_strides(self.shape, self.strides, target)
        if strides is None:
            raise ShapeError(
                f"reshape: shape {self.shape} with strides {self.strides} cannot be viewed as {target} "
                "without a copy; call contiguous(ctx) first"
            )
        return self._alias(self._first(), target, strides)

    # New storage.

    def contiguous(self, ctx: Any) -> Self:
        ctx.check("contiguous", self)
        return self._cast(ctx, self.dtype)

    def cast(self, ctx: Any, dtype: DType) -> Self:
        ctx.check("cast", self)
        self.backend.check_dtype("cast", dtype)
        return self._cast(ctx, dtype)

    def _cast(self, ctx: Any, dtype: DType) -> Self:
        """A copy in ``dtype``, even if it is this tensor's, as for ``contiguous``."""
        result = cast("Self", ctx.empty(self.shape, dtype))
        result.write_from(self)
        return result

    def rows(self, ctx: Any, indices: Indices, axis: int = 0) -> Self:
        ctx.check("rows", self)
        axis = self._axis("rows", axis)
        return self._gather(ctx, self._indices("rows", indices, self.shape[axis]), axis)

    def concat(self, ctx: Any, other: Tensor, axis: int) -> Self:
        ctx.check("concat", self)
        axis = self._axis("concat", axis)
        peer = self._operand("concat", other)
        if len(peer.shape) != len(self.shape) or any(
            i != axis and a != b for i, (a, b) in enumerate(zip(self.shape, peer.shape, strict=True))
        ):
            raise ShapeError(f"concat: shapes {self.shape} and {peer.shape} differ outside axis {axis}")
        return self._concat(ctx, peer, axis)

    def _concat(self, ctx: Any, other: Self, axis: int) -> Self:
        """This tensor followed by ``other``, of the same dtype, along ``axis``; all other sizes are equal."""
        first, second = self.shape[axis], other.shape[axis]
        result = ctx.empty((*self.shape[:axis], first + second, *self.shape[axis + 1 :]), self.dtype)
        result.slice(ctx, axis, 0, first).write_from(self)
        result.slice(ctx, axis, first, first + second).write_from(other)
        return cast("Self", result)

    def repeat(self, ctx: Any, axis: int, n: int) -> Self:
        ctx.check("repeat", self)
        (count,) = integers("repeat", n)
        if count < 0:
            raise ShapeError(f"repeat: {n} times; the count must be at least 0")
        axis = self._axis("repeat", axis)
        check_count("repeat", (*self.shape, count))
        return self._repeat(ctx, axis, count)

    def _repeat(self, ctx: Any, axis: int, n: int) -> Self:
        """``n`` >= 0 copies, one after another, along ``axis``: 0..k-1, 0..k-1."""
        size = self.shape[axis]
        result = ctx.empty((*self.shape[:axis], size * n, *self.shape[axis + 1 :]), self.dtype)
        for i in range(n):
            result.slice(ctx, axis, i * size, (i + 1) * size).write_from(self)
        return cast("Self", result)

    # Writes.

    def copy(self, ctx: Any, dst: Tensor) -> Self:
        ctx.check("copy")
        target = self.check_peer("copy", dst)
        if target.shape != self.shape:
            raise ShapeError(
                f"copy: source {self.shape} to destination {target.shape}; the shapes must be equal"
            )
        target.check_writable("copy")
        target.write_from(self)
        return target

    def set_rows(self, ctx: Any, src: Tensor, indices: Indices, axis: int = 0) -> Self:
        ctx.check("set_rows")
        axis = self._axis("set_rows", axis)
        peer = self.check_peer("set_rows", src)
        rows = self._indices("set_rows", indices, self.shape[axis], distinct=True)
        wanted = (*self.shape[:axis], rows.shape[0], *self.shape[axis + 1 :])
        if peer.shape != wanted:
            raise ShapeError(f"set_rows: source {peer.shape} for {rows.shape[0]} rows; it must be {wanted}")
        self.check_writable("set_rows")
        self._scatter(peer, rows, axis)
        return self

    # Compute.

    def add(self, ctx: Any, other: Tensor) -> Self:
        return self._arithmetic(ctx, "add", other)

    def sub(self, ctx: Any, other: Tensor) -> Self:
        return self._arithmetic(ctx, "sub", other)

    def mul(self, ctx: Any, other: Tensor) -> Self:
        return self._arithmetic(ctx, "mul", other)

    def div(self, ctx: Any, other: Tensor) -> Self:
        ctx.check("div", self)
        self._need_float("div")
        return self._arithmetic(ctx, "div", other)

    def _arithmetic(self, ctx: Any, op: str, other: Tensor) -> Self:
        ctx.check(op, self)
        peer = self._operand(op, other)
        self._need_number(op)
        if self.shape != peer.shape:
            broadcast_shapes(op, self.shape, peer.shape)
        return self._binary(ctx, op, peer)

    def scale(self, ctx: Any, x: float) -> Self:
        ctx.check("scale", self)
        self._need_number("scale")
        factor = (
            float(number("scale", "x", x)) if self.dtype.is_float else element("scale", "x", x, self.dtype)
        )
        return self._scale(ctx, factor)

    def neg(self, ctx: Any) -> Self:
        return self._unary_number(ctx, "neg")

    def abs(self, ctx: Any) -> Self:
        return self._unary_number(ctx, "abs")

    def relu(self, ctx: Any) -> Self:
        return self._unary_number(ctx, "relu")

    def round(self, ctx: Any) -> Self:
        return self._unary_number(ctx, "round")

    def _unary_number(self, ctx: Any, op: str) -> Self:
        ctx.check(op, self)
        self._need_number(op)
        return self._unary(ctx, op)

    def exp(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "exp")

    def log(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "log")

    def sqrt(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "sqrt")

    def sin(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "sin")

    def cos(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "cos")

    def tanh(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "tanh")

    def sigmoid(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "sigmoid")

    def silu(self, ctx: Any) -> Self:
        return self._unary_float(ctx, "silu")

    def _unary_float(self, ctx: Any, op: str) -> Self:
        ctx.check(op, self)
        self._need_float(op)
        return self._unary(ctx, op)

    def gelu(self, ctx: Any, approximate: Literal["none", "tanh"] = "none") -> Self:
        ctx.check("gelu", self)
        self._need_float("gelu")
        if not _is_one_of(approximate, _GELUS):
            raise ShapeError(f'gelu: approximate={approximate!r}; it is "none" or "tanh"')
        return self._gelu(ctx, approximate == "tanh")

    def clamp(self, ctx: Any, lo: float | None, hi: float | None) -> Self:
        ctx.check("clamp", self)
        self._need_number("clamp")
        low = None if lo is None else element("clamp", "lo", lo, self.dtype)
        high = None if hi is None else element("clamp", "hi", hi, self.dtype)
        if low is not None and high is not None and low > high:
            raise ShapeError(f"clamp: lo {lo} > hi {hi}")
        return self._clamp(ctx, low, high)

    def matmul(self, ctx: Any, other: Tensor) -> Self:
        ctx.check("matmul", self)
        self._need_float("matmul")
        peer = self._operand("matmul", other)
        check_matmul(self.shape, peer.shape)
        return self._matmul(ctx, peer)

    def softmax(self, ctx: Any, axis: int = -1) -> Self:
        ctx.check("softmax", self)
        self._need_float("softmax")
        return self._softmax(ctx, self._axis("softmax", axis))

    def sum(self, ctx: Any, axis: int, keepdims: bool = False) -> Self:
        ctx.check("sum", self)
        return self._reduce(ctx, "sum", self._axis("sum", axis), truth("sum", "keepdims", keepdims))

    def mean(self, ctx: Any, axis: int, keepdims: bool = False) -> Self:
        ctx.check("mean", self)
        self._need_float("mean")
        return self._reduce(ctx, "mean", self._filled("mean", axis), truth("mean", "keepdims", keepdims))

    def max(self, ctx: Any, axis: int, keepdims: bool = False) -> Self:
        ctx.check("max", self)
        return self._reduce(ctx, "max", self._filled("max", axis), truth("max", "keepdims", keepdims))

    def argmax(self, ctx: Any, axis: int, keepdims: bool = False) -> Self:
        ctx.check("argmax", self)
        return self._reduce(
            ctx, "argmax", self._filled("argmax", axis), truth("argmax", "keepdims", keepdims)
        )

    def argsort(self, ctx: Any, axis: int = -1) -> Self:
        ctx.check("argsort", self)
        return self._argsort(ctx, self._axis("argsort", axis))

    def top_k(self, ctx: Any, k: int) -> tuple[Self, Self]:
        ctx.check("top_k", self)
        size = self.shape[self._axis("top_k", -1)]
        (count,) = integers("top_k", k)
        if not 1 <= count <= size:
            raise BoundsError(f"top_k: k={k} for a last axis of {size}; k must satisfy 1 <= k <= size")
        return self._top_k(ctx, count)

    def rms_norm(self, ctx: Any, weight: Tensor | None, eps: float) -> Self:
        ctx.check("rms_norm", self)
        self._need_float("rms_norm")
        size = self.shape[self._axis("rms_norm", -1)]
        eps = float(number("rms_norm", "eps", eps))
        if weight is None:
            return self._rms_norm(ctx, None, eps)
        peer = self._operand("rms_norm", weight)
        if peer.shape != (size,):
            raise ShapeError(f"rms_norm: weight {peer.shape} for a last axis of {size}")
        return self._rms_norm(ctx, peer, eps)

    def compare(self, ctx: Any, op: str, other: Tensor) -> Self:
        ctx.check("compare", self)
        if not _is_one_of(op, COMPARISONS):
            raise ShapeError(f"compare: op {op!r}; it must be one of {', '.join(COMPARISONS)}")
        peer = self._operand("compare", other)
        broadcast_shapes("compare", self.shape, peer.shape)
        return self._compare(ctx, COMPARISONS[op], peer)

    def where(self, ctx: Any, a: Tensor, b: Tensor) -> Self:
        ctx.check("where", self)
        if self.dtype is not DType.BOOL:
            raise DTypeError(f"where: the condition is {self.dtype!r}; it must be BOOL (see compare)")
        left = self.check_peer("where", a)
        right = self._operand("where", b, left.dtype)
        broadcast_shapes("where", self.shape, left.shape, right.shape)
        return self._where(ctx, left, right)

    # Interchange.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """A new array of the elements, as from ``to_numpy``: from a GPU this is a blocking download.

        Raises ExportError for ``copy=False``: tensors do not share their memory with NumPy this way; see
        ``native``.
        """
        if copy is False:
            raise ExportError("array: copy=False, but a tensor is always copied; omit copy")
        host = self.to_numpy()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        try:
            return self.native.__dlpack__(**options)
        except (AttributeError, AssertionError, BufferError, ValueError, RuntimeError) as error:
            raise self._not_exported(error) from error

    def __dlpack_device__(self) -> tuple[int, int]:
        try:
            return cast("tuple[int, int]", self.native.__dlpack_device__())
        except AttributeError as error:
            raise self._not_exported(error) from error

    def _not_exported(self, error: Exception) -> MLError:
        if isinstance(error, MLError):  # the backend is closed
            return error
        return ExportError(f"dlpack: not supported for {self.dtype!r} here ({error}); use to_numpy()")

    def __reduce__(self) -> NoReturn:
        raise NotSupportedError("pickle: a tensor belongs to an open backend; pickle to_numpy() instead")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.dtype.name} {self.shape} on {self.backend.name!r}>"

    # Checks.

    def check_peer(self, op: str, other: object) -> Self:
        """``other``, a tensor of this class and backend; else DeviceError or DTypeError."""
        if type(other) is not type(self) or other.backend is not self.backend:
            raise foreign(op, other, self.backend)
        return other

    def _operand(self, op: str, other: object, dtype: DType | None = None) -> Self:
        """``other`` as an operand of ``dtype`` (None: this tensor's)."""
        peer, wanted = self.check_peer(op, other), self.dtype if dtype is None else dtype
        if peer.dtype is not wanted:
            raise DTypeError(f"{op}: operands are {wanted!r} and {peer.dtype!r}; cast one of them")
        return peer

    def _need_float(self, op: str) -> None:
        if not self.dtype.is_float:
            raise DTypeError(f"{op}: takes F32, F16 or BF16, not {self.dtype!r}; cast it first")

    def _need_number(self, op: str) -> None:
        if self.dtype is DType.BOOL:
            raise DTypeError(f"{op}: takes numbers, not BOOL; cast it first")

    def _axis(self, op: str, axis: int) -> int:
        ndim = len(self.shape)
        if ndim == 0:
            raise ShapeError(f"{op}: a 0-d tensor has no axis {axis}")
        return normalize_axis(op, axis, ndim)

    def _filled(self, op: str, axis: int) -> int:
        normal = self._axis(op, axis)
        if self.shape[normal] == 0:
            raise ShapeError(f"{op}: axis {axis} is empty and has no {op}")
        return normal

    def _indices(self, op: str, indices: Indices, size: int, distinct: bool = False) -> Any:
        if isinstance(indices, BaseTensor):
            rows = self.check_peer(op, indices)
            if rows.dtype is not DType.I32 or len(rows.shape) != 1:
                raise DTypeError(
                    f"{op}: indices are {rows.dtype!r} {rows.shape}; they must be I32 with one axis"
                )
            return rows
        host = as_host(op, indices)
        if host.size == 0:
            host = host.reshape(-1).astype(np.intp)
        if host.ndim != 1 or host.dtype.kind not in "iu":
            raise ShapeError(
                f"{op}: indices are {host.dtype} {host.shape}; they must be integers with one axis"
            )
        if host.size and (host.min() < 0 or host.max() >= size):
            raise BoundsError(
                f"{op}: indices {host.min()}..{host.max()} outside [0, {size}); negative indices do not wrap"
            )
        if distinct and np.unique(host).size != host.size:
            raise ShapeError(f"{op}: an index occurs twice; the rows to write must be distinct")
        return host.astype(np.intp, copy=False)

    def check_writable(self, op: str) -> None:
        """Raise ReadOnlyError if this view cannot be written; backends may add their own reasons."""
        if overlaps_itself(self.shape, self.strides):
            raise ReadOnlyError(
                f"{op}: the destination {self.shape} with strides {self.strides} shows an element "
                "more than once and is read-only"
            )

    def _unsupported(self, op: str) -> NotSupportedError:
        return NotSupportedError(f"{op}: backend {self.backend.name!r} does not support it")
