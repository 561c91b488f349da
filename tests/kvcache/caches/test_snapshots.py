"""Snapshots in the cache: copied only when their cells are needed; taken ahead; what a failure costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, SlidingWindowCache
from kvcache.snapshots.snapshot import AttentionSnapshot, compact
from kvcache.storage.layer_shape import LayerShape
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.failing import every_failure, every_way_to_fail
from kvcache.testing.rigs.protocol import Plan, only_protocol
from kvcache.testing.rigs.snapshots import CopyRig
from ml import DType

from .small_passes import bound, evaluate

MakeRig = Callable[..., CopyRig]
ALL = Setup(max_sequences=4, capacity=12, layers=2)
WINDOW = replace(ALL, window=3, memory=5)
TIGHT = Setup(max_sequences=4, capacity=4)
kinds = pytest.mark.parametrize(
    "setup", [ALL, replace(ALL, chunk=4), WINDOW], ids=["causal", "chunked", "window"]
)


def four_each(r: CopyRig, count: int = 3) -> None:
    """Snapshots of four tokens each, of sequences that are gone by then; the oldest first."""
    for seq in range(count):
        r.forward(range(4), seq)
        r.snapshot(seq, 0, None)
    for seq in range(count):
        r.remove(seq, 0)


def where(r: CopyRig) -> list[bool]:
    return [snapshot.in_cache for snapshot, _ in r.copies]


@kinds
def test_taking_cutting_joining_and_restoring_move_no_data(backend: ml.Backend, setup: Setup) -> None:
    plan = Plan()
    limited = only_protocol(backend, plan)
    with limited.new_context() as ctx:
        r = CopyRig(setup, limited, ctx)
        r.forward([0, 1, 0, 1], [0, 0, 1, 1])
        r.cache.schedule_snapshots(0, [4])
        r.forward(range(2, 6), 0)
        plan.arm(None)
        r.snapshot(0, 0, None)
        r.split(0, 4)
        r.merge(1, 0)
        r.remove(0, 0)
        assert r.restore(len(r.copies) - 1, 0, None)
        assert r.restore(0, 2, 6)
        r.copy_prefix(0, 3, 6)
        r.remove(3, 0)
        assert r.restore(0, 3, None)
        assert plan.calls == []
        assert all(where(r))
        r.check_copies()


@pytest.mark.parametrize("copied_out", [*itertools.product((False, True), repeat=3)], ids=str)
def test_parts_are_joined_wherever_they_lie(rig: MakeRig, copied_out: tuple[bool, ...]) -> None:
    r = rig(ALL)
    r.forward(range(6), 0)
    r.forward([6], 1)
    parts = [r.cache.snapshot(0, begin, begin + 2) for begin in (0, 2, 4)]
    for part, out in zip(parts, copied_out, strict=True):
        if out:
            part.detach()
    joined, whole = r.cache.join(parts), r.cache.snapshot(0)
    assert joined.in_cache == (not any(copied_out))
    found, expected = (
        {i: [tensor.to_numpy().tolist() for tensor in layer.tensors] for i, layer in one.read().items()}
        for one in (joined, whole)
    )
    assert found == expected
    assert joined.positions.tolist() == [*range(6)]
    assert r.cache.join(parts[1:]).positions.tolist() == [*range(2, 6)]


def test_parts_that_are_not_adjacent_or_of_two_dtypes_are_neither_merged_nor_joined(
    rig: MakeRig,
) -> None:
    r, other = rig(ALL), rig(replace(ALL, dtype=DType.F16))
    r.forward(range(6), 0)
    other.forward(range(6), 0)
    first, second, third = (r.cache.snapshot(0, begin, begin + 2) for begin in (0, 2, 4))
    halves = other.cache.snapshot(0, 2, 4)
    for parts in ([first, third], [second, first], [first, first], [first, halves]):
        with pytest.raises(kvcache.InvalidRangeError, match="must be adjacent and have the same dtype"):
            r.cache.merge(*parts)
        with pytest.raises(kvcache.InvalidRangeError, match="must be adjacent and have the same dtype"):
            r.cache.join(parts)


@pytest.mark.parametrize("axes", [*itertools.permutations(range(3))], ids=str)
def test_a_part_that_is_copied_lies_in_memory_as_the_whole_did(
    ctx: ml.Context, axes: tuple[int, ...]
) -> None:
    whole = ctx.from_numpy(np.arange(60, dtype=np.float32).reshape(3, 4, 5), DType.F32).permute(ctx, *axes)
    part = whole.slice(ctx, 0, 1, 3)
    copied = compact(ctx, part)
    assert copied.to_numpy().tolist() == part.to_numpy().tolist()
    assert np.argsort(copied.strides).tolist() == np.argsort(part.strides).tolist()
    assert (
        max(stride * size for stride, size in zip(copied.strides, copied.shape, strict=True)) * 4
        == copied.nbytes
    )


# When cells are needed.


def test_the_oldest_are_copied_out_and_no_more_than_it_takes(rig: MakeRig) -> None:
    r = rig(TIGHT)
    r.forward([0, 1], 3)
    four_each(r)
    r.snapshot(3, 0, None)
    assert r.cache.free_cells == 14, "cells that only snapshots hold count as free"
    sizes = [snapshot.nbytes for snapshot, _ in r.copies]
    for count, expected in (
        (2, [True, True, True, True]),
        (1, [False, True, True, True]),
        (3, [False, True, True, True]),  # three cells of the first were left
        (5, [False, False, False, True]),  # copying the last out frees nothing
    ):
        r.extend(3, count)
        assert where(r) == expected
    assert [snapshot.nbytes for snapshot, _ in r.copies] == sizes
    r.remove(3, 0)
    r.check_copies()


def test_of_snapshots_that_overlap_the_one_that_frees_enough_is_copied(rig: MakeRig) -> None:
    r = rig(TIGHT)
    r.forward(range(6), 0)
    r.snapshot(0, 0, 2)
    r.snapshot(0, 0, None)
    r.remove(0, 0)
    r.forward(range(12), 1)
    assert where(r) == [True, False]
    r.remove(1, 0)
    r.check_copies()


def test_halves_the_whole_and_one_joined_with_nothing_make_room_together(rig: MakeRig) -> None:
    r = rig(TIGHT)
    r.forward(range(6), 0)
    r.snapshot(0, 0, None)
    r.split(0, 2)
    r.snapshot(0, 0, 0)
    r.merge(3, 0)
    r.remove(0, 0)
    r.forward(range(16), 1)
    assert not any(snapshot.in_cache for snapshot, copy in r.copies if copy.tokens)
    r.remove(1, 0)
    r.check_copies()


def test_a_full_cache_copies_nothing_and_asks_nobody(rig: MakeRig) -> None:
    r = rig(TIGHT)
    r.forward([0, 1], 3)
    four_each(r)
    asked: list[int] = []
    r.cache.on_pressure = asked.append
    with pytest.raises(kvcache.CacheFullError) as caught:
        r.cache.start_forward(r.ctx, Batch(range(2, 17), [3] * 15))
    assert (caught.value.asked, caught.value.free, caught.value.held) == (15, 14, {3: 2})
    other = rig(TIGHT, capacity=8)
    other.forward(range(15), 0)
    other.snapshot(0, 0, None)
    other.detach(0)
    with pytest.raises(kvcache.CacheFullError) as caught:
        r.cache.restore(1, other.copies[0][0])
    assert (caught.value.asked, caught.value.free, caught.value.held) == (15, 14, {3: 2})
    assert (where(r), asked) == ([True, True, True], [])
    r.check_figures()


def test_those_asked_before_anything_is_copied_may_let_snapshots_go(rig: MakeRig) -> None:
    r = rig(TIGHT)
    four_each(r)
    missing: list[int] = []

    def drop_the_last(count: int) -> None:
        missing.append(count)
        assert all(where(r))
        r.copies.pop()

    r.cache.on_pressure = drop_the_last
    for count, asked, left in ((4, [], [True] * 3), (2, [2], [True] * 2), (3, [2, 1], [True])):
        r.extend(3, count)
        assert (missing, where(r)) == (asked, left)
    r.cache.on_pressure = missing.append
    r.extend(3, 4)
    assert (missing, where(r)) == ([2, 1, 1], [False])
    r.remove(3, 0)
    r.check_copies()


def test_they_are_asked_again_while_cells_are_missing_and_they_let_some_go(rig: MakeRig) -> None:
    r = rig(TIGHT)
    four_each(r)
    missing: list[int] = []

    def drop_the_first(count: int) -> bool:
        missing.append(count)
        if len(r.copies) > 1:
            r.copies.pop(0)
        return True  # even where it let none go

    r.cache.on_pressure = drop_the_first
    r.extend(3, 14)
    assert (missing, where(r)) == ([10, 6, 2], [False])


def test_the_last_one_to_forget_a_snapshot_frees_its_cells(rig: MakeRig) -> None:
    r = rig(TIGHT)
    four_each(r)
    asked: list[int] = []
    r.cache.on_pressure = asked.append
    part = r.cache.split(r.copies[0][0], 2)[1]
    r.copies.clear()
    r.extend(3, 14)
    assert (asked, part.in_cache) == ([], True)
    del part
    r.extend(3, 2)
    assert asked == []


@pytest.mark.parametrize("detached", [False, True], ids=["in the cache", "copied out"])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_a_snapshot_goes_into_another_cache(rig: MakeRig, detached: bool, closed: bool) -> None:
    r, other = rig(ALL), rig(ALL)
    r.forward([0, 1, 0, 2, 3], [0, 0, 1, 0, 0])
    r.snapshot(0, 0, None)
    snapshot, copy = r.copies[0]
    if detached:
        r.detach(0)
    if closed:
        r.cache.close()
    assert snapshot.in_cache is not (detached or closed)
    other.next_token = r.next_token
    for seq in (3, 0):
        assert other.cache.restore(seq, snapshot)
        other.model.restore(seq, copy, None, shared=False)
        other.extend(seq)
    other.drain()
    assert snapshot.in_cache is not (detached or closed), "it stays where it lies"


def test_snapshots_of_another_kind_of_cache_are_refused(rig: MakeRig) -> None:
    r = rig(ALL)
    r.forward(range(6), 0)
    snapshot = r.cache.snapshot(0)
    snapshot.detach()
    for other in (WINDOW, replace(ALL, dtype=DType.F16), replace(ALL, dtype=DType.BF16)):
        with pytest.raises(kvcache.InvalidRangeError):
            rig(other).cache.restore(0, snapshot)
    layers = snapshot.layers
    turned = {
        i: replace(layer, tensors=layer.tensors[::-1], shape=LayerShape(layer.shape.value, layer.shape.key))
        for i, layer in layers.items()
    }
    for wrong in ({0: layers[0]}, turned):
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.restore(2, AttentionSnapshot(0, 6, snapshot.positions, snapshot.dtype, None, wrong))
    r.check_figures()


# Asked for ahead.


def taken(r: CopyRig, seq: int) -> list[tuple[int, int]]:
    """What was taken joins the copies."""
    found = r.cache.take_snapshots(seq)
    r.copies += [(one, r.model.snapshot(seq, one.begin, one.end)) for one in found]
    return [(one.begin, one.end) for one in found]


@kinds
def test_what_is_taken_inside_a_batch_is_what_was_there_at_that_position(rig: MakeRig, setup: Setup) -> None:
    """Two sequences in one batch, mixed; the last position is that of the batch's end."""
    r = rig(setup)
    r.forward([0, 1], 0)
    r.cache.schedule_snapshots(0, [5, 3, 7, 7])
    r.cache.schedule_snapshots(1, [2])
    r.forward([2, 0, 3, 1, 4, 5, 2, 6], [0, 1, 0, 1, 0, 0, 1, 0])
    begins = (2, 3, 5) if setup.window is None else (0, 0, 0)
    assert [one.end for one in r.cache.snapshots_taken(0)] == [3, 5, 7]
    assert taken(r, 0) == list(zip(begins, (3, 5, 7), strict=True))
    assert taken(r, 1) == [(0, 2)]
    assert taken(r, 0) == taken(r, 1) == []
    r.check_copies()


