"""Quantizing into blocks in host memory, compiled by numba on import; see ``cpu_kernels``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from backends.numba_options import kernel, part

ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
LARGEST_TO_OVERFLOW = np.float32(2.0**-128)
"""The inverse of scales up to this is infinite, whose conversion to an integer depends on the processor."""
GIVEN = types.Array(types.float32, 3, "C", readonly=True)
INTO = types.Array(types.int8, 3, "A"), types.Array(types.uint16, 3, "A"), types.int64


@part(False)
def _to_half(x: Any) -> Any:
    """The bits of x as F16, rounded to even."""
    bits = np.int32(np.float32(x).view(np.int32))
    sign, bits = np.int32((bits >> 16) & 0x8000), np.int32(bits & 0x7FFFFFFF)
    if bits > 0x7F800000:
        found = np.int32(0x7E00)
    elif bits >= 0x477FF000:  # 65520 and above, which rounds to infinity in F16
        found = np.int32(0x7C00)
    elif bits < 0x38800000:  # below 2^-14, where steps are uniform: adding 1/2 rounds to them
        found = np.int32(np.float32(np.int32(bits).view(np.float32) + HALF).view(np.int32) - 0x3F000000)
    else:
        found = np.int32((bits - 0x38000000 + 0xFFF + ((bits >> 13) & 1)) >> 13)
    return np.uint16(found | sign)


@part(False)
def _magnitude(x: Any) -> Any:
    """An integer that increases with |x|; NaN is the largest."""
    return np.int32(np.float32(x).view(np.int32) & np.int32(0x7FFFFFFF))


@part(False)
def _store_eight(source: Any, first: Any, stop: Any, codes: Any) -> Any:
    top = np.int32(0)
    for j in range(first, stop):
        top = max(top, _magnitude(source[j]))
    scale = np.int32(top).view(np.float32) / np.float32(127)
    inverse = ONE / scale if abs(scale) > LARGEST_TO_OVERFLOW else ZERO
    for j in range(first, stop):
        x = source[j] * inverse
        codes[j] = np.int8(np.int32(x + (HALF if x >= ZERO else -HALF)))
    return _to_half(scale)


@part(False)
def _store_four(source: Any, first: Any, stop: Any, codes: Any) -> Any:
    top, peak = np.int32(0), ZERO
    for j in range(first, stop):
        size = _magnitude(source[j])
        if size > top:
            top, peak = size, source[j]
    scale = peak * np.float32(-1 / 8)
    inverse = ONE / scale if abs(scale) > LARGEST_TO_OVERFLOW else ZERO
    half = (stop - first) // 2
    for j in range(half):
        low = min(max(source[first + j] * inverse + np.float32(8.5), ZERO), np.float32(15))
        high = min(max(source[first + half + j] * inverse + np.float32(8.5), ZERO), np.float32(15))
        codes[first // 2 + j] = np.int8(np.int32(low) | (np.int32(high) << 4))
    return _to_half(scale)


@kernel(GIVEN, *INTO, types.int64, fastmath=False)
def store(source: Any, codes: Any, scales: Any, bits: Any, cell: Any) -> None:
    """Codes and scales of floats (tokens, kv_heads, dim) into the cells from ``cell`` on.

    Bit for bit GGML's quantize_row_q8_0_ref and quantize_row_q4_0_ref (ggml/src/ggml-quants.c): each product
    is rounded. For a block with NaN or infinity, the scale is not finite and the codes are arbitrary.
    """
    size = (
        source.shape[2] // scales.shape[2]
    )  # 32, hidden from the compiler, which would unroll it without gain
    for token in range(source.shape[0]):
        for head in range(source.shape[1]):
            given, into = source[token, head], codes[cell + token, head]
            for block in range(scales.shape[2]):
                first, stop = block * size, (block + 1) * size
                if bits == 4:
                    found = _store_four(given, first, stop, into)
                else:
                    found = _store_eight(given, first, stop, into)
                scales[cell + token, head, block] = found
