"""Reserved memory of a cache: free cells that are held until data is read into them.

The resulting snapshot shares its cells with the sequence that restores it, so that every byte is read
directly to its final place (see kvcache.prefix.loading).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import ml
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.storage.cell_table import CellTable
from kvcache.storage.formats import CacheFormat
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["CellReservation", "IncomingSnapshot", "StoredTensor", "bits_of"]


Places = dict[int, list[np.ndarray]]
"""For each layer, the memory of its tensors, (count, heads, ...) each."""


class StoredTensor(NamedTuple):
    """A tensor still to arrive: its shape (count, heads, ...) and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class IncomingSnapshot:
    """An attention snapshot whose content is still to arrive; otherwise as ``AttentionSnapshot``."""

    begin: int
    end: int
    positions: np.ndarray
    dtype: CacheFormat
    whole: bool
    layers: Mapping[int, tuple[StoredTensor, ...]]
    """The tensors of each layer."""


class CellReservation:
    """A run of free cells reserved for a snapshot: open it, fill it at once, and keep or discard it.

    The cache's ``buffers`` must have the incoming layers, shapes and dtypes: a cache without buffers does not
    know them yet.
    """

    __slots__ = ("_backend", "_buffers", "_cells", "_incoming", "_keep", "_pin", "_places", "_table")

    def __init__(
        self,
        backend: ml.Backend,
        table: CellTable,
        buffers: Mapping[int, LayerBuffers],
        incoming: IncomingSnapshot,
        cells: np.ndarray,
        keep: Callable[[np.ndarray, int], AttentionSnapshot],
    ) -> None:
        """``keep`` makes a snapshot of the first cells, wherever they have been moved to by then."""
        self._backend, self._table, self._buffers = backend, table, buffers
        self._incoming, self._cells, self._keep = incoming, cells, keep
        self._pin = table.hold(cells)
        self._places: Places = {}

    @staticmethod
    def is_known(backend: ml.Backend) -> bool:
        """Whether a backend may give access to its tensors' memory from outside."""
        return isinstance(backend, (ml.SupportsHostMemory, ml.SupportsTransfers))

    def open(self) -> Places | None:
        """The cells' memory, per layer in the order of the incoming tensors; None if it is not accessible.

        Release it before ``keep``, and before the backend is used for anything else.
        """
        backend = self._backend
        if not isinstance(backend, ml.SupportsHostMemory):
            return None
        with backend.new_context() as ctx:
            views = self._views(ctx)
            if views is None:
                return None
            memory = {i: [backend.overwrite(ctx.layer(i), one) for one in views[i]] for i in views}
        places = {i: [place for place in layer if place is not None] for i, layer in memory.items()}
        if any(len(places[i]) < len(memory[i]) for i in memory):
            return None
        self._places = places
        return places

    def page_in(
        self, arrays: Mapping[int, Sequence[tuple[np.ndarray, Sequence[int]]]]
    ) -> ml.PageTransfer | None:
        """Begin to copy arrays into the cells, instead of ``open``; None if the backend does not support it.

        Each array comes with its axes: the tensor (count, heads, ...), permuted by them, has the array's
        shape. Later uses of the cells are ordered after the copy.
        """
        backend = self._backend
        if not isinstance(backend, ml.SupportsTransfers):
            return None
        with backend.new_context() as ctx:
            views = self._views(ctx)
            if views is None:
                return None
            pairs = [
                (array, view.permute(ctx, *axes))
                for i, layer in arrays.items()
                for (array, axes), view in zip(layer, views[i], strict=True)
            ]
            transfer = backend.page_in(ctx, [array for array, _ in pairs], [tensor for _, tensor in pairs])
        if transfer is not None:
            self._table.arrivals.add(self._cells, transfer)
        return transfer

    def keep(self, count: int, end: int) -> AttentionSnapshot:
        """A snapshot up to ``end`` of the first ``count`` cells, which stay in the cache."""
        self._clear(count)
        snapshot = self._keep(self._pin.cells[:count], end)
        self._table.unpin(self._pin)
        return snapshot

    def discard(self) -> None:
        """Release the cells."""
        self._clear(0)
        self._table.unpin(self._pin)

    def _clear(self, start: int) -> None:
        """Zero the cells from ``start`` on: a masked cell has a weight of 0, which does not cancel NaN."""
        places, self._places = self._places, {}
        for place in (place for layer in places.values() for place in layer):
            bits_of(place)[start:] = 0

    def _views(self, ctx: ml.Context) -> dict[int, tuple[ml.Tensor, ...]] | None:
        """The cells as tensors, by layer; None if their shapes or dtypes are not the incoming ones."""
        layers, count = self._incoming.layers, int(self._incoming.positions.size)
        if self._buffers.keys() != layers.keys():
            return None
        views = {i: self._buffers[i].stored_views(ctx.layer(i), int(self._cells[0]), count) for i in layers}
        same = all([(v.shape, v.dtype.numpy) for v in views[i]] == [*layers[i]] for i in layers)
        return views if same else None


def bits_of(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, which NumPy copies fastest and without changing a bit."""
    return array.view(f"u{array.dtype.itemsize}")
