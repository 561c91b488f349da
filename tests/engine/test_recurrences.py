"""The gated delta rule: chunks against token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import ml
from kvcache_engine.models.recurrences import chunk_masks, chunk_size, scan
from ml import DType

from ..rigs.each_backend import each_context

ctx = each_context("numpy", "torch", "mlx")
DECAY, BETA = 3, 4


def inputs(tokens: int) -> list[np.ndarray]:
    """What it takes, for 2 sequences and 3 heads, key_dim 4, value_dim 5; the state is the last."""
    random = np.random.default_rng(0)
    query, key = (random.standard_normal((2, 3, tokens, 4)) for _ in range(2))
    value, decay = random.standard_normal((2, 3, tokens, 5)), -random.exponential(size=(2, 3, tokens))
    state = random.standard_normal((2, 3, 4, 5))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    return [query, key, value, decay, random.uniform(size=(2, 3, tokens)), state]


def recurrence(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The outputs, and the state after each token."""
    query, key, value, decay, beta, state = arrays
    out, states = np.empty_like(value), []
    for t in range(key.shape[2]):
        k, written = key[:, :, t, None], value[:, :, t, None]
        state = state * np.exp(decay[:, :, t, None, None])
        written = beta[:, :, t, None, None] * (written - k @ state)
        state = state + k.swapaxes(-1, -2) * written
        states.append(state)
        out[:, :, t] = (query[:, :, t, None] @ state)[:, :, 0]
    return out, states


def check(ctx: ml.Context, arrays: list[np.ndarray], size: int, cuts: Sequence[int] = ()) -> None:
    *tokens, state = (ctx.from_numpy(array, DType.F32) for array in arrays)
    out, states = scan(ctx, tokens, state, chunk_masks(ctx, size), cuts)
    expected, after = recurrence(arrays)
    np.testing.assert_allclose(out.to_numpy(), expected, rtol=0, atol=2e-5)
    for place, found in zip((*cuts, arrays[1].shape[2]), states, strict=True):
        np.testing.assert_allclose(found.to_numpy(), after[place - 1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 64, 65, 150])
def test_any_length(ctx: ml.Context, tokens: int) -> None:
    check(ctx, inputs(tokens), chunk_size(tokens))


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_any_chunk(ctx: ml.Context, size: int) -> None:
    check(ctx, inputs(21), size)


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (7, 8), (3, 64, 70, 99)])
def test_states_inside(ctx: ml.Context, cuts: tuple[int, ...]) -> None:
    tokens = 5 if cuts[-1] < 5 else 100
    check(ctx, inputs(tokens), chunk_size(tokens), cuts)


def test_strong_decay(ctx: ml.Context) -> None:
    """exp of the sums of a chunk underflows; nothing overflows."""
    arrays = inputs(100)
    arrays[DECAY] *= 40.0
    check(ctx, arrays, 64)


def test_one_key_again_and_again(ctx: ml.Context) -> None:
    """No decay, beta near 1: powers of the triangle grow without bound, its inverse does not."""
    arrays = inputs(128)
    arrays[1][:] = arrays[1][:, :, :1]
    arrays[DECAY][:], arrays[BETA][:] = 0.0, 0.999
    check(ctx, arrays, 64)


def test_chunks_are_as_large_as_tokens_are_many() -> None:
    assert [chunk_size(n) for n in (1, 2, 3, 16, 17, 64, 1000)] == [1, 2, 4, 16, 32, 64, 64]
