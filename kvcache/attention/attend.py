"""Attention over stored K and V for a whole batch; each stored byte is read once, however many sequences
share it.

The plan of the pass is lowered to whichever of these the backend offers:

===========================================================  ==============================================
``ragged_attention`` of ``ml.SupportsRaggedAttention``  a kernel for the whole batch
``attention_calls`` of ``ml.SupportsPartialAttention``  all calls, and their merging, in one step
``ml.SupportsAttention``                                calls whose results need no merging
``partial_attention``, or the generic body                   calls of parts, merged here
===========================================================  ==============================================

Calls read runs of cells, gathered cells, the tables of fixed shapes, or rows that the model has selected for
each query, such as an indexer's top-k (DeepSeek sparse attention: DeepSeek-AI, "DeepSeek-V3.2", 2025).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ml
from kvcache.attention.batch import check_tensors
from kvcache.attention.calls import BLOCK_CALLS
from kvcache.attention.plan import ReadPlan, worth
from kvcache.cache import InvalidRangeError
from kvcache.storage.device_copies import device_of
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.quantized import QuantizedBuffer
from ml import nn

KERNEL_WORTH = 32
"""The fewest cells of a run, or of a shared range, that become a segment of their own for a ragged kernel."""
BLOCK = 1 << 25
"""About how many bytes of K and V are gathered at a time when queries select rows: prompts are split into
blocks.
"""
MANY = 16
"""From this many queries per segment, blocks are eight times larger, because merging would dominate."""
LEAST = 32
"""The fewest cells of a block."""
PARTS = 16
"""The number of blocks whose results are merged in one step."""
HIDDEN, HIDDEN_F16 = -1e30, -65504.0
"""The values of hidden cells in masks. Not -inf, because a query may see nothing of a block, whose weight is
then exp(HIDDEN) = 0.

Backends convert masks to the query's dtype; only the second value is finite in F16.
"""

Levels = Sequence[Sequence[ml.AttentionCall]]


def attend(
    ctx: ml.Context,
    plan: ReadPlan,
    kernels: Kernels,
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
    select: ml.Tensor | None = None,
) -> ml.Tensor:
    """query (tokens, heads, head_dim) -> (tokens, heads, v_dim); ``select`` (tokens, k) are rows of
    ``get``.
    """
    wanted, turned = query.dtype, buffers.rotated
    if turned is not None:
        assert isinstance(buffers.key, QuantizedBuffer)
        query = buffers.key.turn(ctx, query)
    stored = buffers if turned is None else turned
    if query.dtype is not stored.read_dtype:
        query = query.cast(ctx, stored.read_dtype)
    result = None
    if select is None and plan.fixed is None:
        result = kernels.attend(ctx, plan, stored, query, scale, sinks)
    if result is None:
        block = BLOCK_CALLS * plan.config.call_bytes
        levels: Levels
        if select is None:
            levels = plan.calls(ctx, worth(plan.config, stored.bytes_per_cell))
        else:
            levels = _selected(ctx, plan, stored, select)
        result = kernels.attend_calls(ctx, levels, stored, query, scale, sinks)
        if result is None:
            result = _by_calls(ctx, levels, stored, query, scale, sinks, block)
        elif select is None:
            kernels.bind(ctx, plan, stored, query, kernels.backend.attention_calls, levels)
    if result.dtype is not wanted:
        result = result.cast(ctx, wanted)
    if turned is not None:
        assert isinstance(buffers.value, QuantizedBuffer)
        result = _cut(ctx, buffers.value.turn(ctx, result), buffers.value.dim)
    return result


class Bound:
    """How one layer of a pass attended in one step of the backend, for reuse by further layers of plain
    storage.
    """

    __slots__ = ("_again", "_attend", "_backend", "_ctx", "_dtype", "_key", "_kind", "_lowered", "_shape")

    def __init__(
        self, ctx: ml.Context, query: ml.Tensor, buffers: LayerBuffers, attend: Callable[..., Any],
        lowered: Any,
    ) -> None:  # fmt: skip
        """``attend(ctx, query, key, value, lowered, scale, sinks)`` is the backend's."""
        self._again = getattr(lowered, "again", None)
        self._ctx, self._attend, self._lowered = ctx, attend, lowered
        self._kind: Any = type(query)
        self._backend = getattr(query, "backend", None)
        self._shape, self._dtype, self._key = query.shape, query.dtype, buffers.shape.key

    def __call__(self, buffers: LayerBuffers, query: Any, scale: float) -> ml.Tensor | None:
        """The layer's attention; None if the call differs from the bound one, so that ``attend`` must be
        used.
        """
        result: ml.Tensor | None
        if self._again is not None:  # compares the tensors itself
            (keys,), (values,) = buffers.whole
            result = self._again(self._ctx, query, keys, values, scale)
            return result
        if (
            type(query) is not self._kind
            or query.backend is not self._backend
            or query.dtype is not self._dtype
            or query.shape != self._shape
            or buffers.shape.key != self._key
            or buffers.read_dtype is not self._dtype
        ):
            return None
        (keys,), (values,) = buffers.whole
        result = self._attend(self._ctx, query, keys, values, self._lowered, scale, None)
        return result


