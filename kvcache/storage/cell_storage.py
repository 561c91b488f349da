"""What an attention cache stores, and where: who holds which cell, and the tensors of every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["CellStorage"]


@dataclass(frozen=True, slots=True)
class CellStorage:
    """The cell table of a cache and its K/V buffers, from ``init`` to ``close``."""

    backend: ml.Backend
    dtype: ml.DType
    config: ml.CacheConfig
    table: CellTable
    buffers: dict[int, LayerBuffers] = field(default_factory=dict)
    """By layer, from its first ``put`` on."""

    def allocate(
        self,
        ctx: ml.Context,
        layer: int,
        key: tuple[int, ...],
        value: tuple[int, ...],
        activations: ml.DType,
    ) -> LayerBuffers:
        """Buffers for keys and values (any, heads, dim), put as ``activations``; not yet in ``buffers``."""
        place, cells = ctx.layer(layer), self.table.cells
        return LayerBuffers(
            place, self.dtype, self.config, cells, (key[1], key[2]), (value[1], value[2]), activations
        )
