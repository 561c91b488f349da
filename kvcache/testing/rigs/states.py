"""A recurrent cache and its model, and random traces of both."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.snapshot import StateSnapshot, WrapperSnapshot
from kvcache.storage.state_slots import HeldStates
from kvcache.testing.models import values
from kvcache.testing.models.states import ATTENTION_LAYER, Copy, StateModel, StateSetup, state_values
from kvcache.testing.rigs.attention import look, outcome
from kvcache.testing.rigs.machine import Op, Trace
from ml import DType


class StateRig:
    """A recurrent cache and its model, checked after every call."""

    def __init__(self, setup: StateSetup, backend: ml.Backend, ctx: ml.Context) -> None:
        self.setup, self.backend, self.ctx = setup, backend, ctx
        self.cache, self.model = setup.make(backend), StateModel(setup)
        self.next_token = 1
        self.copies: list[tuple[WrapperSnapshot, Copy]] = []
        self.sequences: list[int] = []
        self.layout = setup.layout
        self.known = {*self.layout} if setup.states != "found" else set()
        """The states whose shapes the cache knows."""
        self.wants: dict[int, tuple[int, ...]] = {}
        self.due: dict[int, tuple[int, ...]] = {}
        """By sequence, the positions of scheduled snapshots, whose states are wanted."""
        self.delivery = "none"
        """Which states inside a pass are delivered: "none", the "wanted" ones, "all", or those of "some"
        layers.
        """

    # A pass.

    def plan(self, sequences: Sequence[int]) -> Batch:
        """The batch with the next token of each of ``sequences`` (named once per token)."""
        self.sequences = list(sequences)
        self.ids = list(range(self.next_token, self.next_token + len(sequences)))
        self.before = [fold.seen for fold in self.model.folds]
        self.lengths = [len(row) for row in self.model.tokens]
        seen = list(self.lengths)
        self.wanted: dict[int, tuple[int, ...]] = {}
        for seq in dict.fromkeys(sequences):
            begin, count = self.lengths[seq], self.sequences.count(seq)
            wanted = sorted({*self.wants.get(seq, ()), *self.due.get(seq, ())})
            if inside := tuple(p - begin for p in wanted if begin < p < begin + count):
                self.wanted[seq] = inside
        self.positions = []
        for seq in sequences:
            self.positions.append(seen[seq])
            seen[seq] += 1
        return Batch(self.positions, self.sequences)

    def begin(self) -> None:
        """Begin the planned pass in the model."""
        self.model.start(self.positions, self.sequences, self.ids)
        self.next_token += len(self.ids)
        self.wants = {seq: wanted for seq, wanted in self.wants.items() if seq not in self.sequences}

    def start(self, sequences: Sequence[int]) -> bool:
        """Begin a pass; returns whether it was accepted."""
        batch, slots = self.plan(sequences), self.slots()
        taken = self.agree(lambda: self.cache.start_forward(self.ctx, batch), self.begin)
        owned = {row.slot for row in self.cache.states.state_table.rows}
        window = {self.cache.states.state_table.rows[seq].slot for seq in sequences} if taken else set()
        for before, now in zip(slots, self.slots(), strict=True):
            assert now is None or now not in window, "the pass overwrites a snapshot"
            assert now == before or before in owned, "copied out needlessly"
        assert not taken or self.cache.wanted_states() == self.wanted
        return taken

    def slots(self) -> list[int | None]:
        """The slots of the snapshots' states in this cache; None for those copied out."""
        return [
            state_of(snapshot).slot_in(self.cache.states.state_table.buffers) for snapshot, _ in self.copies
        ]

    def spoil(self) -> None:
        """Overwrite the states of the pass with wrong values."""
        for kind, layer in self.layout:
            state = self.state(kind, layer)
            wrong = self.ctx.full(state.shape, 99, state.dtype)
            self.ctx.forward(wrong.copy(self.ctx, state))

    def step(self, in_place: Callable[[], bool] = lambda: False) -> None:
        """The rest of the pass: read the states, store the new ones, put and look."""
        order = list(dict.fromkeys(self.sequences))
        assert self.cache.sequences == tuple(order)
        for kind, layer in self.layout:
            known = (kind, layer) in self.known
            if known:
                self.check_state(kind, layer, {seq: self.before[seq] for seq in order})
            self.write(kind, layer, in_place() and known)
            if self.delivery in ("wanted", "all") or (self.delivery == "some" and layer):
                self.deliver(kind, layer)
        if self.delivery in ("wanted", "all"):
            for seq, counts in self.wanted.items():
                self.model.folds[seq].inside.update(
                    {self.lengths[seq] + n: self.seen(seq, n) for n in counts}
                )
        self.cache.set_layer(ATTENTION_LAYER)
        key = values.keys(self.ids, self.positions, ATTENTION_LAYER)
        self.cache.put(
            self.ctx,
            self.ctx.from_numpy(key),
            self.ctx.from_numpy(values.values(self.ids, ATTENTION_LAYER)),
        )
        self.check_seen()

    def seen(self, seq: int, count: int) -> tuple[int, ...]:
        """The tokens that a sequence's state has seen after ``count`` of its tokens in this pass."""
        mine = [token for token, s in zip(self.ids, self.sequences, strict=True) if s == seq]
        return (*self.before[seq], *mine[:count])

    def deliver(self, kind: str, layer: int) -> None:
        """Deliver states inside the pass: the wanted ones, sequence by sequence, or all in reverse order."""
        every = [(seq, n + 1) for seq in set(self.sequences) for n in range(self.sequences.count(seq))]
        calls = [[(seq, n) for n in counts] for seq, counts in self.wanted.items()]
        for at in [every[::-1]] if self.delivery == "all" else calls:
            shape = self.layout[kind, layer][0]
            host = np.stack([state_values(self.seen(seq, n), kind, layer, shape) for seq, n in at])
            self.cache.deliver_states(self.ctx, kind, self.given(kind, layer, host), at, layer)

    def schedule(self, seq: int, positions: Sequence[int]) -> None:
        self.cache.schedule_snapshots(seq, positions)
        self.due[seq] = tuple(positions)

    def want(self, seq: int, positions: Sequence[int]) -> None:
        self.cache.want_states(seq, positions)
        self.wants[seq] = tuple(positions)

    def start_and_resume(self, sequences: Sequence[int]) -> None:
        """Start and undo a pass: the previous pass continues, and its views are unchanged."""
        order = list(dict.fromkeys(self.sequences))
        views = {(kind, layer): self.state(kind, layer) for kind, layer in self.layout}
        under_way = self.cache.pass_under_way()
        seen = [len(row) for row in self.model.tokens]
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
            assert self.cache.wanted_states() == self.wanted
        for (kind, layer), state in views.items():
            folds, shape = self.model.folds, self.layout[kind, layer][0]
            expected = np.stack([state_values(folds[seq].seen, kind, layer, shape) for seq in order])
            for view in (state, self.state(kind, layer)):
                np.testing.assert_array_equal(view.to_numpy().astype(np.float32), expected)
            self.write(kind, layer, in_place=True)
        self.check_seen()
        self.check()

    def read(self, sequences: Sequence[int]) -> None:
        """A read-only pass with a query at the last token of each sequence: states are copies and cannot be
        set.
        """
        positions = [self.model.length(seq) - 1 for seq in sequences]
        self.cache.start_forward(self.ctx, Batch(positions, list(sequences)), read_only=True)
        assert self.cache.sequences == tuple(sequences)
        self.sequences = list(sequences)
        for kind, layer in self.layout:
            state = self.check_state(kind, layer, {seq: self.model.folds[seq].seen for seq in sequences})
            refusal = outcome(functools.partial(self.write, kind, layer, in_place=False))
            assert isinstance(refusal, kvcache.OrderError)
            wrong = self.ctx.full(state.shape, 99, state.dtype)
            self.ctx.forward(wrong.copy(self.ctx, state))  # the caller's own copy
        self.ids, self.positions = list(range(len(sequences))), positions
        self.check_seen()
        self.check()

    def state(self, kind: str, layer: int) -> ml.Tensor:
        if self.setup.states != "two":
            self.cache.set_layer(layer)
            state = self.cache.state(self.ctx, kind)
        else:
            state = (self.cache.conv_state if kind == "conv" else self.cache.recurrent_state)(self.ctx, layer)
        shape, dtype = self.layout[kind, layer]
        assert state.dtype is dtype
        assert state.shape == (len(set(self.sequences)), *shape)
        return state

    def check_state(self, kind: str, layer: int, seen: Mapping[int, tuple[int, ...]]) -> ml.Tensor:
        """The states of a layer, after checking them against the tokens that each sequence has ``seen``."""
        state, shape = self.state(kind, layer), self.layout[kind, layer][0]
        expected = np.stack([state_values(tokens, kind, layer, shape) for tokens in seen.values()])
        np.testing.assert_array_equal(state.to_numpy().astype(np.float32), expected)
        return state

    def given(self, kind: str, layer: int, host: np.ndarray) -> ml.Tensor:
        """A state as a model passes it: in F32, or in its own dtype if it is not a float."""
        dtype = self.layout[kind, layer][1]
        return self.ctx.from_numpy(host, None if dtype.is_float else dtype)

    def write(self, kind: str, layer: int, in_place: bool) -> None:
        order, (shape, dtype) = dict.fromkeys(self.sequences), self.layout[kind, layer]
        host = np.stack([state_values(self.model.folds[seq].seen, kind, layer, shape) for seq in order])
        new = self.given(kind, layer, host)
        if in_place:
            self.ctx.forward(new.copy(self.ctx, self.state(kind, layer)))
        elif self.setup.states != "two":
            new = new if (kind, layer) in self.known else new.cast(self.ctx, dtype)
            self.cache.update_state(self.ctx, kind, new, layer)
            self.known.add((kind, layer))
        elif kind == "conv":
            self.cache.set_conv_state(self.ctx, layer, new)
        else:
            self.cache.set_recurrent_state(self.ctx, layer, new)

    def check_seen(self) -> None:
        seen = look(self.cache.attention, self.ctx, len(self.ids), ATTENTION_LAYER)
        for visible, seq, position in zip(seen, self.sequences, self.positions, strict=True):
            assert visible == self.model.visible(seq, position)

    def forward(self, *sequences: int, in_place: bool = False) -> bool:
        taken = self.start(sequences)
        if taken:
            self.step(lambda: in_place)
            self.check()
        return taken

    # Sequences.

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        slots = self.slots()
        done = self.agree(
            lambda: self.cache.copy_prefix(src, dst, length), lambda: self.model.copy_prefix(src, dst, length)
        )
        if done:
            self.wants.pop(dst, None)
        assert self.slots() == slots, "copied out needlessly"
        self.check()

    def remove(self, seq: int, begin: int, end: int | None = None) -> bool:
        slots = self.slots()
        done = self.agree(
            lambda: self.cache.remove(seq, begin, end), lambda: self.model.remove(seq, begin, end)
        )
        if done:
            self.wants.pop(seq, None)
        assert self.slots() == slots, "copied out needlessly"
        self.check()
        return done

    def checkpoint(self, seq: int) -> None:
        self.cache.checkpoint(seq)
        if self.model.tokens[seq]:
            self.model.keep(seq)
        self.check()

    def snapshot(self, seq: int, begin: int = 0, end: int | None = None) -> None:
        stop = self.model.length(seq) if end is None else end
        taken: list[WrapperSnapshot] = []
        copied: list[Copy] = []
        self.agree(
            lambda: taken.append(self.cache.snapshot(seq, begin, end)),
            lambda: copied.append(self.model.snapshot_of(seq, begin, stop)),
        )
        row = self.cache.states.state_table.rows[seq]
        if taken and taken[0].end == row.offset and row.slot is not None:
            assert state_of(taken[0]).slot == (row.slot if row.offset else None), "copied needlessly"
        self.copies += zip(taken, copied, strict=True)
        self.check()

    def restore(self, seq: int, which: int, target: int | None = None) -> bool:
        snapshot, copy = self.copies[which]
        answers: list[bool] = []
        shared, slots = snapshot.parts[0].in_cache, self.slots()
        self.agree(
            lambda: answers.append(self.cache.restore(seq, snapshot, target)),
            lambda: answers.append(self.model.restore_copy(seq, copy, target, shared)),
        )
        assert len(set(answers)) < 2, f"restore gave {answers}"
        if answers and answers[0]:
            self.wants.pop(seq, None)
        assert self.slots() == slots, "copied out needlessly"
        self.check()
        return bool(answers and answers[0])

    def scheduled(self, seq: int, ahead: Sequence[int], count: int) -> None:
        """Schedule snapshots ``ahead`` of the end, and run a pass of ``count`` tokens."""
        offset = self.model.length(seq)
        due = sorted({offset + step for step in ahead})
        self.schedule(seq, due)
        if self.start([seq] * count):
            self.step()
            stop = offset + count
            assert self.cache.next_snapshot(seq) == min((end for end in due if end > stop), default=None)
            there = {stop, *self.model.folds[seq].inside}
            taken = self.cache.take_snapshots(seq)
            assert [snapshot.end for snapshot in taken] == [end for end in due if end in there]
            assert self.cache.skipped_snapshots(seq) == [
                end for end in due if end < stop and end not in there
            ]
            self.copies += [(one, self.model.snapshot_of(seq, one.begin, one.end)) for one in taken]
        self.cache.cancel_snapshots(seq)
        self.due.pop(seq)
        self.check()

    def check_copies(self) -> None:
        """Check that every snapshot that a sequence has room for can be restored and continued."""
        for seq in range(self.setup.max_sequences):
            self.remove(seq, 0)
        for which, (_, copy) in enumerate(self.copies):
            if not copy.begin and self.restore(0, which) and self.model.free():
                self.forward(0)
            self.remove(0, 0)

    def agree(self, real: Callable[[], object], model: Callable[[], object]) -> bool:
        """Run both calls; returns whether they succeeded. Otherwise both must raise the same error."""
        raised, expected = outcome(real), outcome(model)
        assert type(raised) is type(expected), f"raised {raised!r}, expected {expected!r}"
        return raised is None

    def check(self) -> None:
        """Check offsets, checkpoints, positions, and the positions that each sequence can go back to."""
        assert self.cache.attention.free_cells == self.model.free()
        for seq, fold in enumerate(self.model.folds):
            offset = self.model.length(seq)
            assert self.cache.offset(seq) == offset
            assert self.cache.attention.positions(seq).tolist() == list(range(offset))
            assert self.cache.checkpoints(seq) == tuple(sorted(fold.points))
            for position in {0, 1, offset - 1, offset, offset + 1, *fold.kept} - {-1}:
                assert self.cache.prepare_restore(seq, position) == (self.model.reach(seq, position) or None)
                assert self.cache.can_resume(seq, position) == self.model.can_resume(seq, position)

    def drain(self) -> None:
        """Read back every state and token, by adding one token to each sequence in turn."""
        for seq in range(self.setup.max_sequences):
            if self.model.free():
                assert self.forward(seq)
            self.remove(seq, 0)
            assert not self.model.tokens[seq]


