"""Copies of what a sequence holds, to be put back later: into the same cache or one made like it.

After the snapshots of Ollama's x/mlxrunner caches. Attention over all of the past is sliceable: a
snapshot of ``[begin, end)`` may be cut at any position, joined to its neighbour, and restored up to any
position inside. A window's content is whole: it is what a token at ``end`` sees::

    causal     [0 ........ 6)  split at 4  ->  [0 .... 4)  and  [4 . 6)      merge joins them again
    window     [    3 .. 6)    split at 4  ->  None        and  [    3 .. 6)  merge keeps the later one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

import ml
from kvcache.batches import check_sequence
from kvcache.buffers import LayerBuffers, stored_shape
from kvcache.cache import CacheFullError, InvalidRangeError, NotSupportedError, SequenceLostError
from kvcache.cells import CellTable

Shape = tuple[int, ...]

__all__ = ["AttentionSnapshot", "AttentionSnapshots", "LayerSnapshot", "RecurrentSnapshot"]


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """K and V of one layer as they are stored: (count, heads, dim) each.

    ``tensors`` holds K and V where storage is plain; codes and scales of K and then those of V where
    it is quantized, which are read back as ``activations``.
    """

    tensors: tuple[ml.Tensor, ...]
    activations: ml.DType

    @property
    def key(self) -> tuple[ml.Tensor, ...]:
        return self.tensors[: len(self.tensors) // 2]

    @property
    def value(self) -> tuple[ml.Tensor, ...]:
        return self.tensors[len(self.tensors) // 2 :]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSnapshot:
    """What an attention cache held of one sequence at ``positions``, all within ``[begin, end)``.

    The tensors are copies in the backend's memory, in the order of ``positions``.
    """

    begin: int
    end: int
    positions: np.ndarray
    layers: Mapping[int, LayerSnapshot]
    dtype: ml.DType
    whole: bool = False
    """It is the window of ``end``, and has no parts."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers.values() for tensor in layer.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentSnapshot:
    """The states of one sequence at ``end``, and its attention layers over ``[begin, end)``."""

    attention: AttentionSnapshot
    states: Mapping[tuple[str, int], ml.Tensor]
    """(kind, layer) -> (1, *shape)"""

    @property
    def begin(self) -> int:
        return self.attention.begin

    @property
    def end(self) -> int:
        return self.attention.end

    @property
    def nbytes(self) -> int:
        return self.attention.nbytes + sum(tensor.nbytes for tensor in self.states.values())


