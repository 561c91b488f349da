"""Mamba-2's recurrence: the chunked form against the recurrence, token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import ml
from kvcache.runner.models.chunks import chunk_masks, chunk_size, scan
from kvcache.runner.models.ssd import state_space_rule
from ml import DType

from .each_backend import each_context

ctx = each_context("numpy", "torch", "mlx")


def inputs(tokens: int) -> list[np.ndarray]:
    """query, key, value, decay, state of 2 sequences and 3 heads, state_dim 4, value_dim 5."""
    random = np.random.default_rng(0)
    query, key = (random.standard_normal((2, 3, tokens, 4)) for _ in range(2))
    value, decay = random.standard_normal((2, 3, tokens, 5)), -random.exponential(size=(2, 3, tokens))
    return [query, key, value, decay, random.standard_normal((2, 3, 4, 5))]


def recurrence(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, decay: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The outputs, and the state after each token."""
    out, states = np.empty_like(value), []
    for t in range(key.shape[2]):
        written = key[:, :, t, :, None] * value[:, :, t, None]
        state = state * np.exp(decay[:, :, t, None, None]) + written
        states.append(state)
        out[:, :, t] = (query[:, :, t, None] @ state)[:, :, 0]
    return out, states


def check(ctx: ml.Context, arrays: list[np.ndarray], size: int, cuts: Sequence[int] = ()) -> None:
    *tokens, state = (ctx.from_numpy(array, DType.F32) for array in arrays)
    out, states = scan(ctx, state_space_rule, tokens, state, chunk_masks(ctx, size), cuts)
    expected, after = recurrence(*arrays)
    np.testing.assert_allclose(out.to_numpy(), expected, rtol=0, atol=5e-5)
    for place, found in zip((*cuts, arrays[1].shape[2]), states, strict=True):
        np.testing.assert_allclose(found.to_numpy(), after[place - 1], rtol=0, atol=5e-5)


@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 65, 150])
def test_any_length(ctx: ml.Context, tokens: int) -> None:
    check(ctx, inputs(tokens), chunk_size(tokens))


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_any_chunk(ctx: ml.Context, size: int) -> None:
    check(ctx, inputs(21), size)


@pytest.mark.parametrize("cuts", [(1,), (7, 8), (3, 64, 70, 99)])
def test_states_inside(ctx: ml.Context, cuts: tuple[int, ...]) -> None:
    check(ctx, inputs(100), 64, cuts)


def test_strong_decay(ctx: ml.Context) -> None:
    """exp of the sums of a chunk underflows; nothing overflows."""
    arrays = inputs(100)
    arrays[3] *= 40
    check(ctx, arrays, 64)
