"""Per-sequence states of fixed size: slots, who shares them, and checkpoints of them.

Every layer of a recurrent model keeps one state per sequence, in buffers (slots, *shape). Two
sequences may share a slot until one of them is about to be written; the sequences of a pass then get
slots of their own, side by side and in the batch's order, so that a pass reads and writes them as one
view::

    before   sequence 0 -> slot 0    sequence 1 -> slot 0 (shared)    sequence 2 -> slot 1
    pass over 2, 1:      slots [1, 2] hold the states of 2 and 1; slot 0 stays sequence 0's

A snapshot or a checkpoint holds a state that lies in a slot, and copies nothing until that slot is about
to be written (HeldStates); a sequence that is restored before that takes the slot itself.
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
    """The states of one sequence after some tokens: still in a slot of a cache, or copies of their own.

    In a slot they cost nothing. They are copied out right before the slot is written, and when somebody
    asks for ``tensors``.
    """

    __slots__ = ("__weakref__", "_buffers", "_nbytes", "_tensors", "lost", "slot")

    def __init__(
        self, tensors: States | None = None, buffers: StateBuffers | None = None, slot: int | None = None
    ) -> None:
        """Copies, or a slot of ``buffers``."""
        self._tensors: States = tensors or {}
        self._buffers = buffers
        self._nbytes: int | None = None
        """Of copies, once somebody has asked."""
        self.slot = slot
        """Where they lie; None when they are copies."""
        self.lost = False
        """The device failed when they had to be copied out, or they lack a layer."""

    @property
    def tensors(self) -> States:
        """Copies, never written again; lets go of the slot."""
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
        """The copies, as far as there are any."""
        return self._tensors

    def slot_in(self, buffers: StateBuffers) -> int | None:
        """The slot of ``buffers`` that they lie in, if any."""
        return self.slot if self._buffers is buffers else None

    def check(self) -> None:
        """Raise SequenceLostError where a device failure took them."""
        if self.lost:
            raise SequenceLostError(
                "snapshot: the device failed while its states were copied out, or they lack a layer that was "
                "first used later; compute the sequence again"
            )

    def detach(self) -> None:
        """Copy them out, and let go of the slot."""
        self.check()
        if self._buffers is not None and self.slot is not None:
            self._buffers.copy_out([self.slot])

    def read(self, ctx: ml.Context) -> States:
        """Where they lie in a slot, views that hold until it is written; else the copies."""
        self.check()
        if self._buffers is None or self.slot is None:
            return self._tensors
        return self._buffers.views(ctx, self.slot)

    def copies(self) -> HeldStates:
        """The same in copies of their own; these stay where they are."""
        self.check()
        if self._buffers is None or self.slot is None:
            return self
        return HeldStates(self._buffers.copied(self.slot))

    def lose(self) -> None:
        """Let go of the slot without copies."""
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
        """Copies of its own: it lets go of the slot."""
        return self.state.tensors


@dataclass(slots=True)
class StateRow:
    """What is known of one sequence's state.

    ``offset`` counts the tokens it has seen. The state lies in ``slot``, or is still in ``pending``,
    a checkpoint to be loaded by the next pass; with neither it is zero. Sequences may share a slot.
    ``inside`` has the states at positions inside its last pass, as far as they were delivered.
    ``computed``: a pass from there on was over before the states of all layers had been asked for; None: no.
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
    """Where the states of a pass lie, and how they get there.

    ``slots`` gives every sequence's slot afterwards; ``moves`` are (from, to) of states that change
    place; ``loads`` are (checkpoint or None for zeros, to). The pass will write ``count`` slots from
    ``start``.
    """

    start: int
    slots: Mapping[int, int]
    moves: tuple[tuple[int, int], ...]
    loads: tuple[tuple[Checkpoint | None, int], ...]
    count: int = 0

    @property
    def written(self) -> set[int]:
        """The slots whose states are about to be written over, now or by the pass."""
        return {*range(self.start, self.start + self.count), *(slot for _, slot in self.moves)}