class AttentionSnapshots:
    """The part of an attention cache that takes, restores, cuts and joins snapshots."""

    _whole: ClassVar[bool] = False
    """Whether a sequence's content is that of one position, as a window's is."""

    _buffers: dict[int, LayerBuffers]
    _table: CellTable
    _dtype: ml.DType
    _max_sequences: int

    def _bound(self, op: str) -> ml.Backend:
        raise NotImplementedError

    def _changed(self) -> None:
        raise NotImplementedError

    def _allocate(
        self, ctx: ml.Context, layer: int, key: Shape, value: Shape, activations: ml.DType
    ) -> LayerBuffers:
        raise NotImplementedError

    def _reaches(self, stored: np.ndarray, position: int) -> bool:
        """Whether a token at ``position`` would find in ``stored`` (ascending) all that it sees."""
        return True

    def offset(self, seq: int) -> int:
        """One past the last stored position of a sequence: where its next token belongs; 0 if empty."""
        self._bound("offset")
        check_sequence("offset", seq, self._max_sequences)
        return self._table.rows[seq].last + 1

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> AttentionSnapshot:
        """Copy positions ``[begin, end)`` of a sequence out; None: to its end.

        A window is copied whole, whatever ``begin``. Raises InvalidRangeError for a range that is not
        within ``[0, offset(seq)]``, NotSupportedError where a window no longer reaches back from ``end``.
        """
        backend, offset = self._bound("snapshot"), self.offset(seq)
        end = offset if end is None else end
        if not 0 <= begin <= end <= offset:
            raise InvalidRangeError(
                f"snapshot: [{begin}, {end}) of sequence {seq}; it needs 0 <= begin <= end <= {offset}"
            )
        row = self._table.rows[seq]
        if row.lost:
            raise SequenceLostError(
                f"snapshot: the data of sequence {seq} is lost; call remove({seq}, 0) and compute it again"
            )
        if self._whole:
            begin = 0
            if end and not self._reaches(row.positions[: row.index(end)], end):
                raise NotSupportedError(
                    f"snapshot: sequence {seq} holds positions from {row.first}; a window at {end} needs more"
                )
        start, stop = row.index(begin), row.index(end)
        positions, cells = row.positions[start:stop].copy(), row.cells[start:stop].copy()
        layers = _read(backend, self._buffers, cells) if cells.size else {}
        return AttentionSnapshot(begin, end, positions, layers, self._dtype, self._whole)

    def restore(self, seq: int, snapshot: AttentionSnapshot, target: int | None = None) -> bool:
        """Make the sequence hold ``[0, target)``, with what the snapshot has; None: all of it.

        What the sequence holds from ``snapshot.begin`` on is replaced. False, and nothing touched,
        where ``target`` lies outside the snapshot, ``[0, begin)`` is not stored, or a window would be
        incomplete. Raises CacheFullError where the cells do not suffice, InvalidRangeError for a
        snapshot of another dtype or shape; all or nothing then too. A device that fails while data
        that is replaced is overwritten leaves the sequence lost.
        """
        backend = self._bound("restore")
        check_sequence("restore", seq, self._max_sequences)
        end = snapshot.end if target is None else target
        row = self._table.rows[seq]
        count = int(np.searchsorted(snapshot.positions, end))
        if not snapshot.begin <= end <= snapshot.end or (row.lost and snapshot.begin):
            return False
        if row.index(snapshot.begin) != snapshot.begin:
            return False
        if snapshot.whole and end and not self._reaches(snapshot.positions[:count], end):
            return False
        self._check(snapshot)
        self._put_back(backend, seq, snapshot, count)
        self._changed()
        row.lost = False
        return True

    def _put_back(self, backend: ml.Backend, seq: int, snapshot: AttentionSnapshot, count: int) -> None:
        """Replace the row's end first, then the data; the row is changed back where the data fails."""
        table, row = self._table, self._table.rows[seq]
        saved, held = row.save_copy(), row.cells.copy()
        table.drop(seq, row.index(snapshot.begin), len(row))
        if count > table.free:
            full = CacheFullError(count, table.free, table.held(), op="restore")
            table.restore_row(seq, saved)
            raise full
        if not count:
            return
        chosen = table.choose(seq, count)
        cells = np.arange(chosen, chosen + count) if isinstance(chosen, int) else chosen
        table.take(seq, snapshot.positions[:count], cells)
        writing = False
        try:
            with backend.new_context() as ctx:
                buffers = {i: self._buffer(ctx, i, layer) for i, layer in snapshot.layers.items()}
                where = chosen if isinstance(chosen, int) else ctx.from_numpy(cells, ml.DType.I32)
                writing = True
                for i, layer in _sliced(ctx, snapshot.layers, 0, count).items():
                    buffers[i].write_stored(ctx.layer(i), where, layer.tensors)
                ctx.compute()
        except BaseException:
            table.restore_row(seq, saved)
            row.lost = row.lost or (writing and bool(np.isin(cells, held).any()))
            raise
        self._buffers.update(buffers)

    def _buffer(self, ctx: ml.Context, i: int, layer: LayerSnapshot) -> LayerBuffers:
        held = self._buffers.get(i)
        if held is not None:
            return held
        return self._allocate(ctx, i, stored_shape(layer.key), stored_shape(layer.value), layer.activations)

    def merge(self, parent: AttentionSnapshot | None, child: AttentionSnapshot) -> AttentionSnapshot:
        """Join ``[a, b)`` and ``[b, c)`` to ``[a, c)``; a window keeps the child."""
        if parent is None or child.whole:
            return child
        if parent.end != child.begin or parent.dtype is not child.dtype or parent.whole:
            raise InvalidRangeError(
                f"merge: [{parent.begin}, {parent.end}) {parent.dtype.name} and "
                f"[{child.begin}, {child.end}) {child.dtype.name} do not follow one another"
            )
        if not parent.positions.size:
            return replace(child, begin=parent.begin)
        if not child.positions.size:
            return replace(parent, end=child.end)
        if parent.layers.keys() != child.layers.keys():
            raise InvalidRangeError(f"merge: layers {[*parent.layers]} and {[*child.layers]}")
        positions = np.concatenate((parent.positions, child.positions))
        with self._bound("merge").new_context() as ctx:
            layers = _joined(ctx, parent.layers, child.layers)
            ctx.compute(*_tensors(layers))
        return AttentionSnapshot(parent.begin, child.end, positions, layers, parent.dtype)

    def split(
        self, snapshot: AttentionSnapshot, at: int
    ) -> tuple[AttentionSnapshot | None, AttentionSnapshot]:
        """Cut ``[a, c)`` into ``[a, at)`` and ``[at, c)``; (None, snapshot) for a window, or at ``a``."""
        if not snapshot.begin <= at <= snapshot.end:
            raise InvalidRangeError(f"split: at {at}; the snapshot is [{snapshot.begin}, {snapshot.end})")
        if snapshot.whole or at == snapshot.begin:
            return None, snapshot
        count, size = int(np.searchsorted(snapshot.positions, at)), snapshot.positions.size
        with self._bound("split").new_context() as ctx:
            first, second = (_sliced(ctx, snapshot.layers, *part) for part in ((0, count), (count, size)))
            ctx.compute(*_tensors(first), *_tensors(second))
        positions = snapshot.positions
        return (
            replace(snapshot, end=at, positions=positions[:count], layers=first),
            replace(snapshot, begin=at, positions=positions[count:], layers=second),
        )

    def _check(self, snapshot: AttentionSnapshot) -> None:
        """Refuse a snapshot that was taken of another kind of cache."""
        if snapshot.dtype is not self._dtype or snapshot.whole is not self._whole:
            raise InvalidRangeError(
                f"restore: a snapshot of {snapshot.dtype.name}, whole={snapshot.whole}, into a cache of "
                f"{self._dtype.name}, whole={self._whole}"
            )
        for i, layer in snapshot.layers.items():
            held = self._buffers.get(i)
            if held is None:
                continue
            for buffer, parts in ((held.key, layer.key), (held.value, layer.value)):
                _, heads, dim = stored_shape(parts)
                if (heads, dim) != (buffer.heads, buffer.dim):
                    raise InvalidRangeError(
                        f"restore: layer {i} stores {buffer.heads} heads of {buffer.dim}; the snapshot has "
                        f"{heads} of {dim}"
                    )


