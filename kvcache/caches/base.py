"""What all caches have in common.

``PreparedCalls``: calls on sequences that are checked first and do all or nothing, for every cache.
``ManagedSnapshots``: the snapshot calls of a cache that has a snapshot manager. ``BoundCache``: the backend,
the configuration and the order of calls, for caches that own tensors.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from threading import get_ident
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

import ml
from kvcache.attention.batch import check_sequence
from kvcache.cache import (
    CacheDType,
    ClosedError,
    InvalidRangeError,
    NotSupportedError,
    OrderError,
    check_thread,
    check_whole,
)
from kvcache.caches.one_thread import PassOfThread, one_thread
from kvcache.caches.sequences import drop_middle
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import Snapshot, check_kind
from kvcache.storage.formats import CacheFormat

P = TypeVar("P", bound=PassOfThread)
S = TypeVar("S", bound=Snapshot)


def _as_int(value: Any) -> Any:
    """A NumPy integer as a Python int, whose differences cannot overflow; anything else is returned
    unchanged.
    """
    return int(value) if isinstance(value, np.integer) else value


class SnapshotManager(Protocol[S]):
    """The part of a cache that takes, splits and joins snapshots."""

    kind: type[S]
    schedule: SnapshotSchedule[S]

    def merge(self, parent: S | None, child: S) -> S: ...
    def join(self, parts: Sequence[S]) -> S: ...
    def split(self, snapshot: S, at: int) -> tuple[S | None, S]: ...


class PreparedCalls(Generic[S]):
    """Calls that do all or nothing: ``prepare_...`` makes every check, and what it returns makes the change.

    One thread at a time: see kvcache.caches.one_thread.
    """

    def __init__(self) -> None:
        self._calls = threading.RLock()
        """Held by the thread that is planning or making a change."""

    def __getstate__(self) -> dict[str, Any]:
        """Omit the lock, which belongs to one process: a cache can be pickled before ``init``."""
        return {name: value for name, value in self.__dict__.items() if name != "_calls"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._calls = threading.RLock()

    @abstractmethod
    def foreign_pass(self) -> bool | None:
        """Whether another thread is in the middle of a pass.

        None: it is, but it has neither put nor read anything here yet. False if that thread has ended.
        """

    @abstractmethod
    def take_over(self) -> None:
        """Let this thread continue the current pass, if any, which another thread began.

        For callers that already serialize access, for example with a lock.
        """

    @abstractmethod
    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        """Make all checks of ``set_config``; the returned callable makes the change."""

    @abstractmethod
    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        """Make all checks of ``copy_prefix``; the returned callable makes the change."""

    @abstractmethod
    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        """Make all checks of ``remove``; the returned callable makes the change."""

    @abstractmethod
    def prepare_restore_snapshot(
        self, seq: int, snapshot: S, target: int | None = None
    ) -> Callable[[], None] | None:
        """Make all checks of ``restore``; the returned callable makes the change. None if it would return
        False.
        """

    @one_thread
    def set_config(self, config: ml.CacheConfig) -> None:
        """Lay out tensors as ``config`` says instead of as the backend prefers.

        Call it before ``init``, or after ``init`` while nothing is stored. Raises OrderError later.
        """
        if not isinstance(config, ml.CacheConfig):
            raise InvalidRangeError(f"set_config: {config!r:.60} is not an ml.CacheConfig")
        self.prepare_set_config(config)()

    @one_thread
    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Make ``dst_seq`` share positions ``[0, length)`` of ``src_seq``; no data is copied.

        ``dst_seq`` is emptied first. If ``src_seq`` is past ``length`` in a recurrent cache, only the
        positions up to the nearest earlier checkpoint are shared: ``offset(dst_seq)`` says where ``dst_seq``
        continues.
        """
        self.prepare_copy_prefix(*map(_as_int, (src_seq, dst_seq, length)))()

    @one_thread
    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Remove positions ``[begin, end)`` of a sequence; ``end`` None: to its end.

        Tokens from ``end`` on move down by ``end - begin``, and a shift function re-encodes their keys,
        ``max_batch`` at a time. If that fails after some keys were written, this sequence alone is lost:
        every later use of it raises SequenceLostError. An encoder's output is removed with the token that it
        came with. For recurrent states see StateCache.

        Raises NotSupportedError if tokens would have to move and the cache has no shift function, if one of
        them is shared, or if a window could not continue afterwards.
        """
        self.prepare_remove(_as_int(seq), _as_int(begin), None if end is None else _as_int(end))()

    @one_thread
    def restore(self, seq: int, snapshot: S, target: int | None = None) -> bool:
        """Make the sequence hold ``[0, target)``, using the snapshot; ``target`` None: the snapshot's end.

        Whatever the sequence holds from ``snapshot.begin`` on is replaced. Data that still lies in this cache
        is shared, not copied. A snapshot of a wider window restores what this cache's window would hold.

        Returns False, without a change, if ``target`` lies outside the snapshot (a window or a state can be
        restored only at its end) or not right after one of its tokens, if ``[0, begin)`` is not stored, or if
        the window would be incomplete, as with a snapshot of a narrower window or of one that keeps fewer of
        the first tokens.

        Raises CacheFullError if there are not enough free cells, InvalidRangeError for a snapshot of another
        kind, backend, dtype or shape; the cache is then unchanged. If a device fails while data is being
        overwritten, the sequence is lost.
        """
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | np.integer)):
            raise InvalidRangeError(f"restore: target={target!r:.40}; it must be a whole number, or None")
        commit = self.prepare_restore_snapshot(seq, snapshot, None if target is None else int(target))
        if commit is not None:
            commit()
        return commit is not None


class ManagedSnapshots(Generic[S]):
    """The snapshot calls of a cache, made on its manager ``snapshots``; follows PreparedCalls among the
    bases.
    """

    snapshots: SnapshotManager[S]

    @abstractmethod
    def _bound(self, op: str) -> ml.Backend:
        """The backend; OrderError before ``init``, ClosedError after ``close``."""

    @abstractmethod
    def offset(self, seq: int) -> int:
        """The position of the next token of a sequence. Raises InvalidSequenceError for an unknown
        sequence.
        """

    @abstractmethod
    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """See PreparedCalls."""

    def shift_context(self, seq: int, keep: int) -> int:
        """Make room in a full sequence: keep the first ``keep`` tokens and remove the older half of the rest.

        The remaining tokens move down and their keys are re-encoded (see ``remove``); a recurrent state is
        not changed. Returns the number of tokens removed. Ollama's runner does this when a conversation
        outgrows its context.
        """
        return drop_middle(self, seq, keep, self.offset(seq))

    def schedule_snapshots(self, seq: int, positions: Iterable[int]) -> None:
        """Take a snapshot at each of ``positions`` when a batch reaches it, even in the middle of the batch.

        The snapshot at ``position`` is that of a sequence with exactly ``position`` tokens. Each snapshot
        begins where the one before it ends, the first at the sequence's current end. If ``remove`` takes away
        a position of a snapshot that was taken, the snapshot is dropped and scheduled again.
        ``skipped_snapshots`` lists those that could not be taken: of a window with a gap, or of a recurrent
        state inside a batch, unless the model delivers it (``StateCache.wanted_states``).

        Raises InvalidRangeError for a position that the sequence has already passed.
        """
        offset = self.offset(seq)
        self.snapshots.schedule.add(seq, positions, offset)

    def next_snapshot(self, seq: int) -> int | None:
        """The next position at which a batch of this sequence should end; None: anywhere."""
        self.offset(seq)
        return None

    def take_snapshots(self, seq: int, upto: int | None = None) -> list[S]:
        """The scheduled snapshots taken since the last call, by position, up to ``upto`` (None: all)."""
        return self._reached(seq).take(seq, upto)

    def snapshots_taken(self, seq: int) -> list[S]:
        """The snapshots that ``take_snapshots`` would return, without removing them."""
        return self._reached(seq).waiting(seq)

    def skipped_snapshots(self, seq: int) -> list[int]:
        """The scheduled positions, ascending, that were reached since the last call but have no snapshot."""
        return self._reached(seq).skipped(seq)

    def cancel_snapshots(self, seq: int, positions: Collection[int] | None = None) -> None:
        """Take no scheduled snapshots of a sequence at ``positions``.

        None: none at all, and those taken but not yet returned are discarded too.
        """
        self.offset(seq)
        if positions is None:
            self.snapshots.schedule.drop(seq)
        else:
            self.snapshots.schedule.cancel(seq, positions)

    def rolled_back(self, seq: int) -> int | None:
        """The lowest position removed since the last call; None if there was none.

        -1 if ``copy_prefix`` replaced the whole sequence (kvcache.snapshots.schedule.REPLACED). A caller that
        tracks a sequence's tokens must discard its record of them from that position on.
        """
        self.offset(seq)
        return self.snapshots.schedule.lowest_cut(seq)

    def _reached(self, seq: int) -> SnapshotSchedule[S]:
        """The schedule, after all due snapshots have been taken."""
        self.offset(seq)  # refuses an unknown sequence
        return self.snapshots.schedule

    def merge(self, parent: S | None, child: S) -> S:
        """Join ``[a, b)`` and ``[b, c)`` to ``[a, c)``; the result keeps the child's window or state."""
        return self._taking("merge", [child] if parent is None else [parent, child]).merge(parent, child)

    def join(self, parts: Sequence[S]) -> S:
        """``merge`` one or more snapshots, in order; in one step if all of them lie in this cache."""
        return self._taking("join", parts).join(parts)

    def split(self, snapshot: S, at: int) -> tuple[S | None, S]:
        """Split ``[a, c)`` into ``[a, at)`` and ``[at, c)``; (None, snapshot) if it is indivisible, or at
        ``a``.
        """
        return self._taking("split", [snapshot]).split(snapshot, at)

    def _taking(self, op: str, snapshots: Sequence[S]) -> SnapshotManager[S]:
        """The manager; refuses snapshots of another kind of cache, and an empty list."""
        self._bound(op)
        check_kind(op, self, self.snapshots.kind, snapshots)
        return self.snapshots


