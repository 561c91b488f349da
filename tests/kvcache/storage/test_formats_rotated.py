"""Rotated formats: but for rounding nothing changes, and outlying channels do not cost others their bits."""

from __future__ import annotations

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, SlidingWindowCache
from kvcache.snapshots.serialize import deserialize, serialize
from kvcache.storage.formats import CacheFormat, Rotated, open_format
from kvcache.storage.formats.plain import Plain
from kvcache_engine import load_model

from ...rigs.each_backend import each_backend

HEADS, KV_HEADS, DIM = 4, 2, 64
TOKENS = 48


backend = each_backend("numpy", "torch", "mlx")


def arrays(outlier: float, dim: int = DIM) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys with a large channel (and queries with a small one), values."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((TOKENS, n, dim)).astype(np.float32) for n in (HEADS, *[KV_HEADS] * 2)
    )
    key[..., 5] *= outlier
    query[..., 5] /= outlier
    return query, key, value


def reference(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention in float64."""
    key, value = (np.repeat(x, HEADS // KV_HEADS, 1).astype(np.float64) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) / 8
    scores[:, ~np.tri(len(query), dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)
    return found


def stored(
    backend: ml.Backend, dtype: object, x: tuple[np.ndarray, ...], cache: CausalCache | None = None
) -> CausalCache:
    cache = cache or CausalCache()
    cache.init(backend, dtype, 2, TOKENS, TOKENS)  # type: ignore[arg-type]
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(TOKENS), [0] * TOKENS))
        cache.put(ctx, ctx.from_numpy(x[1]), ctx.from_numpy(x[2]))
    return cache


def attended(backend: ml.Backend, cache: CausalCache, query: np.ndarray) -> np.ndarray:
    with backend.new_context() as ctx:
        return cache.attend(ctx, ctx.from_numpy(query), 0.125).to_numpy()


@pytest.mark.parametrize("dim", [64, 48, 80])
def test_turning_twice_is_nothing_and_keeps_products(backend: ml.Backend, dim: int) -> None:
    turned, x = Rotated(Plain(ml.DType.F32)), arrays(1.0, dim)
    with backend.new_context() as ctx:
        once = turned.turn(ctx, ctx.from_numpy(x[1]))
        np.testing.assert_allclose(turned.turn(ctx, once).to_numpy(), x[1], atol=1e-5)
        other = turned.turn(ctx, ctx.from_numpy(x[2])).to_numpy()
    assert np.abs(once.to_numpy() - x[1]).max() > 0.1
    np.testing.assert_allclose((once.to_numpy() * other).sum(-1), (x[1] * x[2]).sum(-1), atol=1e-4)


def test_what_is_not_quantized_is_the_same_but_for_rounding(backend: ml.Backend) -> None:
    query, key, value = arrays(1.0)
    exact = Rotated(Plain(ml.DType.F32))
    exact.name = "ROTATED_TEST_F32"
    cache = stored(backend, exact, (query, key, value))
    np.testing.assert_allclose(attended(backend, cache, query), reference(query, key, value), atol=1e-5)


@pytest.mark.parametrize(("name", "most"), [("Q8_0", 0.55), ("Q4_0", 0.55), ("AFFINE4_32", 0.85)])
def test_outliers_cost_less(backend: ml.Backend, name: str, most: float) -> None:
    query, key, value = arrays(20.0)
    wanted = reference(query, key, value)
    off = {}
    for dtype in (name, f"ROTATED_{name}"):
        cache = stored(backend, dtype, (query, key, value))
        off[dtype] = np.abs(attended(backend, cache, query) - wanted).mean()
    assert off[f"ROTATED_{name}"] < most * off[name]


@pytest.mark.parametrize("name", ["ROTATED_Q4_0", "ROTATED_Q8_0/Q4_0", "F32/ROTATED_Q4_0", "ROTATED_F8_E4M3"])
@pytest.mark.parametrize(("window", "fixed"), [(None, False), (None, True), (7, False)])
def test_attend_is_attention_over_what_get_reads_back(
    backend: ml.Backend, name: str, window: int | None, fixed: bool
) -> None:
    query, key, value = arrays(3.0)
    cache = CausalCache() if window is None else SlidingWindowCache(window)
    cache.set_config(ml.CacheConfig(fixed_context=8 * fixed))
    stored(backend, name, (query, key, value), cache)
    with backend.new_context() as ctx:
        keys, values, mask = cache.get(ctx)
        found = attended(backend, cache, query)
        wanted = ml.nn.attention(ctx, ctx.from_numpy(query), keys, values, mask, 0.125).to_numpy()
        read = keys.to_numpy()[:TOKENS], values.to_numpy()[:TOKENS]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    both = CacheFormat.of(name)
    if window is None:
        for one, x, y in zip((both.key, both.value), (key, value), read, strict=True):
            assert (np.abs(y - x) <= one.bound(x, ml.DType.F32) + 1e-6).all()


def test_pages_hold_what_was_turned_and_fit_their_own_format_alone(backend: ml.Backend) -> None:
    query, key, value = arrays(3.0)
    cache = stored(backend, "ROTATED_Q4_0", (query, key, value))
    page = serialize(backend, cache.snapshot(0))
    before = attended(backend, cache, query[-1:].repeat(TOKENS, 0))[-1]
    plain, other = CausalCache(), CausalCache()
    plain.init(backend, "Q4_0", 2, TOKENS, TOKENS)
    other.init(backend, "ROTATED_Q4_0", 2, TOKENS, TOKENS)
    with pytest.raises(ml.MLError, match="ROTATED_Q4_0"):
        plain.restore(0, deserialize(backend, page))
    assert other.restore(0, deserialize(backend, page), TOKENS - 1)
    with backend.new_context() as ctx:
        other.start_forward(ctx, Batch([TOKENS - 1], [0]))
        other.put(ctx, ctx.from_numpy(key[-1:]), ctx.from_numpy(value[-1:]))
        after = other.attend(ctx, ctx.from_numpy(query[-1:]), 0.125).to_numpy()[0]
    np.testing.assert_allclose(after, before, atol=1e-5)


def test_keys_that_move_are_turned_back_for_it(numpy_backend: ml.Backend, make_model: object) -> None:
    """A model with rotary keys, with tokens removed from the middle."""
    model = load_model(make_model(head_dim=32), numpy_backend)  # type: ignore[operator]
    found = {}
    for dtype in (ml.DType.F32, "ROTATED_Q8_0"):
        cache = model.make_cache()
        cache.init(numpy_backend, dtype, 1, 32, 32)
        with numpy_backend.new_context() as ctx:
            for positions, ids in ((range(12), range(3, 15)), ([10], [40])):
                batch = Batch(positions, [0] * len(positions), inputs=[*ids], outputs=[len(positions) - 1])
                cache.start_forward(ctx, batch)
                logits = model.forward(ctx, batch, cache).to_numpy()
                if len(positions) > 1:
                    cache.remove(0, 4, 6)
        found[dtype] = logits
    np.testing.assert_allclose(found["ROTATED_Q8_0"], found[ml.DType.F32], atol=0.15)


def test_they_are_found_by_name() -> None:
    assert open_format("rotated_q4_0").name == "ROTATED_Q4_0"
    with pytest.raises(ml.DTypeError, match="ROTATED_Q4_0"):
        open_format("ROTATED_F16")