def test_a_prefill_of_several_batches_is_covered_without_a_gap(rig: MakeRig) -> None:
    r = rig(ALL)
    r.cache.schedule_snapshots(0, [2, 4, 8, 10])
    for count, expected in ((3, [(0, 2)]), (3, [(2, 4)]), (3, [(4, 8)]), (1, [(8, 10)])):
        r.extend(0, count)
        assert taken(r, 0) == expected
    r.cache.schedule_snapshots(0, [11])
    r.extend(0)
    assert taken(r, 0) == [(10, 11)]
    r.detach(0)
    assert r.copies[0][0].layers.keys() == {0, 1}, "also those put after it was taken"
    r.check_copies()


@pytest.mark.parametrize("how", ["undo", "remove", "failed pass", "remove all", "refused"])
def test_what_is_taken_back_is_taken_anew(rig: MakeRig, how: str) -> None:
    r = rig(ALL)
    r.forward([0, 1], 0)
    r.cache.schedule_snapshots(0, [3, 5])
    if how == "undo":
        r.start_and_undo([2, 3, 4], [0] * 3)
    elif how == "refused":
        r.start([2, 3, 4, 1], [0] * 4)
        r.start(range(2, 60), [0] * 58)
        r.cache.start_forward(r.ctx, Batch([2, 3, 4], [0] * 3), reserve=True)
    else:
        r.start([2, 3, 4], [0] * 3)
        if how != "failed pass":
            r.put()
        r.remove(0, 0 if how == "remove all" else 2)
    assert r.cache.snapshots_taken(0) == []
    begin = r.model.last(0) + 1
    r.forward(range(begin, 6), 0)
    assert taken(r, 0) == [(begin, 3), (3, 5)]
    r.check_copies()


