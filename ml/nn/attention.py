"""Scaled dot-product attention (Vaswani et al., 2017), with grouped queries, masks and sinks."""

from __future__ import annotations

import functools
import math
from typing import TypeGuard

from ml.base.checks import check_attention
from ml.capabilities import CAUSAL, CausalMask, SupportsAttention
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor

SCORES_LIMIT = 1 << 24
"""The most scores that the generic implementation holds at once (64 MiB of F32); longer prompts are split
into blocks of queries.
"""


def attention(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalMask | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale * query @ key.T + mask) @ value, per head, with the backend's kernel if it has one.

    query (tokens, heads, head_dim), key (history, kv_heads, head_dim), value (history, kv_heads,
    v_dim); heads is a multiple of kv_heads, and heads g*n..g*n+n-1 share KV head g (grouped
    queries: Ainslie et al., 2023). Key and value may be strided views: they are not copied.

    mask: additive, (rows >= tokens, history), of any float dtype, rows beyond tokens are ignored;
    ``ml.CAUSAL``: the last query sees all keys, the one before it all but one, ...; None: every query sees
    all keys. The output of a query that sees no key is unspecified. scale None means 1 / sqrt(head_dim).
    sinks (heads,): a logit per head that takes part in the softmax and is dropped (Xiao et al., 2023).

    Returns (tokens, heads, v_dim) in the query's dtype. If the cache stores another float dtype, the query is
    converted to it, since the history is larger.
    """
    wanted, stored = query.dtype, key.dtype
    if wanted is not stored or scale is None or mask is CAUSAL:  # otherwise the implementation checks first
        check_attention("attention", None, query, key, value, mask, sinks)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[2])
    if mask is CAUSAL and query.shape[0] == 1:
        mask = None
    if wanted is not stored:
        query = query.cast(ctx, stored)
    backend: Backend | None = getattr(ctx, "backend", None)  # a context need not expose its backend
    body = backend.attention if has_attention(backend) else generic_attention
    result = body(ctx, query, key, value, mask, scale, sinks)
    return result if wanted is stored else result.cast(ctx, wanted)


def has_attention(backend: Backend | None) -> TypeGuard[SupportsAttention]:
    return offers(backend, SupportsAttention)


def offers(backend: object, protocol: type) -> bool:
    """isinstance, cached per class, since a protocol check takes longer than a small product.

    Attributes of the instance itself count only if its class has ``__getattr__``.
    """
    kind: type = type(backend)
    by_class, delegates = _is_kind_of(kind, protocol)
    return by_class or (delegates and isinstance(backend, protocol))


@functools.lru_cache(maxsize=256)
def _is_kind_of(kind: type, protocol: type) -> tuple[bool, bool]:
    return issubclass(kind, protocol), hasattr(kind, "__getattr__")


def generic_attention(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalMask | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """``attention`` using only required operations, for tensors of one dtype.

    Products in that dtype (accumulated in F32 by contract), the softmax in F32.
    """
    check_attention("attention", None, query, key, value, mask, sinks)
    tokens, heads, _ = query.shape
    history = key.shape[0]
    block = max(1, SCORES_LIMIT // max(1, heads * history))
    if tokens <= block:
        return _attend(ctx, query, key, value, mask, scale, sinks)
    result = ctx.empty((tokens, heads, value.shape[2]), value.dtype)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        seen, part = history, mask
        if mask is CAUSAL:
            seen = history - tokens + stop
        elif mask is not None:
            part = mask.slice(ctx, 0, start, stop)
        keys, values = key.slice(ctx, 0, 0, seen), value.slice(ctx, 0, 0, seen)
        rows = _attend(ctx, query.slice(ctx, 0, start, stop), keys, values, part, scale, sinks)
        rows.copy(ctx, result.slice(ctx, 0, start, stop))
    return result


def _attend(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | CausalMask | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """One block of queries; the queries of a KV head are stacked, (kv_heads, tokens * group, head_dim)."""
    tokens, heads, head_dim = query.shape
    kv_heads, v_dim = value.shape[1:]
    group = heads // kv_heads
    query = query.scale(ctx, scale)
    if tokens == 1:
        stacked = query.reshape(ctx, kv_heads, group, head_dim)
    else:
        stacked = query.reshape(ctx, tokens, kv_heads, group, head_dim).permute(ctx, 1, 0, 2, 3)
        stacked = stacked.contiguous(ctx).reshape(ctx, kv_heads, tokens * group, head_dim)
    scores = widened(ctx, stacked.matmul(ctx, key.permute(ctx, 1, 2, 0)))
    weights = _weights(ctx, scores, tokens, group, mask, sinks)
    if weights.dtype is not value.dtype:
        weights = weights.cast(ctx, value.dtype)
    result = weights.matmul(ctx, value.permute(ctx, 1, 0, 2))
    if tokens == 1:
        return result.reshape(ctx, 1, heads, v_dim)
    result = result.reshape(ctx, kv_heads, tokens, group, v_dim).permute(ctx, 1, 0, 2, 3)
    return result.contiguous(ctx).reshape(ctx, tokens, heads, v_dim)


def _weights(
    ctx: Context,
    scores: Tensor,
    tokens: int,
    group: int,
    mask: Tensor | CausalMask | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax over the last axis of scores F32 (kv_heads, tokens * group, history)."""
    if mask is not None and mask is not CAUSAL:
        mask = widened(ctx, mask if mask.shape[0] == tokens else mask.slice(ctx, 0, 0, tokens))
        if tokens == 1 or group == 1:  # the mask's rows are the scores' rows
            scores, mask = scores.add(ctx, mask), None
    if mask is None and sinks is None:
        return scores.softmax(ctx)
    shape = scores.shape
    scores = scores.reshape(ctx, shape[0], tokens, group, shape[2])
    if mask is CAUSAL:
        scores = causal_scores(ctx, scores)
    elif mask is not None:
        scores = scores.add(ctx, mask.reshape(ctx, tokens, 1, shape[2]))
    weights = scores.softmax(ctx) if sinks is None else _softmax_with_sinks(ctx, scores, sinks)
    return weights.reshape(ctx, *shape)


def causal_scores(ctx: Context, scores: Tensor) -> Tensor:
    """Scores (..., kv_heads, tokens, group, history) with -inf where a key comes after the query."""
    tokens, _, history = scores.shape[-3:]
    last = ctx.arange(history - tokens, history, 1, DType.I32).reshape(ctx, tokens, 1, 1)
    seen = ctx.arange(0, history, 1, DType.I32).compare(ctx, "<=", last)
    return seen.where(ctx, scores, ctx.full((1,), -math.inf, DType.F32))


def _softmax_with_sinks(ctx: Context, scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax of scores (kv_heads, tokens, group, history) without the sinks' part, so that rows sum to <
    1.
    """
    kv_heads, tokens, group, history = scores.shape
    logits = widened(ctx, sinks.contiguous(ctx)).view(ctx, 0, (kv_heads, tokens, group, 1), (group, 0, 1, 1))
    return scores.concat(ctx, logits, 3).softmax(ctx).slice(ctx, 3, 0, history)


def widened(ctx: Context, x: Tensor) -> Tensor:
    """``x`` in F32."""
    return x if x.dtype is DType.F32 else x.cast(ctx, DType.F32)
