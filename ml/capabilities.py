"""Optional protocols of backends, which are detected with ``isinstance``."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

from ml.dtypes import DType
from ml.errors import DTypeError, ShapeError
from ml.records import INTEGER, TRUTH, check

if TYPE_CHECKING:
    import numpy as np

    from ml.nn.rope_spec import RopeSpec
    from ml.protocols import Context, Tensor
    from ml.ragged import RaggedPlan

__all__ = [
    "CAUSAL", "AttentionCall", "CacheConfig", "CausalMask", "Group", "KVRowStore", "KVStore", "Layout",
    "PageTransfer", "SupportsAttention", "SupportsCacheConfig", "SupportsDistributed",
    "SupportsGroupedMatmul", "SupportsHostMemory", "SupportsKVStorage", "SupportsPartialAttention",
    "SupportsRaggedAttention", "SupportsRope", "SupportsTransfers",
]  # fmt: skip


class CausalMask(enum.Enum):
    """The type of ``CAUSAL``."""

    CAUSAL = "causal"

    def __repr__(self) -> str:
        return "ml.CAUSAL"


CAUSAL: Final = CausalMask.CAUSAL
"""Used in place of a mask: row i of n queries sees the first ``history - n + i + 1`` keys (bottom-right
aligned, like MLX's "causal"; PyTorch's ``is_causal`` is top-left aligned).
"""


class Layout(enum.StrEnum):
    """How a cache lays out K and V in memory; ``get`` returns the same axes either way."""

    HEAD_MAJOR = "head_major"
    """(kv_heads, cells, head_dim): fastest for the attention of PyTorch and MLX."""
    TOKEN_MAJOR = "token_major"
    """(cells, kv_heads, head_dim): the layout of GGML, with one contiguous write per token."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How a backend prefers the tensors that a cache passes to attention.

    ``cache_padding``: the length of the history in ``get`` and ``attend`` is rounded up to a multiple of this
    with masked cells, which are zero if nobody owns them. An encoder's output keeps its length.
    ``mask_batch_padding``: the number of the mask's rows is rounded up likewise, with rows of -inf.
    ``permuted_v``: ``get`` returns values as (kv_heads, head_dim, history). ``elide_mask``: the mask may be
    None or ``CAUSAL`` if that is equivalent. ``fixed_context``: if above 0, passes use the same tensors again
    and again, for CUDA graphs and graph compilers (see kvcache.attention.fixed_shapes): a token reads its own
    sequence through a table of this many cells, or 2, 4, 8, ... times as many for longer histories.
    ``call_bytes``: how many bytes of K and V attention reads in the time of one additional call. ``attend``
    reads runs and shared prefixes of fewer bytes together with others, even if that copies them, and
    quantized storage in blocks of a few times as many bytes. The default suits a CPU.
    ``batch_invariant``: ``attend`` reads each sequence in one piece, wherever its cells lie, even if that
    copies them, so that the order of its sums does not depend on which sequences share part of it.

    >>> import ml
    >>> from kvcache import CausalCache
    >>> cache = CausalCache()
    >>> cache.set_config(ml.CacheConfig(layout=ml.Layout.TOKEN_MAJOR))       # before init
    """

    cache_padding: int = 1
    mask_batch_padding: int = 1
    mask_dtype: DType = DType.F32
    permuted_v: bool = False
    layout: Layout | Literal["head_major", "token_major"] = Layout.HEAD_MAJOR
    elide_mask: bool = False
    fixed_context: int = 0
    call_bytes: int = 1 << 19
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check(self, ShapeError, cache_padding=INTEGER, mask_batch_padding=INTEGER, call_bytes=INTEGER)
        check(self, ShapeError, fixed_context=INTEGER)
        check(self, ShapeError, permuted_v=TRUTH, elide_mask=TRUTH, batch_invariant=TRUTH)
        for name in ("cache_padding", "mask_batch_padding", "call_bytes"):
            if getattr(self, name) < 1:
                raise ShapeError(f"CacheConfig: {name}={getattr(self, name)}; it must be at least 1")
        if self.fixed_context < 0:
            raise ShapeError(f"CacheConfig: fixed_context={self.fixed_context}; it must be at least 0")
        if self.mask_dtype not in (DType.F32, DType.F16, DType.BF16):
            raise DTypeError(f"CacheConfig: mask_dtype={self.mask_dtype!r}; it must be F32, F16 or BF16")
        try:
            object.__setattr__(self, "layout", Layout(self.layout))
        except ValueError:
            names = " or ".join(Layout)
            raise ShapeError(f"CacheConfig: layout={self.layout!r}; it must be {names}") from None


@runtime_checkable
class SupportsCacheConfig(Protocol):
    """A backend that prefers a certain layout of its caches."""

    def cache_config(self) -> CacheConfig: ...


class KVStore(Protocol):
    """Writes and reads runs of rows in two tensors at once, as storing a decoded token requires.

    A store handles the plain case in as few steps as its framework allows. If it declines, the caller uses
    ``slice`` and ``copy``.
    """

    def write(self, ctx: Context, start: int, count: int, key: Tensor, value: Tensor) -> bool:
        """Write ``key`` and ``value`` to rows ``[start, start + count)``, converted as by ``copy``.

        Returns False, without writing, if this is not the plain case: other shapes, dtypes that are not
        floats, rows out of range, a tensor of another backend, a source that overlaps the destination, a
        closed context. The caller then takes the general path, which does the work or raises the error.
        """

    def read(self, ctx: Context, start: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Views of rows ``[start, start + count)`` of both; None in the cases where ``write`` returns
        False.
        """


