"""What of a pass is read from codes, and what from the slots of a residual window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcache.attention.segments import Segment
from kvcache.storage.cell_table import CellTable


def split_exact(
    segments: Sequence[Segment], table: CellTable, worth: int
) -> tuple[list[Segment], list[Segment]]:
    """The segments of cells, and those of slots, which together hold what ``segments`` do, each cell once.

    Runs of fewer cells than ``worth`` between slots do not stand alone.
    """
    coded: list[Segment] = []
    exact: list[Segment] = []
    for segment in segments:
        cells = segment.each()
        slots = table.exact_slots(cells)
        if slots is None:
            coded.append(segment)
            continue
        has = slots >= 0
        exact += _some(segment, np.flatnonzero(has), slots[has], as_run=False)
        for entries, is_run in _pieces(np.flatnonzero(~has), isinstance(segment.cells, int), worth):
            coded += _some(segment, entries, cells[entries], is_run)
    return coded, exact


def _pieces(entries: np.ndarray, in_run: bool, worth: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Entries (ascending) of a segment, and whether they are a run: long ones alone, all others together."""
    runs = np.split(entries, np.flatnonzero(np.diff(entries) != 1) + 1)
    short = [run for run in runs if not in_run or (run.size < worth and len(runs) > 1)]
    yield from ((run, True) for run in runs if in_run and (run.size >= worth or len(runs) == 1))
    if short:
        yield np.concatenate(short), in_run and len(short) == 1


def _some(segment: Segment, entries: np.ndarray, cells: np.ndarray, as_run: bool) -> list[Segment]:
    """The segment of these entries (ascending) of another, in ``cells``; none if nobody sees them."""
    if not entries.size:
        return []
    where: int | np.ndarray = int(cells[0]) if as_run else cells
    if segment.begin is None or segment.end is None:
        return [Segment(where, entries.size, segment.queries)]
    begin, end = np.searchsorted(entries, segment.begin), np.searchsorted(entries, segment.end)
    some = begin < end
    if not some.any():
        return []
    if (begin[some] == 0).all() and (end[some] == entries.size).all():
        return [Segment(where, entries.size, segment.queries[some])]
    return [Segment(where, entries.size, segment.queries[some], begin[some], end[some])]
