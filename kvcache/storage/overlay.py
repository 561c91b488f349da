"""What lies in the slots of a residual window, in place of what is read back from codes."""

from __future__ import annotations

import numpy as np

import ml
from kvcache.storage.buffer import Buffer
from kvcache.storage.cell_table import CellTable
from kvcache.storage.device_copies import HostArrays
from kvcache.storage.exact_slots import NONE
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.quantized import QuantizedBuffer


class Overlay:
    """Some cells, of which some have slots, for any layer."""

    def __init__(self, slots: np.ndarray, host: HostArrays) -> None:
        """``slots`` says which slot each cell has, -1 where it has none."""
        where = np.flatnonzero(slots >= 0)
        index = np.arange(slots.size)
        index[where] = slots.size + np.arange(where.size)
        arrays = (where, slots[where], index)
        self._where, self._slots, self._index = (host.add(array) for array in arrays)

    def read(
        self, ctx: ml.Context, buffers: LayerBuffers, key: ml.Tensor, value: ml.Tensor
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V (cells, heads, dim), copies, of what was read back of all cells."""
        exact = _exact(buffers)
        return self._read(ctx, exact.key, key), self._read(ctx, exact.value, value)

    def read_key(self, ctx: ml.Context, buffers: LayerBuffers, key: ml.Tensor) -> ml.Tensor:
        return self._read(ctx, _exact(buffers).key, key)

    def write_key(self, ctx: ml.Context, buffers: LayerBuffers, key: ml.Tensor) -> None:
        """Store the keys of those cells that have slots, of key (cells, heads, dim), there."""
        new = key.rows(ctx, self._where.on(ctx)).cast(ctx, buffers.activations)
        ctx.forward(_exact(buffers).key.write(ctx, self._slots.on(ctx), new))

    def _read(self, ctx: ml.Context, exact: Buffer | QuantizedBuffer, found: ml.Tensor) -> ml.Tensor:
        own = exact.gather(ctx, self._slots.on(ctx))
        return found.concat(ctx, own, 0).rows(ctx, self._index.on(ctx))


class CurrentOverlay:
    """The overlay of some cells of a table, whose slots may change between two readings."""

    def __init__(self, table: CellTable, cells: np.ndarray) -> None:
        self._table, self._cells = table, cells
        self._changes = NONE
        self._found: Overlay | None = None

    def read(
        self, ctx: ml.Context, buffers: LayerBuffers, key: ml.Tensor, value: ml.Tensor
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V (cells, heads, dim), read back of all cells, with what lies in slots in its place."""
        exact = self._table.exact
        if exact is not None and self._changes != exact.changes:
            slots = self._table.exact_slots(self._cells)
            self._found = None if slots is None else Overlay(slots, HostArrays())
            self._changes = exact.changes
        return (key, value) if self._found is None else self._found.read(ctx, buffers, key, value)


def _exact(buffers: LayerBuffers) -> LayerBuffers:
    assert buffers.exact is not None, "only a residual window has slots"
    return buffers.exact
