"""Attention through ``torch.nn.functional.scaled_dot_product_attention`` (SDPA).

The queries that share a KV head are stacked as rows of one product, so that its keys are read
once: on a CPU that took 0.95 ms where ``enable_gqa`` took 1.6 (one query, 32 heads over 8, 1,024
keys, F32), and 0.8 ms against 7.4 in BF16. Long prompts keep a head axis of stride 0 instead: the
mask then need not be repeated, and ``is_causal`` can be said. Neither copies keys or values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from backends.torch.tensor import Placement, TorchTensor
from ml.capabilities import CAUSAL, CausalMask
from ml.errors import DTypeError, ShapeError

__all__ = ["CausalMasks", "attend", "check_heads", "check_sinks"]

STACKED_MASK_LIMIT = 16 << 20
"""Bytes of a mask that may be repeated for the query heads of a group."""
SCORES_LIMIT = 1 << 24
"""Scores in F32 that the body without SDPA holds at once."""


class CausalMasks:
    """Masks of 0 and -inf, aligned bottom-right; the last is kept, since all layers of a pass use it."""

    def __init__(self) -> None:
        self._last: tuple[Any, torch.Tensor] | None = None

    def of(self, q: torch.Tensor, history: int) -> torch.Tensor:
        """(tokens, history) for the queries ``q`` (tokens, ...), of their dtype and on their device."""
        tokens = q.shape[0]
        wanted = (tokens, history, q.dtype, q.device)
        last = self._last
        if last is None or last[0] != wanted:
            with torch.inference_mode(False):
                minus = torch.full((tokens, history), -torch.inf, dtype=q.dtype, device=q.device)
                last = self._last = wanted, minus.triu_(history - tokens + 1)
        return last[1]

    def clear(self) -> None:
        self._last = None


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
    q, k, v = query.native_on(ctx), key.native_on(ctx), value.native_on(ctx)
    check_heads("attention", q, k, v)
    tokens, heads, head_dim = q.shape
    history, kv_heads, v_dim = v.shape
    bias = _bias(ctx, masks, q, history, mask)
    logits = None if sinks is None else _logits(sinks.native_on(ctx), kv_heads, heads)
    if 0 in q.shape or history == 0:
        return TorchTensor.own(ctx, q.new_zeros((tokens, heads, v_dim)), query.dtype)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    # The fused kernel of the CPU wants one head size; elsewhere none gives what sinks need.
    fused = v_dim == head_dim if q.is_cpu else logits is None
    if fused and tokens == 1:
        return TorchTensor.own(ctx, _one(q, k, v, bias, scale, logits), query.dtype)
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    if fused:
        out = _fused(grouped, k, v, bias, scale, logits)
    else:
        out = _plain(grouped, k, v, _shown(masks, q, history, bias), scale, logits)
    return TorchTensor.own(ctx, out.permute(2, 0, 1, 3).reshape(tokens, heads, v_dim), query.dtype)


def check_heads(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ShapeError or DTypeError unless these are heads of one attention."""
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if not q.dim() == k.dim() == v.dim() == 3 or shapes[1][:2] != shapes[2][:2]:
        raise ShapeError(f"{op}: query, key, value {shapes}; each is (tokens, heads, size)")
    if shapes[0][2] != shapes[1][2] or not shapes[1][1] or shapes[0][1] % shapes[1][1]:
        raise ShapeError(
            f"{op}: query {shapes[0]}, key {shapes[1]}; one head size, heads a multiple of KV heads"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise DTypeError(f"{op}: query, key, value {q.dtype}, {k.dtype}, {v.dtype}; one float dtype")


def check_sinks(op: str, sinks: torch.Tensor, heads: int) -> None:
    if tuple(sinks.shape) != (heads,) or not sinks.dtype.is_floating_point:
        raise ShapeError(f"{op}: sinks {sinks.dtype} {tuple(sinks.shape)}; they are floats ({heads},)")


def _bias(
    ctx: Placement,
    masks: CausalMasks,
    q: torch.Tensor,
    history: int,
    mask: TorchTensor | CausalMask | None,
) -> torch.Tensor | CausalMask | None:
    """The mask as (tokens, history) of the query's dtype, CAUSAL where torch's is_causal says it, or None.

    torch's is_causal is aligned top-left, ours bottom-right: the same for a whole prompt only.
    """
    tokens = q.shape[0]
    if mask is None:
        return None
    if mask is CAUSAL:
        if tokens > history:
            raise ShapeError(f"attention: CAUSAL with {tokens} queries and {history} keys; some see none")
        if tokens < 2:
            return None
        return CAUSAL if tokens == history else masks.of(q, history)
    native = mask.native_on(ctx)
    if native.dim() != 2 or native.shape[0] < tokens or native.shape[1] != history:
        raise ShapeError(f"attention: mask {mask.shape}; it has to be (rows >= {tokens}, {history})")
    if not native.dtype.is_floating_point:
        raise DTypeError(f"attention: mask {mask.dtype!r}; it is additive, F32, F16 or BF16")
    return native[:tokens].to(q.dtype)


def _shown(
    masks: CausalMasks, q: torch.Tensor, history: int, bias: torch.Tensor | CausalMask | None
) -> torch.Tensor | None:
    return masks.of(q, history) if isinstance(bias, CausalMask) else bias


def _logits(sinks: torch.Tensor, kv_heads: int, heads: int) -> torch.Tensor:
    """(kv_heads, group, 1) in F32."""
    check_sinks("attention", sinks, heads)
    return sinks.to(torch.float32).reshape(kv_heads, heads // kv_heads, 1)


def _one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | CausalMask | None,
    scale: float,
    logits: torch.Tensor | None,
) -> torch.Tensor:
    """q (1, heads, D), as it comes in decoding; (1, heads, v_dim). The mask's one row serves all."""
    kv_heads, history, v_dim = v.shape
    rows = q.reshape(1, kv_heads, -1, q.shape[2])
    if isinstance(bias, torch.Tensor):
        bias = bias.expand(rows.shape[2], history)
    if logits is not None:
        logits = logits.squeeze(-1)
    return _sdpa(rows, k.unsqueeze(0), v.unsqueeze(0), bias, scale, logits).reshape(1, -1, v_dim)


def _fused(
    grouped: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | CausalMask | None,
    scale: float,
    logits: torch.Tensor | None,
) -> torch.Tensor:
    """grouped (kv_heads, group, tokens, D), k and v (kv_heads, history, ...); as grouped with v_dim."""
    kv_heads, group, tokens, head_dim = grouped.shape
    history = k.shape[1]
    causal = isinstance(bias, CausalMask)
    if causal or group * tokens * history * k.element_size() > STACKED_MASK_LIMIT:
        many = (kv_heads, group, history, -1)
        k, v = k.unsqueeze(1).expand(many), v.unsqueeze(1).expand(many)
        return _sdpa(grouped, k, v, bias, scale, logits)
    rows = grouped.reshape(1, kv_heads, group * tokens, head_dim)
    if isinstance(bias, torch.Tensor):
        bias = bias.expand(group, tokens, history).reshape(group * tokens, history)
    if logits is not None:
        logits = logits.expand(kv_heads, group, tokens).reshape(kv_heads, group * tokens)
    out = _sdpa(rows, k.unsqueeze(0), v.unsqueeze(0), bias, scale, logits)
    return out.reshape(kv_heads, group, tokens, v.shape[-1])


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | CausalMask | None,
    scale: float,
    logits: torch.Tensor | None,
) -> torch.Tensor:
    """Four axes each; ``logits`` broadcasts to the first three of ``q``."""
    single = q.shape[2] == 1 and q.is_cpu and q.dtype is not torch.float32
    if single:  # two equal rows take half the time of one: the narrow dtypes have no product for one
        q = q.expand(-1, -1, 2, -1)
    causal = isinstance(bias, CausalMask)
    shown = None if isinstance(bias, CausalMask) else bias
    if logits is None:
        out = functional.scaled_dot_product_attention(q, k, v, shown, is_causal=causal, scale=scale)
        return out[:, :, :1] if single else out
    # The sink is one more key of value 0: it only shrinks a row, by exp(lse) / (exp(lse) + exp(sink)).
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=shown, scale=scale
    )
    if single:
        out, lse = out[:, :, :1], lse[:, :, :1]
    share: torch.Tensor = torch.sigmoid(lse - logits).unsqueeze(-1)
    shrunk: torch.Tensor = out * share
    return shrunk.to(q.dtype)


def _plain(
    grouped: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    logits: torch.Tensor | None,
) -> torch.Tensor:
    """What no fused kernel does, in F32 and in blocks of queries; shapes as in ``_fused``."""
    kv_heads, group, tokens, head_dim = grouped.shape
    keys, values = k.float().transpose(1, 2), v.float()
    out = grouped.new_empty((kv_heads, group, tokens, v.shape[2]))
    step = max(1, SCORES_LIMIT // (kv_heads * group * k.shape[1]))
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        rows = grouped[:, :, part].float().reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(rows * scale, keys).reshape(kv_heads, group, -1, k.shape[1])
        if bias is not None:
            scores = scores + bias[part]
        if logits is None:
            weights = scores.softmax(-1)
        else:  # the sink is one more key of value 0
            sink = logits.unsqueeze(-1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        rows = weights.reshape(kv_heads, -1, k.shape[1])
        out[:, :, part] = torch.bmm(rows, values).reshape(kv_heads, group, -1, v.shape[2])
    return out
