"""The specification of the recurrent cache as plain lists, and a rig that drives both.

A sequence is the list of its tokens, and its state the list of tokens that the state has seen: the
same, but for a context shift, after which the state remembers what the attention layers forgot. The
number stored for a state is computed from that list, small enough for every dtype to hold exactly.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.snapshot import RecurrentSnapshot
from kvcache.testing.models import values
from kvcache.testing.rigs.attention import look, outcome
from ml import DType

__all__ = ["StateModel", "StateRig", "StateSetup", "state_trace"]

CONV, DELTA = (2, 3), (2, 2, 2)
KINDS = {"conv": CONV, "recurrent": DELTA}
RECURRENT_LAYERS, ATTENTION_LAYER = (0, 2), 1

Token = tuple[int, int]
"""(cell, id): a restored token lies in another cell than the one it was copied from."""


@dataclass(frozen=True)
class StateSetup:
    max_sequences: int = 3
    capacity: int = 16
    checkpoints: int = 3
    interval: int = 4
    dtype: DType = DType.F32
    conv_dtype: DType | None = None
    can_shift: bool = True
    config: ml.CacheConfig = field(default_factory=ml.CacheConfig)

    def make(self, backend: ml.Backend) -> kvcache.RecurrentCache:
        shift = values.shift_positions if self.can_shift else None
        cache = kvcache.RecurrentCache(CONV, DELTA, shift, self.checkpoints, self.interval, self.conv_dtype)
        cache.set_config(self.config)
        cache.init(backend, self.dtype, self.max_sequences, self.capacity, 8)
        return cache

    @property
    def conv(self) -> DType:
        return self.conv_dtype or self.dtype


@dataclass
class ModelRow:
    tokens: list[Token] = field(default_factory=list)
    seen: tuple[int, ...] = ()
    points: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def reach(self, position: int) -> int:
        """Where going back to ``position`` ends."""
        if len(self.tokens) <= position:
            return len(self.tokens)
        return max((point for point in self.points if point <= position), default=0)

    def cut(self, position: int) -> ModelRow:
        end = self.reach(position)
        seen = self.seen if end == len(self.tokens) else self.points.get(end, ())
        return ModelRow(self.tokens[:end], seen, {p: s for p, s in self.points.items() if p <= end})


@dataclass(frozen=True)
class Copy:
    """What a snapshot is of."""

    begin: int
    tokens: tuple[Token, ...]
    seen: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for _, token in self.tokens)

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


class StateModel:
    def __init__(self, setup: StateSetup) -> None:
        self.setup = setup
        self.rows = [ModelRow() for _ in range(setup.max_sequences)]
        self.next_cell = 0

    def free(self) -> int:
        cells = self.setup.max_sequences * self.setup.capacity
        cells += -cells % self.setup.config.cache_padding
        return cells - len({token for row in self.rows for token in row.tokens})

    def fresh(self, ids: Sequence[int]) -> list[Token]:
        first, self.next_cell = self.next_cell, self.next_cell + len(ids)
        return [(first + i, token) for i, token in enumerate(ids)]

    def start(self, sequences: Sequence[int], ids: Sequence[int]) -> None:
        if len(ids) > self.free():
            raise kvcache.CacheFullError(len(ids), self.free(), {})
        for seq in dict.fromkeys(sequences):
            row, mine = self.rows[seq], [t for t, s in zip(ids, sequences, strict=True) if s == seq]
            count, last = self.setup.checkpoints, max(row.points, default=0)
            if count and len(row.tokens) - last >= self.setup.interval:
                self.keep(row)
            row.tokens = row.tokens + self.fresh(mine)
            row.seen = (*row.seen, *mine)

    def keep(self, row: ModelRow) -> None:
        """Take a checkpoint; the oldest goes where there are too many."""
        row.points = {**row.points, len(row.tokens): row.seen}
        latest = sorted(row.points)[-self.setup.checkpoints :] if self.setup.checkpoints else []
        row.points = {point: row.points[point] for point in latest}

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        if src == dst or length < 0:
            raise kvcache.InvalidRangeError(f"{src} {dst} {length}")
        self.rows[dst] = self.rows[src].cut(length)

    def remove(self, seq: int, begin: int, end: int | None) -> None:
        row = self.rows[seq]
        if begin < 0 or (end is not None and end < begin):
            raise kvcache.InvalidRangeError(f"[{begin}, {end})")
        if end is None or end >= len(row.tokens):
            self.rows[seq] = row.cut(begin)
        elif end > begin:
            others = {token for s, other in enumerate(self.rows) if s != seq for token in other.tokens}
            if not self.setup.can_shift or others.intersection(row.tokens[end:]):
                raise kvcache.NotSupportedError(f"{seq}")
            points = {p: seen for p, seen in row.points.items() if p <= begin}
            points |= {p - end + begin: seen for p, seen in row.points.items() if p > end}
            self.rows[seq] = ModelRow(row.tokens[:begin] + row.tokens[end:], row.seen, points)

    def snapshot(self, seq: int, begin: int, end: int) -> Copy:
        row = self.rows[seq]
        if not 0 <= begin <= end <= len(row.tokens):
            raise kvcache.InvalidRangeError(f"[{begin}, {end})")
        if end not in {0, len(row.tokens), *row.points}:
            raise kvcache.NotSupportedError(f"{end}")
        return Copy(begin, tuple(row.tokens[begin:end]), row.cut(end).seen)

    def restore(self, seq: int, copy: Copy, target: int | None, shared: bool) -> bool:
        """``shared``: the copy still lies in the cache, so that its very cells are taken."""
        row = self.rows[seq]
        if target not in (None, copy.end) or len(row.tokens) < copy.begin:
            return False
        before, self.rows[seq] = row, ModelRow(row.tokens[: copy.begin])
        if not shared and len(copy.ids) > self.free():
            self.rows[seq] = before
            raise kvcache.CacheFullError(len(copy.ids), 0, {})
        points = {point: seen for point, seen in before.points.items() if point <= copy.begin}
        tokens = list(copy.tokens) if shared else self.fresh(copy.ids)
        row = ModelRow(before.tokens[: copy.begin] + tokens, copy.seen, points)
        self.rows[seq] = row
        if row.tokens:
            self.keep(row)
        return True


def state_values(seen: Sequence[int], kind: str, layer: int) -> np.ndarray:
    """What the state of a layer is after these tokens: zero at first, else below 128."""
    code = 0
    for token in seen:
        code = (5 * code + token + 3 * layer + (kind == "conv")) % 97 + 1
    size = int(np.prod(KINDS[kind]))
    return ((code + np.arange(size) % 7) * bool(seen)).reshape(KINDS[kind]).astype(np.float32)


class StateRig:
    """A recurrent cache beside its model, checked after every call."""

    def __init__(self, setup: StateSetup, backend: ml.Backend, ctx: ml.Context) -> None:
        self.setup, self.backend, self.ctx = setup, backend, ctx
        self.cache, self.model = setup.make(backend), StateModel(setup)
        self.next_token = 1
        self.copies: list[tuple[RecurrentSnapshot, Copy]] = []
        self.sequences: list[int] = []

    # A pass.

    def plan(self, sequences: Sequence[int]) -> Batch:
        """The batch with the next token of each of ``sequences`` (named once per token)."""
        self.sequences = list(sequences)
        self.ids = list(range(self.next_token, self.next_token + len(sequences)))
        self.before = [row.seen for row in self.model.rows]
        self.lengths = [len(row.tokens) for row in self.model.rows]
        seen = list(self.lengths)
        self.positions = []
        for seq in sequences:
            self.positions.append(seen[seq])
            seen[seq] += 1
        return Batch(self.positions, self.sequences)

    def begin(self) -> None:
        """Let the model begin the pass that was planned."""
        self.model.start(self.sequences, self.ids)
        self.next_token += len(self.ids)

    def start(self, sequences: Sequence[int]) -> bool:
        """Begin a pass; whether it was taken."""
        batch, slots = self.plan(sequences), self.slots()
        taken = self.agree(lambda: self.cache.start_forward(self.ctx, batch), self.begin)
        owned = {row.slot for row in self.cache._states.rows}
        window = {self.cache._states.rows[seq].slot for seq in sequences} if taken else set()
        for before, now in zip(slots, self.slots(), strict=True):
            assert now is None or now not in window, "the pass writes over what a snapshot holds"
            assert now == before or before in owned, "copied out with no need"
        return taken

    def slots(self) -> list[int | None]:
        """Where the states of the copies lie in this cache, None for those that do not."""
        return [snapshot.state.slot_in(self.cache._states.buffers) for snapshot, _ in self.copies]

    def spoil(self) -> None:
        """The model goes on to write, and what it writes is wrong."""
        for kind, shape in KINDS.items():
            for layer in RECURRENT_LAYERS:
                state = self.state(kind, layer)
                wrong = self.ctx.full((state.shape[0], *shape), 99, state.dtype)
                self.ctx.forward(wrong.copy(self.ctx, state))

    def step(self, in_place: Callable[[], bool] = lambda: False) -> None:
        """The model's part of the pass: read the states, store the new ones, put and look."""
        order = list(dict.fromkeys(self.sequences))
        assert self.cache.sequences == tuple(order)
        for layer in RECURRENT_LAYERS:
            for kind in KINDS:
                state = self.state(kind, layer)
                expected = np.stack([state_values(self.before[seq], kind, layer) for seq in order])
                np.testing.assert_array_equal(state.to_numpy().astype(np.float32), expected)
                self.write(kind, layer, in_place())
        self.cache.set_layer(ATTENTION_LAYER)
        key = values.keys(self.ids, self.positions, ATTENTION_LAYER)
        self.cache.put(
            self.ctx,
            self.ctx.from_numpy(key),
            self.ctx.from_numpy(values.values(self.ids, ATTENTION_LAYER)),
        )
        self.check_seen()

    def start_and_resume(self, sequences: Sequence[int]) -> None:
        """A start that is taken back: the pass under way goes on, and its views stay what they were."""
        order = list(dict.fromkeys(self.sequences))
        held = {(kind, layer): self.state(kind, layer) for kind in KINDS for layer in RECURRENT_LAYERS}
        under_way = self.cache.pass_under_way()
        seen = [len(row.tokens) for row in self.model.rows]
        positions = []
        for seq in sequences:
            positions.append(seen[seq])
            seen[seq] += 1
        try:
            self.cache.start_forward(self.ctx, Batch(positions, list(sequences)))
        except kvcache.CacheFullError:
            pass
        else:
            self.cache.undo_forward(under_way)
        for (kind, layer), state in held.items():
            rows = self.model.rows
            expected = np.stack([state_values(rows[seq].seen, kind, layer) for seq in order])
            for view in (state, self.state(kind, layer)):
                np.testing.assert_array_equal(view.to_numpy().astype(np.float32), expected)
            self.write(kind, layer, in_place=False)
        self.check_seen()
        self.check()

    def read(self, sequences: Sequence[int]) -> None:
        """A pass that only reads, with a query at the last token of each: copies, and nothing set."""
        positions = [len(self.model.rows[seq].tokens) - 1 for seq in sequences]
        self.cache.start_forward(self.ctx, Batch(positions, list(sequences)), read_only=True)
        assert self.cache.sequences == tuple(sequences)
        self.sequences = list(sequences)
        for layer in RECURRENT_LAYERS:
            for kind in KINDS:
                state = self.state(kind, layer)
                wanted = [state_values(self.model.rows[seq].seen, kind, layer) for seq in sequences]
                np.testing.assert_array_equal(state.to_numpy().astype(np.float32), np.stack(wanted))
                refusal = outcome(functools.partial(self.write, kind, layer, in_place=False))
                assert isinstance(refusal, kvcache.OrderError)
                wrong = self.ctx.full(state.shape, 99, state.dtype)
                self.ctx.forward(wrong.copy(self.ctx, state))  # which is the caller's own
        self.ids, self.positions = list(range(len(sequences))), positions
        self.check_seen()
        self.check()

    def state(self, kind: str, layer: int) -> ml.Tensor:
        state = (self.cache.conv_state if kind == "conv" else self.cache.recurrent_state)(self.ctx, layer)
        assert state.dtype is (self.setup.conv if kind == "conv" else DType.F32)
        assert state.shape == (len(set(self.sequences)), *KINDS[kind])
        return state

    def write(self, kind: str, layer: int, in_place: bool) -> None:
        order = dict.fromkeys(self.sequences)
        host = np.stack([state_values(self.model.rows[seq].seen, kind, layer) for seq in order])
        new = self.ctx.from_numpy(host)
        if in_place:
            self.ctx.forward(new.copy(self.ctx, self.state(kind, layer)))
        elif kind == "conv":
            self.cache.set_conv_state(self.ctx, layer, new)
        else:
            self.cache.set_recurrent_state(self.ctx, layer, new)

    def check_seen(self) -> None:
        seen = look(self.cache.attention, self.ctx, len(self.ids), ATTENTION_LAYER)
        for found, seq, position in zip(seen, self.sequences, self.positions, strict=True):
            tokens = self.model.rows[seq].tokens[: position + 1]
            assert found == {p: token for p, (_, token) in enumerate(tokens)}

    def forward(self, *sequences: int, in_place: bool = False) -> bool:
        taken = self.start(sequences)
        if taken:
            self.step(lambda: in_place)
            self.check()
        return taken

    # Sequences.

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        slots = self.slots()
        self.agree(
            lambda: self.cache.copy_prefix(src, dst, length), lambda: self.model.copy_prefix(src, dst, length)
        )
        assert self.slots() == slots, "copied out with no need"
        self.check()

    def remove(self, seq: int, begin: int, end: int | None = None) -> bool:
        slots = self.slots()
        done = self.agree(
            lambda: self.cache.remove(seq, begin, end), lambda: self.model.remove(seq, begin, end)
        )
        assert self.slots() == slots, "copied out with no need"
        self.check()
        return done

    def checkpoint(self, seq: int) -> None:
        self.cache.checkpoint(seq)
        row = self.model.rows[seq]
        if row.tokens:
            self.model.keep(row)
        self.check()

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> None:
        stop = len(self.model.rows[seq].tokens) if end is None else end
        taken: list[RecurrentSnapshot] = []
        copied: list[Copy] = []
        self.agree(
            lambda: taken.append(self.cache.snapshot(seq, begin, end)),
            lambda: copied.append(self.model.snapshot(seq, begin, stop)),
        )
        row = self.cache._states.rows[seq]
        if taken and taken[0].end == row.offset and row.slot is not None:
            assert taken[0].state.slot == (row.slot if row.offset else None), "copied with no need"
        self.copies += zip(taken, copied, strict=True)
        self.check()

    def restore(self, seq: int, which: int, target: int | None = None) -> bool:
        snapshot, copy = self.copies[which]
        found: list[bool] = []
        shared, slots = snapshot.attention.in_cache, self.slots()
        self.agree(
            lambda: found.append(self.cache.restore(seq, snapshot, target)),
            lambda: found.append(self.model.restore(seq, copy, target, shared)),
        )
        assert len(set(found)) < 2, f"restore gave {found}"
        assert self.slots() == slots, "copied out with no need"
        self.check()
        return bool(found and found[0])

    def scheduled(self, seq: int, ahead: Sequence[int], count: int) -> None:
        """Snapshots asked for ``ahead`` of the end, and a pass of ``count`` tokens: a state is of its end."""
        offset = len(self.model.rows[seq].tokens)
        due = sorted({offset + step for step in ahead})
        self.cache.schedule_snapshots(seq, due)
        if self.start([seq] * count):
            self.step()
            stop = offset + count
            assert self.cache.next_snapshot(seq) == min((end for end in due if end > stop), default=None)
            taken = self.cache.take_snapshots(seq)
            assert [snapshot.end for snapshot in taken] == [end for end in due if end == stop]
            assert self.cache.skipped_snapshots(seq) == [end for end in due if end < stop]
            self.copies += [(one, self.model.snapshot(seq, one.begin, one.end)) for one in taken]
        self.cache.cancel_snapshots(seq)
        self.check()

    def check_copies(self) -> None:
        """Every copy that a sequence has room for goes on from what it was taken of."""
        for seq in range(self.setup.max_sequences):
            self.remove(seq, 0)
        for which, (_, copy) in enumerate(self.copies):
            if not copy.begin and self.restore(0, which) and self.model.free():
                self.forward(0)
            self.remove(0, 0)

    def agree(self, real: Callable[[], object], model: Callable[[], object]) -> bool:
        """Whether both did it; else both refused it in the same way."""
        found, expected = outcome(real), outcome(model)
        assert type(found) is type(expected), f"raised {found!r}, expected {expected!r}"
        return found is None

    def check(self) -> None:
        """Offsets, checkpoints, positions and where each sequence can go back to."""
        assert self.cache.attention.free_cells == self.model.free()
        for seq, row in enumerate(self.model.rows):
            offset = len(row.tokens)
            assert self.cache.offset(seq) == offset
            assert self.cache.attention.positions(seq).tolist() == list(range(offset))
            assert self.cache.checkpoints(seq) == tuple(sorted(row.points))
            for position in {0, 1, offset - 1, offset, offset + 1, *row.points} - {-1}:
                assert self.cache.prepare_restore(seq, position) == (row.reach(position) or None)
                expected = position == 0 or row.reach(position) == position
                assert self.cache.can_resume(seq, position) == expected

    def drain(self) -> None:
        """Read every state and every token back: a further token for each sequence, one at a time."""
        for seq in range(self.setup.max_sequences):
            self.model.rows[seq] = row = replace(self.model.rows[seq])
            if self.model.free():
                assert self.forward(seq)
            self.remove(seq, 0)
            assert not self.model.rows[seq].tokens, row


