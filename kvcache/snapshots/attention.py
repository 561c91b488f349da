"""Taking, restoring, splitting and joining snapshots of attention caches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.cache import (
    CacheFullError,
    InvalidRangeError,
    NotSupportedError,
    OrderError,
    SequenceLostError,
    check_whole,
)
from kvcache.snapshots.reservation import CellReservation, IncomingSnapshot
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import (
    AttentionSnapshot,
    InCache,
    check_inside,
    entries,
    joined,
    sliced,
    tensors_of,
)
from kvcache.storage.cell_storage import CellStorage
from kvcache.storage.cell_table import in_order, numbers

__all__ = ["AttentionSnapshots", "Window", "first_missing"]


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window: the stored part of a sequence belongs to one position and is indivisible."""

    size: int
    """How many tokens before itself a query sees."""
    memory: int
    """How many of the last tokens stay stored."""
    keep: int = 0
    """Positions below this stay stored permanently, and every later query sees them."""

    def held(self, stored: np.ndarray, end: int) -> np.ndarray:
        """The entries of ``stored`` (ascending) that a snapshot at ``end`` holds, always including the
        last.
        """
        low, kept, stop = np.searchsorted(stored, (end - max(self.memory, 1), self.keep, end))
        return np.concatenate((np.arange(min(kept, stop)), np.arange(max(kept, low), stop)))

    def reaches(self, stored: np.ndarray, position: int, kept: int | None = None) -> bool:
        """Whether ``stored`` (ascending) contains everything that a token at ``position`` would see.

        ``kept`` is the ``keep`` of the window that evicted the others, if it was another window. The
        positions between its first tokens and the rest are lost, whether or not this window would keep them::

            kept 2                 0 1 . . . 5 6 7      a token at 8 may see back to 5, and may keep 2
        """
        kept = self.keep if kept is None else kept
        if not stored.size or position > int(stored[-1]) + 1:
            return False
        sliding = stored[np.searchsorted(stored, kept) :]
        lost_below = int(sliding[0]) if sliding.size else kept
        if lost_below <= kept or (kept and position <= kept):
            return True
        return max(0, position - self.size) >= lost_below and min(position, self.keep) <= kept


def first_missing(stored: np.ndarray, window: Window | None) -> int:
    """The first position that ``stored`` (ascending, not empty) lacks; if none, one past the last.

    Positions that a window has evicted are not missing.
    """
    last, at = int(stored[-1]), 0 if window is None else int(stored.searchsorted(window.keep))
    if window is not None and at < min(window.keep, last + 1):
        return _first_gap(stored[:at], 0)
    rest = stored[at:]
    begin = 0 if window is None or not rest.size else int(rest[0])
    return last + 1 if not rest.size or last - begin == rest.size - 1 else _first_gap(rest, begin)


def _first_gap(positions: np.ndarray, begin: int) -> int:
    """The first position from ``begin`` on that is not among these (ascending)."""
    other = np.flatnonzero(positions != np.arange(begin, begin + positions.size))
    return begin + int(other[0]) if other.size else begin + positions.size


def nobody() -> None:
    """The ``owner`` of sequences that no PrefixCache uses."""


