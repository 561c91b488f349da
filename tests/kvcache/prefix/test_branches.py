"""Branches: forked, kept, dropped, rolled back, exactly or not at all, with nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.caches import branches
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.attention import Rig
from kvcache.testing.rigs.encoder import EncoderRig
from kvcache.testing.rigs.protocol import Plan, only_protocol
from kvcache.testing.rigs.wrapper import ForeignCache
from ml import DType

from .rigs.branching import BRANCHING, BranchRig, StatePart, branch_trace

MakeBranches = Callable[..., BranchRig]
every_kind = pytest.mark.parametrize("kind", list(BRANCHING))
PAST_THE_WRAP = 11
"""Tokens in front of the branches: several windows and chunks of BRANCHING."""


@pytest.fixture
def branching(backend: ml.Backend, ctx: ml.Context) -> MakeBranches:
    """``branching(kind, **sizes)``: one cache of BRANCHING and the models of its parts."""
    return lambda kind, **sizes: BranchRig(BRANCHING[kind], backend, ctx, **sizes)


def go_past_the_wrap(r: BranchRig) -> None:
    for _ in range(PAST_THE_WRAP):
        r.forward(0)


@every_kind
def test_branches_agree_with_their_models_in_random_traces(backend: ml.Backend, kind: str) -> None:
    for seed in range(8):
        branch_trace(backend, seed, kind)
    for seed in range(10_000, 10_002):
        branch_trace(only_protocol(backend), seed, kind)


def test_on_other_backends_too(other: ml.Backend) -> None:
    for seed in range(len(BRANCHING)):
        branch_trace(other, seed)


class Delegating:
    """A cache whose calls go to another one."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def test_a_cache_that_hands_its_calls_on_is_known_by_what_it_offers(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    states = kvcache.StateCache({None: {"s": kvcache.StateSpec((4,), DType.F32)}})
    cache: Any = Delegating(kvcache.RecurrentCache.of(states))
    cache.init(backend, DType.F32, 2, 16, 16)
    cache.start_forward(ctx, Batch(range(4), [0] * 4))
    cache.update_state(ctx, "s", ctx.full((1, 4), 1.0, DType.F32), 0)
    assert branches.offset(cache, 0) == 4
    mark = branches.mark(cache, 0)
    cache.start_forward(ctx, Batch([4], [0]))
    cache.update_state(ctx, "s", ctx.full((1, 4), 2.0, DType.F32), 0)
    branches.rollback(cache, 0, 4, mark)
    cache.start_forward(ctx, Batch([4], [0]))
    assert cache.state(ctx, "s", 0).to_numpy().tolist() == [[1.0] * 4]
    cache.close()


# Nothing is left over.


@every_kind
@pytest.mark.parametrize("winner", [0, 3])
def test_the_kept_branch_is_what_a_sequence_that_never_forked_would_be(
    branching: MakeBranches, kind: str, winner: int
) -> None:
    r, twin = branching(kind), branching(kind)
    for rig in (r, twin):
        go_past_the_wrap(rig)
    r.fork(0, [1, 2, 3])
    r.forward(1, 3, 0, 3, 1, 0, 2)
    r.forward(winner)
    r.keep(winner, 0, [0, 1, 2, 3])
    twin.forward(0, 0)
    twin.forward(0)
    assert r.figures() == twin.figures()
    for rig in (r, twin):
        rig.fork(0, [1, 2, 3])  # every sequence has room to go on
        rig.forward(3, 2, 1, 0)
        rig.drain()
    assert r.figures() == twin.figures()


def test_forks_and_marks_of_speculation_push_out_no_checkpoint(branching: MakeBranches) -> None:
    r = branching("recurrent", capacity=60)
    while r.offset(0) < 13:
        r.forward(0)
    points, size = r.cache.checkpoints(0), r.cache.nbytes
    assert len(points) == 3  # as many as it keeps
    for _ in range(5):
        to = r.mark(0)
        assert to is not None
        r.forward(0, 0, 0)
        r.rollback(0, 13, to)
        r.fork(0, [1, 2])
        r.forward(1, 2, 1)
        r.drop([1, 2])
    assert (r.cache.checkpoints(0), r.cache.nbytes) == (points, size)
    r.forward(0)
    r.drain()


def test_what_a_mark_costs_is_the_recurrent_state_and_nothing_elsewhere(branching: MakeBranches) -> None:
    for kind in BRANCHING:
        r = branching(kind)
        r.forward(0)
        to = r.mark(0)
        assert to is not None
        assert (to.mark.nbytes > 0) == ("recurrent" in kind)


@every_kind
def test_sharing_calls_no_backend(backend: ml.Backend, kind: str) -> None:
    plan = Plan()
    limited = only_protocol(backend, plan)
    with limited.new_context() as ctx:
        r = BranchRig(BRANCHING[kind], limited, ctx)
        r.forward(0, 0, 1)
        r.forward(0, 1)
        size = r.cache.nbytes
        plan.arm(None)
        r.fork(0, [1, 2])
        r.keep(2, 0, [1])
        r.fork(0, [3])
        r.drop([3])
        assert plan.calls == []
        assert r.cache.nbytes == size


