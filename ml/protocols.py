"""The contract: Backend, Context and Tensor.

It mirrors Ollama's ``ml.Backend``, ``ml.Context`` and ``ml.Tensor`` (ml/backend.go), with axes in row-major
order as in NumPy, PyTorch, MLX and DLPack: Ollama's dimension n is axis -1-n here, with the same memory
layout. Strides and offsets count elements.

**Aliasing and order.** A Tensor is a strided view of a storage. A write through one view is visible in every
tensor on that storage, in program order, across all contexts of the backend, with or without ``forward``.
``forward`` and ``compute`` only determine *when* work happens; errors of lazy frameworks are raised by
``compute`` or ``to_numpy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np

from ml.devices import BackendMemory, DeviceInfo
from ml.dtypes import DType

__all__ = ["Backend", "Context", "Indices", "Tensor"]


@runtime_checkable
class Tensor(Protocol):
    """A strided view of a storage on a device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, outermost first; ``()`` for a scalar."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements between neighbours along each axis, >= 0.

        Unspecified for axes of size 1 and for empty tensors.
        """

    @property
    def dtype(self) -> DType: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, regardless of the size of the storage."""

    @property
    def native(self) -> Any:
        """The framework's own array. On mutable frameworks it aliases the storage.

        On functional frameworks (MLX, JAX) it is a snapshot: holding it across a write may cost one copy, and
        writing into it is undefined.
        """

    def to_numpy(self) -> np.ndarray:
        """A host copy, after pending work has completed. BF16 becomes ``ml_dtypes.bfloat16``."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """``np.asarray(tensor)``: the result of ``to_numpy``, as ``dtype``; it also waits for the device.

        Raises a ValueError for ``copy=False``: a tensor is always copied.
        """

    # Movement. These four alias and never copy.

    def view(
        self, ctx: Context, offset: int, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> Tensor:
        """Another view of the same storage.

        ``offset`` counts elements from this tensor's first one. The bounds are those of the storage, so a
        view may include elements that this tensor does not. ``strides`` None means C-contiguous; a stride of
        0 repeats an element and makes the view read-only.

        Raises BoundsError outside the storage, ShapeError for a negative size or stride.
        """

    def slice(self, ctx: Context, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Every ``step``-th position of ``[start, stop)`` on one axis; indices are neither wrapped nor
        clamped.

        Raises BoundsError unless ``0 <= start <= stop <= size``, ShapeError for ``step < 1``.
        """

    def permute(self, ctx: Context, *axes: int) -> Tensor:
        """``numpy.transpose``: axis ``i`` of the result is axis ``axes[i]`` of this one."""

    def reshape(self, ctx: Context, *shape: int) -> Tensor:
        """The same elements in the same order; one size may be -1.

        Raises ShapeError if it would need a copy: call ``contiguous`` first.
        """

    # These return new, C-contiguous storage.

    def contiguous(self, ctx: Context) -> Tensor: ...

    def cast(self, ctx: Context, dtype: DType) -> Tensor:
        """Converted values: narrower floats round to nearest even; float to integer truncates.

        A float outside the integer's range becomes an unspecified integer; NaN stays NaN.
        """

    def rows(self, ctx: Context, indices: Indices, axis: int = 0) -> Tensor:
        """The slices at ``indices`` along ``axis``, in that order; indices may repeat.

        A host sequence is checked (BoundsError outside ``[0, size)``); the caller guarantees the range of an
        I32 tensor.
        """

    def concat(self, ctx: Context, other: Tensor, axis: int) -> Tensor: ...

    def repeat(self, ctx: Context, axis: int, n: int) -> Tensor:
        """Tiled ``n`` times along ``axis``: 0..k-1, 0..k-1."""

    # These write, and return the destination.

    def copy(self, ctx: Context, dst: Tensor) -> Tensor:
        """Write this into ``dst`` of the same shape, converting as ``cast`` does; returns ``dst``.

        If the two overlap, the source is read first. Raises ReadOnlyError if elements of ``dst`` share
        memory.
        """

    def set_rows(self, ctx: Context, src: Tensor, indices: Indices, axis: int = 0) -> Tensor:
        """``self[..., indices[i], ...] = src[..., i, ...]`` along ``axis``; returns this tensor.

        ``indices`` as in ``rows``, and distinct.
        """

    # Compute. Binary operands share a dtype (else DTypeError) and broadcast as in NumPy; floats
    # keep their dtype and accumulate in F32 or better.

    def add(self, ctx: Context, other: Tensor) -> Tensor: ...
    def sub(self, ctx: Context, other: Tensor) -> Tensor: ...
    def mul(self, ctx: Context, other: Tensor) -> Tensor: ...
    def div(self, ctx: Context, other: Tensor) -> Tensor:
        """Quotient of floats; DTypeError for integers."""

    def scale(self, ctx: Context, x: float) -> Tensor:
        """Multiply by a number, which must be integral for integers."""

    def neg(self, ctx: Context) -> Tensor: ...
    def exp(self, ctx: Context) -> Tensor: ...
    def log(self, ctx: Context) -> Tensor: ...
    def sqrt(self, ctx: Context) -> Tensor: ...
    def sin(self, ctx: Context) -> Tensor: ...
    def cos(self, ctx: Context) -> Tensor: ...
    def tanh(self, ctx: Context) -> Tensor: ...
    def sigmoid(self, ctx: Context) -> Tensor: ...
    def silu(self, ctx: Context) -> Tensor:
        """``x * sigmoid(x)``; at -inf, whose limit is 0, a backend may return NaN."""

    def relu(self, ctx: Context) -> Tensor: ...
    def abs(self, ctx: Context) -> Tensor: ...
    def round(self, ctx: Context) -> Tensor:
        """Round to the nearest whole number, halves to even."""

    def gelu(self, ctx: Context, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        """``x * Phi(x)``, or its tanh approximation; at -inf, whose limit is 0, a backend may return NaN."""

    def clamp(self, ctx: Context, lo: float | None, hi: float | None) -> Tensor: ...

    def matmul(self, ctx: Context, other: Tensor) -> Tensor:
        """``numpy.matmul`` on floats: the last two axes multiply, those before broadcast."""

    def softmax(self, ctx: Context, axis: int = -1) -> Tensor: ...

    def sum(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor:
        """The sum; I64 for integers and BOOL."""

    def mean(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor:
        """The mean of floats; DTypeError for other dtypes."""

    def max(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor: ...

    def argmax(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor:
        """The I32 index of the first maximum."""

    def argsort(self, ctx: Context, axis: int = -1) -> Tensor:
        """I32 indices that sort ascending; equal values keep their order."""

    def top_k(self, ctx: Context, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` largest of the last axis, descending, and their I32 indices; ties are in index order."""

    def rms_norm(self, ctx: Context, weight: Tensor | None, eps: float) -> Tensor:
        """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis (Zhang & Sennrich, 2019)."""

    def compare(self, ctx: Context, op: str, other: Tensor) -> Tensor:
        """BOOL of ``self op other``; op is one of == != < <= > >= (or eq ne lt le gt ge)."""

    def where(self, ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """``a`` where this BOOL tensor is true, else ``b``; all three broadcast."""


Indices = Sequence[int] | np.ndarray | Tensor
"""A host sequence of integers, which is checked, or an I32 tensor of one axis, which the caller
guarantees.
"""


@runtime_checkable
class Context(Protocol):
    """Creates tensors and orders work. Tensors outlive it. A context manager."""

    @property
    def backend(self) -> Backend: ...

    @property
    def max_graph_nodes(self) -> int:
        """The number of operations that one ``compute`` is planned for; a hint for eager backends."""

    def empty(self, shape: Sequence[int], dtype: DType) -> Tensor:
        """New storage, whose content is unspecified until written."""

    def zeros(self, shape: Sequence[int], dtype: DType) -> Tensor: ...
    def full(self, shape: Sequence[int], value: float, dtype: DType) -> Tensor: ...

    def arange(self, start: float, stop: float, step: float, dtype: DType) -> Tensor:
        """``start + i * step`` for ``[start, stop)``, each computed individually and rounded once.

        The number of elements is exact, and NumPy scalars are used by value, not in their own dtype. Raises
        ShapeError for a step of 0 and if start, stop or step is not finite, DTypeError if an integer
        ``dtype`` cannot represent an element or the step.
        """

    def from_numpy(self, array: Any, dtype: DType | None = None) -> Tensor:
        """A copy of any array-like.

        Without ``dtype``, float64 and Python floats become the backend's default float (F32), and integers of
        unsupported widths become I64.
        """

    def from_native(self, array: Any) -> Tensor:
        """Wrap the framework's own array without copying. Raises DTypeError for an unsupported dtype."""

    def from_bytes(self, data: bytes | bytearray | memoryview, shape: Sequence[int], dtype: DType) -> Tensor:
        """A copy of little-endian elements in C order. Raises ShapeError if the length does not match."""

    def forward(self, *tensors: Tensor) -> Context:
        """Add tensors to the next ``compute``; returns this context."""

    def compute(self, *tensors: Tensor) -> None:
        """Evaluate the forwarded tensors and ``tensors``; errors of lazy frameworks are raised here."""

    def reserve(self) -> None:
        """Plan and allocate for the forwarded tensors without running anything; no effect on eager
        backends.
        """

    def input(self) -> Context:
        """A context whose tensors are placed where a model's inputs belong."""

    def layer(self, i: int) -> Context:
        """A context whose tensors are on the device of layer ``i``."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class Backend(Protocol):
    """One framework, opened on its devices. A context manager."""

    @property
    def name(self) -> str: ...

    @property
    def devices(self) -> tuple[DeviceInfo, ...]: ...

    def new_context(self, max_graph_nodes: int | None = None) -> Context: ...

    def memory(self) -> BackendMemory:
        """For each device, the bytes allocated by this backend, and free and total bytes if known."""

    def close(self) -> None:
        """Release the backend's resources; later operations raise ClosedError. ``native`` may still be
        available.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