def test_they_are_handed_over_once_and_a_removal_keeps_those_before_it(rig: MakeRig) -> None:
    r = rig(ALL)
    r.cache.schedule_snapshots(0, [1, 3, 5])
    r.extend(0, 6)
    r.remove(0, 4)
    r.extend(0, 2)
    assert [snapshot.end for snapshot in r.cache.take_snapshots(0, 3)] == [1, 3]
    assert [snapshot.end for snapshot in r.cache.take_snapshots(0, 4)] == []
    assert taken(r, 0) == [(3, 5)]


def test_a_sequence_that_is_replaced_forgets_and_one_that_is_restored_spans_from_there(rig: MakeRig) -> None:
    r = rig(ALL)
    r.forward(range(3), 1)
    r.snapshot(1, 0, None)
    for seq, expected in ((0, [(0, 2), (2, 5)]), (2, [])):
        r.cache.schedule_snapshots(seq, [2, 5])
        if seq == 0:
            assert r.restore(0, seq, None)
        else:
            r.copy_prefix(1, seq, 3)
        r.extend(seq, 3)
        assert taken(r, seq) == expected
    r.check_copies()


def test_a_window_with_a_gap_is_skipped(rig: MakeRig) -> None:
    r = rig(WINDOW)
    r.cache.schedule_snapshots(0, [2, 8, 10])
    r.forward([0, 1, 2, 9, 10], 0)
    assert [snapshot.end for snapshot in r.cache.take_snapshots(0)] == [2, 10]
    assert r.cache.skipped_snapshots(0) == [8]
    assert r.cache.skipped_snapshots(0) == [], "it is said once"


