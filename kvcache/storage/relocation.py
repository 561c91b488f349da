"""Moving what is stored: re-encoding keys for new positions, and defragmentation.

A failure while data is being written leaves it half moved: the sequences whose cells were touched are
then marked lost. Everything that can be refused or computed is done before the first write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

import ml
from kvcache.cache import ExtraShiftFunction, InvalidRangeError, ShiftFunction
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
    shift_extra: ExtraShiftFunction | None,
) -> Callable[[], None]:
    """Re-encode keys and extras of entries ``start`` and up of a row for positions moved by ``offset``.

    Those of all layers are computed here, the callable returned writes them: a shift
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
        extra = {
            layer: _shifted_extra(ctx.layer(layer), layer, held, where, offsets, shift_extra)
            for layer, held in buffers.items()
            if held.extra
        }
        ctx.compute(*shifted.values(), *(one for found in extra.values() for one in found.values()))

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
                    for name, found in extra.get(layer, {}).items():
                        ctx.forward(buffers[layer].extra[name].write(places[layer], where, found))
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


def _shifted_extra(
    ctx: ml.Context,
    layer: int,
    held: LayerBuffers,
    where: int | ml.Tensor,
    offsets: ml.Tensor,
    shift: ExtraShiftFunction | None,
) -> dict[str, ml.Tensor]:
    """One layer's shifted extras as they are stored, (cells, 1, numbers) each."""
    assert shift is not None, "refused before"
    count, found = offsets.shape[0], {}
    for name, buffer in held.extra.items():
        old = held.read_extra(ctx, name, where, count)
        new = shift(ctx, layer, name, old, offsets)
        if new.shape != old.shape:
            raise InvalidRangeError(
                f"remove: the shift function gave {new.shape} for {name} {old.shape} of layer {layer}"
            )
        found[name] = new.contiguous(ctx).reshape(ctx, count, 1, buffer.dim)
    return found


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
                for buffer in held.stored:
                    found = buffer.fetch(place, sources)
                    writing = True
                    buffer.store(place, destinations, found)
            ctx.compute()
    except BaseException:
        if writing:
            table.mark_lost(moved, target[moved])
        raise
    table.move(target)
