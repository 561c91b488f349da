"""What callers may ask of every cache: dtypes, defrag, and folders as tiers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    ChunkedCache,
    EncoderCache,
    HostTier,
    InvalidBatchError,
    InvalidRangeError,
    OrderError,
    PrefixCache,
    PrefixOptions,
    RecurrentCache,
    SlidingWindowCache,
    StateCache,
    StateSpec,
    WrapperCache,
)
from kvcache.stores import MemoryStore

KINDS: dict[str, Callable[[], Any]] = {
    "causal": CausalCache,
    "window": lambda: SlidingWindowCache(2),
    "chunked": lambda: ChunkedCache(4),
    "encoder": EncoderCache,
    "wrapper": lambda: WrapperCache(SlidingWindowCache(2, memory=8), CausalCache()),
    "recurrent": lambda: RecurrentCache((2,), (3,)),
}


@pytest.mark.parametrize(
    "dtype", ["Q9_0", "F32/F32/F32", np.float32, None, ml.DType.I32, ("F32", ml.DType.BOOL), ()], ids=repr
)
@pytest.mark.parametrize("kind", KINDS)
def test_init_refuses_what_keys_and_values_cannot_be(
    numpy_backend: ml.Backend, kind: str, dtype: Any
) -> None:
    cache = KINDS[kind]()
    with pytest.raises(ml.DTypeError, match=r"init: dtype=.*F32, F16, BF16, Q8_0, Q4_0"):
        cache.init(numpy_backend, dtype, 2, 8, 4)
    with numpy_backend.new_context() as ctx, pytest.raises(OrderError):
        cache.start_forward(ctx, Batch([0], [0]))
    cache.init(numpy_backend, ml.DType.F32, 2, 8, 4)


@pytest.mark.parametrize("number", [1.5, "1", None, -1], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_whole_numbers_and_a_refusal_changes_nothing(
    numpy_backend: ml.Backend, kind: str, number: Any
) -> None:
    cache = KINDS[kind]()
    cache.init(numpy_backend, ml.DType.F32, 2, 8, 4)
    calls: list[Callable[[], object]] = [
        lambda: cache.remove(0, number),
        lambda: cache.copy_prefix(0, 1, number),
        lambda: cache.snapshot(0, number),
    ]
    if hasattr(cache, "prepare_restore"):
        calls += [lambda: cache.prepare_restore(0, number), lambda: cache.resume_point(0, number)]
    if number is not None:
        calls += [lambda: cache.remove(0, 0, number), lambda: cache.snapshot(0, 0, number)]
    for call in calls:
        with pytest.raises(InvalidRangeError, match=rf"={number!r}; it must be a whole number of at least 0"):
            call()
    cache.remove(np.int64(0), np.int64(0))


WHOLE: dict[str, Callable[[Any], Any]] = {
    "causal": lambda n: CausalCache(),
    "window": lambda n: SlidingWindowCache(n(2), n(4), keep=n(1)),
    "chunked": lambda n: ChunkedCache(n(3)),
    "states": lambda n: StateCache({0: {"x": StateSpec((2,))}}, checkpoints=n(3), checkpoint_interval=n(1)),
    "wrapper": lambda n: WrapperCache(SlidingWindowCache(n(2)), CausalCache()),
}


def _answers(cache: Any, backend: ml.Backend, n: Callable[[int], Any]) -> list[object]:
    """All that a cache of three sequences of 100 tokens says when it is asked with numbers of one kind."""
    cache.init(backend, ml.DType.F32, n(3), n(100), n(4))
    with backend.new_context() as ctx:
        for position in range(6):
            cache.start_forward(ctx, Batch([n(position)], [n(0)]))
            cache.set_layer(n(0))
            if isinstance(cache, StateCache):
                cache.update_state(ctx, "x", ctx.full((1, 2), 1.0, ml.DType.F32))
            else:
                cache.put(ctx, ctx.zeros((1, 1, 4), ml.DType.F32), ctx.zeros((1, 1, 4), ml.DType.F32))
    snapshot = cache.snapshot(n(0), n(0), n(6))
    before, after = cache.split(snapshot, n(6))
    cache.copy_prefix(n(0), n(1), n(6))
    found: list[object] = [getattr(cache, "cells", None), cache.max_sequences, snapshot.begin, snapshot.end]
    found += [None if one is None else (one.begin, one.end) for one in (before, after)]
    for position in (0, 3, 5, 6):
        found += [cache.can_resume(n(0), n(position)), cache.resume_point(n(0), n(position))]
        if hasattr(cache, "prepare_restore"):
            found.append(cache.prepare_restore(n(0), n(position)))
    cache.remove(n(0), n(6))
    return [*found, cache.offset(n(0)), json.dumps(cache.settings())]


@pytest.mark.parametrize("kind", WHOLE)
def test_numbers_of_numpy_are_the_numbers_that_they_are(backend: ml.Backend, kind: str) -> None:
    """Narrow and unsigned ones would overflow, and none is an int in JSON."""
    asked = {number: _answers(WHOLE[kind](number), backend, number) for number in (int, np.int64, np.uint8)}
    for found in asked.values():
        assert [(type(one), one) for one in found] == [(type(one), one) for one in asked[int]]


@pytest.mark.parametrize("items", [5, [3], [None]], ids=repr)
def test_items_of_a_batch_come_in_pairs(numpy_backend: ml.Backend, items: Any) -> None:
    cache = EncoderCache()
    cache.init(numpy_backend, ml.DType.F32, 2, 8, 4)
    with numpy_backend.new_context() as ctx, pytest.raises(InvalidBatchError, match="pairs of"):
        cache.start_forward(ctx, Batch([0], [0], multimodal=items))


def _turned(ctx: ml.Context, layer: int, key: ml.Tensor, offsets: ml.Tensor) -> ml.Tensor:
    """Each pair of numbers turned by the offset, as rotary embeddings do."""
    numbers, angle = key.to_numpy(), offsets.to_numpy()[:, None, None].astype(np.float32)
    even, odd = numbers[..., ::2], numbers[..., 1::2]
    turned = np.empty_like(numbers)
    turned[..., ::2] = even * np.cos(angle) - odd * np.sin(angle)
    turned[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return ctx.from_numpy(turned)


@pytest.mark.parametrize(("dtype", "times"), [("Q4_0", 9), ("F16", 0), ("Q4_0/F16", 9), ("F16/Q4_0", 0)])
def test_codes_that_were_moved_too_often_are_told_once(
    numpy_backend: ml.Backend, caplog: pytest.LogCaptureFixture, dtype: str, times: int
) -> None:
    """Each move decodes keys and rounds them again; only those of the same tokens count."""
    cache, kv = CausalCache(_turned), np.random.default_rng(1).standard_normal((20, 1, 32), np.float32)
    cache.init(numpy_backend, dtype, max_sequences=2, capacity=20, max_batch=20)

    def fill(count: int, begin: int = 0) -> None:
        with numpy_backend.new_context() as ctx:
            cache.start_forward(ctx, Batch([*range(begin, begin + count)], [0] * count))
            cache.set_layer(0)
            cache.put(ctx, ctx.from_numpy(kv[:count]), ctx.from_numpy(kv[:count]))

    fill(20)
    for _ in range(8):
        cache.remove(0, 0, 1)
    fill(8, 12)
    cache.remove(0, 0, 12)  # the tokens behind were moved once
    cache.remove(0, 0)
    for _ in range(3):
        fill(20)  # in the same cells
        for _ in range(4):
            cache.remove(0, 0, 1)
        cache.remove(0, 0)
    assert "were moved" not in caplog.text
    fill(20)
    for _ in range(12):
        cache.remove(0, 0, 1)
    told = f"keys stored in {dtype.split('/')[0]} were moved to other positions {times} times"
    assert caplog.text.count("were moved") == caplog.text.count(told) == bool(times)


@pytest.mark.parametrize("kind", ["wrapper", "recurrent"])
def test_defrag_of_a_composed_cache_lets_every_sequence_lie_in_one_run(
    numpy_backend: ml.Backend, kind: str
) -> None:
    cache = KINDS[kind]()
    cache.set_config(ml.CacheConfig(elide_mask=True))
    cache.init(numpy_backend, ml.DType.F32, max_sequences=2, capacity=4, max_batch=4)
    with numpy_backend.new_context() as ctx:
        _put(cache, ctx, kind, [0, 1, 2], [0] * 3)
        _put(cache, ctx, kind, [0, 1], [1] * 2)
        assert _put(cache, ctx, kind, [3, 4, 5], [0] * 3) != [0, 1, 2, 3, 4, 5]
        cache.defrag()
        cache.remove(1, 0)
        assert _put(cache, ctx, kind, [6], [0]) == [0, 1, 2, 3, 4, 5, 6]


def _put(cache: Any, ctx: ml.Context, kind: str, positions: list[int], sequences: list[int]) -> list[int]:
    """Store 100 * sequence + position for each token; the rows of ``get``, those of others too."""
    cache.start_forward(ctx, Batch(positions, sequences))
    numbers = [100 * seq + position for position, seq in zip(positions, sequences, strict=True)]
    key = ctx.from_numpy(np.array(numbers, np.float32).reshape(-1, 1, 1))
    if kind == "wrapper":
        cache.set_layer_type(0)
        cache.put(ctx, key, key)
        cache.set_layer_type(1)
    cache.put(ctx, key, key)
    return [int(number) for number in cache.get(ctx)[0].to_numpy().ravel()]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (PrefixOptions(backlog="32KiB", in_flight="1 MiB", read_ahead="1.5KB"), {}),
        (PrefixOptions(backlog=1, read_ahead=0), {"backlog": "32KiB"}),
    ],
    ids=["texts", "named, beside those that they replace"],
)
def test_amounts_of_a_prefix_cache_may_be_texts_or_zero_and_options_be_named(
    numpy_backend: ml.Backend, options: PrefixOptions, named: dict[str, Any]
) -> None:
    cache = CausalCache()
    cache.init(numpy_backend, ml.DType.F32, 2, 8, 8)
    PrefixCache(cache, budget=0, tiers=[HostTier(0)]).close()
    stored: dict[str, Any] = {"tiers": [MemoryStore()], "identity": {"model": "m"}}
    with PrefixCache(cache, budget="2KiB", options=options, **named, **stored) as prefix:
        assert prefix.tree.store is not None
        assert prefix.tree.store.writes.backlog == 32 << 10
