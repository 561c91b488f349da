"""Tiers below the device: host memory, and stores, which are written in the background."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

import ml
from kvcache.cache import InvalidRangeError, check_whole
from kvcache.prefix.break_even import BreakEven
from kvcache.prefix.outages import READING, WRITING, Outages
from kvcache.stores.buffers import WritableBuffer
from kvcache.stores.errors import SnapshotCorruptError, StoreError, StoreFullError, StoreUnavailableError
from kvcache.stores.keys import Chain
from kvcache.stores.protocol import AdvisedStore, MappedStore, Reader, ReadingStore, SnapshotStore
from kvcache.stores.serialized_snapshot import SerializedSnapshot, pack, read_outline, unpack
from kvcache.stores.sizes import parse_bytes
from ml.transfer import pinned_memory

__all__ = ["HostTier", "Lender", "Loan", "LookUp", "StoreTier", "StoreWrite", "WriteQueue"]

log = logging.getLogger("kvcache")

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory for snapshots that do not fit on the device.

    ``budget`` is a number of bytes or a size such as ``"2GiB"``, which becomes a number; None: no limit.

    >>> from kvcache import HostTier
    >>> HostTier("2GiB").budget
    2147483648
    """

    budget: int | None = None

    def __init__(self, budget: int | str | None = None) -> None:
        object.__setattr__(
            self, "budget", None if budget is None else parse_bytes(budget, "HostTier: budget")
        )


@dataclass(eq=False, slots=True)
class StoreWrite:
    """Serialized snapshots to be written to the stores, as (key, serialized snapshot) pairs."""

    entries: Iterable[tuple[str, SerializedSnapshot]]
    """The entries, which the writer cuts one by one."""
    serialized: SerializedSnapshot
    """The serialized snapshot from which they are cut."""
    owner: object = None
    parted: list[object] = field(default_factory=list)
    """Further owners of parts of it."""
    failed: bool = False
    cancelled: bool = False
    paths: Sequence[Sequence[str]] = ()
    """Keys to be marked as used with them, each path from its beginning: see ``StoreTier.touch``."""

    @property
    def nbytes(self) -> int:
        return self.serialized.nbytes


class LookUp(NamedTuple):
    """What the stores have of a prompt."""

    stored: int
    """The length of the stored prefix."""
    spared: int = 0
    """How many further tokens were not looked up or not read, because computing them is faster."""


