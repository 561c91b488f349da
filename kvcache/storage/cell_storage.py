"""The storage of an attention cache: which sequence holds which cell, and the tensors of every layer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

import ml
from kvcache.cache import OrderError
from kvcache.storage.cell_table import CellTable, Row
from kvcache.storage.formats import CacheFormat, Plain
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.layer_shape import LayerShape

__all__ = ["CellStorage", "Reencoded"]

log = logging.getLogger("kvcache")


class Reencoded:
    """How often the codes of each cell's key were decoded, moved to another position, and encoded anew.

    Each time rounds once more: after eight times, the error is three to five times that of fresh codes.
    """

    MOST = 8
    """Times after which a cache warns, once."""

    def __init__(self) -> None:
        self._counts = self._numbers = np.zeros(0, np.int64)
        """By cell, the times, and the number (``CellTable.taken``) of the token that they are about."""
        self._told = False

    def count(self, cells: np.ndarray, taken: np.ndarray, stored: CacheFormat) -> None:
        """The keys of ``cells`` are encoded once more."""
        if isinstance(stored.key, Plain) or self._told:
            return
        if self._counts.size != taken.size:
            self._counts, self._numbers = np.zeros_like(taken), np.zeros_like(taken)
        known = self._numbers[cells] == taken[cells]
        self._counts[cells] = np.where(known, self._counts[cells], 0) + 1
        self._numbers[cells] = taken[cells]
        if self._counts[cells].max() > self.MOST:
            self._told = True
            log.warning(
                "remove: keys stored in %s were moved to other positions %d times, and rounded each time: "
                "their error is several times that of fresh codes; evaluate the text anew, remove more "
                "tokens at a time, or store keys in F16",
                stored.key.name,
                self.MOST + 1,
            )


@dataclass(frozen=True, slots=True)
class CellStorage:
    """The cell table of a cache and its K/V buffers, from ``init`` to ``close``."""

    backend: ml.Backend
    dtype: CacheFormat
    config: ml.CacheConfig
    table: CellTable
    max_batch: int
    """How many tokens are handled at a time when data is re-encoded."""
    buffers: dict[int, LayerBuffers] = field(default_factory=dict)
    """The buffers of each layer, from its first ``put`` on."""
    reencoded: Reencoded = field(default_factory=Reencoded)

    def allocate(self, ctx: ml.Context, layer: int, shape: LayerShape, activations: ml.DType) -> LayerBuffers:
        """New buffers for K and V put as ``activations``, not yet in ``buffers``; they contain no stored
        token.
        """
        cells, taken = self.table.cells, self.table.taken
        made = LayerBuffers(ctx.layer(layer), self.dtype, self.config, cells, shape, activations)
        owned = np.flatnonzero(self.table.references)
        if owned.size:
            made.lack(taken, owned)
        return made

    def readable(self, op: str, layer: int, rows: Iterable[Row], begin: int = 0) -> LayerBuffers:
        """A layer's buffers. Raises OrderError if they lack a token of ``rows`` from position ``begin``
        on.
        """
        buffers = self.buffers.get(layer)
        if buffers is None:
            raise OrderError(f"{op}: layer {layer} stores nothing yet; call put first")
        for row in rows if buffers.absent is not None else ():
            start = row.index(begin)
            lacking = buffers.lacks(self.table.taken, row.cells[start:])
            if lacking is not None:
                raise OrderError(
                    f"{op}: layer {layer} lacks position {row.positions[start:][lacking][0]}, which was not "
                    "put in the pass that stored the token, or is not in what was restored; remove the "
                    "tokens from there on, and evaluate them in all layers"
                )
        buffers.note_read()
        return buffers

    def missing(self, cells: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """For each layer that lacks any of the tokens in ``cells``, which of them it lacks."""
        for layer, buffers in self.buffers.items():
            lacking = None if buffers.absent is None else buffers.lacks(self.table.taken, cells)
            if lacking is not None:
                yield layer, lacking