def test_a_branch_that_failed_in_the_middle_of_its_pass_goes_back_to_the_mark(
    branching: MakeBranches,
) -> None:
    r = branching("recurrent")
    r.forward(0, 0, 0)
    to = r.mark(0)
    assert to is not None
    (part,) = r.parts
    assert isinstance(part, StatePart)
    batch = Batch([3, 4], [0, 0])
    r.cache.start_forward(r.ctx, batch)
    part.start([3, 4], [0, 0], [100, 101])
    part.write(r.ctx, "conv", 0, [part.model.folds[0]])  # and then the model fails
    branches.rollback(r.cache, 0, 3, to.mark)
    part.back(0, 3, to.ids)
    r.check()
    r.forward(0, 0)
    r.drain()


# What cannot be exact is refused.


@pytest.mark.parametrize(("window", "tokens"), [(0, 2), (3, 1), (3, 4), (5, 0)])
def test_window_memory_is_enough_and_one_less_is_not(
    backend: ml.Backend, ctx: ml.Context, window: int, tokens: int
) -> None:
    memory = branches.window_memory(window, tokens)
    r = BranchRig((Setup(window=window, memory=memory),), backend, ctx, capacity=40)
    branches.check_reach(r.cache, tokens)
    go_past_the_wrap(r)
    r.forward(1)
    assert r.rollback(0, PAST_THE_WRAP - tokens)
    for count in (tokens + 1, tokens + 5):
        if r.cache.reach < count:
            with pytest.raises(kvcache.NotSupportedError, match=f"memory={max(window, 1) + count}"):
                branches.check_reach(r.cache, count)
    assert r.cache.reach == max(memory, window + 1) - max(window, 1)


def test_caches_that_keep_everything_can_take_back_any_number(branching: MakeBranches) -> None:
    for kind in ("causal", "chunked", "recurrent"):
        branches.check_reach(branching(kind).cache, 1000)
    unlimited = branching("window", capacity=4)  # a window as long as the capacity
    assert unlimited.cache.reach is None
    branches.check_reach(unlimited.cache, 4)
    with pytest.raises(kvcache.NotSupportedError, match=r"SlidingWindowCache\(window=2, memory=5\)"):
        branches.check_reach(branching("wrapper of sliding, full and recurrent").cache, 4)


@pytest.mark.parametrize("kind", ["causal", "chunked", "window with memory"])
def test_a_sequence_goes_back_to_right_behind_a_token_that_was_not_evicted(
    branching: MakeBranches, kind: str
) -> None:
    cache = branching(kind).cache
    with cache.backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(6), [0] * 6))
    cache.evict(0, [2, 3])
    for position, reached in ((5, 5), (4, 2), (3, 2), (2, 2)):
        assert branches.resume_point(cache, 0, position) == reached
    for call in (branches.rollback, lambda *to: branches.fork(to[0], to[1], [1], to[2])):
        with pytest.raises(kvcache.NotSupportedError, match=r"exactly at 4, as .* can at 2"):
            call(cache, 0, 4)
    cache.evict(0, [0, 1])
    assert branches.resume_point(cache, 0, 4) == 0


@every_kind
def test_what_means_nothing_is_refused_and_touches_nothing(branching: MakeBranches, kind: str) -> None:
    r = branching(kind)
    r.forward(0, 0, 1)
    to = branches.mark(r.cache, 0)
    before = r.figures()
    cases: list[tuple[type[Exception], Callable[[], object]]] = [
        (kvcache.InvalidRangeError, lambda: branches.fork(r.cache, 0, [1, 0])),
        (kvcache.InvalidRangeError, lambda: branches.fork(r.cache, 0, [1, 1])),
        (kvcache.InvalidRangeError, lambda: branches.fork(r.cache, 0, [1], 3)),
        (kvcache.InvalidRangeError, lambda: branches.fork(r.cache, 0, [1], -1)),
        (kvcache.InvalidSequenceError, lambda: branches.fork(r.cache, 0, [1, 4])),
        (kvcache.InvalidSequenceError, lambda: branches.fork(r.cache, 4, [1])),
        (kvcache.InvalidSequenceError, lambda: branches.keep(r.cache, 1, 0, [4])),
        (kvcache.InvalidSequenceError, lambda: branches.keep(r.cache, 4, 0)),
        (kvcache.InvalidSequenceError, lambda: branches.keep(r.cache, -1, -1)),
        (kvcache.InvalidSequenceError, lambda: branches.drop(r.cache, [0, 4])),
        (kvcache.InvalidSequenceError, lambda: branches.mark(r.cache, 4)),
        (kvcache.InvalidSequenceError, lambda: branches.rollback(r.cache, 4, 0)),
        (kvcache.InvalidRangeError, lambda: branches.rollback(r.cache, 0, 3)),
        (kvcache.InvalidRangeError, lambda: branches.rollback(r.cache, 0, -1)),
        (kvcache.InvalidRangeError, lambda: branches.rollback(r.cache, 1, 1, to)),
        (kvcache.InvalidRangeError, lambda: branches.resume_point(r.cache, 1, 1, to)),
        (kvcache.InvalidRangeError, lambda: branches.window_memory(-1, 2)),
        (kvcache.InvalidRangeError, lambda: branches.window_memory(1, -2)),
    ]
    for error, call in cases:
        with pytest.raises(error):
            call()
        r.check()
        assert r.figures() == before
    r.forward(0, 1)
    r.drain()


