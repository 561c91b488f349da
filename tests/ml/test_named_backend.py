"""Caches and models' building blocks ask nothing of a backend but what the protocols name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ml
import ml.nn
from kvcache import (
    Batch,
    CausalCache,
    ChunkedCache,
    HostTier,
    PrefixCache,
    RecurrentCache,
    SlidingWindowCache,
)
from ml.testing import strict

HEADS, DIM = 2, 32


@pytest.fixture(name="named")
def _named(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its contexts do not tell their backend, so that nothing beyond the required core can be asked for."""
    monkeypatch.delattr(strict._ContextRules, "backend")
    with strict.strict(ml.open_backend("numpy")) as backend:
        yield backend


def test_a_backend_of_the_required_names_is_a_backend_and_its_context_need_not_name_it(named: Any) -> None:
    assert isinstance(named, ml.Backend)
    assert isinstance(named.new_context().zeros((1,), ml.DType.F32), ml.Tensor)
    assert not hasattr(named.new_context(), "backend")


@pytest.mark.parametrize("dtype", [ml.DType.F32, ml.DType.Q8_0], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", ["causal", "window", "chunked"])
def test_attention_over_a_cache_gives_what_it_gives_on_numpy(named: Any, kind: str, dtype: ml.DType) -> None:
    numpy = ml.open_backend("numpy")
    mine, theirs = (_attended(backend, kind, dtype) for backend in (named, numpy))
    assert len(mine) == 4
    for found, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _attended(backend: Any, kind: str, dtype: ml.DType) -> list[np.ndarray]:
    made = {
        "causal": lambda: CausalCache(ml.nn.rope_shift(ml.nn.RopeSpec(dim=DIM))),
        "window": lambda: SlidingWindowCache(2, memory=8),
        "chunked": lambda: ChunkedCache(3),
    }
    cache = made[kind]()
    cache.init(backend, dtype, 2, 16, 8)
    random, results = np.random.default_rng(1), []
    for positions, sequences in (([0, 1, 2], [0] * 3), ([0, 3], [1, 0]), ([4, 1], [0, 1]), ([5], [0])):
        ctx = backend.new_context()
        key = random.standard_normal((len(positions), HEADS, DIM)).astype(np.float32)
        query = random.standard_normal((len(positions), 2 * HEADS, DIM)).astype(np.float32)
        cache.start_forward(ctx, Batch(positions, sequences))
        cache.set_layer(0)
        cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(-key))
        turned = ml.nn.rope(ctx, ctx.from_numpy(query), positions, ml.nn.RopeSpec(dim=DIM))
        results.append(cache.attend(ctx, turned, 0.2).to_numpy())
        if positions == [4, 1] and kind == "causal":
            cache.remove(0, 1, 2)
            cache.defrag()
            cache.remove(0, 3)
            cache.start_forward(ctx, Batch([3, 4], [0, 0]))
            cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(key))
        ctx.close()
    return results


def test_prefixes_are_shared_and_paged_out(named: Any) -> None:
    cache = CausalCache()
    cache.init(named, ml.DType.F32, 2, 8, 8)
    prefix = PrefixCache(cache, tiers=[HostTier(1 << 20)])
    for turn in range(4):
        _evaluated(named, cache, prefix, [10 * turn + place for place in range(8)])
    assert _evaluated(named, cache, prefix, [0, 1, 2, 3, 4, 5, 99]) == (6, [0, 1, 2, 3, 4, 5, 99])


def _evaluated(
    backend: Any, cache: CausalCache, prefix: PrefixCache, tokens: list[int]
) -> tuple[int, list[int]]:
    """(how many were there already, what the last token sees)."""
    with prefix.begin(tokens) as session, backend.new_context() as ctx:
        rest = session.remaining
        positions = range(session.cached, len(tokens))
        cache.start_forward(ctx, Batch(positions, [session.seq] * len(rest)))
        cache.set_layer(0)
        key = ctx.from_numpy(np.array(rest, np.float32).reshape(-1, 1, 1))
        cache.put(ctx, key, key)
        stored, _, mask = cache.get(ctx)
        assert isinstance(mask, ml.Tensor)
        seen = stored.to_numpy()[mask.to_numpy()[-1] == 0].ravel().astype(int).tolist()
        return session.cached, sorted(seen)


def test_recurrent_states_go_back_to_a_checkpoint(named: Any) -> None:
    cache = RecurrentCache((2,), (3,), checkpoint_interval=2)
    cache.init(named, ml.DType.F32, 1, 8, 4)
    with named.new_context() as ctx:
        for position in range(6):
            cache.start_forward(ctx, Batch([position], [0]))
            state = cache.recurrent_state(ctx, 0)
            cache.set_recurrent_state(ctx, 0, state.add(ctx, ctx.full((1, 3), 1, ml.DType.F32)))
        cache.remove(0, 4)
        cache.start_forward(ctx, Batch([4], [0]))
        np.testing.assert_array_equal(cache.recurrent_state(ctx, 0).to_numpy(), np.full((1, 3), 4.0))