class Kernels:
    """A backend's kernels for a whole batch, and what they have declined, by a layer's shapes and device."""

    def __init__(self, backend: ml.Backend) -> None:
        self.backend: Any = backend
        self._one_device = len(backend.devices) == 1
        self._declined: dict[tuple[object, ...], int] = {}
        """The fewest segments that were declined; 0: there is no kernel."""

    def attend(
        self, ctx: ml.Context, plan: ReadPlan, buffers: LayerBuffers, query: ml.Tensor, scale: float,
        sinks: ml.Tensor | None,
    ) -> ml.Tensor | None:  # fmt: skip
        """Attention by the kernel; None if it declines, or has declined a plan with as few segments."""
        backend, asked = self.backend, (buffers.shape, query.shape[1], device_of(ctx))
        declined = self._declined.get(asked, sys.maxsize)
        if len(plan.groups) >= declined:  # usually each has a segment of its own
            return None
        if not nn.offers(backend, ml.SupportsRaggedAttention):
            self._declined[asked] = 0
            return None
        lowered = plan.kernel(worth(plan.config, buffers.bytes_per_cell, KERNEL_WORTH))
        if len(lowered.segments) >= declined:
            return None
        result: ml.Tensor | None
        if buffers.is_quantized:
            parts, formats = buffers.whole, buffers.formats
            result = backend.ragged_attention(ctx, query, *parts, lowered, scale, sinks, formats)
        else:
            (keys,), (values,) = buffers.whole
            result = backend.ragged_attention(ctx, query, keys, values, lowered, scale, sinks)
        if result is None:
            self._declined[asked] = len(lowered.segments)
            return None
        if not buffers.is_quantized:
            self.bind(ctx, plan, buffers, query, backend.ragged_attention, lowered)
        return _cut(ctx, result, buffers.value.dim)

    def attend_calls(
        self, ctx: ml.Context, levels: Levels, buffers: LayerBuffers, query: ml.Tensor, scale: float,
        sinks: ml.Tensor | None,
    ) -> ml.Tensor | None:  # fmt: skip
        """All calls in one step of the backend; None if it has no such step for this storage."""
        if buffers.is_quantized or not nn.offers(self.backend, ml.SupportsPartialAttention):
            return None
        (keys,), (values,) = buffers.whole
        result: ml.Tensor | None = self.backend.attention_calls(
            ctx, query, keys, values, levels, scale, sinks
        )
        return result

    def bind(
        self, ctx: ml.Context, plan: ReadPlan, buffers: LayerBuffers, query: ml.Tensor,
        attend: Callable[..., Any], lowered: Any,
    ) -> None:  # fmt: skip
        """Let further layers that attend in ``ctx`` reuse this, if all of them lie on one device."""
        if self._one_device:
            plan.bound_to, plan.bound = ctx, Bound(ctx, query, buffers, attend, lowered)


