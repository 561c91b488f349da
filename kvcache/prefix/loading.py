"""Restoring serialized snapshots from stores or host memory directly into a cache's memory.

::

    hold free cells  ->  fill their memory, verified  ->  a snapshot in the cache, to be restored
         |                        |
         nothing is taken from    what turns out to be damaged is zeroed,
         a sequence or snapshot   and its cells are free again

Consecutive entries are restored in one step: first their headers are read, then their bytes, then the result
is restored once. Windows and recurrent states, which are indivisible, are taken from the last entry. If this
is not possible (scattered cells, memory that the host cannot write), entries are joined in host memory and go
through ``deserialize`` and ``restore``, which also report what is wrong.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import Any, Protocol

import numpy as np

import ml
from kvcache.cache import InvalidRangeError, SequenceLostError, SupportsReservation
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.tiers import StoreTier
from kvcache.prefix.tree_entry import TreeEntry, content_of
from kvcache.snapshots.check_serialized import StoredArray, check_meta
from kvcache.snapshots.cut import join_serialized, part_before
from kvcache.snapshots.reservation import CellReservation, IncomingSnapshot, StoredTensor, bits_of
from kvcache.snapshots.serialize import deserialize
from kvcache.snapshots.snapshot import Snapshot, SnapshotChain, StateSnapshot, WrapperSnapshot
from kvcache.storage.formats import CacheFormat
from kvcache.stores.errors import SnapshotCorruptError, StoreError
from kvcache.stores.keys import Chain
from kvcache.stores.protocol import Reader
from kvcache.stores.serialized_snapshot import SerializedSnapshot, read_outline

__all__ = ["load_back", "restore", "restore_serialized"]

GROUP = 32
"""The most serialized snapshots that are restored in one step, each with an open file."""
READERS = 2
"""How many entries are read at a time: a single core does not saturate the bandwidth of memory or a disk."""
RUN = 4096
"""In bytes; data in shorter runs than this is read in one piece and copied from there."""

log = logging.getLogger("kvcache")


def load_back(
    cache: Any,
    seq: int,
    store: StoreTier,
    chain: Chain,
    reached: int,
    ends: Sequence[int],
    told: Callable[[int], None],
    used: list[int],
) -> int:
    """Restore serialized snapshots of a store directly after the first ``reached`` positions; returns the
    position reached.

    ``ends`` are the ends of consecutive entries, the last one of each block: conversations that diverge
    inside a block leave several entries of it, each of which names its predecessor. An entry that is
    unavailable in this way ends the process; continuing there in the ordinary way finds out what is wrong.
    ``told``, which is called in this thread and must not raise, receives progress from time to time. ``used``
    receives the ends of all restored entries.
    """
    with contextlib.ExitStack() as stack:
        entries: list[_StoredEntry] = []
        for end in ends:
            before = entries[-1].end if entries else reached
            more = _back_to(store, chain, before, end, GROUP - len(entries), stack)
            if not more:
                break
            entries += more
        while entries:
            count = _land_some(cache, seq, entries, told)
            if not count:
                break
            used += [entry.end for entry in entries[:count]]
            reached, entries = entries[count - 1].end, entries[count:]
    return reached


def restore_serialized(
    cache: Any, seq: int, parts: Sequence[SerializedSnapshot], target: int | None = None, lent: bool = False
) -> Snapshot | None:
    """``cache.restore`` for checked snapshots, up to ``target``; indivisible ones are restored up to their
    end.

    Returns the restored snapshot, which usually lies in the cache by then; None if ``restore`` returns False.
    ``parts`` are consecutive, and restored in one step. Of windows and states, only the last one's are
    restored. A device may still be reading the arrays when this returns, unless they are ``lent``.

    Raises the errors of ``restore``, and SnapshotCorruptError for parts that cannot be joined.
    """
    snapshot, transfers = _landed(cache, seq, parts, target)
    if snapshot is None and len(parts) > 1:
        parts = [join_serialized(parts)]
        snapshot, transfers = _landed(cache, seq, parts, target)
    if snapshot is None:
        snapshot = deserialize(cache.backend, parts[0])
    try:
        return snapshot if cache.restore(seq, snapshot, target if snapshot.divisible else None) else None
    finally:
        for transfer in transfers if lent else ():
            transfer.wait()


def _landed(
    cache: Any, seq: int, parts: Sequence[SerializedSnapshot], target: int | None
) -> tuple[Snapshot | None, Sequence[ml.PageTransfer]]:
    """The parts as one snapshot in free cells, and the copies still in progress; None if that is not
    possible.
    """
    entries = _HeldEntry.of(parts, target)
    if not entries or _alike([entry.meta for entry in entries]) < len(entries):
        return None, ()
    last = deserialize(cache.backend, parts[-1]) if _is_whole(entries[-1].meta) else None
    approach = _Approach.find(cache, seq, entries, last)
    if approach is None:
        return None, ()
    return approach.take(approach.fill()), approach.transfers


# Serialized snapshots whose arrays have not been read yet.


_Tracks = Mapping[str, tuple["_Track", int, int]]
"""For each array, by name, its destination, and the cells [begin, end) there."""


class _Source(Protocol):
    @property
    def meta(self) -> Mapping[str, Any]:
        """The metadata of the snapshot."""

    @property
    def tensors(self) -> Mapping[str, StoredArray]:
        """Its arrays, as laid out in the serialized snapshot."""

    def positions(self, name: str) -> np.ndarray: ...
    @staticmethod
    def fill(entries: Sequence[Any], tracks: _Tracks) -> None:
        """Write each array except positions to its destination; everything is verified when this returns.

        ``entries`` are consecutive, at most as many as ``at_once`` returns.
        """

    @staticmethod
    def at_once(count: int) -> int:
        """How many of ``count`` entries one thread fills at a time."""


class _HeldEntry:
    """A serialized snapshot in host memory, or its first part."""

    __slots__ = ("arrays", "meta", "tensors")

    def __init__(self, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        self.meta, self.arrays, self.tensors = meta, arrays, arrays

    @classmethod
    def of(cls, parts: Sequence[SerializedSnapshot], target: int | None) -> list[_HeldEntry]:
        """The parts up to ``target``; none if they cannot be cut there."""
        entries = [cls(part.meta["snapshot"], part.arrays) for part in parts]
        if target not in (None, entries[-1].meta["end"]):
            try:
                entries[-1] = cls(*part_before(parts[-1], target))
            except SnapshotCorruptError:
                return []
        return entries

    def positions(self, name: str) -> np.ndarray:
        return self.arrays[name]

    @staticmethod
    def at_once(count: int) -> int:
        return -(-count // READERS)

    @staticmethod
    def fill(entries: Sequence[_HeldEntry], tracks: _Tracks) -> None:
        for name, (track, begin, end) in tracks.items():
            track.write(begin, end, [entry.arrays[name] for entry in entries])


class _StoredEntry:
    """An entry about to be read. Its positions, which come first, have been read."""

    def __init__(self, reader: Reader) -> None:
        """Raises SnapshotCorruptError and others unless it is a serialized snapshot, and the reader's
        errors.
        """
        self._reader = reader
        outline = read_outline(reader)
        places = sorted(outline.places.items(), key=lambda item: item[1][2:])
        self.tensors = {name: StoredTensor(place.shape, place.dtype) for name, place in places}
        first = takewhile(lambda item: item[1].dtype == np.int64, self.tensors.items())
        self._positions = {name: np.empty(shape, np.int64) for name, (shape, _) in first}
        reader.fill([*self._positions.values()])
        self.begin, self.end = check_meta("load back", outline.meta, self.tensors, self.positions, True)
        self.meta = outline.meta["snapshot"]

    def positions(self, name: str) -> np.ndarray:
        return self._positions[name]

    @staticmethod
    def at_once(count: int) -> int:
        return 1  # each has a reader of its own

    @staticmethod
    def fill(entries: Sequence[_StoredEntry], tracks: _Tracks) -> None:
        (entry,) = entries
        entry.read(tracks)

    def read(self, tracks: _Tracks) -> None:
        runs: list[memoryview] = []
        apart: list[tuple[np.ndarray, np.ndarray]] = []
        for name in self.tensors:
            if name in self._positions:
                continue
            track, begin, end = tracks[name]
            if track.has_runs(begin, end):
                runs += track.runs(begin, end)
            else:
                place = track.part(begin, end)
                apart.append((place, np.empty(place.shape, place.dtype)))
                runs.append(apart[-1][1].reshape(-1).view(np.uint8).data)
        self._reader.fill(runs)
        if self._reader.left:
            raise SnapshotCorruptError(
                f"load back: {self._reader.left} bytes behind the serialized snapshot's arrays"
            )
        for place, array in apart:
            np.copyto(place, array)


def _back_to(
    store: StoreTier, chain: Chain, reached: int, end: int, limit: int, stack: contextlib.ExitStack
) -> list[_StoredEntry]:
    """The entries of ``[reached, end)``, in order; none if there are more than ``limit`` or one is
    missing.
    """
    entries: list[_StoredEntry] = []
    while end > reached and len(entries) < limit:
        entry = next(_entries_at(store, chain.at(end), end, stack), None)
        if entry is None:
            return []
        entries.append(entry)
        end = entry.begin
    return entries[::-1] if end == reached else []


def _entries_at(store: StoreTier, key: str, end: int, stack: contextlib.ExitStack) -> Iterator[_StoredEntry]:
    for reader in store.readers(key):
        stack.callback(reader.close)
        nbytes = reader.left
        try:
            entry = _StoredEntry(reader)
        except Exception as error:
            _note(error)
            continue
        store.break_even.sized(nbytes, entry.end - entry.begin)
        if entry.begin < entry.end == end:
            yield entry


def _land_some(cache: Any, seq: int, entries: Sequence[_StoredEntry], told: Callable[[int], None]) -> int:
    """Restore the entries, or only the first if there is no run of cells for all; returns how many."""
    alike = _alike([entry.meta for entry in entries])
    for count in sorted({1, alike}, reverse=True):
        approach = _Approach.find(cache, seq, entries[:count])
        if approach is not None:
            filled = approach.fill(told)
            snapshot = approach.take(filled)
            return filled if snapshot is not None and cache.restore(seq, snapshot) else 0
    return 0


def _note(error: Exception) -> None:
    """Log an error; reading the entry in the ordinary way will find it again and handle it."""
    if isinstance(error, StoreError):
        log.info("load back: %s", error)
    else:
        log.warning("load back: %r; the serialized snapshot is read in another way", error, exc_info=error)


def _alike(metas: Sequence[Mapping[str, Any]]) -> int:
    """How many serialized snapshots, from the first on, differ only in their spans, according to their
    metadata.

    These belong to the same caches, layers, shapes and dtypes. Windows and states may differ, as only the
    last one's are restored.
    """
    expected = dict(metas[0])
    if size := len(expected.get("parts", ())):
        rows = takewhile(lambda parts: len(parts) == size, (meta.get("parts", ()) for meta in metas))
        return min(_alike(column) for column in zip(*rows, strict=True))
    if all(map(_is_whole, metas)):
        return len(metas)
    for count, meta in enumerate(metas):
        expected["begin"], expected["end"] = meta["begin"], meta["end"]
        if meta != expected:
            return count
    return len(metas)


def _is_whole(meta: Mapping[str, Any]) -> bool:
    """Whether it has a window or states."""
    return meta["kind"] == "states" or bool(meta.get("whole")) or any(map(_is_whole, meta.get("parts", ())))


# Destinations.


class _Track:
    """The memory of one tensor of a cache's layer in a run of cells, with axes in the order of entries."""

    __slots__ = ("_axis", "_bits", "_rows", "_step")

    def __init__(self, place: np.ndarray, axes: Sequence[int]) -> None:
        """``place`` is (cells, heads, ...)."""
        self._axis = axes.index(0)
        self._bits = bits_of(place).transpose(axes)
        self._step = self._bits.itemsize * math.prod(self._bits.shape[self._axis + 1 :])
        self._rows: list[memoryview] = []

    def has_runs(self, begin: int, end: int) -> bool:
        """Whether these cells lie in few enough runs."""
        size = self._bits.itemsize
        for axis in reversed(range(self._axis, self._bits.ndim)):
            if self._bits.strides[axis] != size and self._bits.shape[axis] != 1:
                return False
            size *= self._bits.shape[axis]
        return size > 0 and (not self._axis or (end - begin) * self._step >= RUN)

    def runs(self, begin: int, end: int) -> list[memoryview]:
        """The memory of these cells, in the element order of serialized snapshots."""
        if not self._rows:
            outer = self._bits.shape[: self._axis]
            rows = self._bits.reshape(*outer, -1).view(np.uint8)
            self._rows = [rows[where].data for where in np.ndindex(*outer)]
        first, last = begin * self._step, end * self._step
        return [row[first:last] for row in self._rows]

    def part(self, begin: int, end: int) -> np.ndarray:
        """These cells, as unsigned integers."""
        return self._bits[(slice(None),) * self._axis + (slice(begin, end),)]

    def write(self, begin: int, end: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy arrays there, one after another."""
        bits = [array.view(self._bits.dtype) for array in arrays]
        np.concatenate(bits, axis=self._axis, out=self.part(begin, end))


@dataclass(slots=True)
class _Approach:
    """Free cells for consecutive serialized snapshots, in all caches of a wrapper."""

    seq: int
    entries: Sequence[_Source]
    last: Snapshot | None = None
    """The last one, deserialized, if it has windows or states: then all entries are restored or none."""
    reservations: list[CellReservation] = field(default_factory=list)
    cuts: list[list[int]] = field(default_factory=list)
    """For each reservation, where in it each serialized snapshot begins, and the last one ends."""
    tracks: list[dict[str, _Track]] = field(default_factory=list)
    """For each reservation, the destinations by array name."""
    transfers: list[ml.PageTransfer] = field(default_factory=list)
    """For each reservation, the transfer if a device copies the arrays itself."""
    _layers: list[Sequence[Any]] = field(default_factory=list)
    """For each reservation, its layers as described by the first entry."""
    _finish: Callable[[int], Snapshot] | None = None

    @classmethod
    def find(
        cls, cache: object, seq: int, entries: Sequence[_Source], last: Snapshot | None = None
    ) -> _Approach | None:
        """Reserve cells for entries of one kind (``_alike``); None, with nothing reserved, if that is not
        possible.
        """
        made = cls(seq, entries, last)
        try:
            if made.prepare(cache):
                return made
        except ValueError:  # they differ: the ordinary way finds out what is wrong
            pass
        except BaseException:
            made.discard()
            raise
        made.discard()
        return None

    def fill(self, told: Callable[[int], None] | None = None) -> int:
        """Write the arrays; returns how many serialized snapshots, from the first on, were intact.

        ``told`` receives progress only of those that this thread writes.
        """
        if self.transfers:
            return len(self.entries)
        asking, count = threading.get_ident(), len(self.entries)
        step = self.entries[0].at_once(count)

        def fill(first: int) -> None:
            some = self.entries[first : first + step]
            some[0].fill(some, self._tracks_of(first, first + len(some)))
            if told is not None and threading.get_ident() == asking:
                told(some[-1].meta["end"])

        try:
            filled = _run_together([partial(fill, first) for first in range(0, count, step)])
            return min(filled * step, count)
        except BaseException:
            self.discard()
            raise

    def _tracks_of(self, first: int, stop: int) -> _Tracks:
        """The destinations of the entries [first, stop)."""
        return {
            name: (track, cuts[first], cuts[stop])
            for named, cuts in zip(self.tracks, self.cuts, strict=True)
            for name, track in named.items()
        }

    def take(self, count: int) -> Snapshot | None:
        """The first ``count`` serialized snapshots as a snapshot in the cache; None for none."""
        self.tracks.clear()
        if not count or self._finish is None or (self.last is not None and count < len(self.entries)):
            self.discard()
            return None
        return self._finish(count)

    def discard(self) -> None:
        self.tracks.clear()
        while self.reservations:
            self.reservations.pop().discard()

    def prepare(self, cache: object) -> bool:
        self._finish = self._visit(cache, [serialized.meta for serialized in self.entries], "", self.last)
        if self._finish is None:
            return False
        for reservation, layers in zip(self.reservations, self._layers, strict=True):  # all cells are held
            named = _named(reservation, layers)
            if named is None:
                return self._page_in()
            self.tracks.append(named)
        return True

    def _page_in(self) -> bool:
        """Let a device copy what the host cannot write; False if the device cannot do that either."""
        entry, *others = self.entries
        if others or not isinstance(entry, _HeldEntry):
            return False
        for reservation, layers in zip(self.reservations, self._layers, strict=True):
            arrays = {i: [(entry.arrays[name], axes) for name, axes in parts] for i, _, parts in layers}
            transfer = reservation.page_in(arrays)
            if transfer is None:
                return False
            self.transfers.append(transfer)
        return True

    def _visit(
        self, cache: Any, metas: Sequence[Mapping[str, Any]], at: str, last: Snapshot | None
    ) -> Callable[[int], Snapshot] | None:
        """Reserve cells for the entries that ``metas`` describe; returns a function that makes the snapshot
        of the first few.

        ``last`` is the last one, deserialized.
        """
        first, begin, ends = metas[0], metas[0]["begin"], [meta["end"] for meta in metas]
        if last is not None and first.get("whole"):
            return lambda count: last
        if [meta["begin"] for meta in metas] != [begin, *ends[:-1]]:
            return None
        if isinstance(last, StateSnapshot):
            states = StateSnapshot(begin, last.end, last.state)
            return lambda count: states
        if first["kind"] == "attention" and isinstance(cache, SupportsReservation):
            return self._attention(cache, first, ends, at)
        caches = getattr(cache, "caches", ())
        if first["kind"] != "wrapper" or {len(meta["parts"]) for meta in metas} != {len(caches)}:
            return None
        finish = []
        lasts = last.parts if isinstance(last, WrapperSnapshot) else (None,) * len(caches)
        for i, (inner, one) in enumerate(zip(caches, lasts, strict=True)):
            make = self._visit(inner, [meta["parts"][i] for meta in metas], f"{at}{i}/", one)
            if make is None:
                return None
            finish.append(make)
        return lambda count: WrapperSnapshot(begin, ends[count - 1], tuple(one(count) for one in finish))

    def _attention(
        self, cache: SupportsReservation, meta: Mapping[str, Any], ends: Sequence[int], at: str
    ) -> Callable[[int], Snapshot] | None:
        name = f"{at}positions"
        positions = [serialized.positions(name) for serialized in self.entries]
        cuts = [*accumulate((stored.size for stored in positions), initial=0)]
        layers = {
            i: tuple(self._stored(name, axes, cuts) for name, axes in parts) for i, _, parts in meta["layers"]
        }
        dtype, whole = CacheFormat.of(meta["dtype"]), meta["whole"]
        incoming = IncomingSnapshot(meta["begin"], ends[-1], np.concatenate(positions), dtype, whole, layers)
        reservation: CellReservation | None = cache.land(self.seq, incoming)
        if reservation is None:
            return None
        self.reservations.append(reservation)
        self.cuts.append(cuts)
        self._layers.append(meta["layers"])
        return lambda count: reservation.keep(cuts[count], ends[count - 1])

    def _stored(self, name: str, axes: Sequence[int], cuts: Sequence[int]) -> StoredTensor:
        """The tensor of all entries together, with axes in the cache's order; ValueError if they differ."""
        tensor = self.entries[0].tensors[name]
        along = axes.index(0)
        before, behind, dtype = tensor.shape[:along], tensor.shape[along + 1 :], tensor.dtype
        parts = [serialized.tensors[name] for serialized in self.entries]
        expected = [((*before, end - begin, *behind), dtype) for begin, end in pairwise(cuts)]
        if [(part.shape, part.dtype) for part in parts] != expected:
            raise ValueError(f"{name}: parts of other shapes or dtypes than {dtype} {tensor.shape}")
        shape = tuple(tensor.shape[axes.index(i)] for i in range(len(axes)))
        return StoredTensor((cuts[-1], *shape[1:]), tensor.dtype)


def _run_together(jobs: Sequence[Callable[[], None]]) -> int:
    """Run the jobs, READERS at a time; returns how many, from the first on, did not fail."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(READERS, len(jobs), cores)
    failed: list[int] = [len(jobs)]

    def run(first: int) -> None:
        for i in range(first, len(jobs), threads):
            try:
                jobs[i]()
            except Exception as error:
                _note(error)
                failed.append(i)
                return

    if threads < 2:
        run(0)
    else:
        with ThreadPoolExecutor(threads - 1, thread_name_prefix="kvcache-load-back") as pool:
            others = [pool.submit(run, first) for first in range(1, threads)]
            run(0)
        for other in others:
            other.result()
    return min(failed)


def _named(reservation: CellReservation, layers: Sequence[Any]) -> dict[str, _Track] | None:
    """A reservation's memory by array names of serialized snapshots."""
    places = reservation.open()
    if places is None:
        return None
    return {
        name: _Track(place, axes)
        for i, _, parts in layers
        for (name, axes), place in zip(parts, places[i], strict=True)
    }


# Content of nodes.

Nodes = Sequence[Node[TreeEntry]]


def restore(tree: PrefixTree, seq: int, nodes: Nodes, target: int) -> tuple[int, str] | None:
    """Restore the first of ``nodes`` up to ``target`` into a sequence; returns how many, and their tier.

    None if the content of the first one is unavailable.
    """
    for limit in (len(nodes), 1):  # one by one, to find out which of them is lost
        count, snapshots, serialized = _sources(tree, nodes[:limit])
        tier, some = None, nodes[:count]
        try:
            if some:
                tier = _restore(tree, seq, some, snapshots, serialized, min(some[-1].end, target))
        except (SnapshotCorruptError, SequenceLostError, InvalidRangeError) as error:
            if count == 1:
                log.warning("%s; the snapshot is dropped", error)
        if tier is not None:
            return count, tier
        if count < 2:
            break
    return None


def _sources(tree: PrefixTree, nodes: Nodes) -> tuple[int, list[Snapshot], list[SerializedSnapshot]]:
    """How many of the first nodes are restored in one step, and their content, of one kind; 0: none."""
    snapshots: list[Snapshot] = []
    serialized: list[SerializedSnapshot] = []
    before: Node[TreeEntry] | None = None
    count = 0
    for node in nodes:
        entry = node.data
        if entry is None or not entry.present:
            break
        if before is not None and entry.begin != before.end:
            break
        source = entry.snapshot or entry.serialized or content_of(entry)
        if isinstance(source, SerializedSnapshot):
            if snapshots or (before is not None and (tree.divisible or len(before.children) > 1)):
                break
            serialized.append(source)
        else:
            apart = not isinstance(source, SnapshotChain) and not source.joins_in_place
            if serialized or (apart and before is not None):
                break
            snapshots += source.parts if isinstance(source, SnapshotChain) else (source,)
            if apart:
                return 1, snapshots, []
        before = node
        count += 1
    return count, snapshots, serialized


def _restore(
    tree: PrefixTree,
    seq: int,
    nodes: Nodes,
    snapshots: Sequence[Snapshot],
    serialized: Sequence[SerializedSnapshot],
    target: int,
) -> str | None:
    cache, node = tree.cache, nodes[-1]
    last = node.data
    assert last is not None
    restored: Snapshot | None
    if snapshots:
        restored = snapshots[0] if len(snapshots) == 1 else cache.join(snapshots)
        if not cache.restore(seq, restored, target if restored.divisible else None):
            return None
    else:
        restored = restore_serialized(cache, seq, serialized, target)
        if restored is None:
            return None
    if last.snapshot is None and target == node.end and node.data is last:
        # It lies in the cache now: kept from there, the next one shares it, and all that it follows. A window
        # or a state was put there from copies, which are given up for what the sequence has.
        tree.keep_on_device(node, _shared(cache, seq, restored))
    return "device" if snapshots else "host"


def _shared(cache: Any, seq: int, restored: Snapshot) -> Snapshot:
    """What a sequence has of a snapshot that was just restored into it."""
    if restored.divisible and restored.in_cache:
        return restored
    caches = getattr(cache, "caches", ())
    if isinstance(restored, WrapperSnapshot) and len(caches) == len(restored.parts):
        pairs = zip(caches, restored.parts, strict=True)
        parts = tuple(_shared(inner, seq, part) for inner, part in pairs)
        return WrapperSnapshot(restored.begin, restored.end, parts)
    own: Snapshot = cache.snapshot(seq, restored.begin, restored.end)
    return own
