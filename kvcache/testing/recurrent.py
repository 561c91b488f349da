"""The recurrent cache: states that follow their tokens, wherever the sequences go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing import values
from kvcache.testing.failing import every_failure, every_way_to_fail
from kvcache.testing.harness import CacheCase
from kvcache.testing.protocol import Plan, only_protocol
from kvcache.testing.states import CONV, DELTA, StateRig, StateSetup, state_trace
from ml import DType

__all__ = ["RecurrentFaultTests", "RecurrentTests"]

PARTS = 4


MakeStates = Callable[..., StateRig]


class RecurrentTests(CacheCase):
    state_traces: ClassVar[int] = 40
    """How many seeded traces of the recurrent cache to run."""

    @pytest.fixture
    def states(self, backend: ml.Backend, ctx: ml.Context) -> MakeStates:
        """``states(**changes)``: a recurrent cache and its model, side by side."""
        return lambda **changes: StateRig(replace(StateSetup(), **changes), backend, ctx)

    @pytest.mark.parametrize("part", range(PARTS))
    def test_states_follow_their_tokens_in_random_traces(
        self, backend: ml.Backend, floats: list[DType], part: int
    ) -> None:
        for seed in range(part, self.state_traces, PARTS):
            state_trace(backend, seed, floats)

    def test_states_need_the_required_protocol_only(self, backend: ml.Backend, floats: list[DType]) -> None:
        for seed in range(10_000, 10_000 + self.state_traces // 10):
            state_trace(only_protocol(backend), seed, floats)

    # Passes.

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2), (2, 0), (0, 2, 0, 2), (1, 0, 2, 0, 1)])
    @pytest.mark.parametrize("in_place", [True, False], ids=["in place", "set"])
    def test_sequences_of_a_pass_come_in_the_order_of_the_batch(
        self, states: MakeStates, order: tuple[int, ...], in_place: bool
    ) -> None:
        r = states()
        r.forward(0, 0, 1, 2, in_place=in_place)
        r.forward(*order, in_place=in_place)
        r.forward(*reversed(order), in_place=in_place)
        r.drain()

    def test_a_batch_that_skips_repeats_or_disorders_positions_is_refused(self, states: MakeStates) -> None:
        r = states()
        r.forward(0, 0, 1)
        for positions, sequences in (
            ([3], [0]),
            ([1], [0]),
            ([2, 4], [0, 0]),
            ([3, 2], [0, 0]),
            ([1, 3, 2], [1, 0, 0]),
            ([1], [2]),
        ):
            with pytest.raises(kvcache.InvalidBatchError):
                r.cache.start_forward(r.ctx, Batch(positions, sequences))
            r.check()
        r.forward(0, 1)
        r.drain()

    def test_a_batch_that_does_not_fit_leaves_states_and_tokens_alone(self, states: MakeStates) -> None:
        r = states(max_sequences=2, capacity=3, interval=1)
        r.forward(0, 0, 0, 1)
        assert not r.start([1, 1, 1])
        r.check()
        assert r.forward(1, 1)
        r.drain()

    def test_a_start_can_be_taken_back(self, states: MakeStates) -> None:
        r = states(interval=1)
        r.forward(0, 0, 1)
        r.copy_prefix(0, 2, 2)
        r.cache.start_forward(r.ctx, r.plan([2, 1, 0]))
        r.cache.undo_forward()
        r.check()
        r.forward(2, 0, 1)
        r.drain()

    def test_states_have_the_dtypes_that_the_class_says(self, backend: ml.Backend, ctx: ml.Context) -> None:
        for dtype, given, expected in (
            (DType.F32, None, DType.F32),
            (DType.F16, None, DType.F16),
            (DType.F16, DType.F32, DType.F32),
            (DType.Q8_0, None, DType.F32),
            (DType.Q4_0, DType.F16, DType.F16),
        ):
            cache = kvcache.RecurrentCache(CONV, DELTA, conv_dtype=given)
            cache.init(backend, dtype, 2, 8, 8)
            cache.start_forward(ctx, Batch([0, 0], [1, 0]))
            assert cache.conv_state(ctx, 0).dtype is expected
            assert cache.recurrent_state(ctx, 0).dtype is DType.F32
            cache.set_conv_state(ctx, 0, ctx.from_numpy(np.full((2, *CONV), 1.5), DType.F32))
            assert (cache.conv_state(ctx, 0).to_numpy() == 1.5).all()

    def test_states_of_a_wrong_shape_are_refused(self, states: MakeStates) -> None:
        r = states()
        r.start([0, 1])
        for shape in ((1, *CONV), (2, 6), (2, *DELTA), CONV):
            with pytest.raises(kvcache.InvalidRangeError):
                r.cache.set_conv_state(r.ctx, 0, r.ctx.zeros(shape, DType.F32))
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.set_recurrent_state(r.ctx, 0, r.ctx.zeros((1, *DELTA), DType.F32))
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.conv_state(r.ctx, -1)
        r.step()

    def test_states_are_asked_for_within_a_pass_of_an_open_cache(self, states: MakeStates) -> None:
        r = states()
        ctx, state = r.ctx, r.ctx.zeros((1, *CONV), DType.F32)
        uses: list[Callable[[], object]] = [
            lambda: r.cache.conv_state(ctx, 0),
            lambda: r.cache.recurrent_state(ctx, 0),
            lambda: r.cache.set_conv_state(ctx, 0, state),
            lambda: r.cache.sequences,
        ]
        for use in uses:
            with pytest.raises(kvcache.OrderError):
                use()
        r.forward(0)
        r.remove(0, 0)
        for use in uses:
            with pytest.raises(kvcache.OrderError):
                use()
        r.cache.close()
        for use in [*uses, lambda: r.cache.offset(0), lambda: r.cache.checkpoint(0)]:
            with pytest.raises(kvcache.ClosedError):
                use()
        r.cache.init(r.backend, DType.F32, 2, 8, 8)
        assert r.cache.offset(0) == 0
        assert r.cache.nbytes == 0

    def test_reserving_leaves_states_alone(self, states: MakeStates) -> None:
        r = states()
        r.forward(0, 0, 1)
        r.cache.start_forward(r.ctx, Batch([0, 1, 2], [0, 0, 1]), reserve=True)
        for layer in (0, 2):
            shown = r.cache.conv_state(r.ctx, layer)
            assert shown.shape == (2, *CONV)
            r.ctx.forward(r.ctx.full(shown.shape, 9, shown.dtype).copy(r.ctx, shown))
            r.cache.set_recurrent_state(r.ctx, layer, r.ctx.full((2, *DELTA), 9, DType.F32))
        r.check()
        r.forward(1, 0)
        r.drain()

    # Sharing.

    def test_sharing_a_state_calls_no_backend_and_takes_no_memory(self, backend: ml.Backend) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = StateRig(StateSetup(max_sequences=4), limited, ctx)
            r.forward(0, 0, 1, 2)
            before = r.cache.nbytes
            plan.arm(None)
            r.copy_prefix(0, 3, 2)
            assert plan.calls == []
            assert r.cache.nbytes == before
            r.forward(3)
            r.forward(0)
            assert r.cache.nbytes == before
            r.drain()

    def test_no_branch_sees_the_state_of_another(self, states: MakeStates) -> None:
        r = states(max_sequences=4)
        r.forward(0, 0, 0)
        for dst in (1, 2, 3):
            r.copy_prefix(0, dst, 3)
        r.forward(2)
        r.forward(1, 0)
        r.copy_prefix(1, 2, 4)
        r.forward(0, 3, 2, 1)
        r.drain()

    def test_memory_stays_what_it_is_however_sequences_come_and_go(self, states: MakeStates) -> None:
        r = states(max_sequences=3, checkpoints=2, interval=2)
        sizes = set()
        for turn in range(12):
            for _ in range(6):
                r.forward(0, 1, 2)
            sizes.add(r.cache.nbytes)
            r.remove(turn % 3, 0)
            r.copy_prefix((turn + 1) % 3, turn % 3, 5)
            for seq in range(3):
                r.remove(seq, 0)
        assert len(sizes) == 1

    # Going back.

    def test_checkpoints_are_taken_by_interval_and_the_latest_are_kept(self, states: MakeStates) -> None:
        r = states(checkpoints=2, interval=3)
        expected = {1: (), 3: (), 4: (3,), 6: (3,), 7: (3, 6), 10: (6, 9), 13: (9, 12)}
        for length in range(1, 14):
            r.forward(0)
            if length in expected:
                assert r.cache.checkpoints(0) == expected[length]
        assert r.cache.prepare_restore(0, 11) == 9
        assert r.cache.prepare_restore(0, 8) is None
        assert [p for p in range(15) if r.cache.can_resume(0, p)] == [0, 9, 12, 13]
        r.remove(0, 11)
        assert r.cache.offset(0) == 9
        r.forward(0)
        r.drain()

    def test_a_failed_pass_is_taken_out_by_going_back(self, states: MakeStates) -> None:
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

    def test_a_checkpoint_taken_by_hand_is_one_like_any_other(self, states: MakeStates) -> None:
        r = states(interval=100)
        r.checkpoint(0)  # of nothing
        r.forward(0, 0, 0)
        r.checkpoint(0)
        r.checkpoint(0)
        r.forward(0, 0)
        r.copy_prefix(0, 1, 4)
        assert r.cache.offset(1) == 3
        r.remove(0, 4)
        r.forward(1, 0)
        r.drain()

    def test_a_removal_from_the_middle_shifts_checkpoints_and_keeps_the_state(
        self, states: MakeStates
    ) -> None:
        r = states(interval=1, checkpoints=9)
        for _ in range(8):
            r.forward(0)
        assert r.cache.checkpoints(0) == (1, 2, 3, 4, 5, 6, 7)
        r.remove(0, 2, 5)
        assert r.cache.checkpoints(0) == (1, 2, 3, 4)
        r.forward(0)
        r.remove(0, 2)  # the state of position 2 has seen nothing of what was removed
        r.forward(0)
        r.drain()

    def test_what_is_removed_from_the_start_on_leaves_no_state_at_0(self, states: MakeStates) -> None:
        r = states(interval=1, checkpoints=9)
        for _ in range(6):
            r.forward(0)
        r.remove(0, 0, 4)
        r.remove(0, 0)
        r.forward(0)  # begins with zeros
        r.drain()

    def test_a_context_shift_keeps_the_state_that_saw_everything(self, states: MakeStates) -> None:
        r = states(capacity=8, max_sequences=1, interval=3)
        for _ in range(8):
            r.forward(0)
        assert not r.start([0])
        assert r.cache.shift_context(0, 2) == 3
        r.model.remove(0, 2, 5)
        r.check()
        r.forward(0, 0)
        r.drain()

    @pytest.mark.parametrize(("begin", "end"), [(-1, None), (-1, 2), (3, 2), (9, 8)])
    def test_a_range_that_means_nothing_is_refused_by_a_recurrent_cache_too(
        self, states: MakeStates, begin: int, end: int | None
    ) -> None:
        r = states()
        r.forward(0, 0, 0, 0)
        assert not r.remove(0, begin, end)
        r.copy_prefix(0, 1, -1)
        r.copy_prefix(0, 0, 1)
        r.drain()

    def test_a_removal_that_is_refused_changes_no_state(self, states: MakeStates) -> None:
        r = states(can_shift=False)
        r.forward(0, 0, 0, 1)
        assert not r.remove(0, 0, 1)
        r.forward(0, 1)
        r.drain()

    # Snapshots.

    def test_a_state_is_restored_at_its_own_position_only(self, states: MakeStates) -> None:
        r = states()
        r.forward(0, 0, 0, 1)
        r.snapshot(0)
        for target in (0, 2, 4):
            assert not r.restore(1, 0, target)
        assert r.restore(1, 0)
        assert r.restore(2, 0, 3)
        r.forward(2, 1, 0)
        r.drain()

    def test_a_snapshot_of_the_end_needs_its_beginning(self, states: MakeStates) -> None:
        r = states(interval=2, checkpoints=9)
        for _ in range(3):
            r.forward(0, 0)
        r.snapshot(0, 2, 4)
        r.snapshot(0, 2, 3)
        r.snapshot(0, 4)
        assert len(r.copies) == 2, "there is no state of 3"
        assert not r.restore(1, 0)
        r.copy_prefix(0, 1, 2)
        assert r.restore(1, 0)
        assert r.restore(1, 1)
        r.remove(1, 4)
        r.forward(1)
        r.drain()

    def test_splitting_and_merging_keep_the_whole_state(self, states: MakeStates) -> None:
        r = states()
        r.forward(0, 0)
        r.snapshot(0)
        r.forward(0, 0)
        r.snapshot(0, 2)
        (first, _), (second, _) = r.copies
        assert r.cache.split(first, 1) == (None, first)
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.split(first, 3)
        assert r.cache.merge(None, second) is second
        whole = r.cache.merge(first, second)
        assert (whole.begin, whole.end) == (0, 4)
        assert whole.states == second.states
        r.copies.append((whole, r.model.snapshot(0, 0, 4)))
        assert r.restore(1, 2)
        r.forward(1, 0)
        r.drain()

    def test_states_of_another_shape_are_not_restored(self, states: MakeStates) -> None:
        r = states()
        r.forward(0, 0)
        r.snapshot(0)
        other = kvcache.RecurrentCache((2, 4), DELTA, values.shift_positions)
        other.init(r.backend, DType.F32, 2, 8, 8)
        with pytest.raises(kvcache.InvalidRangeError):
            other.restore(0, r.copies[0][0])
        assert other.offset(0) == 0


# Faults.


@dataclass(frozen=True)
class Fault:
    """``act`` is what may fail; ``follow`` does the same to the model."""

    prepare: Callable[[StateRig], object]
    act: Callable[[StateRig], object]
    follow: Callable[[StateRig], object]
    touches: frozenset[int] = frozenset()
    setup: StateSetup = field(default_factory=lambda: StateSetup(max_sequences=4, interval=2))


def _fill(r: StateRig) -> None:
    r.forward(0, 0, 1, 2)
    r.forward(2, 1)
    r.copy_prefix(0, 1, 2)


def _held(r: StateRig) -> None:
    """Every state is a snapshot's too."""
    _fill(r)
    r.forward(3)
    for seq in range(4):
        r.snapshot(seq)


