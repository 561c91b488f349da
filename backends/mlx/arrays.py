"""Dtypes and host arrays, to MLX and back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ml.dtypes import DType
from ml.errors import DTypeError

schedule: Any = mx.async_eval
"""Evaluate arrays without waiting for them (MLX's stub gives it no type)."""

MLX_DTYPES: dict[DType, mx.Dtype] = {
    DType.F32: mx.float32,
    DType.F16: mx.float16,
    DType.BF16: mx.bfloat16,
    DType.I8: mx.int8,
    DType.U8: mx.uint8,
    DType.I32: mx.int32,
    DType.I64: mx.int64,
    DType.BOOL: mx.bool_,
}
_NAMES = {native: dtype for dtype, native in MLX_DTYPES.items()}


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
BITS = {dtype: _UNSIGNED[dtype.itemsize] for dtype in MLX_DTYPES} | {DType.U8: mx.int8}
"""An integer of the same size, and never the dtype itself: what carries the bits to the host."""


def from_mlx_dtype(op: str, native: Any) -> DType:
    """The DType of the same bits; DTypeError where there is none."""
    try:
        return _NAMES[native]
    except KeyError:
        known = ", ".join(str(dtype) for dtype in _NAMES)
        raise DTypeError(
            f"{op}: no DType for {native}; convert it, with .astype(mx.float32) for example; there are "
            f"DTypes for {known}"
        ) from None


def from_host(array: np.ndarray) -> mx.array:
    """An MLX copy of a host array of any DType; it exists at once and belongs to no stream."""
    backwards = min(array.strides, default=0) < 0  # C order to NumPy along an axis of 1, not to MLX
    return mx.array(np.array(array, order="C") if backwards else np.asarray(array, order="C"))


def scalar(value: float, dtype: DType) -> np.ndarray:
    """A number in a dtype, rounded as NumPy does; beyond the range of a float it is infinite."""
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype.numpy)


def to_host(array: mx.array, dtype: DType) -> np.ndarray:
    """A host copy in C order of an array that shows the bits of ``dtype``."""
    return np.array(array, order="C").view(dtype.numpy)
