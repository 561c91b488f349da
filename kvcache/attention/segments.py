"""What the queries of a pass read, derived from the cell table: each stored cell once, with all its readers.

Cells that several sequences of the batch share, such as a system prompt, form one segment whose readers are
the queries of all of them. A sequence's own cells form one segment for each long run, and one for all
scattered cells.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.attention.batch import SequenceTokens
from kvcache.attention.history import LowerBound, is_behind, kept_entries, sees_all, visible
from kvcache.storage.cell_table import CellTable, Row

GATHERING = 1.6
"""The additional cost of gathering cells, as a multiple of the cost of reading them."""

NONE = np.empty(0, np.int32)

Piece = tuple[int, int]
"""The entries ``[begin, end)`` of a row."""
Entries = Piece | np.ndarray
"""A piece, or individual entries, ascending."""


@dataclass(slots=True)
class Segment:
    """Cells, and the queries that read them: reader i sees all, or the non-empty range ``[begin[i],
    end[i])``.
    """

    cells: int | np.ndarray
    """The first cell of a run, or all cells in order."""
    length: int
    queries: np.ndarray
    """Indices into the batch, in ascending positions of each sequence."""
    begin: np.ndarray | None = None
    end: np.ndarray | None = None

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        if self.begin is None or self.end is None:
            return np.zeros_like(self.queries), np.full_like(self.queries, self.length)
        return self.begin, self.end

    def each(self) -> np.ndarray:
        cells = self.cells
        return np.arange(cells, cells + self.length) if isinstance(cells, int) else cells

    def part(self, begin: int, end: int) -> Segment:
        """The cells ``[begin, end)`` for the same readers, each of which sees all of this segment."""
        cells = self.cells + begin if isinstance(self.cells, int) else self.cells[begin:end]
        return Segment(cells, end - begin, self.queries)


def find_segments(
    table: CellTable,
    groups: Sequence[SequenceTokens],
    lower: LowerBound | None,
    lifted: frozenset[int],
    worth: int,
) -> list[Segment]:
    """The segments of a pass. Runs and shared ranges of fewer than ``worth`` cells are not segments of their
    own.
    """
    rows = [table.rows[group.seq] for group in groups]
    shared = _shared(table, rows, worth)
    together: dict[Piece, list[tuple[_Reader, Piece]]] = {}
    segments: list[Segment] = []
    keep, bounds = 0, [None] * len(rows)
    if lower is not None:
        keep, bounds = lower.keep, lower(np.array([group.lowest for group in groups])).tolist()
    for number, (group, row, bound) in enumerate(zip(groups, rows, bounds, strict=True)):
        if number not in shared and is_behind(group, row):
            segments += _of_one(group, row, bound, keep, worth)
            continue
        reader, pieces = _Reader(group, row, lower, lifted), shared.get(number, [])
        for begin, end in reader.parted(pieces):
            key = int(row.cells[begin]), int(row.cells[end - 1])
            together.setdefault(key, []).append((reader, (begin, end)))
        own = reader.parted(_own(row, pieces, worth))
        segments += [_segment([(reader, entries)]) for entries in own]
    segments += [_segment(who) for who in together.values()]
    return [segment for segment in segments if segment.length]


@dataclass(slots=True)
class KeptSegments:
    """The segments of a pass, kept for the next: sequences that decode together each see one more cell per
    step.
    """

    _segments: list[Segment]
    _tails: np.ndarray
    """The segments that end where their sequences do: one per sequence, if the next pass may continue with
    them.
    """
    _order: list[tuple[int, int]]
    _changes: int
    _appended: int
    _grown: int = 0
    """How many cells each tail has grown by since it was found."""
    _added: int = 0
    """How many of these are contained in ``_segments``."""
    _planned: tuple[int, ml.RaggedPlan] | None = None
    """A plan, and the value of ``_grown`` when it was made."""

    @classmethod
    def find(
        cls,
        table: CellTable,
        groups: Sequence[SequenceTokens],
        lower: LowerBound | None,
        lifted: frozenset[int],
        worth: int,
    ) -> KeptSegments:
        segments, tails = find_segments(table, groups, lower, lifted, worth), list[int]()
        if lower is None and all(len(group) == 1 for group in groups):
            ends = {
                segment.cells + segment.length - 1: place
                for place, segment in enumerate(segments)
                if isinstance(segment.cells, int) and segment.begin is None and segment.queries.size == 1
            }
            lasts = [table.rows[group.seq].last_cell for group in groups]
            tails = [ends[last] for last in lasts if last in ends]
        return cls(segments, np.array(tails, dtype=np.int64), _order(groups), table.changes, table.appended)

    def next(self, table: CellTable, groups: Sequence[SequenceTokens]) -> KeptSegments | None:
        """The segments of the next step; None if more than that has changed."""
        one_each = len(groups) == self._tails.size == table.appended - self._appended
        if not one_each or table.changes != self._changes or _order(groups) != self._order:
            return None
        return KeptSegments(
            self._segments, self._tails, self._order, self._changes, table.appended,
            self._grown + 1, self._added, self._planned,
        )  # fmt: skip

    @property
    def found(self) -> list[Segment]:
        if self._grown > self._added:
            more, self._added = self._grown - self._added, self._grown
            self._segments = self._segments.copy()
            for tail in self._tails.tolist():
                segment = self._segments[tail]
                self._segments[tail] = Segment(segment.cells, segment.length + more, segment.queries)
        return self._segments

    def plan(self, tokens: int) -> ml.RaggedPlan:
        """``ragged_plan`` of these segments, derived from that of an earlier step if there is one."""
        if self._planned is None:
            plan = ragged_plan(self.found, tokens)
        else:
            grown, before = self._planned
            plan = before.grown(self._tails, self._grown - grown)
        self._planned = self._grown, plan
        return plan


def _order(groups: Iterable[SequenceTokens]) -> list[tuple[int, int]]:
    return [(group.seq, group.first_token) for group in groups]


class _Reader:
    """The queries of a group, and the entries of its row that each of them sees."""

    def __init__(
        self, group: SequenceTokens, row: Row, lower: LowerBound | None, lifted: frozenset[int]
    ) -> None:
        self.row, self.queries = row, group.indices()
        self.everything = sees_all(group, row, lower)
        """Whether the single query sees all of the row."""
        self.first, self.stop = visible(group, row, lower, lifted)
        self.kept = kept_entries(row, lower) if self.first.any() else 0
        """Every query that sees later entries also sees the entries before this one; no piece crosses it."""

    def parted(self, pieces: Iterable[Entries]) -> Iterator[Entries]:
        """The pieces, split at ``kept``."""
        for piece in pieces:
            if isinstance(piece, tuple):
                cut = min(max(self.kept, piece[0]), piece[1])
                both: list[Entries] = [(piece[0], cut), (cut, piece[1])]
                yield from (part for part in both if part[0] < part[1])
            else:
                cut = int(np.searchsorted(piece, self.kept))
                yield from (part for part in (piece[:cut], piece[cut:]) if part.size)

    def within(self, entries: Entries) -> tuple[np.ndarray, np.ndarray]:
        """The range of these entries that each query sees."""
        first = np.zeros_like(self.first) if entries[0] < self.kept else self.first
        if isinstance(entries, np.ndarray):
            return np.searchsorted(entries, first), np.searchsorted(entries, self.stop)
        begin, end = entries
        return np.clip(first - begin, 0, end - begin), np.clip(self.stop - begin, 0, end - begin)


def _of_one(group: SequenceTokens, row: Row, bound: int | None, keep: int, worth: int) -> Iterator[Segment]:
    """The segments of a single query after all others of its sequence: one per long run, and one for the
    rest.

    It sees the positions from ``bound`` on and those below ``keep``; all of them if ``bound`` is None.
    """
    cells, queries, kept, first = row.cells, group.indices(), 0, 0
    if bound is not None:
        first = int(row.positions.searchsorted(bound))
        kept = row.index(keep) if keep else 0
    if kept < first:
        cells = np.concatenate((cells[:kept], cells[first:])) if kept else cells[first:]
    whole = row.contiguous and not kept
    cuts = [] if whole else (cells[1:] - cells[:-1] != 1).nonzero()[0].tolist()
    begin, short = 0, []
    for last in (*cuts, cells.size - 1):
        run = cells[begin : last + 1]
        begin = last + 1
        if run.size >= worth:
            yield Segment(int(run[0]), run.size, queries)
        else:
            short.append(run)
    if len(short) == 1:
        yield Segment(int(short[0][0]), short[0].size, queries)
    elif short:
        cells = np.concatenate(short)
        yield Segment(cells, cells.size, queries)


def _shared(table: CellTable, rows: Sequence[Row], worth: int) -> dict[int, list[Piece]]:
    """For rows that share runs of cells, the shared entries, in pieces that have the same readers."""
    if len(rows) == 1 or (4 * sum(map(len, rows)) > table.cells and table.references.max() < 2):
        return {}
    touched = [number for number, row in enumerate(rows) if _is_shared(table, row)]
    if len(touched) < 2:
        return {}
    spans = [rows[number].span() for number in touched]
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    marks, keys = np.zeros(high - low, np.uint64), _keys(len(rows))
    runs = {number: _runs(rows[number], 0, len(rows[number])) for number in touched}
    for number in touched:
        cells = rows[number].cells
        for begin, end in runs[number]:
            first = int(cells[begin]) - low
            marks[first : first + end - begin] += keys[number]
    readers: dict[Piece, list[tuple[int, Piece]]] = {}
    for number in touched:
        cells = rows[number].cells
        for begin, end in runs[number]:
            first = int(cells[begin])
            owners = marks[first - low : first - low + end - begin]
            cuts = np.flatnonzero(owners[1:] != owners[:-1]) + 1
            for start, stop in itertools.pairwise([0, *cuts.tolist(), end - begin]):
                if owners[start] != keys[number]:
                    run = first + start, first + stop - 1
                    readers.setdefault(run, []).append((number, (begin + start, begin + stop)))
    kept: dict[int, list[Piece]] = {}
    for (first, last), who in readers.items():
        if (1 + GATHERING) * (len(who) - 1) * (last + 1 - first) >= worth:  # else most would be gathered
            for number, piece in who:
                kept.setdefault(number, []).append(piece)
    return kept


def _runs(row: Row, begin: int, end: int) -> list[Piece]:
    """The entries ``[begin, end)`` of a row, split into runs of cells."""
    if row.contiguous:
        return [(begin, end)]
    cells = row.cells[begin:end]
    cuts = np.flatnonzero(cells[1:] - cells[:-1] != 1) + 1 + begin
    return list(itertools.pairwise([begin, *cuts.tolist(), end]))


def _is_shared(table: CellTable, row: Row) -> bool:
    """Whether another sequence or a snapshot also owns one of the row's cells."""
    if not row.contiguous:
        return bool((table.references[row.cells] > 1).any())
    low, high = row.span()
    return bool((table.references[low:high] > 1).any())


