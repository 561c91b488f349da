"""A wrapper and a model of each cache in it, and random traces of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial, partialmethod
from typing import Any

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.snapshot import WrapperSnapshot
from kvcache.testing.models import values
from kvcache.testing.models.attention import Copy, Held, Model, Setup
from kvcache.testing.rigs.attention import Rig, outcome
from kvcache.testing.rigs.machine import Op, Trace
from ml import DType


class ForeignCache:
    """A cache with only the Cache protocol; it refuses the call named by ``refuses``."""

    def __init__(self, inner: kvcache.CausalCache) -> None:
        self.inner = inner
        self.refuses: str | None = None

    def _ask(self, name: str, *args: Any, **named: Any) -> Any:
        if self.refuses == name:
            raise kvcache.KVCacheError(f"{name}: this cache refuses")
        return getattr(self.inner, name)(*args, **named)

    def start_forward(
        self, ctx: ml.Context, batch: Batch, reserve: bool = False, *, read_only: bool = False
    ) -> None:
        self._ask("start_forward", ctx, batch, reserve, read_only=read_only)


for _name in [name for name in vars(kvcache.Cache) if not name.startswith("_")]:
    if _name not in vars(ForeignCache):  # a wrapper reads the signature of start_forward
        setattr(ForeignCache, _name, partialmethod(ForeignCache._ask, _name))


class WrapperRig:
    """A wrapper and a model of each cache in it: either all of them change, or none."""

    def __init__(
        self, setups: Sequence[Setup], backend: ml.Backend, ctx: ml.Context, foreign: int | None = None
    ) -> None:
        self.ctx, self.backend = ctx, backend
        self.rigs = [_Part(setup, backend, ctx) for setup in setups]
        inner: list[Any] = [rig.cache for rig in self.rigs]
        self.foreign = None if foreign is None else ForeignCache(inner[foreign])
        if foreign is not None:
            inner[foreign] = self.foreign
        self.cache = kvcache.WrapperCache(*inner)
        self.cache.init(backend, DType.F32, setups[0].max_sequences, setups[0].capacity, setups[0].max_batch)
        self.next_token = 1
        self.under_way: tuple[Sequence[int], Sequence[int], Collection[int]] | None = None
        self.copies: list[tuple[WrapperSnapshot, list[Copy]]] = []

    @property
    def models(self) -> list[Model]:
        return [rig.model for rig in self.rigs]

    def last(self, seq: int) -> int:
        return max(model.last(seq) for model in self.models)

    def both(self, real: Callable[[], object], model: Callable[[Model], object]) -> bool:
        """Run a call on the wrapper and all models; returns whether it succeeded. If a model refuses, the
        wrapper must refuse too, and all models are restored.
        """
        before: list[Held] = [[dict(row) for row in m.tokens] for m in self.models]
        refusals = [outcome(lambda m=m: model(m)) for m in self.models]  # type: ignore[misc]
        expected = [error for error in refusals if error is not None]
        if expected:
            for m, tokens in zip(self.models, before, strict=True):
                m.tokens = tokens
        raised = outcome(real)
        assert (raised is None) == (not expected), f"raised {raised!r}, expected {expected!r}"
        assert raised is None or any(isinstance(raised, type(error)) for error in expected)
        self.check()
        return raised is None

    def forward(
        self, positions: Sequence[int], sequences: Sequence[int], lifted: Collection[int] = ()
    ) -> bool:
        ids = range(self.next_token, self.next_token + len(positions))
        batch = Batch(list(positions), list(sequences))
        if not self.both(
            lambda: self.cache.start_forward(self.ctx, batch), lambda m: m.start(positions, sequences, ids)
        ):
            self.go_on()
            return False
        self.next_token += len(ids)
        self.under_way = positions, sequences, lifted
        self.store(positions, sequences, lifted)
        return True

    def go_on(self) -> None:
        """After a refusal, check that the current pass reads as before."""
        if self.under_way is not None:
            self.look(self.under_way[2])

    def refused_start(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        """Start a pass that the foreign cache refuses after the others have started."""
        assert self.foreign is not None
        self.foreign.refuses = "start_forward"
        with pytest.raises(kvcache.KVCacheError):
            self.cache.start_forward(self.ctx, Batch(list(positions), list(sequences)))
        self.foreign.refuses = None
        self.check()
        self.go_on()

    def store(self, positions: Sequence[int], sequences: Sequence[int], lifted: Collection[int] = ()) -> None:
        """Put into each type's own layer, then look in all."""
        if lifted:
            self.cache.set_causal(self.ctx, except_=lifted)
        for i, rig in enumerate(self.rigs):
            self.cache.set_layer_type(i)
            rig.through(self.cache.put, self.cache.set_layer)
            rig.next_token, rig.pass_ = self.next_token, (list(positions), list(sequences))
            rig.put()
        self.look(lifted)

    def look(self, lifted: Collection[int] = ()) -> None:
        for i, rig in enumerate(self.rigs):
            self.cache.set_layer_type(i)
            rig.through(self.cache.put, self.cache.set_layer)
            rig.check_seen(lifted)

    def read(self, positions: Sequence[int], sequences: Sequence[int]) -> bool:
        """A read-only pass: check what each cache stores."""
        batch = Batch(list(positions), list(sequences))
        if not self.both(
            lambda: self.cache.start_forward(self.ctx, batch, read_only=True),
            lambda m: m.read(positions, sequences),
        ):
            self.go_on()
            return False
        self.under_way = None
        for i, rig in enumerate(self.rigs):
            self.cache.set_layer_type(i)
            rig.pass_ = list(positions), list(sequences)
            rig.check_seen()
        return True

    def extend(self, seq: int, count: int = 1) -> bool:
        first = self.last(seq) + 1
        return self.forward(range(first, first + count), [seq] * count)

    def copy_prefix(self, src: int, dst: int, length: int) -> bool:
        return self._over(
            self.both(
                lambda: self.cache.copy_prefix(src, dst, length), lambda m: m.copy_prefix(src, dst, length)
            )
        )

    def remove(self, seq: int, begin: int, end: int | None = None) -> bool:
        return self._over(
            self.both(lambda: self.cache.remove(seq, begin, end), lambda m: m.remove(seq, begin, end))
        )

    def snapshot(self, seq: int, begin: int, end: int | None) -> None:
        stop = self.last(seq) + 1 if end is None else end
        taken: list[WrapperSnapshot] = []
        copies: list[Copy] = []
        if self.both(
            lambda: taken.append(self.cache.snapshot(seq, begin, end)),
            lambda m: copies.append(m.snapshot(seq, begin, stop)),
        ):
            self.copies.append((taken[0], copies))

    def restore(self, which: int, seq: int, target: int | None) -> None:
        """Restore each model in turn, up to the first that refuses, and compare with the wrapper."""
        snapshot, copies = self.copies[which]
        end = snapshot.end if target is None else target
        shared = [part.in_cache for part in snapshot.parts]
        before: list[Held] = [[dict(row) for row in m.tokens] for m in self.models]
        answers: list[bool] = []
        wanted: list[bool] = []

        def ask() -> None:
            for m, copy, is_shared in zip(self.models, copies, shared, strict=True):
                if not m.restore(seq, copy, end, is_shared):
                    wanted.append(False)
                    return
            wanted.append(True)

        expected = outcome(ask)
        raised = outcome(lambda: answers.append(self.cache.restore(seq, snapshot, target)))
        assert type(raised) is type(expected), f"raised {raised!r}, expected {expected!r}"
        assert answers == wanted
        done = answers == [True]
        if not done:
            for m, tokens in zip(self.models, before, strict=True):
                m.tokens = tokens
        self.check()
        self._over(done)

    def split(self, which: int, at: int) -> None:
        """Split a snapshot and merge it again; add the halves and the result to the copies."""
        snapshot, copies = self.copies[which]
        first, second = self.cache.split(snapshot, at)
        if first is None:
            assert second is snapshot
            return
        halves = [m.split(copy, at) for m, copy in zip(self.models, copies, strict=True)]
        firsts = [half for half, _ in halves if half is not None]
        assert len(firsts) == len(copies), "split although one part is indivisible"
        self.copies += [(first, firsts), (second, [half for _, half in halves])]
        self.copies.append((self.cache.merge(first, second), copies))
        self.check()

    def _over(self, done: bool) -> bool:
        """A call that changed sequences ends the pass; a refused one does not."""
        if done:
            self.under_way = None
        else:
            self.go_on()
        return done

    def check(self) -> None:
        for rig in self.rigs:
            rig.check_figures()
        for seq in range(len(self.models[0].tokens)):
            for position in range(self.last(seq) + 3):
                wanted = all(model.can_resume(seq, position) for model in self.models)
                assert self.cache.can_resume(seq, position) == wanted

    def drain(self) -> None:
        """Read back all stored tokens, cache by cache."""
        for rig in self.rigs:
            rig.next_token, rig.direct = self.next_token, True
            rig.drain()


