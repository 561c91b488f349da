"""Snapshots: the content of a sequence, to be restored later in the same cache or in an equal one.

After the snapshots of Ollama's x/mlxrunner caches. Attention over all of the past is divisible: a snapshot of
``[begin, end)`` can be split at any position, joined to its neighbour, and restored up to any position
inside. The content of a window is indivisible: it is what a token at ``end`` sees::

    causal     [0 ........ 6)  split at 4  ->  [0 .... 4)  and  [4 . 6)      merge joins them again
    window     [    3 .. 6)    split at 4  ->  None        and  [    3 .. 6)  merge keeps the later one

A snapshot is lazy. An attention snapshot refers to cells of the cache and keeps them from being reused,
without copying anything. The cells are copied out only when the cache needs them, moves to another backend or
closes; restoring before that shares them. A recurrent state stays in its slot until the slot is about to be
overwritten (kvcache.storage.state_slots).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

import ml
from kvcache.cache import InvalidRangeError, OrderError, SequenceLostError, check_whole
from kvcache.storage.cell_table import CellTable, Pin
from kvcache.storage.formats import CacheFormat
from kvcache.storage.layer_buffers import LayerBuffers
from kvcache.storage.layer_shape import LayerShape
from kvcache.storage.state_slots import HeldStates, States

__all__ = [
    "AttentionSnapshot",
    "EncoderSnapshot",
    "InCache",
    "LayerSnapshot",
    "Snapshot",
    "SnapshotChain",
    "StateSnapshot",
    "WrapperSnapshot",
    "check_following",
    "check_inside",
    "check_kind",
    "compact",
    "entries",
    "joined",
    "read_layers",
    "sliced",
    "tensors_of",
    "unwrapped_snapshot",
]


class Snapshot(Protocol):
    """The members that all snapshots have."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of its content, whether it lies in the cache or has been copied out."""

    @property
    def in_cache(self) -> bool:
        """Whether some of it still lies in the cache itself: in its cells, or in a state's slot."""

    @property
    def holds_cells(self) -> bool:
        """Whether some of it still lies in the cache's cells."""

    @property
    def frees_cells(self) -> bool:
        """Whether releasing this snapshot would free a cell."""

    @property
    def divisible(self) -> bool:
        """Whether it can be split at any position inside, and restored up to any."""

    @property
    def joins_in_place(self) -> bool:
        """Whether joining it with its neighbours copies nothing: it lies in cells, or only the last one is
        kept.
        """

    def detach(self) -> None:
        """Copy out what still lies in the cache, and release the cells and slots."""

    def drop(self) -> None:
        """Release the cells without copying; the snapshot cannot be used afterwards."""


def _shown(snapshot: Snapshot) -> str:
    place = "in the cache" if snapshot.in_cache else "copied out of the cache"
    size = f"{snapshot.nbytes:,} bytes"
    return f"<{type(snapshot).__name__} of [{snapshot.begin}, {snapshot.end}), {size}, {place}>"


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """The stored K, V and extras of one layer.

    ``tensors`` are the parts of K in its format, those of V unless K contains the values (see ``shape``), and
    the extras, (count, heads, width) each. Quantized parts are decoded to ``activations``.
    """

    tensors: tuple[ml.Tensor, ...]
    activations: ml.DType
    shape: LayerShape


Layers = Mapping[int, LayerSnapshot]


