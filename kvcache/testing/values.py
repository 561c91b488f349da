"""What tests store: keys and values that say which token they are, at which position, in which layer.

A row read back from a cache is decoded and then compared bit by bit with what was put. Every number
is a small multiple of 1/16, so that F32, F16 and BF16 hold it exactly::

    key     id % 128, id // 128, position % 128, position // 128, tag, 3 of noise
    value   id % 128, id // 128, 64 + tag, 2 of noise                    tag = 8 * layer + head
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import ml
from ml import DType

__all__ = [
    "HEADS", "KEY_DIM", "KV_HEADS", "VALUE_DIM", "decode", "keys", "queries", "shift_positions", "values",
]  # fmt: skip

KV_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 5
_BASE = 128
_NOISE = np.random.default_rng(20250607).integers(-32, 33, (997, KV_HEADS, 5)).astype(np.float32) / 16
_HEAD = np.arange(KV_HEADS, dtype=np.float32)

Ints = Sequence[int] | np.ndarray


def keys(ids: Ints, positions: Ints, layer: int = 0) -> np.ndarray:
    """Float32 (tokens, KV_HEADS, KEY_DIM)."""
    token, position = np.asarray(ids), np.asarray(positions)
    result = np.empty((token.size, KV_HEADS, KEY_DIM), np.float32)
    result[:, :, 0], result[:, :, 1] = (token % _BASE)[:, None], (token // _BASE)[:, None]
    result[:, :, 2], result[:, :, 3] = (position % _BASE)[:, None], (position // _BASE)[:, None]
    result[:, :, 4] = 8 * layer + _HEAD
    result[:, :, 5:] = _NOISE[token % 997, :, :3]
    return result


def values(ids: Ints, layer: int = 0) -> np.ndarray:
    """Float32 (tokens, KV_HEADS, VALUE_DIM)."""
    token = np.asarray(ids)
    result = np.empty((token.size, KV_HEADS, VALUE_DIM), np.float32)
    result[:, :, 0], result[:, :, 1] = (token % _BASE)[:, None], (token // _BASE)[:, None]
    result[:, :, 2] = 64 + 8 * layer + _HEAD
    result[:, :, 3:] = _NOISE[token % 997, :, 3:]
    return result


def decode(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids and positions of keys (tokens, KV_HEADS, KEY_DIM)."""
    codes = key[:, 0, :4].astype(np.int64)
    return codes[:, 0] + _BASE * codes[:, 1], codes[:, 2] + _BASE * codes[:, 3]


def queries(seed: int, tokens: int) -> np.ndarray:
    """Float32 (tokens, HEADS, KEY_DIM) that look at the noise only: a soft, decided attention."""
    result = np.zeros((tokens, HEADS, KEY_DIM), np.float32)
    result[:, :, 5:] = np.random.default_rng(seed).integers(-16, 17, (tokens, HEADS, 3)) / 16
    return result


def shift_positions(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
    """A shift function that needs no compute: it rewrites the position that a key carries."""
    assert offsets.dtype is DType.I32
    assert offsets.shape == (key.shape[0],)
    assert key.shape[1:] == (KV_HEADS, KEY_DIM)
    host = key.to_numpy().astype(np.float32)
    assert (host[:, 0, 4] == 8 * layer).all(), "the keys of another layer"
    position = host[:, :, 2] + _BASE * host[:, :, 3] + offsets.to_numpy()[:, None]
    host[:, :, 2], host[:, :, 3] = position % _BASE, position // _BASE
    return ctx.from_numpy(host, key.dtype)
