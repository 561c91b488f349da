"""Attention mass against float64, policies that evict by it, and what they refuse."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.snapshots import CopyRig
from kvcache_engine import bundled_model, load_model


@pytest.mark.parametrize("gone", [[0], [1], [0, 1]], ids=str)
def test_a_window_goes_on_from_a_snapshot_whichever_of_its_first_tokens_were_evicted(gone: list[int]) -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        r = CopyRig(Setup(window=2, keep=2, max_sequences=2, capacity=40), backend, ctx)
        r.forward(range(8), 0)
        r.evict(0, gone)
        r.snapshot(0, 0, None)
        r.forward([8], 0)
        assert r.restore(0, 1, None)
        assert r.cache.positions(1).tolist() == [*({0, 1} - {*gone}), 5, 6, 7]
        assert r.cache.resume_point(1, 8) == 8
        r.forward([9, 8], [0, 1])
        r.drain()


@pytest.mark.parametrize(
    ("cache", "gone", "positions"),
    [
        (kvcache.CausalCache(), [5, 7], range(5)),
        (kvcache.SlidingWindowCache(4), [10], range(5, 10)),
        (kvcache.SlidingWindowCache(4, keep=2), [0], range(0)),
    ],
    ids=["all of the past", "a window", "first tokens"],
)
def test_a_prefix_cache_keeps_what_lies_before_the_first_evicted_token(
    cache: Any, gone: list[int], positions: range
) -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        cache.init(backend, ml.DType.F32, 2, 32, 32)
        prefix = kvcache.PrefixCache(cache)
        tokens = list(range(100, 112))
        with prefix.begin(tokens) as session:
            some = ctx.zeros((12, 1, 4), ml.DType.F32)
            cache.start_forward(ctx, kvcache.Batch(range(12), [session.seq] * 12))
            cache.put(ctx, some, some)
            whole = cache.snapshot(session.seq)
            cache.evict(session.seq, gone)
            assert cache.computed(session.seq) == gone[0]
            shortened = cache.snapshot(session.seq)
        assert not prefix.adopt(tokens, shortened)
        with prefix.begin([*tokens, 1]) as session:
            assert session.cached == gone[0]
            assert cache.positions(session.seq).tolist() == [*positions]
        assert prefix.adopt(tokens, whole)
        with prefix.begin([*tokens, 1]) as session:
            assert session.cached == 12
        cache.close()


def test_the_policies_of_the_example_keep_their_budget_and_change_nothing_below_it() -> None:
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "eviction.py"))
    recent, heavy = example["Recent"], example["HeavyHitters"]
    positions, mass = np.array([0, 1, 3, 4, 7, 9]), np.array([5.0, 0, 9, 3, 1, 9, 9, 0, 9, 0])
    assert recent(4).evicted(positions, mass).tolist() == [0, 1]
    assert recent(4, sinks=1).evicted(positions, mass).tolist() == [1, 3]
    assert heavy(4).evicted(positions, mass).tolist() == [1, 4]
    assert not any(policy.evicted(positions, mass).size for policy in (recent(6), recent(9, 4), heavy(6)))
    with ml.open_backend("numpy") as backend:
        model = load_model(bundled_model(), backend)
        pieces = [[1, *range(300, 340)]]
        full = example["perplexity"](model, pieces, 8, None)
        assert example["perplexity"](model, pieces, 8, heavy(64)) == full
        assert example["perplexity"](model, pieces, 8, heavy(8)) != full


def test_the_example_weighs_each_position_as_attention_does() -> None:
    weighed = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "eviction.py"))["Weighed"]
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        inner = kvcache.CausalCache()
        inner.set_config(ml.CacheConfig())
        inner.init(backend, ml.DType.F32, 1, 8, 4)
        cache, zeros = weighed(inner), ctx.zeros((3, 2, 8), ml.DType.F32)
        cache.start_forward(ctx, kvcache.Batch(range(3), [0] * 3))
        cache.put(ctx, zeros, zeros)
        cache.attend(ctx, zeros, 1.0)  # equal keys: each query shares its weight among what it sees
        np.testing.assert_allclose(cache.mass, 2 * np.array([11 / 6, 5 / 6, 1 / 3]))
        inner.evict(0, [1])
        one = ctx.zeros((1, 2, 8), ml.DType.F32)
        cache.start_forward(ctx, kvcache.Batch([3], [0]))  # into the cell of the token that went
        cache.put(ctx, one, one)
        cache.attend(ctx, one, 1.0)
        np.testing.assert_allclose(cache.mass, 2 * np.array([13 / 6, 5 / 6, 2 / 3, 1 / 3]))
