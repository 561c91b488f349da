"""Attention over parts of a history, and merging these parts into attention over the whole.

Softmax can be computed part by part if each part returns its log-sum-exp (Dao et al., FlashAttention, 2022):
the parts are then averaged with weights derived from these. This way, a prefix that many sequences share is
attended to once for all of them (Juravsky et al., Hydragen, 2024), and a history may be spread over several
places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeGuard

from ml.base.checks import check_attention
from ml.capabilities import CAUSAL, CausalMask, SupportsPartialAttention
from ml.dtypes import DType
from ml.errors import ShapeError
from ml.nn.attention import SCORES_LIMIT, causal_scores, offers, widened
from ml.protocols import Backend, Context, Tensor

Part = tuple[Tensor, Tensor]
"""Attention over a part (..., tokens, heads, v_dim), and its log-sum-exp F32 (..., tokens, heads)."""


def partial_attention(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalMask | None,
    scale: float,
) -> Part:
    """As in ``ml.SupportsPartialAttention``, with the backend's kernel if it has one.

    A query of another float dtype is converted to that of the keys, which is also the dtype of the result.
    """
    if query.dtype is not key.dtype or mask is CAUSAL:  # otherwise the implementation checks first
        check_attention("partial_attention", None, query, key, value, mask, batched=True)
        query = query if query.dtype is key.dtype else query.cast(ctx, key.dtype)
        mask = None if mask is CAUSAL and query.shape[1] == 1 else mask
    backend: Backend | None = getattr(ctx, "backend", None)
    body = backend.partial_attention if _has_kernel(backend) else generic_partial_attention
    return body(ctx, query, key, value, mask, scale)


def _has_kernel(backend: Backend | None) -> TypeGuard[SupportsPartialAttention]:
    return offers(backend, SupportsPartialAttention)


def generic_partial_attention(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalMask | None,
    scale: float,
) -> Part:
    """``partial_attention`` using only required operations, for tensors of one dtype."""
    check_attention("partial_attention", None, query, key, value, mask, batched=True)
    body = functools.partial(_attend_to_part, ctx, scale)
    return partial_in_blocks(ctx, body, query, key, value, mask)


def partial_in_blocks(
    ctx: Context,
    body: Callable[[Tensor, Tensor, Tensor, Tensor | CausalMask | None], Part],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalMask | None,
) -> Part:
    """The result of ``body(query, key, value, mask)``; if there are many scores, for a block of queries at a
    time.
    """
    batch, tokens, heads, _ = query.shape
    history = key.shape[1]
    block = max(1, SCORES_LIMIT // max(1, batch * heads * history))
    if tokens <= block:
        return body(query, key, value, mask)
    out = ctx.empty((batch, tokens, heads, value.shape[3]), value.dtype)
    lse = ctx.empty((batch, tokens, heads), DType.F32)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        seen, part = history, mask
        if isinstance(mask, CausalMask):
            seen = history - tokens + stop
        elif mask is not None:
            part = mask.slice(ctx, 1, start, stop)
        keys, values = key.slice(ctx, 1, 0, seen), value.slice(ctx, 1, 0, seen)
        rows = body(query.slice(ctx, 1, start, stop), keys, values, part)
        for own, whole in zip(rows, (out, lse), strict=True):
            own.copy(ctx, whole.slice(ctx, 1, start, stop))
    return out, lse


def _attend_to_part(
    ctx: Context, scale: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | CausalMask | None
) -> Part:
    batch, tokens, heads, head_dim = query.shape
    history, kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
    stacked = query.scale(ctx, scale).contiguous(ctx).reshape(ctx, batch, tokens, kv_heads, group, head_dim)
    stacked = stacked.permute(ctx, 0, 2, 1, 3, 4).contiguous(ctx)
    stacked = stacked.reshape(ctx, batch, kv_heads, tokens * group, head_dim)
    scores = widened(ctx, stacked.matmul(ctx, key.permute(ctx, 0, 2, 3, 1)))
    if mask is not None:
        apart = scores.reshape(ctx, batch, kv_heads, tokens, group, history)
        if isinstance(mask, CausalMask):
            apart = causal_scores(ctx, apart)
        else:
            shown = widened(ctx, mask if mask.shape[1] == tokens else mask.slice(ctx, 1, 0, tokens))
            apart = apart.add(ctx, shown.contiguous(ctx).reshape(ctx, shown.shape[0], 1, tokens, 1, history))
        scores = apart.reshape(ctx, batch, kv_heads, tokens * group, history)
    top = scores.max(ctx, -1, keepdims=True)
    weights = scores.sub(ctx, top).exp(ctx)
    total = weights.sum(ctx, -1, keepdims=True)
    if value.dtype is not DType.F32:
        weights = weights.div(ctx, total).cast(ctx, value.dtype)
    out = weights.matmul(ctx, value.permute(ctx, 0, 2, 1, 3))
    if value.dtype is DType.F32:
        out = out.div(ctx, total)
    lse = total.log(ctx).add(ctx, top)
    parts = [
        x.reshape(ctx, batch, kv_heads, tokens, group, size).permute(ctx, 0, 2, 1, 3, 4).contiguous(ctx)
        for x, size in ((out, v_dim), (lse, 1))
    ]
    return parts[0].reshape(ctx, batch, tokens, heads, v_dim), parts[1].reshape(ctx, batch, tokens, heads)


def merge_parts(ctx: Context, parts: Sequence[Part]) -> Part:
    """Merge parts into one: attention over everything that they attended to, with its log-sum-exp.

    Each part is (..., heads, v_dim) and (..., heads); at least one log-sum-exp of each query must be finite.
    """
    (first, lse), *rest = parts
    if not rest:
        return first, lse
    count, shape = len(parts), lse.shape
    outs = ctx.empty((count, *first.shape), DType.F32)
    logits = ctx.empty((count, *shape, 1), DType.F32)
    for i, (out, own) in enumerate(parts):
        out.reshape(ctx, 1, *first.shape).copy(ctx, outs.slice(ctx, 0, i, i + 1))
        own.reshape(ctx, 1, *shape, 1).copy(ctx, logits.slice(ctx, 0, i, i + 1))
    top = logits.max(ctx, 0)
    weights = logits.sub(ctx, top).exp(ctx)
    total = weights.sum(ctx, 0)
    merged = outs.mul(ctx, weights).sum(ctx, 0).div(ctx, total)
    if merged.dtype is not first.dtype:
        merged = merged.cast(ctx, first.dtype)
    return merged, total.log(ctx).add(ctx, top).reshape(ctx, *shape)


def merge_attention(ctx: Context, parts: Sequence[Part], sinks: Tensor | None = None) -> Tensor:
    """Attention over everything that ``parts`` attended to; (tokens, heads, v_dim) in the parts' dtype.

    Each part is (tokens, heads, v_dim) and (tokens, heads). A log-sum-exp of -inf means that the query sees
    nothing of that part, whose attention must then be finite. ``sinks`` (heads,) as in ``attention``.
    """
    if not parts:
        raise ShapeError("merge_attention: no parts given; it must merge at least one")
    (first, lse), *rest = parts
    tokens, heads, _ = first.shape
    if sinks is not None and sinks.shape != (heads,):
        raise ShapeError(f"merge_attention: sinks {sinks.shape}; they must be ({heads},), one for each head")
    logits = lse.reshape(ctx, tokens, heads, 1)
    for _, other in rest:
        logits = logits.concat(ctx, other.reshape(ctx, tokens, heads, 1), 2)
    if sinks is not None:
        shown = widened(ctx, sinks).contiguous(ctx).view(ctx, 0, (tokens, heads, 1), (0, 1, 0))
        logits = logits.concat(ctx, shown, 2)
    elif not rest:
        return first
    weights = logits.softmax(ctx)
    merged = _weighed(ctx, first, weights, 0)
    for number, (out, _) in enumerate(rest, 1):
        merged = merged.add(ctx, _weighed(ctx, out, weights, number))
    return merged if merged.dtype is first.dtype else merged.cast(ctx, first.dtype)


def _weighed(ctx: Context, out: Tensor, weights: Tensor, number: int) -> Tensor:
    return widened(ctx, out).mul(ctx, weights.slice(ctx, 2, number, number + 1))
