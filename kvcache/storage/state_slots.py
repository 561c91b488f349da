"""Per-sequence states of fixed size: slots, the sequences that share them, and checkpoints.

Every layer of a recurrent model keeps one state per sequence, in buffers (slots, *shape). Two sequences may
share a slot until one of them is about to be written. The sequences of a pass get unshared slots, adjacent
and in the batch's order, so that a pass reads and writes them as one view::

    before   sequence 0 -> slot 0    sequence 1 -> slot 0 (shared)    sequence 2 -> slot 1
    pass over 2, 1:      slots [1, 2] hold the states of 2 and 1; slot 0 stays sequence 0's

A snapshot or a checkpoint refers to the state in a slot and copies nothing until that slot is about to be
written (HeldStates); a sequence that is restored before that shares the slot.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident

import numpy as np

import ml
from kvcache.cache import InvalidRangeError, SequenceLostError

States = Mapping[tuple[str, int], ml.Tensor]
"""(kind, layer) -> (1, *shape)"""


class HeldStates:
    """The states of one sequence at some position: still in a slot of a cache, or copies.

    In a slot they take no additional memory. They are copied out just before the slot is written, and when
    ``tensors`` is read.
    """

    __slots__ = ("__weakref__", "_buffers", "_nbytes", "_tensors", "lost", "slot")

    def __init__(
        self, tensors: States | None = None, buffers: StateBuffers | None = None, slot: int | None = None
    ) -> None:
        """Copies, or a slot of ``buffers``."""
        self._tensors: States = tensors or {}
        self._buffers = buffers
        self._nbytes: int | None = None
        """The bytes of copies, once computed."""
        self.slot = slot
        """The slot with the states; None if they are copies."""
        self.lost = False
        """The device failed while they were copied out, or they lack a layer."""

    @property
    def tensors(self) -> States:
        """Copies, which are never written again; releases the slot."""
        self.detach()
        return self._tensors

    @property
    def nbytes(self) -> int:
        if self._buffers is not None:
            return self._buffers.nbytes // self._buffers.slots
        if self._nbytes is None:
            self._nbytes = sum(tensor.nbytes for tensor in self._tensors.values())
        return self._nbytes

    @property
    def held(self) -> States:
        """The copies, or the buffers of the slot that they lie in."""
        return self._tensors if self._buffers is None else self._buffers.tensors

    @property
    def copied(self) -> States:
        """The copies that exist so far."""
        return self._tensors

    def slot_in(self, buffers: StateBuffers) -> int | None:
        """The slot of ``buffers`` that they lie in, if any."""
        return self.slot if self._buffers is buffers else None

    def check(self) -> None:
        """Raise SequenceLostError if they were lost in a device failure."""
        if self.lost:
            raise SequenceLostError(
                "snapshot: the device failed while its states were copied out, or they lack a layer that was "
                "first used later; compute the sequence again"
            )

    def detach(self) -> None:
        """Copy them out, and release the slot."""
        self.check()
        if self._buffers is not None and self.slot is not None:
            self._buffers.copy_out([self.slot])

    def read(self, ctx: ml.Context) -> States:
        """Views of the slot, which are valid until it is written, or the copies."""
        self.check()
        if self._buffers is None or self.slot is None:
            return self._tensors
        return self._buffers.views(ctx, self.slot)

    def copies(self) -> HeldStates:
        """As ``read``, in copies; the states themselves stay where they are."""
        self.check()
        if self._buffers is None or self.slot is None:
            return self
        return HeldStates(self._buffers.copied(self.slot))

    def lose(self) -> None:
        """Release the slot without making copies."""
        self.lost = True
        self.moved_out({})

    def moved_out(self, tensors: States) -> None:
        self._tensors, self._buffers, self.slot, self._nbytes = tensors, None, None, None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One sequence's states after ``offset`` tokens; never written again."""

    offset: int
    state: HeldStates

    @property
    def tensors(self) -> States:
        """Copies of its own; releases the slot."""
        return self.state.tensors


