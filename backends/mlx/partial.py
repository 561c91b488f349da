"""Attention over part of a history with its log-sum-exp, which MLX's fused kernel does not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ml.capabilities import CausalMask
from ml.dtypes import DType

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor


def partial_attention(
    scale: float, query: MlxTensor, key: MlxTensor, value: MlxTensor, mask: Any
) -> tuple[MlxTensor, MlxTensor]:
    """See :class:`ml.SupportsPartialAttention`. The queries of a KV head are rows of one product.

    The softmax is in F32; on the CPU the products too, as in ``fused.attention``.
    """
    work = query.storage.work
    with work.lock, work.on_stream:
        (batch, tokens, heads, size), (history, kv_heads, v_dim) = query.shape, value.shape[1:]
        group = heads // kv_heads
        native = query.read()
        dtype = mx.float32 if work.widens else native.dtype
        # (batch, kv_heads, group, tokens): the axes that a mask has come last.
        rows = mx.reshape(native, (batch, tokens, kv_heads, group, size)).transpose(0, 2, 3, 1, 4)
        rows = mx.reshape(mx.astype(rows, dtype) * scale, (batch, kv_heads, group * tokens, size))
        k, v = (mx.astype(_by_head(x), dtype) for x in (key, value))
        scores = mx.astype(rows @ mx.swapaxes(k, 2, 3), mx.float32)
        if mask is not None:
            scores = mx.reshape(scores, (batch, kv_heads, group, tokens, history))
            scores = scores + _bias(mask, tokens, history)
            scores = mx.reshape(scores, (batch, kv_heads, group * tokens, history))
        top = mx.max(scores, axis=-1, keepdims=True)
        weights = mx.exp(scores - top)
        total = mx.sum(weights, axis=-1, keepdims=True)
        if dtype == mx.float32:
            out = (weights @ v) / total
        else:  # a sum over many values may be beyond the dtype, an average is not
            out = mx.astype(weights / total, dtype) @ v
        lse = mx.log(total) + top
        out = mx.reshape(out, (batch, kv_heads, group, tokens, v_dim)).transpose(0, 3, 1, 2, 4)
        lse = mx.reshape(lse, (batch, kv_heads, group, tokens)).transpose(0, 3, 1, 2)
        out = mx.astype(mx.reshape(out, (batch, tokens, heads, v_dim)), native.dtype)
        return query.wrap(out), query.wrap(mx.reshape(lse, (batch, tokens, heads)), DType.F32)


def _by_head(x: MlxTensor) -> Any:
    """(batch, history, kv_heads, size) as (batch, kv_heads, history, size)."""
    (batch, history, heads, size), (step, row, head, one) = x.shape, x.strides
    return x.storage.read(x.offset, (batch, heads, history, size), (step, head, row, one))


def _bias(mask: Any, tokens: int, history: int) -> Any:
    """What is added to scores (batch, kv_heads, group, tokens, history)."""
    if isinstance(mask, CausalMask):
        sees = mx.arange(history) <= mx.arange(history - tokens, history)[:, None]
        return mx.where(sees, mx.array(0.0), mx.array(-mx.inf))
    shown = mx.astype(mask.part(1, 0, tokens).read(), mx.float32)
    return mx.reshape(shown, (shown.shape[0], 1, 1, tokens, history))
