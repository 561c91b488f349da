"""Our block formats against the reference quantisation of the gguf package.

On NumPy: that every backend stores the same bits and reads them alike is in test_formats.py.
"""

from __future__ import annotations

import numpy as np
import pytest

import ml
from kvcache.storage.formats import CacheFormat
from ml import DType

from ...rigs.each_backend import each_context

quants = pytest.importorskip("gguf.quants")
gguf = pytest.importorskip("gguf")

FORMATS = {DType.Q8_0: gguf.GGMLQuantizationType.Q8_0, DType.Q4_0: gguf.GGMLQuantizationType.Q4_0}
both_formats = pytest.mark.parametrize("codec", FORMATS, ids=lambda codec: codec.name)


ctx = each_context("numpy")


def samples(rows: int = 4000) -> np.ndarray:
    """Rows of 64 of many magnitudes, among them zeros, one peak alone, ties of sign, and exact halves.

    A part of them as BF16 has them: many values are then the exact half of their block's peak.
    """
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, 64)) * 10.0 ** random.uniform(-4, 3, size=(rows, 1))
    x[0] = 0
    x[1], x[1, 7] = 0, -5
    x[2] = np.where(np.arange(64) % 2, 1.0, -1.0)
    x[3] = np.arange(64) * 0.5 - 16
    x[rows // 2 :] = x[rows // 2 :].astype(DType.BF16.numpy)
    return x.astype(np.float32)


def parts(blob: np.ndarray, codec: DType) -> tuple[np.ndarray, np.ndarray]:
    """Codes and F16 scales of GGML's blocks: the scale in two bytes, then the codes."""
    size = 34 if codec is DType.Q8_0 else 18
    blocks = blob.reshape(len(blob), -1, size)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    codes = np.ascontiguousarray(blocks[:, :, 2:]).reshape(len(blob), -1)
    return codes.view(np.int8) if codec is DType.Q8_0 else codes, scales


@both_formats
def test_codes_and_scales_are_those_of_gguf(ctx: ml.Context, codec: DType) -> None:
    x = samples()
    encoded = CacheFormat.of(codec).key.encode(ctx, ctx.from_numpy(x))
    codes, scales = (tensor.to_numpy() for tensor in encoded)
    wanted_codes, wanted_scales = parts(quants.quantize(x, FORMATS[codec]), codec)
    np.testing.assert_array_equal(scales.view(np.uint16), wanted_scales.view(np.uint16))
    different = codes != wanted_codes
    if codec is DType.Q8_0:
        assert not different.any()
    # Of Q4_0 gguf computes in float64 what GGML and we compute in float32: a value on the edge of two codes
    # may fall to either side. That is one step, and rare.
    assert different.mean() < 1e-4
    wide, wanted = (_unpacked(host, codec)[different] for host in (codes, wanted_codes))
    assert (np.abs(wide - wanted).max(axis=-1) <= 1).all() if different.any() else True


def _unpacked(codes: np.ndarray, codec: DType) -> np.ndarray:
    """Codes as int32, one or two for each stored."""
    if codec is DType.Q8_0:
        return codes.astype(np.int32)[..., None]
    return np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int32)


@both_formats
def test_gguf_reads_what_we_store_as_we_do(ctx: ml.Context, codec: DType) -> None:
    x = samples()
    stored = CacheFormat.of(codec).key
    codes, scales = stored.encode(ctx, ctx.from_numpy(x))
    ours = stored.decode(ctx, (codes, scales), x.shape[1]).to_numpy()
    packed = np.concatenate(
        [
            scales.to_numpy()[:, :, None].view(np.uint8),
            codes.to_numpy().view(np.uint8).reshape(len(x), x.shape[1] // 32, -1),
        ],
        axis=-1,
    ).reshape(len(x), -1)
    np.testing.assert_array_equal(ours, quants.dequantize(packed, FORMATS[codec]))