class AttentionSnapshots:
    """Takes, restores, joins and splits the snapshots of one attention cache, and copies them out to make
    room.

    It knows the cache's storage but not its passes: whoever restores a snapshot ends the current pass.
    """

    kind = AttentionSnapshot

    def __init__(self) -> None:
        self.window: Window | None = None
        """None: all of the past is stored."""
        self.schedule: SnapshotSchedule[AttentionSnapshot] = SnapshotSchedule()
        self.on_pressure: Callable[[int], bool | None] | None = None
        """See ``CausalCache.on_pressure``."""
        self.owner: Callable[[], object | None] = nobody
        """Returns the sessions of a PrefixCache that uses the sequences of this cache; None: nothing does."""
        self._storage: CellStorage | None = None
        self._lazy: list[weakref.ref[AttentionSnapshot]] = []
        self._crowded = 64
        """How long ``_lazy`` may grow before dead references are removed."""

    def bind(self, storage: CellStorage, window: Window | None) -> None:
        """Take snapshots of ``storage`` from now on; earlier snapshots of another storage have been copied
        out.
        """
        self._storage, self.window = storage, window

    def close(self) -> None:
        """Copy out snapshots that still lie in the cache, discard the schedule, and release the storage."""
        self.detach_all()
        self.schedule = SnapshotSchedule()
        self._storage = None

    @property
    def storage(self) -> CellStorage:
        assert self._storage is not None, "the cache is bound to no backend"
        return self._storage

    # Taking.

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> AttentionSnapshot:
        """See ``CausalCache.snapshot``."""
        storage, window, row = self.storage, self.window, self.storage.table.rows[seq]
        offset = row.last + 1
        begin = check_whole("snapshot", "begin", begin)
        end = offset if end is None else check_whole("snapshot", "end", end)
        if not begin <= end <= offset:
            raise InvalidRangeError(
                f"snapshot: [{begin}, {end}) of sequence {seq}; the range must satisfy 0 <= begin <= "
                f"end <= {offset}"
            )
        if row.lost:
            raise SequenceLostError(
                f"snapshot: the data of sequence {seq} is lost; call remove({seq}, 0) and compute it again"
            )
        for layer, lacking in storage.missing(row.cells[: row.index(end)]):
            first = int(row.positions[: row.index(end)][lacking][0])
            raise OrderError(
                f"snapshot: layer {layer} lacks position {first} of sequence {seq}, as it was not put in the "
                f"pass that stored the token; call remove({seq}, {first}), or end the snapshot there"
            )
        some: slice | np.ndarray = slice(row.index(begin), row.index(end))
        stored = row.positions[: row.index(end)]
        if window is None and _next(stored, 0) != end:
            raise NotSupportedError(
                f"snapshot: position {end - 1} of sequence {seq} is not stored, so that no snapshot ends at "
                f"{end}; end it at {_next(stored, 0)}, or right behind another token that is stored"
            )
        if window is not None:
            begin, some = 0, window.held(row.positions, end)
            if end and not window.reaches(stored, end):
                raise NotSupportedError(
                    f"snapshot: sequence {seq} holds positions from {row.first}; a window that ends at "
                    f"{end} needs earlier ones"
                )
        source = InCache(storage.backend, storage.table, storage.buffers, row.cells[some].copy())
        return self._remember(begin, end, row.positions[some].copy(), source)

    def _remember(self, begin: int, end: int, positions: np.ndarray, source: InCache) -> AttentionSnapshot:
        keep = None if self.window is None else self.window.keep
        snapshot = AttentionSnapshot(begin, end, positions, self.storage.dtype, keep, source)
        if len(self._lazy) >= self._crowded:
            self._lazy = [ref for ref in self._lazy if (other := ref()) is not None and other.in_cache]
            self._crowded = max(64, 2 * len(self._lazy))
        self._lazy.append(weakref.ref(snapshot))
        return snapshot

    def reclaim(self, count: int) -> None:
        """Free ``count`` cells if snapshots hold enough of them; otherwise change nothing.

        Snapshots are copied out, oldest first and no more than necessary: first those that are the only
        holders of a cell, then those that share a cell with other snapshots only.
        """
        table = self.storage.table
        table.sweep()
        if table.free >= count or table.unowned < count:
            return
        while table.free < count and self.on_pressure is not None:
            before = -table.free, len(table.pins)
            if not self.on_pressure(count - table.free):
                break
            table.sweep()
            if (-table.free, len(table.pins)) >= before:  # it is called again only if it did something
                break
        table.sweep()
        for snapshot, source in self._in_cache():
            if table.free >= count:
                return
            if source.frees and not source.awaited:
                snapshot.release()
        owned = table.owned()
        for snapshot, source in self._in_cache():
            if table.free >= count:
                return
            if not owned[source.pin.cells].all() and not source.awaited:
                snapshot.release()

    def _in_cache(self) -> Iterator[tuple[AttentionSnapshot, InCache]]:
        """The snapshots that still lie in the cache, oldest first."""
        for ref in self._lazy:
            snapshot = ref()
            if snapshot is not None and snapshot.source is not None:
                yield snapshot, snapshot.source

    def detach_all(self) -> None:
        """Copy out all snapshots that still lie in the cache; what the device can no longer return is
        lost.
        """
        for snapshot, source in self._in_cache():
            try:
                snapshot.detach()
            except Exception:
                source.pin.lost = True
        self._lazy = []

    def detach_shared(self, cells: np.ndarray) -> None:
        """Copy out the snapshots that hold one of ``cells``, which are about to change."""
        table = self.storage.table
        table.sweep()
        if not table.pins:
            return
        marked = np.zeros(table.cells, dtype=bool)
        marked[cells] = True
        for snapshot, source in self._in_cache():
            if marked[source.pin.cells].any():
                snapshot.release()

    def capture(self, seq: int) -> None:
        """Take the due snapshots after a batch was placed, while all of its tokens are still stored."""
        for begin, end in self.schedule.due(seq, self.storage.table.rows[seq].last + 1):
            try:
                self.schedule.taken(seq, self.snapshot(seq, begin, end))
            except (NotSupportedError, OrderError, SequenceLostError):  # gaps, or a failed pass or device
                self.schedule.skip(seq, end)

    # Restoring.

    def prepare_restore_snapshot(
        self, seq: int, snapshot: AttentionSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        """Make all checks of ``restore``; the returned callable makes the change. None if it would return
        False.
        """
        end = snapshot.end if target is None else target
        table, row = self.storage.table, self.storage.table.rows[seq]
        count = int(np.searchsorted(snapshot.positions, end))
        window, stored = self.window if snapshot.whole else None, snapshot.positions[:count]
        if _next(stored, snapshot.begin) != end or (row.lost and snapshot.begin):
            return None
        if row.index(snapshot.begin) != snapshot.begin:
            return None
        if window is not None and end and not window.reaches(stored, end, snapshot.keep):
            return None
        self._check(snapshot)
        source = snapshot.source
        shares = source is not None and source.table is table
        some = slice(count) if window is None else window.held(stored, end)
        if source is not None:
            source.check()
        if not shares:
            self._check_room(seq, snapshot.begin, stored[some].size)

        def commit() -> None:
            if shares and snapshot.source is not None:
                self._share(seq, snapshot, some)
            else:
                if shares:  # copied out since it was prepared, or dropped
                    self._check(snapshot)
                    self._check_room(seq, snapshot.begin, stored[some].size)
                self._put_back(seq, snapshot, some)
            self.schedule.cut(seq, snapshot.begin)
            row.lost, row.cut_off = False, 0

        return commit

    def land(self, seq: int, incoming: IncomingSnapshot) -> CellReservation | None:
        """See ``CausalCache.land``."""
        backend, table, buffers = self.storage.backend, self.storage.table, self.storage.buffers
        row, count = table.rows[seq], int(incoming.positions.size)
        follows = len(row) == row.last + 1 == incoming.begin and not row.lost
        known = incoming.dtype == self.storage.dtype and self.window is None and not incoming.whole
        if not (follows and known and count and CellReservation.is_known(backend)):
            return None
        self.reclaim(count)
        start = table.choose(seq, count) if table.free >= count else None
        if not isinstance(start, int):
            return None
        cells = numbers(start, start + count)
        table.join_arrivals(cells)

        def keep(cells: np.ndarray, end: int) -> AttentionSnapshot:
            count = cells.size
            source = InCache(backend, table, buffers, cells)
            return self._remember(incoming.begin, end, incoming.positions[:count], source)

        return CellReservation(backend, table, buffers, incoming, cells, keep)

    def full(self, count: int, op: str) -> CacheFullError:
        """The error for ``count`` cells that are not free."""
        table = self.storage.table
        if self.owner() is None:
            return CacheFullError(count, table.unowned, table.held(), op)
        remedy = "close one of PrefixCache.sessions, or use a larger capacity"
        return CacheFullError(count, table.unowned, table.held(), op, remedy)

    def _check_room(self, seq: int, begin: int, count: int) -> None:
        """Refuse ``count`` cells if there are too few, even counting the cells to be replaced and those of
        snapshots.
        """
        table, row = self.storage.table, self.storage.table.rows[seq]
        saved = table.save_row(seq)
        table.drop(seq, row.index(begin), len(row))
        try:
            self.reclaim(count)
            if count > table.free:
                raise self.full(count, "restore")
        finally:
            table.restore_row(seq, saved)

    def _share(self, seq: int, snapshot: AttentionSnapshot, some: slice | np.ndarray) -> None:
        """Share the cells of ``some`` of the snapshot's entries."""
        assert snapshot.source is not None
        table, row = self.storage.table, self.storage.table.rows[seq]
        table.drop(seq, row.index(snapshot.begin), len(row))
        pin, positions = snapshot.source.pin, snapshot.positions[some]
        cells = pin.cells[some]
        if positions.size:
            table.adopt(seq, positions, cells, pin.where if cells.size == pin.cells.size else None)

    def _put_back(self, seq: int, snapshot: AttentionSnapshot, some: slice | np.ndarray) -> None:
        """Replace the end of the row first, then copy the data; if that fails, the row is restored."""
        table, row = self.storage.table, self.storage.table.rows[seq]
        saved, cells_before = row.save_copy(), row.cells.copy()
        layers, shapes, positions = snapshot.read(), snapshot.shapes(), snapshot.positions[some]
        table.drop(seq, row.index(snapshot.begin), len(row))
        if not positions.size:
            return
        chosen = table.choose(seq, positions.size)
        cells = numbers(chosen, chosen + positions.size) if isinstance(chosen, int) else chosen
        table.take(seq, positions, cells)
        writing = False
        try:
            table.join_arrivals(cells)
            with self.storage.backend.new_context() as ctx:
                buffers = {
                    i: self.storage.buffers.get(i)
                    or self.storage.allocate(ctx, i, shapes[i], layer.activations)
                    for i, layer in layers.items()
                }
                where = chosen if isinstance(chosen, int) else ctx.from_numpy(cells, ml.DType.I32)
                writing = True
                for i, layer in layers.items():
                    place = ctx.layer(i)
                    parts = tuple(entries(place, tensor, some) for tensor in layer.tensors)
                    buffers[i].write_stored(place, where, parts)
                ctx.compute()
        except BaseException:
            table.restore_row(seq, saved)
            row.lost = row.lost or (writing and bool(np.isin(cells, cells_before).any()))
            raise
        self.storage.buffers.update(buffers)
        for i, layer_buffers in self.storage.buffers.items():
            if i not in buffers:
                layer_buffers.lack(table.taken, cells)
            elif layer_buffers.absent is not None:
                layer_buffers.absent[cells] = 0

    # Splitting and joining.

    def merge(self, parent: AttentionSnapshot | None, child: AttentionSnapshot) -> AttentionSnapshot:
        """Join ``[a, b)`` and ``[b, c)`` to ``[a, c)``; of windows, the child is kept."""
        if parent is None or child.whole:
            return child
        if parent.end != child.begin or parent.dtype != child.dtype or parent.whole:
            raise InvalidRangeError(
                f"merge: [{parent.begin}, {parent.end}) {parent.dtype.name} and "
                f"[{child.begin}, {child.end}) {child.dtype.name} cannot be merged; they must be "
                "adjacent and have the same dtype"
            )
        if not parent.positions.size or not child.positions.size:
            return self._spanning(child if child.positions.size else parent, parent.begin, child.end)
        positions = np.concatenate((parent.positions, child.positions))
        one, other = parent.source, child.source
        if one is not None and other is not None and one.table is other.table is self.storage.table:
            one.check()
            other.check()
            cells = np.concatenate((one.pin.cells, other.pin.cells))
            return self._remember(
                parent.begin, child.end, positions, InCache(one.backend, one.table, one.buffers, cells)
            )
        first, second = parent.read(), child.read()
        if first.keys() != second.keys():
            raise InvalidRangeError(f"merge: layers {[*first]} and {[*second]}")
        with self.storage.backend.new_context() as ctx:
            layers = joined(ctx, first, second)
            ctx.compute(*tensors_of(layers))
        return AttentionSnapshot(parent.begin, child.end, positions, parent.dtype, None, layers)

    def join(self, parts: Sequence[AttentionSnapshot]) -> AttentionSnapshot:
        """``merge`` one or more snapshots, in order; in one step if all of them lie in this cache."""
        first, last, table = parts[0], parts[-1], self.storage.table
        sources = [source for part in parts if (source := part.source) is not None and source.table is table]
        follow = [part.end for part in parts[:-1]] == [part.begin for part in parts[1:]]
        if len(parts) == 1 or not follow or len(sources) < len(parts) or self.window is not None:
            return functools.reduce(self.merge, parts)
        pins = [source.pin for source in sources]
        if any([pin.lost for pin in pins]):  # noqa: C419 - a generator takes longer than all of them
            next(source for source in sources if source.pin.lost).check()
        joined = InCache(sources[0].backend, table, sources[0].buffers, in_order(pins))
        if (
            joined.pin.cells.size == last.end - first.begin
        ):  # no gaps: generating the numbers is faster than copying them
            positions = numbers(first.begin, last.end)
        else:
            positions = np.concatenate([part.positions for part in parts])
        return self._remember(first.begin, last.end, positions, joined)

    def _spanning(self, snapshot: AttentionSnapshot, begin: int, end: int) -> AttentionSnapshot:
        """The same content, labelled ``[begin, end)``."""
        source, positions = snapshot.source, snapshot.positions
        if source is not None and source.table is self.storage.table:
            return self._remember(begin, end, positions, source.part(0, positions.size))
        return AttentionSnapshot(begin, end, positions, snapshot.dtype, snapshot.keep, snapshot.read())

    def split(
        self, snapshot: AttentionSnapshot, at: int
    ) -> tuple[AttentionSnapshot | None, AttentionSnapshot]:
        """Split ``[a, c)`` into ``[a, at)`` and ``[at, c)``; (None, snapshot) for a window, or at ``a``."""
        at = check_inside(snapshot, at)
        if snapshot.whole or at == snapshot.begin:
            return None, snapshot
        positions = snapshot.positions
        count, size = int(np.searchsorted(positions, at)), positions.size
        before, after = (
            positions[:count].copy(),
            positions[count:].copy(),
        )  # so that each can be released alone
        source = snapshot.source
        if source is not None and source.table is self.storage.table:
            return (
                self._remember(snapshot.begin, at, before, source.part(0, count)),
                self._remember(at, snapshot.end, after, source.part(count, size)),
            )
        layers = snapshot.read()
        with self.storage.backend.new_context() as ctx:
            first, second = (sliced(ctx, layers, *part) for part in ((0, count), (count, size)))
            ctx.compute(*tensors_of(first), *tensors_of(second))
        return (
            AttentionSnapshot(snapshot.begin, at, before, snapshot.dtype, None, first),
            AttentionSnapshot(at, snapshot.end, after, snapshot.dtype, None, second),
        )

    def _check(self, snapshot: AttentionSnapshot) -> None:
        """Refuse a snapshot that was dropped, or that was taken from another kind of cache."""
        if snapshot.dropped:
            raise SequenceLostError(
                f"restore: the snapshot of [{snapshot.begin}, {snapshot.end}) was dropped, and its cells are "
                "free for others; compute its tokens again"
            )
        dtype, buffers, whole = self.storage.dtype, self.storage.buffers, self.window is not None
        if snapshot.dtype != dtype or snapshot.whole is not whole:
            raise InvalidRangeError(
                f"restore: a snapshot of {snapshot.dtype.name}, whole={snapshot.whole}, into a cache of "
                f"{dtype.name}, whole={whole}"
            )
        layers = snapshot.shapes()
        if snapshot.positions.size and buffers.keys() - layers.keys():
            raise InvalidRangeError(
                f"restore: this cache stores layers {sorted(buffers)}, the snapshot {sorted(layers)}"
            )
        for i, shape in layers.items():
            layer = buffers.get(i)
            if layer is not None and layer.shape != shape:
                raise InvalidRangeError(f"restore: layer {i} stores {layer.shape}; the snapshot has {shape}")


def _next(stored: np.ndarray, begin: int) -> int:
    """The next position of a sequence that holds ``[0, begin)`` and then ``stored`` (ascending)."""
    return int(stored[-1]) + 1 if stored.size else begin
