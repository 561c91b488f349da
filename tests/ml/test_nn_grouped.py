"""Products of rows with matrices of their own, on a device that the host does not ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ml
from ml.nn import Groups, generic_grouped_matmul, grouped, grouped_matmul

from ..engine.test_host_reads import elsewhere

INNER, OUTER = 6, 5
COUNTS = st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=9).filter(any)


@pytest.fixture(scope="module")
def ctx() -> Iterator[ml.Context]:
    with elsewhere() as backend, backend.new_context() as ctx:
        yield ctx


@pytest.fixture(autouse=True)
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Groups) -> None:
        raise AssertionError("the device was asked for the groups")

    monkeypatch.setattr(Groups, "runs", refuse)


def _groups(counts: list[int]) -> np.ndarray:
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _check(ctx: Any, counts: list[int], transposed: bool = False) -> None:
    """Against one product for each matrix that has rows."""
    random, groups = np.random.default_rng(len(counts)), _groups(counts)
    x = random.normal(size=(groups.size, INNER)).astype(np.float32)
    weight = random.normal(size=(len(counts), INNER, OUTER)).astype(np.float32)
    right = np.empty((groups.size, OUTER), np.float32)
    for i, matrix in enumerate(weight):
        right[groups == i] = x[groups == i] @ matrix
    if transposed:
        given = ctx.from_numpy(np.ascontiguousarray(weight.transpose(0, 2, 1))).permute(ctx, 0, 2, 1)
    else:
        given = ctx.from_numpy(weight)
    found = grouped_matmul(ctx, ctx.from_numpy(x), given, Groups(ctx.from_numpy(groups)))
    assert type(found) is type(given)
    np.testing.assert_allclose(found.to_numpy(), right, atol=1e-5)


@pytest.mark.parametrize(
    "counts",
    [
        [1, 0, 0, 0],
        [2, 0, 3, 1],
        [60, 60, 80, 50],
        [100, 100, 100, 0],
        [0, 0, 600, 0],
        [257],
        [1] * 300,
        [0, 256, 0, 1, 0],
        [17, 0, 240, 33, 0, 0, 16],
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows_and_many(ctx: ml.Context, counts: list[int], transposed: bool) -> None:
    _check(ctx, counts, transposed)


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, size=st.sampled_from(grouped._SIZES[:3]), held=st.integers(0, 4))
def test_rows_in_blocks_of_any_size_and_in_pieces(
    ctx: ml.Context, counts: list[int], size: int, held: int
) -> None:
    """Some matrices have no rows, or all; ``held`` matrices are copied at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_DENSE_ROWS", 1)
        patch.setattr(grouped, "_SIZES", (size,))
        patch.setattr(grouped, "_PIECE_BYTES", held * INNER * OUTER * 4)
        _check(ctx, counts)


@settings(max_examples=100, deadline=None)
@given(counts=COUNTS, size=st.integers(1, 50))
def test_every_row_has_a_place_in_a_block_of_its_matrix(
    ctx: ml.Context, counts: list[int], size: int
) -> None:
    groups = _groups(counts)
    laid = Groups(ctx.from_numpy(groups)).blocks(ctx, len(counts), size)
    places, sources, matrices = (t.to_numpy() for t in (laid.places, laid.sources, laid.matrices))
    np.testing.assert_array_equal(sources.reshape(-1)[places], np.arange(groups.size))
    np.testing.assert_array_equal(matrices[places // size], groups)
    for found, stop in ((sources, groups.size), (matrices, len(counts))):
        assert 0 <= found.min() <= found.max() < stop
    needed = sum(-(-count // size) for count in counts)
    assert needed <= len(matrices) == grouped.block_count(groups.size, len(counts), size)


@pytest.mark.parametrize(("rows", "matrices", "size"), [(10, 3, 4), (9, 9, 4), (5, 9, 2), (64, 1, 16)])
def test_there_are_no_more_blocks_than_the_worst_division_takes(rows: int, matrices: int, size: int) -> None:
    used = min(rows, matrices)
    worst = [1] * (used - 1) + [rows - used + 1]
    assert grouped.block_count(rows, matrices, size) == sum(-(-count // size) for count in worst)


def test_blocks_are_as_large_as_rows_are_many() -> None:
    weight = (128, 2048, 1536)
    sizes = [grouped.block_size(rows, weight) for rows in (300, 2000, 16000, 250000)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 64 < 256 <= sizes[-1]


def test_what_a_row_is_padded_with_reaches_no_other(ctx: ml.Context) -> None:
    """A block is filled up with other matrices' rows, of which one may be infinite."""
    groups = _groups([200, 1, 99])
    x = np.ones((300, INNER), np.float32)
    x[200] = np.inf
    weight = ctx.from_numpy(np.ones((3, INNER, OUTER), np.float32))
    found = generic_grouped_matmul(ctx, ctx.from_numpy(x), weight, Groups(ctx.from_numpy(groups))).to_numpy()
    assert np.flatnonzero(~np.isfinite(found).all(1)).tolist() == [200]
    assert (found[[0, 199, 201, 299]] == INNER).all()
