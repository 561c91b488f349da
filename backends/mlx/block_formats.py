"""GGML's Q8_0 and Q4_0 in MLX's operations, bit for bit: see :class:`ml.SupportsBlockFormats`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ml.dtypes import DType

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor

BLOCK = 32
"""Values that share a scale."""


def quantized(x: MlxTensor, dtype: DType) -> tuple[MlxTensor, MlxTensor]:
    work = x.storage.work
    eight = dtype is DType.Q8_0
    with work.lock, work.on_stream:
        codes, scales = blocks_of(x.read(), eight)
        return x.wrap(codes, DType.I8 if eight else DType.U8), x.wrap(scales, DType.F16)


def blocks_of(values: Any, eight: bool) -> tuple[Any, Any]:
    """Codes and scales of an array of floats (..., dim); on the stream that is current."""
    *outer, dim = values.shape
    blocks = mx.reshape(mx.astype(values, mx.float32), (*outer, dim // BLOCK, BLOCK))
    if eight:
        scale = mx.max(mx.abs(blocks), axis=-1, keepdims=True) * (1 / 127)
        scaled = blocks * _inverse(scale)
        codes = mx.astype(scaled + mx.sign(scaled) * 0.5, mx.int8)  # half away from 0
    else:
        peak = mx.argmax(mx.abs(blocks), axis=-1, keepdims=True)
        scale = mx.take_along_axis(blocks, peak, axis=-1) * (-1 / 8)
        whole = mx.astype(mx.clip(blocks * _inverse(scale) + 8.5, 0, 15), mx.uint8)
        codes = whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)
    codes = mx.reshape(codes, (*outer, codes.shape[-1] * (dim // BLOCK)))
    return codes, mx.reshape(mx.astype(scale, mx.float16), (*outer, dim // BLOCK))


def dequantized(codes: MlxTensor, scales: MlxTensor, dtype: DType) -> MlxTensor:
    work = codes.storage.work
    with work.lock, work.on_stream:
        *outer, count = scales.shape
        stored = mx.reshape(codes.read(), (*outer, count, codes.shape[-1] // count))
        if dtype is DType.Q4_0:  # bytes, which are fewer than the floats will be: what is below 0 wraps
            halves = mx.concatenate([stored & 15, stored >> 4], axis=-1)
            stored = mx.view(halves - mx.array(8, mx.uint8), mx.int8)
        values = mx.astype(stored, mx.float32) * mx.expand_dims(mx.astype(scales.read(), mx.float32), -1)
        return codes.wrap(mx.reshape(values, (*outer, count * BLOCK)), DType.F32)


def _inverse(scale: Any) -> Any:
    """1 / scale, and 0 where the scale is 0."""
    return mx.where(scale == 0, 0.0, mx.reciprocal(scale))
