"""Sequences of different lengths read as one tensor, for runtimes whose attention has a batch axis.

``get`` gives one history for the whole batch and a mask that hides other sequences' cells; such a runtime
wants (sequences, history, heads, dim), every sequence in order of positions from column 0 on, and the
shorter ones followed by columns that nobody sees::

    sequence 0   0 1 2 3 4        columns 0 to 4
    sequence 1   0 1 2 . .        a query at 2 sees columns [0, 3)
    sequence 2   . 3 4 5 6        a window of 3 that holds 3 to 6: a query at 6 sees columns [0, 4)

Where the sequences lie at even distances in the buffers, as they do when they grow from their homes,
that is one strided view; else the cells are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

import ml
from kvcache.attention.batch import check_sequence
from kvcache.attention.dense_batch import HasCells
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.read_plan import LowerBound, kept_entries
from kvcache.cache import InvalidRangeError, Mask, NotSupportedError, OrderError, SequenceLostError
from kvcache.storage.cell_table import Row
from kvcache.storage.overlay import CurrentOverlay

__all__ = ["RaggedBatch", "read_positions", "visible_mask"]


class CellCache(HasCells, Protocol):
    """A cache with cells that tells of its pass, and how far back its queries see."""

    def lower_bound(self) -> LowerBound | None:
        """The lowest position that queries see, by their own position; None: from 0."""

    def pass_under_way(self) -> ForwardPass | None:
        """The pass that the last ``start_forward`` began; None where it is over."""


class RaggedBatch:
    """What ``sequences`` hold now, for reading any layer; None stands for one that holds nothing.

    Good until the next change of one of the sequences. ``length`` is that of the longest, at least 1.
    """

    def __init__(self, cache: CellCache, sequences: Sequence[int | None]) -> None:
        self._storage, self._lower = cache.storage, cache.lower_bound()
        table = self._storage.table
        if not sequences:
            raise InvalidRangeError("RaggedBatch: no sequences given; it must read at least one")
        for seq in sequences:
            if seq is None:
                continue
            check_sequence("RaggedBatch", seq, len(table.rows))
            if table.rows[seq].lost:
                raise SequenceLostError(
                    f"RaggedBatch: the data of sequence {seq} is lost; call remove({seq}, 0) and "
                    "compute it again"
                )
        self._rows = [Row() if seq is None else table.rows[seq] for seq in sequences]
        self.sequences = len(self._rows)
        self.length = max(1, *(len(row) for row in self._rows)) if self._rows else 1
        exact = table.exact is not None
        self._start, self._step = (0, 0) if exact else self._even_distances()
        self._cells: ml.Tensor | None = None
        self._overlay = CurrentOverlay(table, self._gathered()) if exact else None

    @property
    def is_view(self) -> bool:
        """Whether reading plain storage copies nothing."""
        return self._step > 0

    def _even_distances(self) -> tuple[int, int]:
        """The first cell and the distance of rows that are runs so arranged; (0, 0): they are not."""
        if not all(len(row) and row.contiguous for row in self._rows):
            return 0, 0
        starts = [int(row.cells[0]) for row in self._rows]
        steps = {later - earlier for earlier, later in itertools.pairwise(starts)} or {self.length}
        step = steps.pop()
        if steps or step <= 0 or starts[-1] + self.length > self._storage.table.cells:
            return 0, 0
        return starts[0], step

    def visible(self, positions: np.ndarray, window: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """For queries at ``positions`` (sequences, tokens) the half-open range of columns that each sees.

        The cache's own window or chunk holds; ``window`` narrows it to that many tokens before the query.
        Raises NotSupportedError where ``keep`` of a window makes it two ranges.
        """
        lower = _narrowed(self._lower, window)
        stop = np.empty_like(positions)
        first = np.zeros_like(positions)
        for i, row in enumerate(self._rows):
            stored = row.positions
            stop[i] = np.searchsorted(stored, positions[i], side="right")
            if lower is not None:
                first[i] = np.searchsorted(stored, lower(positions[i]))
                first[i][first[i] <= kept_entries(row, lower)] = 0
        if lower is not None and lower.keep and first.any():
            raise NotSupportedError(
                f"RaggedBatch: a query sees its window and the first {lower.keep} tokens, which is no range "
                "of columns; use attend or get, or a cache without keep"
            )
        return first, stop

    def read(self, ctx: ml.Context, layer: int) -> tuple[ml.Tensor, ml.Tensor]:
        """K (sequences, length, kv_heads, head_dim) and V likewise; what lies past an end is unspecified."""
        buffers = self._storage.readable("RaggedBatch", layer, self._rows)
        if self._step:
            return buffers.read_batch(ctx, self._start, self._step, self.sequences, self.length)
        if self._cells is None:
            self._cells = ctx.from_numpy(self._gathered(), ml.DType.I32)
        if self._overlay is None:
            return buffers.gather_batch(ctx, self._cells, self.sequences, self.length)
        found = buffers.read(ctx, self._cells, self.sequences * self.length)
        key, value = (self._by_sequence(ctx, x) for x in self._overlay.read(ctx, buffers, *found))
        return key, value

    def _by_sequence(self, ctx: ml.Context, found: ml.Tensor) -> ml.Tensor:
        """(sequences * length, heads, dim) as (sequences, length, heads, dim)."""
        cell, *rest = found.strides
        return found.view(
            ctx, 0, (self.sequences, self.length, *found.shape[1:]), (self.length * cell, cell, *rest)
        )

    def _gathered(self) -> np.ndarray:
        """The cells of all columns; where a row has ended, some cell."""
        cells = np.zeros((self.sequences, self.length), dtype=np.int64)
        for own, row in zip(cells, self._rows, strict=True):
            own[: len(row)] = row.cells
        return cells.reshape(-1)


def visible_mask(cache: CellCache, ctx: ml.Context, window: int | None = None) -> Mask | np.ndarray:
    """What the tokens of the pass under way see of the rows of ``get``; it may be asked before ``put``.

    None where all see all, ``ml.CAUSAL`` where that says it, else BOOL (tokens, history) on the host.
    ``window`` narrows what is seen to that many tokens before each query.
    """
    forward = cache.pass_under_way()
    if forward is None:
        raise OrderError("visible_mask: there is no current pass; call start_forward first")
    reading, _ = forward.shared(ctx)
    lower = _narrowed(forward.lower, window)
    elided = reading.elided(lower, forward.lifted)
    if not isinstance(elided, bool):
        return elided
    seen: np.ndarray = reading.mask(forward.tokens, lower, forward.lifted, 1) == 0
    return seen


def read_positions(cache: CellCache, ctx: ml.Context) -> np.ndarray:
    """The positions (history,) of the rows that ``get`` gives in the pass under way, of one sequence.

    -1 for cells that are not its own. It may be asked before ``put``. Raises OrderError without a pass.
    """
    forward = cache.pass_under_way()
    if forward is None:
        raise OrderError("read_positions: there is no current pass; call start_forward first")
    reading, _ = forward.shared(ctx)
    found = np.full(reading.length, -1)
    for row, columns in zip(reading.rows, reading.columns, strict=True):
        found[np.arange(columns, columns + len(row)) if isinstance(columns, int) else columns] = row.positions
    return found


def _narrowed(lower: LowerBound | None, window: int | None) -> LowerBound | None:
    if window is None:
        return lower
    if lower is None:
        return LowerBound(lambda positions: positions - window)
    return LowerBound(lambda positions: np.maximum(lower(positions), positions - window), lower.keep)