@functools.lru_cache(maxsize=8)
def _keys(count: int) -> np.ndarray:
    """Numbers whose sums identify sets of rows."""
    return np.random.default_rng(1).integers(1, 2**63, count, np.uint64)


def _own(row: Row, shared: Iterable[Piece], worth: int) -> Iterator[Entries]:
    """The entries of a row that are not in ``shared``: one piece per long run, and one for all others."""
    rest, begin = [], 0
    for piece in sorted(shared):
        rest.append((begin, piece[0]))
        begin = piece[1]
    rest.append((begin, len(row)))
    short = []
    for begin, end in rest:
        if begin == end:
            continue
        for run in _runs(row, begin, end):
            if run[1] - run[0] >= worth:
                yield run
            else:
                short.append(run)
    if len(short) == 1:
        yield short[0]
    elif short:
        yield np.concatenate([np.arange(*run) for run in short])


def _segment(who: Sequence[tuple[_Reader, Entries]]) -> Segment:
    """One segment of the entries listed for each reader, which are the same cells, without those that no
    query sees.
    """
    reader, entries = who[0]
    run = isinstance(entries, tuple)
    cells = reader.row.cells[slice(*entries) if isinstance(entries, tuple) else entries]
    if all(reader.everything for reader, _ in who):
        queries = np.concatenate([reader.queries for reader, _ in who]) if len(who) > 1 else reader.queries
        return Segment(int(cells[0]) if run else cells, cells.size, queries)
    seen = [(reader.queries, *reader.within(entries)) for reader, entries in who]
    queries, begin, end = (np.concatenate(part) for part in zip(*seen, strict=True))
    some = begin < end
    if not some.any():
        return Segment(0, 0, queries[:0])
    if not some.all():
        queries, begin, end = queries[some], begin[some], end[some]
    low, high = int(begin.min()), int(end.max())
    segment = Segment(int(cells[low]) if run else cells[low:high], high - low, queries)
    if not (begin == low).all() or not (end == high).all():
        segment.begin, segment.end = begin - low, end - low
    return segment


def ragged_plan(segments: Sequence[Segment], tokens: int) -> ml.RaggedPlan:
    """The segments in the form that a backend's kernel takes."""
    rows, index = [], []
    first = gathered = 0
    for segment in segments:
        cells, stop = segment.cells, first + segment.queries.size
        if isinstance(cells, int):
            rows.append((0, cells, segment.length, first, stop))
        else:
            rows.append((1, gathered, segment.length, first, stop))
            index.append(cells)
            gathered += segment.length
        first = stop
    table = np.array(rows, np.int32)
    readers = np.zeros((first, 3), np.int32)
    queries = [segment.queries for segment in segments]
    readers[:, 0] = queries[0] if len(queries) == 1 else np.concatenate(queries)
    readers[:, 2] = np.repeat(table[:, 2], table[:, 4] - table[:, 3])
    for segment, (_, _, _, first, stop) in zip(segments, rows, strict=True):
        if segment.begin is not None:
            readers[first:stop, 1], readers[first:stop, 2] = segment.bounds()
    return ml.RaggedPlan(tokens, table, readers, np.concatenate(index) if index else NONE)
