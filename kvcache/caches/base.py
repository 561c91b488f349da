"""What caches have in common, beside their contents.

``PreparedCalls``: calls about sequences that are checked first and do all or nothing, for every cache.
``ManagedSnapshots``: the calls about snapshots of a cache that has a manager of them.
``BoundCache``: a backend, a configuration and the order of calls, for caches with tensors of their own.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
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
    """A number of NumPy as Python's, which has room for differences; anything else is checked as it is."""
    return int(value) if isinstance(value, np.integer) else value


class SnapshotManager(Protocol[S]):
    """The part of a cache that takes, cuts and joins snapshots."""

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
        """Held by the thread that plans or changes something."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock, which belongs to one process: before ``init`` a cache may be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_calls"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._calls = threading.RLock()

    @abstractmethod
    def foreign_pass(self) -> bool | None:
        """Whether another thread is in the middle of a pass.

        None: it is, and has put and read nothing here yet. False too where that thread has ended.
        """

    @abstractmethod
    def take_over(self) -> None:
        """Let this thread go on with the pass under way, which another began, as far as there is one.

        For callers that admit one thread at a time themselves, for example by a lock.
        """

    @abstractmethod
    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        """Check all that ``set_config`` may refuse; the callable returned then does it."""

    @abstractmethod
    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        """Check all that ``copy_prefix`` may refuse; the callable returned then does it."""

    @abstractmethod
    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        """Check all that ``remove`` may refuse; the callable returned then does it."""

    @abstractmethod
    def prepare_restore_snapshot(
        self, seq: int, snapshot: S, target: int | None = None
    ) -> Callable[[], None] | None:
        """Check all that ``restore`` may refuse; None where it would give False."""

    @one_thread
    def set_config(self, config: ml.CacheConfig) -> None:
        """Arrange tensors by ``config`` instead of what the backend asks for.

        Before ``init``, or after it while nothing has been stored; OrderError later.
        """
        if not isinstance(config, ml.CacheConfig):
            raise InvalidRangeError(f"set_config: {config!r:.60} is not an ml.CacheConfig")
        self.prepare_set_config(config)()

    @one_thread
    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Let ``dst_seq`` share positions ``[0, length)`` of ``src_seq``; no data is copied.

        ``dst_seq`` is emptied first. A recurrent cache whose ``src_seq`` has gone past ``length`` shares only
        up to the nearest checkpoint before it: ``offset`` says where ``dst_seq`` continues.
        """
        self.prepare_copy_prefix(*map(_as_int, (src_seq, dst_seq, length)))()

    @one_thread
    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Forget positions ``[begin, end)`` of a sequence; None: to its end.

        Tokens from ``end`` on move down by ``end - begin``, which takes a shift function; NotSupportedError
        without one, where such a token is shared, and where a window could not go on then. Their keys are
        re-encoded ``max_batch`` at a time; where that fails once some were written, the sequence is lost
        (SequenceLostError wherever it is used), and no other. Of an encoder's output goes what came with a
        token of the range; a recurrent cache: see its class.
        """
        self.prepare_remove(_as_int(seq), _as_int(begin), None if end is None else _as_int(end))()

    @one_thread
    def restore(self, seq: int, snapshot: S, target: int | None = None) -> bool:
        """Make the sequence hold ``[0, target)``, with what the snapshot has; None: all of it.

        What the sequence holds from ``snapshot.begin`` on is replaced. What still lies in this cache is
        shared, and nothing is copied. False, and nothing touched, where ``target`` lies outside the
        snapshot (a window or a state has its end alone) or not right behind a token of it, ``[0, begin)`` is
        not stored, or a window would be incomplete, as of a narrower one's snapshot, or of one that keeps
        fewer of the first tokens. Of what a wider one held comes back what this cache would hold. Raises
        CacheFullError where the cells do not suffice, InvalidRangeError for a snapshot of another kind,
        backend, dtype or shape; all or nothing then too. A device that fails while data that is replaced is
        overwritten leaves the sequence lost.
        """
        if target is not None and (isinstance(target, bool) or not isinstance(target, int | np.integer)):
            raise InvalidRangeError(f"restore: target={target!r:.40}; it must be a whole number, or None")
        commit = self.prepare_restore_snapshot(seq, snapshot, None if target is None else int(target))
        if commit is not None:
            commit()
        return commit is not None


class ManagedSnapshots(Generic[S]):
    """Calls about the snapshots of a cache, by its manager ``snapshots``; behind PreparedCalls."""

    snapshots: SnapshotManager[S]

    @abstractmethod
    def _bound(self, op: str) -> ml.Backend:
        """The backend; OrderError before ``init``, ClosedError after ``close``."""

    @abstractmethod
    def offset(self, seq: int) -> int:
        """Where the next token of a sequence belongs. InvalidSequenceError for an unknown one."""

    @abstractmethod
    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """See PreparedCalls."""

    def shift_context(self, seq: int, keep: int) -> int:
        """Make room in a full sequence: keep the first ``keep`` tokens, drop the older half of the rest.

        What stays moves down and its keys are re-encoded (see ``remove``); a recurrent state stays what it
        is. Returns how many tokens went. As Ollama's runner does when a conversation outgrows its context.
        """
        return drop_middle(self, seq, keep, self.offset(seq))

    def schedule_snapshots(self, seq: int, positions: Iterable[int]) -> None:
        """Take a snapshot at each of ``positions`` when a batch reaches it, also from its middle.

        They are those of a sequence that has just ``position`` tokens; each spans from the one before
        it, the first from where the sequence stands now. Positions that it has passed already are
        refused with InvalidRangeError. ``remove`` of a position that one has reached drops it, and
        schedules it anew. Where none can be taken ``skipped_snapshots`` says so: of a window with a gap, and
        of a recurrent state inside a batch, unless the model delivers it (``StateCache.wanted_states``).
        """
        offset = self.offset(seq)
        self.snapshots.schedule.add(seq, positions, offset)

    def next_snapshot(self, seq: int) -> int | None:
        """The next position at which a batch of this sequence should end; None: anywhere."""
        self.offset(seq)
        return None

    def take_snapshots(self, seq: int, upto: int | None = None) -> list[S]:
        """The scheduled snapshots that were taken since the last call, by position; those up to ``upto``."""
        return self._reached(seq).take(seq, upto)

    def snapshots_taken(self, seq: int) -> list[S]:
        """What ``take_snapshots`` would return; it stays there to be taken."""
        return self._reached(seq).waiting(seq)

    def skipped_snapshots(self, seq: int) -> list[int]:
        """The scheduled positions, ascending, that were reached since the last call and not taken."""
        return self._reached(seq).skipped(seq)

    def cancel_snapshots(self, seq: int) -> None:
        """Forget what was scheduled for a sequence, and what was taken of it and not handed over."""
        self.offset(seq)
        self.snapshots.schedule.drop(seq)

    def rolled_back(self, seq: int) -> int | None:
        """The lowest position that was removed since this was last asked; None: nothing was.

        -1 if ``copy_prefix`` replaced all of it (kvcache.snapshots.schedule.REPLACED). A caller that tracks
        a sequence's tokens must drop what it knows from that position on.
        """
        self.offset(seq)
        return self.snapshots.schedule.lowest_cut(seq)

    def _reached(self, seq: int) -> SnapshotSchedule[S]:
        """The schedule, with all that is due taken."""
        self.offset(seq)  # refuses an unknown sequence
        return self.snapshots.schedule

    def merge(self, parent: S | None, child: S) -> S:
        """Join ``[a, b)`` and ``[b, c)`` to ``[a, c)``; of a window or a state the child's is kept."""
        return self._taking("merge", [child] if parent is None else [parent, child]).merge(parent, child)

    def join(self, parts: Sequence[S]) -> S:
        """``merge`` of one or more, in order; in one step where all of them lie in this cache."""
        return self._taking("join", parts).join(parts)

    def split(self, snapshot: S, at: int) -> tuple[S | None, S]:
        """Cut ``[a, c)`` into ``[a, at)`` and ``[at, c)``; (None, snapshot) of what is whole, or at ``a``."""
        return self._taking("split", [snapshot]).split(snapshot, at)

    def _taking(self, op: str, snapshots: Sequence[S]) -> SnapshotManager[S]:
        """The manager; refuses snapshots of another kind of cache, and none at all."""
        self._bound(op)
        check_kind(op, self, self.snapshots.kind, snapshots)
        return self.snapshots


