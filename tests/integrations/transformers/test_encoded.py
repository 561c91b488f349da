"""The encoder outputs of several sequences as one tensor."""

from __future__ import annotations

import numpy as np
import pytest

import ml
from kvcache import Batch, EncoderCache, InvalidRangeError, OrderError
from kvcache.integrations.transformers.encoded import read_encoded

from ...rigs.each_backend import each_backend

HEADS, DIM, VALUE_DIM = 2, 4, 3

backend = each_backend("numpy", "torch", "mlx")


def test_what_an_encoder_gave(backend: ml.Backend) -> None:
    ctx, cache = backend.new_context(), EncoderCache()
    cache.init(backend, ml.DType.F32, 3, 16, 16)
    cache.start_forward(ctx, Batch([0, 0], [2, 0]))
    key, value = (
        np.arange(2 * 5 * HEADS * d, dtype=np.float32).reshape(10, HEADS, d) for d in (DIM, VALUE_DIM)
    )
    cache.set_layer(1)
    cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(value))
    for sequences, order in (([2, 0], [0, 1]), ([0], [1]), ([0, 2, 0], [1, 0, 1])):
        for found, whole in zip(read_encoded(ctx, cache, 1, sequences), (key, value), strict=True):
            parts = whole.reshape(2, 5, HEADS, -1)[order].transpose(0, 2, 1, 3)
            np.testing.assert_array_equal(found.to_numpy(), parts)
    with pytest.raises(OrderError, match=r"\[1\]"):
        read_encoded(ctx, cache, 1, [0, 1])
    with pytest.raises(OrderError):
        read_encoded(ctx, cache, 0, [0])
    cache.start_forward(ctx, Batch([0], [1]))
    cache.put(ctx, ctx.from_numpy(key[:3]), ctx.from_numpy(value[:3]))
    with pytest.raises(InvalidRangeError, match=r"\[3, 5\]"):
        read_encoded(ctx, cache, 1, [0, 1])
