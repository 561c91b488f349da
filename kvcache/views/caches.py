"""Pictures of a cache: which sequence and which snapshot holds what, who sees what in the pass under way.

Nothing is changed or copied out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvcache import CausalCache, ChunkedCache, EncoderCache, SlidingWindowCache, StateCache, WrapperCache
from kvcache.cache import ClosedError, NotSupportedError, OrderError
from kvcache.views.blocks import CellMap, CellRun, SequenceView
from kvcache.views.pictures import (
    CachePicture,
    EncoderEntry,
    EncoderView,
    MaskPicture,
    OtherView,
    Part,
    StatesView,
    StateView,
)


def render_cache(cache: Any) -> CachePicture:
    """As ``render``."""
    parts = tuple(_parts(cache))
    return CachePicture(type(cache).__name__, int(getattr(cache, "nbytes", 0)), parts)


def _parts(cache: Any) -> Iterator[Part]:
    if isinstance(cache, WrapperCache):
        for wrapped in cache.caches:
            yield from _parts(wrapped)
    elif isinstance(cache, StateCache):
        _check_bound(cache)
        yield _states(cache)
    elif isinstance(cache, EncoderCache):
        _check_bound(cache)
        yield _encoder(cache)
    elif isinstance(cache, CausalCache):
        yield _map_of(cache)
    else:
        yield OtherView(type(cache).__name__, int(getattr(cache, "nbytes", 0)))


def _check_bound(cache: Any) -> None:
    """OrderError or ClosedError for a cache that is bound to no backend."""
    try:
        assert cache.backend is not None
    except (OrderError, ClosedError) as error:
        raise type(error)(f"render: {error}") from error


def _map_of(cache: CausalCache) -> CellMap:
    _check_bound(cache)
    table = cache.storage.table
    labels, owners = _owners(cache)
    held_by = np.array([len(group) for group in owners])[labels]
    views = tuple(
        SequenceView(
            seq,
            tokens=len(row),
            first=row.first,
            last=row.last,
            shared=int((held_by[row.cells] > 1).sum()),
            visible=cache.visible(seq),
            runs=1 if row.contiguous else 1 + int((np.diff(row.cells) != 1).sum()),
            lost=bool(row.lost),
        )
        for seq, row in table.occupied()
    )
    name, note = type(cache).__name__, _note(cache)
    runs = _runs(cache, labels, owners)
    return CellMap(name, note, table.cells, cache.nbytes, views, runs, cache.step_reads())


def _note(cache: CausalCache) -> str:
    if isinstance(cache, SlidingWindowCache):
        kept = "all kept" if cache.kept is None else f"the last {cache.kept} kept"
        sinks = f"the first {cache.keep} and " if cache.keep and cache.kept is not None else ""
        return f"window {cache.window}, {sinks}{kept}"
    return f"chunks of {cache.chunk}" if isinstance(cache, ChunkedCache) else ""


def _owners(cache: CausalCache) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """A label for every cell, and the sequences that hold the cells of each label; 0 is nobody."""
    table = cache.storage.table
    labels = np.zeros(table.cells, dtype=np.int64)
    owners: list[tuple[int, ...]] = [()]
    for seq, row in table.occupied():
        found, where = np.unique(labels[row.cells], return_inverse=True)
        labels[row.cells] = len(owners) + where
        owners += [(*owners[label], seq) for label in found.tolist()]
    return labels, owners


def _runs(cache: CausalCache, labels: np.ndarray, owners: list[tuple[int, ...]]) -> tuple[CellRun, ...]:
    table = cache.storage.table
    snapshots = np.zeros(table.cells, dtype=np.int64)
    for pin in table.live_pins():
        snapshots[pin.cells] += 1
    positions = np.full(table.cells, -1, dtype=np.int64)
    for _, row in table.occupied():  # those that share a cell have it at one position
        positions[row.cells] = row.positions
    new = (np.diff(labels) != 0) | (np.diff(snapshots) != 0) | (np.diff(positions) != (labels[1:] > 0))
    edges = [0, *(np.flatnonzero(new) + 1).tolist(), table.cells]
    return tuple(
        CellRun(
            begin,
            end,
            owners[labels[begin]],
            int(snapshots[begin]),
            int(positions[begin]) if labels[begin] else None,
        )
        for begin, end in itertools.pairwise(edges)
    )


def _states(cache: StateCache) -> StatesView:
    rows = (
        StateView(seq, row.offset, row.slot, cache.checkpoints(seq), bool(row.lost))
        for seq, row in enumerate(cache.state_table.rows)
        if row.offset or row.lost or row.checkpoints
    )
    slots = cache.state_table.buffers.slots
    return StatesView("recurrent states and checkpoints", slots, cache.nbytes, tuple(rows))


def _encoder(cache: EncoderCache) -> EncoderView:
    sharing: dict[int, list[int]] = {}
    entries = {id(entry): entry for entry in cache.outputs.values()}
    for seq, entry in cache.outputs.items():
        sharing.setdefault(id(entry), []).append(seq)
    rows = (
        EncoderEntry(
            tuple(sorted(sharing[key])),
            entry.position,
            entry.length,
            len(entry.layers),
            sum(tensor.nbytes for pair in entry.layers.values() for tensor in pair),
        )
        for key, entry in entries.items()
    )
    return EncoderView(type(cache).__name__, cache.nbytes, tuple(rows))


# Masks.


def look_at_mask(cache: Any) -> MaskPicture:
    """The mask that ``get`` returns in the current pass, read from the cell table without making a tensor.

    For a WrapperCache, it is the mask of the selected layer type. Raises OrderError without a current pass,
    NotSupportedError for a cache without cells.
    """
    cache = _with_cells(cache)
    _check_bound(cache)
    try:
        seen, queries, cells = cache.pass_reads().seen()
    except OrderError as error:
        raise OrderError(f"render: {error}") from error
    who = tuple((seq, position) for seq, position in queries.tolist())
    return MaskPicture(type(cache).__name__, seen, who, cells)


def _with_cells(cache: Any) -> CausalCache:
    if isinstance(cache, WrapperCache):
        return _with_cells(cache.current)
    if isinstance(cache, CausalCache):
        return cache
    raise NotSupportedError(f"render: {type(cache).__name__} has no mask over cells")