class InCache:
    """The cells that a snapshot refers to, in the buffers of its cache.

    ``buffers`` is the cache's own dictionary, by layer: a snapshot that was taken before the first ``put`` of
    a layer includes that layer too.
    """

    __slots__ = ("backend", "buffers", "pin", "table")

    def __init__(
        self,
        backend: ml.Backend,
        table: CellTable,
        buffers: Mapping[int, LayerBuffers],
        cells: np.ndarray | slice,
    ) -> None:
        """``cells``: an array of cells, or a run of them."""
        self.backend, self.table, self.buffers = backend, table, buffers
        self.pin: Pin = table.pin(cells)

    def __del__(self) -> None:
        if hasattr(self, "pin"):  # an interrupt may come before __init__ has finished
            self.table.drop_pin(self.pin)

    @property
    def nbytes(self) -> int:
        stored = sum([layer.nbytes for layer in self.buffers.values()])
        return stored // self.table.cells * self.pin.cells.size

    @property
    def frees(self) -> bool:
        """Whether releasing them would free a cell."""
        return bool((self.table.references[self.pin.cells] == 1).any())

    @property
    def awaited(self) -> list[int]:
        """The layers for which the current pass has not put all tokens yet."""
        table, cells = self.table, self.pin.cells
        return [i for i, layer in self.buffers.items() if table.awaited(layer.stamp, cells)]

    def check(self) -> None:
        """Raise SequenceLostError if the data was lost in a device failure."""
        if self.pin.lost:
            raise SequenceLostError(
                "snapshot: the device failed while its cells were being moved; compute the sequence again"
            )

    def part(self, start: int, stop: int) -> InCache:
        self.check()
        return InCache(self.backend, self.table, self.buffers, self.pin.cells[start:stop].copy())

    def read(self, views: bool = False) -> dict[int, LayerSnapshot]:
        """Copies of the data, in the layers that have all of it; with ``views``, views of it if the cells
        are a run.

        Raises OrderError if the current pass has not put some of it yet.
        """
        self.check()
        if self.awaited:
            raise OrderError(
                f"snapshot: layers {self.awaited} have yet to be given tokens that it has, in the pass under "
                "way; copy it out when all layers were put, or remove the tokens if the pass failed"
            )
        self.table.join_arrivals(self.pin.cells)
        taken, cells = self.table.taken, self.pin.cells
        whole = {i: layer for i, layer in self.buffers.items() if layer.lacks(taken, cells) is None}
        return read_layers(self.backend, whole, cells, views)


class AttentionSnapshot:
    """Keys and values of one sequence at ``positions``, all of which lie within ``[begin, end)``.

    ``layers`` are copies in the backend's memory, in the order of ``positions``; reading this attribute
    detaches the snapshot. ``keep`` is the number of first tokens that the cache keeps beside a window; None
    for a cache without a window.
    """

    __slots__ = ("__weakref__", "_layers", "begin", "dropped", "dtype", "end", "keep", "positions", "source")

    def __init__(
        self,
        begin: int,
        end: int,
        positions: np.ndarray,
        dtype: CacheFormat,
        keep: int | None,
        content: InCache | Layers,
    ) -> None:
        self.begin, self.end, self.positions = begin, end, positions
        self.dtype, self.keep = dtype, keep
        self.source = content if isinstance(content, InCache) else None
        self.dropped = False
        """Whether it has released its cells without a copy, so that nothing is left."""
        self._layers: Layers = {} if isinstance(content, InCache) else content

    __repr__ = _shown

    @property
    def layers(self) -> Layers:
        self.detach()
        return self._layers

    @property
    def in_cache(self) -> bool:
        return self.source is not None

    holds_cells = in_cache

    @property
    def frees_cells(self) -> bool:
        return self.source is not None and self.source.frees

    @property
    def backend(self) -> ml.Backend | None:
        """The backend whose memory it lies in; None if it is empty, or if its tensors do not tell."""
        if not self.positions.size:
            return None
        return _owner(tensors_of(self._layers)) if self.source is None else self.source.backend

    @property
    def whole(self) -> bool:
        """Whether it is the window at ``end``, which is indivisible."""
        return self.keep is not None

    @property
    def divisible(self) -> bool:
        return not self.whole

    @property
    def joins_in_place(self) -> bool:
        return self.source is not None or self.keep is not None

    @property
    def nbytes(self) -> int:
        if self.source is not None:
            return self.source.nbytes
        return sum(tensor.nbytes for tensor in tensors_of(self._layers))

    def detach(self) -> None:
        if self.source is None:
            return
        source = self.source
        self._layers = source.read()
        self.source = None
        source.table.unpin(source.pin)

    def drop(self) -> None:
        if self.source is not None:
            self.source.table.unpin(self.source.pin)
            self.source, self.dropped = None, True

    def release(self) -> None:
        """Detach it; if its content is lost, only release the cells."""
        if self.source is not None and self.source.pin.lost:
            self.source.table.unpin(self.source.pin)
        else:
            self.detach()

    def read(self, views: bool = False) -> Layers:
        """Its layers, copied if they lie in the cache; the snapshot itself stays there.

        With ``views``, they may be views of its cells, which nothing writes while it lies there.
        """
        return self._layers if self.source is None else self.source.read(views)

    def shapes(self) -> dict[int, LayerShape]:
        """The shape that each layer stores for a token."""
        layers = self._layers if self.source is None else self.source.buffers
        return {i: layer.shape for i, layer in layers.items()}


