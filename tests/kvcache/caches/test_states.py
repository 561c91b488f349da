"""Recurrent states: going back, and snapshots in their slot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, OrderError, RecurrentCache, StateCache
from kvcache.caches import branches
from kvcache.testing.models import values
from kvcache.testing.models.states import CONV, DELTA, KINDS, RECURRENT_LAYERS, TWO, StateSetup, state_values
from kvcache.testing.rigs.protocol import Plan, only_protocol
from kvcache.testing.rigs.states import StateRig, state_of
from ml import DType

from .small_passes import SUM, bound

MakeStates = Callable[..., StateRig]
LAZY = StateSetup(max_sequences=4, checkpoints=0)
"""Without checkpoints, which would be copies too."""


def test_states_are_asked_for_within_a_pass_of_an_open_cache(states: MakeStates) -> None:
    r = states()
    state = r.ctx.zeros((1, *CONV), DType.F32)
    uses: list[Callable[[], object]] = [
        lambda: r.cache.conv_state(r.ctx, 0),
        lambda: r.cache.recurrent_state(r.ctx, 0),
        lambda: r.cache.set_conv_state(r.ctx, 0, state),
        lambda: r.cache.sequences,
    ]
    for _ in range(2):
        for use in uses:
            with pytest.raises(kvcache.OrderError):
                use()
        r.forward(0)
        r.remove(0, 0)
    r.cache.close()
    for use in [*uses, lambda: r.cache.offset(0), lambda: r.cache.checkpoint(0)]:
        with pytest.raises(kvcache.ClosedError):
            use()
    r.cache.init(r.backend, DType.F32, 2, 8, 8)
    assert (r.cache.offset(0), r.cache.nbytes) == (0, 0)


def test_snapshots_of_other_shapes_and_dtypes_are_not_restored(states: MakeStates) -> None:
    r = states()
    r.forward(0, 0)
    r.snapshot(0)
    snapshot = r.copies[0][0]
    assert r.cache.split(snapshot, 1) == (None, snapshot)
    wide = kvcache.RecurrentCache((2, 4), DELTA, values.shift_positions)
    wide.init(r.backend, DType.F32, 2, 8, 8)
    for other in (wide, states(conv_dtype=DType.F16).cache):
        with pytest.raises(kvcache.InvalidRangeError):
            other.restore(0, snapshot)
        assert other.offset(0) == 0


MIXED: dict[int | None, dict[str, kvcache.StateSpec]] = {
    None: {"conv": kvcache.StateSpec((4,)), "recurrent": kvcache.StateSpec((7,), DType.F32)},
    1: {"ssm": kvcache.StateSpec((2, 3), DType.F32), "turn": kvcache.StateSpec((1,), DType.I32)},
}


def shifting(states: kvcache.StateCache) -> kvcache.RecurrentCache:
    return kvcache.RecurrentCache.of(states, kvcache.CausalCache(values.shift_positions))


def test_what_a_layer_declares_is_what_it_has(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = kvcache.RecurrentCache.of(kvcache.StateCache(MIXED))
    cache.init(backend, DType.F16, 2, 8, 8)
    cache.start_forward(ctx, Batch([0, 0], [1, 0]))
    cache.set_layer(5)
    assert (cache.state(ctx, "conv").shape, cache.state(ctx, "conv").dtype) == ((2, 4), DType.F16)
    assert cache.recurrent_state(ctx, 5).shape == (2, 7)
    assert cache.state(ctx, "turn", 1).dtype is DType.I32
    for name, layer in (("ssm", 5), ("conv", 1), ("gate", 5)):
        with pytest.raises(kvcache.OrderError, match=f"{name}.*layer {layer}"):
            cache.state(ctx, name, layer)
    cache.update_state(ctx, "gate", ctx.full((2, 3), 1.5, DType.F32), 5)
    assert cache.state(ctx, "gate", 5).to_numpy().tolist() == [[1.5] * 3] * 2
    wrong: list[Callable[[], object]] = [
        lambda: cache.update_state(ctx, "gate", ctx.zeros((2, 4), DType.F32), 5),
        lambda: cache.update_state(ctx, "other", ctx.zeros((1, 4), DType.F32), 5),
        lambda: cache.deliver_states(ctx, "other", ctx.zeros((2, 4), DType.F32), [(0, 1)], 5),
        lambda: cache.deliver_states(ctx, "other", ctx.zeros((), DType.F32), [(0, 1)], 5),
        lambda: cache.update_state(ctx, "other", ctx.zeros((2, 4), DType.F32), -1),
    ]
    for call in wrong:
        with pytest.raises(kvcache.InvalidRangeError):
            call()
    assert cache.state_spec("other", 5) is None
    for name, dtype in (("ssm", DType.I32), ("turn", DType.F32)):
        states = ctx.zeros((2, *MIXED[1][name].shape), dtype)
        with pytest.raises(ml.DTypeError, match=f"update_state: {dtype.name} for state '{name}' of layer 1"):
            cache.update_state(ctx, name, states, 1)
        with pytest.raises(ml.DTypeError, match="deliver_states"):
            cache.deliver_states(ctx, name, states, [(0, 1), (1, 1)], 1)


def test_a_declared_state_that_no_pass_uses_is_named(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = bound(RecurrentCache.of(StateCache(dict.fromkeys(range(2), SUM[None]))), backend, 1, 16, 16)
    for position in range(2):
        cache.start_forward(ctx, Batch([position], [0]))
        if position == 0:
            cache.update_state(ctx, "sum", ctx.zeros((1, 1), DType.F32), 0)
    with pytest.raises(OrderError, match=r"No pass has used state 'sum' of layer 1: .* out of states="):
        cache.state(ctx, "sum", 0)


def test_a_pass_that_reserves_a_state_takes_nothing_from_sequences_and_snapshots(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(RecurrentCache.of(StateCache(SUM)), backend, 2, 16, 16)
    one = ctx.full((1, 1), 1, DType.F32)
    cache.start_forward(ctx, Batch([0], [0]))
    cache.update_state(ctx, "sum", one, 0)
    kept = cache.snapshot(0)
    cache.start_forward(ctx, Batch([0], [1]), reserve=True)
    nbytes = cache.nbytes
    for layer in range(2):
        cache.state(ctx, "sum", layer)
    assert cache.nbytes == nbytes + 2 * 4
    cache.start_forward(ctx, Batch([1], [0]))
    assert cache.state(ctx, "sum", 0).to_numpy() == 1
    assert cache.restore(1, kept)
    assert (cache.computed(0), cache.computed(1)) == (2, 1)
    cache.start_forward(ctx, Batch([1], [1]))
    with pytest.raises(OrderError, match=r"call remove\(1, 0\)"):  # stored now, and the first token lacks it
        cache.state(ctx, "sum", 1)
    assert (cache.computed(0), cache.computed(1), cache.nbytes) == (0, 0, nbytes + 2 * 4)


def test_declared_states_are_part_of_the_settings() -> None:
    """What two caches must agree in to share pages; those of two shapes alone say what they always said."""
    found = []
    declared: list[dict[int | None, dict[str, kvcache.StateSpec]]] = [
        MIXED,
        {**MIXED, 2: MIXED[1]},
        {**MIXED, 1: MIXED[None]},
        {None: {"conv": kvcache.StateSpec((4,))}},
        {None: {"recurrent": kvcache.StateSpec((4,), DType.F32)}},
        {None: {"recurrent": kvcache.StateSpec((4,), DType.F16)}},
    ]
    for states in declared:
        cache = kvcache.RecurrentCache.of(kvcache.StateCache(states))
        with ml.open_backend("numpy") as backend:
            cache.init(backend, DType.F32, 1, 8, 8)
            found.append(json.dumps(cache.settings()))
    assert len(set(found)) == len(found)
    assert json.loads(found[3])["caches"][1].keys() == {"kind", "conv", "state"}


@pytest.mark.parametrize("how", ["declared", "found"])
def test_pages_of_any_states_are_checked_against_what_the_cache_knows(states: MakeStates, how: str) -> None:
    r = states(states=how)
    r.forward(0, 0)
    r.snapshot(0)
    page = kvcache.serialize(r.backend, r.copies[0][0])
    snapshot = kvcache.deserialize(r.backend, page)
    fresh = states(states="found")
    assert fresh.cache.restore(0, snapshot), "a cache that knows nothing takes the first page's for its own"
    fresh.cache.start_forward(r.ctx, Batch([2], [0]))
    for kind, layer in r.layout:
        expected = state_values(r.model.folds[0].seen, kind, layer, r.layout[kind, layer][0])
        found = fresh.cache.state(r.ctx, kind, layer).to_numpy().astype("float32")
        assert (found[0] == expected).all()
    for spec in (kvcache.StateSpec((4,)), kvcache.StateSpec((3,), DType.F16)):
        other = shifting(kvcache.StateCache({1: {"k": spec}}))
        other.init(r.backend, DType.F32, 2, 8, 8)
        with pytest.raises(kvcache.InvalidRangeError, match="the k state"):
            other.restore(0, snapshot)
    bent = shifting(kvcache.StateCache())
    bent.init(r.backend, DType.F32, 2, 8, 8)
    bent.start_forward(r.ctx, Batch([0], [0]))
    bent.update_state(r.ctx, "k", r.ctx.zeros((1, 5), DType.F32), 1)
    with pytest.raises(kvcache.InvalidRangeError, match=r"this cache has \[\('k', 1\)\]"):
        bent.restore(1, snapshot)


# Going back.


def test_a_failed_pass_is_taken_out_by_going_back(states: MakeStates) -> None:
    r = states()
    r.forward(0, 0, 1)
    r.checkpoint(0)
    r.start([1, 0])
    r.write("conv", 0, in_place=True)  # and then the model fails
    r.remove(0, 2)
    r.remove(1, 1)
    assert [r.cache.offset(seq) for seq in range(2)] == [2, 0]  # 1 has no checkpoint: back to nothing
    r.forward(0, 1)
    r.drain()


def test_a_context_shift_keeps_the_state_that_saw_everything(states: MakeStates) -> None:
    r = states(capacity=8, max_sequences=1, interval=3)
    for _ in range(8):
        r.forward(0)
    assert not r.start([0])
    assert r.cache.shift_context(0, 2) == 3
    r.model.remove(0, 2, 5)
    r.check()
    r.forward(0, 0)
    r.drain()


# Snapshots in their slot.


def test_a_pass_copies_a_state_once_for_all_who_hold_it(backend: ml.Backend) -> None:
    plan = Plan()
    limited = only_protocol(backend, plan)
    with limited.new_context() as ctx:
        r = StateRig(replace(LAZY, checkpoints=3, interval=1), limited, ctx)
        r.forward(0, 0)
        r.snapshot(0)
        r.snapshot(0, 1)
        assert r.restore(0, 0)
        plan.arm(None)
        r.start([0])
        assert Counter(plan.calls)["contiguous"] == len(KINDS) * len(RECURRENT_LAYERS)
        plan.arm(None)
        r.step()
        (one, _), (other, _) = r.copies
        assert state_of(one).tensors == state_of(other).tensors
        assert r.cache.checkpoints(0) == (2,), "the checkpoint that was due is the same copy"
        r.forward(0)
        r.check_copies()


def test_what_is_let_go_before_the_next_pass_is_never_copied(backend: ml.Backend) -> None:
    calls = []
    for keeps in (False, True):
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = StateRig(LAZY, limited, ctx)
            r.forward(0, 0, 1)
            if keeps:
                r.snapshot(0)
                r.copies.clear()
            plan.arm(None)
            r.forward(0, 1)
            calls.append(Counter(plan.calls))
    assert calls[0] == calls[1]


@pytest.mark.parametrize("closed", [False, True])
def test_a_state_goes_into_another_cache(states: MakeStates, closed: bool) -> None:
    r, other = states(checkpoints=0), states(checkpoints=0)
    r.forward(0, 0, 1)
    r.snapshot(0)
    if closed:
        r.cache.close()
    other.next_token = r.next_token
    other.copies = r.copies
    for seq in (2, 0):
        assert other.cache.restore(seq, r.copies[0][0])
        other.model.restore_copy(seq, r.copies[0][1], None, shared=False)
        other.check()
    assert r.copies[0][0].in_cache is not closed, "restoring it elsewhere leaves it where it lies"
    other.forward(0, 2)


# Asked for ahead.


def test_in_the_middle_of_a_pass_and_after_one_that_failed_no_state_is_taken(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(RecurrentCache.of(StateCache(SUM)), backend, 2, 16, 8)

    def update(layer: int, value: float) -> None:
        cache.update_state(ctx, "sum", ctx.full((1, 1), value, ml.DType.F32), layer)

    cache.start_forward(ctx, Batch([0], [0]))
    update(0, 1)
    update(1, 1)
    kept = cache.snapshot(0)
    cache.start_forward(ctx, Batch([1], [0]))
    update(0, 2)
    for taken in (cache.snapshot, cache.checkpoint, lambda seq: branches.mark(cache, seq)):
        with pytest.raises(OrderError, match="not all layers have their states of position 2"):
            taken(0)
    cache.schedule_snapshots(0, [3])
    cache.start_forward(ctx, Batch([2], [0]))  # the one before has failed
    update(0, 3)
    update(1, 3)
    assert cache.take_snapshots(0) == []
    assert cache.skipped_snapshots(0) == [3]
    assert cache.restore(1, kept)
    cache.start_forward(ctx, Batch([1], [1]))
    assert [cache.state(ctx, "sum", layer).to_numpy().item() for layer in (0, 1)] == [1, 1]


def test_a_pass_whose_successor_is_taken_back_is_given_its_last_states(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(RecurrentCache.of(StateCache(SUM)), backend, 1, 16, 8)
    for position, layers in ((0, 2), (1, 1)):
        cache.start_forward(ctx, Batch([position], [0]))
        for layer in range(layers):
            cache.update_state(ctx, "sum", ctx.full((1, 1), position, ml.DType.F32), layer)
    under_way = cache.pass_under_way()
    cache.start_forward(ctx, Batch([2], [0]))
    cache.undo_forward(under_way)
    with pytest.raises(OrderError):
        cache.snapshot(0)
    cache.update_state(ctx, "sum", ctx.full((1, 1), 1, ml.DType.F32), 1)
    assert (cache.computed(0), cache.snapshot(0).end) == (2, 2)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 2, 1], [1, 0]])
def test_the_same_sequences_start_again_in_the_slots_that_views_show(
    backend: ml.Backend, ctx: ml.Context, order: list[int]
) -> None:
    """Snapshots hold other slots before a pass than after it was taken back."""
    cache = bound(RecurrentCache.of(StateCache(SUM)), backend, 8, 16, 8)
    cache.start_forward(ctx, Batch([0] * len(order), range(len(order))))
    numbers = ctx.arange(10, 10 + len(order), 1, ml.DType.F32).reshape(ctx, len(order), 1)
    cache.update_state(ctx, "sum", numbers, 0)
    held = [cache.snapshot(seq) for seq in order]
    cache.start_forward(ctx, Batch([1] * len(order), order))
    view = cache.state(ctx, "sum", 0)
    cache.undo_forward()
    cache.start_forward(ctx, Batch([1, 2] * len(order), np.repeat(order, 2).tolist()))
    wanted = [[10 + seq] for seq in order]
    assert view.to_numpy().tolist() == cache.state(ctx, "sum", 0).to_numpy().tolist() == wanted
    assert [one.end for one in held] == [1] * len(order)


def test_a_state_is_taken_where_a_batch_ends(states: MakeStates) -> None:
    r = states()
    r.schedule(0, [2, 4, 7])
    assert (r.cache.next_snapshot(0), r.cache.next_snapshot(2)) == (2, None)
    for sequences, upcoming, skipped in (((0, 1, 0), 4, []), ((0, 0, 0), 7, [4]), ((0, 0), None, [])):
        r.forward(*sequences)
        assert r.cache.next_snapshot(0) == upcoming
        assert r.cache.skipped_snapshots(0) == skipped
        assert r.cache.skipped_snapshots(0) == [], "it is said once"
    assert [(one.begin, one.end) for one in r.cache.take_snapshots(0)] == [(0, 2), (2, 7)]


@pytest.mark.parametrize("looked", [False, True])
def test_positions_inside_a_batch_are_skipped_and_said_to_be(states: MakeStates, looked: bool) -> None:
    r = states()
    r.schedule(0, [3, 7])
    r.forward(*[0] * 9)
    if looked:
        assert r.cache.take_snapshots(0) == []
    assert r.cache.skipped_snapshots(0) == [3, 7]
    assert r.cache.take_snapshots(0) == r.cache.skipped_snapshots(0) == []


@pytest.mark.parametrize("delivery", ["none", "some"])
def test_what_a_model_does_not_deliver_for_every_layer_is_skipped(states: MakeStates, delivery: str) -> None:
    r = states()
    r.forward(0)
    r.delivery = delivery
    r.schedule(0, [2, 4])
    r.want(0, [3])
    r.forward(0, 0, 0)
    assert r.cache.take_snapshots(0)[0].end == 4
    assert r.cache.skipped_snapshots(0) == [2]
    assert r.cache.resume_point(0, 3) == 0


def test_batches_of_a_model_that_delivers_may_end_anywhere(backend: ml.Backend) -> None:
    def made(delivers: bool) -> kvcache.RecurrentCache:
        return kvcache.RecurrentCache.of(kvcache.StateCache(TWO, delivers=delivers))

    for delivers in (False, True):
        cache = bound(made(delivers), backend, 2, 16, 16)
        cache.schedule_snapshots(0, [3, 7])
        assert cache.next_snapshot(0) == (None if delivers else 3)
        assert branches.want_states(cache, 0, [2]) is delivers
        both = kvcache.WrapperCache(made(delivers), kvcache.CausalCache())
        both.init(backend, DType.F32, 2, 16, 16)
        assert branches.want_states(both, 0, [2]) is delivers
    assert branches.want_states(kvcache.CausalCache(), 0, [2])


def test_what_is_wanted_is_said_to_the_next_pass_alone(states: MakeStates) -> None:
    r = states()
    r.forward(0, 0, 1)
    r.want(0, [2, 3, 4, 9])  # where it stands, inside, the end, beyond
    r.want(1, [2])
    under_way = r.cache.pass_under_way()
    r.cache.start_forward(r.ctx, Batch([2, 3], [0, 0]), reserve=True)
    assert r.cache.wanted_states() == {}
    r.cache.start_forward(r.ctx, Batch([1, 0], [0, 1]), read_only=True)
    assert r.cache.wanted_states() == {}
    with pytest.raises(kvcache.OrderError):
        r.cache.deliver_states(r.ctx, "conv", r.ctx.zeros((0, *CONV), DType.F32), [], 0)
    with pytest.raises(kvcache.InvalidBatchError):
        r.cache.start_forward(r.ctx, Batch([9], [0]))
    r.cache.start_forward(r.ctx, Batch([2, 3], [0, 0]))
    assert r.cache.wanted_states() == {0: (1,)}
    r.cache.undo_forward(under_way)
    r.start([0, 1, 0])
    assert r.cache.wanted_states() == {0: (1,)}, "and sequence 1 has nothing inside"
    r.step()
    r.start([0, 0])
    assert r.cache.wanted_states() == {}
    r.step()
    r.want(0, [7, 8])
    r.copy_prefix(1, 0, 2)
    r.start([0] * 4)
    assert r.cache.wanted_states() == {}


def test_a_snapshot_of_a_state_inside_is_a_copy_of_its_own(states: MakeStates) -> None:
    """What was drafted beside it is not kept alive, and goes with the next pass."""
    r = states(checkpoints=0)
    r.forward(0, 1)
    before = r.cache.nbytes
    r.delivery = "all"
    r.want(0, [2, 3])
    r.forward(0, 0, 0, 1)
    one = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in r.layout.values())
    assert r.cache.nbytes == before + 2 * one
    r.snapshot(0, 0, 3)
    assert state_of(r.copies[0][0]).nbytes == one
    r.forward(0)
    assert r.cache.nbytes == before
    r.check_copies()


@pytest.mark.parametrize("how", ["taken back", "cancelled", "replaced"])
def test_a_skip_that_was_not_asked_for_goes_with_the_tokens(states: MakeStates, how: str) -> None:
    r = states(interval=1, checkpoints=9)
    r.forward(0)
    r.schedule(0, [2, 3])
    r.forward(0, 0, 0)
    if how == "cancelled":
        r.cache.cancel_snapshots(0)
    elif how == "replaced":
        r.copy_prefix(1, 0, 0)
    else:
        assert r.remove(0, 1)
        r.forward(0, 0)
        assert [snapshot.end for snapshot in r.cache.take_snapshots(0)] == [3]
    assert r.cache.skipped_snapshots(0) == ([2] if how == "taken back" else [])


@pytest.mark.parametrize("how", ["remove", "undo", "failed pass"])
def test_a_state_that_is_taken_back_is_taken_anew(states: MakeStates, how: str) -> None:
    r = states(interval=1, checkpoints=9)
    r.forward(0)
    r.forward(0)
    r.schedule(0, [3, 4])
    if how == "undo":
        r.cache.start_forward(r.ctx, Batch([2], [0]))
        r.cache.undo_forward()
    else:
        if how == "remove":
            r.forward(0)
        else:
            assert r.start([0])
            r.write("conv", 0, in_place=True)
        assert r.remove(0, 2)
    assert (r.cache.snapshots_taken(0), r.cache.next_snapshot(0)) == ([], 3)
    for end in (3, 4):
        r.forward(0)
        r.copies.append((r.cache.snapshots_taken(0)[-1], r.model.snapshot_of(0, end - 1, end)))
    assert [(s.begin, s.end) for s in r.cache.take_snapshots(0)] == [(2, 3), (3, 4)]
    r.remove(0, 2)
    assert r.restore(0, 0)
    assert r.restore(0, 1)
    r.drain()


# Beside other caches than RecurrentCache has, and alone.


def add_up(states: kvcache.StateCache, cache: Any, ctx: ml.Context, seq: int, numbers: Sequence[int]) -> None:
    """A pass of a layer that sums what it sees."""
    begin = cache.offset(seq)
    cache.start_forward(ctx, Batch(range(begin, begin + len(numbers)), [seq] * len(numbers)))
    total = states.state(ctx, "sum", 0)
    states.update_state(ctx, "sum", total.add(ctx, ctx.full((1, 1), float(sum(numbers)), DType.F32)), 0)


def test_states_alone_take_no_cells_and_no_keys(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = bound(kvcache.StateCache(SUM, checkpoints=0), backend, 2, 4, 4)
    tokens = list(range(1, 10))  # more than its capacity, which bounds tokens that take room
    every_four = kvcache.PrefixOptions(interval=4)
    with kvcache.PrefixCache(cache, tiers=[kvcache.HostTier()], options=every_four) as prefix:
        with prefix.begin(tokens) as session:
            for part in session.chunks(4):
                add_up(cache, cache, ctx, session.seq, part)
            row = ctx.zeros((1, 1, 4), DType.F32)
            for call in (
                lambda: cache.put(ctx, row, row),
                lambda: cache.get(ctx),
                lambda: cache.attend(ctx, row, 1.0),
            ):
                with pytest.raises(kvcache.NotSupportedError, match="StateCache keeps states"):
                    call()
        prefix.evict()
        with prefix.begin([*tokens, 10]) as session:
            assert session.cached == 9
            add_up(cache, cache, ctx, session.seq, [10])
            assert cache.snapshot(session.seq).states["sum", 0].to_numpy() == 55


def test_states_beside_a_window_follow_it_and_it_follows_them(backend: ml.Backend, ctx: ml.Context) -> None:
    window, states = kvcache.SlidingWindowCache(2, memory=8), kvcache.StateCache(SUM, 4, 2)
    cache = bound(kvcache.WrapperCache(window, states), backend, 2, 32, 8)
    for numbers in ([1, 2], [3, 4], [5, 6]):
        add_up(states, cache, ctx, 0, numbers)
    assert (states.checkpoints(0), cache.resume_point(0, 5)) == ((2, 4), 4)
    mark = branches.mark(cache, 0)
    add_up(states, cache, ctx, 0, [7])
    branches.rollback(cache, 0, 6, mark)
    assert cache.offset(0) == window.offset(0) == 6
    cache.remove(0, 5)
    assert [part.offset(0) for part in (cache, window, states)] == [4, 4, 4]
    add_up(states, cache, ctx, 0, [8])
    assert states.snapshot(0).states["sum", 0].to_numpy() == 1 + 2 + 3 + 4 + 8