@runtime_checkable
class KVRowStore(KVStore, Protocol):
    """A store that also writes scattered rows, as for one decoded token of each of several sequences."""

    def write_rows(self, ctx: Context, rows: Tensor, key: Tensor, value: Tensor) -> bool:
        """As ``write``, for the rows listed in an I32 tensor (count,), as in ``set_rows``."""


@runtime_checkable
class SupportsKVStorage(Protocol):
    """A backend that reads and writes a cache's storage in its own way.

    Storage formats are identified by name. ``Q8_0`` and ``Q4_0`` consist of codes and scales, for blocks of
    32 values along the last axis. Codes are I8 (..., dim) for Q8_0, and U8 (..., dim / 2) for Q4_0, where
    byte j of a block's 16 has the code of value j in its low half and that of value j + 16 in its high half.
    Scales are F16 (..., dim / 32). Both are computed as in GGML's quantize_row_q8_0_ref and
    quantize_row_q4_0_ref (ggml/src/ggml-quants.c). The values are ``code * scale`` for Q8_0, and ``(code - 8)
    * scale`` for Q4_0.
    """

    def kv_store(
        self,
        key: Tensor | Sequence[Tensor],
        value: Tensor | Sequence[Tensor],
        formats: tuple[str, str] | None = None,
    ) -> KVStore | None:
        """A store over the K and V of a layer, which it writes in one step.

        Without ``formats``, key and value are tensors (rows, ...) of this backend with any strides. With
        ``formats``, they are the parts (rows, kv_heads, width) of the storage formats with these names, for K
        and V: the store takes floats, stores exactly the bits that ``quantize`` computes, and does not read.

        None if the backend has no store for such tensors.
        """

    def quantize(self, ctx: Context, x: Tensor, format: str) -> tuple[Tensor, ...] | None:
        """The parts (..., width) of floats x (..., dim); dim is a multiple of the format's block size.

        None for a format that this backend leaves to the generic implementation.
        """

    def dequantize(self, ctx: Context, parts: Sequence[Tensor], format: str) -> Tensor | None:
        """The F32 values (..., dim) of parts with any strides; the result is contiguous.

        None for a format that this backend leaves to the generic implementation.
        """


@runtime_checkable
class SupportsHostMemory(Protocol):
    """A backend in host memory: arrays are read, and tensors written, in place."""

    def borrow(self, ctx: Context, array: np.ndarray) -> Tensor:
        """A tensor over ``array``'s own memory, of its dtype and shape; a copy if that is not possible.

        The borrower only reads it, and the array must not change meanwhile.
        """

    def overwrite(self, ctx: Context, tensor: Tensor) -> np.ndarray | None:
        """The tensor's own memory as an array of its dtype, shape and strides, to be overwritten.

        Its content is unspecified until written. Pending work on it is completed first. Write immediately,
        and release the array before the next operation of this backend: later writes may be lost. None if the
        host cannot write there (device memory, a read-only tensor).
        """


class PageTransfer(Protocol):
    """Copies between a device and host memory that are in progress. Thread-safe."""

    def done(self) -> bool:
        """Whether it has finished. Does not block; errors are raised by ``wait``."""

    def wait(self) -> None:
        """Return when it has finished. Raises DeviceError if a copy failed. May be called repeatedly."""

    def join(self) -> None:
        """Order all further work that this thread requests from the backend after the copies.

        The host does not block if the device can wait itself. Raises DeviceError if a copy is known to have
        failed.
        """


