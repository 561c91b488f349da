"""The cache of recurrent states, which layers with a linear or state-space recurrence keep per sequence.

After Ollama's kvcache/recurrent.go and its checkpoints, and the single-sequence recurrent cache of its MLX
runner. Such a layer keeps states of fixed size for each sequence: the last inputs of a convolution, a delta
or SSM matrix. The cache has no cells and no attention: a WrapperCache combines it with caches that do
(kvcache.caches.recurrent).

A state belongs to one position and cannot be cut to an earlier one. Earlier states are available from two
places: the cache itself keeps checkpoints, and the requested states inside the last pass; and the caller may
hold snapshots.
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
    """Any number of states per sequence, of any shapes and dtypes, and checkpoints of them; no keys and
    values.

    ``states`` declares them, by layer number, or under None for all other layers::

        mamba = {"conv": StateSpec((channels, 3)), "ssm": StateSpec((heads, dim, size), ml.DType.F32)}
        states = StateCache({None: mamba})
        cache = WrapperCache(CausalCache(), states)
        ...
        cache.set_layer(layer)
        ssm = states.state(ctx, "ssm")           # (sequences, heads, dim, size)
        states.update_state(ctx, "ssm", new)

    An undeclared state takes the shape and dtype of its first ``update_state``. ``dtype`` is that of the
    model's activations, and of states declared without a dtype (None: the dtype given to ``init``, or F32 if
    that is not a single plain dtype).

    Every pass must read or update all states, so ``states`` must not name a layer that has none. A state that
    is first used in a later pass is missing for the tokens before it, and reading it for their sequences
    raises OrderError; with ``skips=True`` it is zero instead. A pass that leaves out a state used before
    counts as failed, with ``skips`` too: its states can be read, but ``computed(seq)`` does not advance and
    no snapshot is taken until its tokens are taken back.

    **States inside a batch.** A recurrence normally leaves only the state at the end of a batch. A model that
    can also provide states inside it calls ``wanted_states``, splits its scan there or computes the states of
    all tokens, and passes them to ``deliver_states`` (``delivers=True`` declares that the model does this).
    They are requested by scheduled snapshots, and by ``want_states``, for example for draft tokens. The
    sequence can go back to them until its next pass.

    **Checkpoints.** One is taken when a pass begins at least ``checkpoint_interval`` tokens after the last
    one. The latest ``checkpoints`` of each sequence are kept. ``checkpoint(seq)`` takes one immediately.

    **Going back.** ``remove(seq, position)`` goes to ``position`` if a checkpoint or a state inside the last
    pass exists there, else to the nearest earlier one, else to 0. ``offset(seq)`` is the resulting position,
    where the next batch must begin. After a failed pass, call ``remove(seq, position)`` with the batch's
    first position. Removing tokens from the middle moves later checkpoints down and leaves the state
    unchanged, although it has seen the removed tokens (as a context shift requires). Checkpoints inside the
    removed range are dropped, since they are not the state of any remaining position.

    >>> import ml
    >>> from kvcache import Batch, StateCache, StateSpec
    >>> cache = StateCache({None: {"ssm": StateSpec((2, 4), ml.DType.F32)}})
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=2, capacity=16, max_batch=4)
    ...     cache.start_forward(ctx, Batch([0, 1, 0], [0, 0, 1]))
    ...     state = cache.state(ctx, "ssm")
    ...     cache.update_state(ctx, "ssm", state.add(ctx, ctx.full((1,), 1.0, ml.DType.F32)))
    ...     print(state.shape, cache.offset(0), cache.offset(1))
    ...     cache.close()
    (2, 2, 4) 2 1
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
        self._checkpoints = check_whole("StateCache", "checkpoints", checkpoints)
        self._interval = check_whole("StateCache", "checkpoint_interval", checkpoint_interval, least=1)
        self.delivers = delivers
        """Whether the model delivers requested states inside a batch, so that a batch may end anywhere."""
        self._specs = StateSpecs(states or {})
        self._wants: dict[int, tuple[int, ...]] = {}
        self.snapshots: StateSnapshots = StateSnapshots()
        """Takes and restores snapshots of sequences."""
        self._skips = skips
        self._activations = dtype
        self._states = self.snapshots.states

    # Setting up and closing.

    def init(
        self, backend: ml.Backend, dtype: CacheDType, max_sequences: int, capacity: int, max_batch: int
    ) -> None:
        """Bind to ``backend``, with a slot for each sequence in every layer with states, allocated on first
        use.

        States have a fixed size, so ``capacity`` and ``max_batch`` have no effect.
        """
        sizes = {"max_sequences": max_sequences, "capacity": capacity, "max_batch": max_batch}
        self._dtype, (self._max_sequences, *_) = self._check_init(backend, dtype, **sizes)
        declared = None if self._skips else self._specs.by_layer
        self._states = StateTable(self._max_sequences, backend, self._checkpoints, self._interval, declared)
        self._specs.bind(self._activations or CacheFormat.of(dtype).plain or ml.DType.F32)
        self.snapshots.bind(self._states, self._specs)
        self._backend, self._closed = backend, False

    def learn_state(self, name: str, spec: StateSpec, layer: int | None = None) -> None:
        """Declare a state of a layer, or (None) of all layers; a state that is already known is not changed.

        For models whose configuration does not declare it. Call it after ``init`` and before the first
        ``state``.
        """
        self._specs.declare(name, spec, layer)

    def state_spec(self, name: str, layer: int) -> StateSpec | None:
        """The shape and dtype of a state, declared or taken from its first update; None if they are
        unknown.
        """
        return self._specs.get(name, layer)

    def prepare_set_config(self, config: ml.CacheConfig) -> Callable[[], None]:
        """The configuration does not affect how states are laid out."""
        if self._states.nbytes or self._pass is not None:
            raise OrderError("set_config: states are already stored; call set_config before the first batch")

        def commit() -> None:
            self._config = config

        return commit

    @one_call
    def close(self) -> None:
        """As CausalCache.close: states that snapshots still share are copied out first."""
        self.snapshots.close()
        self._states, self._pass, self._wants = self.snapshots.states, None, {}
        self._layer = 0
        self._backend, self._closed = None, True

    # One pass.

    @one_call
    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        """Give the batch's sequences adjacent states of their own. The previous pass ends.

        The positions of each sequence must be consecutive and begin at ``offset(seq)``, as a recurrence
        cannot skip a token; InvalidBatchError otherwise. Other errors are those of CausalCache.

        With ``read_only`` any positions are allowed, as in CausalCache. The states are then copies, which
        have seen ``offset(seq)`` tokens whatever the positions, and updating them raises OrderError.
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
            # States of the current pass may be among the lost ones: the pass does not continue then.
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
        """The numbers of tokens of a sequence in this pass after which its state is requested, except the
        last.
        """
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
        """The pass that the last ``start_forward`` began, for ``undo_forward``; None if it has ended."""
        return self._pass

    def undo_forward(self, resume: object = None) -> None:
        """Undo the last ``start_forward``, provided that no state has been updated since.

        States that it moved return to their places, so that the pass ``resume`` continues with its views. If
        the device fails here, the moved sequences are lost and no pass continues.
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
        """Continue a pass after another was refused: snapshots of its tokens are taken again."""
        self._pass = current
        for seq, before in self._states.go_on(current).items():
            self.snapshots.schedule.again(seq, before)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences of the pass, in the order of the states' first axis."""
        return self._started("sequences").sequences

    def state(self, ctx: ml.Context, name: str, layer: int | None = None) -> ml.Tensor:
        """The state ``name`` of a layer for the sequences of the pass (sequences, *shape); zero for new
        sequences.

        ``layer`` None: the one of ``set_layer``. The result is a view, which may be updated in place (by
        ``copy`` or ``set_rows``) or through ``update_state``; in a read-only pass it is a copy. Raises
        OrderError for a state that is neither declared nor stored, and if an earlier pass failed or left it
        out.
        """
        return self._read(ctx, "state", name, layer)

    def update_state(self, ctx: ml.Context, name: str, t: ml.Tensor, layer: int | None = None) -> None:
        """Store the new state ``name`` (sequences, *shape), converted to its dtype.

        Raises DTypeError for integers if the state holds floats and the reverse, OrderError if the state has
        already been updated and read in this pass, as happens in a loop that forgets ``set_layer``.
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
        if current.reserve:  # allocated and used, but without access to what sequences hold
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
        """Request that the next pass of a sequence keep its states at ``positions``, if the model can deliver
        them.

        This replaces earlier requests. The states are kept until the pass after that one; ``remove``,
        ``copy_prefix`` and ``restore`` discard the requests of the sequences that they change.
        """
        self.offset(seq)
        self._wants[seq] = tuple(check_whole("want_states", "position", one) for one in positions)

    def wanted_states(self) -> Mapping[int, tuple[int, ...]]:
        """For each sequence, the numbers of its tokens in this pass after which its state is requested,
        ascending.

        For example ``{0: (3, 7)}``; sequences without requests are left out. The state at the end of the pass
        goes to ``update_state``.
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
        """Deliver the state ``name`` (len(at), *shape) of a layer at points inside the pass, in one call or
        several.

        ``t[i]`` is the state of sequence ``at[i][0]`` after its first ``at[i][1]`` tokens in this pass.
        States that were not requested are ignored, so a model may deliver those of all tokens. The cache
        takes ownership of ``t``, which must not be written afterwards. A position is available once all
        states of all layers have been delivered.
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

    # What it does not store.

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
        """The number of tokens that the state has seen, which is where the sequence's next batch begins."""
        self._check_sequence("offset", seq)
        return self._states.rows[seq].offset

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence all layers have seen: normally ``offset(seq)``.

        Fewer if a pass updated only some of the states, for example because it failed. The tokens of the
        current pass count once the last state has been updated.
        """
        end, lacking = self.offset(seq), self.lacking(seq)
        if not self.nbytes:
            return 0
        return end if lacking is None else min(end, lacking)

    def lacking(self, seq: int) -> int | None:
        """The position from which some layers lack states of a sequence; None if none does."""
        self.offset(seq)
        return self._states.lacking(seq)

    def checkpoints(self, seq: int) -> tuple[int, ...]:
        """The positions of a sequence's checkpoints, ascending; the sequence can go back to each of them
        exactly.
        """
        self._check_sequence("checkpoints", seq)
        return self._states.rows[seq].positions

    @one_thread
    def checkpoint(self, seq: int) -> None:
        """Keep a copy of the current state; the last pass must have updated the states of all layers."""
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
        """Where ``remove(seq, position)`` would go, at or before ``position``; None: to the empty
        sequence.
        """
        self._check_sequence("prepare_restore", seq)
        position = check_whole("prepare_restore", "position", position)
        return self._states.row_before(seq, position).offset or None

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether the state at exactly ``position`` is available, or ``position`` is 0."""
        return bool((self.prepare_restore(seq, position) or 0) == position)

    def resume_point(self, seq: int, position: int) -> int:
        """The last position up to ``position`` whose state is available; 0 if there is none."""
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
        """Make the change of a sequence, which ends the pass and discards requests for the sequence's
        states.
        """

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
        """Where a batch of this sequence should end for the next snapshot; None: anywhere (``delivers``)."""
        upcoming = self.snapshots.schedule.next(seq, self.offset(seq))
        return None if self.delivers else upcoming

    def _reached(self, seq: int) -> SnapshotSchedule[StateSnapshot]:
        self.offset(seq)
        self.snapshots.capture(seq)
        return self.snapshots.schedule

    @one_thread
    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> StateSnapshot:
        """A snapshot of the state at ``end`` (None: at the sequence's end), labelled ``[begin, end)``.

        Nothing is copied until the state is about to be overwritten, usually by the sequence's next pass.
        Views that ``state`` returned before must not be written any more; request them again.

        Raises InvalidRangeError for a range that is not within ``[0, offset(seq)]``, NotSupportedError if
        there is no state at ``end``: states exist at ``offset(seq)``, 0, each of ``checkpoints(seq)``, and
        where the last pass delivered one.
        """
        self.offset(seq)  # refuses an unknown sequence
        return self.snapshots.snapshot(seq, begin, end)

    def prepare_restore_snapshot(
        self, seq: int, snapshot: StateSnapshot, target: int | None = None
    ) -> Callable[[], None] | None:
        self._check_restore(seq, snapshot, StateSnapshot)
        put_back = self.snapshots.prepare_restore_snapshot(seq, snapshot, target)
        return None if put_back is None else self._changing(seq, put_back)

    # Inspection.

    @property
    def state_table(self) -> StateTable:
        """Where the state of each sequence lies. Read-only: only the cache changes it."""
        self._bound("state_table")
        return self._states

    @property
    def nbytes(self) -> int:
        """Bytes of the states' buffers and of the copied checkpoints."""
        return self._states.nbytes

    def _told(self) -> list[str]:
        return [f"{bytes_text(self.nbytes)} of states"]