class WriteQueue:
    """The queue of writes to the stores of a tier, executed by a thread.

    At most ``backlog`` bytes wait; beyond that ``submit`` blocks, so that entries never accumulate in memory.
    """

    def __init__(
        self,
        backlog: int,
        write: Callable[[str, SerializedSnapshot], bool],
        prefix: Callable[[Sequence[str]], int],
    ) -> None:
        """``write`` and ``prefix`` are those of StoreTier; the thread calls them."""
        self.backlog = backlog
        self.waiting = 0
        """Bytes that have not been written yet."""
        self.failed = 0
        """The number of writes in which a serialized snapshot could not be written to any store."""
        self._write, self._prefix = write, prefix
        self._finished: deque[StoreWrite] = deque()
        self._queue: queue.SimpleQueue[StoreWrite | Sequence[str] | None] = queue.SimpleQueue()
        self._touching = 0
        self._pending: set[StoreWrite] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, store_write: StoreWrite) -> None:
        """Submit a store write; blocks while the backlog is full (one store write always fits)."""
        self._start()
        with self._changed:
            self._changed.wait_for(lambda: self.has_room(store_write.nbytes))
            self.waiting += store_write.nbytes
            self._pending.add(store_write)
        self._queue.put(store_write)

    def touch(self, keys: Sequence[str]) -> None:
        """Let the thread mark these keys as used, the first, on which all depend, most of all."""
        self._start()
        with self._changed:
            self._touching += 1
        self._queue.put(keys)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # A forked child has no such thread: the parent writes what was queued.
            self._queue, self.waiting, self._touching = queue.SimpleQueue(), 0, 0
            self._pending.clear()
            thread = threading.Thread(target=self._work, name="kvcache-store-write", daemon=True)
            thread.start()
            self._thread = thread

    def has_room(self, nbytes: int) -> bool:
        """Whether a store write of ``nbytes`` can be submitted without blocking."""
        return not self.waiting or self.waiting + nbytes <= self.backlog

    def finished(self) -> Iterator[StoreWrite]:
        """The writes that finished or failed since the last call."""
        while self._finished:
            yield self._finished.popleft()

    def flush(self) -> None:
        """Wait until everything submitted has been written."""
        if self.waiting or self._touching:
            self._start()
        with self._changed:
            self._changed.wait_for(lambda: not self.waiting and not self._touching)

    def cancel(self) -> None:
        """Cancel all submitted writes; waits for the entry being written."""
        with self._changed:
            for store_write in self._pending:
                store_write.cancelled = True
        self.flush()

    def close(self, timeout: float | None = None) -> bool:
        """Write what is left, and end the thread.

        Returns False if it has not ended after ``timeout`` seconds (None: wait without a limit).
        """
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _work(self) -> None:
        while (store_write := self._queue.get()) is not None:
            if not isinstance(store_write, StoreWrite):  # keys to mark as used
                self._prefix(store_write)
                with self._changed:
                    self._touching -= 1
                    self._changed.notify_all()
                continue
            try:
                self._write_entries(store_write)
            except Exception:
                store_write.failed = True
                log.exception("offload: %d bytes could not be written to a store", store_write.nbytes)
            self.failed += store_write.failed and not store_write.cancelled
            self._finished.append(store_write)
            with self._changed:
                self.waiting -= store_write.nbytes
                self._pending.discard(store_write)
                self._changed.notify_all()
            del store_write  # whose memory is free once it is taken from ``finished``

    def _write_entries(self, store_write: StoreWrite) -> None:
        for key, serialized in store_write.entries:
            if store_write.cancelled:
                store_write.failed = True
                return
            store_write.failed |= not self._write(key, serialized)
        for path in () if store_write.failed else store_write.paths:
            self._prefix(path)