@runtime_checkable
class SupportsTransfers(Protocol):
    """A backend whose device has its own memory: copies to it are costly, and can overlap with computation.

    The page methods return None if there is nothing better than ``to_numpy`` and ``from_numpy`` (for a tensor
    in host memory, for example), which the caller then uses: see ``ml.transfer.page_out`` and ``page_in``.

    Copies begin after all earlier work that this thread requested from the backend, and the device's other
    work does not wait for them. Until a transfer has finished, its sources must not be written and its
    destinations must not be used without ``join``; the backend keeps both in memory until then. ``close``
    waits for all transfers.
    """

    def upload(self, ctx: Context, arrays: Sequence[tuple[np.ndarray, DType]]) -> list[Tensor]:
        """``ctx.from_numpy`` of each array on the device of ``ctx``, in one transfer; the tensors must not be
        written.

        The arrays may be changed as soon as this returns.
        """

    def pinned_memory(self, nbytes: int) -> np.ndarray | None:
        """Page-locked host memory, uint8 (nbytes,), freed with the last array that refers to it."""

    def page_out(
        self, ctx: Context, tensors: Sequence[Tensor]
    ) -> tuple[list[np.ndarray], PageTransfer] | None:
        """Begin to copy tensors of any strides to new C-contiguous page-locked arrays.

        The arrays contain the tensors' elements when the transfer has finished. Raises DeviceError, without
        starting a copy, if there is no memory for them.
        """

    def page_in(
        self, ctx: Context, arrays: Sequence[np.ndarray], tensors: Sequence[Tensor]
    ) -> PageTransfer | None:
        """Begin to copy each array to the tensor at the same index, of the same shape and dtype.

        Arrays from ``pinned_memory`` and ``page_out`` are copied directly; others as fast as the driver
        allows. They must not change until the transfer has finished.
        """


@runtime_checkable
class SupportsAttention(Protocol):
    """A backend with a fused attention; ``ml.nn.attention`` otherwise uses a generic implementation."""

    def attention(
        self,
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | CausalMask | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale * query @ key.T + mask) @ value, per head.

        query (tokens, heads, head_dim), key (history, kv_heads, head_dim), value (history, kv_heads, v_dim),
        all of one float dtype, heads a multiple of kv_heads (grouped queries); mask (rows >= tokens,
        history), additive, of any float dtype (cast here, rows beyond tokens trimmed), CAUSAL or None; sinks
        (heads,): a logit per head that takes part in the softmax and is dropped. Returns (tokens, heads,
        v_dim). Invalid operands are refused before anything is read: ``ml.base.check_attention``.
        """


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call over ``batch`` segments of buffers of K and V, with the same number of queries
    each.
    """

    tokens: slice | Tensor
    """The queries, segment by segment; an I32 tensor if they are not consecutive."""
    batch: int
    length: int
    """The number of rows of each segment."""
    start: int
    step: int
    """Segment i begins at row ``start + i * step``."""
    cells: Tensor | None
    """Alternatively the segments consist of these rows, I32 (batch * length,)."""
    mask: Tensor | CausalMask | None
    """(batch, rows >= queries, length), additive; CAUSAL (bottom-right aligned); or None: every query sees
    all rows.
    """