def _read(
    backend: ml.Backend, buffers: Mapping[int, LayerBuffers], cells: np.ndarray
) -> dict[int, LayerSnapshot]:
    is_run = bool((np.diff(cells) == 1).all())
    with backend.new_context() as ctx:
        where = int(cells[0]) if is_run else ctx.from_numpy(cells, ml.DType.I32)
        layers = {
            i: LayerSnapshot(held.read_stored(ctx.layer(i), where, cells.size), held.activations)
            for i, held in buffers.items()
        }
        ctx.compute(*_tensors(layers))
    return layers


def _tensors(layers: Mapping[int, LayerSnapshot]) -> Iterable[ml.Tensor]:
    return (tensor for layer in layers.values() for tensor in layer.tensors)


def _sliced(
    ctx: ml.Context, layers: Mapping[int, LayerSnapshot], start: int, stop: int
) -> dict[int, LayerSnapshot]:
    """Copies of entries ``[start, stop)``; no layers where there are none."""
    found: dict[int, LayerSnapshot] = {}
    for i, layer in layers.items() if stop > start else ():
        place = ctx.layer(i)
        parts = (tensor.slice(place, 0, start, stop).contiguous(place) for tensor in layer.tensors)
        found[i] = replace(layer, tensors=tuple(parts))
    return found


def _joined(
    ctx: ml.Context, first: Mapping[int, LayerSnapshot], second: Mapping[int, LayerSnapshot]
) -> dict[int, LayerSnapshot]:
    found: dict[int, LayerSnapshot] = {}
    for i, layer in first.items():
        place = ctx.layer(i)
        pairs = zip(layer.tensors, second[i].tensors, strict=True)
        found[i] = replace(layer, tensors=tuple(one.concat(place, other, 0) for one, other in pairs))
    return found
