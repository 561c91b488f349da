"""Attention mass against float64, policies that evict by it, and what they refuse."""

from __future__ import annotations

import random
import runpy
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import AttentionMass, NotSupportedError
from kvcache.runner import bundled_model, load_model
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import Rig
from kvcache.testing.rigs.snapshots import CopyRig
from kvcache.testing.traces import random_setup

from .each_backend import each_backend

Mass = dict[int, float]
"""By token, as the rig numbers them."""

backend = each_backend("numpy", "torch", "mlx")


def add_weights(
    r: Rig, mass: Mass, seed: int, lifted: tuple[int, ...], sinks: bool, last: int | None
) -> None:
    """What ``check_attend`` with these arguments gives each token, in float64."""
    positions, sequences = r.pass_
    query = r.setup.rows.queries(seed, len(positions)).astype(np.float64)
    for layer in range(r.setup.layers):
        for i, (position, seq) in enumerate(zip(positions, sequences, strict=True)):
            later = sum(other > position for other, s in zip(positions, sequences, strict=True) if s == seq)
            if last is not None and later >= last:
                continue
            seen = r.model.visible(seq, position, i in lifted)
            key = r.setup.rows.pair(list(seen.values()), list(seen), layer)[0].astype(np.float64)
            heads = query.shape[1]
            wide = key[:, np.arange(heads) // (heads // key.shape[1])]
            logits = np.einsum("hd,nhd->hn", query[i], wide) * 0.5
            if sinks:
                logits = np.concatenate([logits, np.linspace(-1, 1, heads)[:, None]], axis=1)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
            for token, weight in zip(seen.values(), weights, strict=False):
                mass[token] += weight


def check_mass(r: Rig, mass: Mass) -> None:
    observer = r.cache.observer
    assert isinstance(observer, AttentionMass)
    for seq, row in enumerate(r.model.tokens):
        found = observer.of(r.cache.storage.table, seq)
        expected = [mass[row[position]] for position in sorted(row)]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def fitting(rnd: random.Random) -> Setup:
    """A cache of any kind whose keys are plain F32, so that float64 agrees with it."""
    setup = random_setup(rnd, (ml.DType.F32,))
    config = replace(setup.config, mask_dtype=ml.DType.F32)
    return replace(setup, dtype=ml.DType.F32, activations=ml.DType.F32, config=config, can_shift=True)


def test_attention_mass_follows_its_tokens_in_random_traces(backend: ml.Backend) -> None:
    """Through sharing, removal, eviction, defragmentation and cells that are given to others."""
    for seed in range(40 if backend.name == "numpy" else 15):
        rnd = random.Random(seed)
        with backend.new_context() as ctx:
            r = Rig(fitting(rnd), backend, ctx)
            last = rnd.choice((None, None, 1, 2))
            r.cache.observer, mass = AttentionMass(last), defaultdict(float)
            for step in range(12):
                seq, other = rnd.randrange(r.setup.max_sequences), rnd.randrange(r.setup.max_sequences)
                roll = rnd.random()
                end = r.model.last(seq) + 1
                if roll < 0.6:
                    count = rnd.randrange(1, 4)
                    batch = [(end + i, seq) for i in range(count)]
                    if other != seq:
                        batch.append((r.model.last(other) + 1, other))
                    if not r.start([p for p, _ in batch], [s for _, s in batch]):
                        continue
                    r.put()
                    lifted = (0,) if rnd.random() < 0.2 else ()
                    if lifted:
                        r.cache.set_causal(ctx, except_=lifted)
                    r.check_attend(step, lifted, sinks := rnd.random() < 0.5)
                    add_weights(r, mass, step, lifted, sinks, last)
                elif roll < 0.7 and other != seq:
                    r.copy_prefix(seq, other, rnd.randrange(6))
                elif roll < 0.8:
                    r.remove(seq, rnd.randrange(end + 1), rnd.choice((None, end)))
                elif roll < 0.9 and end > 1:
                    r.evict(seq, rnd.sample(range(end - 1), rnd.randrange(end)))
                else:
                    r.defrag()
                check_mass(r, mass)


def test_mass_of_blocks_of_queries_is_that_of_all(
    backend: ml.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.attention.observed.BLOCK", 1)
    with backend.new_context() as ctx:
        r = Rig(Setup(layers=2), backend, ctx)
        r.cache.observer, mass = AttentionMass(), defaultdict(float)
        r.start(range(6), [0] * 6)
        r.put()
        r.check_attend(3)
        add_weights(r, mass, 3, (), False, None)
        check_mass(r, mass)


def test_what_a_snapshot_brings_back_into_other_cells_has_no_mass(backend: ml.Backend) -> None:
    with backend.new_context() as ctx:
        r = Rig(Setup(max_sequences=1, capacity=6), backend, ctx)
        r.cache.observer = AttentionMass()
        r.start(range(4), [0] * 4)
        r.put()
        r.check_attend(1)
        snapshot = r.cache.snapshot(0)
        snapshot.detach()
        r.cache.remove(0, 0)
        assert r.cache.restore(0, snapshot)
        assert not r.cache.observer.of(r.cache.storage.table, 0).any()


def test_attention_mass_is_that_of_each_cache_and_anew_where_one_is_bound_anew(backend: ml.Backend) -> None:
    observer, caches = AttentionMass(), [kvcache.CausalCache(), kvcache.CausalCache()]
    for _ in range(2):
        for cache, capacity in zip(caches, (4, 24), strict=True):
            cache.observer = observer
            cache.init(backend, ml.DType.F32, 1, capacity, 4)
            with backend.new_context() as ctx:
                cache.start_forward(ctx, kvcache.Batch(range(3), [0] * 3))
                token = ctx.zeros((3, 1, 8), ml.DType.F32)
                cache.put(ctx, token, token)
                cache.attend(ctx, token, 1.0)
        caches[1].evict(0, [1])
        caches[1].defrag()
        for cache, expected in zip(caches, ([11 / 6, 5 / 6, 1 / 3], [11 / 6, 1 / 3]), strict=True):
            np.testing.assert_allclose(observer.of(cache.storage.table, 0), expected, rtol=1e-5)
            cache.close()


class Lightest:
    """Of all but the last token the lightest goes."""

    needs_mass = True

    def evicted(self, positions: np.ndarray, mass: np.ndarray | None) -> np.ndarray:
        assert mass is not None
        assert mass.shape == positions.shape
        return positions[np.argsort(mass[:-1])[:1]]


def test_a_policy_that_needs_mass_says_so_and_evicts_by_it() -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        r = Rig(Setup(), backend, ctx)
        r.forward([0], 0)
        with pytest.raises(kvcache.OrderError, match="AttentionMass"):
            r.cache.compress(0, Lightest())
        r.cache.observer = AttentionMass()
        r.start([1, 2, 3], [0, 0, 0])
        r.put()
        r.check_attend(1)
        mass = r.cache.observer.of(r.cache.storage.table, 0)
        gone = int(np.argmin(mass[:-1]))
        assert r.cache.compress(0, Lightest()) == 1
        assert r.cache.positions(0).tolist() == [p for p in range(4) if p != gone]


def test_a_policy_may_return_a_list() -> None:
    class First:
        needs_mass = False

        def evicted(self, positions: np.ndarray, mass: np.ndarray | None) -> list[int]:
            return [0]

    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        r = Rig(Setup(), backend, ctx)
        r.forward(range(3), 0)
        assert r.cache.compress(0, First()) == 1
        assert r.cache.positions(0).tolist() == [1, 2]


def test_a_wrapper_evicts_in_all_caches_and_refuses_where_one_has_states() -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        whole = kvcache.WrapperCache(kvcache.CausalCache(), kvcache.SlidingWindowCache(2))
        whole.init(backend, ml.DType.F32, 1, 16, 16)
        whole.start_forward(ctx, kvcache.Batch(range(5), [0] * 5))
        for wrong in ([4], [-1]):
            with pytest.raises(kvcache.InvalidRangeError, match="evict"):
                whole.evict(0, wrong)
        whole.evict(0, iter([1, 3]))
        assert [cache.positions(0).tolist() for cache in whole.caches] == [[0, 2, 4]] * 2
        with pytest.raises(NotSupportedError, match=r"position 3 .* end it at 3"):
            whole.snapshot(0, 0, 4)
        with pytest.raises(NotSupportedError, match="set observer of each of its caches"):
            whole.observer = AttentionMass()
        with pytest.raises(NotSupportedError, match="call compress on each of its caches"):
            whole.compress(0, Lightest())
        mixed = kvcache.WrapperCache(kvcache.CausalCache(), kvcache.RecurrentCache((1, 1), (1,)))
        mixed.init(backend, ml.DType.F32, 1, 16, 16)
        with pytest.raises(NotSupportedError, match="RecurrentCache"):
            mixed.evict(0, [])


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
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "eviction.py"))
    recent, heavy = example["Recent"], example["HeavyHitters"]
    positions, mass = np.array([0, 1, 3, 4, 7, 9]), np.array([5.0, 0, 3, 1, 0, 0])
    assert recent(4).evicted(positions, None).tolist() == [0, 1]
    assert recent(4, sinks=1).evicted(positions, None).tolist() == [1, 3]
    assert heavy(4).evicted(positions, mass).tolist() == [1, 4]
    assert not any(policy.evicted(positions, mass).size for policy in (recent(6), recent(9, 4), heavy(6)))
    with ml.open_backend("numpy") as backend:
        model = load_model(bundled_model(), backend)
        pieces = [[1, *range(300, 340)]]
        full = example["perplexity"](model, pieces, 8, None)
        assert example["perplexity"](model, pieces, 8, heavy(64)) == full
        assert example["perplexity"](model, pieces, 8, heavy(8)) != full
