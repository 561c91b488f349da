"""Context shift with real models: what stays in the cache is what recomputing at the new positions gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, CausalCache, ChunkedCache, SlidingWindowCache
from kvcache_engine import Llama, load_model
from ml import DType, nn

CAPACITY, KEEP, DROPPED = 40, 4, 18


@pytest.fixture(params=["stories260K", "random"])
def folder(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Path:
    if request.param == "random":
        return make_model()
    found: Path = request.getfixturevalue("stories")
    return found


@pytest.fixture
def model(folder: Path, runner_backend: ml.Backend) -> Any:
    return load_model(folder, runner_backend)


def bound(cache: CausalCache, backend: ml.Backend) -> CausalCache:
    cache.init(backend, DType.F32, 2, CAPACITY, CAPACITY)
    return cache


def run(model: Llama, cache: CausalCache, tokens: list[int], start: int = 0) -> np.ndarray:
    """The logits of the last token."""
    positions = range(start, start + len(tokens))
    batch = Batch(positions, [0] * len(tokens), inputs=tokens, outputs=[len(tokens) - 1])
    with model.backend.new_context() as ctx:
        cache.start_forward(ctx, batch)
        return np.asarray(model.forward(ctx, batch, cache).to_numpy()[0])


def stored(cache: CausalCache) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Per layer K and V (tokens, kv_heads, head_dim), in the order of positions."""
    layers = cache.snapshot(0).layers
    found = ((i, [tensor.to_numpy() for tensor in layer.tensors]) for i, layer in layers.items())
    return {i: (key, value) for i, (key, value) in found}


def turned(key: np.ndarray, by: int, theta: float) -> np.ndarray:
    """The same keys at positions moved by ``by``, in float64: each pair (i, i + half) turns as one."""
    half = key.shape[-1] // 2
    angle = by * theta ** (-np.arange(half) / half)
    low, high = key[..., :half].astype(np.float64), key[..., half:].astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def tokens_of(model: Llama) -> list[int]:
    found: list[int] = np.random.default_rng(4).integers(3, model.config.vocab_size, CAPACITY).tolist()
    return found


def test_shifted_keys_are_those_of_a_model_that_recomputes_at_the_new_positions(
    model: Llama, runner_backend: ml.Backend
) -> None:
    tokens = tokens_of(model)
    cache = bound(model.make_cache(), runner_backend)
    run(model, cache, tokens)
    before = stored(cache)
    assert cache.shift_context(0, KEEP) == DROPPED
    after = stored(cache)
    kept = tokens[:KEEP] + tokens[KEEP + DROPPED :]
    assert cache.positions(0).tolist() == list(range(len(kept)))

    # In the first layer a key is a function of its token and position: a fresh run gives it.
    fresh = bound(model.make_cache(), runner_backend)
    run(model, fresh, kept)
    np.testing.assert_allclose(after[0][0], stored(fresh)[0][0], rtol=1e-4, atol=1e-5)

    theta = model.config.rope.base
    for i, (key, value) in before.items():
        wanted = np.concatenate((key[:KEEP], turned(key[KEEP + DROPPED :], -DROPPED, theta)))
        np.testing.assert_allclose(after[i][0], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(after[i][1], np.delete(value, slice(KEEP, KEEP + DROPPED), axis=0))


def test_generation_goes_on_as_on_a_cache_that_was_given_the_keys(
    model: Llama, runner_backend: ml.Backend
) -> None:
    cache = bound(model.make_cache(), runner_backend)
    tokens = tokens_of(model)
    run(model, cache, tokens)
    before = stored(cache)
    with pytest.raises(kvcache.CacheFullError):
        run(model, cache, [5] * (CAPACITY + 1), CAPACITY)
    cache.shift_context(0, KEEP)
    length = CAPACITY - DROPPED

    given = bound(CausalCache(), runner_backend)
    with runner_backend.new_context() as ctx:
        given.start_forward(ctx, Batch(range(length), [0] * length))
        for i, (key, value) in before.items():
            wide = np.concatenate(
                (key[:KEEP], turned(key[KEEP + DROPPED :], -DROPPED, model.config.rope.base))
            )
            given.set_layer(i)
            rest = np.delete(value, slice(KEEP, KEEP + DROPPED), axis=0)
            given.put(ctx, ctx.from_numpy(wide, DType.F32), ctx.from_numpy(rest))
    for step in range(3):
        token = [tokens[step]]
        logits = [run(model, each, token, length + step) for each in (cache, given)]
        assert np.isfinite(logits[0]).all()
        np.testing.assert_allclose(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def test_a_conversation_may_outgrow_its_context_again_and_again(
    model: Llama, runner_backend: ml.Backend
) -> None:
    cache = model.make_cache()
    cache.init(runner_backend, DType.F32, 1, 16, 16)
    token, position, shifts = 1, 0, 0
    for _ in range(60):
        if position == 16:
            position -= cache.shift_context(0, 2)
            shifts += 1
        token = int(run(model, cache, [token], position).argmax())
        position += 1
    assert shifts > 5
    assert cache.cells == 16


def test_a_window_that_could_not_resume_refuses_a_context_shift(
    model: Llama, runner_backend: ml.Backend
) -> None:
    cache = bound(SlidingWindowCache(6, shift=nn.rope_shift(model.config.rope)), runner_backend)
    tokens = tokens_of(model)
    run(model, cache, tokens[:9])
    run(model, cache, tokens[9:10], 9)  # of the 10, position 2 and up are stored
    held = stored(cache)
    with pytest.raises(kvcache.NotSupportedError):
        cache.shift_context(0, KEEP)
    for i, parts in stored(cache).items():
        np.testing.assert_array_equal(parts, held[i])
    assert np.isfinite(run(model, cache, tokens[10:11], 10)).all()


@pytest.mark.parametrize("keep", [-1, 3, 9])
def test_there_has_to_be_something_after_what_is_kept(numpy_backend: ml.Backend, keep: int) -> None:
    for make in (CausalCache, lambda: ChunkedCache(4)):
        cache = bound(make(), numpy_backend)
        with numpy_backend.new_context() as ctx:
            cache.start_forward(ctx, Batch([0, 1, 2], [0, 0, 0]))
        with pytest.raises(kvcache.InvalidRangeError):
            cache.shift_context(0, keep)
        assert cache.positions(0).tolist() == [0, 1, 2]
