"""Which snapshots inside a conversation are saved where not all may be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ml
from kvcache import Batch, CausalCache, PrefixCache, SlidingWindowCache, WrapperCache, thin_snapshots


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


def test_a_session_saves_windows_all_along() -> None:
    cache = WrapperCache(SlidingWindowCache(4), CausalCache())
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        cache.init(backend, ml.DType.F32, 2, 256, 8)
        with PrefixCache(cache, interval=8) as prefix, prefix.begin(range(129)) as session:
            for part in session.chunks(8):
                at = cache.offset(session.seq)
                cache.start_forward(ctx, Batch(range(at, at + len(part)), [session.seq] * len(part)))
                for layer in range(2):
                    cache.set_layer_type(layer)
                    cache.set_layer(layer)
                    cache.put(ctx, *[ctx.zeros((len(part), 1, 4), ml.DType.F32)] * 2)
            every = session.snapshots(1 << 30)
            assert [snapshot.end for snapshot in every] == [*range(8, 129, 8), 129]
            window = every[0].nbytes - 8 * 32  # without the tokens of full attention
            ends = [0, *(snapshot.end for snapshot in session.snapshots(6 * window))]
    assert len(ends) == 8
    assert max(after - before for before, after in itertools.pairwise(ends)) <= 32