# Failures.


def filled(backend: ml.Backend, ctx: ml.Context, setup: Setup) -> CopyRig:
    """Sequence 0 scattered between the tokens of 1, and a snapshot of it."""
    r = CopyRig(setup, backend, ctx)
    for position in range(2):
        r.forward([position, position], [0, 1])
    r.forward([2, 3, 4, 5], 0)
    r.snapshot(0, 0, None)
    return r


def copied(backend: ml.Backend, ctx: ml.Context, setup: Setup) -> CopyRig:
    r = filled(backend, ctx, setup)
    r.detach(0)
    return r


def pressed(backend: ml.Backend, ctx: ml.Context, setup: Setup) -> CopyRig:
    r = CopyRig(setup, backend, ctx)
    r.forward([0, 1], 3)
    four_each(r)
    r.detach(1)
    r.forward(range(6), 0)
    return r


FAILURES: dict[str, tuple[Setup, Callable[..., CopyRig], Callable[[CopyRig], Any], int | None]] = {
    "restore over what is there": (ALL, copied, lambda r: r.cache.restore(1, r.copies[0][0]), 1),
    "restore into free cells": (ALL, copied, lambda r: r.cache.restore(2, r.copies[0][0]), None),
    "shift": (ALL, filled, lambda r: r.cache.remove(0, 1, 3), 0),
    "split and merge": (
        ALL, copied, lambda r: r.cache.merge(*r.cache.split(r.copies[0][0], 3)), None,
    ),
    "make room for a restore": (TIGHT, pressed, lambda r: r.cache.restore(1, r.copies[1][0]), None),
    "make room for a pass": (
        TIGHT, pressed, lambda r: r.cache.start_forward(r.ctx, Batch(range(2, 8), [3] * 6)), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
@every_way_to_fail
def test_a_failing_backend_loses_no_snapshot_and_at_most_the_sequence_it_moved(
    backend: ml.Backend, name: str, when: str
) -> None:
    setup, make, act, moved = FAILURES[name]
    left: list[int] = []

    def check(r: CopyRig) -> None:
        for seq in range(4):
            if not r.cache.can_resume(seq, 0):
                assert seq == moved
                with pytest.raises(kvcache.SequenceLostError):
                    r.cache.snapshot(seq)
                r.model.lost = {seq}
                r.remove(seq, 0)
        r.check_figures()
        left.append(sum(where(r)))
        for seq in (3, 1, 2):
            r.remove(seq, 0)
        r.check_copies()

    every_failure(backend, when, lambda b, ctx: make(b, ctx, setup), act, check, stride=3)
    assert left


@every_way_to_fail
def test_a_defrag_that_fails_says_which_snapshots_are_lost(backend: ml.Backend, when: str) -> None:
    lost: list[bool] = []

    def fill(limited: ml.Backend, ctx: ml.Context) -> CopyRig:
        r = CopyRig(TIGHT, limited, ctx)
        r.forward([0, 1], 0)  # they stay where they are
        r.snapshot(0, 0, None)
        r.forward(range(4), 2)
        r.snapshot(2, 0, None)
        r.remove(2, 0)
        r.forward([2], 0)
        r.remove(0, 2)
        return r

    def check(r: CopyRig) -> None:
        r.check_figures()
        moved, _ = r.copies[1]
        uses: list[Callable[[], object]] = [
            moved.detach,
            lambda: moved.layers,
            lambda: r.cache.restore(3, moved),
            lambda: r.cache.split(moved, 2),
            lambda: r.cache.merge(r.cache.snapshot(0, 0, 0), moved),
        ]
        try:
            r.cache.restore(3, moved)
            lost.append(False)
            r.cache.remove(3, 0)
        except kvcache.SequenceLostError:
            lost.append(True)
            for use in uses:
                with pytest.raises(kvcache.SequenceLostError):
                    use()
            r.copies.pop()
        r.check_copies()

    every_failure(backend, when, fill, lambda r: r.cache.defrag(), check, stride=3)
    assert any(lost)
    assert when == "after the call" or not all(lost), "before the first write nothing is lost"


def test_what_cannot_be_copied_out_when_a_cache_closes_is_lost(backend: ml.Backend) -> None:
    plan = Plan()
    limited = only_protocol(backend, plan)
    with limited.new_context() as ctx:
        r, other = CopyRig(TIGHT, limited, ctx), CopyRig(TIGHT, limited, ctx)
        four_each(r)
        plan.arm(0)
        r.cache.close()
        plan.arm(None)
        (first, _), *others = r.copies
        for use in (first.detach, lambda: other.cache.restore(0, first)):
            with pytest.raises(kvcache.SequenceLostError):
                use()
        other.next_token, other.copies = r.next_token, others
        other.check_copies()


def test_what_a_failed_pass_lacks_is_skipped_and_start_forward_goes_on(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(SlidingWindowCache(4), backend, 1, 32, 8)
    evaluate(cache, ctx, range(5), layers=2)
    evaluate(cache, ctx, range(5, 7), layers=1)  # the model failed between the layers
    cache.schedule_snapshots(0, [8])
    cache.start_forward(ctx, Batch([7], [0]))  # which takes a cell, and raises nothing
    assert cache.offset(0) == 8
    assert cache.take_snapshots(0) == []
    assert cache.skipped_snapshots(0) == [8]


def test_a_window_that_goes_on_without_what_it_sees_says_so_once(
    backend: ml.Backend, ctx: ml.Context, caplog: pytest.LogCaptureFixture
) -> None:
    cache = bound(SlidingWindowCache(4), backend, 2, 32, 32)
    for begin in range(0, 16, 2):
        evaluate(cache, ctx, range(begin, begin + 2))
    evaluate(cache, ctx, [7], 1)  # a sequence may begin anywhere
    assert cache.can_resume(0, 15)
    cache.remove(0, 15)
    evaluate(cache, ctx, [15])
    assert not caplog.messages
    assert not cache.can_resume(0, 12)
    cache.remove(0, 12)
    cache.copy_prefix(0, 1, 12)
    for seq in (0, 1):
        evaluate(cache, ctx, [12], seq)
    (message,) = caplog.messages
    assert "sequence 0 continues at position 12" in message
    assert "remove(0, 0)" in message
    cache.remove(0, 0)
    evaluate(cache, ctx, range(3))
    assert len(caplog.messages) == 1


def test_a_window_that_sees_only_the_token_itself_lacks_nothing_when_cut(
    backend: ml.Backend, ctx: ml.Context, caplog: pytest.LogCaptureFixture
) -> None:
    cache = bound(SlidingWindowCache(0), backend, 1, 16, 8)
    for position in range(8):
        evaluate(cache, ctx, [position])
    cache.remove(0, 7)
    evaluate(cache, ctx, [7])
    assert not caplog.messages


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("copied_out", [False, True])
def test_a_window_that_sees_only_the_token_itself_is_resumed_by_the_last_one(
    rig: MakeRig, keep: int, copied_out: bool
) -> None:
    r = rig(window=0, keep=keep, max_sequences=1, max_batch=4)
    r.forward(range(4), 0)
    r.forward([4], 0)
    r.snapshot(0, 0, None)
    snapshot, _ = r.copies[0]
    assert snapshot.positions.tolist() == [*range(keep), 4]
    if copied_out:
        r.detach(0)
    r.remove(0, 0)
    assert r.restore(0, 0, None)
    r.forward(range(5, 9), 0)


@pytest.mark.parametrize(
    "make",
    [
        kvcache.CausalCache,
        kvcache.EncoderCache,
        lambda: kvcache.RecurrentCache((2,), (2,)),
        lambda: kvcache.WrapperCache(kvcache.CausalCache(), SlidingWindowCache(4)),
    ],
    ids=["causal", "encoder", "recurrent", "wrapper"],
)
def test_snapshots_of_another_kind_of_cache_and_none_at_all_are_refused(
    make: Callable[[], Any], backend: ml.Backend
) -> None:
    cache, other = make(), kvcache.WrapperCache(kvcache.CausalCache())
    cache.init(backend, ml.DType.F32, 1, 8, 8)
    other.init(backend, ml.DType.F32, 1, 8, 8)
    own, foreign = cache.snapshot(0, 0, 0), other.snapshot(0, 0, 0)
    with pytest.raises(kvcache.InvalidRangeError, match="join: no snapshots"):
        cache.join([])
    for name, use in {
        "merge": lambda: cache.merge(own, foreign),
        "join": lambda: cache.join([own, foreign]),
        "split": lambda: cache.split(foreign, 0),
        "restore": lambda: cache.restore(0, foreign),
    }.items():
        with pytest.raises(kvcache.InvalidRangeError, match=f"{name}: .*(takes a|for a wrapper of)"):
            use()
    assert cache.merge(None, own) is own
