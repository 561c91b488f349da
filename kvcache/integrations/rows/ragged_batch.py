"""Sequences of different lengths read as one tensor, for runtimes whose attention has a batch axis.

``get`` gives one history for the whole batch and a mask that hides other sequences' cells; such a runtime
wants (sequences, history, heads, dim), every sequence in order of positions from column 0 on, and the
shorter ones followed by columns that nobody sees::

    sequence 0   0 1 2 3 4        columns 0 to 4
    sequence 1   0 1 2 . .        a query at 2 sees columns [0, 3)
    sequence 2   . 3 4 5 6        a window of 3 that holds 3 to 6: a query at 6 sees columns [0, 4)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

import ml
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.history import History, LowerBound, kept_entries
from kvcache.cache import Mask, NotSupportedError, OrderError, check_thread
from kvcache.integrations.rows.batched_rows import BatchedRows, HasCells, rows_of


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
        self._rows = rows_of("RaggedBatch", self._storage.table, sequences)
        self.sequences = len(self._rows)
        self.length = max(1, *map(len, self._rows))
        self._batch = BatchedRows(self._storage.table, self._rows, 0, self.length)

    @property
    def is_view(self) -> bool:
        """Whether reading plain storage copies nothing."""
        return self._batch.is_view

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
        return self._batch.read(ctx, self._storage.readable("RaggedBatch", layer, self._rows))


def visible_mask(cache: CellCache, ctx: ml.Context, window: int | None = None) -> Mask | np.ndarray:
    """What the tokens of the pass under way see of the rows of ``get``; it may be asked before ``put``.

    None where all see all, ``ml.CAUSAL`` where that says it, else BOOL (tokens, history) on the host.
    ``window`` narrows what is seen to that many tokens before each query.
    """
    forward, reading = _shared("visible_mask", cache, ctx)
    lower, lifted = _narrowed(forward.reading.lower, window), forward.reading.lifted
    elided = reading.elided(lower, lifted)
    if not isinstance(elided, bool):
        return elided
    seen: np.ndarray = reading.mask(forward.tokens, lower, lifted, 1) == 0
    return seen


def read_positions(cache: CellCache, ctx: ml.Context) -> np.ndarray:
    """The positions (history,) of the rows that ``get`` gives in the pass under way, of one sequence.

    -1 for cells that are not its own. It may be asked before ``put``. Raises OrderError without a pass.
    """
    _, reading = _shared("read_positions", cache, ctx)
    found = np.full(reading.length, -1)
    for row, columns in zip(reading.rows, reading.columns, strict=True):
        found[np.arange(columns, columns + len(row)) if isinstance(columns, int) else columns] = row.positions
    return found


def _shared(op: str, cache: CellCache, ctx: ml.Context) -> tuple[ForwardPass, History]:
    """The pass under way, and what ``get`` reads in it."""
    forward = cache.pass_under_way()
    if forward is None:
        raise OrderError(f"{op}: there is no current pass; call start_forward first")
    check_thread(op, forward.thread)
    forward.fill(ctx)
    return forward, forward.reading.shared(ctx)[0]


def _narrowed(lower: LowerBound | None, window: int | None) -> LowerBound | None:
    if window is None:
        return lower
    if lower is None:
        return LowerBound(lambda positions: positions - window)
    return LowerBound(lambda positions: np.maximum(lower(positions), positions - window), lower.keep)