@dataclass(slots=True)
class StateRow:
    """The state of one sequence.

    ``offset`` is the number of tokens that it has seen. The state lies in ``slot``, or is still in
    ``pending``, a checkpoint that the next pass loads; with neither it is zero. Sequences may share a slot.
    ``inside`` has the delivered states at positions inside the last pass. ``computed`` is the position of a
    pass that ended before all layers had their states; None if there is none.
    """

    offset: int = 0
    slot: int | None = None
    pending: Checkpoint | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    lost: bool = False
    inside: Mapping[int, dict[tuple[str, int], ml.Tensor]] = field(default_factory=dict)
    computed: int | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(sorted(point.offset for point in self.checkpoints))

    def copy(self) -> StateRow:
        return StateRow(
            self.offset, self.slot, self.pending, self.checkpoints, self.lost, self.inside, self.computed
        )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The slots of a pass's states, and how the states get there.

    ``slots`` maps every sequence to its new slot; ``moves`` are (from, to) of states that move; ``loads`` are
    (checkpoint or None for zeros, to). The pass will write ``count`` slots from ``start``.
    """

    start: int
    slots: Mapping[int, int]
    moves: tuple[tuple[int, int], ...]
    loads: tuple[tuple[Checkpoint | None, int], ...]
    count: int = 0

    @property
    def written(self) -> set[int]:
        """The slots whose states are about to be overwritten, now or by the pass."""
        return {*range(self.start, self.start + self.count), *(slot for _, slot in self.moves)}


def arrange(
    rows: Sequence[StateRow],
    sequences: Sequence[int],
    in_use: Collection[int] = frozenset(),
    start: int | None = None,
) -> Arrangement:
    """Assign unshared slots to ``sequences``, adjacent and in this order, moving as few states as possible.

    Slots ``in_use`` by snapshots are overwritten only if no others are available. ``start``: the first slot;
    None: the best one.
    """
    count = len(sequences)
    slots = {seq: row.slot for seq, row in enumerate(rows) if row.slot is not None}
    asked = set(sequences)
    others = {seq: slot for seq, slot in slots.items() if seq not in asked}
    outside = set(others.values())
    if start is None:
        start = _window(len(rows), sequences, slots, outside, in_use)
    window = range(start, start + count)
    final = {seq: start + i for i, seq in enumerate(sequences)}
    away = dict.fromkeys(slot for slot in others.values() if slot in window)
    unused = (slot for slot in range(len(rows)) if slot not in window and slot not in outside)
    spare = sorted(unused, key=lambda slot: slot in in_use) if away else []
    moves = dict(zip(away, spare, strict=False))
    final |= {seq: moves.get(slot, slot) for seq, slot in others.items()}
    pairs = [*moves.items()]
    loads: list[tuple[Checkpoint | None, int]] = []
    for seq in sequences:
        row = rows[seq]
        if row.slot is None:
            loads.append((row.pending, final[seq]))
        elif row.slot != final[seq]:
            pairs.append((row.slot, final[seq]))
    return Arrangement(start, final, tuple(pairs), tuple(loads), count)


def _window(
    size: int, sequences: Sequence[int], slots: Mapping[int, int], outside: set[int], in_use: Collection[int]
) -> int:
    """The first slot of the run for which the fewest states must move or be copied out.

    Copying a state out takes one copy, moving it takes two (a gather and a scatter).
    """
    count, starts = len(sequences), size - len(sequences) + 1
    now = [slots.get(seq) for seq in sequences]
    if now[0] is not None:
        stay = range(now[0], now[0] + count)
        if now == list(stay) and outside.isdisjoint(stay) and not any(slot in in_use for slot in stay):
            return stay.start

    def within(some: Collection[int]) -> np.ndarray:
        """For each start, how many of the slots ``some`` lie in the run."""
        marks = np.zeros(size + 1, dtype=np.int64)
        marks[1:][list(some)] = 1
        ends = marks.cumsum()
        inside: np.ndarray = ends[count:] - ends[:starts]
        return inside

    at = np.array([slot - i for i, slot in enumerate(now) if slot is not None], dtype=np.int64)
    staying = np.bincount(at[(at >= 0) & (at < starts)], minlength=starts)
    return int((2 * (within(outside) + at.size - staying) + within(in_use)).argmin())


class StateBuffers:
    """The tensors: per kind ("conv", "recurrent") and layer a buffer (slots, *shape).

    ``backend`` may be None where there are no slots.
    """

    def __init__(self, slots: int, backend: ml.Backend | None = None) -> None:
        self.slots = slots
        self.tensors: dict[tuple[str, int], ml.Tensor] = {}
        self.reserved: dict[tuple[str, int], ml.Tensor] = {}
        """Buffers that only reserve passes have used: nothing is stored in them."""
        self._backend = backend
        self.nbytes = 0
        self._references: dict[int, weakref.ref[HeldStates]] = {}

    def ensure(
        self, ctx: ml.Context, kind: str, layer: int, shape: tuple[int, ...], dtype: ml.DType
    ) -> ml.Tensor:
        """The buffer of a layer, allocated with zeros on first use."""
        tensor = self.tensors.get((kind, layer))
        if tensor is None:
            tensor = self.reserve(ctx, kind, layer, shape, dtype)
            self.tensors[kind, layer] = self.reserved.pop((kind, layer))
        return tensor

    def reserve(
        self, ctx: ml.Context, kind: str, layer: int, shape: tuple[int, ...], dtype: ml.DType
    ) -> ml.Tensor:
        """Allocate a layer's buffer; no sequence has a state in it before ``ensure``."""
        tensor = self.tensors.get((kind, layer), self.reserved.get((kind, layer)))
        if tensor is None:
            tensor = self.reserved[kind, layer] = ctx.layer(layer).zeros((self.slots, *shape), dtype)
            self.nbytes += tensor.nbytes
        return tensor

    # States that snapshots and checkpoints refer to.

    def hold(self, slot: int) -> HeldStates:
        """Refer to the states in a slot as they are now, whatever happens to the slot later."""
        ref = self._references.get(slot)
        state = None if ref is None else ref()
        if state is None:
            state = HeldStates(buffers=self, slot=slot)
            self._references[slot] = weakref.ref(state)
        return state

    def held(self, slots: Iterable[int] | None = None) -> dict[int, HeldStates]:
        """The states that still lie in ``slots`` (None: in any slot) and are referred to."""
        if not self._references:
            return {}
        wanted = (
            [*self._references] if slots is None else [slot for slot in slots if slot in self._references]
        )
        states = {}
        for slot in wanted:
            state = self._references[slot]()
            if state is None:
                del self._references[slot]
            else:
                states[slot] = state
        return states

    def copy_out(self, slots: Iterable[int]) -> None:
        """Copy out the states referred to in ``slots``, which are about to be written; all or nothing."""
        waiting = self.held(slots)
        if not waiting:
            return
        with self._open() as ctx:
            self.release(ctx, waiting)

    def release(self, ctx: ml.Context, slots: Iterable[int]) -> None:
        """As ``copy_out``, in the context ``ctx``."""
        waiting = self.held(slots)
        copies = [self.capture(ctx, slot) for slot in waiting]
        ctx.compute(*(tensor for states in copies for tensor in states.values()))
        for (slot, state), states in zip(waiting.items(), copies, strict=True):
            state.moved_out(states)
            del self._references[slot]

    def release_all(self) -> None:
        """Copy out all states that are referred to; what the device can no longer return is lost."""
        for slot, state in self.held().items():
            try:
                self.copy_out([slot])
            except Exception:
                state.lose()
        self._references = {}

    def lose_all(self) -> None:
        """Mark all states in slots as lost: a layer that is used from now on lacks them."""
        for state in self.held().values():
            state.lose()
        self._references = {}

    def copied(self, slot: int) -> States:
        """Copies of the states in a slot, which stay referred to."""
        with self._open() as ctx:
            copies = self.capture(ctx, slot)
            ctx.compute(*copies.values())
        return copies

    def views(self, ctx: ml.Context, slot: int) -> States:
        return {key: tensor.slice(ctx, 0, slot, slot + 1) for key, tensor in self.tensors.items()}

    def capture(self, ctx: ml.Context, slot: int) -> States:
        """Copies of the states in one slot, not computed yet."""
        return {key: view.contiguous(ctx.layer(key[1])) for key, view in self.views(ctx, slot).items()}

    def _open(self) -> ml.Context:
        assert self._backend is not None
        return self._backend.new_context()

    # Moving.

    def prepare(self, ctx: ml.Context, plan: Arrangement) -> Callable[[], None]:
        """Read what ``plan`` moves and loads; the returned callable writes it."""
        if not plan.moves and not plan.loads:
            return lambda: None
        for point, _ in plan.loads:  # restored before this cache had any states
            for (kind, layer), state in point.tensors.items() if point is not None else ():
                self.ensure(ctx, kind, layer, state.shape[1:], state.dtype)
        writes: list[tuple[ml.Tensor, ml.Tensor, np.ndarray | int]] = []
        sources = np.array([source for source, _ in plan.moves], dtype=np.int64)
        targets = np.array([target for _, target in plan.moves], dtype=np.int64)
        for key, tensor in self.tensors.items():
            place = ctx.layer(key[1])
            if plan.moves:
                writes.append((tensor, tensor.rows(place, sources), targets))
            for checkpoint, slot in plan.loads:
                content = None if checkpoint is None else checkpoint.tensors.get(key)
                if content is None:
                    content = place.zeros((1, *tensor.shape[1:]), tensor.dtype)
                writes.append((tensor, content, slot))

        def write() -> None:
            for tensor, content, slots in writes:
                if isinstance(slots, int):
                    ctx.forward(content.copy(ctx, tensor.slice(ctx, 0, slots, slots + 1)))
                else:
                    ctx.forward(tensor.set_rows(ctx, content, slots))

        return write


