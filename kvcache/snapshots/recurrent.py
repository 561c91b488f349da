"""Taking, restoring and joining snapshots of recurrent caches: states, and what attention layers hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import ml
from kvcache.attention.batch import check_sequence
from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.caches.base import Guarded
from kvcache.caches.causal import CausalCache
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import RecurrentSnapshot, carried_out, check_inside
from kvcache.storage.state_slots import Checkpoint, HeldStates, StatePass, StateRow
from kvcache.storage.state_table import StateTable, state_lost

__all__ = ["StateSnapshots"]


class StateSnapshots(Guarded[StatePass]):
    """The part of a recurrent cache that takes, restores and joins snapshots."""

    conv_shape: tuple[int, ...]
    state_shape: tuple[int, ...]
    attention: CausalCache
    _conv: ml.DType
    _states: StateTable
    _schedule: SnapshotSchedule[RecurrentSnapshot]

    def _bound(self, op: str) -> ml.Backend:
        return self.attention._bound(op)

    def offset(self, seq: int) -> int:
        """How many tokens the state has seen: where the next batch of this sequence begins."""
        self._bound("offset")
        check_sequence("offset", seq, self._max_sequences)
        return self._states.rows[seq].offset

    def checkpoints(self, seq: int) -> tuple[int, ...]:
        """The positions that a sequence can go back to exactly, ascending."""
        self._bound("checkpoints")
        check_sequence("checkpoints", seq, self._max_sequences)
        return tuple(sorted(point.offset for point in self._states.rows[seq].checkpoints))

    # Ahead of time.

    def schedule_snapshots(self, seq: int, positions: Sequence[int]) -> None:
        """As CausalCache.schedule_snapshots, but a batch has to end at each of ``positions``.

        The state inside a batch is never there to be copied: a position that a batch runs past is
        not taken, and ``skipped_snapshots`` lists it. ``next_snapshot(seq)`` says where to end one.
        """
        self._schedule.add(seq, positions, self.offset(seq))

    def cancel_snapshots(self, seq: int) -> None:
        """As CausalCache.cancel_snapshots."""
        self.offset(seq)
        self._schedule.drop(seq)

    def next_snapshot(self, seq: int) -> int | None:
        """The next position at which a batch of this sequence should end; None: anywhere."""
        return self._schedule.next(seq, self.offset(seq))

    def take_snapshots(self, seq: int, upto: int | None = None) -> list[RecurrentSnapshot]:
        """The scheduled snapshots that were taken since the last call, by position; those up to ``upto``."""
        self.snapshots_taken(seq)
        return self._schedule.take(seq, upto)

    def snapshots_taken(self, seq: int) -> list[RecurrentSnapshot]:
        """As CausalCache.snapshots_taken; takes the one that is due where the sequence is."""
        self.offset(seq)
        self._capture(seq)
        return self._schedule.waiting(seq)

    def skipped_snapshots(self, seq: int) -> list[int]:
        """As CausalCache.skipped_snapshots: the positions that a batch ran past."""
        self.snapshots_taken(seq)
        return self._schedule.skipped(seq)

    def rolled_back(self, seq: int) -> int | None:
        """As CausalCache.rolled_back."""
        self.offset(seq)
        return self._schedule.lowest_cut(seq)

    def _capture(self, seq: int) -> None:
        """Take what is due, when a pass has set the states of all layers."""
        offset = self._states.rows[seq].offset
        for begin, end in self._schedule.due(seq, offset):
            if end == offset:
                self._schedule.taken(seq, self.snapshot(seq, begin, end))
            else:
                self._schedule.skip(seq, end)

    # Taking.

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> RecurrentSnapshot:
        """The state at ``end`` (None: where the sequence is), with the attention layers' [begin, end).

        Nothing is copied until the state is about to be written over, by a pass of the sequence mostly.
        Views that ``conv_state`` and ``recurrent_state`` gave before are not to be written any more: ask
        for them again.

        Raises NotSupportedError where no state of ``end`` is there: it is ``offset(seq)``, 0, or one of
        ``checkpoints(seq)``.
        """
        self._bound("snapshot")
        offset, row = self.offset(seq), self._states.rows[seq]
        end = offset if end is None else end
        if row.lost:
            raise state_lost("snapshot", seq)
        attention = self.attention.snapshot(seq, begin, end)
        return RecurrentSnapshot(attention, self._state_of(seq, row, end))

    def _state_of(self, seq: int, row: StateRow, end: int) -> HeldStates:
        if not end:
            return HeldStates()
        point = self._states.point(row) if end == row.offset else row.nearest(end)
        if point is None or point.offset != end:
            raise NotSupportedError(
                f"snapshot: sequence {seq} has no state of position {end}; there are those of "
                f"{[*self.checkpoints(seq), row.offset]}"
            )
        return point.state

    # Restoring.

    def restore(self, seq: int, snapshot: RecurrentSnapshot, target: int | None = None) -> bool:
        """Make the sequence what it was at ``snapshot.end``: a state is whole, no other target will do.

        A state that still lies in its slot is shared until one of its sequences goes on.
        False, and nothing touched, for another target or where ``[0, begin)`` is not stored. What is
        raised leaves the sequence as it was, as in CausalCache.restore.
        """
        return carried_out(self.prepare_restore_snapshot(seq, snapshot, target))

    def prepare_restore_snapshot(
        self, seq: int, snapshot: RecurrentSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        """Check all that ``restore`` may refuse; None where it would give False."""
        backend = self._check_restore(seq, snapshot, RecurrentSnapshot)
        if target not in (None, snapshot.end):
            return None
        here = snapshot.state.slot_in(self._states.buffers) is not None
        if not here:
            self._check_states(backend, snapshot)
        put_back = self.attention.prepare_restore_snapshot(seq, snapshot.attention)
        if put_back is None:
            return None
        state = snapshot.state if here else snapshot.state.copies()

        def commit() -> None:
            put_back()
            self._pass = None
            point = Checkpoint(snapshot.end, state)
            self._states.resume(seq, point, snapshot.begin)
            self._schedule.cut(seq, snapshot.begin)
            if snapshot.end:
                self._states.keep(self._states.rows[seq], point)

        return commit

    def _check_states(self, backend: ml.Backend, snapshot: RecurrentSnapshot) -> None:
        here = {
            "conv": ((1, *self.conv_shape), self._conv),
            "recurrent": ((1, *self.state_shape), ml.DType.F32),
        }
        with backend.new_context() as ctx:
            states = snapshot.state.read(ctx)
        known = self._states.buffers.tensors.keys()
        if snapshot.end and known and known != states.keys():
            raise InvalidRangeError(
                f"restore: the states {sorted(states)}, as (kind, layer); this cache has {sorted(known)}"
            )
        for (kind, layer), tensor in states.items():
            shape, dtype = here[kind]
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise InvalidRangeError(
                    f"restore: the {kind} state {tensor.shape} {tensor.dtype.name} of layer {layer}; here it "
                    f"is {shape} {dtype.name}"
                )

    # Cutting and joining.

    def merge(self, parent: RecurrentSnapshot | None, child: RecurrentSnapshot) -> RecurrentSnapshot:
        """The child's states; its attention layers joined with the parent's where those end as it begins."""
        if parent is None or parent.end != child.begin:
            return child
        return RecurrentSnapshot(self.attention.merge(parent.attention, child.attention), child.state)

    def join(self, parts: Sequence[RecurrentSnapshot]) -> RecurrentSnapshot:
        """``merge`` of one or more, in order."""
        return functools.reduce(self.merge, parts)

    def split(
        self, snapshot: RecurrentSnapshot, at: int
    ) -> tuple[RecurrentSnapshot | None, RecurrentSnapshot]:
        """(None, snapshot): there is no state of ``at`` in it."""
        check_inside(snapshot, at)
        return None, snapshot
