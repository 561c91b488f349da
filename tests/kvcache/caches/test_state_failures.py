"""What a call to the backend that fails costs recurrent states: nothing, or what it says is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing.models.states import RECURRENT_LAYERS, StateSetup
from kvcache.testing.rigs.failing import every_failure, every_way_to_fail
from kvcache.testing.rigs.protocol import Plan, only_protocol
from kvcache.testing.rigs.states import StateRig, state_of


@dataclass(frozen=True)
class Fault:
    """``act`` is what may fail; ``follow`` does the same to the model."""

    prepare: Callable[[StateRig], object]
    act: Callable[[StateRig], object]
    follow: Callable[[StateRig], object] = lambda r: None
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


def _copied(r: StateRig) -> None:
    _fill(r)
    r.snapshot(2)
    r.copies[0][0].detach()


def _scheduled(r: StateRig) -> None:
    r.schedule(0, [2])
    r.forward(0, 0, 1)
    assert [snapshot.end for snapshot in r.cache.snapshots_taken(0)] == [2]


def _drafted(r: StateRig) -> None:
    """Two tokens drafted in sequence 1, whose states are there."""
    _fill(r)
    r.delivery = "wanted"
    r.want(1, [3, 4])
    r.forward(1, 1, 1)


def _drafting(r: StateRig) -> None:
    """A pass whose states inside are still to come."""
    _fill(r)
    r.want(1, [3, 4])
    r.start([1, 1, 1])
    r.step()


def _deliver(r: StateRig) -> None:
    r.delivery = "wanted"
    for kind, layer in r.layout:
        r.deliver(kind, layer)


def _refused(r: StateRig) -> None:
    _drafted(r)
    r.remove(1, 3)


def _pass(
    *sequences: int,
    touches: tuple[int, ...] = (),
    slots: int = 4,
    prepare: Callable[[StateRig], object] = _fill,
) -> Fault:
    def follow(r: StateRig) -> None:
        r.begin()
        r.step()

    def act(r: StateRig) -> None:
        r.cache.start_forward(r.ctx, r.plan(sequences))

    return Fault(prepare, act, follow, frozenset(touches), StateSetup(max_sequences=slots, interval=2))


def _started(r: StateRig) -> None:
    _fill(r)
    r.start([1, 2])
    for layer in RECURRENT_LAYERS:
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
    for layer in RECURRENT_LAYERS:
        r.write("conv", layer, in_place=False)
        r.write("recurrent", layer, in_place=True)


def _check_states(r: StateRig) -> None:
    r.before = [fold.seen for fold in r.model.folds]  # they have been set
    r.step(in_place=lambda: True)  # what was read is not given again


FAULTS = {
    "a pass that loads zeros": _pass(0, 1, prepare=lambda r: r.forward(2)),
    "a pass that makes a copy of a shared state": _pass(1, 2),
    "a pass that takes a checkpoint": _pass(0, 0, 2),
    "a pass that swaps two states": _pass(
        1, 0, slots=2, touches=(0, 1), prepare=lambda r: r.forward(0, 0, 1)
    ),
    "a pass that moves another's state away": _pass(
        0, 2, slots=3, touches=(1, 2), prepare=lambda r: r.forward(0, 1, 2)
    ),
    "a pass over states that snapshots hold": _pass(2, 1, prepare=_held),
    "a pass that moves states to where snapshots hold some": _pass(3, 0, touches=(2,), prepare=_held),
    "a pass after one that took a scheduled state": _pass(0, 1, prepare=_scheduled),
    "setting states that snapshots hold": Fault(_evaluated_and_held, lambda r: r.spoil(), _start_anew),
    "delivering states inside a pass": Fault(
        _drafting,
        _deliver,
        lambda r: r.model.folds[1].inside.update({n: r.seen(1, n - 2) for n in (3, 4)}),
    ),
    "taking a snapshot inside a pass": Fault(
        _drafted,
        lambda r: r.cache.snapshot(1, 0, 3),
        lambda r: None,
    ),
    "going on from a drafted token": _pass(0, 1, touches=(0,), prepare=_refused),
    "setting states": Fault(_started, _set_states, _check_states),
    "a checkpoint": Fault(_fill, lambda r: r.cache.checkpoint(2), lambda r: r.model.keep(2)),
    "remove in the middle": Fault(
        lambda r: r.forward(0, 0, 1, 0),
        lambda r: r.cache.remove(0, 0, 1),
        lambda r: r.model.remove(0, 0, 1),
        frozenset([0]),
    ),
    "restoring into free cells": Fault(
        _copied,
        lambda r: r.cache.restore(3, r.copies[0][0]),
        lambda r: r.model.restore_copy(3, r.copies[0][1], None, shared=False),
    ),
    "restoring over what is there": Fault(
        _copied,
        lambda r: r.cache.restore(2, r.copies[0][0]),
        lambda r: r.model.restore_copy(2, r.copies[0][1], None, shared=False),
        frozenset([2]),
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS.values()), ids=list(FAULTS))
@every_way_to_fail
def test_a_failing_backend_leaves_states_as_they_were_or_says_which_are_lost(
    backend: ml.Backend, fault: Fault, when: str
) -> None:
    failures: list[set[int]] = []

    def make(limited: ml.Backend, ctx: ml.Context) -> StateRig:
        r = StateRig(fault.setup, limited, ctx)
        fault.prepare(r)
        return r

    def check(r: StateRig) -> None:
        lost = {seq for seq in range(fault.setup.max_sequences) if _is_lost(r, seq)}
        failures.append(lost)
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

    every_failure(backend, when, make, fault.act, check, stride=5)
    assert failures


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
    others = {token for s, row in enumerate(r.model.tokens) if s != seq for token in row.values()}
    behind = [token for position, token in r.model.tokens[seq].items() if position]
    if offset > 1 and others.isdisjoint(behind):  # what is shared cannot move, either
        uses.append(lambda: r.cache.remove(seq, 0, 1))
    for use in uses:
        with pytest.raises(kvcache.SequenceLostError, match=f"sequence {seq}"):
            use()
    assert not r.cache.can_resume(seq, offset)


def test_a_state_that_cannot_be_copied_out_when_a_cache_closes_is_lost(backend: ml.Backend) -> None:
    plan = Plan()
    limited = only_protocol(backend, plan)
    with limited.new_context() as ctx:
        setup = StateSetup(max_sequences=4, checkpoints=0)
        r = StateRig(setup, limited, ctx)
        r.forward(0, 0, 1)
        r.snapshot(0)
        r.snapshot(1)
        for snapshot, _ in r.copies:
            snapshot.parts[0].detach()
        plan.arm(0)
        r.cache.close()
        plan.arm(None)
        (lost, _), (kept, _) = r.copies
        other = setup.make(limited)
        for use in (lost.detach, lambda: state_of(lost).tensors, lambda: other.restore(0, lost)):
            with pytest.raises(kvcache.SequenceLostError):
                use()
        assert other.offset(0) == 0
        assert other.restore(0, kept)
        assert other.offset(0) == 1
