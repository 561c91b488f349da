"""GGML's Q8_0 and Q4_0 on NumPy arrays, bit for bit: see :class:`ml.SupportsBlockFormats`."""

from __future__ import annotations

import numpy as np

BLOCK = 32
"""Values that share a scale."""


@np.errstate(all="ignore")
def quantized(values: np.ndarray, eight: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of floats (..., dim): of Q8_0 where ``eight``, else of Q4_0.

    Of a block that holds NaN or infinity the scale is not finite, and the codes are any.
    """
    *outer, dim = values.shape
    blocks = values.astype(np.float32, copy=False).reshape(*outer, dim // BLOCK, BLOCK)
    if eight:
        scale = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / 127)
        scaled = blocks * _inverse(scale)
        scaled += np.copysign(np.float32(0.5), scaled)  # half away from 0
        codes = scaled.astype(np.int8)
    else:
        peak = np.abs(blocks).argmax(-1, keepdims=True)
        scale = np.take_along_axis(blocks, peak, -1) * np.float32(-1 / 8)
        whole = (blocks * _inverse(scale) + np.float32(8.5)).clip(0, 15).astype(np.uint8)
        codes = whole[..., : BLOCK // 2] | (whole[..., BLOCK // 2 :] << 4)
    return codes.reshape(*outer, -1), scale.astype(np.float16)[..., 0]


@np.errstate(all="ignore")
def dequantized(codes: np.ndarray, scales: np.ndarray, eight: bool) -> np.ndarray:
    """The values (..., dim), F32."""
    *outer, count = scales.shape
    if not eight:  # bytes, which are fewer than the floats will be: what is below 0 wraps
        packed = codes.reshape(*outer, count, BLOCK // 2)
        codes = (np.concatenate((packed & 15, packed >> 4), -1) - np.uint8(8)).view(np.int8)
    found = codes.reshape(*outer, count, BLOCK).astype(np.float32)
    found *= scales.astype(np.float32)[..., None]
    return found.reshape(*outer, count * BLOCK)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 where the scale is 0."""
    found: np.ndarray = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    return found
