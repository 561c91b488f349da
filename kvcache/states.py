"""Per-sequence states of fixed size: slots, who shares them, and checkpoints of them.

Every layer of a recurrent model keeps one state per sequence, in buffers (slots, *shape). Two
sequences may share a slot until one of them is about to be written; the sequences of a pass then get
slots of their own, side by side and in the batch's order, so that a pass reads and writes them as one
view::

    before   sequence 0 -> slot 0    sequence 1 -> slot 0 (shared)    sequence 2 -> slot 1
    pass over 2, 1:      slots [1, 2] hold the states of 2 and 1; slot 0 stays sequence 0's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

import ml

__all__ = ["Arrangement", "Checkpoint", "Pass", "StateBuffers", "StateRow", "arrange", "lost_in"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A copy of one sequence's states after ``offset`` tokens; never written again.

    ``tensors`` maps (kind, layer) to (1, *shape).
    """

    offset: int
    tensors: Mapping[tuple[str, int], ml.Tensor]


@dataclass(slots=True)
class StateRow:
    """What is known of one sequence's state.

    ``offset`` counts the tokens it has seen. The state lies in ``slot``, or is still in ``pending``,
    a checkpoint to be loaded by the next pass; with neither it is zero.
    """

    offset: int = 0
    slot: int | None = None
    pending: Checkpoint | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    lost: bool = False

    def nearest(self, position: int) -> Checkpoint | None:
        """The latest checkpoint at or before ``position``."""
        return max(
            (point for point in self.checkpoints if point.offset <= position),
            key=lambda point: point.offset,
            default=None,
        )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the states of a pass lie, and how they get there.

    ``slots`` gives every sequence's slot afterwards; ``moves`` are (from, to) of states that change
    place; ``loads`` are (checkpoint or None for zeros, to).
    """

    start: int
    slots: Mapping[int, int]
    moves: tuple[tuple[int, int], ...]
    loads: tuple[tuple[Checkpoint | None, int], ...]


def arrange(rows: Sequence[StateRow], sequences: Sequence[int]) -> Arrangement:
    """Give ``sequences`` slots of their own, side by side in this order, moving as little as it can."""
    count = len(sequences)
    slots = {seq: row.slot for seq, row in enumerate(rows) if row.slot is not None}
    outside = {slot for seq, slot in slots.items() if seq not in sequences}
    start = _window(len(rows), sequences, slots, outside)
    window = range(start, start + count)
    final = {seq: start + i for i, seq in enumerate(sequences)}
    moves: dict[int, int] = {}
    spare = iter([slot for slot in range(len(rows)) if slot not in window and slot not in outside])
    for seq, slot in slots.items():
        if seq in final:
            continue
        if slot in window and slot not in moves:
            moves[slot] = next(spare)
        final[seq] = moves.get(slot, slot)
    pairs = [*moves.items()]
    loads: list[tuple[Checkpoint | None, int]] = []
    for seq in sequences:
        row = rows[seq]
        if row.slot is None:
            loads.append((row.pending, final[seq]))
        elif row.slot != final[seq]:
            pairs.append((row.slot, final[seq]))
    return Arrangement(start, final, tuple(pairs), tuple(loads))


def _window(size: int, sequences: Sequence[int], slots: Mapping[int, int], outside: set[int]) -> int:
    """The first slot of the run that the sequences get: where fewest states have to move."""
    best, least = 0, None
    for start in range(size - len(sequences) + 1):
        cost = sum(start + i in outside for i in range(len(sequences)))
        cost += sum(slots.get(seq, start + i) != start + i for i, seq in enumerate(sequences))
        if least is None or cost < least:
            best, least = start, cost
        if least == 0:
            break
    return best


class StateBuffers:
    """The tensors: per kind ("conv", "recurrent") and layer a buffer (slots, *shape)."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.tensors: dict[tuple[str, int], ml.Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def ensure(
        self, ctx: ml.Context, kind: str, layer: int, shape: tuple[int, ...], dtype: ml.DType
    ) -> ml.Tensor:
        """The buffer of a layer, made of zeros when first asked for."""
        found = self.tensors.get((kind, layer))
        if found is None:
            found = ctx.layer(layer).zeros((self.slots, *shape), dtype)
            self.tensors[kind, layer] = found
        return found

    def capture(self, ctx: ml.Context, offset: int, slot: int) -> Checkpoint:
        """A copy of the states in one slot."""
        return Checkpoint(
            offset,
            {
                key: tensor.slice(ctx, 0, slot, slot + 1).contiguous(ctx.layer(key[1]))
                for key, tensor in self.tensors.items()
            },
        )

    def prepare(self, ctx: ml.Context, plan: Arrangement) -> Callable[[], None]:
        """Read what ``plan`` moves and loads; the callable returned writes it."""
        if not plan.moves and not plan.loads:
            return lambda: None
        for point, _ in plan.loads:  # restored before this cache had any states
            for (kind, layer), state in point.tensors.items() if point is not None else ():
                self.ensure(ctx, kind, layer, state.shape[1:], state.dtype)
        writes: list[tuple[ml.Tensor, ml.Tensor, np.ndarray]] = []
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
                writes.append((tensor, content, np.array([slot])))

        def write() -> None:
            for tensor, content, slots in writes:
                ctx.forward(tensor.set_rows(ctx, content, slots))

        return write


@dataclass(slots=True)
class Pass:
    """The states of one forward pass: sequences in the batch's order, in slots from ``start``."""

    sequences: tuple[int, ...]
    start: int
    before: dict[int, StateRow] = field(default_factory=dict)
    reserve: bool = False


def lost_in(rows: Sequence[StateRow], plan: Arrangement) -> None:
    """Mark every sequence whose state a failed arrangement may have overwritten.

    Slots are renamed only after all is written: a state that was merely read is still in its place.
    """
    written = {slot for _, slot in plan.moves} | {slot for _, slot in plan.loads}
    for row in rows:
        row.lost = row.lost or row.slot in written