class StateSnapshot:
    """The states of one sequence at ``end``; to restore it, the sequence must hold all tokens before
    ``begin``.

    The states may still lie in the sequence's slot; they are copied before the slot is overwritten.
    """

    __slots__ = ("__weakref__", "begin", "end", "state")

    def __init__(self, begin: int, end: int, states: HeldStates | States) -> None:
        """The snapshot takes ownership of ``states`` that are tensors (1, *shape)."""
        self.begin, self.end = begin, end
        self.state = states if isinstance(states, HeldStates) else HeldStates(states)

    __repr__ = _shown

    @property
    def states(self) -> States:
        """(kind, layer) -> a copy (1, *shape); reading this attribute detaches the states."""
        return self.state.tensors

    @property
    def backend(self) -> ml.Backend | None:
        """As AttentionSnapshot.backend."""
        return _owner(self.state.held.values()) if self.end else None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes

    @property
    def in_cache(self) -> bool:
        return self.state.slot is not None

    @property
    def holds_cells(self) -> bool:
        return False

    frees_cells = divisible = holds_cells

    @property
    def joins_in_place(self) -> bool:
        return True

    def detach(self) -> None:
        self.state.detach()

    def drop(self) -> None:
        """Nothing to do: what it holds lies in no cell."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderSnapshot:
    """The encoder's output that came with a token of ``[begin, end)``, if any.

    ``layers`` maps a layer to K and V (length, kv_heads, dim), which are never written again and are
    shared with the cache.
    """

    begin: int
    end: int
    position: int | None
    length: int
    layers: Mapping[int, tuple[ml.Tensor, ml.Tensor]]

    __repr__ = _shown

    @property
    def backend(self) -> ml.Backend | None:
        """As AttentionSnapshot.backend."""
        return _owner(tensor for pair in self.layers.values() for tensor in pair)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    @property
    def in_cache(self) -> bool:
        return False

    holds_cells = frees_cells = in_cache

    @property
    def divisible(self) -> bool:
        return True

    joins_in_place = divisible

    def detach(self) -> None:
        """Nothing to do: what it holds lies in no cell."""

    def drop(self) -> None:
        """No effect either."""


class _Together:
    """The members of several snapshots taken together."""

    __slots__ = ()
    parts: tuple[Snapshot, ...]

    __repr__ = _shown

    @property
    def nbytes(self) -> int:
        return sum([part.nbytes for part in self.parts])

    @property
    def in_cache(self) -> bool:
        return any(part.in_cache for part in self.parts)

    @property
    def holds_cells(self) -> bool:
        return any(part.holds_cells for part in self.parts)

    @property
    def frees_cells(self) -> bool:
        return any(part.frees_cells for part in self.parts)

    @property
    def joins_in_place(self) -> bool:
        for part in self.parts:  # noqa: SIM110 - a generator takes longer
            if not part.joins_in_place:
                return False
        return True

    def detach(self) -> None:
        for part in self.parts:
            part.detach()

    def drop(self) -> None:
        for part in self.parts:
            part.drop()


@dataclass(slots=True, eq=False, repr=False)
class WrapperSnapshot(_Together):
    """A snapshot of each wrapped cache, in the wrapper's order, all of one ``[begin, end)``."""

    begin: int
    end: int
    parts: tuple[Snapshot, ...]

    @property
    def divisible(self) -> bool:
        return all(part.divisible for part in self.parts)


@dataclass(slots=True, eq=False, repr=False)
class SnapshotChain(_Together):
    """Consecutive snapshots of one sequence, each of which can be restored after those before it.

    Nothing is joined or copied: its members are those of the parts taken together.
    """

    parts: tuple[Snapshot, ...]

    divisible = False

    @property
    def begin(self) -> int:
        return self.parts[0].begin

    @property
    def end(self) -> int:
        return self.parts[-1].end


def unwrapped_snapshot(snapshot: Snapshot) -> list[Snapshot]:
    """The snapshots of the caches that a wrapper wraps, in their order, or the snapshot itself."""
    if isinstance(snapshot, WrapperSnapshot):
        return [one for part in snapshot.parts for one in unwrapped_snapshot(part)]
    return [snapshot]


