"""The wrapper: several caches as one, and nothing done in some of them only."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots import WrapperSnapshot
from kvcache.testing import values
from kvcache.testing.failing import every_failure, every_way_to_fail
from kvcache.testing.harness import CacheCase
from kvcache.testing.model import Copy, Held, Model, Setup
from kvcache.testing.rig import Rig, outcome
from ml import DType

__all__ = ["ForeignCache", "WrapperRig", "WrapperTests", "wrapper_trace"]

WIDE = Setup(max_sequences=3, capacity=12, max_batch=6)
NARROW = Setup(max_sequences=3, capacity=12, max_batch=6, window=2, memory=4)
CHUNKS = Setup(max_sequences=3, capacity=12, max_batch=6, chunk=4)


class ForeignCache:
    """The Cache protocol and no more, around one of ours; it refuses when it is told to."""

    def __init__(self, inner: kvcache.CausalCache) -> None:
        self.inner = inner
        self.refuses: str | None = None

    def _ask(self, name: str, *args: Any) -> Any:
        if self.refuses == name:
            raise kvcache.KVCacheError(f"{name}: this cache refuses")
        return getattr(self.inner, name)(*args)

    def init(self, *args: Any) -> None:
        self._ask("init", *args)

    def set_config(self, config: ml.CacheConfig) -> None:
        self._ask("set_config", config)

    def close(self) -> None:
        self._ask("close")

    def start_forward(self, ctx: ml.Context, batch: Batch, reserve: bool = False) -> None:
        self._ask("start_forward", ctx, batch, reserve)

    def set_layer(self, layer: int) -> None:
        self._ask("set_layer", layer)

    def put(self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        self._ask("put", ctx, key, value)

    def get(self, ctx: ml.Context) -> Any:
        return self._ask("get", ctx)

    def attend(self, *args: Any) -> Any:
        return self._ask("attend", *args)

    def copy_prefix(self, src_seq: int, dst_seq: int, length: int) -> None:
        self._ask("copy_prefix", src_seq, dst_seq, length)

    def can_resume(self, seq: int, position: int) -> bool:
        return bool(self._ask("can_resume", seq, position))

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        self._ask("remove", seq, begin, end)


class WrapperRig:
    """A wrapper beside a model of each cache in it: either all of them change, or none."""

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
        """Whether all did it; where a model refuses, all go back and the wrapper has refused too."""
        before: list[Held] = [[dict(row) for row in m.tokens] for m in self.models]
        refusals = [outcome(lambda m=m: model(m)) for m in self.models]  # type: ignore[misc]
        expected = [error for error in refusals if error is not None]
        if expected:
            for m, tokens in zip(self.models, before, strict=True):
                m.tokens = tokens
        found = outcome(real)
        assert (found is None) == (not expected), f"raised {found!r}, expected {expected!r}"
        assert found is None or any(isinstance(found, type(error)) for error in expected)
        self.check()
        return found is None

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
        """After a refusal: the pass that was under way stores and reads as before."""
        if self.under_way is not None:
            self.store(*self.under_way)

    def refused_start(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        """A start that the foreign cache refuses when the others have started."""
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
        for i, rig in enumerate(self.rigs):
            self.cache.set_layer_type(i)
            rig.check_seen(lifted)

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
        """Each is asked in turn, up to the first that cannot."""
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
        found = outcome(lambda: answers.append(self.cache.restore(seq, snapshot, target)))
        assert type(found) is type(expected), f"raised {found!r}, expected {expected!r}"
        assert answers == wanted
        done = answers == [True]
        if not done:
            for m, tokens in zip(self.models, before, strict=True):
                m.tokens = tokens
        self.check()
        self._over(done)

    def split(self, which: int, at: int) -> None:
        """Cut one and join it again: the halves and the whole join the copies."""
        snapshot, copies = self.copies[which]
        first, second = self.cache.split(snapshot, at)
        if first is None:
            assert second is snapshot
            return
        halves = [m.split(copy, at) for m, copy in zip(self.models, copies, strict=True)]
        firsts = [half for half, _ in halves if half is not None]
        assert len(firsts) == len(copies), "it was cut though one of them is whole"
        self.copies += [(first, firsts), (second, [half for _, half in halves])]
        self.copies.append((self.cache.merge(first, second), copies))
        self.check()

    def _over(self, done: bool) -> bool:
        """What changed sequences ended the pass; what was refused did not."""
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
        """Everything that is stored is read back, cache by cache."""
        for rig in self.rigs:
            rig.next_token, rig.direct = self.next_token, True
            rig.drain()


class _Part(Rig):
    """One wrapped cache: bound by the wrapper, put to through it."""

    direct = False

    def __init__(self, setup: Setup, backend: ml.Backend, ctx: ml.Context) -> None:
        super().__init__(setup, backend, ctx)
        self.cache.close()  # the wrapper binds it again

    def through(self, put: Callable[..., None], set_layer: Callable[[int], None]) -> None:
        self._put, self._set_layer = put, set_layer

    def put(self) -> None:
        if self.direct:
            super().put()
            return
        positions, _ = self.pass_
        ids = range(self.next_token - len(positions), self.next_token)
        self._set_layer(0)
        key, value = values.keys(list(ids), positions), values.values(list(ids))
        self._put(self.ctx, self.ctx.from_numpy(key), self.ctx.from_numpy(value))


def wrapper_trace(backend: ml.Backend, seed: int) -> None:
    """The trace of one seed; raises where the wrapper and its models part."""
    rnd = random.Random(seed)
    common: dict[str, Any] = {
        "max_sequences": rnd.randint(1, 3), "capacity": rnd.choice((5, 9)), "max_batch": rnd.choice((2, 5)),
    }  # fmt: skip
    kinds: list[dict[str, Any]] = [{}, {"window": 2}, {"window": 1, "memory": 4}, {"chunk": 3}]
    setups = [
        Setup(can_shift=rnd.random() < 0.9, **common, **rnd.choice(kinds)) for _ in range(rnd.randint(1, 3))
    ]
    foreign = rnd.choice((None, rnd.randrange(len(setups))))
    with backend.new_context() as ctx:
        r = WrapperRig(setups, backend, ctx, foreign)
        for _ in range(rnd.randrange(4, 12)):
            _random_call(rnd, r, common["max_sequences"])
        r.drain()


def _random_call(rnd: random.Random, r: WrapperRig, count: int) -> None:
    seq, roll = rnd.randrange(count), rnd.random()
    if r.foreign is None and rnd.random() < 0.25:
        _random_snapshot(rnd, r, seq, count)
    elif roll < 0.6:
        last = [r.last(s) for s in range(count)]
        pairs = []
        for _ in range(rnd.randint(1, 4)):
            seq = rnd.randrange(count)
            last[seq] += 1
            pairs.append((last[seq], seq))
        if rnd.random() < 0.1:
            pairs[-1] = rnd.randrange(6), pairs[-1][1]
        lifted = [0] if r.foreign is None and rnd.random() < 0.1 else []
        if r.foreign is not None and rnd.random() < 0.2:
            r.refused_start([p for p, _ in pairs], [s for _, s in pairs])
            return
        r.forward([p for p, _ in pairs], [s for _, s in pairs], lifted)
    elif roll < 0.75 and count > 1:
        src, dst = rnd.sample(range(count), 2)
        r.copy_prefix(src, dst, rnd.randrange(6))
    elif r.foreign is None or roll < 0.85:  # what a foreign cache refuses is only known in the end
        begin = rnd.randint(0, r.last(seq) + 1)
        r.remove(seq, begin, rnd.choice((None, begin + rnd.randrange(4))))


def _random_snapshot(rnd: random.Random, r: WrapperRig, seq: int, count: int) -> None:
    roll = rnd.random()
    if roll < 0.4 or not r.copies:
        offset = r.last(seq) + 1
        end = rnd.choice((None, rnd.randint(0, offset + 1)))
        r.snapshot(seq, rnd.choice((0, rnd.randint(0, offset))), end)
        return
    which = rnd.randrange(len(r.copies))
    snapshot, _ = r.copies[which]
    if roll < 0.8:
        target = rnd.choice((None, None, rnd.randint(snapshot.begin, snapshot.end + 1)))
        r.restore(which, rnd.randrange(count), target)
    elif roll < 0.9:
        r.split(which, rnd.randint(snapshot.begin, snapshot.end))
    else:
        nbytes = snapshot.nbytes
        snapshot.detach()
        assert (snapshot.in_cache, snapshot.nbytes) == (False, nbytes)


class WrapperTests(CacheCase):
    wrapper_traces: ClassVar[int] = 20
    """How many seeded traces of the wrapper to run."""

    @pytest.fixture
    def wrapped(self, backend: ml.Backend, ctx: ml.Context) -> Callable[..., WrapperRig]:
        """``wrapped(*setups, foreign=None)``: a wrapper and a model for each cache in it."""
        return lambda *setups, foreign=None: WrapperRig(setups or (NARROW, WIDE), backend, ctx, foreign)

    def test_a_wrapper_follows_all_its_models_in_random_traces(self, backend: ml.Backend) -> None:
        for seed in range(self.wrapper_traces):
            wrapper_trace(backend, seed)

    def test_layers_go_to_the_cache_of_their_type(self, wrapped: Callable[..., WrapperRig]) -> None:
        r = wrapped(NARROW, WIDE, CHUNKS)
        r.forward(range(6), [0] * 6)
        r.forward([6, 0, 7], [0, 1, 0])
        assert [len(model.tokens[0]) for model in r.models] == [6, 8, 8]
        r.cache.set_layer_type(1)
        r.forward([8], [0], lifted=[0])
        assert r.cache.current is r.rigs[2].cache, "a pass begins with type 0"
        for wrong in (-1, 3):
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.set_layer_type(wrong)
        r.drain()

    def test_except_lists_reach_all_caches_and_wrong_ones_none(
        self, wrapped: Callable[..., WrapperRig]
    ) -> None:
        r = wrapped()
        r.forward(range(4), [0] * 4, lifted=[0, 1])
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.set_causal(r.ctx, except_=[4])
        for i, rig in enumerate(r.rigs):
            r.cache.set_layer_type(i)
            rig.check_seen([0, 1])
        r.drain()

    # All or none.

    @pytest.mark.parametrize("order", [(NARROW, WIDE), (WIDE, NARROW)], ids=["window first", "window last"])
    def test_a_full_cache_among_them_takes_back_the_evictions_of_the_others(
        self, wrapped: Callable[..., WrapperRig], order: tuple[Setup, Setup]
    ) -> None:
        r = wrapped(*order)
        for seq in (0, 1, 2):
            r.forward(range(6), [seq] * 6)
            r.forward(range(6, 12), [seq] * 6)
        assert not r.forward([12], [0])
        r.drain()

    @pytest.mark.parametrize("order", [(NARROW, WIDE), (WIDE, NARROW)], ids=["window first", "window last"])
    def test_a_window_that_could_not_resume_refuses_a_removal_for_all(
        self, wrapped: Callable[..., WrapperRig], order: tuple[Setup, Setup]
    ) -> None:
        r = wrapped(*order)
        r.forward(range(6), [0] * 6)
        r.forward(range(6, 9), [0] * 3)
        assert not r.remove(0, 1, 8)
        assert r.remove(0, 8)
        r.extend(0)
        r.drain()

    @pytest.mark.parametrize("broken", [0, 1])
    def test_a_shift_function_that_raises_leaves_all_as_they_were(
        self, wrapped: Callable[..., WrapperRig], broken: int
    ) -> None:
        r = wrapped(WIDE, CHUNKS)
        r.forward(range(6), [0] * 6)

        def fail(*_: Any) -> ml.Tensor:
            raise ValueError("no shift today")

        cache = r.rigs[broken].cache
        shift, cache._shift = cache._shift, fail
        with pytest.raises(ValueError, match="no shift today"):
            r.cache.remove(0, 1, 3)
        r.check()
        cache._shift = shift
        assert r.remove(0, 1, 3)
        r.extend(0)
        r.drain()

    def test_a_shared_token_in_one_refuses_for_all(self, wrapped: Callable[..., WrapperRig]) -> None:
        r = wrapped(WIDE, NARROW)
        r.forward(range(6), [0] * 6)
        r.copy_prefix(0, 1, 6)
        assert not r.remove(0, 1, 3)
        r.extend(0)
        r.drain()

    def test_a_start_of_all_can_be_taken_back(self, wrapped: Callable[..., WrapperRig]) -> None:
        r = wrapped()
        r.forward(range(6), [0] * 6)
        r.cache.start_forward(r.ctx, Batch([6, 0], [0, 1]))
        r.cache.undo_forward()
        r.check()
        r.extend(0)
        r.drain()

    @pytest.mark.parametrize("reserve", [False, True])
    @pytest.mark.parametrize("place", [0, 1])
    def test_the_pass_under_way_goes_on_where_one_refuses_the_next(
        self, wrapped: Callable[..., WrapperRig], place: int, reserve: bool
    ) -> None:
        r = wrapped(foreign=place)
        positions, sequences = [0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1]
        r.forward(positions, sequences)
        assert r.foreign is not None
        r.foreign.refuses = "start_forward"
        with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
            r.cache.start_forward(r.ctx, Batch([4, 0], [0, 2]), reserve)
        r.foreign.refuses = None
        r.store(positions, sequences)  # once more, into the cells of the first time
        r.check()
        r.forward([2, 4], [1, 0])
        r.drain()

    def test_the_layer_type_stays_where_one_refuses(self, wrapped: Callable[..., WrapperRig]) -> None:
        r = wrapped(foreign=0)
        r.forward(range(3), [0] * 3)
        r.cache.set_layer_type(1)
        assert r.foreign is not None
        r.foreign.refuses = "start_forward"
        with pytest.raises(kvcache.KVCacheError):
            r.cache.start_forward(r.ctx, Batch([3], [0]))
        assert r.cache.current is r.cache.caches[1]

    @pytest.mark.parametrize("reserve", [False, True])
    def test_an_encoder_pass_goes_on_where_another_cache_refuses(
        self, backend: ml.Backend, ctx: ml.Context, reserve: bool
    ) -> None:
        encoder, other = kvcache.EncoderCache(), ForeignCache(kvcache.CausalCache())
        wrapper = kvcache.WrapperCache(encoder, other)
        wrapper.init(backend, DType.F32, 2, 8, 4)
        key = ctx.from_numpy(values.keys(range(1, 5), range(4), 0))
        value = ctx.from_numpy(values.values(range(1, 5), 0))
        wrapper.start_forward(ctx, Batch([0, 0], [0, 1]))
        wrapper.put(ctx, key, value)
        other.refuses = "start_forward"
        with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
            wrapper.start_forward(ctx, Batch([1], [1]), reserve)
        wrapper.set_layer(1)
        wrapper.put(ctx, key, value)  # the second layer of the same pass, for both sequences
        for layer in range(2):
            wrapper.set_layer(layer)
            found = wrapper.get(ctx)[0].to_numpy()
            assert (found == key.to_numpy()).all()

    def test_states_and_views_of_them_go_on_where_another_cache_refuses(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        recurrent = kvcache.RecurrentCache((2,), (3,), checkpoint_interval=1)
        other = ForeignCache(kvcache.CausalCache())
        wrapper = kvcache.WrapperCache(recurrent, other)
        wrapper.init(backend, DType.F32, 4, 8, 8)
        wrapper.start_forward(ctx, Batch([0, 0, 0], [2, 0, 1]))
        recurrent.set_recurrent_state(ctx, 0, ctx.from_numpy([[2.0] * 3, [0.5] * 3, [1.0] * 3]))
        recurrent.copy_prefix(2, 3, 1)
        wrapper.start_forward(ctx, Batch([1, 1], [0, 1]))
        state = recurrent.recurrent_state(ctx, 0)
        other.refuses = "start_forward"
        for sequences in ([1, 2, 0, 3], [2], [3, 0], [0, 1]):
            positions = [recurrent.offset(seq) for seq in sequences]
            with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
                wrapper.start_forward(ctx, Batch(positions, sequences))
            assert recurrent.sequences == (0, 1)
            assert state.to_numpy().tolist() == [[0.5] * 3, [1.0] * 3]
            assert recurrent.recurrent_state(ctx, 0).to_numpy().tolist() == [[0.5] * 3, [1.0] * 3]
        recurrent.set_recurrent_state(ctx, 0, ctx.from_numpy([[5.0] * 3, [7.0] * 3]))
        other.refuses = None
        assert state.to_numpy().tolist() == [[5.0] * 3, [7.0] * 3]  # it is the same view still
        wrapper.start_forward(ctx, Batch([2, 1, 1, 2], [0, 2, 3, 1]))
        assert recurrent.recurrent_state(ctx, 0).to_numpy()[:, 0].tolist() == [5.0, 2.0, 2.0, 7.0]

    def test_a_context_shift_moves_all(self, wrapped: Callable[..., WrapperRig]) -> None:
        r = wrapped(WIDE, CHUNKS)
        for _ in range(2):
            r.extend(0, 6)
        assert r.cache.shift_context(0, 2) == 5
        for model in r.models:
            model.remove(0, 2, 7)
        r.check()
        r.extend(0, 2)
        r.drain()

    def test_an_init_that_fails_closes_what_was_opened(self, backend: ml.Backend) -> None:
        first, last = kvcache.CausalCache(), ForeignCache(kvcache.CausalCache())
        last.refuses = "init"
        wrapper = kvcache.WrapperCache(first, last)
        with pytest.raises(kvcache.KVCacheError):
            wrapper.init(backend, DType.F32, 2, 8, 4)
        with pytest.raises(kvcache.ClosedError):
            first.positions(0)
        last.refuses = None
        wrapper.init(backend, DType.F32, 2, 8, 4)
        assert first.cells >= 16  # more where the backend asks for padding

    def test_a_config_is_for_all_and_comes_before_the_first_batch(
        self, backend: ml.Backend, ctx: ml.Context
    ) -> None:
        causal, encoder = kvcache.CausalCache(), kvcache.EncoderCache()
        wrapper = kvcache.WrapperCache(encoder, causal)
        config = ml.CacheConfig(permuted_v=True)
        wrapper.set_config(config)
        wrapper.init(backend, DType.F32, 2, 8, 4)
        assert causal.config == encoder.config == config
        wrapper.start_forward(ctx, Batch([0], [0]))
        with pytest.raises(kvcache.OrderError):
            wrapper.set_config(ml.CacheConfig())
        assert causal.config == encoder.config == config

    def test_a_config_that_one_refuses_is_taken_by_none(self, backend: ml.Backend, ctx: ml.Context) -> None:
        inner: list[Any] = [
            kvcache.CausalCache(), kvcache.EncoderCache(), kvcache.RecurrentCache((2,), (3,)),
        ]  # fmt: skip
        busy = kvcache.CausalCache()
        for last in (busy, ForeignCache(kvcache.CausalCache())):
            wrapper = kvcache.WrapperCache(kvcache.WrapperCache(*inner), last)
            wrapper.init(backend, DType.F32, 2, 8, 4)
            before = [cache.config for cache in (inner[0], inner[1], inner[2].attention)]
            if isinstance(last, ForeignCache):
                last.refuses = "set_config"
            else:
                last.start_forward(ctx, Batch([0], [0]))
            with pytest.raises(kvcache.KVCacheError):
                wrapper.set_config(ml.CacheConfig(permuted_v=True, cache_padding=7))
            assert [cache.config for cache in (inner[0], inner[1], inner[2].attention)] == before
            assert inner[0].cells == -(-16 // before[0].cache_padding) * before[0].cache_padding
            wrapper.close()

    # A cache of someone else's.

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("refuses", ["start_forward", "copy_prefix", "remove"])
    def test_a_foreign_cache_is_asked_last_and_its_refusal_is_everyones(
        self, wrapped: Callable[..., WrapperRig], place: int, refuses: str
    ) -> None:
        r = wrapped(foreign=place)
        r.forward(range(6), [0] * 6)
        assert r.foreign is not None
        calls: dict[str, Callable[[], object]] = {
            "start_forward": lambda: r.cache.start_forward(r.ctx, Batch([6, 0], [0, 1])),
            "copy_prefix": lambda: r.cache.copy_prefix(0, 1, 3),
            "remove": lambda: r.cache.remove(0, 4),
        }
        r.foreign.refuses = refuses
        with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
            calls[refuses]()
        r.foreign.refuses = None
        r.check()
        r.copy_prefix(0, 1, 3)
        r.remove(0, 5)
        r.forward([5, 3], [0, 1])
        r.drain()

    def test_one_foreign_cache_may_be_wrapped_and_not_two(self) -> None:
        foreign = [ForeignCache(kvcache.CausalCache()) for _ in range(2)]
        kvcache.WrapperCache(foreign[0], kvcache.CausalCache())
        with pytest.raises(kvcache.InvalidRangeError, match="ForeignCache"):
            kvcache.WrapperCache(*foreign)
        with pytest.raises(kvcache.InvalidRangeError):
            kvcache.WrapperCache()
        with pytest.raises(kvcache.KVCacheError):
            kvcache.WrapperCache(foreign[0]).undo_forward()

    # Faults.

    @pytest.mark.parametrize("what", ["start", "copy", "remove", "shift"])
    @every_way_to_fail
    def test_a_failing_backend_leaves_all_caches_as_they_were_or_the_sequence_lost(
        self, backend: ml.Backend, what: str, when: str
    ) -> None:
        def make(limited: ml.Backend, ctx: ml.Context) -> WrapperRig:
            r = WrapperRig((CHUNKS, WIDE), limited, ctx)
            r.forward([0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
            return r

        acts: dict[str, Callable[[WrapperRig], object]] = {
            "start": lambda r: r.cache.start_forward(r.ctx, Batch([4, 2], [0, 1])),
            "copy": lambda r: r.cache.copy_prefix(0, 2, 3),
            "remove": lambda r: r.cache.remove(0, 2),
            "shift": lambda r: r.cache.remove(0, 0, 2),
        }

        def check(r: WrapperRig) -> None:
            if r.cache.can_resume(0, 4):
                r.check()
                acts[what](r)
                return
            assert what == "shift"
            with pytest.raises(kvcache.SequenceLostError):
                r.cache.start_forward(r.ctx, Batch([9], [0]))
            r.cache.remove(0, 0)
            for model in r.models:
                model.remove(0, 0)
            r.check()
            r.forward([0, 2], [0, 1])
            r.drain()

        every_failure(backend, when, make, acts[what], check, self.fault_stride)
