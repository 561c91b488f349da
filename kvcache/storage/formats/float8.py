"""F8_E4M3: 8-bit floats with a 4-bit exponent, and an F32 scale for each token and KV head. The scale is max
|x| / 448 (0 if that is below 2**-126), where 448 is the largest number of the format; codes are x / scale,
rounded to nearest even. It is the variant without infinities, as in OCP's specification of 8-bit floats,
PyTorch's ``float8_e4m3fn`` and vLLM's ``fp8`` caches::

    code  sign | exponent e (4) | mantissa m (3)     e > 0: (8 + m) * 2**(e - 10);  e = 0: m * 2**-9
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

import ml
from kvcache.cache import InvalidRangeError
from kvcache.storage.formats.operations import number, quantized_by, read_by, select
from ml.block_formats import F8_LARGEST, F8_LEAST_SCALE

_NUMBERS = np.nan_to_num(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
"""The numbers of all codes; 0 for NaN, which no finite number is encoded as."""
_EXPONENTS = np.arange(-5, 9)


class _F8:
    name = "F8_E4M3"

    def parts(self, dim: int, activations: ml.DType) -> tuple[tuple[int, ml.DType], ...]:
        if dim <= 0:
            raise InvalidRangeError(f"put: head_dim {dim} in a cache of {self.name}; it must be at least 1")
        return (dim, ml.DType.U8), (1, ml.DType.F32)

    def head_dim(self, width: int) -> int:
        return width

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        parts = quantized_by(ctx, x, self.name)
        if parts is not None:
            return parts
        x = x.cast(ctx, ml.DType.F32)
        scale = x.abs(ctx).max(ctx, -1, keepdims=True).div(ctx, number(ctx, F8_LARGEST))
        scale = select(ctx, scale.compare(ctx, "lt", number(ctx, F8_LEAST_SCALE)), 0.0, scale)
        empty = scale.compare(ctx, "eq", number(ctx, 0.0))
        scaled = x.div(ctx, select(ctx, empty, 1.0, scale)).clamp(ctx, -F8_LARGEST, F8_LARGEST)
        return _codes(ctx, select(ctx, empty, 0.0, scaled)), scale

    def decode(self, ctx: ml.Context, parts: Sequence[ml.Tensor], dim: int) -> ml.Tensor:
        values = read_by(ctx, parts, self.name)
        if values is not None:
            return values
        codes, scale = parts
        listed = codes.contiguous(ctx).reshape(ctx, -1).cast(ctx, ml.DType.I32)
        return ctx.from_numpy(_NUMBERS).rows(ctx, listed).reshape(ctx, *codes.shape).mul(ctx, scale)

    def bound(self, x: np.ndarray, activations: ml.DType) -> np.ndarray:
        """Half a step: 2**-4 of the value, or 2**-10 of the scale if that is larger."""
        wide = np.abs(x.astype(np.float64))
        scale = wide.max(axis=-1, keepdims=True) / F8_LARGEST
        half = np.maximum(wide * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)
        return np.asarray(half + F8_LARGEST * F8_LEAST_SCALE)


F8_E4M3 = _F8()


def _codes(ctx: ml.Context, y: ml.Tensor) -> ml.Tensor:
    """U8 codes of F32 within +-448.

    With the step of numbers around |y|, ``|y| / step`` rounds to an integer from 8 to 16 (0 to 8 in the
    lowest binade). Adding 8 for each lower binade gives the code, even if it was rounded to 16.
    """
    size = y.abs(ctx)
    reached = size.reshape(ctx, *y.shape, 1).compare(ctx, "ge", ctx.from_numpy(2.0**_EXPONENTS, ml.DType.F32))
    binades = reached.cast(ctx, ml.DType.F32).sum(ctx, -1)
    grown = select(ctx, reached, ctx.from_numpy(2.0 ** (_EXPONENTS - 4), ml.DType.F32), 0.0)
    step = grown.sum(ctx, -1).add(ctx, number(ctx, 2.0**-9))
    whole = size.div(ctx, step).round(ctx).add(ctx, binades.scale(ctx, 8))
    negative = number(ctx, 1.0).div(ctx, y).compare(ctx, "lt", number(ctx, 0.0))  # of -0.0 too
    return whole.add(ctx, select(ctx, negative, 128.0, 0.0)).cast(ctx, ml.DType.U8)
