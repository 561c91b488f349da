"""What runtimes ask of the current pass, and where they write themselves: against what ``get`` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    ClosedError,
    DenseBatch,
    EncoderCache,
    InvalidRangeError,
    OrderError,
    SlidingWindowCache,
    WrapperCache,
)
from ml import nn

from ...rigs.each_backend import each_backend
from ...rigs.refusals import Table, check_refused, refuses
from ...rigs.threads import other

__all__ = ["other"]

HEADS, DIM = 2, 32

backend = each_backend("numpy", "torch", "mlx")


def filled(backend: ml.Backend, lengths: dict[int, int], dtype: Any = ml.DType.F32) -> Any:
    """A cache of one layer; the key and the value at (seq, position) are seq * 1000 + position."""
    cache, ctx = CausalCache(), backend.new_context()
    cache.init(backend, dtype, 3, 16, 16)
    for seq, length in lengths.items():
        put(cache, ctx, [(seq, position) for position in range(length)])
    return cache, ctx


def put(cache: CausalCache, ctx: ml.Context, tokens: list[tuple[int, int]]) -> None:
    cache.start_forward(ctx, Batch([position for _, position in tokens], [seq for seq, _ in tokens]))
    store(cache, ctx, tokens)


def store(cache: CausalCache, ctx: ml.Context, tokens: list[tuple[int, int]]) -> None:
    marks = np.array([seq * 1000 + position for seq, position in tokens], np.float32)
    key = ctx.from_numpy(
        np.ascontiguousarray(np.broadcast_to(marks[:, None, None], (len(tokens), HEADS, DIM)))
    )
    cache.put(ctx, key, key)


def test_positions_of_the_rows_of_get(backend: ml.Backend) -> None:
    cache, ctx = filled(backend, {0: 5, 1: 3})
    cache.copy_prefix(0, 2, 4)
    cache.start_forward(ctx, Batch([4, 5], [2, 2]))
    positions = cache.pass_reads().positions(ctx)
    store(cache, ctx, [(2, 4), (2, 5)])
    marks = cache.get(ctx)[0].to_numpy()[:, 0, 0]
    own = positions >= 0
    assert sorted(positions[own].tolist()) == [0, 1, 2, 3, 4, 5]
    assert (marks[own] % 1000 == positions[own]).all()


def test_what_a_query_sees_cell_by_cell(backend: ml.Backend) -> None:
    cache, ctx = filled(backend, {0: 3, 1: 2})
    put(cache, ctx, [(1, 2), (0, 3), (0, 4)])
    seen, queries, cells = cache.pass_reads().seen()
    assert queries.tolist() == [[1, 2], [0, 3], [0, 4]]
    mask = cache.get(ctx)[2].to_numpy() == 0
    assert (mask == seen).all()
    key = cache.layer_cells(0).key.to_numpy()[cells, 0, 0]
    assert [sorted(key[row].tolist()) for row in seen] == [[1000, 1001, 1002], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_a_pass_shows_only_what_the_runtime_shows(backend: ml.Backend) -> None:
    """Of row 0 two tokens are hidden, of row 1 all but the last, so that its first query sees nothing."""
    cache, ctx = filled(backend, {0: 4, 1: 4})
    tokens = [(0, 4), (0, 5), (1, 4), (1, 5)]
    cache.start_forward(ctx, Batch([position for _, position in tokens], [seq for seq, _ in tokens]))
    shown = np.array([[False, False, True, True, True, True], [False, False, False, False, False, True]])
    cache.pass_reads().show_only(shown, np.array([[False, False], [True, False]]))
    store(cache, ctx, tokens)
    out = cache.attend(ctx, ctx.zeros((4, HEADS, DIM), ml.DType.F32), 1.0).to_numpy()[:, 0, 0]
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[[0, 1, 3]], [np.mean([2, 3, 4]), np.mean([2, 3, 4, 5]), 1005], rtol=1e-6)


def test_there_is_nothing_to_ask_outside_a_pass_or_in_another_thread(backend: ml.Backend, other: Any) -> None:
    cache, ctx = filled(backend, {})
    with pytest.raises(OrderError, match="pass_reads: there is no current pass"):
        cache.pass_reads()
    cache.start_forward(ctx, Batch([0], [0]))
    with pytest.raises(OrderError, match=r"^PassReads\.mask:"):
        other(lambda: cache.pass_reads().mask(ctx))


def test_what_a_pass_said_is_not_said_of_the_next(backend: ml.Backend) -> None:
    cache, ctx = filled(backend, {0: 3})
    cache.start_forward(ctx, Batch([3], [0]))
    reads, cells = cache.pass_reads(), cache.layer_cells(0)
    assert cells.writable()
    store(cache, ctx, [(0, 3)])
    cache.start_forward(ctx, Batch([4], [0]))
    asked: dict[str, Callable[[], object]] = {
        "PassReads.mask": lambda: reads.mask(ctx),
        "PassReads.positions": lambda: reads.positions(ctx),
        "PassReads.seen": reads.seen,
        "PassReads.show_only": lambda: reads.show_only(None),
        "note_written": cells.note_written,
    }
    for op, call in asked.items():
        check_refused(OrderError, f"{op}: ", call)
    assert cache.computed(0) == 4  # nothing was noted
    batch = DenseBatch(cache, [0], unwritten=True)
    cache.close()
    assert not cells.current
    for call in (batch.read, batch.read_stored):
        check_refused(ClosedError, "storage: the cache is closed", call, ctx, 0)


REFUSED: Table = {
    InvalidRangeError: {
        "DenseBatch: begin=-1; it must be": lambda c, x: DenseBatch(c, [0], begin=-1),
        "DenseBatch: begin=0.5; it must be": lambda c, x: DenseBatch(c, [0], begin=0.5),
        "DenseBatch: WrapperCache has no cells": lambda c, x: DenseBatch(WrapperCache(CausalCache()), [0]),
        "DenseBatch: EncoderCache has no cells": lambda c, x: DenseBatch(EncoderCache(), [0]),
        "visible_columns: positions (3, 1); they must be (2, tokens)": lambda c, x: DenseBatch(
            c, [0, 1]
        ).visible_columns(np.zeros((3, 1), int)),
        "visible_columns: positions (2,); they": lambda c, x: DenseBatch(c, [0, 1]).visible_columns([3, 3]),
        "visible_columns: window=-1; it must be": lambda c, x: DenseBatch(c, [0]).visible_columns([[3]], -1),
        "PassReads.mask: window=-1; it must be": lambda c, x: c.pass_reads().mask(x, -1),
        "PassReads.mask: window='4'; it must be": lambda c, x: c.pass_reads().mask(x, "4"),
        "PassReads.show_only: shown bool (1, 4); it must be bool (2, 4 or more)": lambda c, x: (
            c.pass_reads().show_only(np.ones((1, 4), bool))
        ),
        "PassReads.show_only: shown bool (2, 3); it": lambda c, x: c.pass_reads().show_only(
            np.ones((2, 3), bool)
        ),
        "PassReads.show_only: shown int64 (2, 4); it": lambda c, x: c.pass_reads().show_only(
            np.ones((2, 4), np.int64)
        ),
        "PassReads.show_only: shown list (1, 1); it": lambda c, x: c.pass_reads().show_only([[True]]),
        "PassReads.show_only: blind bool (2, 3); it must be bool (2, 4 or more)": lambda c, x: (
            c.pass_reads().show_only(np.ones((2, 4), bool), np.zeros((2, 3), bool))
        ),
    },
    OrderError: {"note_written: layer 0 may not": lambda c, x: c.layer_cells(0).note_written()},
}


@refuses(REFUSED)
def test_what_cannot_be_read_or_shown_is_refused(
    backend: ml.Backend, error: Any, says: str, call: Any
) -> None:
    cache, ctx = filled(backend, {})
    put(cache, ctx, [(seq, position) for seq in range(2) for position in range(4)])
    check_refused(error, says, call, cache, ctx)
    rows = np.array([0, 1, 2, 3, 1000, 1001, 1002, 1003])
    means = cache.attend(ctx, ctx.zeros((8, HEADS, DIM), ml.DType.F32), 1.0).to_numpy()[:, 0, 0]
    np.testing.assert_allclose(means, [rows[i - i % 4 : i + 1].mean() for i in range(8)], rtol=1e-6)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_tokens_written_directly_are_those_of_put(name: str) -> None:
    with ml.open_backend(name) as backend:
        cache, ctx = filled(backend, {0: 3})
        cells = cache.layer_cells(0)
        cache.start_forward(ctx, Batch([3, 4], [0, 0]))
        assert cells.writable()
        first, _ = DenseBatch(cache, [0], unwritten=True).even or (0, 0)
        for whole, mark in ((cells.key, 7.0), (cells.value, 8.0)):
            ctx.full((2, HEADS, DIM), mark, ml.DType.F32).copy(ctx, whole.slice(ctx, 0, first + 3, first + 5))
        cells.note_written()
        assert not cells.writable()  # written, and read
        key, value, _ = cache.get(ctx)
        assert key.to_numpy()[:, 0, 0].tolist() == [0, 1, 2, 7, 7]
        assert value.to_numpy()[:, 0, 0].tolist() == [0, 1, 2, 8, 8]
        assert cache.computed(0) == 5
        assert cells.current
        cache.start_forward(ctx, Batch([4], [0]), read_only=True)
        assert not cells.writable()
        cache.remove(0, 0)
        assert not cells.writable()  # no pass


def test_only_plain_keys_and_values_alone_can_be_written_directly(backend: ml.Backend) -> None:
    assert filled(backend, {})[0].layer_cells(0) is None
    assert filled(backend, {0: 1}, "Q8_0")[0].layer_cells(0) is None
    cache, ctx = filled(backend, {})
    cache.start_forward(ctx, Batch([0], [0]))
    cache.put(ctx, ctx.zeros((1, 1, DIM), ml.DType.F32))
    assert cache.layer_cells(0) is None  # keys that contain the values


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["view", "gathered"])
def test_stored_parts_are_those_of_a_snapshot(backend: ml.Backend, order: list[int]) -> None:
    cache, ctx = filled(backend, {0: 3, 1: 3}, ("Q8_0", "F16"))
    batch = DenseBatch(cache, order)
    assert batch.is_view == (order == [0, 1])
    for row, seq in enumerate(order):
        expected = cache.snapshot(seq).read()[0].tensors
        parts = batch.read_stored(ctx, 0)
        assert len(parts) == len(expected) == 3
        for part, whole in zip(parts, expected, strict=True):
            np.testing.assert_array_equal(part.to_numpy()[row].transpose(1, 0, 2), whole.to_numpy())


def test_the_report_of_a_step(backend: ml.Backend) -> None:
    cache, _ = filled(backend, {})
    assert cache.step_reads() is None
    cache, _ = filled(backend, {0: 3, 1: 2})
    assert cache.step_reads().cells == 5
    cache, ctx = CausalCache(), backend.new_context()
    cache.init(backend, ml.DType.F32, 2, 128, 128)
    put(cache, ctx, [(0, position) for position in range(100)])
    cache.copy_prefix(0, 1, 80)
    once = nn.offers(backend, ml.SupportsRaggedAttention)  # without a kernel, short ranges are read twice
    assert cache.step_reads().cells == (100 if once else 180)
    window = SlidingWindowCache(1)
    window.init(backend, ml.DType.F32, 1, 16, 4)
    put(window, ctx, [(0, 0), (0, 1), (0, 2)])
    assert window.step_reads() is not None


def test_a_reserved_pass_reads_the_extras_of_all_cells(backend: ml.Backend) -> None:
    cache, ctx = CausalCache(), backend.new_context()
    cache.init(backend, ml.DType.F32, 1, 8, 4)
    extra = {"x": ctx.zeros((1, 2), ml.DType.I32)}
    for reserve in (False, True):
        cache.start_forward(ctx, Batch([int(reserve)], [0]), reserve)
        cache.put(ctx, ctx.zeros((1, 1, 4), ml.DType.F32), v_dim=2, extra=extra)
    assert cache.get_extra(ctx, "x").shape == (cache.cells, 2)
