"""Which snapshots inside a conversation are saved where not all may be."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ml
from kvcache import (
    Batch,
    CausalCache,
    PrefixCache,
    Session,
    SlidingWindowCache,
    WrapperCache,
    deserialize,
    serialize,
    thin_snapshots,
)
from kvcache.stores import MemoryStore


@given(st.data())
def test_they_fit_and_all_stay_if_all_fit(data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=12))
    ends = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    sizes = [data.draw(st.integers(0, 9)) for _ in ends[1:]]
    limit = data.draw(st.integers(0, 9 * len(ends)))
    stay = thin_snapshots(ends, sizes, limit)
    assert stay == sorted(set(stay))
    assert sum(sizes[i] for i in stay) <= limit
    if sum(sizes) <= limit:
        assert stay == [*range(len(sizes))]


@pytest.mark.parametrize("count", [7, 15, 31])
def test_the_rest_is_evenly_spaced(count: int) -> None:
    """Of snapshots in equal steps, half of them leave no gap of four."""
    stay = thin_snapshots([*range(10, 10 * count + 20, 10)], [1] * count, count // 2)
    points = [-1, *stay, count]
    assert max(after - before for before, after in itertools.pairwise(points)) <= 3


def evaluate(cache: Any, session: Session, size: int, layers: int) -> None:
    for part in session.chunks(size):
        with cache.backend.new_context() as ctx:
            at = cache.offset(session.seq)
            cache.start_forward(ctx, Batch(range(at, at + len(part)), [session.seq] * len(part)))
            for layer in range(layers):
                if isinstance(cache, WrapperCache):
                    cache.set_layer_type(layer)
                cache.set_layer(layer)
                cache.put(ctx, *[ctx.zeros((len(part), 1, 4), ml.DType.F32)] * 2)


def test_a_session_saves_windows_all_along() -> None:
    cache = WrapperCache(SlidingWindowCache(4), CausalCache())
    with ml.open_backend("numpy") as backend:
        cache.init(backend, ml.DType.F32, 2, 256, 8)
        with PrefixCache(cache, interval=8) as prefix, prefix.begin(range(129)) as session:
            evaluate(cache, session, 8, 2)
            every = session.snapshots(1 << 30)
            assert [snapshot.end for snapshot in every] == [*range(8, 129, 8), 129]
            window = every[0].nbytes - 8 * 32  # without the tokens of full attention
            ends = [0, *(snapshot.end for snapshot in session.snapshots(6 * window))]
    assert len(ends) == 8
    assert max(after - before for before, after in itertools.pairwise(ends)) <= 32


@pytest.mark.parametrize("kept", ["adopted", "stored"])
@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (lambda: SlidingWindowCache(64), 1),
        (lambda: WrapperCache(SlidingWindowCache(64), SlidingWindowCache(128)), 2),
        (lambda: WrapperCache(SlidingWindowCache(64), CausalCache()), 1),
        (lambda: WrapperCache(SlidingWindowCache(64), CausalCache()), 2),
    ],
    ids=["windows", "two windows", "windows beside an unused cache", "windows and full"],
)
def test_a_prompt_leaves_a_kept_one_anywhere(make: Callable[[], Any], layers: int, kept: str) -> None:
    """It computes its own tokens, and less than an interval before."""
    store, prompt = MemoryStore(), [*range(2000)]
    with ml.open_backend("numpy") as backend:

        def opened() -> PrefixCache:
            cache = make()
            cache.init(backend, ml.DType.F32, 2, 4096, 512)
            return PrefixCache(cache, tiers=[store] if kept == "stored" else (), identity={"model": "any"})

        with opened() as first, first.begin(prompt) as session:
            evaluate(first.cache, session, 512, layers)
            pages = [serialize(backend, snapshot) for snapshot in session.snapshots()]
            (least,) = session.snapshots(inside=0)
            assert session.snapshots(inside=least.nbytes)[0].end in (512, 1024, 1536)
        for leaves in (1990, 1500, 600):
            with opened() as again:
                if kept == "adopted":
                    assert again.adopt(prompt, [deserialize(backend, page) for page in pages])
                with again.begin([*prompt[:leaves], 5, 6, 7]) as session:
                    assert session.cached == leaves - leaves % 512, leaves
