"""What is done to the sequences of an attention cache between passes: sharing, removing, moving.

Cells are shared and given back in the cell table; only what changes its position is read and written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from kvcache.attention.batch import check_sequence
from kvcache.cache import InvalidRangeError, NotSupportedError, SequenceLostError, ShiftFunction
from kvcache.snapshots.attention import AttentionSnapshots
from kvcache.storage import relocation as moving

__all__ = ["AttentionSequences", "drop_middle", "lost_error"]


class AttentionSequences(AttentionSnapshots):
    """The part of an attention cache that shares, removes and moves tokens. All or nothing, each call."""

    _shift: ShiftFunction | None

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Empty ``dst_seq``, then let it share the cells of ``src_seq`` at positions ``[0, length)``."""
        self.prepare_copy_prefix(src_seq, dst_seq, length)()

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        """Check all that ``copy_prefix`` may refuse; the callable returned then does it."""
        self._check_copy(src_seq, dst_seq, length)
        source = self._table.rows[src_seq]
        if source.lost:
            raise lost_error("copy_prefix", src_seq)

        def commit() -> None:
            self._changed()
            self._clear(dst_seq)
            self._schedule.replace(dst_seq)
            self._table.share(src_seq, dst_seq, source.index(length))

        return commit

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Forget positions ``[begin, end)`` of a sequence; None: to its end.

        Tokens at or after ``end`` move down by ``end - begin``, their keys re-encoded by the shift
        function. A shared token only loses this sequence.

        Raises NotSupportedError where something has to move and there is no shift function, the
        token is shared, or (with a window) the sequence could then not resume at its end;
        InvalidRangeError for a range that means nothing. Nothing is touched before all that is known.
        """
        self.prepare_remove(seq, begin, end)()

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        """Check all that ``remove`` may refuse and compute shifted keys; the callable then does it."""
        backend = self._check_remove(seq, begin, end)
        row, table = self._table.rows[seq], self._table
        start = row.index(begin)
        stop = len(row) if end is None else row.index(end)
        if row.lost and (start or stop < len(row)):
            raise lost_error("remove", seq)
        if end is None or end == begin or stop == len(row):
            return functools.partial(self._drop, seq, begin, start, stop)
        self._check_shift(seq, stop, end - begin, start)
        self._detach_shared(row.cells[stop:])
        write = moving.prepare_shift(backend, self._buffers, table, seq, stop, begin - end, self._shift)

        def commit() -> None:
            self._changed()
            write()
            positions = row.positions.copy()
            positions[stop:] -= end - begin
            row.assign(positions, row.cells.copy())
            self._drop(seq, begin, start, stop)

        return commit

    def _drop(self, seq: int, begin: int, start: int, stop: int) -> None:
        self._changed()
        self._schedule.cut(seq, begin)
        self._table.drop(seq, start, stop)
        row = self._table.rows[seq]
        row.lost = row.lost and len(row) > 0

    def _check_shift(self, seq: int, stop: int, distance: int, start: int) -> None:
        """Refuse what a removal from the middle cannot do, before anything is touched."""
        row = self._table.rows[seq]
        if self._shift is None:
            raise NotSupportedError(
                f"remove: {len(row) - stop} tokens of sequence {seq} have to move down by {distance}, and "
                "this cache has no shift function; pass shift= to its constructor, or remove to the end"
            )
        if self._table.shared(seq, row.cells[stop:]):
            raise NotSupportedError(
                f"remove: a token of sequence {seq} that has to move is shared with another sequence; "
                "remove that one first, or compute this one anew"
            )

    def shift_context(self, seq: int, keep: int) -> int:
        """Make room in a full sequence: keep the first ``keep`` tokens, drop the older half of the rest.

        What stays moves down and its keys are re-encoded (see ``remove``); returns how many tokens went.
        As Ollama's runner does when a conversation outgrows its context.
        """
        self._bound("shift_context")
        check_sequence("shift_context", seq, self._max_sequences)
        return drop_middle(self, seq, keep, self._table.rows[seq].last + 1)

    def defrag(self) -> None:
        """Move cells so that every sequence lies in one run, with room to grow. Views go stale."""
        backend = self._bound("defrag")
        self._changed()
        moving.defragment(backend, self._buffers, self._table)

    def mark_lost(self, seq: int) -> None:
        """Let a sequence say that it is lost wherever it is used, until it is removed."""
        row = self._table.rows[seq]
        row.lost = len(row) > 0

    def _clear(self, seq: int) -> None:
        row = self._table.rows[seq]
        self._table.drop(seq, 0, len(row))
        row.lost = False


class SupportsRemove(Protocol):
    """A cache that takes tokens out of the middle of a sequence."""

    def remove(self, seq: int, begin: int, end: int | None = None) -> None: ...


def drop_middle(cache: SupportsRemove, seq: int, keep: int, length: int) -> int:
    """Remove half of what follows the first ``keep`` of ``length`` positions; returns how many."""
    if keep < 0 or keep >= length:
        raise InvalidRangeError(f"shift_context: keep={keep} of {length} tokens; 0 <= keep < length")
    count = max(1, (length - keep) // 2)
    cache.remove(seq, keep, keep + count)
    return count


def lost_error(op: str, seq: int) -> SequenceLostError:
    """What a call says of a sequence that a device failure took."""
    return SequenceLostError(
        f"{op}: the device failed while sequence {seq} was being moved, its data is lost; "
        f"call remove({seq}, 0) and compute it again"
    )