class StoreTier:
    """One or more stores as one: read in order, written to all of them, now or by a thread (``writes``).

    For runtimes that keep their own prefixes and want only the stores; a PrefixCache makes its own from
    ``tiers``. A failing store only causes a warning and a miss; an unreachable one is left alone for a while
    (``kvcache.prefix.outages.Outages``). Any thread may call it, except that one thread at a time calls
    ``write_later`` and ``writes``.
    """

    def __init__(
        self,
        stores: Sequence[SnapshotStore],
        backlog: int,
        backend: ml.Backend | None = None,
        break_even: BreakEven | None = None,
    ) -> None:
        """At most ``backlog`` bytes wait for the thread (one entry always may).

        ``backend``: the backend that will read the entries, which determines the kind of memory.
        ``break_even`` decides which store is asked for how many tokens (None: every store, for any number).
        Raises InvalidRangeError for anything else than stores, or none.
        """
        self.stores = tuple(stores)
        if not self.stores or not all(isinstance(store, SnapshotStore) for store in self.stores):
            raise InvalidRangeError(
                f"StoreTier: stores={stores!r:.80}; it must be a list of at least one store (see open_store)"
            )
        check_whole("StoreTier", "backlog", backlog)
        self.break_even = break_even or BreakEven(always=True)
        self.writes = WriteQueue(backlog, self.write, self.prefix)
        self.written = 0
        """Serialized snapshots written since the start."""
        self.errors = dict.fromkeys(("read", "write", "corrupt", "full"), 0)
        """The number of failed calls by kind; calls skipped during an outage are not counted."""
        self.outages = Outages()
        self.on_drop: Callable[[str], None] | None = None
        """Called with the key of each dropped entry, by the thread that found it corrupt."""
        self._new_lender = Lender if backend is None else partial(Lender, partial(pinned_memory, backend))
        self._lender = self._new_lender()
        self._counting = threading.Lock()
        self._probe: threading.Thread | None = None

    # Writing.

    @property
    def away(self) -> bool:
        """Whether writes to all stores are currently suspended."""
        return all(self.outages.away(store, WRITING) for store in self.stores)

    def close(self, timeout: float | None = None) -> bool:
        """Write what is left, and end the threads. The stores belong to the caller and stay open.

        Returns False if something is unwritten after ``timeout`` seconds (None: wait without a limit).
        """
        if not self.writes.close(timeout):
            return False
        self.finish_probe()
        return True

    def finish_probe(self) -> None:
        if self._probe is not None:
            self._probe.join()

    def write(self, key: str, serialized: SerializedSnapshot) -> bool:
        """Write an entry now, in this thread; returns whether at least one store has it."""
        follows = "the snapshot will be computed again"
        written = [
            self._ask(store, WRITING, partial(self._put, store, key, serialized), follows)
            for store in self.stores
        ]
        return any(written)

    def write_later(self, key: str, serialized: SerializedSnapshot, owner: object = None) -> None:
        """Write an entry in the tier's thread; blocks while the backlog is full.

        The arrays must not change before the write is among ``writes.finished()``, with this ``owner``.
        """
        self.writes.submit(StoreWrite([(key, serialized)], serialized, owner))

    def _put(self, store: SnapshotStore, key: str, serialized: SerializedSnapshot) -> bool:
        try:
            if store.stat([key])[0] is None:
                store.put(key, pack(serialized))
                self.outages.took(store, serialized.nbytes)
                self.written += 1
        except StoreFullError as error:
            self._count("full")
            self.outages.full(store, serialized.nbytes, error)
            return False
        return True

    # Reading.

    def look_up(self, chain: Chain, floor: int, limit: int, divisible: bool) -> LookUp:
        """The longest prefix in (floor, limit] whose end is stored, or ``floor``.

        ``divisible`` content is stored up to every multiple of the chain's block size, so a run of these is
        looked up first; indivisible content may end anywhere.
        """
        best = there = floor
        for store in self.stores:
            if best >= limit:
                break
            decision, stored = self.break_even.decide(store, limit - best), limit
            if decision.fetch:
                answer = self._ask(store, READING, partial(self._look, store, chain, best, limit, divisible))
                if answer is None:
                    continue
                stored = answer
                if stored > best:
                    decision = self.break_even.decide(store, stored - best)
            elif self.outages.away(store, READING):
                continue
            if decision.fetch:
                best = max(best, stored)
            else:
                there = max(there, stored)
                log.debug("not fetched from %r, as computing is faster: %s", store, decision)
            if self.break_even.note(store, decision):
                self._start_probe(store, chain, floor, limit, divisible)
        return LookUp(best, max(0, there - best))

    def _look(self, store: SnapshotStore, chain: Chain, floor: int, limit: int, divisible: bool) -> int:
        with self.break_even.looking(store):
            return _longest(store, chain, floor, limit, divisible)

    def _start_probe(self, store: SnapshotStore, *where: Any) -> None:
        """Start a thread that reads one entry that was not fetched, to measure the store's current speed."""
        if self._probe is None or not self._probe.is_alive():
            probe = threading.Thread(
                target=self._measure, args=(store, *where), name="kvcache-probe", daemon=True
            )
            try:
                probe.start()
            except RuntimeError as error:  # the system cannot start another thread
                log.info("probe: %s", error)
                return
            self._probe = probe

    def _measure(self, store: SnapshotStore, chain: Chain, floor: int, limit: int, divisible: bool) -> None:
        try:
            stored = self._look(store, chain, floor, limit, divisible)
            if stored > floor:
                block_end = floor - floor % chain.block_size + chain.block_size
                end = min(block_end, stored) if divisible else stored
                loan = Loan(self._lender)
                self._copy(store, chain.at(end), loan)
                loan.give_back()
        except Exception as error:  # handled by whoever next calls the store
            log.info("probe: %s", error)

    def prefix(self, keys: Sequence[str]) -> int:
        """The number of leading keys that are stored: as far as the first store has them, then the next
        one.
        """
        count = 0
        for store in self.stores:
            if count < len(keys):
                count += self._ask(store, READING, partial(store.prefix, keys[count:])) or 0
        return count

    def stored(self, keys: Sequence[str]) -> list[bool]:
        known = [False] * len(keys)
        for store in self.stores:
            missing = [i for i, has in enumerate(known) if not has]
            if missing:
                asked = [keys[i] for i in missing]
                there = self._ask(store, READING, partial(_have, store, asked)) or [False] * len(asked)
                for i, has in zip(missing, there, strict=True):
                    known[i] = has
        return known

    def lacking(self, keys: Sequence[str]) -> list[bool]:
        """The entries that every store reports as missing; none if a store does not answer."""
        lacking = [True] * len(keys)
        for store in self.stores if keys else ():
            there = self._ask(store, READING, partial(_have, store, keys))
            if there is None:
                return [False] * len(keys)
            lacking = [lacks and not has for lacks, has in zip(lacking, there, strict=True)]
        return lacking

    def entries(self, keys: Sequence[str]) -> Generator[SerializedSnapshot | None, None, None]:
        """Serialized snapshots by their keys, in order, each valid until the next one is requested.

        If a store provides its bytes in place, they are not copied; otherwise a thread reads the next entry
        while one is being used.
        """
        if len(keys) < 2 or all(isinstance(store, MappedStore) for store in self.stores):
            for key in keys:
                with self.serialized(key) as serialized:
                    yield serialized
            return
        with ThreadPoolExecutor(1, thread_name_prefix="kvcache-load-back") as pool:
            waiting = deque([pool.submit(self.read, keys[0])])
            for following in (*keys[1:], None):
                loan = waiting.popleft().result()
                if following is not None:
                    waiting.append(pool.submit(self.read, following))
                with loan as serialized:
                    yield serialized

    @property
    def reads_straight(self) -> bool:
        """Whether every store can read an entry's bytes directly to their destination."""
        return all(isinstance(store, ReadingStore) for store in self.stores)

    @property
    def reads_ahead(self) -> bool:
        """Whether a store must fetch an entry before returning it, or can be told to load it in advance."""
        return not self.reads_straight or any(isinstance(store, AdvisedStore) for store in self.stores)

    def advise(self, keys: Sequence[str]) -> None:
        """Tell the stores that support it to load what will be read soon."""
        for store in self.stores:
            if isinstance(store, AdvisedStore):
                follows = "the entries are read when their turn comes"
                self._ask(store, READING, partial(store.advise, keys), follows)

    def readers(self, key: str) -> Iterator[Reader]:
        """Readers of an entry's bytes, from each store that has it and supports readers; ``read`` reports
        failures.
        """
        for store in sorted(self.stores, key=self.break_even.pays, reverse=True):
            try:
                reader = store.reader(key) if isinstance(store, ReadingStore) else None
            except StoreError:
                continue
            except Exception as error:
                _warn("load back", error, "the serialized snapshot is read in another way")
                continue
            if reader is not None:
                yield _TimedReader(reader, store, self.break_even)

    def read_into(self, key: str, wanted: SerializedSnapshot) -> bool:
        """Read an entry directly into the arrays of ``wanted``, whose ``meta``, names, dtypes and shapes it
        must have.

        The arrays are writable, contiguous, and in the order in which they were written. False if no store
        has such an entry intact, or if those that do cannot be read without a copy (then use ``serialized``);
        the arrays are then unspecified.
        """
        return any(_filled(reader, wanted) for reader in self.readers(key))

    def serialized(self, key: str) -> Loan:
        """As ``read``, in place if a store provides its bytes."""
        return self._read(key, in_place=True)

    def read(self, key: str, reserve: Callable[[int], bool] | None = None) -> Loan:
        """An entry by its key, in lent memory; empty if no store has it intact. A corrupt entry is dropped.

        ``reserve`` receives the number of bytes, which are not lent again, and returns whether there is room.
        """
        return self._read(key, in_place=False, reserve=reserve)

    def _read(self, key: str, in_place: bool, reserve: Callable[[int], bool] | None = None) -> Loan:
        loan = Loan(self._lender if reserve is None else self._new_lender())
        # A store that is slower than computing comes last.
        for store in sorted(self.stores, key=self.break_even.pays, reverse=True):
            shown = in_place and isinstance(store, MappedStore)
            source = (
                partial(self._view, store, key) if shown else partial(self._copy, store, key, loan, reserve)
            )
            loan.serialized = self._ask(store, READING, partial(self._unpack, store, key, source))
            if loan.serialized is not None:
                return loan
        loan.give_back()
        return loan

    def _unpack(
        self, store: SnapshotStore, key: str, source: Callable[[], WritableBuffer | None]
    ) -> SerializedSnapshot | None:
        """The serialized snapshot; None if it is missing or corrupt (it is then dropped)."""
        try:
            packed = source()
            return None if packed is None else unpack(packed)
        except SnapshotCorruptError as error:
            self._count("corrupt")
            _warn("load back", error, "the prefix is computed again")
            _drop(store, key)
            self._tell_drop(key)
            return None

    def _ask(
        self,
        store: SnapshotStore,
        way: str,
        call: Callable[[], A],
        follows: str = "the prefix is computed instead",
    ) -> A | None:
        """The result of a store call; None if it fails, or if the store is in an outage.

        The outage is checked directly before the call, since a call that tries a store again must report the
        result. Only probes, readers and drops of entries bypass this.
        """
        if not self.outages.asks(store, way):
            return None
        try:
            answer = call()
        except Exception as error:
            answer = None
            self._count("read" if way == READING else "write")
            if isinstance(error, StoreUnavailableError):
                self.outages.failed(store, way, error)
                return None
            _warn("load back" if way == READING else "offload", error, follows)
        self.outages.worked(store, way)
        return answer

    def _count(self, kind: str) -> None:
        with self._counting:
            self.errors[kind] += 1

    def _view(self, store: Any, key: str) -> memoryview | None:
        with self.break_even.reading(store) as read:
            view: memoryview | None = store.view(key)
            read.nbytes = 0 if view is None else view.nbytes
        return view

    def _copy(
        self, store: SnapshotStore, key: str, loan: Loan, reserve: Callable[[int], bool] | None = None
    ) -> np.ndarray | None:
        with self.break_even.reading(store) as read:
            (stat,) = store.stat([key])
            if stat is None or (reserve is not None and not reserve(stat.nbytes)):
                return None
            memory = loan.memory(stat.nbytes)
            if not store.get_into(key, memory):
                return None
            read.nbytes = stat.nbytes
        return memory

    def delete(self, keys: Sequence[str]) -> bool:
        """Delete entries; returns whether all stores have done so. Those that a store lacks are skipped."""
        deleted = True
        for store in self.stores:
            there = self._ask(store, READING, partial(_have, store, keys), "they are not deleted")
            deleted &= there is not None
            for key in itertools.compress(keys, there or ()):
                gone = self._ask(store, WRITING, partial(_deleted, store, key), "it is not deleted")
                deleted &= gone is not None
                self._tell_drop(key)
        return deleted

    def drop(self, key: str) -> None:
        for store in self.stores:
            _drop(store, key)
        self._tell_drop(key)

    def _tell_drop(self, key: str) -> None:
        if self.on_drop is not None:
            self.on_drop(key)


