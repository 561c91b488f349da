"""The gated delta rule and Mamba-2's recurrence: chunks against token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ml
from kvcache_engine.models.recurrences import (
    chunk_masks,
    chunk_size,
    gated_delta_rule,
    scan,
    state_space_rule,
)
from ml import DType

from ..rigs.each_backend import each_context

ctx = each_context("numpy", "torch", "mlx")
RULES: dict[str, Any] = {"delta rule": gated_delta_rule, "mamba": state_space_rule}
DECAY, BETA = 3, 4
either_rule = pytest.mark.parametrize("rule", RULES)


def inputs(rule: str, tokens: int) -> list[np.ndarray]:
    """What the rule takes, for 2 sequences and 3 heads, key_dim 4, value_dim 5; the state is the last."""
    random = np.random.default_rng(0)
    query, key = (random.standard_normal((2, 3, tokens, 4)) for _ in range(2))
    value, decay = random.standard_normal((2, 3, tokens, 5)), -random.exponential(size=(2, 3, tokens))
    state = random.standard_normal((2, 3, 4, 5))
    if rule == "mamba":
        return [query, key, value, decay, state]
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    return [query, key, value, decay, random.uniform(size=(2, 3, tokens)), state]


def recurrence(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The outputs, and the state after each token."""
    query, key, value, decay, *beta, state = arrays
    out, states = np.empty_like(value), []
    for t in range(key.shape[2]):
        k, written = key[:, :, t, None], value[:, :, t, None]
        state = state * np.exp(decay[:, :, t, None, None])
        if beta:
            written = beta[0][:, :, t, None, None] * (written - k @ state)
        state = state + k.swapaxes(-1, -2) * written
        states.append(state)
        out[:, :, t] = (query[:, :, t, None] @ state)[:, :, 0]
    return out, states


def check(ctx: ml.Context, rule: str, arrays: list[np.ndarray], size: int, cuts: Sequence[int] = ()) -> None:
    tolerance = {"delta rule": 2e-5, "mamba": 5e-5}[rule]
    *tokens, state = (ctx.from_numpy(array, DType.F32) for array in arrays)
    out, states = scan(ctx, RULES[rule], tokens, state, chunk_masks(ctx, size), cuts)
    expected, after = recurrence(arrays)
    np.testing.assert_allclose(out.to_numpy(), expected, rtol=0, atol=tolerance)
    for place, found in zip((*cuts, arrays[1].shape[2]), states, strict=True):
        np.testing.assert_allclose(found.to_numpy(), after[place - 1], rtol=0, atol=tolerance)


@either_rule
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 64, 65, 150])
def test_any_length(ctx: ml.Context, rule: str, tokens: int) -> None:
    check(ctx, rule, inputs(rule, tokens), chunk_size(tokens))


@either_rule
@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_any_chunk(ctx: ml.Context, rule: str, size: int) -> None:
    check(ctx, rule, inputs(rule, 21), size)


@either_rule
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (7, 8), (3, 64, 70, 99)])
def test_states_inside(ctx: ml.Context, rule: str, cuts: tuple[int, ...]) -> None:
    tokens = 5 if cuts[-1] < 5 else 100
    check(ctx, rule, inputs(rule, tokens), chunk_size(tokens), cuts)


@either_rule
def test_strong_decay(ctx: ml.Context, rule: str) -> None:
    """exp of the sums of a chunk underflows; nothing overflows."""
    arrays = inputs(rule, 100)
    arrays[DECAY] *= 40.0
    check(ctx, rule, arrays, 64)


def test_one_key_again_and_again(ctx: ml.Context) -> None:
    """No decay, beta near 1: powers of the triangle grow without bound, its inverse does not."""
    arrays = inputs("delta rule", 128)
    arrays[1][:] = arrays[1][:, :, :1]
    arrays[DECAY][:], arrays[BETA][:] = 0.0, 0.999
    check(ctx, "delta rule", arrays, 64)


def test_masks(ctx: ml.Context) -> None:
    masks = chunk_masks(ctx, 4).to_numpy().astype(int).tolist()
    assert masks == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
        [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]],
    ]
    assert [chunk_size(n) for n in (1, 2, 3, 16, 17, 64, 1000)] == [1, 2, 4, 16, 32, 64, 64]
