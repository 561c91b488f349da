"""Recurrent states of snapshots: in the slot they were in, and copied once, right before that is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.snapshots.snapshot import RecurrentSnapshot
from kvcache.testing.failing import every_failure, every_way_to_fail
from kvcache.testing.harness import CacheCase
from kvcache.testing.protocol import InjectedError, Plan, only_protocol
from kvcache.testing.states import KINDS, RECURRENT_LAYERS, StateRig, StateSetup

__all__ = ["LazyStateTests"]

SETUP = StateSetup(max_sequences=4, checkpoints=0)
STATES = len(KINDS) * len(RECURRENT_LAYERS)
"""Tensors that one sequence's states are."""


def in_slot(snapshot: RecurrentSnapshot) -> bool:
    return snapshot.state.slot is not None


class LazyStateTests(CacheCase):
    @pytest.fixture
    def lazy(self, backend: ml.Backend, ctx: ml.Context) -> Callable[..., StateRig]:
        """``lazy(**changes)``: a recurrent cache without checkpoints, which would be copies too."""
        return lambda **changes: StateRig(replace(SETUP, **changes), backend, ctx)

    # Nothing is copied while the slot is there.

    def test_taking_and_restoring_a_state_moves_no_data(self, backend: ml.Backend) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = StateRig(SETUP, limited, ctx)
            r.forward(0, 0, 1)
            nbytes = r.cache.nbytes
            plan.arm(None)
            r.snapshot(0)
            r.copy_prefix(0, 3, 2)
            r.snapshot(3)
            r.remove(3, 0)
            r.remove(0, 0)
            assert r.restore(2, 0)
            assert r.restore(0, 0)
            r.snapshot(2)
            assert plan.calls == []
            assert r.cache.nbytes == nbytes
            assert len({snapshot.state for snapshot, _ in r.copies}) == 1, "one copy will do for all of them"
            r.forward(2)
            r.forward(0, 1)
            r.check_copies()

    def test_what_is_let_go_before_the_next_pass_is_never_copied(self, backend: ml.Backend) -> None:
        calls = []
        for keeps in (False, True):
            plan = Plan()
            limited = only_protocol(backend, plan)
            with limited.new_context() as ctx:
                r = StateRig(SETUP, limited, ctx)
                r.forward(0, 0, 1)
                if keeps:
                    r.snapshot(0)
                    r.copies.clear()
                plan.arm(None)
                r.forward(0, 1)
                calls.append(Counter(plan.calls))
        assert calls[0] == calls[1]

    def test_a_pass_copies_a_state_once_for_all_who_hold_it(self, backend: ml.Backend) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = StateRig(replace(SETUP, checkpoints=3, interval=1), limited, ctx)
            r.forward(0, 0)
            r.snapshot(0)
            r.snapshot(0, 1)
            assert r.restore(0, 0)
            plan.arm(None)
            r.start([0])
            assert Counter(plan.calls)["contiguous"] == STATES, "two snapshots and the checkpoint due"
            plan.arm(None)
            r.step()
            (one, _), (other, _) = r.copies
            assert one.states == other.states
            assert r.cache.checkpoints(0) == (2,)
            r.forward(0)
            r.remove(0, 2)
            r.forward(0)
            r.check_copies()

    def test_others_get_slots_that_no_snapshot_holds_while_there_are_some(
        self, lazy: Callable[..., StateRig]
    ) -> None:
        r = lazy()
        r.forward(0, 1)
        for seq in (0, 1):
            r.snapshot(seq)
            r.remove(seq, 0)
        r.forward(2)
        r.forward(3)
        r.forward(2, 3)
        assert all(in_slot(snapshot) for snapshot, _ in r.copies)
        r.forward(0, 2)
        assert [in_slot(snapshot) for snapshot, _ in r.copies].count(False) == 1
        r.check_copies()

    # What it costs, in either place.

    def test_bytes_of_a_state_are_the_same_in_its_slot_and_out_of_it(
        self, lazy: Callable[..., StateRig]
    ) -> None:
        r = lazy()
        r.forward(0, 0, 0)
        r.snapshot(0)
        r.snapshot(0, 0, 0)
        (whole, _), (empty, _) = r.copies
        size = sum(r.setup.conv.itemsize * 6 + 4 * 8 for _ in RECURRENT_LAYERS)
        for _ in range(2):
            assert whole.nbytes - whole.attention.nbytes == size
            assert empty.nbytes == 0
            whole.detach()
        assert sum(tensor.nbytes for tensor in whole.states.values()) == size

    def test_a_copy_is_counted_by_the_snapshot_and_not_by_the_cache(
        self, lazy: Callable[..., StateRig]
    ) -> None:
        r = lazy()
        r.forward(0)
        nbytes = r.cache.nbytes
        r.snapshot(0)
        r.forward(0)
        assert not in_slot(r.copies[0][0])
        assert r.cache.nbytes == nbytes

    # What it lives through.

    @pytest.mark.parametrize(
        "what", ["go on", "remove", "shift", "copy_prefix", "refused", "undone", "reserve", "overwritten"]
    )
    def test_a_state_lives_through(self, lazy: Callable[..., StateRig], what: str) -> None:
        r = lazy(max_sequences=2, capacity=8)
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
        elif what == "refused":
            assert not r.start([0] * 20)
        elif what == "undone":
            r.forward(1, 0)
            r.snapshot(1)
            r.start_and_resume([0, 1])
            r.forward(0, 1)
        elif what == "reserve":
            r.cache.start_forward(r.ctx, Batch([3], [0]), reserve=True)
            r.spoil()
        else:
            r.spoil()
            r.remove(0, 0)
        r.check_copies()

    def test_views_of_the_same_pass_are_given_out_after_a_copy_was_made(
        self, lazy: Callable[..., StateRig]
    ) -> None:
        r = lazy()
        r.forward(0, 1)
        r.snapshot(1)
        assert in_slot(r.copies[0][0])
        r.state("conv", 0)
        assert not in_slot(r.copies[0][0])
        r.spoil()
        r.remove(0, 0)
        r.remove(1, 0)
        r.check_copies()

    def test_a_scheduled_state_is_copied_by_the_pass_that_goes_on_from_it(
        self, lazy: Callable[..., StateRig]
    ) -> None:
        r = lazy()
        r.cache.schedule_snapshots(0, [2, 4])
        r.forward(0, 0)
        (first,) = r.cache.snapshots_taken(0)
        assert in_slot(first)
        copied = r.model.snapshot(0, 0, 2)
        r.forward(0, 0)
        assert not in_slot(first)
        assert r.cache.take_snapshots(0)[0] is first
        r.copies.append((first, copied))
        r.check_copies()

    @pytest.mark.parametrize("closed", [False, True])
    def test_a_state_goes_into_another_cache(self, lazy: Callable[..., StateRig], closed: bool) -> None:
        r, other = lazy(), lazy()
        r.forward(0, 0, 1)
        r.snapshot(0)
        if closed:
            r.cache.close()
        other.next_token, other.model.next_cell = r.next_token, r.model.next_cell
        other.copies = r.copies
        assert r.copies[0][0].in_cache is not closed
        for seq in (2, 0):
            assert other.cache.restore(seq, r.copies[0][0])
            other.model.restore(seq, r.copies[0][1], None, shared=False)
            other.check()
        assert r.copies[0][0].in_cache is not closed, "restoring it elsewhere leaves it where it lies"
        other.forward(0, 2)
        if not closed:
            r.forward(0, 1)
            r.check_copies()

    # Failures.

    @every_way_to_fail
    def test_a_device_that_fails_when_a_new_view_is_asked_for_loses_nothing(
        self, backend: ml.Backend, when: str
    ) -> None:
        def make(limited: ml.Backend, ctx: ml.Context) -> StateRig:
            r = StateRig(SETUP, limited, ctx)
            r.forward(0, 0, 1)
            r.snapshot(0)
            return r

        def check(r: StateRig) -> None:
            r.check()
            r.forward(0, 1)
            r.check_copies()

        every_failure(backend, when, make, lambda r: r.state("conv", 0), check, self.fault_stride)

    def test_a_state_that_cannot_be_copied_out_when_a_cache_closes_is_lost(self, backend: ml.Backend) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = StateRig(SETUP, limited, ctx)
            r.forward(0, 0, 1)
            r.snapshot(0)
            r.snapshot(1)
            for snapshot, _ in r.copies:
                snapshot.attention.detach()
            plan.arm(0)
            r.cache.close()
            plan.arm(None)
            (lost, _), (kept, _) = r.copies
            other = SETUP.make(limited)
            for use in (lost.detach, lambda: lost.states, lambda: other.restore(0, lost)):
                with pytest.raises(kvcache.SequenceLostError):
                    use()
            assert other.offset(0) == 0
            assert other.restore(0, kept)
            assert other.offset(0) == 1

    def test_a_pass_that_could_not_copy_a_state_out_has_not_begun(self, backend: ml.Backend) -> None:
        plan = Plan()
        limited = only_protocol(backend, plan)
        with limited.new_context() as ctx:
            r = StateRig(SETUP, limited, ctx)
            r.forward(0, 0)
            r.snapshot(0)
            plan.arm(3)
            with pytest.raises(InjectedError):
                r.cache.start_forward(r.ctx, r.plan([0]))
            plan.arm(None)
            assert in_slot(r.copies[0][0])
            r.check()
            r.forward(0)
            r.check_copies()
