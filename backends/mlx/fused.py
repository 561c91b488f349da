"""Attention, rotary embedding and grouped products through MLX's fused kernels.

They do not return a log-sum-exp, so partial attention uses products and a softmax.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np

from backends.mlx.arrays import from_host
from ml.capabilities import CAUSAL, CausalMask
from ml.dtypes import DType
from ml.nn.attention import generic_attention
from ml.nn.rope_spec import RopeSpec

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor


def attention(
    ctx: Any,
    query: MlxTensor,
    key: MlxTensor,
    value: MlxTensor,
    mask: Any,
    scale: float,
    sinks: Any,
) -> MlxTensor:
    """``mx.fast.scaled_dot_product_attention``: grouped queries without repeating the keys.

    The views are passed unchanged, head by head, so that a head-major history is not copied on a GPU.
    On the CPU F16 and BF16 are widened: its kernels round the scores to the narrow dtype, and for
    F16 take twice as long. Contract and shapes: ``ml.SupportsAttention``.
    """
    tokens, heads, _ = query.shape
    if 0 in query.shape or 0 in value.shape:
        return cast("MlxTensor", generic_attention(ctx, query, key, value, mask, scale, sinks))
    dtype = mx.float32 if query.storage.work.widens else query.read().dtype
    stream = query.storage.work.stream
    q, k, v = (mx.astype(_by_head(x), dtype, stream=stream) for x in (query, key, value))
    if query.storage.work.widens:  # it would copy strided rows once for each query head
        k, v = (
            x if like.strides[0] == like.shape[2] else mx.contiguous(x, stream=stream)
            for x, like in ((k, key), (v, value))
        )
    result = mx.fast.scaled_dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        mask=_mask(mask, tokens, dtype, stream),
        sinks=None if sinks is None else mx.astype(sinks.read(), dtype, stream=stream),
        stream=stream,
    )
    size = value.shape[2]
    if tokens == 1:
        return query.result(mx.reshape(result, (1, heads, size), stream=stream))
    result = mx.reshape(result, (heads, tokens, size), stream=stream)
    return query.result(mx.transpose(result, (1, 0, 2), stream=stream))


def _by_head(x: MlxTensor) -> Any:
    """(batch, tokens, heads, size) in MLX's order (batch, heads, tokens, size), with a batch of 1 if there is
    none.
    """
    *batch, tokens, heads, size = x.shape
    *step, row, head, one = x.strides
    return x.storage.read(
        x.offset, (*(batch or (1,)), heads, tokens, size), (*(step or (0,)), head, row, one)
    )


def _mask(mask: Any, tokens: int, dtype: Any, stream: Any) -> Any:
    """MLX's "causal" is bottom-right aligned, like ours; a mask array must have the queries' dtype."""
    if mask is None or mask is CAUSAL:
        return None if mask is None else "causal"
    return mx.astype(mask.part(0, 0, tokens).read(), dtype, stream=stream)


def rope(x: MlxTensor, positions: MlxTensor, spec: RopeSpec) -> MlxTensor | None:
    """``mx.fast.rope`` with each token as a batch row with its own offset, for arbitrary positions. None for
    YaRN's temperature, which the kernel does not apply, and if MLX is too old for an offset per row.
    """
    if spec.attention_factor != 1.0 or 0 in x.shape:
        return None
    stream = x.storage.work.stream
    tokens, heads, size = x.shape
    try:
        result = mx.fast.rope(
            mx.reshape(x.wide(False), (tokens, heads, 1, size), stream=stream),
            spec.dim,
            traditional=spec.interleaved,
            base=None,
            scale=1.0,
            offset=positions.read(),
            freqs=_periods(spec),
            stream=stream,
        )
    except (TypeError, ValueError):
        return None
    return x.result(mx.reshape(result, (tokens, heads, size), stream=stream))


def grouped_matmul(x: MlxTensor, weight: MlxTensor, groups: MlxTensor) -> MlxTensor | None:
    """``mx.gather_mm`` with rows sorted by matrix. None on the CPU for F16 and BF16, where all matrices would
    be widened for the few that are needed.
    """
    work, (rows, size) = x.storage.work, x.shape
    if 0 in (rows, *weight.shape) or (work.widens and x.dtype is not DType.F32):
        return None
    product = mx.gather_mm(
        mx.reshape(x.read(), (rows, 1, size), stream=work.stream),
        weight.read(),
        rhs_indices=groups.read(),
        sorted_indices=True,
        stream=work.stream,
    )
    return x.wrap(mx.reshape(product, (rows, weight.shape[2]), stream=work.stream))


@functools.lru_cache(maxsize=64)
def _periods(spec: RopeSpec) -> Any:
    """MLX's freqs: positions per radian of each pair."""
    return from_host((1.0 / spec.inverse_frequencies).astype(np.float32))


def partial_attention(
    scale: float, query: MlxTensor, key: MlxTensor, value: MlxTensor, mask: Any
) -> tuple[MlxTensor, MlxTensor]:
    """See ``ml.SupportsPartialAttention``. The queries of a KV head are rows of one product.

    The softmax is in F32; on the CPU also the products, as in ``attention``.
    """
    work = query.storage.work
    with work.lock, work.on_stream:
        (batch, tokens, heads, size), (history, kv_heads, v_dim) = query.shape, value.shape[1:]
        group = heads // kv_heads
        native = query.read()
        dtype = mx.float32 if work.widens else native.dtype
        # (batch, kv_heads, group, tokens): the axes of a mask come last.
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
        else:  # a sum over many values may overflow the dtype, an average does not
            out = mx.astype(weights / total, dtype) @ v
        lse = mx.log(total) + top
        out = mx.reshape(out, (batch, kv_heads, group, tokens, v_dim)).transpose(0, 3, 1, 2, 4)
        lse = mx.reshape(lse, (batch, kv_heads, group, tokens)).transpose(0, 3, 1, 2)
        out = mx.astype(mx.reshape(out, (batch, tokens, heads, v_dim)), native.dtype)
        return query.wrap(out), query.wrap(mx.reshape(lse, (batch, tokens, heads)), DType.F32)


def _bias(mask: Any, tokens: int, history: int) -> Any:
    """The bias added to scores (batch, kv_heads, group, tokens, history)."""
    if isinstance(mask, CausalMask):
        sees = mx.arange(history) <= mx.arange(history - tokens, history)[:, None]
        return mx.where(sees, mx.array(0.0), mx.array(-mx.inf))
    shown = mx.astype(mask.part(1, 0, tokens).read(), mx.float32)
    return mx.reshape(shown, (shown.shape[0], 1, 1, tokens, history))