class BoundCache(PreparedCalls[S], Generic[P, S]):
    """A cache bound to a backend between ``init`` and ``close``, with a configuration and a current layer.

    Refuses calls that come before ``init``, after ``close``, or outside a pass; ``P`` is the pass.
    """

    _max_sequences: int
    _dtype: CacheFormat

    def __init__(self) -> None:
        super().__init__()
        # Of the instance from the start, not of the class: Python reads those faster.
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
        """Refuse an unknown sequence, and a cache that is not bound."""
        self._bound(op)
        check_sequence(op, seq, self._max_sequences)

    def _started(self, op: str) -> P:
        """The pass under way; OrderError where there is none, or it is another thread's."""
        self._bound(op)
        if self._pass is None:
            raise OrderError(f"{op}: there is no current pass; call start_forward first")
        check_thread(op, self._pass.thread)
        return self._pass

    def take_over(self) -> None:
        """Let this thread go on with the pass under way, which another began: see PreparedCalls."""
        if self._pass is not None:
            self._pass.thread = get_ident()

    def _check_copy(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Refuse unknown sequences, two that are the same, and an invalid length."""
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

    def _check_init(self, backend: object, dtype: CacheDType, **sizes: int) -> CacheFormat:
        """What K and V are stored in; refuses to bind twice, what is no backend, a dtype that they cannot
        have, and sizes below 1.
        """
        if self._backend is not None:
            raise OrderError("init: the cache is already initialized; close it first")
        if not hasattr(backend, "new_context"):
            raise InvalidRangeError(
                f"init: backend={backend!r:.60}; it must be an open backend, as ml.open_backend gives one"
            )
        stored = CacheFormat.of(dtype)
        for name, value in sizes.items():
            check_whole("init", name, value, least=1)
        return stored

    @staticmethod
    def _check_stored(backend: ml.Backend, stored: CacheFormat) -> None:
        """Refuse what the backend says that it has no dtypes for; one that does not say refuses it in put."""
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
        """What holds: the one set, else the backend's own, else the defaults."""
        if self._config is not None:
            return self._config
        backend = self._bound("config")
        if isinstance(backend, ml.SupportsCacheConfig):
            return backend.cache_config()
        return ml.CacheConfig()

    def set_layer(self, layer: int) -> None:
        """The layer that the next ``put``, ``get`` and ``attend`` are about; layers count from 0."""
        current = self._pass
        if current is not None and current.thread != get_ident():
            check_thread("set_layer", current.thread)
        if type(layer) is not int or layer < 0:
            check_whole("set_layer", "layer", layer)
        self._layer = layer

    def settings(self) -> dict[str, object]:
        """What decides the content of a snapshot, JSON-able: two caches that agree in it may share them."""
        self._bound("settings")
        return {"kind": type(self).__name__, "dtype": self._dtype.name}
