"""Attention over parts of a history, with its log-sum-exp, and several calls of it merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn import functional

from backends.torch import store
from backends.torch.kernels import (
    Bias,
    CausalMasks,
    Pair,
    attend_grouped,
    attend_rows,
    beside,
    causal_bias,
    fits,
    home,
    natives,
    with_sinks,
)
from backends.torch.tensor import Placement, TorchTensor
from ml.base import check_attention
from ml.base.checks import check_mask
from ml.capabilities import AttentionCall, CausalMask
from ml.dtypes import DType
from ml.strided import Shape


def attend_partially(
    ctx: Placement,
    masks: CausalMasks,
    query: TorchTensor,
    key: TorchTensor,
    value: TorchTensor,
    mask: TorchTensor | CausalMask | None,
    scale: float,
) -> tuple[TorchTensor, TorchTensor]:
    """See ``ml.SupportsPartialAttention``."""
    check_attention("partial_attention", ctx.backend, query, key, value, mask, batched=True)
    k, q, v = natives(ctx, key, query, value)
    batch, tokens, heads, head_dim = q.shape
    history, _, v_dim = v.shape[1:]
    if not q.numel():
        none = q.new_zeros((batch, tokens, heads, v_dim)), q.new_zeros(q.shape[:3], dtype=torch.float32)
        return home(ctx, none[0], query.dtype), home(ctx, none[1], DType.F32)
    bias = _bias(ctx, masks, q, v, history, mask)
    rows = q.reshape(-1, heads, head_dim)
    out, lse = attend_grouped(rows, k.transpose(1, 2), v.transpose(1, 2), bias, scale)
    out, lse = out.reshape(batch, tokens, heads, v_dim), lse.reshape(batch, tokens, heads)
    return home(ctx, out, query.dtype), home(ctx, lse, DType.F32)


def attend_calls(
    ctx: Placement,
    masks: CausalMasks,
    query: TorchTensor,
    key: TorchTensor,
    value: TorchTensor,
    levels: Sequence[Sequence[AttentionCall]],
    scale: float,
    sinks: TorchTensor | None,
) -> TorchTensor:
    """See ``ml.SupportsPartialAttention``."""
    k, q, v, logits = natives(ctx, key, query, value, sinks)
    merges = len(levels) > 1 or logits is not None
    parts = [_level(ctx, masks, q, k, v, calls, scale, merges) for calls in levels]
    out, lse = parts[0]
    if len(parts) == 1 and logits is not None:
        out = with_sinks(parts[0], logits.float().view(lse.shape[1:]), q.dtype)
    elif len(parts) == 2 and logits is None:
        out = torch.lerp(parts[1][0].float(), out.float(), torch.sigmoid(lse - parts[1][1]).unsqueeze(-1))
    elif len(parts) > 1:
        every = torch.stack([part[1] for part in parts], -1)
        if logits is not None:
            every = torch.cat((every, logits.float().view(lse.shape[1:]).expand_as(lse).unsqueeze(-1)), -1)
        weights = every.softmax(-1).unsqueeze(-1)
        out = out * weights[..., 0, :]
        for number, (other, _) in enumerate(parts[1:], 1):
            out = out.addcmul(other, weights[..., number, :])
    return home(ctx, out.reshape(*q.shape[:2], v.shape[2]).to(q.dtype), query.dtype)


DecodingStep = Callable[[Placement, TorchTensor, TorchTensor, TorchTensor, float], TorchTensor | None]
"""``attend_calls`` for certain calls, with query, key, value and scale; None for tensors of other shapes."""


def decoding_step(
    ctx: Placement,
    query: TorchTensor,
    key: TorchTensor,
    value: TorchTensor,
    levels: Sequence[Sequence[AttentionCall]],
) -> DecodingStep | None:
    """One query of each segment over runs of cells, whose views are worked out once for all layers of a pass;
    None for any other calls.
    """
    if ctx.moves or len(levels) != 1 or len(levels[0]) != 1:
        return None
    (call,) = levels[0]
    tokens, heads, head_dim = query.shape
    if call.mask is not None or call.cells is not None or call.tokens != slice(0, call.batch):
        return None
    if tokens != call.batch or not tokens:
        return None
    last = (call.batch - 1) * call.step
    if min(call.start, call.start + last) < 0 or max(0, last) + call.start + call.length > key.shape[0]:
        return None  # refused by torch: the views below are not checked
    key_size, value_size = key.native.size(), value.native.size()
    key_steps, value_steps = key.native.stride(), value.native.stride()
    keys, values = (_run(x.shape, x.native.stride(), call) for x in (key, value))
    kv_heads, dtype = key.shape[1], query.dtype
    group = heads // kv_heads
    grouped, shape = (tokens, kv_heads, group, head_dim), (tokens, heads, value.shape[2])
    flash = query.native.is_cpu and fits(query.native, value.native) and (group > 1 or dtype is DType.F32)

    def step(
        ctx: Placement, query: TorchTensor, key: TorchTensor, value: TorchTensor, scale: float
    ) -> TorchTensor | None:
        q, k, v = query.native, key.native, value.native
        if (
            query.dtype is not dtype
            or k.size() != key_size
            or v.size() != value_size
            or k.stride() != key_steps
            or v.stride() != value_steps
            or q.numel() != tokens * heads * head_dim
        ):
            return None
        q = q.reshape(grouped)
        k, v = store.alias(k, *keys), store.alias(v, *values)
        if flash and scale > 0:
            out = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        else:
            out, _ = attend_rows(q, k, v, None, scale, with_lse=False)
        return TorchTensor.own(ctx, out.reshape(shape), dtype)

    return step


def _level(
    ctx: Placement,
    masks: CausalMasks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: Sequence[AttentionCall],
    scale: float,
    with_lse: bool,
) -> Pair:
    """q (tokens, heads, D), k and v (cells, kv_heads, ...) -> as ``attend_grouped``."""
    whole = len(calls) == 1 and isinstance(calls[0].tokens, slice)
    whole = whole and calls[0].tokens == slice(0, q.shape[0])
    if not whole:
        shape = q.shape[0], v.shape[1], q.shape[1] // v.shape[1]
        out = q.new_zeros((*shape, v.shape[2]))
        lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device) if with_lse else out
    for call in calls:
        tokens: Any = (
            call.tokens if isinstance(call.tokens, slice) else beside(ctx, cast("Any", call.tokens), q.device)
        )
        own = q if whole else q[tokens]
        bias: Bias = None
        if call.mask is not None:
            stacked = own.reshape(call.batch, -1, *own.shape[1:])
            check_mask("attention_calls", call.mask, stacked.shape[1], call.length, call.batch)
            bias = _bias(ctx, masks, stacked, v, call.length, cast("Any", call.mask))
        pair = attend_grouped(own, _read(ctx, k, call), _read(ctx, v, call), bias, scale, with_lse)
        if whole:
            return pair
        out[tokens] = pair[0]
        if with_lse:
            lse[tokens] = pair[1]
    return out, lse


def _read(ctx: Placement, buffer: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The rows of (cells, heads, size) that a call reads, as (batch, heads, length, size)."""
    if call.cells is None:
        shape, strides, first = _run(buffer.shape, buffer.stride(), call)
        return buffer.as_strided(shape, strides, buffer.storage_offset() + first)
    _, heads, size = buffer.shape
    cell, head, _ = buffer.stride()
    cells = beside(ctx, cast("Any", call.cells), buffer.device)
    if head > cell:
        return buffer.transpose(0, 1).index_select(1, cells).view(heads, call.batch, -1, size).transpose(0, 1)
    return buffer.index_select(0, cells).view(call.batch, -1, heads, size).transpose(1, 2)


def _run(shape: Shape, strides: Shape, call: AttentionCall) -> tuple[Shape, Shape, int]:
    """Shape (batch, heads, length, size), strides and offset of the runs of a buffer that a call reads."""
    _, heads, size = shape
    cell, head, element = strides
    return (call.batch, heads, call.length, size), (call.step * cell, head, cell, element), call.start * cell


def _bias(
    ctx: Placement,
    masks: CausalMasks,
    q: torch.Tensor,
    v: torch.Tensor,
    history: int,
    mask: TorchTensor | CausalMask | None,
) -> Bias:
    """The mask as (batch or 1, tokens, history) in the query's dtype, or the kernel's own flag."""
    if mask is None:
        return None
    if isinstance(mask, CausalMask):
        return causal_bias(masks, q[0], v, q.shape[0], history)
    return beside(ctx, mask, q.device)[:, : q.shape[1]].to(q.dtype)
