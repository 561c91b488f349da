"""Which attention calls a pass makes: in levels, and for several segments at once if that is cheaper.

A call costs about as much as reading ``worth`` cells. Segments of nearly equal length at even distances,
which sequences form as they grow, become one call over a strided view; short segments elsewhere are gathered
into one call. A level contains each query at most once, and the levels' results are merged::

    level 0   what is each sequence's own      one call, (sequences, 1 token, longest)
    level 1   the system prompt                one call, (1, sequences, prompt)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.attention.masks import seen_mask
from kvcache.attention.segments import GATHERING, Segment
from kvcache.cache import Mask
from kvcache.storage.cell_table import CellTable
from kvcache.storage.device_copies import HostArray, HostArrays, OnDevices, near

BLOCK_CALLS = 4
"""How much K and V is gathered or dequantized at a time, in units of the cost of a call."""
MOST_QUERIES = 16
"""Segments with more queries than this get a call of their own."""


@dataclass(slots=True)
class Call:
    """One call over ``batch`` segments with as many queries each."""

    tokens: slice | np.ndarray
    """The queries, segment by segment."""
    batch: int
    length: int
    """The length of the longest segment, including padding; all segments are read to this length."""
    start: int = 0
    step: int = 0
    """Segment i is read from cell ``start + i * step``."""
    cells: np.ndarray | None = None
    """Alternatively these cells are read, ``length`` for each segment."""
    seen: np.ndarray | ml.CausalMask | None = None
    """Each query sees ``[seen[0], seen[1])`` of the cells read, (2, batch, queries); None: all of them."""
    _uploaded: tuple[HostArray | None, HostArray | None, Mask | OnDevices | HostArray] = (None, None, None)
    """Tokens, cells and mask, as far as they are tensors."""

    def upload_with(self, host: HostArrays, config: ml.CacheConfig) -> None:
        """Upload the tensors of this call together with ``host``."""
        tokens, cells, seen = self.tokens, self.cells, self.seen
        self._uploaded = (
            None if isinstance(tokens, slice) else host.add(tokens),
            None if cells is None else host.add(cells),
            seen if not isinstance(seen, np.ndarray) else self._mask(host, seen, config),
        )

    def _mask(self, host: HostArrays, seen: np.ndarray, config: ml.CacheConfig) -> OnDevices | HostArray:
        rows = -(-seen.shape[2] // config.mask_batch_padding) * config.mask_batch_padding
        return seen_mask(host, seen, rows, self.length, config.mask_dtype)

    def on(self, ctx: ml.Context) -> ml.AttentionCall:
        """This call with its tensors on the device of ``ctx``."""
        listed, cells, mask = self._uploaded
        tokens = self.tokens if isinstance(self.tokens, slice) else near(ctx, listed)
        assert tokens is not None
        where, seen = near(ctx, cells), near(ctx, mask)
        return ml.AttentionCall(tokens, self.batch, self.length, self.start, self.step, where, seen)


def _call(segments: Sequence[Segment], length: int) -> Call:
    """A call for segments with equally many queries; the location of their cells is set later."""
    queries = np.concatenate([segment.queries for segment in segments])
    low, count = int(queries[0]), queries.size
    in_order = int(queries[-1]) - low == count - 1 and bool((queries[1:] - queries[:-1] == 1).all())
    tokens = slice(low, low + count) if in_order else queries
    return Call(tokens, len(segments), length, seen=_seen(segments, length))


def _seen(segments: Sequence[Segment], length: int) -> np.ndarray | ml.CausalMask | None:
    if all(segment.begin is None and segment.length == length for segment in segments):
        return None
    each = segments[0].queries.size
    seen = np.array([segment.bounds() for segment in segments]).transpose(1, 0, 2)
    if len(segments) > 1 or segments[0].length < length or seen[0].any():
        return seen
    last = np.arange(length - each + 1, length + 1)
    return ml.CAUSAL if np.array_equal(seen[1, 0], last) else seen


class _Planner:
    def __init__(self, table: CellTable, config: ml.CacheConfig, worth: int) -> None:
        self.table, self.config, self.worth = table, config, worth
        self.padding: list[tuple[int, int]] = []
        """Free cells that calls read, which must contain finite numbers."""

    def level(self, segments: Sequence[Segment]) -> tuple[list[Call], list[Segment]]:
        """The calls, and the rest of segments that were cut to the length of others."""
        calls: list[Call] = []
        rest: list[Segment] = []
        by_count: dict[int, list[Segment]] = {}
        for segment in segments:
            by_count.setdefault(segment.queries.size, []).append(segment)
        for count, alike in by_count.items():
            single = alike if count > MOST_QUERIES or len(alike) == 1 else self._batched(alike, calls, rest)
            calls += [self._single(segment) for segment in single]
        return calls, rest

    def _batched(self, segments: list[Segment], calls: list[Call], rest: list[Segment]) -> list[Segment]:
        """Add calls of several segments; returns the segments that are better read one by one."""
        runs = sorted((s for s in segments if isinstance(s.cells, int)), key=lambda segment: segment.cells)
        others: list[Segment] = [s for s in segments if not isinstance(s.cells, int)]
        for progression in _progressions(runs):
            if len(progression) < 2 or not self._even(progression, calls, rest):
                others += progression
        return self._gathered(others, calls)

    def _even(self, segments: list[Segment], calls: list[Call], rest: list[Segment]) -> bool:
        """Read segments at even distances as one view, of the cheapest length; False if that does not pay."""
        starts = [segment.cells for segment in segments if isinstance(segment.cells, int)]
        lengths = np.array([segment.length for segment in segments])
        step = starts[1] - starts[0]
        room = min(step, self.table.cells - starts[-1])
        length, cost = self._best_length(lengths, room, all(segment.begin is None for segment in segments))
        if not length or cost >= len(segments) + lengths.sum() / self.worth:
            return False
        ends = zip(starts, lengths.tolist(), strict=True)
        gaps = [(start + own, start + length) for start, own in ends if own < length]
        references = self.table.references
        if any(references[begin:end].any() for begin, end in gaps):
            return False
        self.padding += gaps
        rest += [s.part(length, s.length) for s in segments if s.length > length]
        shown = [s.part(0, length) if s.length > length else s for s in segments]
        call = _call(shown, length)
        call.start, call.step = starts[0], step
        calls.append(call)
        return True

    def _best_length(self, lengths: np.ndarray, room: int, cuttable: bool) -> tuple[int, float]:
        """How far to read all segments in one call, and the cost in calls; 0: they do not fit."""
        padding, count = self.config.cache_padding, lengths.size
        ordered = np.unique(lengths) if cuttable else lengths.max(keepdims=True)
        padded = -(-ordered // padding) * padding
        fits = padded <= room
        if not fits.any():
            return 0, 0.0
        ordered, padded = ordered[fits], padded[fits]
        longer = np.sort(lengths)
        first = np.searchsorted(longer, ordered, side="right")
        sums = np.concatenate((np.cumsum(longer[::-1])[::-1], [0]))
        left = count - first
        over = sums[first] - left * ordered
        costs = 1 + count * padded / self.worth + left + over / self.worth + (left > 0)
        best = int(costs.argmin())
        if (
            left[best] and padding > 1
        ):  # the rest begins anywhere: its padding would be cells of another sequence
            best = int(np.flatnonzero(left == 0)[0]) if (left == 0).any() else -1
        return (int(padded[best]), float(costs[best])) if best >= 0 else (0, 0.0)

    def _gathered(self, segments: list[Segment], calls: list[Call]) -> list[Segment]:
        """Gather short or scattered segments into one call; returns those that are better read alone."""
        alone = [s for s in segments if isinstance(s.cells, int) and s.length * GATHERING >= self.worth]
        if len(alone) == len(segments):
            return alone
        rest = [s for s in segments if not isinstance(s.cells, int) or s.length * GATHERING < self.worth]
        rest.sort(key=lambda segment: -segment.length)
        while rest:
            longest, size = rest[0].length, 1
            while size < len(rest) and (longest - rest[size].length) * (1 + GATHERING) <= self.worth:
                size += 1
            together, rest = rest[:size], rest[size:]
            if size == 1:
                alone += together
            else:
                calls.append(self._gather(together, longest))
        return alone

    def _gather(self, segments: list[Segment], longest: int) -> Call:
        length = -(-longest // self.config.cache_padding) * self.config.cache_padding
        cells = np.empty((len(segments), length), np.int64)
        for own, segment in zip(cells, segments, strict=True):
            own[: segment.length] = segment.each()
            own[segment.length :] = own[0]  # not a cell of another sequence, whose values may not be finite
        call = _call(segments, length)
        call.cells = cells.reshape(-1)
        return call

    def _single(self, segment: Segment) -> Call:
        start, length = segment.cells, segment.length
        padded = -(-length // self.config.cache_padding) * self.config.cache_padding
        if not isinstance(start, int):
            return self._gather([segment], length)
        if padded > length:
            gap = start + length, start + padded
            if gap[1] > self.table.cells or self.table.references[gap[0] : gap[1]].any():
                return self._gather([segment], length)
            self.padding.append(gap)
        call = _call([segment], padded)
        call.start, call.step = start, padded
        return call


def plan_calls(
    segments: Sequence[Segment], tokens: int, table: CellTable, config: ml.CacheConfig, worth: int
) -> tuple[list[list[Call]], list[tuple[int, int]]]:
    """The levels of a pass of ``tokens`` queries, and the ranges of free cells that the calls read."""
    planner = _Planner(table, config, worth)
    pending: list[list[Segment]] = []
    depth = [0] * tokens
    for segment in segments:
        queries = segment.queries.tolist()
        level = max(depth[query] for query in queries)
        for query in queries:
            depth[query] = level + 1
        if level == len(pending):
            pending.append([])
        pending[level].append(segment)
    levels = []
    for remaining in pending:  # grows by the segments that are cut off
        calls, rest = planner.level(remaining)
        levels.append(calls)
        if rest:
            pending.append(rest)
    return levels, planner.padding


def _progressions(runs: list[Segment]) -> list[list[Segment]]:
    """Runs in the order of their cells, grouped into stretches at even distances."""
    starts = [segment.cells for segment in runs if isinstance(segment.cells, int)]
    progressions, begin = [], 0
    while begin < len(runs):
        end = begin + 1
        if end < len(runs):
            step = starts[end] - starts[begin]
            while end < len(runs) and starts[end] - starts[end - 1] == step:
                end += 1
        progressions.append(runs[begin:end])
        begin = end
    return progressions