# Random traces.


def random_state_setup(rnd: random.Random, floats: Sequence[DType]) -> StateSetup:
    config = ml.CacheConfig(
        cache_padding=rnd.choice((1, 1, 4)),
        mask_batch_padding=rnd.choice((1, 3)),
        permuted_v=rnd.random() < 0.3,
        layout=rnd.choice(list(ml.Layout)),
        elide_mask=rnd.random() < 0.5,
    )
    return StateSetup(
        max_sequences=rnd.choice((1, 2, 3, 4)),
        capacity=rnd.choice((4, 9, 16)),
        checkpoints=rnd.choice((0, 1, 2, 5)),
        interval=rnd.choice((1, 2, 3)),
        dtype=rnd.choice(list(floats)),
        conv_dtype=rnd.choice((None, *floats)),
        can_shift=rnd.random() < 0.8,
        config=config,
    )


def state_trace(backend: ml.Backend, seed: int, floats: Sequence[DType]) -> None:
    """The trace of one seed; raises where the cache and its model part."""
    rnd = random.Random(seed)
    setup = random_state_setup(rnd, floats)
    with backend.new_context() as ctx:
        rig = StateRig(setup, backend, ctx)
        for _ in range(rnd.randrange(5, 18)):
            _random_call(rnd, rig)
        rig.drain()
        rig.check_copies()
        rig.cache.close()


