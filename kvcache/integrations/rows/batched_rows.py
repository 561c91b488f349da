"""The cells of several sequences as one tensor, for runtimes whose attention has a batch axis.

Where they lie at even distances in the buffers, as they do when the sequences grow from their homes, that is
one strided view; else the cells are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

import ml
from kvcache.attention.batch import check_sequence
from kvcache.cache import InvalidRangeError, SequenceLostError
from kvcache.storage.buffer import Buffer
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import CellTable, Row, is_run
from kvcache.storage.device_copies import HostArray, HostArrays
from kvcache.storage.layer_buffers import LayerBuffers


class HasCells(Protocol):
    """A cache that keeps K and V in cells, as CausalCache and its kinds do."""

    @property
    def storage(self) -> CellStorage:
        """The cell table and the buffers; OrderError before ``init``."""


def rows_of(op: str, table: CellTable, sequences: Sequence[int | None]) -> list[Row]:
    """The rows of these sequences, an empty one for None; refuses none at all, unknown and lost sequences."""
    if not sequences:
        raise InvalidRangeError(f"{op}: no sequences given; it must read at least one")
    for seq in sequences:
        if seq is None:
            continue
        check_sequence(op, seq, len(table.rows))
        if table.rows[seq].lost:
            raise SequenceLostError(
                f"{op}: the data of sequence {seq} is lost; call remove({seq}, 0) and compute it again"
            )
    return [Row() if seq is None else table.rows[seq] for seq in sequences]


class BatchedRows:
    """What rows hold from position ``begin`` on, in ``length`` columns each, for reading any layer.

    What lies in columns past the end of a row is unspecified.
    """

    def __init__(self, table: CellTable, rows: Sequence[Row], begin: int, length: int) -> None:
        self._cells = [row.cells[row.index(begin) :] if begin else row.cells for row in rows]
        self._length, self._limit = length, table.cells
        self._shape = len(rows), length
        self._even: tuple[int, int] | None = None
        """The first cell, and the distance of the rows, if they are runs so arranged."""
        if all(row.contiguous or is_run(own) for row, own in zip(rows, self._cells, strict=True)):
            self._even = self._distances()

    def _distances(self) -> tuple[int, int] | None:
        if not self._length:
            return 0, 0
        if not all(own.size for own in self._cells):
            return None
        starts = [int(own[0]) for own in self._cells]
        steps = {later - earlier for earlier, later in itertools.pairwise(starts)} or {0}
        step = steps.pop()
        if steps or step < 0 or starts[-1] + self._length > self._limit:
            return None
        return starts[0], step

    def _gathered(self) -> np.ndarray:
        """The cells of all columns; where a row has ended, some cell."""
        cells = np.zeros((len(self._cells), self._length), dtype=np.int64)
        for line, own in zip(cells, self._cells, strict=True):
            line[: own.size] = own
        return cells.reshape(-1)

    @cached_property
    def _index(self) -> HostArray:
        return HostArrays().add(self._gathered())

    @property
    def is_view(self) -> bool:
        """Whether reading plain storage copies nothing."""
        return self._even is not None

    def read(
        self, ctx: ml.Context, buffers: LayerBuffers, heads_first: bool = False
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K (rows, length, kv_heads, head_dim) and V likewise; a view is read-only where rows share cells.

        (rows, kv_heads, length, head_dim) with ``heads_first``.
        """
        if self._even is not None:
            return buffers.read_batch(ctx, *self._even, *self._shape, heads_first)
        cells = self._index.on(ctx)
        return buffers.gather_batch(ctx, cells, *self._shape, heads_first)

    def read_extra(self, ctx: ml.Context, buffer: Buffer) -> ml.Tensor:
        """An extra (rows, length, numbers), a view or a copy as of ``read``."""
        if self._even is not None:
            found = buffer.read_batch(ctx, *self._even, *self._shape)
        else:
            found = buffer.gather_batch(ctx, self._index.on(ctx), *self._shape)
        return found.reshape(ctx, *self._shape, buffer.dim)
