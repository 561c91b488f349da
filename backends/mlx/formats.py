"""The storage formats of caches in MLX's operations: see :class:`ml.SupportsBlockFormats`.

Affine groups are MLX's own. On a CPU its numbers are those of every backend; its kernels for devices round
halves their own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from backends.mlx.block_formats import dequantized, quantized
from ml.block_formats import AFFINE, F8_LARGEST, F8_LEAST_SCALE
from ml.dtypes import DType

if TYPE_CHECKING:
    from backends.mlx.tensor import MlxTensor


def encoded(x: MlxTensor, name: str) -> tuple[MlxTensor, ...] | None:
    """The parts of floats (..., dim); None for a format that is not known here."""
    if name in ("Q8_0", "Q4_0"):
        return quantized(x, DType[name])
    work = x.storage.work
    with work.lock, work.on_stream:
        if name == "F8_E4M3":
            return _to_float8(x)
        if name not in AFFINE:
            return None
        bits, group = AFFINE[name]
        words, *rest = mx.quantize(x.read(), group, bits)
        return x.wrap(mx.view(words, mx.int32), DType.I32), *(x.wrap(one) for one in rest)


def decoded(parts: Sequence[MlxTensor], name: str) -> MlxTensor | None:
    """F32 (..., dim)."""
    if name in ("Q8_0", "Q4_0"):
        return dequantized(parts[0], parts[1], DType[name])
    work = parts[0].storage.work
    with work.lock, work.on_stream:
        codes, *scales = (part.read() for part in parts)
        if name == "F8_E4M3":
            return parts[0].wrap(mx.from_fp8(codes, mx.float32) * scales[0], DType.F32)
        if name not in AFFINE:
            return None
        bits, group = AFFINE[name]
        scale, bias = (mx.astype(one, mx.float32) for one in scales)
        found = mx.dequantize(mx.view(codes, mx.uint32), scale, bias, group, bits)
        return parts[0].wrap(found, DType.F32)


def _to_float8(x: MlxTensor) -> tuple[MlxTensor, MlxTensor]:
    wide = mx.astype(x.read(), mx.float32)
    scale = mx.max(mx.abs(wide), axis=-1, keepdims=True) / F8_LARGEST
    empty = scale < F8_LEAST_SCALE
    scaled = mx.clip(wide / mx.where(empty, 1.0, scale), -F8_LARGEST, F8_LARGEST)
    codes = mx.to_fp8(mx.where(empty, 0.0, scaled))
    return x.wrap(codes, DType.U8), x.wrap(mx.where(empty, 0.0, scale), DType.F32)
