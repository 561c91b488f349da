"""GGML's Q8_0 and Q4_0 in PyTorch's operations, bit for bit: see :class:`ml.SupportsBlockFormats`."""

from __future__ import annotations

import torch

from backends.torch.tensor import Placement, TorchTensor
from ml.dtypes import DType

BLOCK = 32
"""Values that share a scale."""


def quantized(ctx: Placement, x: TorchTensor, dtype: DType) -> tuple[TorchTensor, TorchTensor]:
    values = x.native_on(ctx)
    *outer, dim = values.shape
    blocks = values.float().reshape(*outer, dim // BLOCK, BLOCK)
    if dtype is DType.Q8_0:
        scale = blocks.abs().amax(-1, keepdim=True).mul_(1 / 127)
        scaled = blocks * _inverse(scale)
        codes = scaled.add_(scaled.sign(), alpha=0.5).to(torch.int8)  # half away from 0
    else:
        scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).mul_(-1 / 8)
        whole = (blocks * _inverse(scale)).add_(8.5).clamp_(0, 15).to(torch.uint8)
        codes = whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)
    return (
        TorchTensor.own(ctx, codes.flatten(-2), DType.I8 if dtype is DType.Q8_0 else DType.U8),
        TorchTensor.own(ctx, scale.squeeze(-1).half(), DType.F16),
    )


def dequantized(ctx: Placement, codes: TorchTensor, scales: TorchTensor, dtype: DType) -> TorchTensor:
    stored, scale = codes.native_on(ctx), scales.native_on(ctx)
    shape = (*scale.shape, BLOCK)
    if dtype is DType.Q4_0:  # bytes, which are fewer than the floats will be: what is below 0 wraps
        packed = stored.reshape(*shape[:-1], BLOCK // 2)
        stored = torch.cat((packed & 15, packed >> 4), -1).sub_(8).view(torch.int8)
    found = stored.reshape(shape).float().mul_(scale.unsqueeze(-1).float())
    return TorchTensor.own(ctx, found.flatten(-2), DType.F32)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 where the scale is 0."""
    return scale.reciprocal().masked_fill_(scale == 0, 0)
