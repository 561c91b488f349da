"""What caches offer in the same words: calls that are checked first, and snapshots by a manager of theirs."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

import ml
from kvcache.cache import InvalidRangeError
from kvcache.caches.one_thread import one_thread
from kvcache.caches.sequences import drop_middle
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import Snapshot, check_kind

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
    """Calls that do all or nothing: what one may refuse its ``prepare_...`` refuses first.

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

        For those who see to it that one thread at a time calls, by a lock of their own say.
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

        What ``dst_seq`` held is emptied. A recurrent cache whose ``src_seq`` has gone past ``length`` shares
        as far as its nearest checkpoint before that: ``offset`` says where ``dst_seq`` goes on.
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
        """Where the next token of a sequence belongs. InvalidSequenceError for one that is none."""

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
        """What ``take_snapshots`` would hand over, and still has then."""
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

        -1 where ``copy_prefix`` replaced all of it (kvcache.snapshots.schedule.REPLACED). For those who keep
        account of a sequence's tokens: what they know from there on may be wrong.
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
