"""The recurrent cache: states stay with the tokens of their sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.harness import CacheCase
from kvcache.testing.models.declared import skip_undeclared
from kvcache.testing.models.states import CONV, DELTA, StateSetup
from kvcache.testing.rigs.protocol import Plan, only_protocol
from kvcache.testing.rigs.states import StateRig
from ml import DType

MakeStates = Callable[..., StateRig]


class RecurrentTests(CacheCase):
    @pytest.fixture
    def states(self, backend: ml.Backend, ctx: ml.Context) -> MakeStates:
        """``states(**changes)``: a recurrent cache and its model."""
        return lambda **changes: StateRig(replace(StateSetup(), **changes), backend, ctx)

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

    def test_states_have_the_dtypes_that_the_class_says(self, backend: ml.Backend, ctx: ml.Context) -> None:
        for dtype, requested, expected in (
            (DType.F32, None, DType.F32),
            (DType.F16, None, DType.F16),
            (DType.F16, DType.F32, DType.F32),
            (DType.Q8_0, None, DType.F32),
            (DType.Q4_0, DType.F16, DType.F16),
            ((DType.F16, DType.Q4_0), None, DType.F32),
        ):
            skip_undeclared(backend, dtype, expected)
            cache = kvcache.RecurrentCache(CONV, DELTA, conv_dtype=requested)
            cache.init(backend, dtype, 2, 8, 8)
            cache.start_forward(ctx, Batch([0, 0], [1, 0]))
            assert cache.conv_state(ctx, 0).dtype is expected
            assert cache.recurrent_state(ctx, 0).dtype is DType.F32
            cache.set_conv_state(ctx, 0, ctx.from_numpy(np.full((2, *CONV), 1.5), DType.F32))
            assert (cache.conv_state(ctx, 0).to_numpy() == 1.5).all()

    @pytest.mark.parametrize("how", ["declared", "found"])
    def test_layers_have_any_states_of_any_shapes_beside_attention(
        self, states: MakeStates, how: str
    ) -> None:
        r = states(states=how, interval=2)
        r.forward(0, 0, 1)
        r.snapshot(0)
        r.forward(1, 0, 0)
        r.copy_prefix(0, 2, 2)
        r.forward(2, 1)
        r.remove(0, 0, 1)
        r.forward(0, 2)
        r.copies[0][0].detach()
        assert r.restore(1, 0)
        r.forward(1, 0, 2)
        r.drain()
        r.check_copies()

    @pytest.mark.parametrize("delivery", ["wanted", "all"])
    @pytest.mark.parametrize("how", ["two", "declared"])
    def test_a_sequence_goes_back_to_any_position_inside_a_pass(
        self, states: MakeStates, delivery: str, how: str
    ) -> None:
        """As rejected drafts require: in two interleaved sequences, and twice in one pass."""
        for right in range(1, 5):
            r = states(states=how, checkpoints=0)
            r.forward(0, 0, 1)
            r.delivery = delivery
            r.want(0, [3, 4, 5, 6])
            r.want(1, [2])
            assert r.start([0, 0, 1, 0, 1, 0, 0])
            r.step()
            r.remove(0, 2 + right)
            r.remove(1, 2)
            assert [r.cache.offset(seq) for seq in range(2)] == [2 + right, 2]
            if right > 2:
                r.remove(0, 3)
                assert r.cache.offset(0) == 3
            r.forward(1, 0)
            r.drain()

    @pytest.mark.parametrize("delivery", ["wanted", "all"])
    def test_scheduled_states_are_taken_inside_a_batch(self, states: MakeStates, delivery: str) -> None:
        r = states(checkpoints=0)
        r.delivery = delivery
        r.forward(1)
        r.scheduled(0, [3, 7], 9)
        assert [(one.begin, one.end) for one, _ in r.copies] == [(0, 3), (3, 7)]
        r.forward(0, 1)
        r.remove(0, 0)
        assert r.restore(0, 0)
        assert r.restore(0, 1)
        r.forward(0)
        r.drain()
        r.check_copies()

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

    def test_sharing_a_state_calls_no_backend_and_takes_no_memory(self, backend: ml.Backend) -> None:
        """Neither do snapshots, until the slot is written."""
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = StateRig(StateSetup(max_sequences=4, checkpoints=0), limited, ctx)
            r.forward(0, 0, 1, 2)
            before = r.cache.nbytes
            plan.arm(None)
            r.copy_prefix(0, 3, 2)
            r.snapshot(0)
            r.remove(3, 0)
            assert r.restore(3, 0)
            assert plan.calls == []
            r.forward(3)
            r.forward(0)
            assert r.cache.nbytes == before
            r.drain()
            r.check_copies()

    def test_memory_stays_what_it_is_however_sequences_come_and_go(self, states: MakeStates) -> None:
        r = states(max_sequences=3, checkpoints=2, interval=2)
        sizes = set()
        for turn in range(6):
            for _ in range(6):
                r.forward(0, 1, 2)
            sizes.add(r.cache.nbytes)
            r.remove(turn % 3, 0)
            r.copy_prefix((turn + 1) % 3, turn % 3, 5)
            for seq in range(3):
                r.remove(seq, 0)
        assert len(sizes) == 1

    @pytest.mark.parametrize("what", ["go on", "remove", "shift", "copy_prefix", "undone", "overwritten"])
    def test_a_snapshots_state_lives_through(self, states: MakeStates, what: str) -> None:
        r = states(max_sequences=2, capacity=8, checkpoints=0)
        r.forward(0, 0, 0)
        r.snapshot(0)
        if what == "go on":
            r.forward(0)
            r.forward(0, 1)
        elif what == "remove":
            r.remove(0, 0)
            r.forward(0, 0, 1)
        elif what == "shift":
            r.remove(0, 0, 1)
            r.forward(0)
        elif what == "copy_prefix":
            r.copy_prefix(0, 1, 3)
            r.forward(1)
            r.copy_prefix(1, 0, 4)
            r.forward(0)
        elif what == "undone":
            r.forward(1, 0)
            r.snapshot(1)
            r.start_and_resume([0, 1])
            r.forward(0, 1)
        else:
            r.spoil()
            r.remove(0, 0)
        r.check_copies()