@dataclass(slots=True)
class StatePass:
    """The states of one forward pass: sequences in the batch's order, in slots from ``start``.

    ``tokens`` is the number of tokens of each sequence, and ``wanted`` lists after how many of them its state
    is requested. ``wants`` are the requests of ``want_states`` from before the pass.
    """

    tokens: Mapping[int, int]
    start: int
    wanted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    before: dict[int, StateRow] = field(default_factory=dict)
    reserve: bool = False
    read_only: bool = False
    wants: Mapping[int, tuple[int, ...]] | None = None
    asked: set[tuple[str, int]] = field(default_factory=set)
    """The states, by name and layer, that have been read or updated."""
    updated: dict[tuple[str, int], bool] = field(default_factory=dict)
    """The states that have been updated, and whether they have been read since."""
    thread: int = field(default_factory=get_ident)
    """The thread that the pass belongs to."""
    behind: list[int] = field(default_factory=list)
    """Sequences of which some states are not those at the beginning of the pass."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self.tokens)

    def check_inside(self, op: str, at: Sequence[tuple[int, int]]) -> None:
        """Raise InvalidRangeError for (sequence, tokens) that lie outside this pass."""
        for seq, count in at:
            there = self.tokens.get(seq, 0)
            if not 0 < count <= there:
                raise InvalidRangeError(
                    f"{op}: after {count} tokens of sequence {seq}, which has {there} in this pass"
                )


def lost_in(rows: Sequence[StateRow], plan: Arrangement) -> None:
    """Mark every sequence whose state a failed arrangement may have overwritten as lost.

    Slots are renamed only after everything has been written: a state that was merely read is still in its
    place.
    """
    written = {slot for _, slot in plan.moves} | {slot for _, slot in plan.loads}
    for row in rows:
        row.lost = row.lost or row.slot in written