class BoundCache(PreparedCalls[S], Generic[P, S]):
    """A cache bound to a backend between ``init`` and ``close``, with a configuration and a current layer.

    Refuses calls before ``init``, after ``close`` or outside a pass. ``P`` is the type of the pass.
    """

    _max_sequences: int
    _dtype: CacheFormat

    def __init__(self) -> None:
        super().__init__()
        # Set on the instance rather than the class: Python reads instance attributes faster.
        self._backend: ml.Backend | None = None
        self._config: ml.CacheConfig | None = None
        self._closed = False
        self._layer = 0
        self._pass: P | None = None

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._backend is None:
            return f"<{name}, closed>" if self._closed else f"<{name}, not bound to a backend: call init>"
        facts = [f"{self._dtype} on {self._backend.name}", f"sequences: {self._max_sequences}"]
        return f"<{name}: {', '.join([*facts, *self._told()])}>"

    def _told(self) -> list[str]:
        return []

    def _bound(self, op: str) -> ml.Backend:
        """The backend; OrderError before ``init``, ClosedError after ``close``."""
        if self._backend is None:
            if self._closed:
                raise ClosedError(f"{op}: the cache is closed; call init to use it again")
            raise OrderError(f"{op}: the cache has not been initialized; call init first")
        return self._backend

    def _check_sequence(self, op: str, seq: int) -> None:
        """Refuse an unknown sequence, and any sequence of an unbound cache."""
        self._bound(op)
        check_sequence(op, seq, self._max_sequences)

    def _started(self, op: str) -> P:
        """The current pass. Raises OrderError if there is none, or if it belongs to another thread."""
        self._bound(op)
        current = self._pass  # read once: another thread may begin a pass meanwhile
        if current is None:
            raise OrderError(
                f"{op}: there is no current pass; call start_forward first. A call that changes sequences "
                "(remove, copy_prefix, restore, and with them PrefixCache.begin, Session.rewind and close) "
                "ends the pass: make it after the last layer"
            )
        check_thread(op, current.thread)
        return current

    def take_over(self) -> None:
        """Let this thread continue the current pass, which another thread began: see PreparedCalls."""
        if self._pass is not None:
            self._pass.thread = get_ident()

    def _check_copy(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Refuse unknown sequences, equal ones, and an invalid length."""
        for seq in (src_seq, dst_seq):
            self._check_sequence("copy_prefix", seq)
        check_whole("copy_prefix", "length", length)
        if src_seq == dst_seq:
            raise InvalidRangeError(
                f"copy_prefix: sequence {src_seq} to itself; use remove(seq, length) to shorten a sequence"
            )

    def _check_remove(self, seq: int, begin: int, end: int | None) -> None:
        """Refuse an unknown sequence, and an invalid range."""
        self._check_sequence("remove", seq)
        check_whole("remove", "begin", begin)
        check_whole("remove", "end", begin if end is None else end)
        if end is not None and end < begin:
            raise InvalidRangeError(f"remove: [{begin}, {end}); the range must satisfy 0 <= begin <= end")

    def _check_restore(self, seq: int, snapshot: Any, kind: type) -> None:
        """Refuse an unknown sequence, and a snapshot of another kind of cache, or on another backend."""
        self._check_sequence("restore", seq)
        check_kind("restore", self, kind, [snapshot])
        owner = snapshot.backend
        if owner is not None and owner is not self._backend:
            raise InvalidRangeError(
                f"restore: the snapshot lies on {owner!r}, which is not the open backend of this cache, "
                f"{self._backend!r}; pass it through kvcache.serialize and kvcache.deserialize"
            )

    @property
    def backend(self) -> ml.Backend:
        return self._bound("backend")

    @property
    def max_sequences(self) -> int:
        self._bound("max_sequences")
        return self._max_sequences

    def _check_init(self, backend: object, dtype: CacheDType, **sizes: int) -> tuple[CacheFormat, list[int]]:
        """The format of K and V, and the sizes. Refuses to bind twice, an object that is not a backend, a
        dtype that cannot be stored, and sizes below 1.
        """
        if self._backend is not None:
            raise OrderError("init: the cache is already initialized; close it first")
        if not hasattr(backend, "new_context"):
            raise InvalidRangeError(
                f"init: backend={backend!r:.60}; it must be an open backend, as ml.open_backend gives one"
            )
        stored = CacheFormat.of(dtype)
        return stored, [check_whole("init", name, value, least=1) for name, value in sizes.items()]

    @staticmethod
    def _check_stored(backend: ml.Backend, stored: CacheFormat) -> None:
        """Refuse a format whose dtypes the backend does not declare; a backend without ``features`` refuses
        it in put.
        """
        features = getattr(backend, "features", None)
        lacking = stored.dtypes - features.dtypes if isinstance(features, ml.Features) else ()
        if lacking:
            names = " and ".join(sorted(dtype.name for dtype in lacking))
            raise NotSupportedError(
                f"init: dtype={stored.name} is stored in {names}, which backend {backend.name!r} does not "
                "have; F32 can be stored on every backend"
            )

    @property
    def config(self) -> ml.CacheConfig:
        """The configuration in use: the one that was set, else the backend's, else the default."""
        if self._config is not None:
            return self._config
        backend = self._bound("config")
        if isinstance(backend, ml.SupportsCacheConfig):
            return backend.cache_config()
        return ml.CacheConfig()

    def set_layer(self, layer: int) -> None:
        """Select the layer for the following ``put``, ``get`` and ``attend``; layers count from 0."""
        current = self._pass
        if current is not None and current.thread != get_ident():
            check_thread("set_layer", current.thread)
        if type(layer) is not int or layer < 0:
            layer = check_whole("set_layer", "layer", layer)
        self._layer = layer

    def settings(self) -> dict[str, object]:
        """What determines a snapshot's content, JSON-able: caches with equal settings can share snapshots."""
        self._bound("settings")
        return {"kind": type(self).__name__, "dtype": self._dtype.name}
