"""The gated delta rule: the chunked form against the recurrence, token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest

import ml
from kvcache.runner.models.chunks import chunk_masks, chunk_size
from kvcache.runner.models.delta import gated_delta_rule
from ml import DType

from .each_backend import each_context

ctx = each_context("numpy", "torch", "mlx")


def inputs(tokens: int, seed: int = 0) -> list[np.ndarray]:
    """query, key, value, decay, beta, state of 2 sequences and 3 heads, key_dim 4, value_dim 5."""
    random = np.random.default_rng(seed)
    query, key = (random.standard_normal((2, 3, tokens, 4)) for _ in range(2))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = random.standard_normal((2, 3, tokens, 5))
    decay, beta = -random.exponential(size=(2, 3, tokens)), random.uniform(size=(2, 3, tokens))
    return [query, key, value, decay, beta, random.standard_normal((2, 3, 4, 5))]


def recurrence(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    out = np.empty_like(value)
    for t in range(key.shape[2]):
        k = key[:, :, t, None]
        state = state * np.exp(decay[:, :, t, None, None])
        delta = beta[:, :, t, None, None] * (value[:, :, t, None] - k @ state)
        state = state + k.swapaxes(-1, -2) * delta
        out[:, :, t] = (query[:, :, t, None] @ state)[:, :, 0]
    return out, state


def check(ctx: ml.Context, arrays: list[np.ndarray], size: int, tolerance: float = 2e-5) -> None:
    tensors = [ctx.from_numpy(array, DType.F32) for array in arrays]
    got = gated_delta_rule(ctx, *tensors, chunk_masks(ctx, size))
    for tensor, expected in zip(got, recurrence(*arrays), strict=True):
        np.testing.assert_allclose(tensor.to_numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 64, 65, 150])
def test_any_length(ctx: ml.Context, tokens: int) -> None:
    check(ctx, inputs(tokens), chunk_size(tokens))


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_any_chunk(ctx: ml.Context, size: int) -> None:
    check(ctx, inputs(21), size)


def test_one_key_again_and_again(ctx: ml.Context) -> None:
    """No decay, beta near 1: powers of the triangle grow without bound, its inverse does not."""
    arrays = inputs(128)
    arrays[1][:] = arrays[1][:, :, :1]
    arrays[3][:], arrays[4][:] = 0.0, 0.999
    check(ctx, arrays, 64, 1e-4)


def test_strong_decay(ctx: ml.Context) -> None:
    """exp of the sums of a chunk underflows; nothing overflows."""
    arrays = inputs(70)
    arrays[3] *= 40.0
    check(ctx, arrays, 64)


def test_masks(ctx: ml.Context) -> None:
    masks = chunk_masks(ctx, 4).to_numpy().astype(int).tolist()
    assert masks == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
        [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]],
    ]
    assert [chunk_size(n) for n in (1, 2, 3, 16, 17, 64, 1000)] == [1, 2, 4, 16, 32, 64, 64]
