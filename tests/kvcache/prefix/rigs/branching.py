"""Branches of caches beside plain models of each: fork, keep, drop, roll back, checked after every call.

A cache here is one of any kind, or a wrapper around several. Its tokens are numbered in the order in
which they are stored; each part has the model that its own suite has, and a call that one model
refuses has to leave every part as it was.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

import kvcache
import ml
from kvcache import Batch
from kvcache.caches import branches
from kvcache.testing.models import values
from kvcache.testing.models.attention import Model, Setup
from kvcache.testing.models.states import (
    KINDS,
    RECURRENT_LAYERS,
    TWO,
    Fold,
    StateModel,
    StateSetup,
    state_values,
)
from kvcache.testing.rigs.attention import look, outcome
from ml import DType

__all__ = ["BRANCHING", "BranchRig", "Marked", "branch_trace"]

Ints = Sequence[int]
_ALL = 1 << 30

BRANCHING: dict[str, tuple[Setup | StateSetup, ...]] = {
    "causal": (Setup(),),
    "chunked": (Setup(chunk=4),),
    "window": (Setup(window=3),),
    "window with memory": (Setup(window=3, memory=6),),
    "window of none": (Setup(window=0),),
    "recurrent": (StateSetup(),),
    "recurrent without checkpoints": (StateSetup(checkpoints=0),),
    "recurrent, delivered": (StateSetup(checkpoints=0, delivers=True),),
    "wrapper of sliding and full": (Setup(window=2, memory=4), Setup()),
    "wrapper of sliding, full and recurrent": (Setup(window=2, memory=5), Setup(), StateSetup(interval=2)),
    "wrapper of sliding and recurrent, delivered": (Setup(window=2, memory=7), StateSetup(delivers=True)),
}
"""The parts of one cache of each kind; more than one are wrapped."""


class Part(Protocol):
    """One cache and its model."""

    cache: Any
    model: Any

    def offset(self, seq: int) -> int: ...
    def exact(self, seq: int, position: int, marked: tuple[int, ...] | None) -> bool:
        """Whether it can go on at ``position``; ``marked``: what a mark there has seen."""

    def start(self, positions: Ints, sequences: Ints, ids: Ints) -> None: ...
    def store(self, ctx: ml.Context, positions: Ints, sequences: Ints, ids: Ints) -> None: ...
    def copy_prefix(self, src: int, dst: int, length: int) -> None: ...
    def back(self, seq: int, position: int, marked: tuple[int, ...] | None) -> None: ...
    def check(self) -> None: ...


class AttentionPart:
    """An attention cache, whose model is a dict of positions."""

    def __init__(self, setup: Setup) -> None:
        self.cache, self.model = setup.unbound(), Model(setup)

    def offset(self, seq: int) -> int:
        return self.model.last(seq) + 1

    def exact(self, seq: int, position: int, marked: tuple[int, ...] | None) -> bool:
        left = min(self.model.tokens[seq], default=position) < position
        within = position <= self.offset(seq) and self.model.can_resume(seq, position)
        return position == 0 or (left and within)

    def start(self, positions: Ints, sequences: Ints, ids: Ints) -> None:
        self.model.start(positions, sequences, ids)

    def store(self, ctx: ml.Context, positions: Ints, sequences: Ints, ids: Ints) -> None:
        _put(self.cache, ctx, positions, ids, 0)
        seen = look(self.cache, ctx, len(ids))
        pairs = zip(sequences, positions, strict=True)
        assert seen == [self.model.visible(seq, position) for seq, position in pairs]

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self.model.copy_prefix(src, dst, length)

    def back(self, seq: int, position: int, marked: tuple[int, ...] | None) -> None:
        self.model.remove(seq, position)

    def check(self) -> None:
        cache, model = self.cache, self.model
        assert (cache.cells, cache.free_cells) == (model.setup.cells, model.free())
        assert cache.held() == model.held()
        for seq, row in enumerate(model.tokens):
            assert cache.positions(seq).tolist() == sorted(row)


class StatePart:
    """A recurrent cache, whose model is the dictionary and what each state has seen."""

    def __init__(self, setup: StateSetup) -> None:
        shift = values.shift_positions if setup.can_shift else None
        states = kvcache.StateCache(
            TWO, setup.checkpoints, setup.interval, setup.conv_dtype, delivers=setup.delivers
        )
        self.cache = kvcache.RecurrentCache.of(states, kvcache.CausalCache(shift))
        self.delivers = setup.delivers
        self.model = StateModel(setup)

    def offset(self, seq: int) -> int:
        return self.model.length(seq)

    def exact(self, seq: int, position: int, marked: tuple[int, ...] | None) -> bool:
        if position > self.offset(seq):
            return False
        return marked is not None or position == 0 or self.model.reach(seq, position) == position

    def start(self, positions: Ints, sequences: Ints, ids: Ints) -> None:
        for seq in dict.fromkeys(sequences):
            mine = [p for p, s in zip(positions, sequences, strict=True) if s == seq]
            if mine != list(range(self.offset(seq), self.offset(seq) + len(mine))):
                raise kvcache.InvalidBatchError(f"{mine} at {self.offset(seq)}")
        self.model.start(positions, sequences, ids)

    def store(self, ctx: ml.Context, positions: Ints, sequences: Ints, ids: Ints) -> None:
        """The states before the pass, read back; the new ones; then the attention layer."""
        order = list(dict.fromkeys(sequences))
        assert self.cache.sequences == tuple(order)
        folds = [self.model.folds[seq] for seq in order]
        counts = [list(sequences).count(seq) for seq in order]
        for layer in RECURRENT_LAYERS:
            for kind in KINDS:
                state = self._state(ctx, kind, layer)
                before = [row.seen[: len(row.seen) - n] for row, n in zip(folds, counts, strict=True)]
                expected = np.stack([state_values(seen, kind, layer) for seen in before])
                np.testing.assert_array_equal(state.to_numpy().astype(np.float32), expected)
                self.write(ctx, kind, layer, folds)
                for seq, row, n in zip(order, folds, counts, strict=True) if self.delivers else ():
                    inside = [row.seen[: len(row.seen) - n + i] for i in range(1, n + 1)]
                    host = np.stack([state_values(seen, kind, layer) for seen in inside])
                    at = [(seq, i) for i in range(1, n + 1)]
                    self.cache.deliver_states(ctx, kind, ctx.from_numpy(host), at, layer)
        for seq, row, n in zip(order, folds, counts, strict=True) if self.delivers else ():
            row.inside.update({self.offset(seq) - i: row.seen[:-i] for i in range(1, n)})
        _put(self.cache, ctx, positions, ids, 1)
        found = look(self.cache.attention, ctx, len(ids), 1)
        for i, (seq, position) in enumerate(zip(sequences, positions, strict=True)):
            assert found[i] == self.model.visible(seq, position)

    def write(self, ctx: ml.Context, kind: str, layer: int, folds: Sequence[Fold]) -> None:
        new = ctx.from_numpy(np.stack([state_values(fold.seen, kind, layer) for fold in folds]))
        ctx.forward(new.copy(ctx, self._state(ctx, kind, layer)))

    def _state(self, ctx: ml.Context, kind: str, layer: int) -> ml.Tensor:
        if kind == "conv":
            return self.cache.conv_state(ctx, layer)
        return self.cache.recurrent_state(ctx, layer)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        self.model.copy_prefix(src, dst, length)

    def back(self, seq: int, position: int, marked: tuple[int, ...] | None) -> None:
        if marked is None:
            self.model.remove(seq, position, None)
            return
        points = {point: seen for point, seen in self.model.folds[seq].points.items() if point <= position}
        self.model.tokens[seq] = {p: token for p, token in self.model.tokens[seq].items() if p < position}
        self.model.folds[seq] = Fold(marked, points)

    def check(self) -> None:
        assert self.cache.attention.free_cells == self.model.free()
        for seq, fold in enumerate(self.model.folds):
            assert self.cache.offset(seq) == self.offset(seq)
            assert self.cache.attention.positions(seq).tolist() == list(range(self.offset(seq)))
            assert self.cache.checkpoints(seq) == tuple(sorted(fold.points))


def _put(cache: Any, ctx: ml.Context, positions: Ints, ids: Ints, layer: int) -> None:
    cache.set_layer(layer)
    key, value = values.keys(ids, positions, layer), values.values(ids, layer)
    cache.put(ctx, ctx.from_numpy(key), ctx.from_numpy(value))


@dataclass(frozen=True)
class Marked:
    """A mark, and the tokens that its sequence had: it is good while they are its first ones."""

    mark: branches.Mark
    ids: tuple[int, ...]


class BranchRig:
    """One cache, bare or wrapped, beside the models of its parts."""

    def __init__(
        self,
        parts: Sequence[Setup | StateSetup],
        backend: ml.Backend,
        ctx: ml.Context,
        max_sequences: int = 4,
        capacity: int = 16,
        max_batch: int = 8,
    ) -> None:
        self.ctx, self.max_sequences = ctx, max_sequences
        sizes: dict[str, Any] = {"max_sequences": max_sequences, "capacity": capacity}
        self.parts: list[Part] = [
            StatePart(replace(setup, **sizes))
            if isinstance(setup, StateSetup)
            else AttentionPart(replace(setup, max_batch=max_batch, **sizes))
            for setup in parts
        ]
        inner = [part.cache for part in self.parts]
        self.cache: Any = inner[0] if len(inner) == 1 else kvcache.WrapperCache(*inner)
        self.cache.set_config(ml.CacheConfig())
        self.cache.init(backend, DType.F32, max_sequences, capacity, max_batch)
        self.ids: list[tuple[int, ...]] = [()] * max_sequences
        self.next_id = 1

    def offset(self, seq: int) -> int:
        return len(self.ids[seq])

    def exact(self, seq: int, position: int, to: Marked | None = None) -> bool:
        marked = None if to is None or to.mark.position != position else to.ids
        return all(part.exact(seq, position, marked) for part in self.parts)

    # Calls, checked.

    def agree(self, real: Callable[[], object], model: Callable[[], object]) -> bool:
        """Whether both did it; what one model refuses, the cache refuses, and every model goes back."""
        before = [copy.deepcopy(part.model) for part in self.parts]
        expected, found = outcome(model), outcome(real)
        assert type(found) is type(expected), f"raised {found!r}, expected {expected!r}"
        if expected is not None:
            for part, old in zip(self.parts, before, strict=True):
                part.model = old
        self.check()
        return expected is None

    def check(self) -> None:
        for part in self.parts:
            part.check()
        for seq in range(self.max_sequences):
            assert branches.offset(self.cache, seq) == max(part.offset(seq) for part in self.parts)

    def forward(self, *sequences: int) -> bool:
        """The next token of each of ``sequences``, named once per token; whether the batch was taken."""
        ids, positions, after = [], [], list(self.ids)
        for i, seq in enumerate(sequences):
            positions.append(len(after[seq]))
            ids.append(self.next_id + i)
            after[seq] = (*after[seq], ids[-1])
        batch = Batch(positions, list(sequences))
        state = next((part for part in self.parts if isinstance(part, StatePart)), None)
        for seq in dict.fromkeys(sequences) if state is not None and state.delivers else ():
            assert branches.want_states(self.cache, seq, range(self.offset(seq), len(after[seq])))

        def start() -> None:
            for part in self.parts:
                part.start(positions, sequences, ids)

        if not self.agree(lambda: self.cache.start_forward(self.ctx, batch), start):
            return False
        for part in self.parts:
            part.store(self.ctx, positions, sequences, ids)
        self.ids, self.next_id = after, self.next_id + len(ids)
        return True

    def fork(self, seq: int, into: Ints, position: int | None = None) -> bool:
        end = self.offset(seq) if position is None else position

        def model() -> None:
            if seq in into or len(set(into)) < len(into) or not 0 <= end <= self.offset(seq):
                raise kvcache.InvalidRangeError(f"{seq} {into} {end}")
            self._refuse_inexact(seq, end)
            for branch in into:
                for part in self.parts:
                    part.copy_prefix(seq, branch, end)

        done = self.agree(lambda: branches.fork(self.cache, seq, into, position), model)
        for branch in into if done else ():
            self.ids[branch] = self.ids[seq][:end]
        return done

    def keep(self, winner: int, seq: int, losers: Ints = ()) -> bool:
        others = {winner, *losers} - {seq}

        def model() -> None:
            self._refuse_inexact(winner, 0 if winner == seq else self.offset(winner))
            for part in self.parts:
                if winner != seq:
                    part.copy_prefix(winner, seq, _ALL)
                for other in others:
                    part.back(other, 0, None)

        done = self.agree(lambda: branches.keep(self.cache, winner, seq, losers), model)
        if done:
            self.ids[seq] = self.ids[winner]
            self._empty(others)
        return done

    def drop(self, those: Ints) -> None:
        def model() -> None:
            for part in self.parts:
                for branch in those:
                    part.back(branch, 0, None)

        assert self.agree(lambda: branches.drop(self.cache, those), model)
        self._empty(those)

    def mark(self, seq: int) -> Marked | None:
        found: list[branches.Mark] = []
        if not self.agree(
            lambda: found.append(branches.mark(self.cache, seq)),
            lambda: self._refuse_inexact(seq, self.offset(seq)),
        ):
            return None
        assert (found[0].seq, found[0].position) == (seq, self.offset(seq))
        return Marked(found[0], self.ids[seq])

    def rollback(self, seq: int, position: int, to: Marked | None = None) -> bool:
        marked = None if to is None or to.mark.position != position else to.ids
        mark = None if to is None else to.mark

        def model() -> None:
            if not 0 <= position <= self.offset(seq):
                raise kvcache.InvalidRangeError(f"{position}")
            self._refuse_inexact(seq, position, to)
            for part in self.parts:
                part.back(seq, position, marked)

        if 0 <= position <= self.offset(seq):
            wanted = max(p for p in range(position + 1) if self.exact(seq, p, to))
            assert branches.resume_point(self.cache, seq, position, mark) == wanted
        done = self.agree(lambda: branches.rollback(self.cache, seq, position, mark), model)
        if done:
            self.ids[seq] = self.ids[seq][:position]
        return done

    def _refuse_inexact(self, seq: int, position: int, to: Marked | None = None) -> None:
        if not self.exact(seq, position, to):
            raise kvcache.NotSupportedError(f"{seq} at {position}")

    def _empty(self, those: Sequence[int] | set[int]) -> None:
        for seq in those:
            self.ids[seq] = ()

    def figures(self) -> list[object]:
        """All that a cache tells of what it holds."""
        found: list[object] = [self.cache.nbytes]
        for part in self.parts:
            attention = getattr(part.cache, "attention", part.cache)
            found += [attention.free_cells, attention.held()]
            for seq in range(self.max_sequences):
                points = part.cache.checkpoints(seq) if isinstance(part, StatePart) else ()
                found.append((attention.positions(seq).tolist(), part.cache.offset(seq), points))
        return found

    def drain(self) -> None:
        """A further token of each sequence sees what it should, and then the cache is empty."""
        for seq in range(self.max_sequences):
            self.forward(seq)
        self.drop(range(self.max_sequences))


# Random traces.


def branch_trace(backend: ml.Backend, seed: int, kind: str | None = None) -> None:
    """The trace of one seed on one of BRANCHING (None: by turns); raises where a cache and models part."""
    kind = kind or list(BRANCHING)[seed % len(BRANCHING)]
    rnd = random.Random(f"{kind} {seed}")
    with backend.new_context() as ctx:
        capacity = rnd.choice((5, 9, 16))
        r = BranchRig(BRANCHING[kind], backend, ctx, rnd.choice((1, 2, 4)), capacity, rnd.choice((4, 8)))
        marks: list[Marked] = []
        for _ in range(rnd.randrange(6, 22)):
            _random_call(rnd, r, marks)
        r.drain()
        r.cache.close()


def _random_call(rnd: random.Random, r: BranchRig, marks: list[Marked]) -> None:
    everyone = range(r.max_sequences)
    seq, roll = rnd.randrange(r.max_sequences), rnd.random()
    some = rnd.sample(everyone, rnd.randint(1, r.max_sequences))
    if roll < 0.45:
        r.forward(*rnd.choices(some, k=rnd.randint(1, 5)))
    elif roll < 0.6:
        into = [other for other in some if other != seq or rnd.random() < 0.1]
        wrong = rnd.random() < 0.1
        r.fork(seq, into, rnd.choice((None, rnd.randint(-wrong, r.offset(seq) + wrong))))
    elif roll < 0.7:
        r.keep(seq, rnd.randrange(r.max_sequences), some)
    elif roll < 0.75:
        r.drop(some)
    elif roll < 0.85:
        taken = r.mark(seq)
        marks += [] if taken is None else [taken]
    else:
        wrong = rnd.random() < 0.1
        position = rnd.randint(max(0, r.offset(seq) - 5), r.offset(seq)) if not wrong else r.offset(seq) + 1
        good = [m for m in marks if m.mark.seq == seq and r.ids[seq][: len(m.ids)] == m.ids]
        to = rnd.choice([None, *good])
        r.rollback(seq, to.mark.position if to and rnd.random() < 0.7 else position, to)