def arrange(
    rows: Sequence[StateRow],
    sequences: Sequence[int],
    in_use: Collection[int] = frozenset(),
    start: int | None = None,
) -> Arrangement:
    """Give ``sequences`` slots of their own, side by side in this order, moving as little as it can.

    Slots that are ``in_use`` by snapshots are written only where no others will do. ``start``: the first
    slot, None for the best.
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
    """The first slot of the run that the sequences get: where fewest states have to move or be copied out.

    A copy out of a slot is one copy, a move two (a gather and a scatter).
    """
    count, starts = len(sequences), size - len(sequences) + 1
    now = [slots.get(seq) for seq in sequences]
    if now[0] is not None:
        stay = range(now[0], now[0] + count)
        if now == list(stay) and outside.isdisjoint(stay) and not any(slot in in_use for slot in stay):
            return stay.start

    def within(some: Collection[int]) -> np.ndarray:
        """How many of ``some`` slots lie in the run from each start."""
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
        """Those that only passes which reserve asked for: nothing is stored in them."""
        self._backend = backend
        self._held: dict[int, weakref.ref[HeldStates]] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.reserved.values()))

    def ensure(
        self, ctx: ml.Context, kind: str, layer: int, shape: tuple[int, ...], dtype: ml.DType
    ) -> ml.Tensor:
        """The buffer of a layer, made of zeros when first asked for."""
        tensor = self.tensors.get((kind, layer))
        if tensor is None:
            tensor = self.reserve(ctx, kind, layer, shape, dtype)
            self.tensors[kind, layer] = self.reserved.pop((kind, layer))
        return tensor

    def reserve(
        self, ctx: ml.Context, kind: str, layer: int, shape: tuple[int, ...], dtype: ml.DType
    ) -> ml.Tensor:
        """The memory of a layer's buffer, which no sequence has a state in before ``ensure``."""
        tensor = self.tensors.get((kind, layer), self.reserved.get((kind, layer)))
        if tensor is None:
            tensor = self.reserved[kind, layer] = ctx.layer(layer).zeros((self.slots, *shape), dtype)
        return tensor

    # What snapshots and checkpoints hold.

    def hold(self, slot: int) -> HeldStates:
        """The states in a slot as they are now, whatever becomes of the slot."""
        ref = self._held.get(slot)
        state = None if ref is None else ref()
        if state is None:
            state = HeldStates(buffers=self, slot=slot)
            self._held[slot] = weakref.ref(state)
        return state

    def held(self, slots: Iterable[int] | None = None) -> dict[int, HeldStates]:
        """What still lies in ``slots`` (None: in any) and somebody refers to."""
        if not self._held:
            return {}
        wanted = [*self._held] if slots is None else [slot for slot in slots if slot in self._held]
        states = {}
        for slot in wanted:
            state = self._held[slot]()
            if state is None:
                del self._held[slot]
            else:
                states[slot] = state
        return states

    def copy_out(self, slots: Iterable[int]) -> None:
        """Copy out what is held in ``slots``, which are about to be written; all of it or nothing."""
        waiting = self.held(slots)
        if not waiting:
            return
        with self._open() as ctx:
            self.release(ctx, waiting)

    def release(self, ctx: ml.Context, slots: Iterable[int]) -> None:
        """As ``copy_out``, with the help of ``ctx``."""
        waiting = self.held(slots)
        copies = [self.capture(ctx, slot) for slot in waiting]
        ctx.compute(*(tensor for states in copies for tensor in states.values()))
        for (slot, state), states in zip(waiting.items(), copies, strict=True):
            state.moved_out(states)
            del self._held[slot]

    def release_all(self) -> None:
        """Copy out all that is held; what the device no longer gives is lost."""
        for slot, state in self.held().items():
            try:
                self.copy_out([slot])
            except Exception:
                state.lose()
        self._held = {}

    def lose_all(self) -> None:
        """Lose all states in slots: a layer that is used from now on has none for them."""
        for state in self.held().values():
            state.lose()
        self._held = {}

    def copied(self, slot: int) -> States:
        """Copies of the states in a slot, which stays held."""
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
        """Read what ``plan`` moves and loads; the callable returned writes it."""
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

    ``tokens`` says how many each brings, and ``wanted`` after how many of them its state is asked for.
    ``wants`` is what ``want_states`` had asked for before it began.
    """

    tokens: Mapping[int, int]
    start: int
    wanted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    before: dict[int, StateRow] = field(default_factory=dict)
    reserve: bool = False
    read_only: bool = False
    wants: Mapping[int, tuple[int, ...]] | None = None
    asked: set[tuple[str, int]] = field(default_factory=set)
    """The states, by name and layer, that were given or updated."""
    updated: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Those that were updated, and whether they were read behind that."""
    thread: int = field(default_factory=get_ident)
    """Whose calls it takes."""
    behind: list[int] = field(default_factory=list)
    """Sequences some of whose states are not those of where the pass begins."""

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
    """Mark every sequence whose state a failed arrangement may have overwritten.

    Slots are renamed only after all is written: a state that was merely read is still in its place.
    """
    written = {slot for _, slot in plan.moves} | {slot for _, slot in plan.loads}
    for row in rows:
        row.lost = row.lost or row.slot in written