@runtime_checkable
class SupportsPartialAttention(Protocol):
    """A backend with a fused attention over part of the history, whose results can be merged."""

    def partial_attention(
        self,
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | CausalMask | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attention of several batches at once, with the log-sum-exp of its scores.

        query (batch, tokens, heads, head_dim), key (batch, history, kv_heads, head_dim), value (batch,
        history, kv_heads, v_dim), all of one float dtype and with any strides; mask (batch or 1, rows >=
        tokens, history), additive, of any float dtype, CAUSAL (bottom-right aligned) or None.

        Returns the attention (batch, tokens, heads, v_dim) in that dtype, and F32 (batch, tokens, heads): the
        natural logarithm of the sum of exp(score) over the keys (log-sum-exp). For a query that sees no key,
        both are unspecified.
        """

    def attention_calls(
        self,
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        levels: Sequence[Sequence[AttentionCall]],
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Attention of each query over the rows of all calls that contain it, at most one call per level.

        query (tokens, heads, head_dim), key (cells, kv_heads, head_dim) and value (cells, kv_heads, v_dim)
        are of one float dtype; key and value are whole buffers with any strides; sinks (heads,) as in
        ``SupportsAttention``. Every query is in a call. Returns (tokens, heads, v_dim). The caller checks,
        once for all layers, that all are matching tensors of this backend.

        The result equals ``partial_attention`` of each call, merged by ``ml.nn.merge_attention``. None if
        this backend has nothing better, so that the caller does that.
        """


@runtime_checkable
class SupportsRaggedAttention(Protocol):
    """A backend with one kernel for a whole batch of sequences of different lengths."""

    def ragged_attention(
        self,
        ctx: Context,
        query: Tensor,
        key: Tensor | Sequence[Tensor],
        value: Tensor | Sequence[Tensor],
        plan: RaggedPlan,
        scale: float,
        sinks: Tensor | None = None,
        formats: tuple[str, str] | None = None,
    ) -> Tensor | None:
        """Attention of each query over the rows of the buffers that ``plan`` assigns to it.

        query (tokens, heads, head_dim); key (cells, kv_heads, head_dim) and value (cells, kv_heads, v_dim)
        are whole buffers with any strides; query, key and value are of one float dtype; sinks (heads,) as in
        ``SupportsAttention``. Rows that are not in the plan are not read, so that NaN there affects no
        result. Returns (tokens, heads, v_dim).

        With ``formats``, key and value are the parts (cells, kv_heads, width) of storage formats of these
        names, for K and for V, as ``ml.SupportsKVStorage`` makes them; the query is of any float dtype, which
        is that of the result. Only a few blocks of K and V are decoded to floats at a time.

        None if the kernel does not support the device, the dtype, the formats, the sizes or the number of
        segments. The caller then uses partial attention, and tries again for these buffers only with fewer
        segments.

        It may set ``plan.again`` (``ml.RaggedPlan``), which the caller then uses for further layers.
        """


class Group(Protocol):
    """Processes that compute together, each a **rank** of ``size``; this object is one rank's view of them.

    Every rank must call the same operations in the same order, with tensors of the same shape and dtype; this
    is not checked. Results are new storage, equal on all ranks bit for bit.

    ``timeout``: seconds that an operation waits for the other ranks. If one has ended, or does not arrive in
    time, GroupError is raised, at the latest when the result is read (``to_numpy``), and by every later
    operation of the group.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def timeout(self) -> float: ...

    def all_reduce(self, ctx: Context, tensor: Tensor) -> Tensor:
        """The sum over all ranks, of F32, F16, BF16 (both added up in F32 and rounded once), I32 or I64.

        Raises DTypeError for another dtype.
        """

    def all_gather(self, ctx: Context, tensor: Tensor, axis: int = 0) -> Tensor:
        """All ranks' tensors side by side along ``axis``, in the order of ranks; any dtype.

        ``axis`` counts from the front, or from the back if negative. Raises ShapeError for a scalar.
        """

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def abandon(self, op: str, error: BaseException) -> None:
        """End a group of several ranks because this one failed with ``error`` while the others rely on it.

        The other ranks raise GroupError immediately if the framework can notify them (NCCL cannot), and so
        does every later operation here. Otherwise this rank's next exchange would be paired with a different
        one of theirs.
        """

    def close(self) -> None:
        """Leave the group; results remain valid. A second call has no effect."""


@runtime_checkable
class SupportsDistributed(Protocol):
    """A backend whose framework can join several processes, on one machine or more."""

    def distributed(self, timeout: float = 60.0) -> Group:
        """Join the ranks that a launcher has started; without a launcher, a group of this process alone.

        The environment, set by the framework's own launcher, specifies this rank and the addresses of the
        others. One group at a time; it closes with the backend. Raises GroupError if the other ranks do not
        join within ``timeout`` seconds, or if the environment is invalid.
        """


@runtime_checkable
class SupportsRope(Protocol):
    """A backend with a fused rotary embedding."""

    def rope(self, ctx: Context, x: Tensor, positions: Tensor, spec: RopeSpec) -> Tensor | None:
        """Rotate x (tokens, heads, head_dim), of any float dtype and strides, by positions I32 (tokens,).

        With ``f = spec.inverse_frequencies``, float64 (dim / 2,), pair i of token t turns by the angle
        ``a = positions[t] * f[i]``, in F32::

            out[first]  = (x[first] * cos(a) - x[second] * sin(a)) * spec.attention_factor
            out[second] = (x[second] * cos(a) + x[first] * sin(a)) * spec.attention_factor

        where (first, second) is ``(i, i + dim / 2)``, or ``(2 * i, 2 * i + 1)`` if ``spec.interleaved``.
        Dimensions from ``spec.dim`` on are copied. Computed in F32 and rounded once: new storage of x's
        shape and dtype.

        ``ml.nn.rope.rope_tables`` lays cosines and sines out as F32 (tokens, 1, dim). Entry d belongs to
        dimension d, so each angle occurs twice, and the sine for the ``first`` of a pair is negated: the
        result is ``x * cos + swapped * sin``, where ``swapped`` exchanges the two elements of each pair.

        None if the fused kernel does not support this spec: the generic implementation then runs.
        """


@runtime_checkable
class SupportsGroupedMatmul(Protocol):
    """A backend that multiplies each row by its own matrix in one step, without reading anything back from
    the device.
    """

    def grouped_matmul(self, ctx: Context, x: Tensor, weight: Tensor, groups: Tensor) -> Tensor | None:
        """``x[i] @ weight[groups[i]]`` for each row i: (rows, out).

        x (rows, in) and weight (matrices, in, out) are of one float dtype and have any strides; groups I32
        (rows,) is ascending, and may skip matrices.

        None if the kernel does not support this: ``ml.nn.grouped_matmul`` then runs its generic
        implementation.
        """
