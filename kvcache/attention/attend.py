"""Attention over what a cache stores, for a whole batch: each stored byte is read once, whoever shares it.

A backend with a kernel for ragged batches (:class:`ml.SupportsRaggedAttention`) gets the plan of the pass, in
one call. On others the pass is the few calls that ``calls`` has planned, and their results are merged.
"""

from __future__ import annotations

from typing import Any

import ml
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.planned import BLOCK_CALLS, PlannedLevel
from kvcache.storage.buffer import Buffer
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.quantized import QuantizedBuffer
from ml import nn

KERNEL_WORTH = 32
"""Cells of a run, or of a share, that a kernel for ragged batches is given apart from others."""


def attend(
    ctx: ml.Context,
    forward: ForwardPass,
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
) -> ml.Tensor:
    """query (tokens, heads, head_dim) -> (tokens, heads, v_dim)."""
    if buffers.rotated is not None:
        keys, values = buffers.key, buffers.value
        assert isinstance(keys, QuantizedBuffer)
        assert isinstance(values, QuantizedBuffer)
        found = attend(ctx, forward, buffers.rotated, keys.turn(ctx, query), scale, sinks)
        return _cut(ctx, values.turn(ctx, found), values.dim)
    wanted, stored = query.dtype, buffers.read_dtype
    if wanted is not stored:
        query = query.cast(ctx, stored)
    result = _in_dtype(ctx, forward, buffers, query, scale, sinks)
    return result if wanted is stored else result.cast(ctx, wanted)


def _in_dtype(
    ctx: ml.Context,
    forward: ForwardPass,
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
) -> ml.Tensor:
    """By what is the best here, of a query in the dtype of what is read."""
    tables = forward.own_cells(ctx)
    if tables is not None:
        most = BLOCK_CALLS * forward.config.call_bytes
        return _by_tables(ctx, buffers, query, *tables, scale, sinks, most)
    asked = len(forward.read_groups) < buffers.declined  # each has a segment of its own, as a rule
    result = None if not asked else _by_kernel(ctx, forward, buffers, query, scale, sinks)
    if result is not None:
        return result
    worth = max(1, forward.config.call_bytes // buffers.bytes_per_cell)
    return _by_calls(ctx, forward.levels(ctx, worth), buffers, query, scale, sinks)


def _by_tables(
    ctx: ml.Context,
    buffers: LayerBuffers,
    query: ml.Tensor,
    cells: ml.Tensor,
    mask: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
    most: int,
) -> ml.Tensor:
    """The queries of each row of cells (rows, context) over these; ``most`` bytes of K and V at a time."""
    (tokens, heads, size), (rows, context) = query.shape, cells.shape
    each, together = tokens // rows, max(1, most // (context * buffers.bytes_per_cell))
    stacked = query.reshape(ctx, rows, each, heads, size)
    shown = mask.slice(ctx, 0, 0, tokens).reshape(ctx, rows, each, context)
    parts = []
    for begin in range(0, rows, together):
        end = min(rows, begin + together)
        where = cells.slice(ctx, 0, begin, end).reshape(ctx, (end - begin) * context)
        key, value = (
            found.reshape(ctx, end - begin, context, *found.shape[1:])
            for found in buffers.read(ctx, where, (end - begin) * context)
        )
        own, seen = (x.slice(ctx, 0, begin, end) for x in (stacked, shown))
        parts.append(nn.partial_attention(ctx, own, key, value, seen, scale))
    out, lse = parts[0]
    for part in parts[1:]:
        out, lse = out.concat(ctx, part[0], 0), lse.concat(ctx, part[1], 0)
    whole = out.reshape(ctx, tokens, heads, out.shape[3]), lse.reshape(ctx, tokens, heads)
    return nn.merge_attention(ctx, [whole], sinks)


def _by_calls(
    ctx: ml.Context,
    levels: list[PlannedLevel],
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
) -> ml.Tensor:
    key, value, backend = buffers.key, buffers.value, getattr(ctx, "backend", None)
    alone = len(levels) == 1 and levels[0].in_one and levels[0].calls[0].call.batch == 1
    if (
        not alone
        and isinstance(key, Buffer)
        and isinstance(value, Buffer)
        and nn.has_attention_calls(backend)
    ):
        calls = [[call.on(ctx) for call in level.calls] for level in levels]
        keys, values = key.read(ctx, 0, key.cells), value.read(ctx, 0, value.cells)
        return backend.attention_calls(ctx, query, keys, values, calls, scale, sinks)
    if len(levels) == 1:
        return levels[0].attend(ctx, buffers, query, scale, sinks)
    parts = [level.partial(ctx, buffers, query, scale) for level in levels]
    return nn.merge_attention(ctx, parts, sinks)


def _by_kernel(
    ctx: ml.Context,
    forward: ForwardPass,
    buffers: LayerBuffers,
    query: ml.Tensor,
    scale: float,
    sinks: ml.Tensor | None,
) -> ml.Tensor | None:
    """By the backend's kernel for a whole batch; None where it declines, or declined one no larger."""
    backend: Any = getattr(ctx, "backend", None)
    plain = not buffers.is_quantized
    if not (nn.has_ragged_attention(backend) if plain else nn.has_quantized_attention(backend)):
        buffers.declined = 0
        return None
    worth = min(KERNEL_WORTH, max(1, forward.config.call_bytes // buffers.bytes_per_cell))
    plan = forward.plan(worth)
    if len(plan.segments) >= buffers.declined:
        return None
    result: ml.Tensor | None
    if plain:
        (keys,), (values,) = buffers.whole
        result = backend.ragged_attention(ctx, query, keys, values, plan, scale, sinks)
    else:
        result = backend.quantized_attention(ctx, query, *buffers.whole, buffers.formats, plan, scale, sinks)
        if result is not None:
            result = _cut(ctx, result, buffers.value.dim)
    if result is None:
        buffers.declined = len(plan.segments)
    return result


def _cut(ctx: ml.Context, found: ml.Tensor, dim: int) -> ml.Tensor:
    """The first ``dim`` numbers of each head: those behind them are of keys that hold the values."""
    return found if found.shape[2] == dim else found.slice(ctx, 2, 0, dim)