_AT_ONCE = 4096
"""How many keys are requested at a time."""
_PROBES = 256
"""How many keys are requested at first, from the end of a prompt; the number doubles each time."""


class _TimedReader:
    """A reader whose bytes are counted for the link to its store."""

    def __init__(self, reader: Reader, store: SnapshotStore, break_even: BreakEven) -> None:
        self._reader, self._store, self._break_even = reader, store, break_even
        self.left = reader.left

    def fill(self, buffers: Sequence[WritableBuffer]) -> None:
        with self._break_even.reading(self._store) as read:
            self._reader.fill(buffers)
            read.nbytes, self.left = self.left - self._reader.left, self._reader.left

    def close(self) -> None:
        self._reader.close()


def _filled(reader: Reader, wanted: SerializedSnapshot) -> bool:
    """Whether the arrays were filled and verified; if not, ``read`` finds out why."""
    with contextlib.closing(reader):
        try:
            outline = read_outline(reader)
            arrays = wanted.arrays.values()
            if outline.meta != wanted.meta or reader.left != sum(array.nbytes for array in arrays):
                return False
            places = sorted(outline.places.items(), key=lambda item: item[1].begin)
            if [(name, place.dtype, place.shape) for name, place in places] != [
                (name, array.dtype, array.shape) for name, array in wanted.arrays.items()
            ]:
                return False
            reader.fill([array.reshape(-1).view(np.uint8).data for array in arrays])
            return True
        except StoreError:
            return False


