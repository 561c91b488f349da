"""The slot or checkpoint of each sequence's recurrent state, and how a pass moves states into place.

It is to states what CellTable is to K and V: the rows of all sequences, over the slots of state_slots.py.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

import ml
from kvcache.cache import InvalidBatchError, OrderError, SequenceLostError
from kvcache.storage.state_slots import (
    Arrangement,
    Checkpoint,
    HeldStates,
    StateBuffers,
    StatePass,
    StateRow,
    States,
    arrange,
    lost_in,
)


class StateTable:
    """The rows of ``sequences`` sequences, with a slot each in every recurrent layer.

    A checkpoint is taken when a pass begins at least ``interval`` tokens after the last one; the latest
    ``checkpoints`` of each sequence are kept. ``backend`` may be None if there are no sequences.
    ``declared``: the states, by name and layer, that every pass must use to be complete; None: a state that
    is first used later is zero before.
    """

    def __init__(
        self,
        sequences: int,
        backend: ml.Backend | None = None,
        checkpoints: int = 0,
        interval: int = 1,
        declared: Collection[tuple[str, int]] | None = (),
    ) -> None:
        self.rows = [StateRow() for _ in range(sequences)]
        self.buffers = StateBuffers(sequences, backend)
        self.under_way: StatePass | None = None
        """The pass whose states are being read and updated."""
        self._taken_back: tuple[tuple[int, ...], int | None] = (), None
        """The sequences of an undone pass, and the first of their slots."""
        self._backend = backend
        self._checkpoints, self._interval = checkpoints, interval
        self._declared, self.skips = frozenset(declared or ()), declared is None

    def lost(self) -> list[bool]:
        """The sequences whose states were lost in a device failure."""
        return [row.lost for row in self.rows]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, and of copied checkpoints and states inside a pass."""
        copies = [point.state.copied for row in self.rows for point in row.checkpoints]
        copies += [states for row in self.rows for states in row.inside.values()]
        shared = {id(tensor): tensor.nbytes for states in copies for tensor in states.values()}
        return self.buffers.nbytes + sum(shared.values())

    # Available states.

    def buffer(
        self,
        ctx: ml.Context,
        key: tuple[str, int],
        current: StatePass,
        shape: tuple[int, ...],
        dtype: ml.DType,
    ) -> ml.Tensor:
        """The slots of a layer's state. If they are new, all tokens before this pass lack it.

        A reserve pass stores nothing: the next pass still finds the slots new.
        """
        if current.reserve and not self.skips:
            return self.buffers.reserve(ctx, *key, shape, dtype)
        is_new = key not in self.buffers.tensors
        tensor = self.buffers.ensure(ctx, *key, shape, dtype)
        if is_new and not self.skips:
            self.buffers.lose_all()
            for seq, row in enumerate(self.rows):
                stood = current.before.get(seq, row)
                if stood.offset and (stood.pending is None or key not in stood.pending.state.copied):
                    for one in (row, stood):
                        one.computed, one.checkpoints = 0, ()
                    current.behind += [seq] if seq in current.tokens else []
        return tensor

    def point(self, row: StateRow) -> Checkpoint:
        """A reference to the current state of a row; nothing is copied."""
        if row.slot is None:
            return replace(row.pending or Checkpoint(0, HeldStates()), offset=row.offset)
        return Checkpoint(row.offset, self.buffers.hold(row.slot))

    def read(
        self,
        ctx: ml.Context,
        key: tuple[str, int],
        sequences: Iterable[int],
        shape: tuple[int, ...],
        dtype: ml.DType,
    ) -> ml.Tensor:
        """Copies (sequences, *shape) of a layer's states, wherever they lie; zeros for sequences without
        one.
        """
        parts = [self.point(self.rows[seq]).state.read(ctx).get(key) for seq in sequences]
        whole = [ctx.zeros((1, *shape), dtype) if part is None else part for part in parts]
        joined = functools.reduce(lambda one, other: one.concat(ctx, other, 0), whole)
        return joined.contiguous(ctx)

    def inside(self, row: StateRow) -> dict[int, States]:
        """The states inside the row's last pass, by position, that were delivered for every layer."""
        known = self.buffers.tensors.keys() | self._declared
        return {
            position: states for position, states in row.inside.items() if states and states.keys() >= known
        }

    def nearest(self, row: StateRow, position: int) -> Checkpoint | None:
        """The latest available state at or before ``position``: a checkpoint, or one inside the last pass."""
        inside = (Checkpoint(at, HeldStates(states)) for at, states in self.inside(row).items())
        points = (point for point in (*row.checkpoints, *inside) if point.offset <= position)
        return max(points, key=lambda point: point.offset, default=None)

    def deliver(
        self,
        ctx: ml.Context,
        key: tuple[str, int],
        current: StatePass,
        at: Sequence[tuple[int, int]],
        states: ml.Tensor,
    ) -> None:
        """Keep those of ``states`` (len(at), *shape), each after (sequence, tokens), that ``current`` has
        requested.
        """
        rows = [i for i, (seq, count) in enumerate(at) if count in current.wanted.get(seq, ())]
        if not rows:
            return
        place = ctx.layer(key[1])
        kept = states if len(rows) == len(at) else states.rows(place, rows)
        parts = [kept.slice(place, 0, i, i + 1) for i in range(len(rows))]
        ctx.forward(kept)
        for i, part in zip(rows, parts, strict=True):
            seq, count = at[i]
            row = self.rows[seq]
            row.inside[row.offset - current.tokens[seq] + count][key] = part

    def copied(self, states: States) -> HeldStates:
        """Copies in memory of their own."""
        with self._open() as ctx:
            copies = {key: tensor.contiguous(ctx.layer(key[1])) for key, tensor in states.items()}
            ctx.compute(*copies.values())
        return HeldStates(copies)

    def _row_at(self, point: Checkpoint, kept: tuple[Checkpoint, ...]) -> StateRow:
        """A row that continues from ``point``, in the slot of ``point`` if it still lies in one."""
        slot = point.state.slot_in(self.buffers)
        if slot is not None:
            return StateRow(point.offset, slot, None, kept)
        lacks = not self.skips and not point.state.copied.keys() >= self.buffers.tensors.keys()
        return StateRow(point.offset, None, point, kept, computed=0 if lacks else None)

    def row_before(self, seq: int, length: int) -> StateRow:
        """A row with a sequence's state after ``length`` tokens, or that of the nearest earlier checkpoint,
        or empty.

        A row that is kept whole records what the current pass has still to update.
        """
        row = self.rows[seq]
        if row.offset <= length and not row.lost:
            return replace(row, computed=self.lacking(seq))
        point = self.nearest(row, length)
        if point is None:
            return StateRow()
        kept = tuple(other for other in row.checkpoints if other.offset <= point.offset)
        inside = {at: states for at, states in row.inside.items() if at < point.offset}
        return replace(self._row_at(point, kept), inside=inside)

    def resume(self, seq: int, point: Checkpoint, kept: int) -> None:
        """Make a sequence continue from ``point``, with its checkpoints up to the position ``kept``."""
        others = tuple(other for other in self.rows[seq].checkpoints if other.offset <= kept)
        self.rows[seq] = self._row_at(point, others) if point.offset else StateRow(checkpoints=others)

    def keep(self, row: StateRow, checkpoint: Checkpoint) -> None:
        """Add ``checkpoint`` to the row, replacing the one at its position or the oldest."""
        others = [point for point in row.checkpoints if point.offset != checkpoint.offset]
        row.checkpoints = (*others, checkpoint)[-self._checkpoints :] if self._checkpoints else ()

    def _is_due(self, row: StateRow) -> bool:
        if not self._checkpoints or row.computed is not None:
            return False
        last = max((point.offset for point in row.checkpoints), default=0)
        return row.offset - last >= self._interval

    # One pass.

    def start(self, tokens: Mapping[int, int], wanted: Mapping[int, tuple[int, ...]]) -> StatePass:
        """Take due checkpoints, then move the sequences' states into adjacent slots; only the last step
        writes.

        ``tokens`` is the number of tokens of each sequence of the pass, in the order of the slots, and
        ``wanted`` lists after how many of them its state is to be kept if the model delivers it.

        After ``take_back`` the same sequences get the same slots, so that views of their states stay valid.
        If the device fails in the last step, the sequences whose states were overwritten are lost.
        """
        order, (others, first) = tuple(tokens), self._taken_back
        plan = arrange(self.rows, order, self.buffers.held().keys(), first if order == others else None)
        moved = (seq for seq, slot in plan.slots.items() if self.rows[seq].slot != slot)
        before = {seq: self.rows[seq].copy() for seq in {*order, *moved}}
        behind, taken = self.to_refuse(order), self._carry_out(order, plan)
        for seq, slot in plan.slots.items():
            self.rows[seq].slot = slot
        for seq, count in tokens.items():
            row = self.rows[seq]
            row.pending = None
            row.inside = {row.offset + inside: {} for inside in wanted[seq]} if seq in wanted else {}
            row.offset += count
            if seq in taken:
                self.keep(row, taken[seq])
        self._taken_back = (), None
        self.under_way = StatePass(tokens, plan.start, wanted, before, behind=behind)
        return self.under_way

    def _carry_out(self, order: tuple[int, ...], plan: Arrangement) -> dict[int, Checkpoint]:
        """Move the states to where ``plan`` puts them; returns the checkpoints that were due.

        States referred to in slots that are overwritten now, or by the pass, are copied out first.
        """
        taken = {seq: self.point(self.rows[seq]) for seq in order if self._is_due(self.rows[seq])}
        if not plan.moves and not plan.loads and not self.buffers.held(plan.written):
            return taken
        writing = False
        try:
            with self._open() as ctx:
                write = self.buffers.prepare(ctx, plan)
                self.buffers.release(ctx, plan.written)
                writing = True
                write()
                ctx.compute()
        except BaseException:  # closing the context may also fail, after everything was written
            if writing:
                lost_in(self.rows, plan)
            raise
        return taken

    def is_whole(self, current: StatePass) -> bool:
        """Whether a pass has read or updated the states of all layers that have any."""
        if current.reserve or current.read_only:
            return True
        return current.asked >= self.buffers.tensors.keys() and current.asked >= self._declared

    def check_readable(self, op: str, current: StatePass) -> None:
        """Raise OrderError if states are not those at the beginning of the pass."""
        if current.reserve or not current.behind:
            return
        seq, unused = current.behind[0], ""
        for name, layer in sorted(self._declared - self.buffers.tensors.keys())[:1]:
            # Every pass leaves out states that are declared for layers without any.
            unused = (
                f". No pass has used state {name!r:.40} of layer {layer}: if the layer has none, leave it "
                "out of states=, which names only layers that have the state"
            )
        raise OrderError(
            f"{op}: a pass before this one failed, or left out states of sequence {seq}; call remove({seq}, "
            f"{self.rows[seq].computed}), and evaluate the tokens from offset({seq}) on{unused}"
        )

    def check_start(self, seq: int, positions: np.ndarray, follow: bool) -> None:
        """Refuse a lost sequence, and positions that do not ``follow`` its state."""
        row = self.rows[seq]
        if row.lost:
            raise state_lost("start_forward", seq)
        if not follow:
            raise InvalidBatchError(
                f"start_forward: positions {positions.tolist()} of sequence {seq}, whose recurrent state has "
                f"seen {row.offset} tokens; they must be in order and start there"
            )

    def is_open(self, seq: int) -> bool:
        """Whether the current pass has still to use states of a sequence.

        If none are declared, it is unknown during a cache's first pass which layers have states: the pass
        counts as complete once one was used.
        """
        current = self.under_way
        if current is None or seq not in current.tokens or current.reserve or current.read_only:
            return False
        return not (current.asked and self.is_whole(current))

    def behind(self, sequences: Iterable[int]) -> list[int]:
        """The sequences of which some layers lack the current state because a pass failed."""
        rows = ((seq, self.rows[seq]) for seq in sequences)
        return [seq for seq, row in rows if row.computed is not None and row.computed < row.offset]

    def lacking(self, seq: int) -> int | None:
        """The position from which some layers lack states of a sequence; None if none does."""
        row, current = self.rows[seq], self.under_way
        if current is None or not self.is_open(seq):
            return row.computed
        begin = row.offset - current.tokens[seq]
        return begin if row.computed is None else min(begin, row.computed)

    def to_refuse(self, sequences: Iterable[int]) -> list[int]:
        """The sequences whose states may not be read in a pass that begins now."""
        return [] if self.skips else self.behind(sequences)

    def check_whole(self, op: str, seq: int) -> None:
        """Raise OrderError if the layers' states of a sequence belong to different positions."""
        row = self.rows[seq]
        if self.is_open(seq) or self.behind([seq]):
            raise OrderError(
                f"{op}: not all layers have their states of position {row.offset} of sequence {seq}; {op} "
                f"when all were updated in the pass under way, or call remove({seq}, n) after one that failed"
            )

    def end(self, current: StatePass) -> None:
        """End the pass: record which sequences did not get all of their states."""
        self.under_way = None
        if not self.is_whole(current):
            for seq, count in current.tokens.items():
                row = self.rows[seq]
                known = row.offset - count
                row.computed = known if row.computed is None else min(row.computed, known)

    def go_on(self, current: StatePass | None) -> dict[int, int]:
        """Continue a pass after ``end``: its layers may still be updated. None: no pass continues.

        Returns the sequences of the pass, and the position of each before it.
        """
        self.under_way = current
        if current is None:
            return {}
        stood = {seq: current.before[seq] for seq in current.before.keys() & current.tokens.keys()}
        for seq, row in stood.items():
            self.rows[seq].computed = row.computed
        return {seq: row.offset for seq, row in stood.items()}

    def take_back(self, current: StatePass) -> None:
        """Restore the rows from before ``current``, and move back the states that it moved.

        If the device fails here, the sequences that were to be moved are lost.
        """
        before = current.before
        now = {seq: self.rows[seq].slot for seq in before}
        for seq, row in before.items():
            self.rows[seq] = replace(row, slot=None if row.slot is None else now[seq])
        moved = [seq for seq, row in before.items() if row.slot is not None and now[seq] != row.slot]
        intact = {row.slot for seq, row in enumerate(self.rows) if seq not in moved}
        moves = {before[seq].slot: now[seq] for seq in moved}  # sharers of a slot hold the same state
        pairs = tuple(
            (source, target)
            for target, source in moves.items()
            if source is not None and target is not None and target not in intact
        )
        if pairs:
            self._move(pairs, moved)
        for seq, row in before.items():
            self.rows[seq].slot = row.slot
        self._taken_back = current.sequences, current.start if before else None

    def _move(self, pairs: tuple[tuple[int, int], ...], moved: Sequence[int]) -> None:
        try:
            with self._open() as ctx:
                plan = Arrangement(0, {}, pairs, ())
                write = self.buffers.prepare(ctx, plan)
                self.buffers.release(ctx, plan.written)
                write()
                ctx.compute()
        except BaseException:
            for seq in moved:
                self.rows[seq].lost = True
            raise

    def _open(self) -> ml.Context:
        assert self._backend is not None
        return self._backend.new_context()


def shifted(row: StateRow, begin: int, end: int) -> StateRow:
    """The row after removing ``[begin, end)`` from the middle."""
    distance = end - begin
    points = [point for point in row.checkpoints if point.offset <= begin]
    # The one at ``end`` would move to ``begin``, but the state at ``begin`` must not have seen the range.
    points += [
        replace(point, offset=point.offset - distance) for point in row.checkpoints if point.offset > end
    ]
    inside = {
        at if at <= begin else at - distance: states
        for at, states in row.inside.items()
        if at <= begin or at > end
    }
    computed = row.computed
    if computed is not None and computed > begin:
        computed = max(begin, computed - distance)
    offset = row.offset - distance
    return replace(row, offset=offset, checkpoints=tuple(points), inside=inside, computed=computed)


def state_lost(op: str, seq: int) -> SequenceLostError:
    """The error for a sequence whose state was lost in a device failure."""
    return SequenceLostError(
        f"{op}: the device failed while the state of sequence {seq} was being moved; "
        f"call remove({seq}, 0) and compute it again"
    )