def test_a_sequence_that_the_device_lost_is_no_trunk_and_no_winner(branching: MakeBranches) -> None:
    for kind in ("causal", "window", "recurrent", "wrapper of sliding, full and recurrent"):
        r = branching(kind)
        r.forward(0, 1)
        r.cache.mark_lost(0)
        calls: list[Callable[[], object]] = [
            lambda r=r: branches.fork(r.cache, 0, [2]),  # type: ignore[misc]
            lambda r=r: branches.keep(r.cache, 0, 1),  # type: ignore[misc]
            lambda r=r: branches.mark(r.cache, 0),  # type: ignore[misc]
            lambda r=r: branches.rollback(r.cache, 0, 1),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(kvcache.SequenceLostError):
                call()
            r.check()
        branches.keep(r.cache, 1, 0)
        assert branches.offset(r.cache, 0) == 1
        assert r.cache.can_resume(0, 1)


# The other kinds.


def test_branches_share_their_encoder_output(backend: ml.Backend, ctx: ml.Context) -> None:
    r = EncoderRig(backend, ctx)
    r.start([0, 0], [0, 3])
    r.put(3, 2)
    size = r.cache.nbytes
    branches.fork(r.cache, 0, [1, 2])
    r.outputs |= {1: r.outputs[0], 2: r.outputs[0]}
    r.start([1, 1, 1], [2, 0, 1])
    r.check(computes=False)
    branches.keep(r.cache, 2, 0, [1])
    assert [r.cache.encoder_cached(seq) for seq in range(4)] == [True, False, False, True]
    branches.rollback(r.cache, 0, 1)
    assert r.cache.nbytes == size
    branches.rollback(r.cache, 3, 0)  # the token that it came with goes
    assert not r.cache.encoder_cached(3)
    with pytest.raises(kvcache.NotSupportedError, match="EncoderCache has no offset"):
        branches.mark(r.cache, 0)


@pytest.mark.parametrize("codec", [DType.Q8_0, DType.Q4_0], ids=lambda codec: codec.name)
def test_branches_of_quantized_tokens(backend: ml.Backend, ctx: ml.Context, codec: DType) -> None:
    r = Rig(Setup(window=3, memory=6, max_sequences=3, capacity=40, dtype=codec), backend, ctx)
    for first in range(0, 12, 4):
        r.forward(range(first, first + 4), 0)
    branches.fork(r.cache, 0, [1, 2])
    for branch in (1, 2):
        r.model.copy_prefix(0, branch, 12)
    r.forward([12, 12, 13, 12, 13], [1, 2, 1, 0, 2])
    branches.rollback(r.cache, 2, 13)
    r.model.remove(2, 13)
    branches.keep(r.cache, 2, 0, [1])
    r.model.tokens = [r.model.tokens[2], {}, {}]
    r.check_figures()
    r.forward([13, 14], 0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_cache_of_someone_elses_is_branched_and_its_refusal_is_everyones(
    backend: ml.Backend, ctx: ml.Context, wrapped: bool
) -> None:
    foreign = ForeignCache(kvcache.CausalCache())
    ours = kvcache.CausalCache()
    cache: Any = kvcache.WrapperCache(ours, foreign) if wrapped else foreign
    cache.init(backend, DType.F32, 3, 8, 8)
    host = ctx.from_numpy(np.ones((3, 1, 2), np.float32))
    cache.start_forward(ctx, Batch([0, 1, 2], [0] * 3))
    cache.put(ctx, host, host)
    calls: dict[str, Callable[[], object]] = {
        "copy_prefix": lambda: branches.fork(cache, 0, [1]),
        "remove": lambda: branches.rollback(cache, 0, 2),
    }
    for refused, call in calls.items():
        foreign.refuses = refused
        with pytest.raises(kvcache.KVCacheError, match="this cache refuses"):
            call()
        foreign.refuses = None
        assert foreign.inner.held() == {0: 3}
        assert not wrapped or ours.held() == {0: 3}
    branches.fork(cache, 0, [1, 2])
    branches.rollback(cache, 1, 2)
    branches.keep(cache, 1, 0, [2])
    assert foreign.inner.held() == {0: 2}
    assert branches.resume_point(cache, 0, 2) == 2
