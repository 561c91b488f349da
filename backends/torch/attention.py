"""Attention of a pass over one history."""

from __future__ import annotations

import torch

from backends.torch.kernels import (
    Bias,
    CausalMasks,
    attend_part,
    beside,
    causal_bias,
    home,
    natives,
    with_sinks,
)
from backends.torch.tensor import Placement, TorchTensor
from ml.base import check_attention
from ml.capabilities import CausalMask


def attend(
    ctx: Placement,
    masks: CausalMasks,
    query: TorchTensor,
    key: TorchTensor,
    value: TorchTensor,
    mask: TorchTensor | CausalMask | None,
    scale: float,
    sinks: TorchTensor | None,
) -> TorchTensor:
    """query (tokens, heads, D), key (history, kv_heads, D), value (history, kv_heads, v_dim)."""
    check_attention("attention", ctx.backend, query, key, value, mask, sinks)
    k, q, v, logits = natives(ctx, key, query, value, sinks)
    bias = _bias(ctx, masks, q, v, mask)
    if not (q.numel() and v.numel()):
        return home(ctx, q.new_zeros((*q.shape[:2], v.shape[2])), query.dtype)
    k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    if logits is None:
        return home(ctx, attend_part(q, k, v, bias, scale, with_lse=False)[0], query.dtype)
    return home(ctx, with_sinks(attend_part(q, k, v, bias, scale), logits.float(), q.dtype), query.dtype)


def _bias(
    ctx: Placement,
    masks: CausalMasks,
    q: torch.Tensor,
    v: torch.Tensor,
    mask: TorchTensor | CausalMask | None,
) -> Bias:
    """The mask as (1, tokens, history) in the query's dtype; CAUSAL if the kernel supports it directly."""
    if mask is None:
        return None
    if isinstance(mask, CausalMask):
        return causal_bias(masks, q, v, 1, v.shape[0])
    return beside(ctx, mask, q.device)[: q.shape[0]].to(q.dtype).unsqueeze(0)
