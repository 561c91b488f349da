"""Taking, restoring and joining snapshots of recurrent states, which are indivisible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache.cache import InvalidRangeError, NotSupportedError, OrderError, check_whole
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import StateSnapshot, check_inside
from kvcache.storage.state_slots import Checkpoint, HeldStates, StateRow, States
from kvcache.storage.state_specs import StateSpecs
from kvcache.storage.state_table import StateTable, state_lost

__all__ = ["StateSnapshots"]


class StateSnapshots:
    """The snapshots of a cache of states.

    It does not know passes: whoever restores a snapshot ends the current pass.
    """

    kind = StateSnapshot

    def __init__(self) -> None:
        self.schedule: SnapshotSchedule[StateSnapshot] = SnapshotSchedule()
        self.states = StateTable(0)
        self._specs = StateSpecs({})

    def bind(self, states: StateTable, specs: StateSpecs) -> None:
        """Take snapshots of ``states``, which ``specs`` describes."""
        self.states, self._specs = states, specs

    def close(self) -> None:
        """Copy out what still lies in slots, and discard the schedule."""
        self.states.buffers.release_all()
        self.states, self.schedule = StateTable(0), SnapshotSchedule()

    def capture(self, seq: int) -> None:
        """Take the due snapshots; the one at the end stays due while the current pass may still update
        states.
        """
        row = self.states.rows[seq]
        offset, inside = row.offset, self.states.inside(row)
        for begin, end in self.schedule.due(seq, offset):
            if end == offset and self.states.is_open(seq):
                continue
            try:
                snapshot = self.snapshot(seq, begin, end) if end == offset or end in inside else None
            except OrderError:  # tokens of a failed pass
                snapshot = None
            if snapshot is None:
                self.schedule.skip(seq, end)
            else:
                self.schedule.taken(seq, snapshot)

    # Taking.

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> StateSnapshot:
        """See ``StateCache.snapshot``."""
        row = self.states.rows[seq]
        begin = check_whole("snapshot", "begin", begin)
        end = row.offset if end is None else check_whole("snapshot", "end", end)
        if not begin <= end <= row.offset:
            raise InvalidRangeError(
                f"snapshot: [{begin}, {end}) of sequence {seq}; the range must satisfy 0 <= begin <= "
                f"end <= {row.offset}"
            )
        if row.lost:
            raise state_lost("snapshot", seq)
        return StateSnapshot(begin, end, self._state_of(seq, row, end))

    def _state_of(self, seq: int, row: StateRow, end: int) -> HeldStates:
        if not end:
            return HeldStates()
        inside = self.states.inside(row)
        if end in inside and end != row.offset:
            return self.states.copied(inside[end])
        if end == row.offset:
            self.states.check_whole("snapshot", seq)
        point = self.states.point(row) if end == row.offset else self.states.nearest(row, end)
        if point is None or point.offset != end:
            raise NotSupportedError(
                f"snapshot: sequence {seq} has no state of position {end}; there are those of "
                f"{sorted({*row.positions, *inside, row.offset})}"
            )
        return point.state

    # Restoring.

    def prepare_restore_snapshot(
        self, seq: int, snapshot: StateSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        """Make all checks of ``restore``; the returned callable makes the change. None if it would return
        False.

        The restored state becomes a checkpoint, unless the snapshot is empty.
        """
        if target not in (None, snapshot.end) or snapshot.begin > self.states.rows[seq].offset:
            return None
        here = snapshot.state.slot_in(self.states.buffers) is not None
        state = snapshot.state if here else snapshot.state.copies()
        new = {} if here else self._check_states(snapshot.end, state.copied)

        def commit() -> None:
            for (name, layer), tensor in new.items():
                self._specs.fitting("restore", name, layer, tensor, 1)
            point = Checkpoint(snapshot.end, state)
            self.states.resume(seq, point, snapshot.begin)
            self.schedule.cut(seq, snapshot.begin)
            if snapshot.end > snapshot.begin:
                self.states.keep(self.states.rows[seq], point)

        return commit

    def _check_states(self, end: int, states: States) -> States:
        """The states that this cache does not know yet. Refuses states other than those that it has."""
        known = self.states.buffers.tensors.keys()
        if end and known and known != states.keys() and not self.states.skips:
            raise InvalidRangeError(
                f"restore: the states {sorted(states)}, as (name, layer); this cache has {sorted(known)}"
            )
        new = {}
        for (name, layer), tensor in states.items():
            spec = self._specs.get(name, layer)
            if spec is None:
                new[name, layer] = tensor
            elif tensor.shape != (1, *spec.shape) or tensor.dtype is not spec.dtype:
                raise InvalidRangeError(
                    f"restore: the {name} state {tensor.shape} {tensor.dtype.name} of layer {layer}; here it "
                    f"is {(1, *spec.shape)} {spec.dtype.name if spec.dtype else None}"
                )
        return new

    # Splitting and joining.

    def merge(self, parent: StateSnapshot | None, child: StateSnapshot) -> StateSnapshot:
        """The child's state, which has seen everything that the parent's has."""
        return child if parent is None else self.join([parent, child])

    def join(self, parts: Sequence[StateSnapshot]) -> StateSnapshot:
        """``merge`` one or more snapshots, in order."""
        return StateSnapshot(parts[0].begin, parts[-1].end, parts[-1].state)

    def split(self, snapshot: StateSnapshot, at: int) -> tuple[StateSnapshot | None, StateSnapshot]:
        """(None, snapshot), as the snapshot has no state at ``at``."""
        at = check_inside(snapshot, at)
        return None, snapshot
