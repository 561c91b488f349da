"""A call of attention over quantized storage, which is read back block by block.

No more than a block of K and V is ever there as floats. Blocks are small enough to stay in a processor's
cache between their widening and their use; what they come to is merged by its log-sum-exp.
"""

from __future__ import annotations

import functools

import ml
from kvcache.storage.layer_buffers import LayerBuffers
from ml import nn

MANY = 16
"""Queries per segment from which on blocks are eight times larger: merging them would take longer."""
LEAST = 32
"""Cells of a block."""
PARTS = 16
"""Blocks whose results are merged in one go."""
HIDDEN, HIDDEN_F16 = -1e30, -65504.0
"""In masks. Not -inf, since a query may see nothing of a block, which then weighs exp(HIDDEN), 0.

Backends convert masks to the query's dtype, and of F16 only the second is a number.
"""


def attend_quantized(
    ctx: ml.Context, buffers: LayerBuffers, query: ml.Tensor, call: ml.AttentionCall, scale: float, size: int
) -> nn.Part:
    """Attention over what ``call`` reads, and its log-sum-exp, for its queries (batch * tokens, heads, dim).

    A block is ``size`` bytes of K and V as they are read back, eight times as much for long prompts.
    """
    return _Blocks(ctx, buffers, query, call, scale, size).attend()


class _Blocks:
    """One call, some of its segments and some of their cells at a time."""

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
        """Results of blocks that are there at a time."""

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
            found = _flat(ctx, self._segments(first, last))
            for own, whole in zip(found, (out, lse), strict=True):
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
