"""The storage formats of caches in MLX's operations, bit for bit: see ``ml.SupportsKVStorage``.

Affine groups are MLX's own format. On a CPU its numbers equal those of every backend; its device kernels may
round halves differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ml.block_formats import AFFINE, F8_LARGEST, F8_LEAST_SCALE
from ml.dtypes import DType

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor

BLOCK = 32
"""Values of Q8_0 and Q4_0 that share a scale."""


def encoded(x: MlxTensor, name: str) -> tuple[MlxTensor, ...] | None:
    """The parts of floats (..., dim); None for an unknown format."""
    work = x.storage.work
    with work.lock, work.on_stream:
        if name in ("Q8_0", "Q4_0"):
            codes, scale = blocks_of(x.read(), name == "Q8_0")
            return x.wrap(codes, DType.I8 if name == "Q8_0" else DType.U8), x.wrap(scale, DType.F16)
        if name == "F8_E4M3":
            return _to_float8(x)
        if name not in AFFINE:
            return None
        bits, group = AFFINE[name]
        words, *rest = mx.quantize(x.read(), group, bits)
        return x.wrap(mx.view(words, mx.int32), DType.I32), *(x.wrap(one) for one in rest)


def decoded(parts: Sequence[MlxTensor], name: str) -> MlxTensor | None:
    """F32 (..., dim)."""
    work = parts[0].storage.work
    with work.lock, work.on_stream:
        codes, *scales = (part.read() for part in parts)
        if name in ("Q8_0", "Q4_0"):
            return parts[0].wrap(_from_blocks(codes, scales[0], name == "Q8_0"), DType.F32)
        if name == "F8_E4M3":
            return parts[0].wrap(mx.from_fp8(codes, mx.float32) * scales[0], DType.F32)
        if name not in AFFINE:
            return None
        bits, group = AFFINE[name]
        scale, bias = (mx.astype(one, mx.float32) for one in scales)
        if not codes.size:  # MLX cannot reshape empty arrays
            return parts[0].wrap(mx.zeros((*codes.shape[:-1], codes.shape[-1] * 32 // bits)), DType.F32)
        values = mx.dequantize(mx.view(codes, mx.uint32), scale, bias, group, bits)
        return parts[0].wrap(values, DType.F32)


def blocks_of(values: Any, eight: bool) -> tuple[Any, Any]:
    """GGML's Q8_0 where ``eight``, else its Q4_0; on the current stream."""
    *outer, dim = values.shape
    if not values.size:  # MLX has no maximum of empty arrays
        codes = mx.zeros((*outer, dim if eight else dim // 2), mx.int8 if eight else mx.uint8)
        return codes, mx.zeros((*outer, dim // BLOCK), mx.float16)
    blocks = mx.reshape(mx.astype(values, mx.float32), (*outer, dim // BLOCK, BLOCK))
    if eight:
        scale = mx.max(mx.abs(blocks), axis=-1, keepdims=True) / 127
        scaled = blocks * _inverse(scale)
        codes = mx.astype(scaled + mx.sign(scaled) * 0.5, mx.int8)  # half away from 0
    else:
        peak = mx.argmax(mx.abs(blocks), axis=-1, keepdims=True)
        scale = (mx.take_along_axis(blocks, peak, axis=-1) + 0.0) * (-1 / 8)  # -0.0 becomes 0.0
        whole = mx.astype(mx.clip(blocks * _inverse(scale) + 8.5, 0, 15), mx.uint8)
        codes = whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)
    codes = mx.reshape(codes, (*outer, codes.shape[-1] * (dim // BLOCK)))
    return codes, mx.reshape(mx.astype(scale, mx.float16), (*outer, dim // BLOCK))


def _from_blocks(codes: Any, scales: Any, eight: bool) -> Any:
    *outer, count = scales.shape
    stored = mx.reshape(codes, (*outer, count, codes.shape[-1] // count))
    if not eight:  # bytes are smaller than floats; negative ones wrap
        halves = mx.concatenate([stored & 15, stored >> 4], axis=-1)
        stored = mx.view(halves - mx.array(8, mx.uint8), mx.int8)
    values = mx.astype(stored, mx.float32) * mx.expand_dims(mx.astype(scales, mx.float32), -1)
    return mx.reshape(values, (*outer, count * BLOCK))


def _inverse(scale: Any) -> Any:
    """1 / scale, and 0 if that is not finite, since casting infinity to an integer depends on the
    processor.
    """
    reciprocal = mx.reciprocal(scale)
    return mx.where(mx.isfinite(reciprocal), reciprocal, 0.0)


def _to_float8(x: MlxTensor) -> tuple[MlxTensor, MlxTensor]:
    wide = mx.astype(x.read(), mx.float32)
    scale = mx.max(mx.abs(wide), axis=-1, keepdims=True) / F8_LARGEST
    empty = scale < F8_LEAST_SCALE
    scaled = mx.clip(wide / mx.where(empty, 1.0, scale), -F8_LARGEST, F8_LARGEST)
    codes = mx.to_fp8(mx.where(empty, 0.0, scaled))
    return x.wrap(codes, DType.U8), x.wrap(mx.where(empty, 0.0, scale), DType.F32)
