"""The storage formats of caches on NumPy arrays: see :class:`ml.SupportsBlockFormats`."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from backends.numpy.block_formats import dequantized, quantized
from ml.block_formats import AFFINE, AFFINE_LEAST_STEP, F8_LARGEST, F8_LEAST_SCALE

_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT8_NUMBERS = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float32)


def encoded(x: np.ndarray, name: str) -> tuple[np.ndarray, ...] | None:
    """The parts of floats (..., dim); None for a format that is not known here."""
    if name in ("Q8_0", "Q4_0"):
        return quantized(x, name == "Q8_0")
    if name == "F8_E4M3":
        return _to_float8(x)
    return _to_groups(x, *AFFINE[name]) if name in AFFINE else None


def decoded(parts: Sequence[np.ndarray], name: str) -> np.ndarray | None:
    """F32 (..., dim)."""
    if name in ("Q8_0", "Q4_0"):
        return dequantized(parts[0], parts[1], name == "Q8_0")
    if name == "F8_E4M3":
        found: np.ndarray = _FLOAT8_NUMBERS[parts[0]] * parts[1]
        return found
    return _from_groups(parts, AFFINE[name][0]) if name in AFFINE else None


@np.errstate(all="ignore")
def _to_float8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = x.astype(np.float32, copy=False)
    scale = np.abs(wide).max(-1, keepdims=True) / np.float32(F8_LARGEST)
    scale[scale < F8_LEAST_SCALE] = 0
    empty = scale == 0
    scaled = wide / np.where(empty, np.float32(1), scale)
    scaled = np.where(empty, np.float32(0), scaled).clip(-F8_LARGEST, F8_LARGEST)
    return scaled.astype(_FLOAT8).view(np.uint8), scale


@np.errstate(all="ignore")
def _to_groups(x: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = x.astype(np.float32, copy=False).reshape(*x.shape[:-1], -1, group)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = np.maximum((high - low) / np.float32(2**bits - 1), np.float32(AFFINE_LEAST_STEP))
    below = np.abs(low) > np.abs(high)
    step, edge = np.where(below, step, -step), np.where(below, low, high)
    at = np.rint(edge / step)
    scale = np.where(at == 0, step, edge / at)
    bias = np.where(at == 0, np.float32(0), edge)
    codes = np.rint((groups - bias) / scale).clip(0, 2**bits - 1).astype(np.uint8)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    words = np.ascontiguousarray(codes.reshape(*x.shape[:-1], -1)).view("<i4")
    return words, scale[..., 0].astype(x.dtype), bias[..., 0].astype(x.dtype)


@np.errstate(all="ignore")
def _from_groups(parts: Sequence[np.ndarray], bits: int) -> np.ndarray:
    words, scales, biases = parts
    codes = words.astype("<i4", order="C").view(np.uint8)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1)
    found = codes.reshape(*scales.shape, -1).astype(np.float32)
    found *= scales.astype(np.float32)[..., None]
    found += biases.astype(np.float32)[..., None]
    return found.reshape(*scales.shape[:-1], -1)