def _swapped(r: StateRig) -> None:
    r.forward(0, 0, 1)


def _pass(
    *sequences: int,
    touches: tuple[int, ...] = (),
    slots: int = 4,
    prepare: Callable[[StateRig], object] = _fill,
) -> Fault:
    def follow(r: StateRig) -> None:
        r.begin()
        r.step()

    return Fault(
        prepare,
        lambda r: r.cache.start_forward(r.ctx, r.plan(sequences)),
        follow,
        frozenset(touches),
        StateSetup(max_sequences=slots, interval=2),
    )


def _started(r: StateRig) -> None:
    _fill(r)
    r.start([1, 2])
    for layer in (0, 2):
        r.state("conv", layer)
        r.state("recurrent", layer)


def _evaluated_and_held(r: StateRig) -> None:
    _fill(r)
    r.forward(1, 2)
    for seq in (1, 2):
        r.snapshot(seq)


def _start_anew(r: StateRig) -> None:
    for seq in (1, 2):
        r.remove(seq, 0)


def _set_states(r: StateRig) -> None:
    for layer in (0, 2):
        r.write("conv", layer, in_place=False)
        r.write("recurrent", layer, in_place=True)


def _check_states(r: StateRig) -> None:
    r.before = [row.seen for row in r.model.rows]  # they have been set
    r.step()


