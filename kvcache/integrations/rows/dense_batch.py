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
from kvcache.cache import InvalidRangeError, OrderError, SequenceLostError
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import CellTable, Row, is_run
from kvcache.storage.device_copies import HostArray, HostArrays

__all__ = ["DenseBatch", "read_encoded"]


class HasCells(Protocol):
    """A cache that keeps K and V in cells, as CausalCache and its kinds do."""

    @property
    def storage(self) -> CellStorage:
        """The cell table and the buffers; OrderError before ``init``."""


class HasEncoderOutput(Protocol):
    """A cache of encoder outputs, as EncoderCache is."""

    def encoder_output(self, seq: int, layer: int) -> tuple[ml.Tensor, ml.Tensor] | None:
        """K (length, kv_heads, head_dim) and V of a sequence in a layer; None if nothing is stored."""


class DenseBatch:
    """The content of ``sequences`` from position ``begin`` on, at its current cells, for reading any layer.
    All sequences must have every position from ``begin`` to the same end. With ``uneven`` they may differ,
    and None is an empty sequence; columns past the end of a row are unspecified.

    It is valid until one of the sequences changes. Its tensors alias the cache if ``is_view``, else they are
    gathered copies. ``unwritten`` lets ``read`` return cells that nothing was put into. Raises
    InvalidRangeError if the sequences have different ends or lack a position.
    """

    def __init__(
        self,
        cache: HasCells,
        sequences: Sequence[int | None],
        begin: int = 0,
        unwritten: bool = False,
        uneven: bool = False,
    ) -> None:
        self._storage = cache.storage
        table = self._storage.table
        self.rows = _rows_of(table, sequences)
        self._checked = () if unwritten else self.rows
        self.begin, self.end = begin, max(row.last for row in self.rows) + 1
        self._cells = [row.cells[row.index(begin) :] if begin else row.cells for row in self.rows]
        if uneven:
            self.tokens = max(1, *(cells.size for cells in self._cells))
        else:
            self.tokens = self.end - begin
            self._check_even(sequences)
        self.even: tuple[int, int] | None = None
        """The first cell and the distance between rows in cells, if the rows are evenly spaced runs."""
        if all(row.contiguous or is_run(own) for row, own in zip(self.rows, self._cells, strict=True)):
            self.even = self._distances(table.cells)

    def _check_even(self, sequences: Sequence[int | None]) -> None:
        for seq, row, cells in zip(sequences, self.rows, self._cells, strict=True):
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
        buffers = self._storage.readable("DenseBatch", layer, self._checked, self.begin)
        shape = len(self._cells), self.tokens
        if self.even is not None:
            return buffers.read_batch(ctx, *self.even, *shape, heads_first=True)
        return buffers.gather_batch(ctx, self._index.on(ctx), *shape, heads_first=True)

    def read_extra(self, ctx: ml.Context, layer: int, name: str) -> ml.Tensor | None:
        """An extra of a layer, (sequences, tokens, numbers) in its own dtype; None if it stores none. A view
        or a copy, as for ``read``.
        """
        buffers = self._storage.buffers.get(layer)
        if buffers is None or name not in buffers.extra:
            return None
        buffer, shape = buffers.extra[name], (len(self._cells), self.tokens)
        if self.even is not None:
            extra = buffer.read_batch(ctx, *self.even, *shape)
        else:
            extra = buffer.gather_batch(ctx, self._index.on(ctx), *shape)
        return extra.reshape(ctx, *shape, buffer.dim)


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


def read_encoded(
    ctx: ml.Context, cache: HasEncoderOutput, layer: int, sequences: Sequence[int]
) -> tuple[ml.Tensor, ml.Tensor]:
    """K (sequences, kv_heads, length, head_dim) and V of the encoder outputs of several sequences. A view for
    one sequence, else a copy. Raises OrderError if one has none, InvalidRangeError if the outputs differ in
    length.
    """
    outputs = {seq: pair for seq in sequences if (pair := cache.encoder_output(seq, layer)) is not None}
    missing = [seq for seq in sequences if seq not in outputs]
    if missing:
        raise OrderError(f"read_encoded: sequences {missing} have no encoder output in layer {layer}")
    pairs = [outputs[seq] for seq in sequences]
    lengths = {key.shape[0] for key, _ in pairs}
    if len(lengths) != 1:
        raise InvalidRangeError(f"read_encoded: encoder outputs of {sorted(lengths)} positions in one read")
    return _stacked(ctx, [key for key, _ in pairs]), _stacked(ctx, [value for _, value in pairs])


def _stacked(ctx: ml.Context, parts: Sequence[ml.Tensor]) -> ml.Tensor:
    """Parts (length, heads, dim), stacked to (parts, heads, length, dim)."""
    whole = parts[0].reshape(ctx, 1, *parts[0].shape)
    for part in parts[1:]:
        whole = whole.concat(ctx, part.reshape(ctx, 1, *part.shape), 0)
    return whole.permute(ctx, 0, 2, 1, 3)