def check_kind(op: str, cache: object, kind: type, snapshots: Sequence[object]) -> None:
    """Refuse snapshots of another kind of cache, and an empty list."""
    if not snapshots:
        raise InvalidRangeError(f"{op}: no snapshots; at least one must be given")
    if {*map(type, snapshots)} == {kind}:
        return
    for snapshot in snapshots:
        if not isinstance(snapshot, kind):
            raise InvalidRangeError(
                f"{op}: {type(cache).__name__} takes a {kind.__name__}, not {type(snapshot).__name__}"
            )


def check_inside(snapshot: Snapshot, at: int) -> int:
    """``at`` as an int; InvalidRangeError unless it lies within the snapshot or at one of its ends."""
    at = check_whole("split", "at", at)
    if not snapshot.begin <= at <= snapshot.end:
        raise InvalidRangeError(f"split: at {at}; the snapshot is [{snapshot.begin}, {snapshot.end})")
    return at


def replaces(child: Snapshot, parent: Snapshot) -> bool:
    """Whether ``child`` begins where ``parent`` does and ends no earlier, as a later snapshot of a window
    does.
    """
    return child.begin == parent.begin and child.end >= parent.end


def check_following(parent: Snapshot, child: Snapshot) -> None:
    if parent.end != child.begin:
        raise InvalidRangeError(
            f"merge: [{parent.begin}, {parent.end}) and [{child.begin}, {child.end}) are not adjacent"
        )


def read_layers(
    backend: ml.Backend, buffers: Mapping[int, LayerBuffers], cells: np.ndarray, views: bool = False
) -> dict[int, LayerSnapshot]:
    """Copies of ``cells`` in all layers, or ``views`` of a run of them; no layers if there are no cells."""
    if not cells.size:
        return {}
    is_run = bool((np.diff(cells) == 1).all())
    with backend.new_context() as ctx:
        where = int(cells[0]) if is_run else ctx.from_numpy(cells, ml.DType.I32)
        layers = {}
        for i, own in buffers.items():
            place = ctx.layer(i)
            if views and isinstance(where, int):
                parts = own.stored_views(place, where, cells.size)
            else:
                parts = own.read_stored(place, where, cells.size)
            layers[i] = LayerSnapshot(parts, own.activations, own.shape)
        ctx.compute(*tensors_of(layers))
    return layers


def tensors_of(layers: Layers) -> Iterable[ml.Tensor]:
    return (tensor for layer in layers.values() for tensor in layer.tensors)


def _owner(tensors: Iterable[ml.Tensor]) -> ml.Backend | None:
    return next((getattr(tensor, "backend", None) for tensor in tensors), None)


def sliced(ctx: ml.Context, layers: Layers, start: int, stop: int) -> dict[int, LayerSnapshot]:
    """Copies of the entries ``[start, stop)``; no layers if the range is empty."""
    cut: dict[int, LayerSnapshot] = {}
    for i, layer in layers.items() if stop > start else ():
        place = ctx.layer(i)
        parts = (compact(place, tensor.slice(place, 0, start, stop)) for tensor in layer.tensors)
        cut[i] = replace(layer, tensors=tuple(parts))
    return cut


def entries(ctx: ml.Context, tensor: ml.Tensor, some: slice | np.ndarray) -> ml.Tensor:
    """The entries ``some`` (ascending indices or a slice; at least one) along axis 0; a view if they are a
    range.
    """
    if isinstance(some, slice):
        return tensor if some.stop == tensor.shape[0] else tensor.slice(ctx, 0, 0, some.stop)
    first, stop = int(some[0]), int(some[-1]) + 1
    if stop - first > some.size:
        return tensor.rows(ctx, some.tolist())
    return tensor if stop - first == tensor.shape[0] else tensor.slice(ctx, 0, first, stop)


def compact(ctx: ml.Context, tensor: ml.Tensor) -> ml.Tensor:
    """A contiguous copy whose axes have the same order in memory as those of the tensor."""
    axes = sorted(range(len(tensor.shape)), key=lambda axis: -tensor.strides[axis])
    return tensor.permute(ctx, *axes).contiguous(ctx).permute(ctx, *(axes.index(i) for i in range(len(axes))))


def joined(ctx: ml.Context, first: Layers, second: Layers) -> dict[int, LayerSnapshot]:
    whole: dict[int, LayerSnapshot] = {}
    for i, layer in first.items():
        place = ctx.layer(i)
        pairs = zip(layer.tensors, second[i].tensors, strict=True)
        whole[i] = replace(layer, tensors=tuple(one.concat(place, other, 0) for one, other in pairs))
    return whole