def _copied(r: StateRig) -> None:
    _fill(r)
    r.snapshot(2)
    r.copies[0][0].detach()


FAULTS = {
    "a pass that loads zeros": _pass(0, 1, slots=4, prepare=lambda r: r.forward(2)),
    "a pass that makes a copy of a shared state": _pass(1, 2),
    "a pass that takes a checkpoint": _pass(0, 0, 2),
    "a pass that swaps two states": _pass(1, 0, slots=2, touches=(0, 1), prepare=_swapped),
    "a pass that moves another's state away": _pass(
        0, 2, slots=3, touches=(1, 2), prepare=lambda r: r.forward(0, 1, 2)
    ),
    "a pass over states that snapshots hold": _pass(2, 1, prepare=_held),
    "a pass that moves states to where snapshots hold some": _pass(
        3, 0, touches=(2,), prepare=_held
    ),
    "setting states that snapshots hold": Fault(
        _evaluated_and_held, lambda r: r.spoil(), _start_anew
    ),
    "setting states": Fault(_started, _set_states, _check_states),
    "a checkpoint": Fault(
        _fill, lambda r: r.cache.checkpoint(2), lambda r: r.model.keep(r.model.rows[2])
    ),
    "copy_prefix with a state": Fault(
        _fill, lambda r: r.cache.copy_prefix(2, 1, 2), lambda r: r.model.copy_prefix(2, 1, 2)
    ),
    "remove at the end": Fault(_fill, lambda r: r.cache.remove(2, 1), lambda r: r.model.remove(2, 1, None)),
    "remove in the middle": Fault(
        lambda r: r.forward(0, 0, 1, 0),
        lambda r: r.cache.remove(0, 0, 1),
        lambda r: r.model.remove(0, 0, 1),
        frozenset([0]),
    ),
    "a snapshot": Fault(_fill, lambda r: r.cache.snapshot(2), lambda r: None),
    "restoring into free cells": Fault(
        _copied,
        lambda r: r.cache.restore(3, r.copies[0][0]),
        lambda r: r.model.restore(3, r.copies[0][1], None, shared=False),
    ),
    "restoring over what is there": Fault(
        _copied,
        lambda r: r.cache.restore(2, r.copies[0][0]),
        lambda r: r.model.restore(2, r.copies[0][1], None, shared=False),
        frozenset([2]),
    ),
}  # fmt: skip
every_fault = pytest.mark.parametrize("fault", list(FAULTS.values()), ids=list(FAULTS))