def _random_call(rnd: random.Random, rig: StateRig) -> None:
    count = rig.setup.max_sequences
    seq = rnd.randrange(count)
    length = len(rig.model.rows[seq].tokens)
    roll = rnd.random()
    if roll < 0.5:
        some = rnd.sample(range(count), rnd.randint(1, count))
        _random_pass(rnd, rig, rnd.choices(some, k=rnd.randint(1, 5)))
    elif roll < 0.62:
        rig.copy_prefix(seq, rnd.randrange(count), rnd.randint(-1 if rnd.random() < 0.1 else 0, length + 1))
    elif roll < 0.72:
        rig.remove(seq, rnd.randint(0, length + 1))
    elif roll < 0.84:
        begin = rnd.randint(0, length)
        rig.remove(seq, begin, begin + rnd.randint(-1 if rnd.random() < 0.1 else 0, 4))
    elif roll < 0.85:
        rig.checkpoint(seq)
    elif roll < 0.87:
        holders = [other for other in range(count) if rig.model.rows[other].tokens]
        if holders:
            rig.read(rnd.sample(holders, rnd.randint(1, len(holders))))
    elif roll < 0.89:
        rig.scheduled(seq, rnd.sample(range(1, 5), 2), rnd.randint(1, 3))
    elif roll < 0.93:
        end = rnd.choice([None, rnd.randint(0, length)])
        rig.snapshot(seq, rnd.randint(0, length if end is None else end), end)
    elif rig.copies:
        which = rnd.randrange(len(rig.copies))
        if rnd.random() < 0.3:
            snapshot = rig.copies[which][0]
            nbytes = snapshot.nbytes
            snapshot.detach()
            assert (snapshot.in_cache, snapshot.nbytes) == (False, nbytes)
        end = rig.copies[which][1].end
        rig.restore(seq, which, rnd.choice([None, end, max(0, end - 1)]))


def _random_pass(rnd: random.Random, rig: StateRig, sequences: list[int]) -> None:
    if not rig.start(sequences):
        rig.check()
        return
    if rnd.random() < 0.1:  # the model fails when some of the states are written already
        rig.write("conv", 0, in_place=True)
        for seq in dict.fromkeys(sequences):
            rig.remove(seq, rig.lengths[seq])
        return
    rig.step(lambda: rnd.random() < 0.5)
    rig.check()
    if rnd.random() < 0.1:  # it goes wrong when some of the sequences were kept
        for seq in dict.fromkeys(sequences):
            if rnd.random() < 0.5:
                rig.snapshot(seq)
        rig.spoil()
        for seq in dict.fromkeys(sequences):
            rig.remove(seq, rig.lengths[seq])
        return
    if rnd.random() < 0.2:
        count = rig.setup.max_sequences
        rig.start_and_resume(rnd.choices(range(count), k=rnd.randint(1, 5)))
