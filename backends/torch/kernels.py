"""The kernels of ``scaled_dot_product_attention`` (SDPA), which also return the log-sum-exp. On CUDA, the
choice is not left to torch: from 2.10 on it prefers cuDNN on some devices, which plans for tens of
milliseconds at every new length of a history. FlashAttention is used without a mask, and the memory-efficient
kernel with one, with F32, or with two head sizes.

The queries that share a KV head are stacked as rows of one product, and several batches are one call.
Neither keys nor values are copied if their last axis is contiguous.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch.nn import functional

from backends.torch.tensor import Placement, TorchTensor
from ml.capabilities import CausalMask
from ml.dtypes import DType

STACKED_MASK_LIMIT = 16 << 20
"""The most bytes of a mask that is repeated for the query heads of a group."""
SCORES_LIMIT = 1 << 24
"""The most F32 scores that the implementation without a kernel holds at once."""
ALIGNED = 16
"""CUDA's kernels need heads of multiples of this many bytes, and masks whose rows begin at such multiples."""
BOTTOM_RIGHT = 2
"""The memory-efficient kernel's number for the mask ``ml.CAUSAL``."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Attention and its log-sum-exp, F32."""
Bias = torch.Tensor | CausalMask | None


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


def natives(ctx: Placement, key: TorchTensor, *others: TorchTensor | None) -> list[Any]:
    """The native tensors on the key's device: queries move to the history, never the history to queries."""
    if not ctx.moves:
        return [key.native] + [None if other is None else other.native for other in others]
    device = key.native.device
    return [key.native, *(None if other is None else beside(ctx, other, device) for other in others)]


def beside(ctx: Placement, tensor: TorchTensor, device: torch.device) -> torch.Tensor:
    """The native tensor, on the device of the tensor it is used with."""
    return tensor.native.to(device) if ctx.moves else tensor.native


def home(ctx: Placement, result: torch.Tensor, dtype: DType) -> TorchTensor:
    """A result on the context's device."""
    if ctx.moves:
        result = result.to(ctx.torch_device)
    return TorchTensor.own(ctx, result, dtype)


def causal_bias(masks: CausalMasks, q: torch.Tensor, v: torch.Tensor, batch: int, history: int) -> Bias:
    """The bias for ``ml.CAUSAL`` with q (tokens, heads, D) and v (..., v_dim). CAUSAL if the kernel supports
    it: bottom-right aligned on CUDA, top-left on the CPU, which is equal only for a whole prompt; else a mask
    (1, tokens, history). None for one query.
    """
    tokens = q.shape[0]
    if tokens < 2:
        return None
    if batch == 1 and fits(q, v) and (q.is_cuda or tokens == history):
        return CausalMask.CAUSAL
    return masks.of(q, history).unsqueeze(0)


