"""Attention over part of a history, with its log-sum-exp, through the kernels under SDPA that return it.

The queries that share a KV head are stacked as rows of one product, and several batches are one call.
Neither keys nor values are copied where their last axis is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from backends.torch.attention import SCORES_LIMIT, STACKED_MASK_LIMIT, CausalMasks
from backends.torch.tensor import Placement, TorchTensor
from ml.capabilities import AttentionCall, CausalMask
from ml.dtypes import DType
from ml.errors import DTypeError, ShapeError

__all__ = ["attend_calls", "attend_partially"]

ALIGNED = 16
"""The efficient kernel of CUDA reads a mask whose rows begin at multiples of so many elements."""

Pair = tuple[torch.Tensor, torch.Tensor]
Bias = torch.Tensor | CausalMask | None


def attend_partially(
    ctx: Placement,
    masks: CausalMasks,
    query: TorchTensor,
    key: TorchTensor,
    value: TorchTensor,
    mask: TorchTensor | CausalMask | None,
    scale: float,
) -> tuple[TorchTensor, TorchTensor]:
    """See :class:`ml.SupportsPartialAttention`."""
    for tensor in (key, value, mask):
        if tensor is not None and not isinstance(tensor, CausalMask):
            query.check_peer("partial_attention", tensor)
    q, k, v = query.native_on(ctx), key.native_on(ctx), value.native_on(ctx)
    batch, tokens, heads, head_dim = q.shape
    history, _, v_dim = v.shape[1:]
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise DTypeError(f"partial_attention: {q.dtype}, {k.dtype}, {v.dtype}; they are of one float dtype")
    bias = _bias(ctx, masks, q, v, history, mask)
    out, lse = _part(q.reshape(-1, heads, head_dim), k.transpose(1, 2), v.transpose(1, 2), bias, scale)
    return (
        TorchTensor.own(ctx, out.reshape(batch, tokens, heads, v_dim), query.dtype),
        TorchTensor.own(ctx, lse.reshape(batch, tokens, heads), DType.F32),
    )


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
    """See :class:`ml.SupportsAttentionCalls`."""
    for tensor in (key, value, sinks):
        if tensor is not None:
            query.check_peer("attention_calls", tensor)
    q, k, v = query.native_on(ctx), key.native_on(ctx), value.native_on(ctx)
    logits = None if sinks is None else sinks.native_on(ctx).float()
    parts = [_level(ctx, masks, q, k, v, calls, scale) for calls in levels]
    out, lse = parts[0]
    if len(parts) == 2 and logits is None:
        out = torch.lerp(parts[1][0].float(), out.float(), torch.sigmoid(lse - parts[1][1]).unsqueeze(-1))
    elif len(parts) > 1 or logits is not None:
        every = torch.stack([part[1] for part in parts], -1)
        if logits is not None:
            every = torch.cat((every, logits.view(1, -1, 1).expand(q.shape[0], -1, 1)), -1)
        weights = every.softmax(-1).unsqueeze(-1)
        out = out * weights[:, :, 0]
        for number, (other, _) in enumerate(parts[1:], 1):
            out = out.addcmul(other, weights[:, :, number])
    return TorchTensor.own(ctx, out.to(q.dtype), query.dtype)


def _level(
    ctx: Placement,
    masks: CausalMasks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: Sequence[AttentionCall],
    scale: float,
) -> Pair:
    """q (tokens, heads, D), k and v (cells, kv_heads, ...) -> (tokens, heads, v_dim), (tokens, heads)."""
    whole = len(calls) == 1 and isinstance(calls[0].tokens, slice)
    whole = whole and calls[0].tokens == slice(0, q.shape[0])
    if not whole:
        out = q.new_zeros((*q.shape[:2], v.shape[2]))
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for call in calls:
        tokens: Any = (
            call.tokens if isinstance(call.tokens, slice) else cast("Any", call.tokens).native_on(ctx)
        )
        own = q if whole else q[tokens]
        each = own.shape[0] // call.batch
        stacked = own.reshape(call.batch, each, *own.shape[1:])
        bias = _bias(ctx, masks, stacked, v, call.length, cast("Any", call.mask))
        found = _part(own, _read(ctx, k, call), _read(ctx, v, call), bias, scale)
        if whole:
            return found
        out[tokens], lse[tokens] = found
    return out, lse


def _read(ctx: Placement, buffer: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """What a call reads of (cells, heads, size), as (batch, heads, length, size)."""
    _, heads, size = buffer.shape
    cell, head, element = buffer.stride()
    if call.cells is None:
        shape, strides = (call.batch, heads, call.length, size), (call.step * cell, head, cell, element)
        return buffer.as_strided(shape, strides, buffer.storage_offset() + call.start * cell)
    cells = cast("Any", call.cells).native_on(ctx)
    if head > cell:
        return buffer.transpose(0, 1).index_select(1, cells).view(heads, call.batch, -1, size).transpose(0, 1)
    return buffer.index_select(0, cells).view(call.batch, -1, heads, size).transpose(1, 2)


def _part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float) -> Pair:
    """q (batch * tokens, heads, D), k, v (batch, kv_heads, history, ...), bias (batch or 1, tokens, history).

    Returns (batch * tokens, heads, v_dim) and (batch * tokens, heads).
    """
    count, heads, head_dim = q.shape
    batch, kv_heads, history, v_dim = v.shape
    tokens, group = count // batch, heads // kv_heads
    if tokens == 1:
        stacked = None if bias is None else cast("torch.Tensor", bias).unsqueeze(1).expand(-1, -1, group, -1)
        out, lse = _kernel(q.reshape(batch, kv_heads, group, head_dim), k, v, stacked, scale)
        return out.reshape(count, heads, v_dim), lse.reshape(count, heads)
    rows = q.reshape(batch, tokens, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    large = group * tokens * history * q.element_size() > STACKED_MASK_LIMIT
    if batch == 1 and bias is not None and (isinstance(bias, CausalMask) or large):
        # Each query head for itself, the keys with a stride of 0 along the group: one mask serves all.
        keys, values = (x[0].unsqueeze(1).expand(kv_heads, group, history, -1) for x in (k, v))
        out, lse = _kernel(rows[0], keys, values, bias, scale)
        out, lse = out.permute(2, 0, 1, 3), lse.permute(2, 0, 1)
        return out.reshape(count, heads, v_dim), lse.reshape(count, heads)
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    if isinstance(bias, torch.Tensor):  # a row of the mask for each query head of a group
        shape = bias.shape[0], 1, group, tokens, history
        bias = bias.view(-1, 1, 1, tokens, history).expand(shape).reshape(-1, 1, group * tokens, history)
    out, lse = _kernel(rows, k, v, bias, scale)
    out = out.reshape(batch, kv_heads, group, tokens, v_dim).permute(0, 3, 1, 2, 4)
    lse = lse.reshape(batch, kv_heads, group, tokens).permute(0, 3, 1, 2)
    return out.reshape(count, heads, v_dim), lse.reshape(count, heads)


def _bias(
    ctx: Placement,
    masks: CausalMasks,
    q: torch.Tensor,
    v: torch.Tensor,
    history: int,
    mask: TorchTensor | CausalMask | None,
) -> Bias:
    """The mask as (batch or 1, tokens, history) of the query's dtype; CAUSAL where is_causal says the same.

    Kernels align is_causal top-left, CAUSAL is bottom-right: they agree for a whole prompt only.
    """
    if mask is None:
        return None
    batch, tokens = q.shape[:2]
    if isinstance(mask, CausalMask):
        if tokens > history:
            raise ShapeError(
                f"partial_attention: CAUSAL with {tokens} queries and {history} keys; some see none"
            )
        if tokens == 1:
            return None
        if batch == 1 and tokens == history and _fits(q, v):
            return mask
        return masks.of(q[0], history).unsqueeze(0)
    native = mask.native_on(ctx)
    if native.dim() != 3 or native.shape[0] not in (1, batch) or native.shape[2] != history:
        raise ShapeError(
            f"partial_attention: mask {mask.shape}; it has to be ({batch} or 1, rows >= {tokens}, {history})"
        )
    return native[:, :tokens].to(q.dtype)


def _fits(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the fused kernels, which want one head size, are there for these."""
    return q.shape[-1] == v.shape[-1] and (q.is_cpu or q.is_cuda)


