"""What a backend may tell of itself, and the optional protocols found with ``isinstance``."""

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
"""In place of a mask: row i of n queries sees the first ``history - n + i + 1`` keys
(bottom-right aligned, as MLX's "causal"; PyTorch's ``is_causal`` is top-left aligned)."""


class Layout(enum.StrEnum):
    """How a cache lays out K and V in memory; ``get`` shows the same axes either way."""

    HEAD_MAJOR = "head_major"
    """(kv_heads, cells, head_dim): what the attention of PyTorch and MLX reads fastest."""
    TOKEN_MAJOR = "token_major"
    """(cells, kv_heads, head_dim): what GGML reads, and what one write per token favours."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a backend wants of the tensors that a cache hands to attention.

    ``cache_padding``: the history that ``get`` returns and that ``attend`` hands to attention is rounded up
    to a multiple of it: masked cells, zero where nobody owns them. An encoder's output keeps its length.
    ``mask_batch_padding``: the mask's rows likewise (rows of -inf).
    ``permuted_v``: ``get`` gives values as (kv_heads, head_dim, history).
    ``elide_mask``: the mask may be None or ``CAUSAL`` where that says the same.
    ``fixed_context``: where above 0, passes have the same tensors again and again, for CUDA graphs and
    compilers of graphs (see kvcache.attention.fixed_shapes): a token reads the cells of its own sequence by a
    table of so many, or 2, 4, 8, ... times as many for longer histories.
    ``call_bytes``: how much of K and V is attended to in the time that one more call takes. ``attend`` reads
    runs and shared prefixes of fewer bytes together with others, even where that copies them, and quantized
    storage in blocks of a few times as many. The default suits a CPU.
    """

    cache_padding: int = 1
    mask_batch_padding: int = 1
    mask_dtype: DType = DType.F32
    permuted_v: bool = False
    layout: Layout | Literal["head_major", "token_major"] = Layout.HEAD_MAJOR
    elide_mask: bool = False
    fixed_context: int = 0
    call_bytes: int = 1 << 19

    def __post_init__(self) -> None:
        check(self, ShapeError, cache_padding=INTEGER, mask_batch_padding=INTEGER, call_bytes=INTEGER)
        check(self, ShapeError, fixed_context=INTEGER)
        check(self, ShapeError, permuted_v=TRUTH, elide_mask=TRUTH)
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
    """A backend that wants its caches arranged in its own way."""

    def cache_config(self) -> CacheConfig: ...


