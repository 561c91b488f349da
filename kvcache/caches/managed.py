"""What caches offer of snapshots that a manager of theirs takes: scheduled ahead, merged, joined, split."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import ml
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import Snapshot

__all__ = ["ManagedSnapshots", "SnapshotManager"]

S = TypeVar("S", bound=Snapshot)


class SnapshotManager(Protocol[S]):
    """The part of a cache that takes, cuts and joins snapshots."""

    schedule: SnapshotSchedule[S]

    def merge(self, parent: S | None, child: S) -> S: ...
    def join(self, parts: Sequence[S]) -> S: ...
    def split(self, snapshot: S, at: int) -> tuple[S | None, S]: ...


class ManagedSnapshots(Generic[S]):
    """Calls about the snapshots of a cache, by its manager ``snapshots``; goes behind BoundCache."""

    snapshots: SnapshotManager[S]

    @abstractmethod
    def _bound(self, op: str) -> ml.Backend:
        """The backend; OrderError before ``init``, ClosedError after ``close``."""

    @abstractmethod
    def offset(self, seq: int) -> int:
        """Where the next token of a sequence belongs. InvalidSequenceError for one that is none."""

    def schedule_snapshots(self, seq: int, positions: Iterable[int]) -> None:
        """Take a snapshot at each of ``positions`` when a batch reaches it, also from its middle.

        They are those of a sequence that has just ``position`` tokens; each spans from the one before
        it, the first from where the sequence stands now. Positions that it has passed already are
        refused with InvalidRangeError. ``remove`` of a position that one has reached drops it, and
        schedules it anew. Where none can be taken ``skipped_snapshots`` says so: of a window with a gap, and
        of a recurrent state inside a batch, which is never there to be copied.
        """
        offset = self.offset(seq)
        self.snapshots.schedule.add(seq, positions, offset)

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
        self._bound("merge")
        return self.snapshots.merge(parent, child)

    def join(self, parts: Sequence[S]) -> S:
        """``merge`` of one or more, in order; in one step where all of them lie in this cache."""
        self._bound("join")
        return self.snapshots.join(parts)

    def split(self, snapshot: S, at: int) -> tuple[S | None, S]:
        """Cut ``[a, c)`` into ``[a, at)`` and ``[at, c)``; (None, snapshot) of what is whole, or at ``a``."""
        self._bound("split")
        return self.snapshots.split(snapshot, at)
