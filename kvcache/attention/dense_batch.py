"""Several sequences read as one tensor, for models that keep the rows of a batch at one length.

``get`` and ``attend`` give each sequence its own cells. A runtime that pads its batch wants
(sequences, heads, tokens, dim) instead. Where the sequences lie at even distances in the buffers, as
they do when they grow in step, that is one strided view; else the cells are gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

import ml
from kvcache.attention.batch import check_sequence
from kvcache.cache import InvalidRangeError, OrderError, SequenceLostError
from kvcache.storage.buffer import Buffer
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import Row
from kvcache.storage.overlay import CurrentOverlay
from kvcache.storage.quantized import QuantizedBuffer

__all__ = ["DenseBatch", "read_encoded"]


class HasCells(Protocol):
    """A cache that keeps K and V in cells, as CausalCache and its kinds do."""

    @property
    def storage(self) -> CellStorage:
        """The cell table and the buffers; OrderError before ``init``."""


class HasEncoderOutput(Protocol):
    """A cache of encoder outputs, as EncoderCache is."""

    def encoder_output(self, seq: int, layer: int) -> tuple[ml.Tensor, ml.Tensor] | None:
        """K (length, kv_heads, head_dim) and V of a sequence in a layer; None where nothing is stored."""


class DenseBatch:
    """Positions ``[begin, end)`` of ``sequences``, as they lie now, for reading any layer.

    All of the sequences hold every position of that range and none above it. The reading is good until
    the next change of one of the sequences; tensors that it gave alias the cache where
    ``is_view``, and are gathered copies else.

    ``unwritten`` lets ``read`` give what nothing was put into, too. Raises InvalidRangeError where the
    sequences do not end together or lack a position.
    """

    def __init__(
        self, cache: HasCells, sequences: Sequence[int], begin: int = 0, unwritten: bool = False
    ) -> None:
        self._storage = cache.storage
        self._table = self._storage.table
        if not sequences:
            raise InvalidRangeError("DenseBatch: no sequences given; it must read at least one")
        for seq in sequences:
            check_sequence("DenseBatch", seq, len(self._table.rows))
        rows = [self._table.rows[seq] for seq in sequences]
        self.sequences, self._checked = len(rows), () if unwritten else rows
        self.begin, self.end = begin, rows[0].last + 1
        self.tokens = self.end - begin
        cells = [_cells(seq, row, begin, self.end) for seq, row in zip(sequences, rows, strict=True)]
        self._first = self._step = 0
        self._cells: np.ndarray | None = None
        self._index: ml.Tensor | None = None
        exact = self._table.exact is not None
        if exact or not self._lies_evenly(rows, cells):
            self._cells = np.concatenate(cells)
        self._overlay = (
            CurrentOverlay(self._table, self._cells) if exact and self._cells is not None else None
        )

    @property
    def is_view(self) -> bool:
        """Whether reading copies nothing: one strided view of the buffers (of plain storage)."""
        return self._cells is None

    def _lies_evenly(self, rows: Sequence[Row], cells: Sequence[np.ndarray]) -> bool:
        """Whether the cells are runs at even distances; notes where."""
        if not self.tokens:
            return True
        for row, own in zip(rows, cells, strict=True):
            if not row.contiguous and (
                own[-1] - own[0] != own.size - 1 or not bool((own[1:] - own[:-1] == 1).all())
            ):
                return False
        starts = [int(own[0]) for own in cells]
        self._first = starts[0]
        self._step = starts[1] - starts[0] if len(starts) > 1 else 0
        return self._step >= 0 and all(
            later - earlier == self._step for earlier, later in itertools.pairwise(starts)
        )

    def read(self, ctx: ml.Context, layer: int) -> tuple[ml.Tensor, ml.Tensor]:
        """K (sequences, kv_heads, tokens, head_dim) and V (sequences, kv_heads, tokens, v_dim) of a layer.

        Quantized storage is read back as the dtype of what was put. A strided view is read-only where
        sequences share cells.
        """
        buffers = self._storage.readable("DenseBatch", layer, self._checked, self.begin)
        if self._overlay is None:
            key = self._tensor(ctx, buffers.key)
            if buffers.shape.is_latent:
                return key, key.slice(ctx, 3, 0, buffers.value.dim)
            return key, self._tensor(ctx, buffers.value)
        found = buffers.read(ctx, self._indices(ctx), self.sequences * self.tokens)
        key, value = (self._by_sequence(ctx, x) for x in self._overlay.read(ctx, buffers, *found))
        return key, value

    def read_extra(self, ctx: ml.Context, layer: int, name: str) -> ml.Tensor | None:
        """An extra of a layer, (sequences, tokens, numbers) in its own dtype; None where it stores none.

        A view or a copy as of :meth:`read`.
        """
        buffers = self._storage.buffers.get(layer)
        if buffers is None or name not in buffers.extra:
            return None
        found = self._stored(ctx, buffers.extra[name])
        row, _, token, number = found.strides
        shape = self.sequences, self.tokens, found.shape[3]
        return found.view(ctx, 0, shape, (row, token, number))

    def _tensor(self, ctx: ml.Context, buffer: Buffer | QuantizedBuffer) -> ml.Tensor:
        if isinstance(buffer, QuantizedBuffer):
            return buffer.decode(ctx, [self._stored(ctx, part) for part in buffer.parts])
        return self._stored(ctx, buffer)

    def _stored(self, ctx: ml.Context, buffer: Buffer) -> ml.Tensor:
        cell, head, dim = buffer.strides
        shape = (self.sequences, buffer.heads, self.tokens, buffer.dim)
        if self._cells is None:
            return buffer.tensor.view(ctx, self._first * cell, shape, (self._step * cell, head, cell, dim))
        return self._by_sequence(ctx, buffer.gather(ctx, self._indices(ctx)))

    def _indices(self, ctx: ml.Context) -> ml.Tensor:
        if self._index is None:
            self._index = ctx.from_numpy(self._cells, ml.DType.I32)
        return self._index

    def _by_sequence(self, ctx: ml.Context, found: ml.Tensor) -> ml.Tensor:
        """(sequences * tokens, heads, dim) as (sequences, heads, tokens, dim)."""
        cell, head, dim = found.strides
        shape = (self.sequences, found.shape[1], self.tokens, found.shape[2])
        return found.view(ctx, 0, shape, (self.tokens * cell, head, cell, dim))


def _cells(seq: int, row: Row, begin: int, end: int) -> np.ndarray:
    """The cells of positions ``[begin, end)``, all of which the row holds."""
    if row.lost:
        raise SequenceLostError(f"DenseBatch: the data of sequence {seq} is lost; compute it again")
    start = row.index(begin)
    count = len(row) - start
    if row.last + 1 != end or count != end - begin or (count and int(row.positions[start]) != begin):
        raise InvalidRangeError(
            f"DenseBatch: [{begin}, {end}) of sequence {seq}, which holds {count} positions from there to "
            f"{row.last}; sequences that are read together must end at the same position and have no gaps"
        )
    return row.cells[start:]


def read_encoded(
    ctx: ml.Context, cache: HasEncoderOutput, layer: int, sequences: Sequence[int]
) -> tuple[ml.Tensor, ml.Tensor]:
    """K (sequences, kv_heads, length, head_dim) and V of what an encoder gave for several sequences.

    A view for one sequence, else a copy. OrderError where one has none, InvalidRangeError where the
    outputs differ in length.
    """
    found = {seq: pair for seq in sequences if (pair := cache.encoder_output(seq, layer)) is not None}
    missing = [seq for seq in sequences if seq not in found]
    if missing:
        raise OrderError(f"read_encoded: sequences {missing} have no encoder output in layer {layer}")
    pairs = [found[seq] for seq in sequences]
    lengths = {key.shape[0] for key, _ in pairs}
    if len(lengths) != 1:
        raise InvalidRangeError(f"read_encoded: encoder outputs of {sorted(lengths)} positions in one read")
    return _stacked(ctx, [key for key, _ in pairs]), _stacked(ctx, [value for _, value in pairs])


def _stacked(ctx: ml.Context, parts: Sequence[ml.Tensor]) -> ml.Tensor:
    """(length, heads, dim) each, as (parts, heads, length, dim)."""
    whole = parts[0].reshape(ctx, 1, *parts[0].shape)
    for part in parts[1:]:
        whole = whole.concat(ctx, part.reshape(ctx, 1, *part.shape), 0)
    return whole.permute(ctx, 0, 2, 1, 3)
