"""Attention over rows that the model has chosen for each query, as an indexer's top-k does.

Only these rows are read, and no mask over the whole history is made: whether a query sees a row follows
from the range of rows that its sequence has. (DeepSeek sparse attention: DeepSeek-AI, "DeepSeek-V3.2", 2025.)
"""

from __future__ import annotations

import ml
from kvcache.attention.batch import check_tensors
from kvcache.attention.forward_pass import ForwardPass
from kvcache.cache import InvalidRangeError
from kvcache.storage.layer_buffers import LayerBuffers
from ml import nn

BLOCK = 1 << 25
"""Bytes of K and V that are gathered at a time, about: prompts go in blocks of queries."""
HIDDEN = -1e30
"""In masks. Not -inf: a query that nothing is left to then has an unspecified result, and no NaN."""


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


def attend_selected(
    ctx: ml.Context,
    forward: ForwardPass,
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
    select: ml.Tensor,
) -> ml.Tensor:
    """query (tokens, heads, head_dim) -> (tokens, heads, v_dim), over ``select`` (tokens, k) of ``get``."""
    rows, mask = _seen(ctx, forward, select)
    wanted, (tokens, k) = query.dtype, select.shape
    if wanted is not buffers.read_dtype:
        query = query.cast(ctx, buffers.read_dtype)
    heads = query.shape[1]
    out = ctx.empty((tokens, heads, buffers.value.dim), query.dtype)
    lse = ctx.empty((tokens, heads), ml.DType.F32)
    size = max(1, BLOCK // (k * buffers.bytes_per_cell))
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        count = stop - start
        chosen = rows.slice(ctx, 0, start, stop).reshape(ctx, count * k)
        key, value = (x.reshape(ctx, count, k, *x.shape[1:]) for x in forward.read_rows(ctx, buffers, chosen))
        own = query.slice(ctx, 0, start, stop).contiguous(ctx).reshape(ctx, count, 1, heads, query.shape[2])
        shown = mask.slice(ctx, 0, start, stop).reshape(ctx, count, 1, k)
        found, weight = nn.partial_attention(ctx, own, key, value, shown, scale)
        found.reshape(ctx, count, heads, out.shape[2]).copy(ctx, out.slice(ctx, 0, start, stop))
        weight.reshape(ctx, count, heads).copy(ctx, lse.slice(ctx, 0, start, stop))
    result = nn.merge_attention(ctx, [(out, lse)], sinks)
    return result if result.dtype is wanted else result.cast(ctx, wanted)


def _seen(ctx: ml.Context, forward: ForwardPass, select: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
    """The rows, and a mask F32 (tokens, k) of 0 and HIDDEN; rows that are hidden are one that the query sees.

    So nothing that another sequence holds is read, whatever it is.
    """
    first, stop = forward.seen_rows(ctx)
    zero, hidden = ctx.zeros((1,), ml.DType.F32), ctx.full((1,), HIDDEN, ml.DType.F32)
    low, mask = first, None
    if stop is None:
        reading, mask = forward.shared(ctx)
        low, stop = (ctx.full((1,), bound, ml.DType.I32) for bound in (0, reading.length))
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
    """F32 (tokens, k): what mask (tokens or more, history) says of each query's rows."""
    (tokens, k), history = rows.shape, mask.shape[1]
    lines = ctx.arange(0, tokens * history, history, ml.DType.I32).reshape(ctx, tokens, 1)
    at = rows.add(ctx, lines).reshape(ctx, tokens * k)
    flat = mask.contiguous(ctx).reshape(ctx, mask.shape[0] * history)
    return flat.rows(ctx, at).reshape(ctx, tokens, k).cast(ctx, ml.DType.F32)
