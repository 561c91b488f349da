"""Snapshots requested in advance, at positions that a sequence has not reached yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from kvcache.cache import InvalidRangeError, whole_numbers
from kvcache.snapshots.snapshot import AttentionSnapshot, Snapshot, unwrapped_snapshot

__all__ = ["REPLACED", "SnapshotSchedule", "bytes_inside", "thin_snapshots"]

S = TypeVar("S", bound=Snapshot)
REPLACED = -1
"""What ``lowest_cut`` returns if ``copy_prefix`` replaced the whole sequence."""


class SnapshotSchedule(Generic[S]):
    """For each sequence, the positions where snapshots are due, and those that were taken or skipped."""

    def __init__(self) -> None:
        self._due: dict[int, list[int]] = {}  # none of them empty
        self._taken: dict[int, list[S]] = {}
        self._skipped: dict[int, list[int]] = {}
        self._from: dict[int, int] = {}
        self._cuts: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, seq: int, positions: Iterable[int], offset: int) -> None:
        """Schedule snapshots at ``positions``, all of which must lie after ``offset``, the sequence's end."""
        wanted = whole_numbers("schedule_snapshots", "position", positions)
        if wanted and wanted[0] <= offset:
            raise InvalidRangeError(
                f"schedule_snapshots: position {wanted[0]} of sequence {seq}, which is already at {offset}; "
                "call snapshot to take one now"
            )
        if not wanted:
            return
        if not self._due.get(seq) and not self._taken.get(seq):
            self._from[seq] = offset
        self._due[seq] = sorted({*self._due.get(seq, ()), *wanted})

    def due(self, seq: int, offset: int) -> Iterator[tuple[int, int]]:
        """[begin, end) of the snapshots that a sequence of ``offset`` tokens has reached."""
        for position in [position for position in self._due.get(seq, ()) if position <= offset]:
            yield self._from[seq], position

    def positions(self, seq: int) -> Sequence[int]:
        """All scheduled positions, ascending."""
        return self._due.get(seq, ())

    def next(self, seq: int, offset: int) -> int | None:
        """The lowest scheduled position that a sequence of ``offset`` tokens has not reached."""
        return min((position for position in self._due.get(seq, ()) if position > offset), default=None)

    def taken(self, seq: int, snapshot: S) -> None:
        self._taken.setdefault(seq, []).append(snapshot)
        self._over(seq, snapshot.end)
        self._from[seq] = snapshot.end

    def skip(self, seq: int, position: int) -> None:
        """Record that no snapshot can be taken at ``position``."""
        self._skipped.setdefault(seq, []).append(position)
        self._over(seq, position)

    def _over(self, seq: int, position: int) -> None:
        due = self._due[seq]
        due.remove(position)
        if not due:
            del self._due[seq]

    def skipped(self, seq: int) -> list[int]:
        """Return the skipped positions and forget them."""
        return self._skipped.pop(seq, [])

    def waiting(self, seq: int) -> list[S]:
        """The snapshots that were taken and not returned yet."""
        return [*self._taken.get(seq, ())]

    def take(self, seq: int, upto: int | None = None) -> list[S]:
        """Return the snapshots that end at ``upto`` or before, and forget them."""
        taken = self._taken.pop(seq, [])
        if upto is None:
            return taken
        if later := [snapshot for snapshot in taken if snapshot.end > upto]:
            self._taken[seq] = later
        return [snapshot for snapshot in taken if snapshot.end <= upto]

    def cut(self, seq: int, position: int) -> None:
        """The sequence was cut at ``position``: snapshots of later positions are due again."""
        self._cuts[seq] = min(position, self._cuts.get(seq, position))
        self.undone(seq, position)

    def undone(self, seq: int, position: int) -> None:
        """As ``cut``, when a pass is undone: its tokens were never visible, so ``lowest_cut`` does not
        change.
        """
        self.again(seq, position)
        if self._from.get(seq, 0) > position:
            self._from[seq] = position

    def again(self, seq: int, position: int) -> None:
        """Take snapshots that end after ``position``, and were not returned yet, again."""
        taken, skipped = self._taken.get(seq, []), self._skipped.get(seq, [])
        gone = [snapshot for snapshot in taken if snapshot.end > position]
        again = [end for end in skipped if end > position]
        if gone:
            self._taken[seq] = [snapshot for snapshot in taken if snapshot.end <= position]
            self._from[seq] = min(snapshot.begin for snapshot in gone)
        if again:
            self._skipped[seq] = [end for end in skipped if end <= position]
        if gone or again:
            self._due[seq] = sorted({*self._due.get(seq, ()), *again, *(snapshot.end for snapshot in gone)})

    def replace(self, seq: int) -> None:
        """The sequence has been replaced by the prefix of another one."""
        self.drop(seq)
        self._cuts[seq] = REPLACED

    def lowest_cut(self, seq: int) -> int | None:
        """The lowest position of a ``cut`` since the last call, or REPLACED; None if there was none."""
        return self._cuts.pop(seq, None)

    def cancel(self, seq: int, positions: Collection[int]) -> None:
        """Take no snapshots at ``positions``, of which some may not be scheduled."""
        due = [position for position in self._due.pop(seq, ()) if position not in positions]
        if due:
            self._due[seq] = due

    def drop(self, seq: int) -> None:
        for by_sequence in (self._due, self._taken, self._skipped, self._from):
            by_sequence.pop(seq, None)


def thin_snapshots(ends: Sequence[int], sizes: Sequence[int], limit: int) -> list[int]:
    """Which snapshots inside a sequence stay, by index and ascending, if together they may have ``limit``
    bytes.

    The i-th ends at position ``ends[i]``, ascending, and has ``sizes[i]`` bytes; ``ends`` also has the end of
    the sequence. Those with the closest neighbours are left out first, so that the rest is evenly spaced.
    """
    stay, nbytes = [*range(len(sizes))], sum(sizes)
    while stay and nbytes > limit:
        points = [0, *(ends[i] for i in stay), ends[-1]]
        closest = min(range(len(stay)), key=lambda at: points[at + 2] - points[at])
        nbytes -= sizes[stay.pop(closest)]
    return stay


def bytes_inside(last: Snapshot) -> int:
    """How many bytes of windows and states inside a sequence are saved by default: as many as its ``last``
    snapshot has. With windows and without full attention, each window counts as all tokens up to its end.
    """
    parts = unwrapped_snapshot(last)
    if any(part.divisible and part.nbytes for part in parts):
        return last.nbytes
    windows = [part for part in parts if isinstance(part, AttentionSnapshot) and part.positions.size]
    missing = sum(part.nbytes * (part.end - part.positions.size) // part.positions.size for part in windows)
    return last.nbytes + missing
