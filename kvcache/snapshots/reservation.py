"""Memory of a cache for what is about to be put there: free cells, held until they are filled.

The snapshot that comes of it shares its cells with the sequence that restores it, so that every byte is
read to where it will lie, and copied no further (see kvcache.offload.direct_load).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

import ml
from kvcache.snapshots.snapshot import AttentionSnapshot
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["CellReservation", "IncomingSnapshot", "StoredTensor", "bits_of", "landing_places"]


Places = dict[int, list[np.ndarray]]
"""Per layer the memory of its tensors, (count, heads, ...) each."""


class StoredTensor(NamedTuple):
    """What is to come: shape, as (count, heads, ...), and dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class IncomingSnapshot:
    """An attention snapshot whose content is still to come; as :class:`AttentionSnapshot`."""

    begin: int
    end: int
    positions: np.ndarray
    dtype: ml.DType
    whole: bool
    layers: Mapping[int, tuple[StoredTensor, ...]]
    """The tensors of each layer."""


class CellReservation:
    """Free cells that are held for a snapshot, to be opened, filled at once, and kept or discarded."""

    __slots__ = ("_find", "_keep", "_pin", "_places", "_table")

    def __init__(
        self,
        table: CellTable,
        cells: np.ndarray,
        find: Callable[[], Places | None],
        keep: Callable[[int, int], AttentionSnapshot],
    ) -> None:
        """``find`` gives the cells' memory; ``keep`` makes the snapshot of some of them."""
        self._table, self._find, self._keep = table, find, keep
        self._pin = table.hold(cells)
        self._places: Places = {}

    def open(self) -> Places | None:
        """The cells' memory, per layer in the order of the incoming tensors; None where it is not to be had.

        To be let go of before ``keep``, and before the backend is used for anything else.
        """
        places = self._find()
        if places is not None:
            self._places = places
        return places

    def keep(self, count: int, end: int) -> AttentionSnapshot:
        """The first ``count`` cells as a snapshot up to ``end``, which lies in the cache."""
        self._clear(count)
        snapshot = self._keep(count, end)
        self._table.unpin(self._pin)
        return snapshot

    def discard(self) -> None:
        """Let go of the cells."""
        self._clear(0)
        self._table.unpin(self._pin)

    def _clear(self, start: int) -> None:
        """Leave zeros behind: a masked cell meets a weight of 0, and what was put there may be NaN."""
        places, self._places = self._places, {}
        for place in (place for layer in places.values() for place in layer):
            bits_of(place)[start:] = 0


def landing_places(
    backend: ml.SupportsHostWrite, buffers: Mapping[int, LayerBuffers], incoming: IncomingSnapshot, start: int
) -> Places | None:
    """The memory of the cells from ``start`` on in all layers; None where some of it is not to be had.

    ``buffers``, which are the cache's, must have the incoming layers, shapes and dtypes: a cache that
    has none yet does not know what it should have.
    """
    if not buffers or buffers.keys() != incoming.layers.keys():
        return None
    places: Places = {}
    count = int(incoming.positions.size)
    with cast("ml.Backend", backend).new_context() as ctx:
        for i, tensors in incoming.layers.items():
            found = buffers[i].memory(backend, ctx.layer(i), start, count)
            places[i] = [place for place in found if place is not None]
            if [(place.shape, place.dtype) for place in places[i]] != [*tensors]:
                return None
    return places


def bits_of(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers: NumPy copies those fastest, and every bit as it is."""
    return array.view(f"u{array.dtype.itemsize}")
