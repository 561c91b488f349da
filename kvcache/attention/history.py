"""Which cells a pass reads, in which order, and the mask over them.

Cells that lie close together are read as one view, in which cells of other sequences are masked. Cells that
lie far apart are gathered, so that the cost depends on the cells used and not on those between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.cache import InvalidBatchError, Mask
from kvcache.storage.cell_table import CellTable, Row
from kvcache.storage.device_copies import HostArray, HostArrays


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What a query may see of the past: from ``lowest`` of its position on, and everything below ``keep``."""

    lowest: Callable[[np.ndarray], np.ndarray]
    keep: int = 0

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        return self.lowest(positions)


def narrowed(lower: LowerBound | None, window: int | None) -> LowerBound | None:
    """``lower``, and no more than ``window`` positions before the query; None: all of the past."""
    if window is None:
        return lower
    if lower is None:
        return LowerBound(lambda positions: positions - window)
    return LowerBound(lambda positions: np.maximum(lower(positions), positions - window), lower.keep)


_SPARSE = 2
"""A view may span this many times the cells that are needed; beyond that, gathering is cheaper."""
_SLACK = 64
HIDDEN = np.float32(-np.inf)


@dataclass(slots=True)
class History:
    """What the given groups of a batch read.

    ``start`` is the first cell of the view, or ``index`` the gathered cells. ``length`` is the number of
    columns, including padding. ``columns[i]`` are the columns of the entries of group i's row: the first
    column of a run, or one per entry.
    """

    groups: list[SequenceTokens]
    rows: list[Row]
    length: int
    columns: list[int | np.ndarray]
    start: int = 0
    index: np.ndarray | None = None
    _gathered: HostArray | None = None

    def gather(self, host: HostArrays) -> None:
        """Upload the gathered cells together with ``host``."""
        if self.index is not None:
            self._gathered = host.add(self.index)

    def cells(self, ctx: ml.Context) -> int | ml.Tensor:
        """The first cell of the view, or the gathered cells as an I32 tensor; call ``gather`` first."""
        return self.start if self._gathered is None else self._gathered.on(ctx)

    def elided(self, lower: LowerBound | None, lifted: frozenset[int]) -> Mask | bool:
        """None or CAUSAL if that describes the mask of the single group completely; else False."""
        if len(self.groups) != 1 or self.length != len(self.rows[0]):
            return False
        group, row = self.groups[0], self.rows[0]
        if sees_all(group, row, lower):
            return None
        first, stop = visible(group, row, lower, lifted)
        if int(first.max()) > 0:
            return False
        size = len(row)
        if int(stop.min()) == size:
            return None
        in_order = isinstance(group.batch_indices, slice) and (self.index is not None or row.contiguous)
        if in_order and np.array_equal(stop, np.arange(size - len(group) + 1, size + 1)):
            return ml.CAUSAL
        return False

    def mask(
        self, tokens: int, lower: LowerBound | None, lifted: frozenset[int], row_padding: int
    ) -> np.ndarray:
        """The additive mask (tokens rounded up to ``row_padding``, length): 0 for visible cells, else
        -inf.
        """
        mask = np.full((-(-tokens // row_padding) * row_padding, self.length), HIDDEN, dtype=np.float32)
        for group, row, columns in zip(self.groups, self.rows, self.columns, strict=True):
            if isinstance(columns, int) and isinstance(group.batch_indices, slice):
                own = mask[group.batch_indices, columns : columns + len(row)]
                if sees_all(group, row, lower):
                    own[...] = 0
                else:
                    unmask(own, *visible(group, row, lower, lifted), kept_entries(row, lower))
                continue
            first, stop = visible(group, row, lower, lifted)
            block = np.full((len(group), len(row)), HIDDEN, dtype=np.float32)
            unmask(block, first, stop, kept_entries(row, lower))
            where = np.arange(columns, columns + len(row)) if isinstance(columns, int) else columns
            mask[np.arange(tokens)[group.batch_indices][:, None], where] = block
        return mask


def find_history(table: CellTable, groups: Iterable[SequenceTokens], padding: int = 1) -> History:
    """How to read the rows of ``groups`` together; the length is a multiple of ``padding``."""
    groups = list(groups)
    rows = [table.rows[group.seq] for group in groups]
    if padding == 1 and len(rows) == 1 and rows[0].contiguous:
        return History(groups, rows, len(rows[0]), [0], rows[0].span()[0])
    spans = [row.span() for row in rows]
    start = min(low for low, _ in spans) // padding * padding
    stop = -(-max(high for _, high in spans) // padding) * padding
    used = sum(len(row) for row in rows)
    if stop - start <= _SPARSE * used + max(_SLACK, 2 * padding):
        columns = [spans[i][0] - start if row.contiguous else row.cells - start for i, row in enumerate(rows)]
        return History(groups, rows, stop - start, columns, start)
    return _gathered(table, groups, rows, padding)


def _gathered(table: CellTable, groups: list[SequenceTokens], rows: list[Row], padding: int) -> History:
    """Row by row, each in the order of its positions; cells that several rows share appear once, in cell
    order.
    """
    index = np.concatenate([row.cells for row in rows])
    columns: list[int | np.ndarray]
    if len(rows) > 1 and bool((table.references[index] > 1).any()):
        used = np.zeros(table.cells, dtype=bool)
        used[index] = True
        index = np.flatnonzero(used)
        columns = [np.searchsorted(index, row.cells) for row in rows]
    else:
        columns = list(itertools.accumulate((len(row) for row in rows[:-1]), initial=0))
    missing = -index.size % padding
    if missing:
        index = np.concatenate((index, np.repeat(index[:1], missing)))
    return History(groups, rows, index.size, columns, index=index)


def is_behind(group: SequenceTokens, row: Row) -> bool:
    """Whether the group is a single token after all others of its sequence."""
    return group.lowest == row.last and len(group) == 1


def sees_all(group: SequenceTokens, row: Row, lower: LowerBound | None) -> bool:
    """Whether the group is a single token after all others of its sequence, and no lower bound applies."""
    return lower is None and is_behind(group, row)


def visible(
    group: SequenceTokens, row: Row, lower: LowerBound | None, lifted: frozenset[int]
) -> tuple[np.ndarray, np.ndarray]:
    """For each query the half-open range ``[first, stop)`` of its row's entries that it sees.

    A query whose ``first`` is not 0 also sees the ``kept_entries``, which end before it::

        keep 2, window 2     positions 0 1 5 6 7 8      the query at 8: [3, 6), and 0 and 1
                             entries   0 1 2 3 4 5
    """
    stored = row.positions
    if is_behind(group, row):
        stop = np.array([stored.size])
    else:
        stop = stored.searchsorted(group.positions, side="right")
        if lifted:
            indices = group.indices()
            stop[np.isin(indices, list(lifted))] = stored.size
    if lower is None:
        return np.zeros_like(stop), stop
    first = stored.searchsorted(lower(group.positions))
    if lower.keep:
        first[first <= kept_entries(row, lower)] = 0
    return first, stop


def kept_entries(row: Row, lower: LowerBound | None) -> int:
    """How many of a row's first entries every later query sees, whatever the window."""
    return 0 if lower is None or not lower.keep else row.index(lower.keep)


def rows_seen(
    reading: History, tokens: int, lower: LowerBound | None, lifted: frozenset[int]
) -> tuple[np.ndarray, np.ndarray | None]:
    """For each query, a row that it sees and one past its last row; None if some query's rows are not a
    range.
    """
    first, stop = np.zeros((2, tokens), dtype=np.int64)
    are_ranges = True
    for group, row, columns in zip(reading.groups, reading.rows, reading.columns, strict=True):
        low, high = visible(group, row, lower, lifted)
        if kept_entries(row, lower) and low.any():
            low, are_ranges = np.zeros_like(low), False
        if isinstance(columns, int):
            first[group.batch_indices], stop[group.batch_indices] = columns + low, columns + high
        else:
            first[group.batch_indices], are_ranges = columns[np.minimum(low, len(row) - 1)], False
    return first, stop if are_ranges else None


def check_sees(group: SequenceTokens, row: Row, lower: LowerBound | None) -> None:
    """Raise InvalidBatchError for a query that would see none of its row's stored tokens."""
    first, stop = visible(group, row, lower, frozenset())
    blind = first >= stop
    unseeing = np.flatnonzero(blind & (first == 0) if kept_entries(row, lower) else blind)
    if unseeing.size:
        holds = f"holds positions {row.first} to {row.last}" if len(row) else "is empty"
        raise InvalidBatchError(
            f"start_forward: a query at position {group.positions[unseeing[0]]} of sequence {group.seq} sees "
            f"nothing that is stored; the sequence {holds}"
        )


def unmask(block: np.ndarray, first: np.ndarray, stop: np.ndarray, kept: int = 0) -> None:
    """Set ``[first[i], stop[i])`` of each row to zero: the common columns at once, the rims element by
    element.

    Also set ``[0, kept)`` of the rows that begin later.
    """
    if kept:
        block[np.flatnonzero(first), :kept] = 0
    if len(first) == 1:
        block[0, first[0] : stop[0]] = 0
        return
    low, inner, outer, high = int(first.min()), int(first.max()), int(stop.min()), int(stop.max())
    if inner >= outer:
        columns = np.arange(low, high)
        block[:, low:high][(columns >= first[:, None]) & (columns < stop[:, None])] = 0
        return
    block[:, inner:outer] = 0
    block[:, low:inner][np.arange(low, inner) >= first[:, None]] = 0
    block[:, outer:high][np.arange(outer, high) < stop[:, None]] = 0
