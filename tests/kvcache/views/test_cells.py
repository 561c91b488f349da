"""Pictures of caches: every cell is shown with those that hold it, and looking changes nothing."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    ChunkedCache,
    ClosedError,
    EncoderCache,
    NotSupportedError,
    OrderError,
    RecurrentCache,
    SlidingWindowCache,
    WrapperCache,
)
from kvcache.views import Occupancy, look_at_mask, render
from kvcache.views.blocks import CellMap, CellRun, binned, thinned
from kvcache.views.pictures import EncoderView, OtherView, StatesView

from .views_rig import bound, store, store_batch

F32 = ml.DType.F32


def the_map(cache: Any) -> CellMap:
    (cells,) = render(cache).maps
    return cells


def test_two_sequences_that_share_a_prefix(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=8, stored={0: 4})
    cache.copy_prefix(0, 1, 2)
    store(cache, numpy_backend, 1, [2])
    cells = the_map(cache)
    assert cells.runs == (
        CellRun(0, 2, (0, 1), 0, 0),
        CellRun(2, 4, (0,), 0, 2),
        CellRun(4, 8, (), 0, None),
        CellRun(8, 9, (1,), 0, 2),
        CellRun(9, 16, (), 0, None),
    )
    assert [run.kind for run in cells.runs] == ["shared", "own", "free", "own", "free"]
    assert cells.codes.tolist() == [2, 2, 3, 3, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]
    assert (cells.cells, cells.used, cells.count("shared"), cells.nbytes) == (16, 5, 2, 16 * 32)
    assert [(run.begin, run.end) for run in cells.holes] == [(4, 8)]
    first, second = cells.sequences
    assert (first.seq, first.tokens, first.first, first.last, first.shared, first.runs) == (0, 4, 0, 3, 2, 1)
    assert (second.seq, second.tokens, second.first, second.last, second.shared, second.runs) == (
        1, 3, 0, 2, 2, 2,
    )  # fmt: skip


def test_cells_that_only_a_snapshot_holds(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=1, capacity=8, stored={0: 6})
    snapshot = cache.snapshot(0, 1, 5)
    other = cache.snapshot(0, 2, 4)
    cache.remove(0, 2)
    cells = the_map(cache)
    assert cells.runs == (
        CellRun(0, 1, (0,), 0, 0),
        CellRun(1, 2, (0,), 1, 1),
        CellRun(2, 4, (), 2, None),
        CellRun(4, 5, (), 1, None),
        CellRun(5, 8, (), 0, None),
    )
    assert (cells.count("kept"), cells.used, cells.holes) == (3, 5, ())
    assert snapshot.in_cache
    assert other.in_cache
    del snapshot, other
    assert the_map(cache).count("kept") == 0, "what nobody keeps any more is free, swept or not"


def test_a_window_shows_what_is_stored_and_what_the_next_token_sees(numpy_backend: ml.Backend) -> None:
    cache = bound(SlidingWindowCache(2, memory=4), numpy_backend, sequences=2, capacity=100, batch=4)
    for position in range(9):
        store(cache, numpy_backend, 0, [position])
    cells = the_map(cache)
    (view,) = cells.sequences
    assert cells.note == "window 2, the last 4 kept"
    assert (view.first, view.last, view.tokens, view.visible) == (4, 8, 5, 2)
    chunked = bound(ChunkedCache(4), numpy_backend, stored={1: 6})
    (view,) = the_map(chunked).sequences
    assert (the_map(chunked).note, view.tokens, view.visible) == ("chunks of 4", 6, 2)


def test_holes_are_free_cells_with_used_ones_behind(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(shift=lambda ctx, layer, key, offsets: key), numpy_backend, 1, 12)
    assert the_map(cache).holes == ()
    store(cache, numpy_backend, 0, range(10))
    cache.remove(0, 3, 5)
    cells = the_map(cache)
    assert [(run.begin, run.end) for run in cells.holes] == [(3, 5)]
    assert cells.runs[2] == CellRun(5, 10, (0,), 0, 3), "its positions moved down, its cells did not"
    cache.remove(0, 0)
    assert the_map(cache).holes == ()


def test_any_cache_agrees_with_a_look_at_every_single_cell(numpy_backend: ml.Backend) -> None:
    """Random traces, against plain loops over rows and snapshots."""
    for seed in range(25):
        rng = random.Random(seed)
        cache = bound(CausalCache(), numpy_backend, sequences=4, capacity=8, batch=8)
        kept: list[Any] = []
        for _ in range(30):
            _random_step(rng, cache, numpy_backend, kept)
            _check_every_cell(cache, kept)


def _random_step(rng: random.Random, cache: Any, backend: ml.Backend, kept: list[Any]) -> None:
    seq, other = rng.sample(range(4), 2)
    choice, offset = rng.randrange(5), cache.offset(seq)
    if choice == 0 and offset < 7:
        store(cache, backend, seq, range(offset, offset + rng.randint(1, 7 - offset)))
    elif choice == 1:
        cache.copy_prefix(seq, other, rng.randint(0, 8))
    elif choice == 2:
        cache.remove(seq, rng.randint(0, 8))
    elif choice == 3:
        kept.append(cache.snapshot(seq, offset // 3, offset))
    elif kept:
        kept.pop(rng.randrange(len(kept)))


def _check_every_cell(cache: Any, kept: list[Any]) -> None:
    holders: dict[int, set[int]] = {}
    positions: dict[int, int] = {}
    for seq, row in cache._table.occupied():
        for cell, position in zip(row.cells.tolist(), row.positions.tolist(), strict=True):
            holders.setdefault(cell, set()).add(seq)
            positions[cell] = position
    pins = Counter(cell for s in kept if s.source is not None for cell in s.source.pin.cells.tolist())
    cells = the_map(cache)
    at = 0
    for run in cells.runs:
        assert (run.begin, run.size > 0) == (at, True)
        at = run.end
        for cell in range(run.begin, run.end):
            assert set(run.sequences) == holders.get(cell, set())
            assert run.snapshots == pins[cell]
            expected = None if run.position is None else run.position + cell - run.begin
            assert positions.get(cell) == expected
    assert at == cells.cells
    cache._table.sweep()
    references = [len(run.sequences) + run.snapshots for run in cells.runs for _ in range(run.size)]
    assert references == cache._table.references.tolist()
    assert cells.cells - cells.used == cache._table.free


def test_looking_changes_nothing(numpy_backend: ml.Backend) -> None:
    cache = bound(SlidingWindowCache(3), numpy_backend)
    store_batch(cache, numpy_backend, [0, 0, 1], [0, 1, 0])
    snapshot = cache.snapshot(0)
    table, forward = cache._table, cache.pass_under_way()

    def state() -> Any:
        rows = [(row.positions.tolist(), row.cells.tolist(), row.contiguous) for row in table.rows]
        return rows, table.references.tolist(), table.free, [*table.pins], len(table._dropped)

    before = state()
    picture = render(cache)
    look_at_mask(cache)
    for drawn in (picture.text(), picture.svg(), picture.html(), picture.json()):
        assert drawn
    assert state() == before
    assert snapshot.in_cache
    assert cache.pass_under_way() is forward, "the pass under way goes on"
    store(cache, numpy_backend, 0, [2, 3])
    assert picture.maps[0].sequences[0].last == 1, "a picture stays what it was"


def test_a_wrapper_shows_every_cache_inside(numpy_backend: ml.Backend) -> None:
    cache = bound(WrapperCache(SlidingWindowCache(2), CausalCache(), EncoderCache()), numpy_backend)
    picture = render(cache)
    assert [part.name for part in picture.parts] == ["SlidingWindowCache", "CausalCache", "EncoderCache"]
    assert len(picture.maps) == 2


def test_a_cache_of_another_package_shows_its_name(numpy_backend: ml.Backend) -> None:
    class Theirs:
        nbytes = 77

    assert render(Theirs()).parts == (OtherView("Theirs", 77),)


def test_recurrent_states_with_their_checkpoints(numpy_backend: ml.Backend) -> None:
    cache = bound(RecurrentCache((2, 3), (1, 2, 2), checkpoint_interval=2), numpy_backend)
    for begin, end in ((0, 2), (2, 5)):
        store(cache, numpy_backend, 1, range(begin, end))
        with numpy_backend.new_context() as ctx:
            cache.conv_state(ctx, 0)
            cache.recurrent_state(ctx, 0)
    cells, states = render(cache).parts
    assert isinstance(cells, CellMap)
    assert isinstance(states, StatesView)
    (row,) = states.rows
    slot = cache.states.state_table.rows[1].slot
    assert (row.seq, row.tokens, row.slot, row.checkpoints) == (1, 5, slot, (2,))
    assert states.slots == 3
    assert states.nbytes + cells.nbytes == cache.nbytes


def test_an_encoders_output_is_shown_once_for_all_that_share_it(numpy_backend: ml.Backend) -> None:
    cache = bound(EncoderCache(), numpy_backend)
    with numpy_backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([0], [1]))
        cache.set_layer(0)
        cache.put(ctx, ctx.zeros((6, 1, 4), F32), ctx.zeros((6, 1, 4), F32))
    cache.copy_prefix(1, 2, 1)
    (view,) = render(cache).parts
    assert isinstance(view, EncoderView)
    (entry,) = view.rows
    assert (entry.sequences, entry.position, entry.length, entry.layers, entry.nbytes) == (
        (1, 2),
        0,
        6,
        1,
        192,
    )


@pytest.mark.parametrize("make", [CausalCache, EncoderCache, lambda: RecurrentCache((2,), (2,))])
def test_a_cache_without_a_backend_says_so(make: Any, numpy_backend: ml.Backend) -> None:
    cache = make()
    with pytest.raises(OrderError, match="render"):
        render(cache)
    bound(cache, numpy_backend)
    cache.close()
    with pytest.raises(ClosedError, match="render"):
        render(cache)


# Masks.


@pytest.mark.parametrize(
    "make", [CausalCache, lambda: SlidingWindowCache(2, memory=6), lambda: ChunkedCache(3)]
)
def test_the_mask_is_the_one_that_get_gives(make: Any, numpy_backend: ml.Backend) -> None:
    cache = bound(make(), numpy_backend, capacity=32)
    store_batch(cache, numpy_backend, [0, 1, 0, 1, 0], [0, 0, 1, 1, 2])
    store_batch(cache, numpy_backend, [1, 0, 0, 1], [2, 3, 4, 3])
    picture = look_at_mask(cache)
    with numpy_backend.new_context() as ctx:
        _, _, mask = cache.get(ctx)
    assert np.array_equal(picture.seen, mask.to_numpy()[:4] == 0)
    assert picture.queries == ((1, 2), (0, 3), (0, 4), (1, 3))


def test_the_columns_of_a_mask_are_cells(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=8, stored={1: 3})
    picture = look_at_mask(cache)
    assert picture.cells.tolist() == [8, 9, 10]
    assert picture.seen.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    wrapped = WrapperCache(SlidingWindowCache(0), CausalCache())
    bound(wrapped, numpy_backend)
    store(wrapped, numpy_backend, 0, range(2))
    assert look_at_mask(wrapped).seen.tolist() == [[True, False], [False, True]]


def test_a_mask_needs_a_pass_and_cells(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend)
    with pytest.raises(OrderError, match="there is no current pass"):
        look_at_mask(cache)
    with numpy_backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([0], [0]), reserve=True)
    with pytest.raises(OrderError, match="reserves"):
        look_at_mask(cache)
    with pytest.raises(NotSupportedError, match="EncoderCache"):
        look_at_mask(EncoderCache())


# Few marks for many cells.


def test_a_mark_shows_what_most_of_its_used_cells_are(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=10, stored={0: 5, 1: 1})
    found = binned(the_map(cache), 5)
    assert (found.size, found.codes.tolist()) == (4, [3, 3, 4, 0, 0])
    assert found.filled.tolist() == [1, 0.25, 0.25, 0, 0]
    assert binned(the_map(cache), 20).size == 1
    uneven = binned(the_map(cache), 3)
    assert (uneven.size, uneven.codes.size) == (7, 3)
    empty = binned(the_map(bound(CausalCache(), numpy_backend)), 5)
    assert empty.codes.tolist() == [0] * 5


def test_a_thinned_mask_says_which_part_is_seen() -> None:
    seen = np.tril(np.ones((5, 6), dtype=bool))
    part, down, across = thinned(seen, 3, 3)
    assert (down, across) == (2, 2)
    assert part.tolist() == [[0.75, 0, 0], [1, 0.75, 0], [1, 1, 0.5]]
    assert thinned(seen, 5, 6)[0].tolist() == seen.astype(float).tolist()


# Occupancy.


def test_occupancy_counts_every_cell_at_every_sample(numpy_backend: ml.Backend) -> None:
    cache = bound(CausalCache(), numpy_backend, sequences=2, capacity=8)
    ticks = iter([10.0, 10.5, 12.0])
    occupancy = Occupancy(cache, clock=lambda: next(ticks))
    occupancy.sample()
    store(cache, numpy_backend, 0, range(4))
    cache.copy_prefix(0, 1, 3)
    occupancy.sample()
    snapshot = cache.snapshot(0)
    cache.remove(0, 0)
    last = occupancy.sample()
    assert [sample.seconds for sample in occupancy.samples] == [0.0, 0.5, 2.0]
    counts = [(m.own, m.shared, m.kept, m.free) for sample in occupancy.samples for m in sample.maps]
    assert counts == [({}, 0, 0, 16), ({0: 1}, 3, 0, 12), ({1: 3}, 0, 1, 12)]
    assert snapshot.in_cache
    assert occupancy.record()[2]["maps"][0]["kept"] == last.maps[0].kept


def test_what_is_of_a_prefix_tree_is_refused_for_a_cache(numpy_backend: ml.Backend) -> None:
    for options in ({"nodes": 10}, {"decode": str}):
        with pytest.raises(NotSupportedError, match="PrefixCache"):
            render(bound(CausalCache(), numpy_backend), **options)  # type: ignore[call-overload]
