"""The cache of hybrid models: recurrent states beside an attention cache.

After Ollama's kvcache/recurrent.go and its checkpoints, and the single-sequence recurrent cache of its
MLX runner. Layers with a linear or state-space recurrence keep, per sequence, a convolution state and
a recurrent (delta, SSM) state of fixed size; layers with attention use ``put``, ``get`` and ``attend``.

A state is whole: it is that of one position and cannot be cut. Going back therefore means going to a
checkpoint, and computing again from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

import ml
from kvcache.batches import Group, check_sequence, group_batch
from kvcache.cache import (
    Batch,
    InvalidBatchError,
    InvalidRangeError,
    Mask,
    NotSupportedError,
    OrderError,
    SequenceLostError,
    ShiftFunction,
)
from kvcache.causal import CausalCache, drop_middle
from kvcache.scheduling import Schedule
from kvcache.snapshots import RecurrentSnapshot, carried_out, check_inside, check_kind
from kvcache.states import (
    Arrangement,
    Checkpoint,
    HeldStates,
    Pass,
    StateBuffers,
    StateRow,
    arrange,
    lost_in,
)

if TYPE_CHECKING:
    from kvcache.views.models import CachePicture

__all__ = ["RecurrentCache"]


class RecurrentCache:
    """Per-sequence states, checkpoints of them, and a causal cache for the attention layers.

    ``conv_shape`` and ``state_shape`` are one sequence's: (channels, kernel - 1) and (heads, key_dim,
    value_dim), say. The recurrent state is always F32; the convolution state has ``conv_dtype``, the
    dtype of the model's activations (None: what ``init`` is given, F32 for block formats).

    A checkpoint is taken when a pass begins and ``checkpoint_interval`` tokens have gone by since the
    last one; the latest ``checkpoints`` of each sequence are kept, ``checkpoint(seq)`` takes one now.

    **Going back.** ``remove(seq, position)`` goes to ``position`` when the state or a checkpoint is
    there, else to the nearest checkpoint before it, else to 0: ``offset(seq)`` says where, and the next
    batch has to begin there. After a failed pass, ``remove(seq, position)`` with the batch's first
    position does the same.
    """

    def __init__(
        self,
        conv_shape: tuple[int, ...],
        state_shape: tuple[int, ...],
        shift: ShiftFunction | None = None,
        checkpoints: int = 24,
        checkpoint_interval: int = 256,
        conv_dtype: ml.DType | None = None,
    ) -> None:
        if checkpoints < 0 or checkpoint_interval < 1:
            raise InvalidRangeError(
                f"RecurrentCache: checkpoints={checkpoints} (>= 0), interval {checkpoint_interval} (>= 1)"
            )
        self.conv_shape, self.state_shape = tuple(conv_shape), tuple(state_shape)
        self.attention = CausalCache(shift)
        """The cache of the attention layers."""
        self._checkpoints, self._interval = checkpoints, checkpoint_interval
        self._conv_dtype = conv_dtype
        self._forget()

    def _forget(self) -> None:
        self._rows: list[StateRow] = []
        self._buffers = StateBuffers(0)
        self._pass: Pass | None = None
        self._schedule: Schedule[RecurrentSnapshot] = Schedule()

    # Setting up and closing.

    def init(
        self, backend: ml.Backend, dtype: ml.DType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to ``backend``: a slot per sequence in every recurrent layer, allocated when first used."""
        self.attention.init(backend, dtype, max_sequences, capacity, max_batch)
        self._max_sequences = max_sequences
        self._rows = [StateRow() for _ in range(max_sequences)]
        self._buffers = StateBuffers(max_sequences, backend)
        self._conv = self._conv_dtype or (ml.DType.F32 if dtype.is_quantized else dtype)

    def set_config(self, config: ml.CacheConfig) -> None:
        self.attention.set_config(config)

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        """As CausalCache.prepare_set_config."""
        return self.attention.prepare_set_config(config)

    def close(self) -> None:
        """As CausalCache.close: what snapshots hold of the states is copied out first."""
        self.attention.close()
        self._buffers.release_all()
        self._forget()

    # One pass.

    def start_forward(self, ctx: ml.Context, batch: Batch, reserve: bool = False) -> None:
        """Give the batch's sequences states of their own, side by side; the previous pass ends.

        The tokens of each sequence come in ascending positions and begin at ``offset(seq)``: a
        recurrence cannot skip a token. InvalidBatchError otherwise, and as CausalCache.
        """
        backend = self._bound("start_forward")
        groups = group_batch(batch, self._max_sequences)
        if self._schedule and not reserve:
            for group in groups:
                self._capture(group.seq)
        order = tuple(dict.fromkeys(int(seq) for seq in batch.sequences))
        if not reserve:
            for group in groups:
                self._check_group(group)
        under_way, lost = self.attention.pass_under_way(), _lost_rows(self._rows)
        self.attention.start_forward(ctx, batch, reserve)
        if reserve:
            self._pass = Pass(order, 0, reserve=True)
            return
        try:
            self._start(backend, order, groups)
        except BaseException:
            if _lost_rows(self._rows) != lost:
                self._pass = under_way = None  # states of the pass under way may be among the lost
            self.attention.undo_forward(under_way)
            raise

    def _check_group(self, group: Group) -> None:
        row = self._rows[group.seq]
        if row.lost:
            raise _lost("start_forward", group.seq)
        in_order = isinstance(group.rows, slice) or bool((np.diff(group.rows) > 0).all())
        if not in_order or not group.is_run() or group.lowest != row.offset:
            raise InvalidBatchError(
                f"start_forward: positions {group.positions.tolist()} of sequence {group.seq}, whose "
                f"recurrent state has seen {row.offset} tokens; they come in order and begin there"
            )

    def _start(self, backend: ml.Backend, order: tuple[int, ...], groups: list[Group]) -> None:
        """Take due checkpoints, then move states into place; only the last step writes."""
        plan = arrange(self._rows, order, self._buffers.held().keys())
        moved = (seq for seq, slot in plan.slots.items() if self._rows[seq].slot != slot)
        before = {seq: replace(self._rows[seq]) for seq in {*order, *moved}}
        taken = self._carry_out(backend, order, plan)
        for seq, slot in plan.slots.items():
            self._rows[seq].slot = slot
        for group in groups:
            row = self._rows[group.seq]
            row.pending = None
            row.offset += len(group)
            if group.seq in taken:
                self._keep(row, taken[group.seq])
        self._pass = Pass(order, plan.start, before)

    def _carry_out(
        self, backend: ml.Backend, order: tuple[int, ...], plan: Arrangement
    ) -> dict[int, Checkpoint]:
        """The checkpoints that were due; the states are where ``plan`` wants them.

        What is held in slots that are written now, or by the pass, is copied out before.
        """
        taken = {seq: self._point(self._rows[seq]) for seq in order if self._is_due(self._rows[seq])}
        if not plan.moves and not plan.loads and not self._buffers.held(plan.written):
            return taken
        writing = False
        try:
            with backend.new_context() as ctx:
                write = self._buffers.prepare(ctx, plan)
                self._buffers.release(ctx, plan.written)
                writing = True
                write()
                ctx.compute()
        except BaseException:  # closing the context may fail too, when all is written
            if writing:
                lost_in(self._rows, plan)
            raise
        return taken

    def _is_due(self, row: StateRow) -> bool:
        if not self._checkpoints:
            return False
        last = max((point.offset for point in row.checkpoints), default=0)
        return row.offset - last >= self._interval

    def _keep(self, row: StateRow, checkpoint: Checkpoint) -> None:
        others = [point for point in row.checkpoints if point.offset != checkpoint.offset]
        row.checkpoints = (*others, checkpoint)[-self._checkpoints :] if self._checkpoints else ()

    def pass_under_way(self) -> object:
        """The pass that the last ``start_forward`` began, for ``undo_forward``; None where it is over."""
        return None if self._pass is None else (self._pass, self.attention.pass_under_way())

    def undo_forward(self, resume: object = None) -> None:
        """Take back the last ``start_forward``, provided that no state was set since.

        States that it moved go back to where they were, so that the pass ``resume`` goes on with its
        views. A device that fails in this leaves the sequences that it moved lost.
        """
        backend, current = self._bound("undo_forward"), self._pass
        own, attention = resume if isinstance(resume, tuple) else (None, None)
        self.attention.undo_forward(attention)
        self._pass = None
        if current is not None:
            self._move_back(backend, current.before)
        self._pass = own

    def _move_back(self, backend: ml.Backend, before: dict[int, StateRow]) -> None:
        now = {seq: self._rows[seq].slot for seq in before}
        for seq, row in before.items():
            self._rows[seq] = replace(row, slot=None if row.slot is None else now[seq])
        moved = [seq for seq, row in before.items() if row.slot is not None and now[seq] != row.slot]
        intact = {row.slot for seq, row in enumerate(self._rows) if seq not in moved}
        moves = {before[seq].slot: now[seq] for seq in moved}  # sharers of a slot hold the same state
        pairs = tuple(
            (source, target)
            for target, source in moves.items()
            if source is not None and target is not None and target not in intact
        )
        if pairs:
            self._move(backend, pairs, moved)
        for seq, row in before.items():
            self._rows[seq].slot = row.slot

    def _move(self, backend: ml.Backend, pairs: tuple[tuple[int, int], ...], moved: list[int]) -> None:
        try:
            with backend.new_context() as ctx:
                plan = Arrangement(0, {}, pairs, ())
                write = self._buffers.prepare(ctx, plan)
                self._buffers.release(ctx, plan.written)
                write()
                ctx.compute()
        except BaseException:
            for seq in moved:
                self._rows[seq].lost = True
            raise

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences of the pass, in the order of the states' first axis."""
        return self._started("sequences").sequences

    def conv_state(self, ctx: ml.Context, layer: int) -> ml.Tensor:
        """The convolution states (sequences, *conv_shape) of the pass, zero for new sequences.

        A view: it may be updated in place (``copy`` or ``set_rows`` into it), or given back changed
        through ``set_conv_state``.
        """
        return self._state(ctx, "conv", layer, self.conv_shape, self._conv)

    def set_conv_state(self, ctx: ml.Context, layer: int, t: ml.Tensor) -> None:
        """Store new convolution states (sequences, *conv_shape), converted to their dtype."""
        self._set(ctx, "set_conv_state", self.conv_state(ctx, layer), t)

    def recurrent_state(self, ctx: ml.Context, layer: int) -> ml.Tensor:
        """The recurrent states (sequences, *state_shape) of the pass, F32; a view, as ``conv_state``."""
        return self._state(ctx, "recurrent", layer, self.state_shape, ml.DType.F32)

    def set_recurrent_state(self, ctx: ml.Context, layer: int, t: ml.Tensor) -> None:
        """Store new recurrent states (sequences, *state_shape)."""
        self._set(ctx, "set_recurrent_state", self.recurrent_state(ctx, layer), t)

    def _state(
        self, ctx: ml.Context, kind: str, layer: int, shape: tuple[int, ...], dtype: ml.DType
    ) -> ml.Tensor:
        current = self._started(f"{kind}_state")
        if layer < 0:
            raise InvalidRangeError(f"{kind}_state: layer {layer}; layers count from 0")
        buffer = self._buffers.ensure(ctx, kind, layer, shape, dtype)
        if current.reserve:  # allocated and touched, but what sequences hold is not at hand
            return ctx.layer(layer).zeros((len(current.sequences), *shape), dtype)
        self._buffers.copy_out(range(current.start, current.start + len(current.sequences)))
        return buffer.slice(ctx, 0, current.start, current.start + len(current.sequences))

    def _set(self, ctx: ml.Context, op: str, state: ml.Tensor, t: ml.Tensor) -> None:
        if t.shape != state.shape:
            raise InvalidRangeError(f"{op}: {t.shape}; the states of this pass are {state.shape}")
        ctx.forward(t.copy(ctx, state))

    # The attention layers.

    def set_layer(self, layer: int) -> None:
        self.attention.set_layer(layer)

    def set_causal(self, ctx: ml.Context, except_: Iterable[int] = ()) -> None:
        self.attention.set_causal(ctx, except_=except_)

    def put(self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        self.attention.put(ctx, key, value)

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        return self.attention.get(ctx)

    def attend(
        self, ctx: ml.Context, query: ml.Tensor, scale: float, sinks: ml.Tensor | None = None
    ) -> ml.Tensor:
        return self.attention.attend(ctx, query, scale, sinks)

    # Sequences.

    def offset(self, seq: int) -> int:
        """How many tokens the state has seen: where the next batch of this sequence begins."""
        self._bound("offset")
        check_sequence("offset", seq, self._max_sequences)
        return self._rows[seq].offset

    def checkpoint(self, seq: int) -> None:
        """Keep a copy of the state as it is now, when a pass has set the states of all layers."""
        taken = self.mark(seq, "checkpoint")
        if taken.offset:
            self._keep(self._rows[seq], taken)

    def mark(self, seq: int, op: str = "mark") -> Checkpoint:
        """A copy of the state as it is now, for ``prepare_return``; the caller's alone.

        It is none of ``checkpoints(seq)``, so that it takes the place of none.
        """
        self._bound(op)
        check_sequence(op, seq, self._max_sequences)
        row = self._rows[seq]
        if row.lost:
            raise _lost(op, seq)
        taken = self._point(row)
        taken.state.detach()
        return taken

    def _point(self, row: StateRow) -> Checkpoint:
        """The state of a row as it is now; nothing is copied."""
        if row.slot is None:
            return replace(row.pending or Checkpoint(0, HeldStates()), offset=row.offset)
        return Checkpoint(row.offset, self._buffers.hold(row.slot))

    def _row_at(self, point: Checkpoint, kept: tuple[Checkpoint, ...]) -> StateRow:
        """A row that goes on from ``point``: in its slot where it still lies in one."""
        slot = point.state.slot_in(self._buffers)
        return StateRow(point.offset, slot, point if slot is None else None, kept)

    def prepare_return(self, seq: int, mark: Checkpoint) -> Callable[[], None]:
        """Check all that going back to ``mark`` may refuse; the callable returned then does it.

        It is one that ``mark(seq)`` gave, of tokens that the sequence still begins with.
        """
        offset = self.offset(seq)
        if mark.offset > offset:
            raise InvalidRangeError(
                f"prepare_return: a mark at {mark.offset} of sequence {seq}, which is at {offset}"
            )
        cut = self.attention.prepare_remove(seq, mark.offset, None)
        kept = tuple(point for point in self._rows[seq].checkpoints if point.offset <= mark.offset)

        def commit() -> None:
            self._pass = None
            cut()
            self._rows[seq] = self._row_at(mark, kept) if mark.offset else StateRow(checkpoints=kept)
            self._schedule.cut(seq, mark.offset)

        return commit

    def checkpoints(self, seq: int) -> tuple[int, ...]:
        """The positions that a sequence can go back to exactly, ascending."""
        self._bound("checkpoints")
        check_sequence("checkpoints", seq, self._max_sequences)
        return tuple(sorted(point.offset for point in self._rows[seq].checkpoints))

    def prepare_restore(self, seq: int, position: int) -> int | None:
        """Where ``remove(seq, position)`` would go: at or before ``position``; None: back to nothing."""
        self._bound("prepare_restore")
        check_sequence("prepare_restore", seq, self._max_sequences)
        if not self.attention.can_resume(seq, 0):  # a device failure took its keys
            return None
        return self._at(self._rows[seq], position).offset or None

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether the state of exactly ``position`` is there, or that of the beginning is meant."""
        if position == 0:
            return self.attention.can_resume(seq, 0)
        return self.prepare_restore(seq, position) == position

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` whose state is there; 0: from nothing."""
        return self.prepare_restore(seq, position) or 0

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        """Let ``dst_seq`` share ``[0, length)``; no data moves until one of the two is continued.

        Where ``src_seq`` has gone past ``length``, ``dst_seq`` begins at its nearest checkpoint before
        that: see ``offset``.
        """
        self.prepare_copy_prefix(src_seq, dst_seq, length)()

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        self._bound("copy_prefix")
        check_sequence("copy_prefix", src_seq, self._max_sequences)
        check_sequence("copy_prefix", dst_seq, self._max_sequences)
        source = self._rows[src_seq]
        if source.lost:
            raise _lost("copy_prefix", src_seq)
        if length < 0:
            raise InvalidRangeError(f"copy_prefix: length {length}; it is >= 0")
        row = self._at(source, length)
        share = self.attention.prepare_copy_prefix(src_seq, dst_seq, row.offset)

        def commit() -> None:
            self._pass = None
            share()
            self._rows[dst_seq] = row
            self._schedule.replace(dst_seq)

        return commit

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        """Forget ``[begin, end)``.

        To the end (None): goes back as the class says. From the middle: later tokens move down as in
        CausalCache, checkpoints with them, and the state stays what it is, having seen what was removed
        (as a context shift wants it). Checkpoints that have seen some of the range and nothing after
        it are dropped: none of them is the state of a position that is left.
        """
        self.prepare_remove(seq, begin, end)()

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        self._bound("remove")
        check_sequence("remove", seq, self._max_sequences)
        if begin < 0 or (end is not None and end < begin):
            raise InvalidRangeError(f"remove: [{begin}, {end}); it needs 0 <= begin <= end")
        row = self._rows[seq]
        if end is None or end >= row.offset:
            if row.lost and begin > 0 and row.nearest(begin) is None:
                raise _lost("remove", seq)
            row = self._at(row, begin)
            cut = self.attention.prepare_remove(seq, row.offset, None)
        elif row.lost:
            raise _lost("remove", seq)
        else:
            cut = self.attention.prepare_remove(seq, begin, end)
            row = _shifted(row, begin, end)

        def commit() -> None:
            self._pass = None
            cut()
            self._rows[seq] = row
            self._schedule.cut(seq, min(begin, row.offset))

        return commit

    # Snapshots.

    def schedule_snapshots(self, seq: int, positions: Sequence[int]) -> None:
        """As CausalCache.schedule_snapshots, but a batch has to end at each of ``positions``.

        The state inside a batch is never there to be copied: a position that a batch runs past is
        not taken. ``next_snapshot(seq)`` says where to end one.
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

    def rolled_back(self, seq: int) -> int | None:
        """As CausalCache.rolled_back."""
        self.offset(seq)
        return self._schedule.lowest_cut(seq)

    def _capture(self, seq: int) -> None:
        """Take what is due, when a pass has set the states of all layers."""
        offset = self._rows[seq].offset
        for begin, end in self._schedule.due(seq, offset):
            if end == offset:
                self._schedule.taken(seq, self.snapshot(seq, begin, end))
            else:
                self._schedule.skip(seq, end)

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> RecurrentSnapshot:
        """The state at ``end`` (None: where the sequence is), with the attention layers' [begin, end).

        Nothing is copied until the state is about to be written over, by a pass of the sequence mostly.
        Views that ``conv_state`` and ``recurrent_state`` gave before are not to be written any more: ask
        for them again.

        Raises NotSupportedError where no state of ``end`` is there: it is ``offset(seq)``, 0, or one of
        ``checkpoints(seq)``.
        """
        self._bound("snapshot")
        offset, row = self.offset(seq), self._rows[seq]
        end = offset if end is None else end
        if row.lost:
            raise _lost("snapshot", seq)
        attention = self.attention.snapshot(seq, begin, end)
        return RecurrentSnapshot(attention, self._state_of(seq, row, end))

    def _state_of(self, seq: int, row: StateRow, end: int) -> HeldStates:
        if not end:
            return HeldStates()
        point = self._point(row) if end == row.offset else row.nearest(end)
        if point is None or point.offset != end:
            raise NotSupportedError(
                f"snapshot: sequence {seq} has no state of position {end}; there are those of "
                f"{[*self.checkpoints(seq), row.offset]}"
            )
        return point.state

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
        self._bound("restore")
        check_sequence("restore", seq, self._max_sequences)
        check_kind("restore", self, snapshot, RecurrentSnapshot)
        if target not in (None, snapshot.end):
            return None
        here = snapshot.state.slot_in(self._buffers) is not None
        if not here:
            self._check_states(snapshot)
        put_back = self.attention.prepare_restore_snapshot(seq, snapshot.attention)
        if put_back is None:
            return None
        state = snapshot.state if here else snapshot.state.copies()

        def commit() -> None:
            put_back()
            self._pass = None
            point = Checkpoint(snapshot.end, state)
            kept = tuple(other for other in self._rows[seq].checkpoints if other.offset <= snapshot.begin)
            self._rows[seq] = self._row_at(point, kept) if snapshot.end else StateRow(checkpoints=kept)
            self._schedule.cut(seq, snapshot.begin)
            if snapshot.end:
                self._keep(self._rows[seq], point)

        return commit

    def _check_states(self, snapshot: RecurrentSnapshot) -> None:
        here = {
            "conv": ((1, *self.conv_shape), self._conv),
            "recurrent": ((1, *self.state_shape), ml.DType.F32),
        }
        with self._bound("restore").new_context() as ctx:
            states = snapshot.state.read(ctx)
        for (kind, layer), tensor in states.items():
            shape, dtype = here[kind]
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise InvalidRangeError(
                    f"restore: the {kind} state {tensor.shape} {tensor.dtype.name} of layer {layer}; here it "
                    f"is {shape} {dtype.name}"
                )

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

    def shift_context(self, seq: int, keep: int) -> int:
        """As CausalCache.shift_context; the recurrent state stays what it is."""
        return drop_middle(self, seq, keep, self.offset(seq))

    def mark_lost(self, seq: int) -> None:
        """As CausalCache.mark_lost."""
        self.attention.mark_lost(seq)

    def _at(self, row: StateRow, length: int) -> StateRow:
        """A row with the state of ``length`` tokens, or of the nearest checkpoint before, or empty."""
        if row.offset <= length and not row.lost:
            return replace(row)
        point = row.nearest(length)
        if point is None:
            return StateRow()
        kept = tuple(other for other in row.checkpoints if other.offset <= point.offset)
        return self._row_at(point, kept)

    @property
    def backend(self) -> ml.Backend:
        return self._bound("backend")

    @property
    def max_sequences(self) -> int:
        return self.attention.max_sequences

    def settings(self) -> dict[str, object]:
        """As CausalCache.settings."""
        states = {"conv": [*self.conv_shape, self._conv.name], "state": [*self.state_shape]}
        return {"kind": type(self).__name__, "attention": self.attention.settings(), **states}

    @property
    def on_pressure(self) -> Callable[[int], bool | None] | None:
        """As CausalCache.on_pressure."""
        return self.attention.on_pressure

    @on_pressure.setter
    def on_pressure(self, call: Callable[[int], bool | None] | None) -> None:
        self.attention.on_pressure = call

    @property
    def nbytes(self) -> int:
        """Bytes of the states' buffers, of checkpoints that are copies, and of the attention layers."""
        points = (point for row in self._rows for point in row.checkpoints)
        shared = {id(tensor): tensor.nbytes for point in points for tensor in point.state.copied.values()}
        return self._buffers.nbytes + sum(shared.values()) + self.attention.nbytes

    def render(self) -> CachePicture:
        """As CausalCache.render."""
        from kvcache.views.caches import look

        return look(self)

    def _bound(self, op: str) -> ml.Backend:
        return self.attention._bound(op)

    def _started(self, op: str) -> Pass:
        self._bound(op)
        if self._pass is None:
            raise OrderError(f"{op}: no pass is under way; call start_forward first")
        return self._pass


def _shifted(row: StateRow, begin: int, end: int) -> StateRow:
    """The row after ``[begin, end)`` was taken out of the middle."""
    distance = end - begin
    points = [point for point in row.checkpoints if point.offset <= begin]
    # The one at ``end`` would be at ``begin`` then, and the state of ``begin`` has seen none of it.
    points += [
        replace(point, offset=point.offset - distance) for point in row.checkpoints if point.offset > end
    ]
    return replace(row, offset=row.offset - distance, checkpoints=tuple(points))


def _lost_rows(rows: Sequence[StateRow]) -> list[bool]:
    return [row.lost for row in rows]


def _lost(op: str, seq: int) -> SequenceLostError:
    return SequenceLostError(
        f"{op}: the device failed while the state of sequence {seq} was being moved; "
        f"call remove({seq}, 0) and compute it again"
    )
