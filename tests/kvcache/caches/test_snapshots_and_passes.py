"""Snapshots of sequences that are cut, and of passes that are still under way, go on or are taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CacheFullError,
    CausalCache,
    InvalidBatchError,
    OrderError,
    RecurrentCache,
    SequenceLostError,
    SlidingWindowCache,
    WrapperCache,
)
from kvcache.snapshots.reservation import IncomingSnapshot, StoredTensor
from kvcache.storage.formats import CacheFormat

from .small_passes import bound


def put(cache: Any, ctx: ml.Context, values: Sequence[float]) -> None:
    host = np.array(values, np.float32).reshape(-1, 1, 1).repeat(4, 2)
    cache.put(ctx, ctx.from_numpy(host), ctx.from_numpy(host))


def run(cache: Any, ctx: ml.Context, positions: Sequence[int], values: Sequence[float], seq: int = 0) -> None:
    cache.start_forward(ctx, Batch(positions, [seq] * len(positions)))
    put(cache, ctx, values)


def keys(snapshot: Any) -> list[float]:
    return [float(x) for x in snapshot.layers[0].tensors[0].to_numpy()[:, 0, 0]]


def test_a_window_that_is_cut_below_what_it_stores_takes_its_snapshots_anew(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(SlidingWindowCache(2), backend, 1, 64, 16)
    cache.schedule_snapshots(0, [4])
    run(cache, ctx, range(8), range(100, 108))
    run(cache, ctx, [8], [108])
    cache.remove(0, 5)  # the tokens before 5 were evicted
    assert (cache.offset(0), cache.rolled_back(0)) == (0, 0)
    run(cache, ctx, range(5), range(200, 205))
    (taken,) = cache.take_snapshots(0)
    assert keys(taken) == [202, 203]


@pytest.mark.parametrize("kind", [CausalCache, lambda: SlidingWindowCache(2)])
def test_a_pass_that_is_undone_removes_nothing_and_its_snapshots_are_taken_anew(
    kind: Callable[[], Any], backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(kind(), backend, 1, 64, 16)
    run(cache, ctx, [0], [100])
    cache.schedule_snapshots(0, [2, 3])
    cache.start_forward(ctx, Batch([1, 2], [0, 0]))
    cache.undo_forward()
    assert (cache.offset(0), cache.rolled_back(0)) == (1, None)
    for position in (1, 2):
        run(cache, ctx, [position], [101 + position])
    assert [taken.end for taken in cache.take_snapshots(0)] == [2, 3]


def prepared(backend: ml.Backend, ctx: ml.Context) -> tuple[CausalCache, Any, Any]:
    """A cache of 16 cells, a snapshot of its four tokens, and their restoration to a second sequence."""
    cache = bound(CausalCache(), backend, 2, 16, 8)
    run(cache, ctx, range(4), range(4))
    snapshot = cache.snapshot(0)
    return cache, snapshot, cache.prepare_restore_snapshot(1, snapshot)


def test_what_was_dropped_since_a_restoration_was_prepared_is_refused_and_nothing_changes(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache, snapshot, commit = prepared(backend, ctx)
    snapshot.drop()
    for restore in (commit, lambda: cache.restore(1, snapshot)):
        with pytest.raises(SequenceLostError, match=r"restore: the snapshot of \[0, 4\) was dropped"):
            restore()
        assert cache.held() == {0: 4}


def test_what_was_copied_out_since_a_restoration_was_prepared_needs_room(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache, snapshot, commit = prepared(backend, ctx)
    snapshot.detach()
    run(cache, ctx, range(4, 29), range(4, 29))
    with pytest.raises(CacheFullError, match="restore: 4 "):
        commit()
    assert cache.held() == {0: 29}
    cache.remove(0, 28)
    commit()
    assert cache.held() == {0: 28, 1: 4}
    assert keys(cache.snapshot(1)) == [0, 1, 2, 3]


def test_a_window_that_is_cut_can_be_scheduled_and_goes_on(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = bound(SlidingWindowCache(2), backend, 1, 64, 16)
    run(cache, ctx, range(16), range(16))
    run(cache, ctx, [16], [16])
    cache.schedule_snapshots(0, [20])
    cache.remove(0, 11)
    cache.schedule_snapshots(0, [2])
    run(cache, ctx, range(3), range(3))
    assert [taken.end for taken in cache.take_snapshots(0)] == [2]


@pytest.mark.parametrize("how", ["a refused start", "a look", "a snapshot"])
def test_a_state_is_taken_when_its_pass_has_set_it(backend: ml.Backend, ctx: ml.Context, how: str) -> None:
    cache = bound(RecurrentCache(state_shape=(2,)), backend, 2, 16, 8)

    def disturb() -> None:
        if how == "a look":
            assert cache.snapshots_taken(0) == []
            return
        with pytest.raises(InvalidBatchError if how == "a refused start" else OrderError):
            cache.start_forward(ctx, Batch([9], [0])) if how == "a refused start" else cache.snapshot(0)

    for begin in (0, 2):
        cache.schedule_snapshots(0, [begin + 2])
        cache.start_forward(ctx, Batch([begin, begin + 1], [0, 0]))
        disturb()
        state = ctx.full((1, 2), begin + 5.0, ml.DType.F32)
        cache.update_state(ctx, "recurrent", state, 0)
        (taken,) = cache.take_snapshots(0)
        assert taken.parts[1].states["recurrent", 0].to_numpy().tolist() == [[begin + 5.0] * 2]
    assert cache.skipped_snapshots(0) == []


def test_a_pass_that_goes_on_has_all_its_layers_in_its_snapshots(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(WrapperCache(SlidingWindowCache(2), CausalCache()), backend, 1, 8, 4)
    layers = ((0, 0), (0, 1), (1, 2), (1, 3))

    def put_in(chosen: Sequence[tuple[int, int]], values: Sequence[float]) -> None:
        for kind, layer in chosen:
            cache.set_layer_type(kind)
            cache.set_layer(layer)
            put(cache, ctx, values)

    cache.start_forward(ctx, Batch([0, 1], [0, 0]))
    put_in(layers, [1, 2])
    first = cache.snapshot(0)
    cache.schedule_snapshots(0, [4])
    cache.start_forward(ctx, Batch([2, 3, 4], [0] * 3))
    put_in(layers[::2], [3, 4, 5])
    with pytest.raises(CacheFullError):  # the window has made room by then, the other has none
        cache.start_forward(ctx, Batch([5, 6, 7, 8], [0] * 4))
    put_in(layers[1::2], [3, 4, 5])
    (taken,) = cache.take_snapshots(0)
    cache.remove(0, 0)
    assert cache.restore(0, cache.merge(first, taken))


def test_a_pass_that_is_taken_back_has_put_nothing_into_its_snapshots(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(CausalCache(), backend, 2, 16, 8)
    run(cache, ctx, [0, 1], [1, 2])
    cache.start_forward(ctx, Batch([2, 3], [0, 0]))
    taken = cache.snapshot(0)
    cache.undo_forward()
    assert cache.restore(1, taken)
    run(cache, ctx, [4], [5], seq=1)
    with pytest.raises(OrderError, match="lacks position 2"):
        cache.get(ctx)


def test_what_lands_in_freed_cells_is_not_blanked_by_the_pass_before(
    ctx: ml.Context, backend: ml.Backend
) -> None:
    if not isinstance(backend, ml.SupportsHostMemory):
        pytest.skip("the host cannot write there")
    cache = bound(CausalCache(), backend, 3, 8, 8)

    def batch(positions: Sequence[int], sequences: Sequence[int]) -> None:
        cache.start_forward(ctx, Batch(positions, sequences))
        put(cache, ctx, range(len(positions)))

    for seq, count in enumerate((8, 7, 7)):
        batch(range(count), [seq] * count)
    cache.remove(0, 0)
    batch([0], [0])
    cache.get(ctx)
    batch([7, 1], [1, 0])
    tensor = StoredTensor((3, 1, 4), np.dtype(np.float32))
    layers = {0: (tensor, tensor)}
    stored = CacheFormat.of(ml.DType.F32)
    for other in (CacheFormat.of(ml.DType.F16), CacheFormat.of("F32/F16")):
        assert cache.land(0, IncomingSnapshot(2, 5, np.arange(2, 5), other, False, layers)) is None
    landing = cache.land(0, IncomingSnapshot(2, 5, np.arange(2, 5), stored, False, layers))
    assert landing is not None
    places = landing.open()
    assert places is not None
    for place in places[0]:
        place[...] = np.array([50, 51, 52], np.float32)[:, None, None]
    del places, place
    kept = landing.keep(3, 5)
    with pytest.raises(OrderError):
        cache.get(ctx)  # landing ended the pass
    assert keys(kept) == [50, 51, 52]