def state_of(snapshot: WrapperSnapshot) -> HeldStates:
    """The states' part of a RecurrentCache's snapshot."""
    states = snapshot.parts[1]
    assert isinstance(states, StateSnapshot)
    return states.state


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
        states=rnd.choice(("two", "declared", "found")),
    )


def state_trace(rnd: random.Random, floats: Sequence[DType], computes: bool) -> Trace:
    setup = random_state_setup(rnd, floats)
    return Trace(setup, rnd.randrange(5, 18), functools.partial(StateMachine, setup))


class StateMachine:
    """Random calls on a recurrent cache."""

    def __init__(self, setup: StateSetup, backend: ml.Backend, ctx: ml.Context) -> None:
        self.rig, self.count = StateRig(setup, backend, ctx), setup.max_sequences

    def choose(self, rnd: random.Random) -> Op:
        rig, count, seq, roll = self.rig, self.count, rnd.randrange(self.count), rnd.random()
        length = rig.model.length(seq)
        if roll < 0.5:
            return self._pass(rnd, rnd.sample(range(count), rnd.randint(1, count)))
        if roll < 0.62:
            return (
                "copy_prefix",
                seq,
                rnd.randrange(count),
                rnd.randint(-1 if rnd.random() < 0.1 else 0, length + 1),
            )
        if roll < 0.72:
            return "remove", seq, rnd.randint(0, length + 1)
        if roll < 0.84:
            begin = rnd.randint(0, length)
            return "remove", seq, begin, begin + rnd.randint(-1 if rnd.random() < 0.1 else 0, 4)
        if roll < 0.85:
            return "checkpoint", seq
        if roll < 0.87:
            return "read", tuple(rnd.sample(range(count), rnd.randint(1, count)))
        if roll < 0.90:
            return "scheduled", seq, tuple(rnd.sample(range(1, 6), 3)), rnd.randint(1, 6), _delivery(rnd)
        if roll < 0.93 or not rig.copies:
            end = rnd.choice([None, rnd.randint(0, length)])
            return "snapshot", seq, rnd.randint(0, length if end is None else end), end
        which = rnd.randrange(len(rig.copies))
        end = rig.copies[which][1].end
        return "restore", seq, which, rnd.choice([None, end, max(0, end - 1)]), rnd.random() < 0.3

    def _pass(self, rnd: random.Random, some: Sequence[int]) -> Op:
        """A pass over some sequences: what it delivers, which drafted states are wanted, how it ends, and a
        seed of smaller choices."""
        sequences = tuple(rnd.choices(some, k=rnd.randint(1, 5)))
        drafted = (
            (rnd.choice(sequences), *rnd.sample(range(6), rnd.randint(1, 4))) if rnd.random() < 0.5 else ()
        )
        end = rnd.choices(("", "fails", "fails late", "is resumed"), (65, 10, 8, 17))[0]
        return "pass", sequences, _delivery(rnd), drafted, end, rnd.randrange(1 << 16)

    def apply(self, op: Op) -> None:
        name, *rest = op
        args: Any = rest
        rig = self.rig
        if name == "pass":
            self._apply_pass(*args)
        elif name == "read":
            if holders := [seq for seq in args[0] if rig.model.length(seq)]:
                rig.read(holders)
        elif name == "scheduled":
            rig.delivery = args.pop()
            rig.scheduled(*args)
        elif name == "restore":
            seq, which, target, detached = args
            if rig.copies:
                snapshot = rig.copies[which % len(rig.copies)][0]
                if detached:
                    nbytes = snapshot.nbytes
                    snapshot.detach()
                    assert (snapshot.in_cache, snapshot.nbytes) == (False, nbytes)
                rig.restore(seq, which % len(rig.copies), target)
        else:
            getattr(rig, str(name))(*args)

    def _apply_pass(
        self, sequences: Sequence[int], delivery: str, drafted: Sequence[int], end: str, seed: int
    ) -> None:
        rig, rnd, order = self.rig, random.Random(seed), list(dict.fromkeys(sequences))
        rig.delivery = delivery
        if drafted:
            seq, *ahead = drafted
            rig.want(seq, sorted(rig.model.length(seq) + step for step in ahead))
        if not rig.start(sequences):
            rig.check()
            return
        if end == "fails":  # after writing some of the states
            rig.write("conv", 0, in_place=("conv", 0) in rig.known)
            self._take_back(order)
            return
        rig.step(lambda: rnd.random() < 0.5)
        rig.check()
        if self._settled(rnd):
            return
        if end == "fails late":  # after keeping some of the sequences
            for seq in order:
                if rnd.random() < 0.5:
                    rig.snapshot(seq)
            rig.spoil()
            self._take_back(order)
        elif end == "is resumed":
            for seq in range(self.count):
                stop = rig.model.length(seq)
                rig.want(seq, [stop + 1, stop + 2])
            rig.start_and_resume(rnd.choices(range(self.count), k=rnd.randint(1, 5)))

    def _take_back(self, order: Sequence[int]) -> None:
        for seq in order:
            self.rig.remove(seq, self.rig.lengths[seq])

    def _settled(self, rnd: random.Random) -> bool:
        """Whether some drafted tokens were rejected."""
        inside = [(seq, at) for seq, fold in enumerate(self.rig.model.folds) for at in fold.inside]
        if not inside or rnd.random() < 0.3:
            return False
        seq, at = rnd.choice(inside)
        if rnd.random() < 0.3:
            self.rig.snapshot(seq, 0, at)
        return self.rig.remove(seq, at)

    def finish(self) -> None:
        self.rig.drain()
        self.rig.check_copies()
        self.rig.cache.close()


def _delivery(rnd: random.Random) -> str:
    return rnd.choice(("none", "wanted", "wanted", "all", "some"))
