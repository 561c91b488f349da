"""The contract: Backend, Context and Tensor.

It mirrors Ollama's ``ml.Backend``, ``ml.Context`` and ``ml.Tensor`` (ml/backend.go), with axes in
row-major order as NumPy, PyTorch, MLX and DLPack have them: Ollama's dimension n is axis -1-n
here, and the memory is the same. Strides and offsets count elements.

**Aliasing and order.** A Tensor is a strided view of a storage. A write through one view is seen
by every tensor on that storage, in program order, across all contexts of the backend, with or
without ``forward``. ``forward`` and ``compute`` only bound *when* work happens; an error that a
lazy framework raises late surfaces at ``compute`` or ``to_numpy``.
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
        """Bytes of the elements shown, whatever the storage holds."""

    @property
    def native(self) -> Any:
        """The framework's own array. On mutable frameworks it aliases the storage.

        On functional ones (MLX, JAX) it is a snapshot: holding it across a write may cost one
        copy, and writing into it is undefined.
        """

    def to_numpy(self) -> np.ndarray:
        """A host copy; computes what is pending. BF16 comes as ``ml_dtypes.bfloat16``."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """``np.asarray(tensor)``: what ``to_numpy`` returns, as ``dtype``; waits for a device as that does.

        Raises a ValueError for ``copy=False``: a tensor is always copied.
        """

    # Movement. These four alias and never copy.

    def view(
        self, ctx: Context, offset: int, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> Tensor:
        """Another view of the same storage.

        ``offset`` counts elements from this tensor's first one; the bounds are the storage's, so a
        view may reach what this tensor does not show. ``strides`` None means C-contiguous; a
        stride of 0 repeats an element and makes the view read-only.

        Raises BoundsError outside the storage, ShapeError for a negative size or stride.
        """

    def slice(self, ctx: Context, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Positions ``[start, stop)`` of one axis, every ``step``-th; nothing wraps or clamps.

        Raises BoundsError unless ``0 <= start <= stop <= size``, ShapeError for ``step < 1``.
        """

    def permute(self, ctx: Context, *axes: int) -> Tensor:
        """``numpy.transpose``: axis ``i`` of the result is axis ``axes[i]`` of this one."""

    def reshape(self, ctx: Context, *shape: int) -> Tensor:
        """The same elements in the same order; one size may be -1.

        Raises ShapeError where it would need a copy: call ``contiguous`` first.
        """

    # These return new, C-contiguous storage.

    def contiguous(self, ctx: Context) -> Tensor: ...

    def cast(self, ctx: Context, dtype: DType) -> Tensor:
        """Values converted: to a narrower float rounds to nearest even; float to integer truncates.

        A float outside the integer's range gives an unspecified integer; NaN stays some NaN.
        """

    def rows(self, ctx: Context, indices: Indices, axis: int = 0) -> Tensor:
        """The slices at ``indices`` along ``axis``, in that order; repeats allowed.

        A host sequence is checked (BoundsError outside ``[0, size)``); the caller answers for the
        range of an I32 tensor.
        """

    def concat(self, ctx: Context, other: Tensor, axis: int) -> Tensor: ...

    def repeat(self, ctx: Context, axis: int, n: int) -> Tensor:
        """Tiled ``n`` times along ``axis``: 0..k-1, 0..k-1."""

    # These write, and return the destination.

    def copy(self, ctx: Context, dst: Tensor) -> Tensor:
        """Write this into ``dst`` of the same shape, converting as ``cast`` does; returns ``dst``.

        Where the two overlap it acts as if the source were read first. Raises ReadOnlyError when
        elements of ``dst`` share memory.
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
        """Times a number; integers take an integral one only."""

    def neg(self, ctx: Context) -> Tensor: ...
    def exp(self, ctx: Context) -> Tensor: ...
    def log(self, ctx: Context) -> Tensor: ...
    def sqrt(self, ctx: Context) -> Tensor: ...
    def sin(self, ctx: Context) -> Tensor: ...
    def cos(self, ctx: Context) -> Tensor: ...
    def tanh(self, ctx: Context) -> Tensor: ...
    def sigmoid(self, ctx: Context) -> Tensor: ...
    def silu(self, ctx: Context) -> Tensor: ...
    def relu(self, ctx: Context) -> Tensor: ...
    def abs(self, ctx: Context) -> Tensor: ...
    def round(self, ctx: Context) -> Tensor:
        """To the nearest whole number, halves to even."""

    def gelu(self, ctx: Context, approximate: Literal["none", "tanh"] = "none") -> Tensor: ...
    def clamp(self, ctx: Context, lo: float | None, hi: float | None) -> Tensor: ...

    def matmul(self, ctx: Context, other: Tensor) -> Tensor:
        """``numpy.matmul`` on floats: the last two axes multiply, those before broadcast."""

    def softmax(self, ctx: Context, axis: int = -1) -> Tensor: ...

    def sum(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor:
        """Integers and BOOL give I64."""

    def mean(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor:
        """Of floats only; DTypeError otherwise."""

    def max(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor: ...

    def argmax(self, ctx: Context, axis: int, keepdims: bool = False) -> Tensor:
        """I32 index of the first largest."""

    def argsort(self, ctx: Context, axis: int = -1) -> Tensor:
        """I32 indices that sort ascending; equal values keep their order."""

    def top_k(self, ctx: Context, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` largest of the last axis, descending, and their I32 indices: equal ones in order."""

    def rms_norm(self, ctx: Context, weight: Tensor | None, eps: float) -> Tensor:
        """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis (Zhang & Sennrich, 2019)."""

    def compare(self, ctx: Context, op: str, other: Tensor) -> Tensor:
        """BOOL of ``self op other``; op is one of == != < <= > >= (or eq ne lt le gt ge)."""

    def where(self, ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        """``a`` where this BOOL tensor holds, else ``b``; all three broadcast."""


Indices = Sequence[int] | np.ndarray | Tensor
"""A host sequence of integers (checked), or an I32 tensor of one axis (the caller answers)."""


@runtime_checkable
class Context(Protocol):
    """Where tensors are made and work is ordered. Tensors outlive it. A context manager."""

    @property
    def backend(self) -> Backend: ...

    @property
    def max_graph_nodes(self) -> int:
        """How many operations one ``compute`` is planned for; a hint on eager backends."""

    def empty(self, shape: Sequence[int], dtype: DType) -> Tensor:
        """New storage whose contents are unspecified until written."""

    def zeros(self, shape: Sequence[int], dtype: DType) -> Tensor: ...
    def full(self, shape: Sequence[int], value: float, dtype: DType) -> Tensor: ...

    def arange(self, start: float, stop: float, step: float, dtype: DType) -> Tensor:
        """``start + i * step`` for ``[start, stop)``, each computed by itself and rounded once.

        How many there are is counted exactly, and numbers of NumPy are taken for what they are, not in their
        own dtype. Raises ShapeError for a step of 0 and where start, stop or step is not finite, DTypeError
        where an integer ``dtype`` does not hold an element or the step.
        """

    def from_numpy(self, array: Any, dtype: DType | None = None) -> Tensor:
        """A copy of any array-like.

        With no ``dtype``, float64 and Python floats become the backend's default float (F32), and
        integers of a width that DType lacks become I64.
        """

    def from_native(self, array: Any) -> Tensor:
        """Wrap the framework's own array without copying; DTypeError for a dtype outside DType."""

    def from_bytes(self, data: bytes | bytearray | memoryview, shape: Sequence[int], dtype: DType) -> Tensor:
        """A copy of little-endian elements in C order; ShapeError when the length differs."""

    def forward(self, *tensors: Tensor) -> Context:
        """Add tensors to what the next ``compute`` evaluates; returns this context."""

    def compute(self, *tensors: Tensor) -> None:
        """Evaluate what was forwarded, and ``tensors``; late errors of lazy frameworks surface."""

    def reserve(self) -> None:
        """Plan and allocate for what was forwarded, without running it; a no-op when eager."""

    def input(self) -> Context:
        """A context whose tensors lie where a model's inputs belong."""

    def layer(self, i: int) -> Context:
        """A context whose tensors lie on the device of layer ``i``."""

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
        """Per device: bytes allocated by this backend, free and total where known."""

    def close(self) -> None:
        """Release what the backend holds; later operations raise ClosedError. ``native`` may still be had."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
