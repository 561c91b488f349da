"""Buffers in blocks of 32 values that share one F16 scale: GGML's Q8_0 and Q4_0.

Quantised on ``put`` and read back on ``get`` by the backend where it can (:class:`ml.SupportsBlockFormats`),
else with protocol operations alone: every backend with compute has them, for every attention cache. Codes
and scales lie in two plain buffers:

======  ==========================  =================  =====================  ==============
format  code of x in a block        scale d            codes per block        bytes per value
======  ==========================  =================  =====================  ==============
Q8_0    round(x / d)                max |x| / 127      32 of I8               34 / 32
Q4_0    trunc(x / d + 8.5), <= 15   max / -8           16 of U8, two in each  18 / 32
======  ==========================  =================  =====================  ==============

Codes are made with the exact scale and the scale is then rounded to F16, as GGML does
(ggml/src/ggml-quants.c, quantize_row_q8_0_ref and quantize_row_q4_0_ref). The low half of a Q4_0 byte
is value j of the block, the high half value j + 16.
"""

from __future__ import annotations

from typing import TypeGuard

import ml
from kvcache.cache import InvalidRangeError
from kvcache.storage.buffer import Buffer, Cells
from ml import nn

__all__ = ["BLOCK", "QuantizedBuffer", "check_dim", "dequantize", "quantize"]

BLOCK = 32
"""Values that share a scale, along head_dim."""


