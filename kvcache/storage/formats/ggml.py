"""GGML's blocks of 32 values that share one F16 scale: Q8_0 and Q4_0, bit for bit.

======  ==========================  =================  =====================  ==============
format  code of x in a block        scale d            codes per block        bytes per value
======  ==========================  =================  =====================  ==============
Q8_0    round(x / d)                max |x| / 127      32 of I8               34 / 32
Q4_0    trunc(x / d + 8.5), <= 15   max / -8           16 of U8, two in each  18 / 32
======  ==========================  =================  =====================  ==============

Codes are computed with the exact scale, which is then rounded to F16, as in GGML
(ggml/src/ggml-quants.c, quantize_row_q8_0_ref and quantize_row_q4_0_ref). The low half of a Q4_0 byte
is value j of the block, the high half value j + 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import ml
from kvcache.storage.formats.operations import check_blocks, inverse, number, quantized_by, read_by, same_sign

BLOCK = 32
"""Values that share a scale, along head_dim."""


class _Blocks:
    """Codes, ``packed`` to a byte, and F16 scales (..., dim / 32)."""

    name: str
    packed: int
    code_dtype: ml.DType

    def parts(self, dim: int, activations: ml.DType) -> tuple[tuple[int, ml.DType], ...]:
        check_blocks(self.name, BLOCK, dim)
        return (dim // self.packed, self.code_dtype), (dim // BLOCK, ml.DType.F16)

    def head_dim(self, width: int) -> int:
        return width * self.packed

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        parts = quantized_by(ctx, x, self.name)
        if parts is not None:
            return parts
        *outer, dim = x.shape
        blocks = x.cast(ctx, ml.DType.F32).reshape(ctx, *outer, dim // BLOCK, BLOCK)
        codes, scale = self._encode(ctx, blocks)
        scales = scale.cast(ctx, ml.DType.F16).reshape(ctx, *outer, dim // BLOCK)
        return codes.reshape(ctx, *outer, dim // self.packed), scales

    def decode(self, ctx: ml.Context, parts: Sequence[ml.Tensor], dim: int) -> ml.Tensor:
        values = read_by(ctx, parts, self.name)
        if values is not None:
            return values
        codes, scales = parts
        *outer, count = scales.shape
        stored = codes.cast(ctx, ml.DType.F32).reshape(ctx, *outer, count, BLOCK // self.packed)
        wide = scales.cast(ctx, ml.DType.F32).reshape(ctx, *outer, count, 1)
        return self._decode(ctx, stored).mul(ctx, wide).reshape(ctx, *outer, dim)

    def bound(self, x: np.ndarray, activations: ml.DType) -> np.ndarray:
        """The code's error plus the scale's rounding to F16, which changes a value by up to 2**-11 of the
        peak.
        """
        blocks = x.reshape(*x.shape[:-1], -1, BLOCK).astype(np.float64)
        peak = np.abs(blocks).max(axis=-1, keepdims=True)
        limit = self._step(peak) * (1 + 1e-5) + peak * 2.0**-11 + 127 * 2.0**-25
        return np.broadcast_to(limit, blocks.shape).reshape(x.shape)

    def _encode(self, ctx: ml.Context, blocks: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        """Codes of blocks F32 (..., 32), and their exact scales (..., 1)."""
        raise NotImplementedError

    def _decode(self, ctx: ml.Context, stored: ml.Tensor) -> ml.Tensor:
        """Codes, as F32 (..., 32), of the bytes (..., 32 / packed)."""
        raise NotImplementedError

    def _step(self, peak: np.ndarray) -> np.ndarray:
        """The largest distance of a value from its code times the exact scale."""
        raise NotImplementedError


class _Q8(_Blocks):
    name, packed, code_dtype = "Q8_0", 1, ml.DType.I8

    def _encode(self, ctx: ml.Context, blocks: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        scale = blocks.abs(ctx).max(ctx, -1, keepdims=True).div(ctx, number(ctx, 127.0))
        scaled = blocks.mul(ctx, inverse(ctx, scale))
        # Truncating then rounds halves away from zero, as roundf.
        return scaled.add(ctx, same_sign(ctx, scaled, 0.5)).cast(ctx, ml.DType.I8), scale

    def _decode(self, ctx: ml.Context, stored: ml.Tensor) -> ml.Tensor:
        return stored

    def _step(self, peak: np.ndarray) -> np.ndarray:
        return peak / 127 * 0.5


class _Q4(_Blocks):
    name, packed, code_dtype = "Q4_0", 2, ml.DType.U8

    def _encode(self, ctx: ml.Context, blocks: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        scale = _signed_peak(ctx, blocks).add(ctx, number(ctx, 0.0)).scale(ctx, -1 / 8)  # of -0.0 as of 0
        scaled = blocks.mul(ctx, inverse(ctx, scale)).add(ctx, number(ctx, 8.5))
        whole = scaled.clamp(ctx, 0, 15).cast(ctx, ml.DType.U8).cast(ctx, ml.DType.F32)
        low, high = (whole.slice(ctx, -1, half, half + BLOCK // 2) for half in (0, BLOCK // 2))
        return low.add(ctx, high.scale(ctx, 16)).cast(ctx, ml.DType.U8), scale

    def _decode(self, ctx: ml.Context, stored: ml.Tensor) -> ml.Tensor:
        low, high = halves_of_bytes(ctx, stored)
        return low.concat(ctx, high, -1).sub(ctx, number(ctx, 8.0))

    def _step(self, peak: np.ndarray) -> np.ndarray:
        """A whole step, for values at the short end of the asymmetric range (-8 to 7)."""
        return peak / 8


Q8_0, Q4_0 = _Q8(), _Q4()


def halves_of_bytes(ctx: ml.Context, stored: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
    """The low and the high half of bytes, all as F32."""
    # x / 16 - 15 / 32 lies within half of floor(x / 16) for whole x: rounding it is the floor.
    high = stored.scale(ctx, 1 / 16).sub(ctx, number(ctx, 15 / 32)).round(ctx)
    return stored.sub(ctx, high.scale(ctx, 16)), high


def _signed_peak(ctx: ml.Context, blocks: ml.Tensor) -> ml.Tensor:
    """The value of largest magnitude in each block, with its sign; the first one on a tie."""
    at = blocks.abs(ctx).argmax(ctx, -1, keepdims=True)
    places = ctx.arange(0, BLOCK, 1, ml.DType.I32)
    here = places.compare(ctx, "eq", at)
    return here.where(ctx, blocks, number(ctx, 0.0)).sum(ctx, -1, keepdims=True)
