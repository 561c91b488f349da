"""The storage formats of caches in PyTorch, bit for bit: see ``ml.SupportsKVStorage``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backends.torch.tensor import Placement, TorchTensor
from ml.block_formats import AFFINE, AFFINE_LEAST_STEP, F8_LARGEST, F8_LEAST_SCALE
from ml.dtypes import DType

BLOCK = 32
"""Values of Q8_0 and Q4_0 that share a scale."""


def encoded(ctx: Placement, x: TorchTensor, name: str) -> tuple[TorchTensor, ...] | None:
    """The parts of floats (..., dim); None for an unknown format."""
    native = x.native_on(ctx)
    if name in ("Q8_0", "Q4_0"):
        codes, scale = _to_blocks(native, name == "Q8_0")
        kind = DType.I8 if name == "Q8_0" else DType.U8
        return TorchTensor.own(ctx, codes, kind), TorchTensor.own(ctx, scale, DType.F16)
    if name == "F8_E4M3" and native.device.type != "mps":  # MPS has no 8-bit floats
        codes, scale = _to_float8(native)
        return TorchTensor.own(ctx, codes, DType.U8), TorchTensor.own(ctx, scale, DType.F32)
    if name not in AFFINE:
        return None
    words, *rest = _to_groups(native, *AFFINE[name])
    return TorchTensor.own(ctx, words, DType.I32), *(TorchTensor.own(ctx, one, x.dtype) for one in rest)


def decoded(ctx: Placement, parts: Sequence[TorchTensor], name: str) -> TorchTensor | None:
    """F32 (..., dim)."""
    stored = [part.native_on(ctx) for part in parts]
    if name in ("Q8_0", "Q4_0"):
        values = _from_blocks(stored[0], stored[1], name == "Q8_0")
    elif name == "F8_E4M3" and stored[0].device.type != "mps":
        values = stored[0].view(torch.float8_e4m3fn).float().mul_(stored[1])
    elif name in AFFINE:
        values = _from_groups(stored, *AFFINE[name])
    else:
        return None
    return TorchTensor.own(ctx, values, DType.F32)


def _to_blocks(values: torch.Tensor, eight: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """GGML's Q8_0 where ``eight``, else its Q4_0."""
    *outer, dim = values.shape
    blocks = values.float().reshape(*outer, dim // BLOCK, BLOCK)
    if eight:
        scale = blocks.abs().amax(-1, keepdim=True).div_(_scalar(blocks, 127))
        scaled = blocks * _inverse(scale)
        codes = scaled.add_(scaled.sign(), alpha=0.5).to(torch.int8)  # half away from 0
    else:
        peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = peak.add_(0.0).mul_(-1 / 8)  # no -0.0
        whole = (blocks * _inverse(scale)).add_(8.5).clamp_(0, 15).to(torch.uint8)
        codes = whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)
    return codes.flatten(-2), scale.squeeze(-1).half()


def _from_blocks(codes: torch.Tensor, scale: torch.Tensor, eight: bool) -> torch.Tensor:
    shape = (*scale.shape, BLOCK)
    if not eight:  # bytes are smaller than floats; negative ones wrap
        packed = codes.reshape(*shape[:-1], BLOCK // 2)
        codes = torch.cat((packed & 15, packed >> 4), -1).sub_(8).view(torch.int8)
    return codes.reshape(shape).float().mul_(scale.unsqueeze(-1).float()).flatten(-2)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 if that is not finite, since casting infinity to an integer depends on the
    processor.
    """
    reciprocal = scale.reciprocal()
    return torch.where(reciprocal.isfinite(), reciprocal, torch.zeros_like(reciprocal))


def _scalar(like: torch.Tensor, number: float) -> torch.Tensor:
    """A number on the device: CUDA does not divide by host numbers, but multiplies by their rounded
    inverse.
    """
    return torch.full((), number, dtype=like.dtype, device=like.device)


def _to_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).div_(_scalar(wide, F8_LARGEST))
    empty = scale < F8_LEAST_SCALE
    scale.masked_fill_(empty, 0)
    scaled = (wide / scale.masked_fill(empty, 1)).masked_fill_(empty, 0).clamp_(-F8_LARGEST, F8_LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scale


def _to_groups(x: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // group, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low).div_(_scalar(low, 2**bits - 1)).clamp_(min=AFFINE_LEAST_STEP)
    below = low.abs() > high.abs()
    step, edge = torch.where(below, step, -step), torch.where(below, low, high)
    at = (edge / step).round_()
    none = at == 0
    scale, bias = torch.where(none, step, edge / at), edge.masked_fill(none, 0)
    codes = (groups - bias).div_(scale).round_().clamp_(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return codes.contiguous().view(torch.int32), scale.squeeze(-1).to(x.dtype), bias.squeeze(-1).to(x.dtype)


def _from_groups(parts: Sequence[torch.Tensor], bits: int, group: int) -> torch.Tensor:
    words, scales, biases = parts
    codes = words.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = codes.reshape(*scales.shape, group).float().mul_(scales.unsqueeze(-1).float())
    return values.add_(biases.unsqueeze(-1).float()).flatten(-2)
