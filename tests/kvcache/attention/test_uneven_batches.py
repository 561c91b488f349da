"""Rows of different lengths: what is read of them as one tensor, and what queries see of that, against lists.

Quantized storage, shared cells and refusals are the same code: test_dense_batch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache, ChunkedCache, DenseBatch, NotSupportedError, SlidingWindowCache

from ...rigs.each_backend import each_backend

HEADS, DIM = 2, 32

backend = each_backend("numpy", "mlx")


class Filled:
    """A cache of one layer whose keys are marks: the value at (seq, position) is seq * 1000 + position."""

    def __init__(self, cache: Any, backend: ml.Backend, **sizes: int) -> None:
        self.cache, self.ctx = cache, backend.new_context()
        cache.init(backend, ml.DType.F32, **{"max_sequences": 4, "capacity": 16, "max_batch": 64, **sizes})

    def store(self, *tokens: tuple[int, int]) -> None:
        sequences, positions = zip(*tokens, strict=True)
        self.cache.start_forward(self.ctx, Batch(positions, sequences))
        self.cache.set_layer(3)
        marks = np.array([seq * 1000 + position for seq, position in tokens], np.float32)
        key = self.ctx.from_numpy(np.broadcast_to(marks[:, None, None], (len(tokens), HEADS, DIM)))
        self.cache.put(self.ctx, key, key)

    def run(self, seq: int, start: int, stop: int) -> None:
        self.store(*[(seq, position) for position in range(start, stop)])

    def reading(self, sequences: Sequence[int | None]) -> DenseBatch:
        return DenseBatch(self.cache, sequences, uneven=True)

    def rows(self, reading: DenseBatch) -> np.ndarray:
        key, value = (x.to_numpy() for x in reading.read(self.ctx, 3))
        assert key.shape == (len(key), HEADS, reading.tokens, DIM)
        assert (key == value).all()
        marks: np.ndarray = key[:, 0, :, 0]
        return marks


def expected(seq: int, *positions: int) -> list[int]:
    return [seq * 1000 + position for position in positions]


def test_rows_that_grow_from_their_homes_are_one_view(backend: ml.Backend) -> None:
    filled = Filled(CausalCache(), backend)
    for seq, length in ((0, 5), (1, 2), (2, 7)):
        filled.run(seq, 0, length)
    reading = filled.reading([0, 1, 2])
    assert reading.is_view
    assert reading.tokens == 7
    marks = filled.rows(reading)
    for row, length in zip(marks, (5, 2, 7), strict=True):
        assert row[:length].tolist() == expected(int(row[0]) // 1000, *range(length))


@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1, 3], [2, 0], [1, None, 0]])
def test_rows_in_any_other_order_are_gathered(backend: ml.Backend, order: list[int | None]) -> None:
    filled = Filled(CausalCache(), backend)
    for number in range(4):
        filled.run(number, 0, number + 2)
    reading = filled.reading(order)
    assert not reading.is_view
    for row, seq in zip(filled.rows(reading), order, strict=True):
        if seq is not None:
            assert row[: seq + 2].tolist() == expected(seq, *range(seq + 2))


def test_a_view_ends_with_the_buffer(backend: ml.Backend) -> None:
    """Read side by side with a long first row, the last row would reach beyond the last cell."""
    filled = Filled(CausalCache(), backend, max_sequences=2, capacity=8)
    filled.run(0, 0, 8)
    filled.run(1, 0, 3)
    assert filled.reading([0, 1]).is_view
    filled.cache.remove(1, 0)
    filled.run(0, 8, 12)  # runs on into the home of the other, which then begins in what is left
    filled.run(1, 0, 3)
    reading = filled.reading([0, 1])
    assert not reading.is_view
    marks = filled.rows(reading)
    assert marks[0].tolist() == expected(0, *range(12))
    assert marks[1, :3].tolist() == expected(1, 0, 1, 2)


@pytest.mark.parametrize(
    ("make", "low"),
    [
        (CausalCache, lambda p: 0),
        (lambda: SlidingWindowCache(3, memory=6), lambda p: p - 3),
        (lambda: ChunkedCache(4), lambda p: p - p % 4),
    ],
    ids=["causal", "window", "chunk"],
)
@pytest.mark.parametrize("window", [None, 0, 2])
def test_a_query_sees_what_its_cache_says_narrowed_by_a_window(
    backend: ml.Backend, make: Any, low: Any, window: int | None
) -> None:
    filled = Filled(make(), backend)
    filled.run(0, 0, 9)
    filled.run(1, 0, 4)
    filled.store((1, 4), (0, 9), (0, 10), (1, 5))
    positions = np.array([[9, 10], [4, 5]])
    reading = filled.reading([0, 1])
    marks = filled.rows(reading)
    first, stop = reading.visible_columns(positions, window)
    for row in range(2):
        for column, position in enumerate(positions[row].tolist()):
            lowest = max(0, low(position), position - (99 if window is None else window))
            seen = marks[row, first[row, column] : stop[row, column]].tolist()
            assert seen == expected(row, *range(lowest, position + 1))


def test_a_window_and_kept_tokens_apart_from_it_are_no_range(backend: ml.Backend) -> None:
    filled = Filled(SlidingWindowCache(3, memory=6, keep=2), backend)
    filled.run(0, 0, 9)
    reading = filled.reading([0])
    assert [part.tolist() for part in reading.visible_columns(np.array([[1, 5]]))] == [
        [[0, 0]],
        [[2, 6]],
    ]
    with pytest.raises(NotSupportedError, match="first 2 tokens"):
        reading.visible_columns(np.array([[5, 8]]))


@pytest.mark.parametrize("window", [None, 1])
def test_the_mask_of_a_pass_is_known_before_its_first_put(backend: ml.Backend, window: int | None) -> None:
    filled = Filled(SlidingWindowCache(2), backend)
    filled.run(0, 0, 4)
    filled.cache.start_forward(filled.ctx, Batch([4, 5, 6], [0, 0, 0]))
    mask = filled.cache.pass_reads().mask(filled.ctx, window)
    marks = np.arange(4, 7, dtype=np.float32)
    key = filled.ctx.from_numpy(np.broadcast_to(marks[:, None, None], (3, HEADS, DIM)))
    filled.cache.put(filled.ctx, key, key)
    stored = filled.cache.get(filled.ctx)[0].to_numpy()[:, 0, 0]
    assert isinstance(mask, np.ndarray)
    width = 2 if window is None else window
    for query, row in zip((4, 5, 6), mask, strict=True):
        assert sorted(stored[row].tolist()) == list(range(query - width, query + 1))
