"""The storage formats of caches on NumPy arrays, bit for bit: see ``ml.SupportsKVStorage``."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from ml.block_formats import AFFINE, AFFINE_LEAST_STEP, F8_LARGEST, F8_LEAST_SCALE

BLOCK = 32
"""Values of Q8_0 and Q4_0 that share a scale."""
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FLOAT8_NUMBERS = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float32)


def encoded(x: np.ndarray, name: str) -> tuple[np.ndarray, ...] | None:
    """The parts of floats (..., dim); None for an unknown format."""
    if name in ("Q8_0", "Q4_0"):
        return _to_blocks(x, name == "Q8_0")
    if name == "F8_E4M3":
        return _to_float8(x)
    return _to_groups(x, *AFFINE[name]) if name in AFFINE else None


def decoded(parts: Sequence[np.ndarray], name: str) -> np.ndarray | None:
    """F32 (..., dim)."""
    if name in ("Q8_0", "Q4_0"):
        return _from_blocks(parts[0], parts[1], name == "Q8_0")
    if name == "F8_E4M3":
        values: np.ndarray = _FLOAT8_NUMBERS[parts[0]] * parts[1]
        return values
    return _from_groups(parts, *AFFINE[name]) if name in AFFINE else None


@np.errstate(all="ignore")
def _to_blocks(values: np.ndarray, eight: bool) -> tuple[np.ndarray, np.ndarray]:
    """GGML's Q8_0 where ``eight``, else its Q4_0.

    For a block with NaN or infinity, the scale is not finite and the codes are arbitrary.
    """
    *outer, dim = values.shape
    blocks = values.astype(np.float32, copy=False).reshape(*outer, dim // BLOCK, BLOCK)
    if eight:
        scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
        scaled = blocks * _inverse(scale)
        scaled += np.copysign(np.float32(0.5), scaled)  # half away from 0
        codes = scaled.astype(np.int8)
    else:
        peak = np.abs(blocks).argmax(-1, keepdims=True)
        scale = (np.take_along_axis(blocks, peak, -1) + np.float32(0)) * np.float32(-1 / 8)  # no -0.0
        whole = (blocks * _inverse(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
        codes = whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)
    return codes.reshape(*outer, dim if eight else dim // 2), scale.astype(np.float16)[..., 0]


@np.errstate(all="ignore")
def _from_blocks(codes: np.ndarray, scales: np.ndarray, eight: bool) -> np.ndarray:
    *outer, count = scales.shape
    if not eight:  # bytes are smaller than floats; negative ones wrap
        packed = codes.reshape(*outer, count, BLOCK // 2)
        codes = (np.concatenate((packed & 15, packed >> 4), -1) - np.uint8(8)).view(np.int8)
    values = codes.reshape(*outer, count, BLOCK).astype(np.float32)
    values *= scales.astype(np.float32)[..., None]
    return values.reshape(*outer, count * BLOCK)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 if that is not finite, since casting infinity to an integer depends on the
    processor.
    """
    reciprocal = np.float32(1) / scale
    reciprocal[~np.isfinite(reciprocal)] = 0
    return reciprocal


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
    *outer, dim = x.shape
    groups = x.astype(np.float32, copy=False).reshape(*outer, dim // group, group)
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
    words = np.ascontiguousarray(codes.reshape(*outer, dim * bits // 8)).view("<i4")
    return words, scale[..., 0].astype(x.dtype), bias[..., 0].astype(x.dtype)


@np.errstate(all="ignore")
def _from_groups(parts: Sequence[np.ndarray], bits: int, group: int) -> np.ndarray:
    words, scales, biases = parts
    codes = words.astype("<i4", order="C").view(np.uint8)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1)
    values = codes.reshape(*scales.shape, group).astype(np.float32)
    values *= scales.astype(np.float32)[..., None]
    values += biases.astype(np.float32)[..., None]
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * group)
