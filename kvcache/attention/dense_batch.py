"""Several sequences read as one tensor, for models whose attention has a batch axis.

``get`` and ``attend`` read cells of one buffer. A runtime with a batch axis needs (sequences, heads, tokens,
dim) instead. If the sequences' runs of cells are evenly spaced in the buffers, as they are when sequences
grow from their homes, this is one strided view; otherwise the cells are gathered. Each sequence is in the
order of positions from column 0; columns after the end of shorter ones are hidden::

    sequence 0   0 1 2 3 4        columns 0 to 4
    sequence 1   0 1 2 . .        a query at 2 sees columns [0, 3)
    sequence 2   . 3 4 5 6        a window of 3 that holds 3 to 6: a query at 6 sees columns [0, 4)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

import ml
from kvcache.attention.batch import check_sequence
from kvcache.attention.history import LowerBound, kept_entries, narrowed
from kvcache.cache import InvalidRangeError, NotSupportedError, SequenceLostError, check_whole
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import CellTable, Row, is_run
from kvcache.storage.device_copies import HostArray, HostArrays

__all__ = ["DenseBatch"]


class HasCells(Protocol):
    """A cache that keeps K and V in cells, as CausalCache and its kinds do."""

    @property
    def storage(self) -> CellStorage:
        """The cell table and the buffers; OrderError before ``init``."""

    def lower_bound(self) -> LowerBound | None:
        """The lowest position that a query sees, as a function of its own position; None: 0."""


class DenseBatch:
    """Several sequences of an attention cache as one tensor (sequences, heads, tokens, dim).

    For runtimes whose attention has a batch axis. It covers ``sequences`` of ``cache``, a CausalCache or one
    of its kinds, from position ``begin`` on, at their current cells. All sequences must have every position
    from ``begin`` to the same end. With ``uneven`` they may differ, and None is an empty sequence; columns
    past the end of a row are unspecified.

    It is valid until one of the sequences changes. Its tensors alias the cache if ``is_view``, else they are
    gathered copies. After ``close``, reading raises ClosedError. ``unwritten`` lets ``read`` return cells
    that nothing was put into. Raises InvalidRangeError if the sequences have different ends or lack a
    position, InvalidSequenceError for an unknown sequence, SequenceLostError for a lost one.
    """

    def __init__(
        self,
        cache: HasCells,
        sequences: Sequence[int | None],
        begin: int = 0,
        unwritten: bool = False,
        uneven: bool = False,
    ) -> None:
        if not (hasattr(type(cache), "storage") and hasattr(type(cache), "lower_bound")):
            raise InvalidRangeError(
                f"DenseBatch: {type(cache).__name__} has no cells of its own; it must be a CausalCache or "
                "one of its kinds (of a WrapperCache, one of its caches)"
            )
        begin = check_whole("DenseBatch", "begin", begin)
        self._cache, table = cache, cache.storage.table
        self._rows = _rows_of(table, sequences)
        self._checked = () if unwritten else self._rows
        self.begin, self.end = begin, max([row.last for row in self._rows]) + 1
        self._cells = [row.cells[row.index(begin) :] if begin else row.cells for row in self._rows]
        self.even: tuple[int, int] | None = None
        """The first cell and the distance between rows in cells, if the rows are evenly spaced runs."""
        if len(sequences) == 1 and self._rows[0].contiguous and self._cells[0].size == self.end - begin > 0:
            self.tokens = self.end - begin  # the same as below, for each token of a decoding loop
            self.even = int(self._cells[0][0]), 0
            return
        if uneven:
            self.tokens = max(1, *(cells.size for cells in self._cells))
        else:
            self.tokens = self.end - begin
            self._check_even(sequences)
        if all(row.contiguous or is_run(own) for row, own in zip(self._rows, self._cells, strict=True)):
            self.even = self._distances(table.cells)

    def _check_even(self, sequences: Sequence[int | None]) -> None:
        for seq, row, cells in zip(sequences, self._rows, self._cells, strict=True):
            first = len(row) - cells.size
            ends_there = row.last + 1 == self.end and cells.size == self.tokens
            if not ends_there or (cells.size and int(row.positions[first]) != self.begin):
                raise InvalidRangeError(
                    f"DenseBatch: [{self.begin}, {self.end}) of sequence {seq}, which holds {cells.size} "
                    f"positions from there to {row.last}; sequences that are read together must end at the "
                    "same position and have no gaps"
                )

    def _distances(self, limit: int) -> tuple[int, int] | None:
        if not self.tokens:
            return 0, 0
        if not all(own.size for own in self._cells):
            return None
        starts = [int(own[0]) for own in self._cells]
        steps = {later - earlier for earlier, later in itertools.pairwise(starts)} or {0}
        step = steps.pop()
        if steps or step < 0 or starts[-1] + self.tokens > limit:
            return None
        return starts[0], step

    @cached_property
    def _index(self) -> HostArray:
        """The cells of all columns; past the end of a row, an arbitrary cell."""
        cells = np.zeros((len(self._cells), self.tokens), dtype=np.int64)
        for line, own in zip(cells, self._cells, strict=True):
            line[: own.size] = own
        return HostArrays().add(cells.reshape(-1))

    @property
    def is_view(self) -> bool:
        """Whether reading copies nothing: it is one strided view of the buffers, in a plain format."""
        return self.even is not None

    def read(self, ctx: ml.Context, layer: int) -> tuple[ml.Tensor, ml.Tensor]:
        """K (sequences, kv_heads, tokens, head_dim) and V (sequences, kv_heads, tokens, v_dim) of a layer.

        Quantized storage is dequantized to the dtype of the tensors put. A strided view is read-only if
        sequences share cells.
        """
        buffers = self._cache.storage.readable("DenseBatch", layer, self._checked, self.begin)
        shape = len(self._cells), self.tokens
        if self.even is not None:
            return buffers.read_batch(ctx, *self.even, *shape, heads_first=True)
        return buffers.gather_batch(ctx, self._index.on(ctx), *shape, heads_first=True)

    def read_extra(self, ctx: ml.Context, layer: int, name: str) -> ml.Tensor | None:
        """An extra of a layer, (sequences, tokens, numbers) in its own dtype; None if it stores none. A view
        or a copy, as for ``read``.
        """
        buffers = self._cache.storage.buffers.get(layer)
        if buffers is None or name not in buffers.extra:
            return None
        buffer, shape = buffers.extra[name], (len(self._cells), self.tokens)
        if self.even is not None:
            extra = buffer.read_batch(ctx, *self.even, *shape)
        else:
            extra = buffer.gather_batch(ctx, self._index.on(ctx), *shape)
        return extra.reshape(ctx, *shape, buffer.dim)

    def read_stored(self, ctx: ml.Context, layer: int) -> tuple[ml.Tensor, ...]:
        """K and V of a layer as they are stored: the parts of K in its format, then those of V.

        Each part is (sequences, kv_heads, tokens, width), a view or a copy, as for ``read``. V has none if
        the keys contain the values.
        """
        buffers = self._cache.storage.readable("DenseBatch", layer, self._checked, self.begin)
        shape, parts = (len(self._cells), self.tokens), buffers.parts
        if self.even is not None:
            return tuple(part.read_batch(ctx, *self.even, *shape, heads_first=True) for part in parts)
        cells = self._index.on(ctx)
        return tuple(part.gather_batch(ctx, cells, *shape, heads_first=True) for part in parts)

    def visible_columns(
        self, positions: np.ndarray, window: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The columns ``[first, stop)`` that each query at ``positions`` (sequences, tokens) sees.

        Both are I64 (sequences, tokens). The cache's own window or chunk applies; ``window`` further limits a
        query to that many positions before its own. Raises NotSupportedError if it sees two ranges, the first
        tokens that a window keeps and the window itself, InvalidRangeError for positions of another shape.
        """
        if np.ndim(positions) != 2 or len(positions) != len(self._rows):
            raise InvalidRangeError(
                f"visible_columns: positions {np.shape(positions)}; they must be ({len(self._rows)}, tokens)"
            )
        if window is not None:
            window = check_whole("visible_columns", "window", window)
        lower = narrowed(self._cache.lower_bound(), window)
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
                f"visible_columns: a query sees its window and the first {lower.keep} tokens, which is not "
                "one range of columns; use attend or get, or a cache without keep"
            )
        return first, stop


def _rows_of(table: CellTable, sequences: Sequence[int | None]) -> list[Row]:
    """The rows of these sequences, an empty one for None. Refuses an empty list, and unknown and lost
    sequences.
    """
    if not sequences:
        raise InvalidRangeError("DenseBatch: no sequences; it must read at least one")
    for seq in sequences:
        if seq is None:
            continue
        check_sequence("DenseBatch", seq, len(table.rows))
        if table.rows[seq].lost:
            raise SequenceLostError(
                f"DenseBatch: the data of sequence {seq} is lost; call remove({seq}, 0) and compute it again"
            )
    return [Row() if seq is None else table.rows[seq] for seq in sequences]