class _Part(Rig):
    """The rig of one wrapped cache, which is bound and written through the wrapper."""

    direct = False

    def __init__(self, setup: Setup, backend: ml.Backend, ctx: ml.Context) -> None:
        super().__init__(setup, backend, ctx)
        self.cache.close()  # the wrapper binds it again

    def through(self, put: Callable[..., None], set_layer: Callable[[int], None]) -> None:
        self._put, self._set_layer = put, set_layer

    def put(self, layers: int | None = None) -> None:
        if self.direct:
            super().put(layers)
            return
        positions, _ = self.pass_
        ids = range(self.next_token - len(positions), self.next_token)
        self._set_layer(0)
        key, value = values.keys(list(ids), positions), values.values(list(ids))
        self._put(self.ctx, self.ctx.from_numpy(key), self.ctx.from_numpy(value))


class WrapperMachine:
    """Random calls on a wrapper."""

    def __init__(
        self, setups: Sequence[Setup], foreign: int | None, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        self.rig, self.count = WrapperRig(setups, backend, ctx, foreign), setups[0].max_sequences

    def choose(self, rnd: random.Random) -> Op:
        r, seq, roll = self.rig, rnd.randrange(self.count), rnd.random()
        if r.foreign is None and rnd.random() < 0.25:
            return self._snapshot(rnd, seq)
        if roll < 0.6:
            return self._pass(rnd)
        if roll < 0.75 and self.count > 1:
            return "copy_prefix", *rnd.sample(range(self.count), 2), rnd.randrange(6)
        if r.foreign is None or roll < 0.85:  # a foreign cache's refusal is only known afterwards
            begin = rnd.randint(0, r.last(seq) + 1)
            return "remove", seq, begin, rnd.choice((None, begin + rnd.randrange(4)))
        return ("nothing",)

    def _pass(self, rnd: random.Random) -> Op:
        last, pairs = [self.rig.last(seq) for seq in range(self.count)], []
        for _ in range(rnd.randint(1, 4)):
            seq = rnd.randrange(self.count)
            last[seq] += 1
            pairs.append((last[seq], seq))
        if rnd.random() < 0.1:
            pairs[-1] = rnd.randrange(6), pairs[-1][1]
        positions, sequences = tuple(p for p, _ in pairs), tuple(s for _, s in pairs)
        if self.rig.foreign is not None and rnd.random() < 0.2:
            return "refused_start", positions, sequences
        if rnd.random() < 0.1:
            return "read", tuple(max(0, p - rnd.randrange(3)) for p in positions), sequences
        return "forward", positions, sequences, (0,) * (self.rig.foreign is None and rnd.random() < 0.1)

    def _snapshot(self, rnd: random.Random, seq: int) -> Op:
        r, roll = self.rig, rnd.random()
        if roll < 0.4 or not r.copies:
            offset = r.last(seq) + 1
            return "snapshot", seq, rnd.randint(0, offset), rnd.choice((None, rnd.randint(0, offset + 1)))
        which = rnd.randrange(len(r.copies))
        begin, end = r.copies[which][0].begin, r.copies[which][0].end
        if roll < 0.8:
            return (
                "restore",
                which,
                rnd.randrange(self.count),
                rnd.choice((None, rnd.randint(begin, end + 1))),
            )
        return ("split", which, rnd.randint(begin, end)) if roll < 0.9 else ("detach", which)

    def apply(self, op: Op) -> None:
        name, *rest = op
        args: Any = rest
        if name in ("restore", "split", "detach"):
            if not self.rig.copies:
                return
            args[0] %= len(self.rig.copies)
            snapshot = self.rig.copies[args[0]][0]
        if name == "split":
            self.rig.split(args[0], min(max(args[1], snapshot.begin), snapshot.end))
        elif name == "detach":
            nbytes = snapshot.nbytes
            snapshot.detach()
            assert (snapshot.in_cache, snapshot.nbytes) == (False, nbytes)
        elif name != "nothing":
            getattr(self.rig, str(name))(*args)

    def finish(self) -> None:
        self.rig.drain()


def wrapper_trace(rnd: random.Random, floats: Sequence[DType], computes: bool) -> Trace:
    common: dict[str, Any] = {
        "max_sequences": rnd.randint(1, 3), "capacity": rnd.choice((5, 9)), "max_batch": rnd.choice((2, 5)),
    }  # fmt: skip
    kinds: list[dict[str, Any]] = [{}, {"window": 2}, {"window": 1, "memory": 4}, {"chunk": 3}]
    setups = [
        Setup(can_shift=rnd.random() < 0.9, **common, **rnd.choice(kinds)) for _ in range(rnd.randint(1, 3))
    ]
    foreign = rnd.choice((None, rnd.randrange(len(setups))))
    return Trace((setups, foreign), rnd.randrange(4, 12), partial(WrapperMachine, setups, foreign))
