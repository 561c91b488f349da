"""Taking, restoring and joining snapshots of recurrent caches: states, and what attention layers hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcache.cache import InvalidRangeError, NotSupportedError, OrderError
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import RecurrentSnapshot, check_inside
from kvcache.storage.state_slots import Checkpoint, HeldStates, StateRow, States
from kvcache.storage.state_specs import StateSpecs
from kvcache.storage.state_table import StateTable, state_lost

__all__ = ["StateSnapshots"]


class StateSnapshots:
    """The snapshots of a recurrent cache: states, with what the cache of its attention layers holds.

    It knows nothing of passes: who restores a snapshot ends the pass under way.
    """

    kind = RecurrentSnapshot

    def __init__(self, attention: Any) -> None:
        """``attention``: the cache of the attention layers."""
        self.attention = attention
        self.schedule: SnapshotSchedule[RecurrentSnapshot] = SnapshotSchedule()
        self.states = StateTable(0)
        self._specs = StateSpecs({})

    def bind(self, states: StateTable, specs: StateSpecs) -> None:
        """Take snapshots of ``states``, which are what ``specs`` says."""
        self.states, self._specs = states, specs

    def close(self) -> None:
        """Copy out what still lies in slots, and forget what was scheduled."""
        self.states.buffers.release_all()
        self.states, self.schedule = StateTable(0), SnapshotSchedule()

    def capture(self, seq: int) -> None:
        """Take what is due; that of the end stays due while the pass under way may still set states."""
        row = self.states.rows[seq]
        offset, inside = row.offset, self.states.inside(row)
        for begin, end in self.schedule.due(seq, offset):
            if end == offset and self.states.is_open(seq):
                continue
            try:
                found = self.snapshot(seq, begin, end) if end == offset or end in inside else None
            except (NotSupportedError, OrderError):  # a window with gaps, tokens of a pass that failed
                found = None
            if found is None:
                self.schedule.skip(seq, end)
            else:
                self.schedule.taken(seq, found)

    # Taking.

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> RecurrentSnapshot:
        """See ``RecurrentCache.snapshot``."""
        row = self.states.rows[seq]
        end = row.offset if end is None else end
        if row.lost:
            raise state_lost("snapshot", seq)
        attention = self.attention.snapshot(seq, begin, end)
        return RecurrentSnapshot(attention, self._state_of(seq, row, end))

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
        self, seq: int, snapshot: RecurrentSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        """Check all that ``restore`` may refuse; None where it would give False."""
        if target not in (None, snapshot.end):
            return None
        here = snapshot.state.slot_in(self.states.buffers) is not None
        new = {} if here else self._check_states(snapshot)
        put_back = self.attention.prepare_restore_snapshot(seq, snapshot.attention)
        if put_back is None:
            return None
        state = snapshot.state if here else snapshot.state.copies()

        def commit() -> None:
            put_back()
            for (name, layer), tensor in new.items():
                self._specs.fitting("restore", name, layer, tensor, 1)
            point = Checkpoint(snapshot.end, state)
            self.states.resume(seq, point, snapshot.begin)
            self.schedule.cut(seq, snapshot.begin)
            if snapshot.end:
                self.states.keep(self.states.rows[seq], point)

        return commit

    def _check_states(self, snapshot: RecurrentSnapshot) -> States:
        """Those that this cache does not know yet; refuses others than it has."""
        with self.attention.backend.new_context() as ctx:
            states = snapshot.state.read(ctx)
        known = self.states.buffers.tensors.keys()
        if snapshot.end and known and known != states.keys():
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

    # Cutting and joining.

    def merge(self, parent: RecurrentSnapshot | None, child: RecurrentSnapshot) -> RecurrentSnapshot:
        """The child's states; its attention layers joined with the parent's where those end as it begins."""
        if parent is None or parent.end != child.begin:
            return child
        return RecurrentSnapshot(self.attention.merge(parent.attention, child.attention), child.state)

    def join(self, parts: Sequence[RecurrentSnapshot]) -> RecurrentSnapshot:
        """``merge`` of one or more, in order; the attention layers in one step."""
        first = len(parts) - 1
        while first and parts[first - 1].end == parts[first].begin:
            first -= 1
        attention = self.attention.join([part.attention for part in parts[first:]])
        return RecurrentSnapshot(attention, parts[-1].state)

    def split(
        self, snapshot: RecurrentSnapshot, at: int
    ) -> tuple[RecurrentSnapshot | None, RecurrentSnapshot]:
        """(None, snapshot): there is no state of ``at`` in it."""
        check_inside(snapshot, at)
        return None, snapshot
