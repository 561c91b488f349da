"""What is found again in few cells, against a model of blocks that is known by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.pressure import TRAFFIC, found_by_blocks, found_in_cells
from benchmarks.scale_simulation import ideal
from benchmarks.scale_traffic import requests

from .test_scale import by_hand, line


@pytest.mark.parametrize(
    ("size", "cells", "found"),
    [(1, 100, 9 + 4), (4, 100, 8 + 4), (16, 100, 0), (4, 20, 8), (1, 16, 9), (1, 12, 6), (1, 10, 4)],
)
def test_the_model_of_blocks_finds_what_one_finds_by_hand(size: int, cells: int, found: int) -> None:
    """A line of 10, one of 6, the first again; where there is room for all, its first 5 besides."""
    first, other = line(100, 10), line(200, 6)
    stream = by_hand(first, other, first, first[:5])[: 4 if cells == 100 else 3]
    assert found_by_blocks(stream, cells, size) == found


def test_in_few_cells_no_less_is_found_than_blocks_of_16_would() -> None:
    stream = list(requests(replace(TRAFFIC, count=120, applications=10, documents=5, open=20, seed=1)))
    best, new = ideal(stream)
    for share in (0.08, 0.3):
        cells = int(share * new)
        found = found_in_cells(stream, cells)
        assert found_by_blocks(stream, cells, 16) < found < best
        assert found > 0.98 * found_by_blocks(stream, cells, 1)
    assert found_in_cells(stream, new) == found_by_blocks(stream, new, 1) == best