def _by_calls(
    ctx: ml.Context,
    levels: Levels,
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
    block: int,
) -> ml.Tensor:
    """``block``: how many bytes of K and V are dequantized at a time."""
    tokens = query.shape[0]
    if len(levels) == 1:
        (calls,) = levels
        outputs = [_whole(ctx, buffers, query, call, scale, sinks, block) for call in calls]
        return _in_order(ctx, calls, outputs, tokens, 0.0)
    parts = []
    for calls in levels:
        each = [_part(ctx, buffers, _queries(ctx, query, call), call, scale, block) for call in calls]
        out = _in_order(ctx, calls, [part[0] for part in each], tokens, 0.0)
        parts.append((out, _in_order(ctx, calls, [part[1] for part in each], tokens, -np.inf)))
    return nn.merge_attention(ctx, parts, sinks)


def _queries(ctx: ml.Context, query: ml.Tensor, call: ml.AttentionCall) -> ml.Tensor:
    """The queries of one call, out of (tokens, heads, head_dim), segment by segment."""
    tokens = call.tokens
    if not isinstance(tokens, slice):
        return query.rows(ctx, tokens)
    if tokens.stop - tokens.start == query.shape[0]:
        return query
    return query.slice(ctx, 0, tokens.start, tokens.stop).contiguous(ctx)


def _in_order(
    ctx: ml.Context,
    calls: Sequence[ml.AttentionCall],
    outputs: Sequence[ml.Tensor],
    tokens: int,
    missing: float,
) -> ml.Tensor:
    """The outputs of all calls in the order of the batch; ``missing`` for tokens that are in no call."""
    if len(calls) == 1 and outputs[0].shape[0] == tokens and isinstance(calls[0].tokens, slice):
        return outputs[0]
    result = ctx.full((tokens, *outputs[0].shape[1:]), missing, outputs[0].dtype)
    for call, own in zip(calls, outputs, strict=True):
        if isinstance(call.tokens, slice):
            own.copy(ctx, result.slice(ctx, 0, call.tokens.start, call.tokens.stop))
        else:
            result.set_rows(ctx, own, call.tokens)
    return result


def _whole(
    ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, call: ml.AttentionCall, scale: float,
    sinks: ml.Tensor | None, block: int,
) -> ml.Tensor:  # fmt: skip
    """Attention of a call that covers everything its queries see; (queries, heads, v_dim)."""
    own, mask = _queries(ctx, query, call), call.mask
    if call.batch > 1 or buffers.is_quantized:
        return nn.merge_attention(ctx, [_part(ctx, buffers, own, call, scale, block)], sinks)
    if mask is not None and mask is not ml.CAUSAL:
        mask = mask.reshape(ctx, *mask.shape[1:])
    key, value = buffers.read(ctx, call.start if call.cells is None else call.cells, call.length)
    return nn.attention(ctx, own, key, value, mask, scale, sinks)


