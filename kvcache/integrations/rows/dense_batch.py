"""Several sequences read as one tensor, for models that keep the rows of a batch at one length.

``get`` and ``attend`` give each sequence its own cells. A runtime that pads its batch wants
(sequences, heads, tokens, dim) instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import ml
from kvcache.cache import InvalidRangeError, OrderError
from kvcache.integrations.rows.batched_rows import BatchedRows, HasCells, rows_of


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
        rows = rows_of("DenseBatch", self._storage.table, sequences)
        self._checked = () if unwritten else rows
        self.begin, self.end = begin, rows[0].last + 1
        self.tokens = self.end - begin
        for seq, row in zip(sequences, rows, strict=True):
            start = row.index(begin)
            count = len(row) - start
            ends_there = row.last + 1 == self.end and count == self.tokens
            if not ends_there or (count and int(row.positions[start]) != begin):
                raise InvalidRangeError(
                    f"DenseBatch: [{begin}, {self.end}) of sequence {seq}, which holds {count} positions "
                    f"from there to {row.last}; sequences that are read together must end at the same "
                    "position and have no gaps"
                )
        self._rows = BatchedRows(self._storage.table, rows, begin, self.tokens)

    @property
    def is_view(self) -> bool:
        """Whether reading copies nothing: one strided view of the buffers (of plain storage)."""
        return self._rows.is_view

    def read(self, ctx: ml.Context, layer: int) -> tuple[ml.Tensor, ml.Tensor]:
        """K (sequences, kv_heads, tokens, head_dim) and V (sequences, kv_heads, tokens, v_dim) of a layer.

        Quantized storage is read back as the dtype of what was put. A strided view is read-only where
        sequences share cells.
        """
        buffers = self._storage.readable("DenseBatch", layer, self._checked, self.begin)
        return self._rows.read(ctx, buffers, heads_first=True)

    def read_extra(self, ctx: ml.Context, layer: int, name: str) -> ml.Tensor | None:
        """An extra of a layer, (sequences, tokens, numbers) in its own dtype; None where it stores none.

        A view or a copy as of :meth:`read`.
        """
        buffers = self._storage.buffers.get(layer)
        if buffers is None or name not in buffers.extra:
            return None
        return self._rows.read_extra(ctx, buffers.extra[name])


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