class QuantizedBuffer:
    """What :class:`kvcache.storage.buffer.Buffer` is, stored as codes and scales."""

    __slots__ = ("activations", "codes", "dim", "dtype", "heads", "scales")

    def __init__(
        self,
        ctx: ml.Context,
        dtype: ml.DType,
        cells: int,
        heads: int,
        dim: int,
        order: tuple[int, int, int],
        activations: ml.DType,
    ) -> None:
        self.heads, self.dim, self.dtype, self.activations = heads, dim, dtype, activations
        eight = dtype is ml.DType.Q8_0
        code_dtype = ml.DType.I8 if eight else ml.DType.U8
        self.codes = Buffer(ctx, code_dtype, cells, heads, dim if eight else dim // 2, order)
        self.scales = Buffer(ctx, ml.DType.F16, cells, heads, dim // BLOCK, order)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def blank(self, ctx: ml.Context, cells: Cells, count: int) -> None:
        self.codes.blank(ctx, cells, count)
        self.scales.blank(ctx, cells, count)

    def read(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        """Cells ``[start, start + count)``, dequantised: new storage (count, heads, dim)."""
        return self._decode(ctx, self.codes.read(ctx, start, count), self.scales.read(ctx, start, count))

    def read_batch(self, ctx: ml.Context, start: int, step: int, batch: int, count: int) -> ml.Tensor:
        parts = [part.read_batch(ctx, start, step, batch, count) for part in (self.codes, self.scales)]
        return self._decode(ctx, *parts)

    def gather_batch(self, ctx: ml.Context, cells: ml.Tensor, batch: int, count: int) -> ml.Tensor:
        parts = [part.gather_batch(ctx, cells, batch, count) for part in (self.codes, self.scales)]
        return self._decode(ctx, *parts)

    def read_permuted(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        return self.read(ctx, start, count).permute(ctx, 1, 2, 0)

    def gather(self, ctx: ml.Context, cells: ml.Tensor) -> ml.Tensor:
        return self._decode(ctx, self.codes.gather(ctx, cells), self.scales.gather(ctx, cells))

    def write(self, ctx: ml.Context, cells: Cells, source: ml.Tensor) -> ml.Tensor:
        codes, scales = quantize(ctx, source, self.dtype)
        ctx.forward(self.scales.write(ctx, cells, scales))
        return self.codes.write(ctx, cells, codes)

    def fetch(self, ctx: ml.Context, cells: ml.Tensor) -> tuple[ml.Tensor, ...]:
        return *self.codes.fetch(ctx, cells), *self.scales.fetch(ctx, cells)

    def store(self, ctx: ml.Context, cells: ml.Tensor, found: tuple[ml.Tensor, ...]) -> None:
        self.codes.store(ctx, cells, found[:1])
        self.scales.store(ctx, cells, found[1:])

    def read_stored(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ...]:
        """Copies of codes and scales (count, heads, ...), for :meth:`write_stored`."""
        return *self.codes.read_stored(ctx, cells, count), *self.scales.read_stored(ctx, cells, count)

    def write_stored(self, ctx: ml.Context, cells: Cells, found: tuple[ml.Tensor, ...]) -> None:
        self.codes.write_stored(ctx, cells, found[:1])
        self.scales.write_stored(ctx, cells, found[1:])

    def stored_views(self, ctx: ml.Context, start: int, count: int) -> tuple[ml.Tensor, ...]:
        """Codes and scales of a run of cells, where they lie."""
        return *self.codes.stored_views(ctx, start, count), *self.scales.stored_views(ctx, start, count)

    def _decode(self, ctx: ml.Context, codes: ml.Tensor, scales: ml.Tensor) -> ml.Tensor:
        """Of codes (..., cells, heads, bytes), in the order of axes that they have in memory."""
        axes = [*range(len(codes.shape))]
        if self.codes.order[0] == 1:
            axes[-3], axes[-2] = axes[-2], axes[-3]
        found = dequantize(ctx, codes.permute(ctx, *axes), scales.permute(ctx, *axes), self.dtype)
        if self.activations is not ml.DType.F32:
            found = found.cast(ctx, self.activations)
        return found.permute(ctx, *axes)


def check_dim(dtype: ml.DType, dim: int) -> None:
    """Raise InvalidRangeError unless heads of ``dim`` divide into blocks."""
    if dim % BLOCK or dim == 0:
        raise InvalidRangeError(
            f"put: head_dim {dim} in a cache of {dtype.name}, whose blocks are {BLOCK} values along "
            "head_dim; use a multiple of it, or init the cache with F16"
        )


def quantize(ctx: ml.Context, x: ml.Tensor, dtype: ml.DType) -> tuple[ml.Tensor, ml.Tensor]:
    """Codes (..., dim) I8 or (..., dim / 2) U8, and scales (..., dim / 32) F16, of floats (..., dim)."""
    backend = getattr(ctx, "backend", None)
    if _has_formats(backend):
        return backend.quantize(ctx, x, dtype)
    *outer, dim = x.shape
    blocks = x.cast(ctx, ml.DType.F32).reshape(ctx, *outer, dim // BLOCK, BLOCK)
    if dtype is ml.DType.Q8_0:
        scale = blocks.abs(ctx).max(ctx, -1, keepdims=True).scale(ctx, 1 / 127)
        scaled = blocks.mul(ctx, _inverse(ctx, scale))
        codes = scaled.add(ctx, _half_away(ctx, scaled)).cast(ctx, ml.DType.I8)
    else:
        scale = _signed_peak(ctx, blocks).scale(ctx, -1 / 8)
        scaled = blocks.mul(ctx, _inverse(ctx, scale)).add(ctx, _number(ctx, 8.5))
        whole = scaled.clamp(ctx, 0, 15).cast(ctx, ml.DType.U8).cast(ctx, ml.DType.F32)
        low, high = (whole.slice(ctx, -1, half, half + BLOCK // 2) for half in (0, BLOCK // 2))
        codes = low.add(ctx, high.scale(ctx, 16)).cast(ctx, ml.DType.U8)
    size = codes.shape[-1] * (dim // BLOCK)
    scales = scale.cast(ctx, ml.DType.F16).reshape(ctx, *outer, dim // BLOCK)
    return codes.reshape(ctx, *outer, size), scales


def dequantize(ctx: ml.Context, codes: ml.Tensor, scales: ml.Tensor, dtype: ml.DType) -> ml.Tensor:
    """The F32 values (..., dim) that ``quantize`` stored."""
    backend = getattr(ctx, "backend", None)
    if _has_formats(backend):
        return backend.dequantize(ctx, codes, scales, dtype)
    *outer, count = scales.shape
    values = codes.cast(ctx, ml.DType.F32)
    if dtype is ml.DType.Q4_0:
        packed = values.reshape(ctx, *outer, count, BLOCK // 2)
        # x / 16 - 15 / 32 lies within half of floor(x / 16) for whole x: rounding it is the floor.
        high = packed.scale(ctx, 1 / 16).sub(ctx, _number(ctx, 15 / 32)).round(ctx)
        low = packed.sub(ctx, high.scale(ctx, 16))
        values = low.concat(ctx, high, -1).sub(ctx, _number(ctx, 8.0))
    else:
        values = values.reshape(ctx, *outer, count, BLOCK)
    wide = scales.cast(ctx, ml.DType.F32).reshape(ctx, *outer, count, 1)
    return values.mul(ctx, wide).reshape(ctx, *outer, count * BLOCK)


def _has_formats(backend: ml.Backend | None) -> TypeGuard[ml.SupportsBlockFormats]:
    return nn.offers(backend, ml.SupportsBlockFormats)


def _number(ctx: ml.Context, value: float) -> ml.Tensor:
    return ctx.full((1,), value, ml.DType.F32)


def _inverse(ctx: ml.Context, scale: ml.Tensor) -> ml.Tensor:
    """1 / scale, and 0 where the scale is 0."""
    zero, one = _number(ctx, 0.0), _number(ctx, 1.0)
    empty = scale.compare(ctx, "eq", zero)
    return empty.where(ctx, zero, one.div(ctx, empty.where(ctx, one, scale)))


def _half_away(ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
    """0.5 with the sign of x: adding it and truncating rounds halves away from zero, as roundf."""
    return x.compare(ctx, "ge", _number(ctx, 0.0)).where(ctx, _number(ctx, 0.5), _number(ctx, -0.5))


def _signed_peak(ctx: ml.Context, blocks: ml.Tensor) -> ml.Tensor:
    """The value of largest magnitude in each block, with its sign; the first one on a tie."""
    at = blocks.abs(ctx).argmax(ctx, -1, keepdims=True)
    places = ctx.arange(0, BLOCK, 1, ml.DType.I32)
    here = places.compare(ctx, "eq", at)
    return here.where(ctx, blocks, _number(ctx, 0.0)).sum(ctx, -1, keepdims=True)