def _part(
    ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, call: ml.AttentionCall, scale: float, block: int
) -> nn.Part:
    """Attention over the cells of one call: (queries, heads, v_dim), and its log-sum-exp."""
    if buffers.is_quantized:
        return attend_quantized(ctx, buffers, query, call, scale, block)
    count, heads, size = query.shape
    stacked = query.reshape(ctx, call.batch, count // call.batch, heads, size)
    if call.cells is None:
        key, value = buffers.read_batch(ctx, call.start, call.step, call.batch, call.length)
    else:
        key, value = buffers.gather_batch(ctx, call.cells, call.batch, call.length)
    return _flat(ctx, nn.partial_attention(ctx, stacked, key, value, call.mask, scale))


def _cut(ctx: ml.Context, output: ml.Tensor, dim: int) -> ml.Tensor:
    """The first ``dim`` numbers of each head. If the keys contain the values, the rest belongs to the key."""
    return output if output.shape[2] == dim else output.slice(ctx, 2, 0, dim)


# Selected rows.


def check_select(tokens: int, select: ml.Tensor) -> None:
    """Raise unless ``select`` is I32 (tokens, k)."""
    check_tensors("attend", select=select)
    if select.dtype is not ml.DType.I32:
        raise ml.DTypeError(f"attend: select in {select.dtype.name}; it must be I32")
    shape = select.shape
    if len(shape) != 2 or shape[0] != tokens or not shape[1]:
        raise InvalidRangeError(
            f"attend: select {shape} for a batch of {tokens} tokens; it must be (tokens, k) with k at least 1"
        )


def _selected(ctx: ml.Context, plan: ReadPlan, buffers: LayerBuffers, select: ml.Tensor) -> Levels:
    """Calls that gather the rows selected by each query.

    Only those are read. If the rows that each query sees form a range, no mask over the history is made.
    """
    rows, mask = _seen(ctx, plan, select)
    (tokens, k), where = select.shape, plan.rows(ctx).cells(ctx)
    cells = rows.reshape(ctx, tokens * k)
    if not isinstance(where, int):
        cells = where.rows(ctx, cells)
    elif where:
        cells = cells.add(ctx, ctx.full((1,), where, ml.DType.I32))
    size = max(1, BLOCK // (k * buffers.bytes_per_cell))
    calls = []
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        shown = mask.slice(ctx, 0, start, stop).reshape(ctx, stop - start, 1, k)
        chosen = cells.slice(ctx, 0, start * k, stop * k)
        calls.append(ml.AttentionCall(slice(start, stop), stop - start, k, 0, 0, chosen, shown))
    return [calls]


def _seen(ctx: ml.Context, plan: ReadPlan, select: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
    """The rows, and a mask F32 (tokens, k) of 0 and HIDDEN; hidden rows are replaced by one that the query
    sees.

    This way no cell of another sequence is read, whatever it contains.
    """
    first, stop = plan.seen_rows(ctx)
    zero, hidden = ctx.zeros((1,), ml.DType.F32), ctx.full((1,), HIDDEN, ml.DType.F32)
    low, mask = first, None
    if stop is None:
        history, mask = plan.shared(ctx)
        low, stop = (ctx.full((1,), bound, ml.DType.I32) for bound in (0, history.length))
    none = ctx.full((1,), -1, ml.DType.I32)
    rows = select.compare(ctx, "<", stop).where(ctx, select, none)
    seen = rows.compare(ctx, ">=", low)
    rows = seen.where(ctx, rows, first)
    if mask is not None:
        assert not isinstance(mask, ml.CausalMask), "that of a run"
        seen = seen.where(ctx, _shown(ctx, mask, rows), hidden).compare(ctx, "==", zero)
        rows = seen.where(ctx, rows, first)
    return rows, seen.where(ctx, zero, hidden)


def _shown(ctx: ml.Context, mask: ml.Tensor, rows: ml.Tensor) -> ml.Tensor:
    """F32 (tokens, k): the elements of mask (tokens or more, history) at each query's rows."""
    (tokens, k), history = rows.shape, mask.shape[1]
    lines = ctx.arange(0, tokens * history, history, ml.DType.I32).reshape(ctx, tokens, 1)
    at = rows.add(ctx, lines).reshape(ctx, tokens * k)
    flat = mask.contiguous(ctx).reshape(ctx, mask.shape[0] * history)
    return flat.rows(ctx, at).reshape(ctx, tokens, k).cast(ctx, ml.DType.F32)


# Quantized storage, dequantized block by block.


def attend_quantized(
    ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, call: ml.AttentionCall, scale: float, size: int
) -> nn.Part:
    """Attention over the cells of ``call``, and its log-sum-exp, for its queries (batch * tokens, heads,
    dim).

    A block is ``size`` bytes of dequantized K and V, eight times as many for long prompts.
    """
    return _Blocks(ctx, buffers, query, call, scale, size).attend()


class _Blocks:
    """Evaluates one call in blocks: some of its segments, and some of their cells, at a time."""

    def __init__(
        self, ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, call: ml.AttentionCall, scale: float,
        size: int,
    ) -> None:  # fmt: skip
        self.ctx, self.buffers, self.call, self.scale = ctx, buffers, call, scale
        self.query = query
        self.each = query.shape[0] // call.batch
        room = size * (8 if self.each >= MANY else 1) // buffers.bytes_per_cell
        self.cells = max(LEAST, room // LEAST * LEAST)
        """Of a block."""
        result = 4 * query.shape[0] * query.shape[1] * buffers.value.dim
        self.most = min(PARTS, max(2, size // result))
        """How many blocks' results exist at a time."""

    def attend(self) -> nn.Part:
        ctx, batch, length = self.ctx, self.call.batch, self.call.length
        count, heads, _ = self.query.shape
        several = max(1, self.cells // length)
        if several >= batch:
            return _flat(ctx, self._segments(0, batch))
        out = ctx.empty((count, heads, self.buffers.value.dim), self.query.dtype)
        lse = ctx.empty((count, heads), ml.DType.F32)
        for first in range(0, batch, several):
            last = min(first + several, batch)
            part = _flat(ctx, self._segments(first, last))
            for own, whole in zip(part, (out, lse), strict=True):
                own.copy(ctx, whole.slice(ctx, 0, first * self.each, last * self.each))
        return out, lse

    def _segments(self, first: int, last: int) -> nn.Part:
        """Segments ``[first, last)``: (segments, tokens, heads, v_dim), (segments, tokens, heads)."""
        ctx, each, mask = self.ctx, self.each, self.call.mask
        query = self.query.slice(ctx, 0, first * each, last * each)
        query = query.contiguous(ctx).reshape(ctx, last - first, each, *query.shape[1:])
        if mask is not None and not isinstance(mask, ml.CausalMask) and mask.shape[0] > 1:
            mask = mask.slice(ctx, 0, first, last)
        if not isinstance(mask, ml.CausalMask) or each <= self.cells:
            return self._queries(query, first, mask, self.call.length)
        parts = []
        for start in range(0, each, self.cells):  # so that the square at the end is no larger than a block
            stop = min(start + self.cells, each)
            some = query.slice(ctx, 1, start, stop)
            parts.append(self._queries(some, first, mask, self.call.length - each + stop))
        return functools.reduce(functools.partial(_joined, ctx), parts)

    def _queries(
        self, query: ml.Tensor, first: int, mask: ml.Tensor | ml.CausalMask | None, length: int
    ) -> nn.Part:
        """Queries (segments, tokens, heads, head_dim) over the first ``length`` cells of their segments."""
        causal = isinstance(mask, ml.CausalMask)
        square = query.shape[1] if causal and query.shape[1] > 1 else 0
        free = length - square
        blocks = [(start, min(start + self.cells, free)) for start in range(0, free, self.cells)]
        parts: list[nn.Part] = []
        for block in [*blocks, (free, length)] if square else blocks:
            if len(parts) == self.most:
                parts = [nn.merge_parts(self.ctx, parts)]
            parts.append(self._block(query, first, block, None if causal and block[1] <= free else mask))
        return nn.merge_parts(self.ctx, parts)

    def _block(
        self, query: ml.Tensor, first: int, cells: tuple[int, int], mask: ml.Tensor | ml.CausalMask | None
    ) -> nn.Part:
        ctx, call, (start, stop), segments = self.ctx, self.call, cells, query.shape[0]
        if call.cells is None:
            begin = call.start + first * call.step + start
            key, value = self.buffers.read_batch(ctx, begin, call.step, segments, stop - start)
        else:
            shape = segments, stop - start
            listed = call.cells.view(ctx, first * call.length + start, shape, (call.length, 1))
            listed = listed.contiguous(ctx).reshape(ctx, segments * (stop - start))
            key, value = self.buffers.gather_batch(ctx, listed, *shape)
        if mask is not None and not isinstance(mask, ml.CausalMask):
            hidden = HIDDEN_F16 if query.dtype is ml.DType.F16 else HIDDEN
            mask = mask.slice(ctx, 2, start, stop).cast(ctx, ml.DType.F32).clamp(ctx, hidden, None)
        return nn.partial_attention(ctx, query, key, value, mask, self.scale)


def _flat(ctx: ml.Context, part: nn.Part) -> nn.Part:
    out, lse = part
    segments, tokens, *rest = out.shape
    return out.reshape(ctx, segments * tokens, *rest), lse.reshape(ctx, segments * tokens, rest[0])


def _joined(ctx: ml.Context, one: nn.Part, other: nn.Part) -> nn.Part:
    """Parts of different queries, one after the other."""
    return one[0].concat(ctx, other[0], 1), one[1].concat(ctx, other[1], 1)
