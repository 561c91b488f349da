"""MLX's affine groups: codes of 8 or 4 bits, with a scale and a bias for each group of values.

The result equals that of ``mx.quantize`` in mode "affine", number for number, so that it can be exchanged
with mlx-lm's kernels and saved caches. For a group with the smallest value l and the largest h::

    s = max((h - l) / (2**bits - 1), 1e-7), with the sign of |l| - |h| (minus where they are equal)
    e = l where |l| > |h|, else h;  q = round(e / s)
    scale, bias = (e / q, e), so that e is exact, or (s, 0) where q is 0
    codes = round((x - bias) / scale) within [0, 2**bits)

in F32, halves to even. Codes are computed with these; scales and biases are then rounded to the dtype of the
activations. 32-bit words contain the codes from the lowest bits up, and are stored as I32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import ml
from kvcache.storage.formats.ggml import halves_of_bytes
from kvcache.storage.formats.operations import check_blocks, number, quantized_by, read_by, select
from ml.block_formats import AFFINE, AFFINE_LEAST_STEP

_ROUNDING = {ml.DType.F32: 2.0**-24, ml.DType.F16: 2.0**-11, ml.DType.BF16: 2.0**-8}
"""The relative rounding error of a scale or a bias."""


class Affine:
    """Codes of ``bits`` in I32 words, scales and biases (..., dim / group) in the activations' dtype."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group
        self.name = f"AFFINE{bits}_{group}"

    def parts(self, dim: int, activations: ml.DType) -> tuple[tuple[int, ml.DType], ...]:
        check_blocks(self.name, self.group, dim)
        groups = dim // self.group
        return (dim * self.bits // 32, ml.DType.I32), (groups, activations), (groups, activations)

    def head_dim(self, width: int) -> int:
        return width * 32 // self.bits

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        parts = quantized_by(ctx, x, self.name)
        if parts is not None:
            return parts
        *outer, dim = x.shape
        groups = x.cast(ctx, ml.DType.F32).reshape(ctx, *outer, dim // self.group, self.group)
        scale, bias = self._fit(ctx, groups)
        codes = groups.sub(ctx, bias).div(ctx, scale).round(ctx).clamp(ctx, 0, 2**self.bits - 1)
        if self.bits == 4:
            pairs = codes.reshape(ctx, *outer, dim // 2, 2)
            low, high = (pairs.slice(ctx, -1, half, half + 1) for half in (0, 1))
            codes = low.add(ctx, high.scale(ctx, 16))
        words = _words(ctx, codes.reshape(ctx, *outer, dim * self.bits // 32, 4))
        rest = (one.cast(ctx, x.dtype).reshape(ctx, *outer, dim // self.group) for one in (scale, bias))
        return words, *rest

    def decode(self, ctx: ml.Context, parts: Sequence[ml.Tensor], dim: int) -> ml.Tensor:
        """``code * scale + bias``, in F32."""
        values = read_by(ctx, parts, self.name)
        if values is not None:
            return values
        words, *rest = parts
        *outer, count = rest[0].shape
        codes = _bytes(ctx, words)
        if self.bits == 4:
            low, high = halves_of_bytes(ctx, codes.reshape(ctx, *outer, dim // 2, 1))
            codes = low.concat(ctx, high, -1)
        codes = codes.reshape(ctx, *outer, count, self.group)
        scale, bias = (one.cast(ctx, ml.DType.F32).reshape(ctx, *outer, count, 1) for one in rest)
        return codes.mul(ctx, scale).add(ctx, bias).reshape(ctx, *outer, dim)

    def bound(self, x: np.ndarray, activations: ml.DType) -> np.ndarray:
        """One step, since making one edge exact may leave the other end a whole step outside, plus two
        roundings.
        """
        groups = x.reshape(*x.shape[:-1], -1, self.group).astype(np.float64)
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        step = np.maximum((high - low) / (2**self.bits - 1), AFFINE_LEAST_STEP) * (1 + 1e-5)
        moved = (high - low + 2 * np.abs(groups).max(-1, keepdims=True)) * _ROUNDING[activations] * 1.1
        tiny = 2.0**-17 if activations is ml.DType.F16 else 2.0**-126  # the loss of scales below its range
        return np.broadcast_to(step + moved + tiny, groups.shape).reshape(x.shape)

    def _fit(self, ctx: ml.Context, groups: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        """Exact scales and biases F32 (..., 1) of groups (..., group)."""
        high = groups.max(ctx, -1, keepdims=True)
        low = groups.neg(ctx).max(ctx, -1, keepdims=True).neg(ctx)
        step = high.sub(ctx, low).div(ctx, number(ctx, 2**self.bits - 1)).clamp(ctx, AFFINE_LEAST_STEP, None)
        below = low.abs(ctx).compare(ctx, "gt", high.abs(ctx))
        step, edge = select(ctx, below, step, step.neg(ctx)), select(ctx, below, low, high)
        at = edge.div(ctx, step).round(ctx)
        none = at.compare(ctx, "eq", number(ctx, 0.0))
        scale = select(ctx, none, step, edge.div(ctx, select(ctx, none, 1.0, at)))
        return scale, select(ctx, none, 0.0, edge)


FORMATS = {name: Affine(*sizes) for name, sizes in AFFINE.items()}


def _words(ctx: ml.Context, raw: ml.Tensor) -> ml.Tensor:
    """I32 (...) of bytes F32 (..., 4), the lowest first: the last one has the sign."""
    high = raw.slice(ctx, -1, 3, 4)
    high = high.sub(ctx, select(ctx, high.compare(ctx, "ge", number(ctx, 128.0)), 256.0, 0.0))
    signed = raw.slice(ctx, -1, 0, 3).concat(ctx, high, -1).cast(ctx, ml.DType.I32)
    weights = ctx.from_numpy(1 << 8 * np.arange(4), ml.DType.I32)
    return signed.mul(ctx, weights).sum(ctx, -1).cast(ctx, ml.DType.I32)


def _bytes(ctx: ml.Context, words: ml.Tensor) -> ml.Tensor:
    """The bytes F32 (..., 4) of I32 (...), the lowest first."""
    each, rest = [], words.contiguous(ctx).reshape(ctx, *words.shape, 1)
    for place in (24, 16, 8):
        byte, rest = _divided(ctx, rest, 1 << place)
        each.append(byte.cast(ctx, ml.DType.F32))
    high = each[0]
    each[0] = high.add(ctx, select(ctx, high.compare(ctx, "lt", number(ctx, 0.0)), 256.0, 0.0))
    whole = rest.cast(ctx, ml.DType.F32)
    for byte in reversed(each):
        whole = whole.concat(ctx, byte, -1)
    return whole


def _divided(ctx: ml.Context, x: ml.Tensor, size: int) -> tuple[ml.Tensor, ml.Tensor]:
    """I32 x as (quotient, rest) with 0 <= rest < size, a power of two.

    F32 rounds large x, so the quotient may be one too large, which shows in the rest.
    """
    whole = x.cast(ctx, ml.DType.F32).scale(ctx, 1 / size).sub(ctx, number(ctx, 0.498)).round(ctx)
    quotient = whole.cast(ctx, ml.DType.I32)
    each, unit, none = (ctx.full((1,), value, ml.DType.I32) for value in (size, 1, 0))
    rest = x.sub(ctx, quotient.mul(ctx, each))
    over = rest.compare(ctx, "lt", none).where(ctx, unit, none)
    return quotient.sub(ctx, over), rest.add(ctx, over.mul(ctx, each))
