"""Attention over what a cache stores: each sequence reads its own cells.

One masked call over the cells of n sequences costs n * n; a call per sequence costs n. Where the
cells of all lie so close that one call is cheaper, one call it is.
"""

from __future__ import annotations

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.forward_pass import ForwardPass
from kvcache.storage.layer_buffers import LayerBuffers
from ml import nn

__all__ = ["attend"]


def attend(
    ctx: ml.Context,
    forward: ForwardPass,
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
) -> ml.Tensor:
    """query (tokens, heads, head_dim) -> (tokens, heads, v_dim)."""
    if forward.worth_merging():
        reading, mask = forward.shared(ctx)
        key, value = buffers.read(ctx, reading.cells(ctx), reading.length)
        return nn.attention(ctx, query, key, value, mask, scale, sinks)
    if len(forward.groups) == 1 and isinstance(forward.groups[0].rows, slice):
        return _attend_group(ctx, forward, buffers, forward.groups[0], query, scale, sinks)
    result = ctx.empty((*query.shape[:2], buffers.value.dim), query.dtype)
    for group in forward.groups:
        rows = group.rows
        if isinstance(rows, slice):
            part = query.slice(ctx, 0, rows.start, rows.stop)
            out = _attend_group(ctx, forward, buffers, group, part, scale, sinks)
            out.copy(ctx, result.slice(ctx, 0, rows.start, rows.stop))
        else:
            out = _attend_group(ctx, forward, buffers, group, query.rows(ctx, rows), scale, sinks)
            result.set_rows(ctx, out, rows)
    return result


def _attend_group(
    ctx: ml.Context,
    forward: ForwardPass,
    buffers: LayerBuffers,
    group: SequenceTokens,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
) -> ml.Tensor:
    reading, mask = forward.own(ctx, group)
    key, value = buffers.read(ctx, reading.cells(ctx), reading.length)
    return nn.attention(ctx, query, key, value, mask, scale, sinks)
