"""Moving what is stored: re-encoding keys for new positions, and defragmentation.

A failure while data is being written leaves it half moved: the sequences whose cells were touched are
then marked lost. Everything that can be refused or computed is done before the first write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

import ml
from kvcache.cache import InvalidRangeError, ShiftFunction
from kvcache.storage.cell_table import CellTable
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.overlay import Overlay, uploaded

__all__ = ["defragment", "prepare_shift"]


def prepare_shift(
    backend: ml.Backend,
    buffers: Mapping[int, LayerBuffers],
    table: CellTable,
    seq: int,
    start: int,
    offset: int,
    shift: ShiftFunction | None,
) -> Callable[[], None]:
    """Re-encode the keys of entries ``start`` and up of a row for positions moved by ``offset``.

    The shifted keys of all layers are computed here, the callable returned writes them: a shift
    function that raises leaves the cache as it was.
    """
    if shift is None or not buffers:
        return lambda: None
    cells = table.rows[seq].cells[start:]
    table.join_arrivals(cells)
    is_run = bool((np.diff(cells) == 1).all())
    slots = table.exact_slots(cells)
    overlay = None if slots is None else Overlay(slots, uploaded)
    with backend.new_context() as ctx:
        where = int(cells[0]) if is_run else ctx.from_numpy(cells, ml.DType.I32)
        offsets = ctx.full((cells.size,), offset, ml.DType.I32)
        shifted = {
            layer: _shifted(ctx.layer(layer), layer, held, where, offsets, shift, overlay)
            for layer, held in buffers.items()
        }
        ctx.compute(*shifted.values())

    def write() -> None:
        writing = False
        try:
            with backend.new_context() as ctx:
                places = {layer: ctx.layer(layer) for layer in shifted}
                writing = True
                for layer, key in shifted.items():
                    ctx.forward(buffers[layer].key.write(places[layer], where, key))
                    if overlay is not None:
                        overlay.write_key(places[layer], buffers[layer], key)
                ctx.compute()
        except BaseException:
            if writing:
                table.mark_lost(cells)
            raise

    return write


def _shifted(
    ctx: ml.Context,
    layer: int,
    held: LayerBuffers,
    where: int | ml.Tensor,
    offsets: ml.Tensor,
    shift: ShiftFunction,
    overlay: Overlay | None,
) -> ml.Tensor:
    """One layer's shifted keys, in storage of their own."""
    count = offsets.shape[0]
    key = held.key.read(ctx, where, count) if isinstance(where, int) else held.key.gather(ctx, where)
    if overlay is not None:
        key = overlay.read_key(ctx, held, key)
    result = shift(ctx, layer, key, offsets)
    if result.shape != key.shape:
        raise InvalidRangeError(
            f"remove: the shift function gave {result.shape} for keys {key.shape} of layer {layer}"
        )
    return result


def defragment(backend: ml.Backend, buffers: Mapping[int, LayerBuffers], table: CellTable) -> None:
    """Move the cells of every sequence together, data and metadata alike; pinned cells too."""
    table.sweep()
    target = table.spread()
    moved = np.flatnonzero((target >= 0) & (target != np.arange(target.size)))
    if not moved.size:
        return
    table.join_arrivals()
    writing = False
    try:
        with backend.new_context() as ctx:
            sources = ctx.from_numpy(moved, ml.DType.I32)
            destinations = ctx.from_numpy(target[moved], ml.DType.I32)
            for layer, held in buffers.items():
                place = ctx.layer(layer)
                for buffer in (held.key, held.value):
                    found = buffer.fetch(place, sources)
                    writing = True
                    buffer.store(place, destinations, found)
            ctx.compute()
    except BaseException:
        if writing:
            table.mark_lost(moved, target[moved])
        raise
    table.move(target)