class RecurrentFaultTests(CacheCase):
    @every_fault
    @every_way_to_fail
    def test_a_failing_backend_leaves_states_as_they_were_or_says_which_are_lost(
        self, backend: ml.Backend, fault: Fault, when: str
    ) -> None:
        def make(limited: ml.Backend, ctx: ml.Context) -> StateRig:
            r = StateRig(fault.setup, limited, ctx)
            fault.prepare(r)
            return r

        every_failure(backend, when, make, fault.act, lambda r: _check_after(r, fault), self.fault_stride)


def _check_after(r: StateRig, fault: Fault) -> None:
    lost = {seq for seq in range(fault.setup.max_sequences) if _is_lost(r, seq)}
    if not lost:
        r.check()
        fault.act(r)
        fault.follow(r)
    else:
        assert lost == fault.touches, "others than those whose data was touched are lost"
        for seq in sorted(lost):
            _uses_say_so(r, seq)
            r.cache.remove(seq, 0)
            r.model.remove(seq, 0, None)
    r.check()
    r.drain()
    r.check_copies()


def _is_lost(r: StateRig, seq: int) -> bool:
    try:
        r.cache.prepare_copy_prefix(seq, (seq + 1) % r.setup.max_sequences, 0)
    except kvcache.SequenceLostError:
        return True
    return False


def _uses_say_so(r: StateRig, seq: int) -> None:
    offset = r.cache.offset(seq)
    uses: list[Callable[[], object]] = [
        lambda: r.cache.start_forward(r.ctx, Batch([offset], [seq])),
        lambda: r.cache.copy_prefix(seq, (seq + 1) % r.setup.max_sequences, 1),
        lambda: r.cache.snapshot(seq),
    ]
    if offset > 1:
        uses.append(lambda: r.cache.remove(seq, 0, 1))
    for use in uses:
        with pytest.raises(kvcache.SequenceLostError) as caught:
            use()
        assert f"sequence {seq}" in str(caught.value)
    assert not r.cache.can_resume(seq, offset)
