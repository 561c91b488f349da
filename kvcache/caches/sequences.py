"""Changes of an attention cache's sequences between passes: sharing, removing and moving tokens.

The cell table shares and releases cells; data is read and written only for tokens whose position changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from kvcache.attention.batch import SequenceTokens
from kvcache.attention.history import LowerBound, check_sees
from kvcache.cache import (
    ExtraShiftFunction,
    InvalidBatchError,
    InvalidRangeError,
    NotSupportedError,
    SequenceLostError,
    ShiftFunction,
    check_whole,
    whole_numbers,
)
from kvcache.snapshots.attention import AttentionSnapshots
from kvcache.storage import relocation as moving
from kvcache.storage.cell_table import CellTable


class SequenceEditor:
    """Shares, removes and moves tokens of one attention cache. Each call does all or nothing.

    It makes the checks that depend on stored tokens; the cache has already checked the arguments themselves,
    and ends the current pass.
    """

    def __init__(
        self,
        snapshots: AttentionSnapshots,
        shift: ShiftFunction | None,
        shift_extra: ExtraShiftFunction | None = None,
    ) -> None:
        for name, function in {"shift": shift, "shift_extra": shift_extra}.items():
            if function is not None and not callable(function):
                raise InvalidRangeError(f"{name}={function!r:.40}; it must be a function, or None")
        self.snapshots, self.shift, self.shift_extra = snapshots, shift, shift_extra

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        table = self.snapshots.storage.table
        source, target = table.rows[src_seq], table.rows[dst_seq]
        if source.lost:
            raise lost_error("copy_prefix", src_seq)

        count = source.index(length)
        cut_off = source.cut_off or self._cut_off(source.positions[:count], min(length, source.last + 1))

        def commit() -> None:
            table.drop(dst_seq, 0, len(target))
            target.lost, target.cut_off = False, cut_off
            self.snapshots.schedule.replace(dst_seq)
            table.share(src_seq, dst_seq, count)

        return commit

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        storage, row = self.snapshots.storage, self.snapshots.storage.table.rows[seq]
        start = row.index(begin)
        stop = len(row) if end is None else row.index(end)
        if row.lost and (start or stop < len(row)):
            raise lost_error("remove", seq)
        if end is None or end == begin or stop == len(row):
            return functools.partial(self._drop, seq, begin, start, stop)
        self._check_shift(seq, stop, end - begin)
        self._check_window(seq, stop, end - begin, start)
        self.snapshots.detach_shared(row.cells[stop:])
        write = moving.prepare_shift(storage, seq, stop, begin - end, self.shift, self.shift_extra)

        def commit() -> None:
            write()
            positions = row.positions.copy()
            positions[stop:] -= end - begin
            row.assign(positions, row.cells.copy())
            self._drop(seq, begin, start, stop)

        return commit

    def prepare_evict(self, seq: int, positions: Iterable[int]) -> Callable[[], None]:
        table = self.snapshots.storage.table
        row = table.rows[seq]
        wanted = whole_numbers("evict", "position", positions)
        if row.lost:
            raise lost_error("evict", seq)
        if wanted and wanted[-1] >= row.last:
            raise InvalidRangeError(
                f"evict: position {wanted[-1]} of sequence {seq}, whose last token is at {row.last}; only "
                f"tokens before that can be evicted: call remove({seq}, begin) to remove tokens at the end"
            )
        gone = np.isin(row.positions, wanted)

        def commit() -> None:
            if gone.any():
                self.snapshots.schedule.cut(seq, int(row.positions[gone][0]))
                table.drop_some(seq, gone)

        return commit

    def _drop(self, seq: int, begin: int, start: int, stop: int) -> None:
        table = self.snapshots.storage.table
        row = table.rows[seq]
        left = begin
        if stop == len(row):  # if a window has evicted what lies before, the sequence ends earlier
            left = min(begin, int(row.positions[start - 1]) + 1 if start else 0)
        self.snapshots.schedule.cut(seq, left)
        if stop == len(row) and stop > start:
            row.cut_off = self._cut_off(row.positions[:start], begin)
        elif not begin:
            row.cut_off = 0
        table.drop(seq, start, stop)
        row.lost = row.lost and len(row) > 0

    def _cut_off(self, positions: np.ndarray, resume: int) -> int:
        """``resume``, if a window cannot continue from there with these positions; else 0."""
        window = self.snapshots.window
        if window is None or not resume or not (window.size or window.keep):  # it sees no evicted token
            return 0
        return 0 if window.reaches(positions, resume) else resume

    def _check_shift(self, seq: int, stop: int, distance: int) -> None:
        """Refuse to move the tokens from index ``stop`` on if their keys cannot be re-encoded."""
        table = self.snapshots.storage.table
        row = table.rows[seq]
        if self.shift is None:
            raise NotSupportedError(
                f"remove: {len(row) - stop} tokens of sequence {seq} have to move down by {distance}, and "
                "this cache has no shift function; pass shift= to its constructor, or remove to the end"
            )
        extra = [layer for layer, buffers in self.snapshots.storage.buffers.items() if buffers.extra]
        if extra and self.shift_extra is None:
            raise NotSupportedError(
                f"remove: {len(row) - stop} tokens of sequence {seq} have to move down by {distance}, and "
                f"layers {extra} store extras that this cache cannot re-encode; pass shift_extra= to its "
                "constructor, or remove to the end"
            )
        if table.shared(seq, row.cells[stop:]):
            raise NotSupportedError(
                f"remove: a token of sequence {seq} that has to move is shared with another sequence; "
                "remove that one first, or compute this one anew"
            )

    def _check_window(self, seq: int, stop: int, distance: int, start: int) -> None:
        """Refuse to remove the tokens at indices ``[start, stop)`` if less than a window would remain before
        the end.
        """
        window, row = self.snapshots.window, self.snapshots.storage.table.rows[seq]
        left = np.concatenate((row.positions[:start], row.positions[stop:] - distance))
        resume = int(left[-1]) + 1
        if window is not None and not window.reaches(left, resume):
            raise NotSupportedError(
                f"remove: sequence {seq} would hold positions from {left[0]} and could not resume at "
                f"{resume} with a window of {window.size}; compute it anew, or keep more with memory="
            )

    def defrag(self, sequences: Sequence[int] | None, room: int) -> bool:
        """See ``CausalCache.defrag``."""
        storage = self.snapshots.storage
        table = storage.table
        table.sweep()
        if sequences is None:
            moving.defragment(storage, table.spread())
            return True
        missing = table.room_of_line(sequences, room)
        if table.free < missing and table.line_of(sequences, room) is not None:
            self.snapshots.reclaim(missing)
        target = table.line_up(sequences, room)
        if target is not None:
            moving.defragment(storage, target)
        return target is not None

    def mark_lost(self, seq: int) -> None:
        """Mark a sequence as lost: using it raises SequenceLostError until it is removed."""
        row = self.snapshots.storage.table.rows[seq]
        row.lost = len(row) > 0


def check_groups(
    table: CellTable,
    groups: Iterable[SequenceTokens],
    lower: LowerBound | None,
    read_only: bool,
    owner: Callable[[], object | None],
) -> None:
    """Refuse lost sequences, positions that are already stored, and queries that would see nothing.

    If a PrefixCache uses the sequences (``owner``), also positions behind a gap: what a session had there was
    removed, and its tokens would not be attended to.
    """
    for group in groups:
        row = table.rows[group.seq]
        if row.lost:
            raise lost_error("start_forward", group.seq)
        if read_only:
            check_sees(group, row, lower)
        elif group.lowest <= row.last and (first := row.first_held(group.positions)) is not None:
            used = owner() is not None
            remedy = f"rewind({first}) of its session" if used else f"remove({group.seq}, {first})"
            raise InvalidBatchError(
                f"start_forward: sequence {group.seq} already holds position {first}; call {remedy} first"
            )
        elif group.lowest > row.last + 1 and owner() is not None:
            raise InvalidBatchError(
                f"start_forward: sequence {group.seq} of a PrefixCache holds no token from position "
                f"{row.last + 1} on (none was evaluated, or the cache's remove took them), and the batch "
                f"begins at {group.lowest}; evaluate its tokens from {row.last + 1} on"
            )


class SupportsRemove(Protocol):
    """A cache that can remove tokens from the middle of a sequence."""

    def remove(self, seq: int, begin: int, end: int | None = None) -> None: ...


def drop_middle(cache: SupportsRemove, seq: int, keep: int, length: int) -> int:
    """Remove the older half of what follows the first ``keep`` of ``length`` positions; returns how many."""
    if check_whole("shift_context", "keep", keep) >= length:
        raise InvalidRangeError(
            f"shift_context: keep={keep} of {length} tokens; keep must satisfy 0 <= keep < length"
        )
    count = max(1, (length - keep) // 2)
    cache.remove(seq, keep, keep + count)
    return count


def lost_error(op: str, seq: int) -> SequenceLostError:
    """The error for a sequence that was lost in a device failure."""
    return SequenceLostError(
        f"{op}: moving the data of sequence {seq} failed midway, and it is lost; "
        f"call remove({seq}, 0) and compute it again"
    )
