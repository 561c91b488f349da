"""The cache of recurrent states: what layers with a linear or state-space recurrence keep of a sequence.

After Ollama's kvcache/recurrent.go and its checkpoints, and the single-sequence recurrent cache of its
MLX runner. Such a layer keeps, per sequence, states of fixed size: the last inputs of a convolution, a delta
or SSM matrix. It takes no cells, and knows nothing of attention: a WrapperCache puts it beside caches that do
(kvcache.caches.recurrent).

A state is whole: it is that of one position and cannot be cut. There are two ways back to an earlier one:
what the cache keeps itself (checkpoints, and states inside the last pass where they were wanted), and
snapshots, which the caller holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import ml
from kvcache.attention.batch import check_modes, check_tensors, split_batch
from kvcache.cache import (
    Batch,
    CacheDType,
    Mask,
    NotSupportedError,
    OrderError,
    check_context,
    check_thread,
    check_whole,
)
from kvcache.caches.base import BoundCache, ManagedSnapshots
from kvcache.caches.one_thread import is_foreign, one_call, one_thread
from kvcache.snapshots.schedule import SnapshotSchedule
from kvcache.snapshots.snapshot import StateSnapshot
from kvcache.snapshots.states import StateSnapshots
from kvcache.storage.formats import CacheFormat
from kvcache.storage.sizes import bytes_text
from kvcache.storage.state_slots import StatePass
from kvcache.storage.state_specs import StateSpec, StateSpecs
from kvcache.storage.state_table import StateTable, shifted, state_lost


class StateCache(BoundCache[StatePass, StateSnapshot], ManagedSnapshots[StateSnapshot]):
    """Per-sequence states of any number, shapes and dtypes, and checkpoints of them; no keys and values.

    ``states`` says which: those of a layer by its number, those of all others under None::

        mamba = {"conv": StateSpec((channels, 3)), "ssm": StateSpec((heads, dim, size), ml.DType.F32)}
        states = StateCache({None: mamba})
        cache = WrapperCache(CausalCache(), states)
        ...
        cache.set_layer(layer)
        ssm = states.state(ctx, "ssm")           # (sequences, heads, dim, size)
        states.update_state(ctx, "ssm", new)

    A state that is declared nowhere has the shape and dtype of what ``update_state`` brings first. ``dtype``
    is that of the model's activations, and so of states that are declared without one (None: what ``init``
    is given, F32 where that is not one plain dtype).

    Every pass asks for all states, or gives them: ``states`` must name no layer that has none. One that is
    first used in a later pass is missing for the tokens before it, and reading it for their sequences raises
    OrderError. With ``skips=True`` it is zero instead. A pass that leaves out one that was used before
    counts as one that failed with ``skips`` too: its states can be read, but ``computed(seq)`` stays, and no
    snapshot is taken, until its tokens are taken back.

    **States inside a batch.** A recurrence leaves the state of a batch's end alone. A model that can give
    those of positions inside asks ``wanted_states``, cuts its scan there or computes the states of all
    tokens, and gives them to ``deliver_states`` (``delivers=True`` says of a cache that its model does). They
    are wanted for snapshots that are scheduled, and by ``want_states``: for drafted tokens, say. Until its
    next pass the sequence can go back to them.

    A checkpoint is taken when a pass begins and ``checkpoint_interval`` tokens have gone by since the
    last one; the latest ``checkpoints`` of each sequence are kept, ``checkpoint(seq)`` takes one now.

    **Going back.** ``remove(seq, position)`` goes to ``position`` when the state, a checkpoint or one inside
    the last pass is there, else to the nearest before it, else to 0: ``offset(seq)`` says where, and the next
    batch has to begin there. After a failed pass, ``remove(seq, position)`` with the batch's first
    position does the same.
    ``remove`` from the middle moves checkpoints down with the tokens, and the state stays what it is, having
    seen what was removed (as a context shift wants it); checkpoints that have seen some of the range and
    nothing after it are dropped: none of them is the state of a position that is left.
    """

    def __init__(
        self,
        states: Mapping[int | None, Mapping[str, StateSpec]] | None = None,
        checkpoints: int = 24,
        checkpoint_interval: int = 256,
        dtype: ml.DType | None = None,
        *,
        delivers: bool = False,
        skips: bool = False,
    ) -> None:
        super().__init__()
        check_whole("StateCache", "checkpoints", checkpoints)
        check_whole("StateCache", "checkpoint_interval", checkpoint_interval, least=1)
        self.delivers = delivers
        """Whether the model gives the states inside a batch that are wanted: it may end anywhere then."""
        self._specs = StateSpecs(states or {})
        self._wants: dict[int, tuple[int, ...]] = {}
        self.snapshots: StateSnapshots = StateSnapshots()
        """Takes and restores what sequences hold."""
        self._checkpoints, self._interval, self._skips = checkpoints, checkpoint_interval, skips
        self._activations = dtype
        self._states = self.snapshots.states

    # Setting up and closing.

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to ``backend``: a slot per sequence in every layer with states, allocated when first used.

        A state is of fixed size: ``capacity`` and ``max_batch`` bound nothing here.
        """
        sizes = {"max_sequences": max_sequences, "capacity": capacity, "max_batch": max_batch}
        self._dtype = self._check_init(backend, dtype, **sizes)
        self._max_sequences = max_sequences
        declared = None if self._skips else self._specs.by_layer
        self._states = StateTable(max_sequences, backend, self._checkpoints, self._interval, declared)
        self._specs.bind(self._activations or CacheFormat.of(dtype).plain or ml.DType.F32)
        self.snapshots.bind(self._states, self._specs)
        self._backend, self._closed = backend, False

    def learn_state(self, name: str, spec: StateSpec, layer: int | None = None) -> None:
        """Say what a state is like, of a layer or (None) of all; one that is known stays.

        For models whose configuration does not tell: after ``init``, and before its first ``state``.
        """
        self._specs.declare(name, spec, layer)

    def state_spec(self, name: str, layer: int) -> StateSpec | None:
        """What is known of a state: declared, or found. None: nothing."""
        return self._specs.get(name, layer)

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        """States lie as they are declared, whatever the configuration."""
        if self._states.nbytes or self._pass is not None:
            raise OrderError("set_config: states are already stored; call set_config before the first batch")

        def commit() -> None:
            self._config = config

        return commit

    def close(self) -> None:
        """As CausalCache.close: what snapshots hold of the states is copied out first."""
        self.snapshots.close()
        self._states, self._pass, self._wants = self.snapshots.states, None, {}
        self._layer = 0
        self._backend, self._closed = None, True

    # One pass.

    @one_call
    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Give the batch's sequences states of their own, side by side; the previous pass ends.

        The tokens of each sequence come in ascending positions and begin at ``offset(seq)``: a
        recurrence cannot skip a token. InvalidBatchError otherwise, and as CausalCache.

        With ``read_only`` positions are free, as in CausalCache; the states, which have seen ``offset(seq)``
        tokens whatever the positions, are given as copies, and setting them raises OrderError.
        """
        check_context("start_forward", ctx, self._bound("start_forward"))
        check_modes(reserve, read_only)
        groups = split_batch(batch, self._max_sequences)
        tokens = Counter(int(seq) for seq in batch.sequences)
        if not reserve:
            for group in groups:
                follow = read_only or group.follow(self._states.rows[group.seq].offset)
                self._states.check_start(group.seq, group.positions, follow)
        before = self._pass
        if before is not None:
            self._states.end(before)
        if reserve or read_only:
            behind = [] if reserve else self._states.to_refuse(tokens)
            self._pass = StatePass(tokens, 0, reserve=reserve, read_only=read_only, behind=behind)
            return
        lost = self._states.lost()
        try:
            for group in groups if self.snapshots.schedule else ():
                self.snapshots.capture(group.seq)
            self._pass = self._states.start(tokens, self._inside(tokens))
        except BaseException:
            # States of the pass under way may be among the lost: it does not go on then.
            self._go_on(before if self._states.lost() == lost else None)
            raise
        if self._wants:
            self._pass.wants = self._wants
            self._wants = {seq: wanted for seq, wanted in self._wants.items() if seq not in tokens}

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._states.end(self._pass)
        self._pass = None

    def _inside(self, tokens: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """After how many of its tokens in a pass the state of a sequence is wanted, but that of the end."""
        schedule, inside_of = self.snapshots.schedule, {}
        for seq, count in tokens.items() if schedule or self._wants else ():
            offset = self._states.rows[seq].offset
            wanted = {position - offset for position in (*schedule.positions(seq), *self._wants.get(seq, ()))}
            if inside := tuple(sorted(n for n in wanted if 0 < n < count)):
                inside_of[seq] = inside
        return inside_of

    def foreign_pass(self) -> bool | None:
        current = self._pass
        if current is None or not is_foreign(current):
            return False
        return not self._states.is_whole(current) if current.asked else None

    def pass_under_way(self) -> StatePass | None:
        """The pass that the last ``start_forward`` began, for ``undo_forward``; None where it is over."""
        return self._pass

    def undo_forward(self, resume: object = None) -> None:
        """Take back the last ``start_forward``, provided that no state was set since.

        States that it moved go back to where they were, so that the pass ``resume`` goes on with its
        views. A device that fails in this leaves the sequences that it moved lost, and no pass goes on.
        """
        self._bound("undo_forward")
        current, going_on = self._pass, resume if isinstance(resume, StatePass) else None
        if current is not None:
            check_thread("undo_forward", current.thread)
        try:
            if current is not None:
                self._wants = {**self._wants, **(current.wants or {})}
                self._states.take_back(current)
        except BaseException:
            going_on = None
            raise
        finally:
            self._go_on(going_on)

    def _go_on(self, current: StatePass | None) -> None:
        """A pass goes on after another was refused: the snapshots of its tokens are taken anew."""
        self._pass = current
        for seq, before in self._states.go_on(current).items():
            self.snapshots.schedule.again(seq, before)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences of the pass, in the order of the states' first axis."""
        return self._started("sequences").sequences

    def state(self, ctx: ml.Context, name: str, layer: int | None = None) -> ml.Tensor:
        """The states ``name`` (sequences, *shape) of a layer in the pass, zero for new sequences.

        ``layer`` None: that of ``set_layer``. A view: it may be updated in place (``copy`` or ``set_rows``
        into it), or given back changed through ``update_state``. In a pass that only reads, a copy.
        OrderError for a state that is not declared, and was never stored; and where a pass before this one
        failed, or did not ask for it.
        """
        return self._read(ctx, "state", name, layer)

    def update_state(self, ctx: ml.Context, name: str, t: ml.Tensor, layer: int | None = None) -> None:
        """Store new states ``name`` (sequences, *shape), converted to their dtype.

        DTypeError for integers where the state is of floats, and for floats where it is of integers.
        OrderError where it was updated in this pass and read behind that, as by a loop that forgets
        ``set_layer``.
        """
        self._update(ctx, "update_state", name, t, layer)

    def conv_state(self, ctx: ml.Context, layer: int) -> ml.Tensor:
        """``state(ctx, "conv", layer)``."""
        return self._read(ctx, "conv_state", "conv", layer)

    def set_conv_state(self, ctx: ml.Context, layer: int, t: ml.Tensor) -> None:
        """``update_state(ctx, "conv", t, layer)``."""
        self._update(ctx, "set_conv_state", "conv", t, layer)

    def recurrent_state(self, ctx: ml.Context, layer: int) -> ml.Tensor:
        """``state(ctx, "recurrent", layer)``."""
        return self._read(ctx, "recurrent_state", "recurrent", layer)

    def set_recurrent_state(self, ctx: ml.Context, layer: int, t: ml.Tensor) -> None:
        """``update_state(ctx, "recurrent", t, layer)``."""
        self._update(ctx, "set_recurrent_state", "recurrent", t, layer)

    def _read(self, ctx: ml.Context, op: str, name: str, layer: int | None) -> ml.Tensor:
        current, key = self._started(op), (name, self._layer if layer is None else layer)
        state = self._state(ctx, op, current, key)
        self._states.check_readable(op, current)
        current.asked.add(key)
        if key in current.updated:
            current.updated[key] = True
        return state

    def _state(self, ctx: ml.Context, op: str, current: StatePass, key: tuple[str, int]) -> ml.Tensor:
        name, layer = key
        spec = self._specs.known(op, name, layer)
        assert spec.dtype is not None
        shape, dtype = spec.shape, spec.dtype
        buffers, count = self._states.buffers, len(current.tokens)
        buffer = buffers.tensors.get(key)
        if buffer is None:
            check_context(op, ctx, self._bound(op))
            buffer = self._states.buffer(ctx, key, current, shape, dtype)
        if current.reserve:  # allocated and touched, but what sequences hold is not at hand
            return ctx.layer(layer).zeros((count, *shape), dtype)
        if current.read_only:
            return self._states.read(ctx.layer(layer), key, current.sequences, shape, dtype)
        buffers.copy_out(range(current.start, current.start + count))
        return buffer.slice(ctx, 0, current.start, current.start + count)

    def _update(self, ctx: ml.Context, op: str, name: str, t: ml.Tensor, layer: int | None) -> None:
        current, key = self._started(op), (name, self._layer if layer is None else layer)
        check_tensors(op, state=t)
        if current.read_only:
            raise OrderError(f"{op}: this pass is read-only; call start_forward without read_only to store")
        self._specs.fitting(op, *key, t, len(current.tokens))
        if current.updated.get(key):
            raise OrderError(
                f"{op}: state {name!r:.40} of layer {key[1]} was updated in this pass and read, and would be "
                "replaced; name the layer, or call set_layer before each, and start_forward before the next "
                "pass"
            )
        ctx.forward(t.copy(ctx, self._state(ctx, op, current, key)))
        current.asked.add(key)
        current.updated[key] = False

    # States inside a pass.

    def want_states(self, seq: int, positions: Iterable[int]) -> None:
        """Have the next pass of a sequence keep its states at ``positions``, to go back to, if the model can.

        In place of those that were wanted before. They are kept until the pass after; ``remove``,
        ``copy_prefix`` and ``restore`` forget what is wanted of a sequence that they change.
        """
        self.offset(seq)
        wanted = tuple(positions)
        for position in wanted:
            check_whole("want_states", "position", position)
        self._wants[seq] = wanted

    def wanted_states(self) -> Mapping[int, tuple[int, ...]]:
        """After how many of its tokens in this pass the state of a sequence is wanted, ascending.

        For each sequence of which some are: ``{0: (3, 7)}``. That of the end goes by ``update_state``.
        """
        return self._started("wanted_states").wanted

    def deliver_states(
        self,
        ctx: ml.Context,
        name: str,
        t: ml.Tensor,
        at: Sequence[tuple[int, int]],
        layer: int | None = None,
    ) -> None:
        """Give states ``name`` (len(at), *shape) of a layer inside the pass, in one call or in several.

        ``t[i]`` is the state of sequence ``at[i][0]`` after its first ``at[i][1]`` tokens in this pass; what
        is not wanted is ignored, so that a model may give those of all tokens. ``t`` is the cache's from then
        on: nobody writes into it any more. A position counts when all states of all layers have been given.
        """
        op = "deliver_states"
        current, layer = self._started(op), self._layer if layer is None else layer
        check_tensors(op, states=t)
        if current.read_only:
            raise OrderError(f"{op}: this pass is read-only; call start_forward without read_only to store")
        current.check_inside(op, at)
        spec = self._specs.fitting(op, name, layer, t, len(at))
        if spec.dtype is not None and t.dtype is not spec.dtype:
            t = t.cast(ctx, spec.dtype)
        self._states.deliver(ctx, (name, layer), current, at, t)

    # What it does not keep.

    def put(self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        raise self._no_keys("put")

    def get(self, ctx: ml.Context) -> tuple[ml.Tensor, ml.Tensor, Mask]:
        raise self._no_keys("get")

    def attend(
        self, ctx: ml.Context, query: ml.Tensor, scale: float, sinks: ml.Tensor | None = None
    ) -> ml.Tensor:
        raise self._no_keys("attend")

    @staticmethod
    def _no_keys(op: str) -> NotSupportedError:
        return NotSupportedError(
            f"{op}: StateCache keeps states, and no keys and values; put a cache for layers with attention "
            "beside it (WrapperCache), or use RecurrentCache, which has both"
        )

    # Sequences.

    def offset(self, seq: int) -> int:
        """How many tokens the state has seen: where the next batch of this sequence begins."""
        self._check_sequence("offset", seq)
        return self._states.rows[seq].offset

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence all layers have seen: ``offset(seq)`` as a rule.

        Less where a pass was given only some of the states, as one that failed; the tokens of the pass under
        way count when the last one was.
        """
        end, lacking = self.offset(seq), self.lacking(seq)
        if not self.nbytes:
            return 0
        return end if lacking is None else min(end, lacking)

    def lacking(self, seq: int) -> int | None:
        """The position from which on not all layers have been given states of a sequence; None: all have."""
        self.offset(seq)
        return self._states.lacking(seq)

    def checkpoints(self, seq: int) -> tuple[int, ...]:
        """The positions of a sequence's checkpoints, ascending: it can go back to each of them exactly."""
        self._check_sequence("checkpoints", seq)
        return self._states.rows[seq].positions

    @one_thread
    def checkpoint(self, seq: int) -> None:
        """Keep a copy of the state as it is now, when a pass has set the states of all layers."""
        self._check_sequence("checkpoint", seq)
        row = self._states.rows[seq]
        if row.lost:
            raise state_lost("checkpoint", seq)
        self._states.check_whole("checkpoint", seq)
        taken = self._states.point(row)
        taken.state.detach()
        if taken.offset:
            self._states.keep(row, taken)

    def prepare_restore(self, seq: int, position: int) -> int | None:
        """Where ``remove(seq, position)`` would go: at or before ``position``; None: back to nothing."""
        self._check_sequence("prepare_restore", seq)
        check_whole("prepare_restore", "position", position)
        return self._states.row_before(seq, position).offset or None

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether the state of exactly ``position`` is there, or that of the beginning is meant."""
        return (self.prepare_restore(seq, position) or 0) == position or position == 0

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` whose state is there; 0: from nothing."""
        return self.prepare_restore(seq, position) or 0

    def prepare_copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> Callable[[], None]:
        self._check_copy(src_seq, dst_seq, length)
        if self._states.rows[src_seq].lost:
            raise state_lost("copy_prefix", src_seq)
        row = self._states.row_before(src_seq, length)

        def change() -> None:
            self._states.rows[dst_seq] = row
            self.snapshots.schedule.replace(dst_seq)

        return self._changing(dst_seq, change)

    def _changing(self, seq: int, change: Callable[[], None]) -> Callable[[], None]:
        """The change of a sequence, which ends the pass, and forgets what is wanted of it."""

        def commit() -> None:
            self._end_pass()
            change()
            self._wants.pop(seq, None)

        return commit

    def prepare_remove(self, seq: int, begin: int, end: int | None = None) -> Callable[[], None]:
        self._check_remove(seq, begin, end)
        row = self._states.rows[seq]
        if end is None or end >= row.offset:
            if row.lost and begin > 0 and self._states.nearest(row, begin) is None:
                raise state_lost("remove", seq)
            row = self._states.row_before(seq, begin)
        elif row.lost:
            raise state_lost("remove", seq)
        else:
            row = shifted(replace(row, computed=self._states.lacking(seq)), begin, end)

        def change() -> None:
            self._states.rows[seq] = row
            self.snapshots.schedule.cut(seq, min(begin, row.offset))

        return self._changing(seq, change)

    def settings(self) -> dict[str, object]:
        self._bound("settings")
        return {"kind": type(self).__name__, **self._specs.settings()}

    # Snapshots.

    def next_snapshot(self, seq: int) -> int | None:
        """Where a batch of this sequence should end for the next one; None: anywhere (``delivers``)."""
        upcoming = self.snapshots.schedule.next(seq, self.offset(seq))
        return None if self.delivers else upcoming

    def _reached(self, seq: int) -> SnapshotSchedule[StateSnapshot]:
        self.offset(seq)
        self.snapshots.capture(seq)
        return self.snapshots.schedule

    @one_thread
    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> StateSnapshot:
        """The state at ``end`` (None: where the sequence is), said to be of ``[begin, end)``.

        Nothing is copied until the state is about to be written over, by a pass of the sequence mostly.
        Views that ``state`` gave before are not to be written any more: ask for them again.

        Raises InvalidRangeError for a range that is not within ``[0, offset(seq)]``, NotSupportedError where
        no state of ``end`` is there: it is ``offset(seq)``, 0, one of ``checkpoints(seq)``, or was delivered
        inside the last pass.
        """
        self.offset(seq)  # refuses an unknown sequence
        return self.snapshots.snapshot(seq, begin, end)

    def prepare_restore_snapshot(
        self, seq: int, snapshot: StateSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        self._check_restore(seq, snapshot, StateSnapshot)
        put_back = self.snapshots.prepare_restore_snapshot(seq, snapshot, target)
        return None if put_back is None else self._changing(seq, put_back)

    # Looking in.

    @property
    def state_table(self) -> StateTable:
        """Where the state of each sequence lies: to be read, the cache alone changes it."""
        self._bound("state_table")
        return self._states

    @property
    def nbytes(self) -> int:
        """Bytes of the states' buffers, and of checkpoints that are copies."""
        return self._states.nbytes

    def _told(self) -> list[str]:
        return [f"{bytes_text(self.nbytes)} of states"]