class KVStore(Protocol):
    """Writes and reads of runs of rows in two tensors at once: what a decoded token comes down to.

    Everything here can be said through ``slice`` and ``copy`` too, and is when a store declines:
    a store does the plain case with as few steps as its framework allows.
    """

    def write(self, ctx: Context, start: int, count: int, key: Tensor, value: Tensor) -> bool:
        """Rows ``[start, start + count)`` of both become ``key`` and ``value``, converted as by ``copy``.

        False, and nothing written, where this is not the plain case: other shapes, dtypes that are no floats,
        rows out of range, a tensor of elsewhere, a source in the memory that is written, a closed context.
        The caller then takes the general way, which does it or says what is wrong.
        """

    def read(self, ctx: Context, start: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Rows ``[start, start + count)`` of both as views; None in the cases of ``write``."""


@runtime_checkable
class KVRowStore(KVStore, Protocol):
    """A store that writes rows that lie apart, too: a decoded token of each of several sequences."""

    def write_rows(self, ctx: Context, rows: Tensor, key: Tensor, value: Tensor) -> bool:
        """As ``write``, of the rows that an I32 tensor (count,) names, as ``set_rows`` takes it."""


@runtime_checkable
class SupportsKVStorage(Protocol):
    """A backend with its own way into what a cache stores, and out of it.

    A storage format goes by its name. ``Q8_0``, ``Q4_0``: codes and scales, whose blocks are 32 values along
    the last axis. Codes are I8 (..., dim) for Q8_0; U8 (..., dim / 2) for Q4_0, where byte j of a block's 16
    has the code of value j in its low half and that of value j + 16 in its high half. Scales are F16
    (..., dim / 32). How both are found is GGML's quantize_row_q8_0_ref and quantize_row_q4_0_ref
    (ggml/src/ggml-quants.c). Values are ``code * scale`` of Q8_0, ``(code - 8) * scale`` of Q4_0.
    """

    def kv_store(
        self,
        key: Tensor | Sequence[Tensor],
        value: Tensor | Sequence[Tensor],
        formats: tuple[str, str] | None = None,
    ) -> KVStore | None:
        """A store over the two halves of a cache's layer, which it writes in one step.

        Without ``formats``, key and value are tensors (rows, ...) of this backend, strided as they may be.
        With them, they are the parts (rows, kv_heads, width) of storage formats of these names, for K and for
        V: the store takes floats, stores what ``quantize`` makes of them, bit for bit, and does not read.

        None where it would have nothing to offer for tensors like these.
        """

    def quantize(self, ctx: Context, x: Tensor, format: str) -> tuple[Tensor, ...] | None:
        """The parts (..., width) of floats x (..., dim), which divides into the format's blocks.

        None for a format that this backend leaves to the generic body.
        """

    def dequantize(self, ctx: Context, parts: Sequence[Tensor], format: str) -> Tensor | None:
        """The F32 values (..., dim) of parts that may be strided in any way; the result is contiguous.

        None for a format that this backend leaves to the generic body.
        """


@runtime_checkable
class SupportsHostMemory(Protocol):
    """A backend in host memory: arrays are read, and its tensors written, where they lie."""

    def borrow(self, ctx: Context, array: np.ndarray) -> Tensor:
        """A tensor over ``array``'s own memory, of its dtype and shape; a copy where that cannot be.

        Whoever borrows only reads it, and the array stays as it is for as long.
        """

    def overwrite(self, ctx: Context, tensor: Tensor) -> np.ndarray | None:
        """The tensor's own memory, to be written over: of its dtype and shape, strided as it is.

        What it holds until it is written is unspecified. Work on it that is pending is done first. Write
        at once, and let go of the array before the next operation of this backend: what is written later
        may be lost. None where the host cannot write there (a device's memory, a read-only tensor).
        """


class PageTransfer(Protocol):
    """Copies between a device and host memory, under way. Any thread may ask and wait."""

    def done(self) -> bool:
        """Whether nothing of it is left to do. The host does not wait; an error is left to ``wait``."""

    def wait(self) -> None:
        """Return when it is done; raises DeviceError where a copy failed. May be called again."""

    def join(self) -> None:
        """Have what this thread asks of the backend from now on happen after the copies.

        The host does not wait where the device can. Raises DeviceError where a copy is known to have failed.
        """


@runtime_checkable
class SupportsTransfers(Protocol):
    """A backend with a device of its own memory: copies to it have a price, and go on while it computes.

    What is said of pages gives None where there is nothing better than ``to_numpy`` and ``from_numpy`` (a
    tensor in host memory, say); the caller then goes by those: ``ml.transfer.page_out`` and ``page_in``.

    Copies begin after all that this thread asked of the backend before, and the device's other work does not
    wait for them. Until a transfer is done nobody writes what it reads, or touches what it writes, without
    ``join``; the backend keeps both in memory until then. ``close`` waits for all of them.
    """

    def upload(self, ctx: Context, arrays: Sequence[tuple[np.ndarray, DType]]) -> list[Tensor]:
        """``ctx.from_numpy`` of each, on the device of ``ctx``, in one transfer; not to be written.

        The arrays may change as soon as this returns.
        """

    def pinned_memory(self, nbytes: int) -> np.ndarray | None:
        """Page-locked host memory, uint8 (nbytes,), freed with the last array over it."""

    def page_out(
        self, ctx: Context, tensors: Sequence[Tensor]
    ) -> tuple[list[np.ndarray], PageTransfer] | None:
        """Begin to copy tensors, strided as they may be, to new C-contiguous page-locked arrays.

        The arrays hold the tensors' elements when the transfer is done. Raises DeviceError, and nothing is
        under way, where there is no memory for them.
        """

    def page_in(
        self, ctx: Context, arrays: Sequence[np.ndarray], tensors: Sequence[Tensor]
    ) -> PageTransfer | None:
        """Begin to write each array over the tensor beside it, of its shape and dtype.

        Arrays of ``pinned_memory`` and ``page_out`` go in one copy; others too, as fast as the driver
        takes them. They stay as they are until it is done.
        """


@runtime_checkable
class SupportsAttention(Protocol):
    """A backend with a fused attention; ``ml.nn.attention`` falls back to a generic body."""

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

        query (tokens, heads, head_dim), key (history, kv_heads, head_dim), value (history,
        kv_heads, v_dim), all of one float dtype, heads a multiple of kv_heads (grouped queries);
        mask (rows >= tokens, history), additive, of any float dtype (cast here, rows beyond tokens
        trimmed), CAUSAL or None; sinks (heads,): a logit per head that takes part in the softmax
        and is dropped. Returns (tokens, heads, v_dim). What does not fit is refused before it is
        read: ``ml.base.check_attention``.
        """


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention over ``batch`` segments with as many queries each, of buffers of K and V."""

    tokens: slice | Tensor
    """The queries, segment by segment; an I32 tensor where they do not follow one another."""
    batch: int
    length: int
    """How many rows of each segment are read."""
    start: int
    step: int
    """Segment i begins at row ``start + i * step``."""
    cells: Tensor | None
    """Or lies in these rows, I32 (batch * length,)."""
    mask: Tensor | CausalMask | None
    """(batch, rows >= queries, length), additive; CAUSAL (bottom-right aligned) or None: all see all."""


@runtime_checkable
class SupportsPartialAttention(Protocol):
    """A backend with a fused attention over part of the history, to be merged with that over other parts."""

    def partial_attention(
        self,
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | CausalMask | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attention of several batches at once, and what its weights were divided by.

        query (batch, tokens, heads, head_dim), key (batch, history, kv_heads, head_dim), value (batch,
        history, kv_heads, v_dim), all of one float dtype and strided as they may be; mask (batch or 1, rows
        >= tokens, history), additive, of any float dtype, CAUSAL (bottom-right aligned) or None.

        Returns the attention (batch, tokens, heads, v_dim) in that dtype, and F32 (batch, tokens, heads):
        the natural logarithm of the sum of exp(score) over the keys (log-sum-exp). Of a query that sees no
        key both are unspecified.
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
        """Attention of each query over what the calls that it is in read, at most one of each level.

        query (tokens, heads, head_dim), key (cells, kv_heads, head_dim) and value (cells, kv_heads, v_dim)
        are of one float dtype; key and value are whole buffers, strided as they may be; sinks (heads,) as in
        ``SupportsAttention``. Every query is in a call. Returns (tokens, heads, v_dim). That all are tensors
        of this backend and fit each other is for the caller to check, once for all layers.

        It says the same as ``partial_attention`` of each call, merged by ``ml.nn.merge_attention``. None
        where this backend has nothing better: the caller does that then.
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
        """Attention of each query over the rows of the buffers that ``plan`` gives it.

        query (tokens, heads, head_dim); key (cells, kv_heads, head_dim) and value (cells, kv_heads, v_dim)
        are whole buffers, strided as they may be; query, key and value are of one float dtype; sinks
        (heads,) as in ``SupportsAttention``. Rows that the plan does not name are not read: NaN there
        reaches no result. Returns (tokens, heads, v_dim).

        With ``formats``, key and value are the parts (cells, kv_heads, width) of storage formats of these
        names, for K and for V, as ``ml.SupportsKVStorage`` makes them; the query is of any float dtype,
        which is that of the result. Of K and V no more than a few blocks are there as floats at a time.

        None where the kernel does not do this: the device, the dtype, the formats, the sizes or so many
        segments. The caller then goes by partial attention, and asks again for these buffers only with fewer
        segments.
        """


class Group(Protocol):
    """Processes that compute one thing together, each a **rank** of ``size``; this is one rank's end.

    Every rank calls the same operations in the same order, with tensors of the same shape and dtype: the
    caller answers for that. Results are new storage, equal on all ranks bit for bit.

    ``timeout``: seconds that an operation waits for the other ranks. Where one has ended, or has not come
    by then, GroupError is raised, at the latest where the result is read (``to_numpy``); from then on
    every operation of the group raises it.
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
        """End the group of several ranks: this one has failed with ``error`` where the others count on it.

        They raise GroupError at once where the framework can tell them (NCCL cannot), and so does every later
        operation here. Else the next exchange of this rank would be paired with another of theirs.
        """

    def close(self) -> None:
        """Leave the group; what was computed stays. A second call does nothing."""


@runtime_checkable
class SupportsDistributed(Protocol):
    """A backend whose framework can join several processes, on one machine or more."""

    def distributed(self, timeout: float = 60.0) -> Group:
        """Join the ranks that a launcher has started; a group of this process alone without one.

        Which rank this is and where the others are is in the environment, as the framework's own launcher
        sets it; ``ml.distributed.local_ranks`` sets it likewise. One group at a time; it closes with
        the backend. Raises GroupError where the others do not come within ``timeout`` seconds, or the
        environment makes no sense.
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

        where (first, second) is ``(i, i + dim / 2)``, or ``(2 * i, 2 * i + 1)`` where ``spec.interleaved``.
        Dimensions from ``spec.dim`` on are copied. Computed in F32 and rounded once: new storage of x's
        shape and dtype.

        ``ml.nn.rope.rope_tables`` lays cosines and sines out as F32 (tokens, 1, dim). Entry d is that of
        dimension d, so that each angle is there twice, the sine with a minus for the ``first`` of a pair:
        the result is ``x * cos + swapped * sin``, where ``swapped`` has the two of each pair exchanged.

        None where the fused kernel does not do this spec: the generic body then runs.
        """


@runtime_checkable
class SupportsGroupedMatmul(Protocol):
    """A backend that multiplies rows by matrices of their own in one step, and asks no device for them."""

    def grouped_matmul(self, ctx: Context, x: Tensor, weight: Tensor, groups: Tensor) -> Tensor | None:
        """``x[i] @ weight[groups[i]]`` for each row i: (rows, out).

        x (rows, in) and weight (matrices, in, out) are of one float dtype and strided as they may be;
        groups I32 (rows,) is ascending, and may leave matrices out.

        None where the kernel does not do this: ``ml.nn.grouped_matmul`` then runs its generic body.
        """