def _deleted(store: SnapshotStore, key: str) -> bool:
    store.delete(key)
    return True


def _drop(store: SnapshotStore, key: str) -> None:
    try:
        store.delete(key)
    except Exception as error:
        _warn("load back", error, "it will be found again")


def _warn(what: str, error: Exception, follows: str) -> None:
    """Log a failure; a store may be third-party code, so unexpected errors include a traceback."""
    log.warning("%s: %s; %s", what, error, follows, exc_info=not isinstance(error, StoreError))


def _have(store: SnapshotStore, keys: Sequence[str]) -> list[bool]:
    have: list[bool] = []
    for start in range(0, len(keys), _AT_ONCE):
        asked = keys[start : start + _AT_ONCE]
        have += [stat is not None for _, stat in zip(asked, store.stat(asked), strict=True)]
    return have


def _longest(store: SnapshotStore, chain: Chain, floor: int, limit: int, divisible: bool) -> int:
    size = chain.block_size
    if not divisible:
        return _last_stored(store, chain, floor, limit)
    first = floor // size
    whole = (first + store.prefix(chain.aligned[first : limit // size])) * size
    reached = max(floor, whole)
    return _last_stored(store, chain, reached, max(reached, min(limit, whole + size - 1)))


def _last_stored(store: SnapshotStore, chain: Chain, floor: int, limit: int) -> int:
    """The last position in (floor, limit] whose key is stored, or ``floor``."""
    stop, count = limit, _PROBES
    while stop > floor:
        positions = range(stop, max(floor, stop - count), -1)
        stop, count = stop - count, 2 * count
        stats = store.stat([chain.at(position) for position in positions])
        for position, stat in zip(positions, stats, strict=True):
            if stat is not None:
                return position
    return floor


# Memory for entries: lent for a while, and reused once it is returned. Fresh memory costs a page fault per 4
# KiB, as much time as the reading itself.

KEPT = 3
"""How many free buffers are kept: one serialized snapshot is read while another is used."""
LARGEST = 64 << 20
"""The largest buffer that is kept, in bytes."""


def _pageable(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


class Lender:
    """Lends buffers and reuses them. Thread-safe."""

    def __init__(self, allocate: Callable[[int], np.ndarray] = _pageable) -> None:
        """``allocate(nbytes)``: new memory, uint8 (nbytes,)."""
        self._allocate = allocate
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> np.ndarray:
        """An uninitialized buffer of at least ``nbytes``, which belongs to the caller until ``put_back``."""
        with self._lock:
            for i in reversed(
                range(len(self._free))
            ):  # the last one is probably still in the processor's cache
                if self._free[i].size >= nbytes:
                    return self._free.pop(i)
        return self._allocate(nbytes)

    def put_back(self, buffer: np.ndarray) -> None:
        """Return a buffer, whose content is no longer used."""
        if buffer.size <= LARGEST:
            with self._lock:
                self._free = [*self._free, buffer][-KEPT:]


class Loan:
    """A serialized snapshot in lent memory, valid until ``give_back``; ``serialized`` is None if there is
    none.

    Memory that is not given back is not lent again; it is freed like any object.
    """

    __slots__ = ("_buffer", "_lender", "serialized")

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._buffer: np.ndarray | None = None
        self.serialized: SerializedSnapshot | None = None

    def memory(self, nbytes: int) -> np.ndarray:
        """Memory of exactly ``nbytes`` bytes for the serialized snapshot, replacing the loan's previous
        memory.
        """
        self.give_back()
        self._buffer = self._lender.take(nbytes)
        return self._buffer[:nbytes]

    def give_back(self) -> None:
        """Return the memory: the serialized snapshot is no longer used. A second call has no effect."""
        buffer, self._buffer, self.serialized = self._buffer, None, None
        if buffer is not None:
            self._lender.put_back(buffer)

    def __enter__(self) -> SerializedSnapshot | None:
        return self.serialized

    def __exit__(self, *raised: object) -> None:
        self.give_back()