def _kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float) -> Pair:
    """q (batch, heads, rows, D), k and v (batch, heads, history, ...) -> attention, log-sum-exp."""
    if _fits(q, v):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return _on_cpu(q, k, v, bias, scale) if q.is_cpu else _on_cuda(q, k, v, bias, scale)
    keys, values, found = k.float().transpose(-1, -2), v.float(), []
    step = max(1, SCORES_LIMIT // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        scores = torch.matmul(q[:, :, start : start + step].float() * scale, keys)
        if isinstance(bias, torch.Tensor):
            scores += bias if bias.shape[-2] == 1 else bias[..., start : start + step, :]
        lse = scores.logsumexp(-1)
        found.append((torch.matmul((scores - lse.unsqueeze(-1)).exp_(), values).to(q.dtype), lse))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _shown(bias: Bias) -> torch.Tensor | None:
    """A mask of four axes, as the kernels want it."""
    if not isinstance(bias, torch.Tensor):
        return None
    return bias if bias.dim() == 4 else bias.unsqueeze(1)


def _on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float) -> Pair:
    single = q.shape[2] == 1 and q.dtype is not torch.float32
    if single:  # two equal rows take half the time of one: the narrow dtypes have no product for one
        q = q.expand(-1, -1, 2, -1)
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    causal = isinstance(bias, CausalMask)
    out, lse = flash(q, k, v, 0.0, causal, attn_mask=_shown(bias), scale=scale)
    return (out[:, :, :1], lse[:, :, :1]) if single else (out, lse)


def _on_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float) -> Pair:
    """FlashAttention where it can, which takes no mask and no F32; else the memory-efficient kernel."""
    rows, history = q.shape[2], k.shape[2]
    aten: Any = torch.ops.aten
    causal, shown = isinstance(bias, CausalMask), _shown(bias)
    if shown is None and q.dtype is not torch.float32 and q.shape[3] <= 256 and not q.shape[3] % 8:
        flash = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return flash[0], flash[1]
    if shown is not None:
        padded = q.new_empty((*q.shape[:2], rows, -(-history // ALIGNED) * ALIGNED))
        shown = padded[..., :history].copy_(shown)
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, shown, True, is_causal=causal, scale=scale
    )
    return out, lse[:, :, :rows]