def with_sinks(pair: Pair, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Attention with an additional key of value 0 per head, whose logit broadcasts to the log-sum-exp. This
    only scales a row by exp(lse) / (exp(lse) + exp(logit)).
    """
    out, lse = pair
    shrunk: torch.Tensor = out * torch.sigmoid(lse - logits).unsqueeze(-1)
    return shrunk.to(dtype)


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float, with_lse: bool = True
) -> Pair:
    """q (batch * tokens, heads, D), k, v (batch, kv_heads, history, ...), bias (batch or 1, tokens, history).

    Returns (batch * tokens, heads, v_dim) and (batch * tokens, heads), which without ``with_lse`` is
    unspecified.
    """
    out, lse = attend_grouped(q, k, v, bias, scale, with_lse)
    count, heads, _ = q.shape
    return out.reshape(count, heads, v.shape[3]), lse.reshape(count, heads) if with_lse else lse


def attend_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float, with_lse: bool = True
) -> Pair:
    """As ``attend_part``: (batch * tokens, kv_heads, group, v_dim) and (batch * tokens, kv_heads, group).

    These are views of the kernel's result, unless there are several batches of several tokens each.

    On a CPU, stacking took 0.95 ms and ``enable_gqa`` 1.6 (one query, 32 heads over 8, 1,024 keys, F32); in
    BF16, 0.8 ms and 7.4. Long prompts keep a head axis of stride 0 instead, so that the mask is not repeated
    and CAUSAL can be used.
    """
    count, heads, head_dim = q.shape
    batch, kv_heads, history, v_dim = v.shape
    tokens, group = count // batch, heads // kv_heads
    if tokens == 1:
        stacked = None if bias is None else cast("torch.Tensor", bias).unsqueeze(1).expand(-1, -1, group, -1)
        return attend_rows(q.reshape(batch, kv_heads, group, head_dim), k, v, stacked, scale, with_lse)
    rows = q.reshape(batch, tokens, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    large = group * tokens * history * q.element_size() > STACKED_MASK_LIMIT
    if batch == 1 and bias is not None and (isinstance(bias, CausalMask) or large):
        # Each query head separately, with keys of stride 0 along the group: one mask applies to all.
        keys, values = (x[0].unsqueeze(1).expand(kv_heads, group, history, -1) for x in (k, v))
        out, lse = attend_rows(rows[0], keys, values, bias, scale, with_lse)
        return out.permute(2, 0, 1, 3), lse.permute(2, 0, 1) if with_lse else lse
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    if isinstance(bias, torch.Tensor):  # a row of the mask for each query head of a group
        shape = bias.shape[0], 1, group, tokens, history
        bias = bias.view(-1, 1, 1, tokens, history).expand(shape).reshape(-1, 1, group * tokens, history)
    out, lse = attend_rows(rows, k, v, bias, scale, with_lse)
    out = out.reshape(batch, kv_heads, group, tokens, v_dim).permute(0, 3, 1, 2, 4).flatten(0, 1)
    if with_lse:
        lse = lse.reshape(batch, kv_heads, group, tokens).permute(0, 3, 1, 2).flatten(0, 1)
    return out, lse


@functools.lru_cache(maxsize=16)
def _is_recent(device: torch.device) -> bool:
    """Whether a device has FlashAttention, and the kernels for BF16."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def fits(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether there is a fused kernel for these operands."""
    if q.is_cpu:
        return q.size(-1) == v.size(-1)
    if not q.is_cuda or (q.dtype is torch.bfloat16 and not _is_recent(q.device)):
        return False
    return all(x.shape[-1] * x.element_size() % ALIGNED == 0 for x in (q, v))


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float, with_lse: bool
) -> Pair:
    """q (batch, heads, rows, D), k and v (batch, heads, history, ...) -> attention, log-sum-exp."""
    if scale <= 0:  # the kernels find the largest score before scaling
        q, scale = q * scale, 1.0
    if fits(q, v):
        if q.is_cpu:
            return _on_cpu(q, k, v, bias, scale, with_lse)
        return _on_cuda(_dense(q), _dense(k), _dense(v), bias, scale)
    if q.is_mps and not with_lse:
        out = functional.scaled_dot_product_attention(q, k, v, _shown(bias), scale=scale)
        return out, out
    keys, values, blocks = k.float().transpose(-1, -2), v.float(), []
    step = max(1, SCORES_LIMIT // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        scores = torch.matmul(q[:, :, start : start + step].float() * scale, keys)
        if isinstance(bias, torch.Tensor):
            scores += bias if bias.shape[-2] == 1 else bias[..., start : start + step, :]
        lse = scores.logsumexp(-1) if with_lse else scores
        blocks.append((torch.matmul(scores.softmax(-1), values).to(q.dtype), lse))
    outs, lses = zip(*blocks, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _shown(bias: Bias) -> torch.Tensor | None:
    """A mask of four axes, as required by the kernels."""
    if not isinstance(bias, torch.Tensor):
        return None
    return bias if bias.dim() == 4 else bias.unsqueeze(1)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor with a contiguous last axis, as required by the kernels."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float, with_lse: bool
) -> Pair:
    single = q.dtype is not torch.float32 and q.size(2) == 1
    if single:  # two equal rows take half the time of one, since narrow dtypes lack a matrix-vector product
        q = q.expand(-1, -1, 2, -1)
    causal, shown = isinstance(bias, CausalMask), _shown(bias)
    if with_lse:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(_dense(q), _dense(k), _dense(v), 0.0, causal, attn_mask=shown, scale=scale)
    else:  # the same kernel with less overhead
        out = functional.scaled_dot_product_attention(q, k, v, shown, is_causal=causal, scale=scale)
        lse = out
    return (out[:, :, :1], lse[:, :, :1]) if single else (out, lse)


def _on_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Bias, scale: float) -> Pair:
    aten: Any = torch.ops.aten
    causal, shown = isinstance(bias, CausalMask), _shown(bias)
    size = q.shape[3]
    flash = shown is None and q.dtype is not torch.float32 and size == v.shape[3] <= 256
    if flash and _is_recent(q.device):
        # Unlike in SDPA, is_causal is bottom-right aligned here.
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse
    if shown is not None:
        shown = _aligned(shown).expand(*q.shape[:3], k.shape[2])
    out, lse, *_ = aten._efficient_attention_forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias=shown,
        cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0,
        custom_mask_type=BOTTOM_RIGHT if causal else 0, compute_log_sumexp=True, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse[:, :, : q.shape[2]]


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask in memory with aligned rows."""
    unit = ALIGNED // mask.element_size()
    if mask.stride(-1) == 1 and not any(step % unit for step in mask.stride()[:-1]):
        return mask
    history = mask.shape[-1]
    padded = mask.new_empty((*mask.shape[:-1], -(-history // unit) * unit))
    return padded[..., :history].copy_(mask)
