"""The storage of an attention cache: which sequence holds which cell, and the tensors of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

import ml
from kvcache.cache import OrderError
from kvcache.storage.cell_table import CellTable, Row
from kvcache.storage.formats import CacheFormat
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.layer_shape import LayerShape


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
