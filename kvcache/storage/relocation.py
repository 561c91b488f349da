"""Moving stored data, piece by piece: re-encoding keys for new positions, and defragmentation.

If a write fails, the data is half moved and the sequences whose cells were touched are marked as lost.
Everything that can be refused is refused before the first write.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ml
from kvcache.cache import ExtraShiftFunction, InvalidRangeError, ShiftFunction
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.layer_buffers import LayerBuffers

LEAST = 32
"""The fewest tokens that are re-encoded at a time: fewer would cost more in calls than they save in
memory.
"""

Fresh = dict[int, tuple[ml.Tensor, dict[str, ml.Tensor]]]
"""For each layer, the shifted keys of some cells, and their shifted extras by name."""


def prepare_shift(
    storage: CellStorage,
    seq: int,
    start: int,
    offset: int,
    shift: ShiftFunction | None,
    shift_extra: ExtraShiftFunction | None,
) -> Callable[[], None]:
    """Re-encode keys and extras of entries ``start`` and up of a row for positions moved by ``offset``.

    max(``storage.max_batch``, ``LEAST``) tokens are handled at a time, so that only their keys in all layers
    need extra memory, as in Ollama's kvcache/causal.go. The first piece is computed here: if the shift
    function raises, or returns another shape, the cache is unchanged. The returned callable writes it, and
    computes and writes the others; if that fails, the sequence is marked as lost.
    """
    if shift is None or not storage.buffers:
        return lambda: None
    cells = storage.table.rows[seq].cells[start:].copy()
    storage.table.join_arrivals(cells)
    size = max(LEAST, storage.max_batch)
    pieces = [_Piece(storage, cells[at : at + size]) for at in range(0, cells.size, size)]
    first: list[Fresh] = [pieces[0].computed(offset, shift, shift_extra)]

    def write() -> None:
        storage.reencoded.count(cells, storage.table.taken, storage.dtype)
        for piece in pieces:
            try:
                piece.write(first.pop() if first else piece.computed(offset, shift, shift_extra))
            except BaseException:
                if piece.writing or piece is not pieces[0]:
                    storage.table.mark_lost(cells)
                raise

    return write


class _Piece:
    """Cells whose keys and extras are re-encoded together."""

    def __init__(self, storage: CellStorage, cells: np.ndarray) -> None:
        self._storage, self._cells = storage, cells
        self._is_run = bool((np.diff(cells) == 1).all())
        self.writing = False
        """Whether something may have been written."""

    def _where(self, ctx: ml.Context) -> int | ml.Tensor:
        return int(self._cells[0]) if self._is_run else ctx.from_numpy(self._cells, ml.DType.I32)

    def computed(self, offset: int, shift: ShiftFunction, shift_extra: ExtraShiftFunction | None) -> Fresh:
        """The data to be written, in storage of its own."""
        fresh: Fresh = {}
        with self._storage.backend.new_context() as ctx:
            where, offsets = self._where(ctx), ctx.full((self._cells.size,), offset, ml.DType.I32)
            for layer, buffers in self._storage.buffers.items():
                place = ctx.layer(layer)
                key = _shifted(place, layer, buffers, where, offsets, shift)
                fresh[layer] = key, _shifted_extra(place, layer, buffers, where, offsets, shift_extra)
            ctx.compute(*(one for key, extra in fresh.values() for one in (key, *extra.values())))
        return fresh

    def write(self, fresh: Fresh) -> None:
        buffers = self._storage.buffers
        with self._storage.backend.new_context() as ctx:
            where, places = self._where(ctx), {layer: ctx.layer(layer) for layer in fresh}
            self.writing = True
            for layer, (key, extra) in fresh.items():
                ctx.forward(buffers[layer].key.write(places[layer], where, key))
                for name, one in extra.items():
                    ctx.forward(buffers[layer].extra[name].write(places[layer], where, one))
            ctx.compute()


def _shifted(
    ctx: ml.Context,
    layer: int,
    buffers: LayerBuffers,
    where: int | ml.Tensor,
    offsets: ml.Tensor,
    shift: ShiftFunction,
) -> ml.Tensor:
    """One layer's shifted keys, in storage of their own."""
    count = offsets.shape[0]
    key = buffers.key.read(ctx, where, count) if isinstance(where, int) else buffers.key.gather(ctx, where)
    result = shift(ctx, layer, key, offsets)
    _check_shape(result, key, "keys", layer)
    return result


def _check_shape(new: object, old: ml.Tensor, name: str, layer: int) -> None:
    shape = getattr(new, "shape", None)
    if shape != old.shape:
        got = f"a {type(new).__name__}" if shape is None else shape
        raise InvalidRangeError(
            f"remove: the shift function gave {got} for {name} {old.shape} of layer {layer}"
        )


def _shifted_extra(
    ctx: ml.Context,
    layer: int,
    buffers: LayerBuffers,
    where: int | ml.Tensor,
    offsets: ml.Tensor,
    shift: ExtraShiftFunction | None,
) -> dict[str, ml.Tensor]:
    """One layer's shifted extras as they are stored, (cells, 1, numbers) each."""
    count, fresh = offsets.shape[0], {}
    for name, buffer in buffers.extra.items():
        assert shift is not None, "refused before"
        old = buffers.read_extra(ctx, name, where, count)
        new = shift(ctx, layer, name, old, offsets)
        _check_shape(new, old, name, layer)
        fresh[name] = new.contiguous(ctx).reshape(ctx, count, 1, buffer.dim)
    return fresh


def defragment(storage: CellStorage, target: np.ndarray) -> None:
    """Move each cell in use to its ``target`` (see ``CellTable.spread``), data and metadata alike.

    One buffer of one layer is moved at a time, so that extra memory is needed only for the moved part of K or
    V of one layer, and no graph grows with the number of layers.
    """
    table = storage.table
    moved = np.flatnonzero((target >= 0) & (target != np.arange(target.size)))
    if not moved.size:
        return
    table.join_arrivals()
    writing = False
    try:
        with storage.backend.new_context() as ctx:
            sources = ctx.from_numpy(moved, ml.DType.I32)
            destinations = ctx.from_numpy(target[moved], ml.DType.I32)
            for layer, buffers in storage.buffers.items():
                place = ctx.layer(layer)
                for buffer in buffers.stored:
                    moving = buffer.read_stored(place, sources, moved.size)
                    writing = True
                    buffer.write_stored(place, destinations, moving)
                    del moving
                    ctx.compute()
    except BaseException:
        if writing:
            table.mark_lost(moved, target[moved])
        raise
    owned = np.flatnonzero(table.references)
    for buffers in storage.buffers.values():
        if buffers.absent is not None:
            kept = buffers.absent[owned]
            buffers.absent = np.zeros_like(buffers.absent)
            buffers.absent[target[owned]] = kept
    table.move(target)
