"""Attention of a pass over one history."""

from __future__ import annotations

import torch

from backends.torch.kernels import (
    Bias,
    CausalMasks,
    attend_part,
    beside,
    causal_bias,
    check_heads,
    check_sinks,
    home,
    natives,
    with_sinks,
)
from backends.torch.tensor import Placement, TorchTensor
from ml.capabilities import CAUSAL, CausalMask
from ml.errors import DTypeError, ShapeError


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
    for tensor in (key, value, mask, sinks):
        if tensor is not None and tensor is not CAUSAL:
            query.check_peer("attention", tensor)
    k, q, v, logits = natives(ctx, key, query, value, sinks)
    check_heads("attention", q, k, v)
    if logits is not None:
        check_sinks("attention", logits, q.shape[1])
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
    """The mask as (1, tokens, history) of the query's dtype; CAUSAL where the kernel says that itself."""
    if mask is None:
        return None
    tokens, history = q.shape[0], v.shape[0]
    if isinstance(mask, CausalMask):
        return causal_bias("attention", masks, q, v, 1, history)
    native = beside(ctx, mask, q.device)
    if native.dim() != 2 or native.shape[0] < tokens or native.shape[1] != history:
        raise ShapeError(f"attention: mask {mask.shape}; it must be (rows >= {tokens}, {history})")
    if not native.dtype.is_floating_point:
        raise DTypeError(f"attention: mask {mask.dtype!r}; it must be additive: F32, F16 or BF16")
    return native[:tokens].to(q.dtype).unsqueeze(0)
