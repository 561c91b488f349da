"""Calls out of order, closing and binding anew; ranges and batches at the edge of what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch, CausalCache, ChunkedCache, SlidingWindowCache
from kvcache.testing.harness import every_kind
from kvcache.testing.models.attention import Setup
from kvcache.testing.rigs.snapshots import CopyRig
from ml import DType

from .small_passes import bound, evaluate

MakeRig = Callable[..., CopyRig]
Call = Callable[[CausalCache, ml.Context], object]


def _put(cache: CausalCache, ctx: ml.Context) -> None:
    cache.put(ctx, ctx.zeros((1, 2, 8), DType.F32), ctx.zeros((1, 2, 5), DType.F32))


NEEDS_INIT: dict[str, Call] = {
    "start_forward": lambda cache, ctx: cache.start_forward(ctx, Batch([0], [0])),
    "start_forward with reserve": lambda cache, ctx: cache.start_forward(ctx, Batch([0], [0]), reserve=True),
    "put": _put,
    "get": lambda cache, ctx: cache.get(ctx),
    "attend": lambda cache, ctx: cache.attend(ctx, ctx.zeros((1, 2, 8), DType.F32), 1.0),
    "set_causal": lambda cache, ctx: cache.set_causal(ctx, except_=[0]),
    "copy_prefix": lambda cache, ctx: cache.copy_prefix(0, 1, 1),
    "can_resume": lambda cache, ctx: cache.can_resume(0, 0),
    "remove": lambda cache, ctx: cache.remove(0, 0),
    "defrag": lambda cache, ctx: cache.defrag(),
    "cells": lambda cache, ctx: cache.cells,
    "held": lambda cache, ctx: cache.held(),
}


@pytest.mark.parametrize("name", NEEDS_INIT)
def test_a_call_before_init_start_put_or_after_close_is_refused(rig: MakeRig, name: str) -> None:
    call, r = NEEDS_INIT[name], rig()
    with pytest.raises(kvcache.OrderError, match="init"):
        call(Setup().unbound(), r.ctx)
    if name in ("put", "get", "attend", "set_causal"):
        with pytest.raises(kvcache.OrderError):
            call(r.cache, r.ctx)
    r.forward([0], 0)
    if name in ("get", "attend"):
        r.cache.set_layer(1)
        with pytest.raises(kvcache.OrderError):
            call(r.cache, r.ctx)
        r.check_seen()
    r.cache.close()
    with pytest.raises(kvcache.ClosedError):
        call(r.cache, r.ctx)


@pytest.mark.parametrize("end", [
    lambda cache: cache.remove(0, 1), lambda cache: cache.copy_prefix(0, 1, 1), lambda cache: cache.defrag(),
    lambda cache: cache.undo_forward(),
], ids=["remove", "copy_prefix", "defrag", "undo_forward"])  # fmt: skip
def test_what_changes_sequences_ends_the_pass(rig: MakeRig, end: Callable[[CausalCache], None]) -> None:
    r = rig()
    r.forward([0, 1], 0)
    end(r.cache)
    with pytest.raises(kvcache.OrderError):
        r.cache.get(r.ctx)


def test_what_a_pass_did_not_put_is_lacking_after_one_that_only_reads(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    cache = bound(CausalCache(), backend, 1, 16, 16)
    evaluate(cache, ctx, [0, 1], layers=2)
    evaluate(cache, ctx, [2])
    cache.start_forward(ctx, Batch([2], [0]), read_only=True)
    evaluate(cache, ctx, [3], layers=2)
    assert cache.computed(0) == 2
    with pytest.raises(kvcache.OrderError, match="layer 1 lacks position 2 of sequence 0"):
        cache.get(ctx)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_start_can_be_taken_back_and_the_pass_before_goes_on(rig: MakeRig, read_only: bool) -> None:
    r = rig(layers=2)
    r.forward([0, 1], 0)
    under_way = r.cache.pass_under_way()
    r.cache.start_forward(r.ctx, Batch([1 if read_only else 2], [0]), read_only=read_only)
    r.cache.undo_forward(under_way)
    r.check_seen()
    r.cache.undo_forward()
    r.check_figures()


def test_close_drops_the_tensors_and_those_of_get_outlive_it(rig: MakeRig, backend: ml.Backend) -> None:
    before = backend.memory().allocated
    r = rig(capacity=512)
    r.forward([0, 1], 0)
    key = r.cache.get(r.ctx)[0]
    host = key.to_numpy()
    r.cache.close()
    r.cache.close()
    assert (key.to_numpy() == host).all()
    del key
    assert r.cache.nbytes == 0
    assert backend.memory().allocated <= before


@every_kind
def test_a_cache_is_bound_once_and_anew_after_close(rig: MakeRig, kind: Setup) -> None:
    r = rig(kind, layers=3)
    r.forward([0, 1, 0], [0, 0, 1])
    r.cache.schedule_snapshots(0, [3])
    with pytest.raises(kvcache.OrderError):
        r.cache.init(r.backend, DType.F16, 9, 9, 9)
    r.check_seen()
    r.cache.close()
    r.cache.init(r.backend, DType.F32, 2, 16, 8)
    assert r.cache.held() == {}
    assert r.cache.free_cells == r.cache.cells
    r.cache.start_forward(r.ctx, Batch([0, 1, 2, 3], [0] * 4))
    assert r.cache.take_snapshots(0) == []
    r.cache.start_forward(r.ctx, Batch([0], [1]))
    _put(r.cache, r.ctx)  # layer 0, and shapes of its own
    assert r.cache.get(r.ctx)[0].shape[1:] == (2, 8)
    r.cache.set_layer(2)
    with pytest.raises(kvcache.OrderError):
        r.cache.get(r.ctx)


def test_a_config_is_the_backends_or_ones_own_until_a_pass_has_stored(
    rig: MakeRig, backend: ml.Backend
) -> None:
    wanted = backend.cache_config() if isinstance(backend, ml.SupportsCacheConfig) else ml.CacheConfig()
    for after in (False, True):
        cache = CausalCache()
        if after:
            cache.init(backend, DType.F32, 1, 8, 8)
            assert cache.config == wanted
        cache.set_config(ml.CacheConfig(cache_padding=6))
        if not after:
            cache.init(backend, DType.F32, 1, 8, 8)
        assert cache.cells == 12
    r = rig()
    r.forward([0, 1], 0)
    for _ in range(2):
        with pytest.raises(kvcache.OrderError):
            r.cache.set_config(ml.CacheConfig(permuted_v=True))
        r.remove(0, 1)


def test_a_reserve_pass_spans_the_capacity_whatever_a_failed_pass_has_left(backend: ml.Backend) -> None:
    cache, ctx = bound(CausalCache(), backend, 1, 8, 4), backend.new_context()
    for layers in (2, 1):
        cache.start_forward(ctx, Batch([cache.offset(0)], [0]))
        for layer in range(layers):
            cache.set_layer(layer)
            _put(cache, ctx)
    cache.start_forward(ctx, Batch([0], [0]), reserve=True)
    cache.set_layer(1)
    _put(cache, ctx)
    assert cache.get(ctx)[0].shape[0] == 8
    assert cache.attend(ctx, ctx.zeros((1, 2, 8), DType.F32), 1.0).shape == (1, 2, 5)


@pytest.mark.parametrize("number", [np.uint8, np.int8, np.uint64, np.int64])
def test_numbers_of_numpy_are_numbers(rig: MakeRig, number: Any) -> None:
    """Also where they have no room for a difference of two."""
    r = rig()
    r.forward(range(7), 0)
    r.cache.remove(number(0), number(1), number(4))
    r.model.remove(0, 1, 4)
    r.cache.copy_prefix(number(0), number(1), number(3))
    r.model.copy_prefix(0, 1, 3)
    r.check_figures()
    assert r.cache.positions(number(1)).tolist() == [0, 1, 2]
    r.forward([4, 3], [0, 1])


@pytest.mark.parametrize(("begin", "end"), [(5, None), (9, 12), (2, 2), (4, 100), (2, 4), (1, 100)])
def test_a_range_without_anything_behind_it_needs_no_shift_function(
    rig: MakeRig, begin: int, end: int | None
) -> None:
    r = rig(can_shift=False)
    r.forward([0, 1, 2, 3], 0)
    assert r.remove(0, begin, end)
    assert r.cache.positions(0).tolist() == list(range(min(4, begin) if begin != end else 4))
    r.forward([r.model.last(0) + 2], 0)
    with pytest.raises(ml.NotSupportedError, match="shift"):
        r.cache.remove(0, 0, 1)


@pytest.mark.parametrize("kind", [CausalCache, lambda: ChunkedCache(4)], ids=["causal", "chunks"])
def test_positions_may_be_written_once_the_pass_has_begun(
    backend: ml.Backend, ctx: ml.Context, kind: Callable[[], CausalCache]
) -> None:
    cache, masks, new = bound(kind(), backend, 2, 16, 16), [], ctx.zeros((3, 1, 4), DType.F32)
    for changed in (False, True):
        positions = np.arange(3)
        cache.start_forward(ctx, Batch(positions, [int(changed)] * 3))
        if changed:
            positions += 3
        cache.put(ctx, new, new)
        mask = cache.get(ctx)[2]
        masks.append(mask if mask is ml.CAUSAL or mask is None else mask.to_numpy().tolist())
    assert masks[0] == masks[1]


def test_numpy_arrays_tuples_and_ranges_are_batches(rig: MakeRig) -> None:
    r = rig()
    makers: list[Any] = [np.array, tuple, list]
    for i, make in enumerate(makers):
        r.cache.start_forward(r.ctx, Batch(make([2 * i, 2 * i + 1]), make([0, 0])))
    zeros: Any = np.zeros(2, np.int32)
    r.cache.start_forward(r.ctx, Batch(range(6, 8), zeros, multimodal=[(0, object())], inputs=object()))
    assert r.cache.positions(0).tolist() == list(range(8))


# Cells.


@pytest.mark.parametrize(("make", "max_sequences", "padding", "cells"), [
    (CausalCache, 3, 1, 300), (CausalCache, 1, 32, 128), (CausalCache, 2, 100, 200),
    (lambda: ChunkedCache(4), 3, 7, 301),
    (lambda: SlidingWindowCache(4), 1, 1, 4 + 8), (lambda: SlidingWindowCache(4), 2, 1, 2 * 5 + 8),
    (lambda: SlidingWindowCache(0), 2, 1, 2 + 8), (lambda: SlidingWindowCache(4, 5), 2, 1, 2 * 5 + 8),
    (lambda: SlidingWindowCache(4, 20), 2, 16, 48), (lambda: SlidingWindowCache(4, 99), 1, 1, 99 + 8),
    (lambda: SlidingWindowCache(4, 100), 1, 1, 100), (lambda: SlidingWindowCache(99), 1, 1, 99 + 8),
    (lambda: SlidingWindowCache(99), 2, 1, 200), (lambda: SlidingWindowCache(4, 1000), 3, 1, 300),
])  # fmt: skip
def test_the_number_of_cells_is(
    backend: ml.Backend, make: type[CausalCache], max_sequences: int, padding: int, cells: int
) -> None:
    cache = make()
    cache.set_config(ml.CacheConfig(cache_padding=padding))
    for wrong in ((0, 100, 8), (max_sequences, 0, 8), (max_sequences, 100, -1)):
        with pytest.raises(kvcache.InvalidRangeError):
            cache.init(backend, DType.F32, *wrong)
    cache.init(backend, DType.F32, max_sequences, 100, 8)
    assert cache.cells == cache.free_cells == cells


@every_kind
def test_an_overflow_says_what_was_asked_free_and_held_and_changes_nothing(rig: MakeRig, kind: Setup) -> None:
    r = rig(kind, max_sequences=2, capacity=8, max_batch=4, layers=2)
    r.forward([0, 1, 2, 0], [0, 0, 0, 1])
    free = r.cache.free_cells
    with pytest.raises(kvcache.CacheFullError) as caught:
        r.cache.start_forward(r.ctx, Batch(range(3, 4 + free), [0] * (free + 1)))
    assert isinstance(caught.value, RuntimeError)
    assert (caught.value.asked, caught.value.free, caught.value.held) == (free + 1, free, {0: 3, 1: 1})
    for number in (free + 1, free):
        assert str(number) in str(caught.value)
    r.check_figures()
    r.check_seen()  # the pass before goes on
    assert r.forward(range(3, 3 + free), 0)
    assert r.cache.free_cells == 0
    r.drain()


@pytest.mark.parametrize("reserve", [False, True])
def test_a_context_that_is_not_of_the_caches_backend_or_closed_is_refused(
    rig: MakeRig, reserve: bool
) -> None:
    r = rig()
    r.forward(range(5), 0)
    with ml.open_backend("numpy") as other, other.new_context() as foreign:
        with pytest.raises(ml.DeviceError, match=r"start_forward: ctx=.* is not of .*, where the cache is"):
            r.cache.start_forward(foreign, Batch([5], [0]), reserve)
        rows = foreign.zeros((5, 1, 4), ml.DType.F32)
        r.cache.set_layer(9)
        with pytest.raises(ml.DeviceError, match="put: key is a tensor of"):
            r.cache.put(foreign, rows, rows)
    closed = r.cache.backend.new_context()
    closed.close()
    with pytest.raises(ml.ClosedError, match=r"start_forward: ctx=<closed context of .*, is closed"):
        r.cache.start_forward(closed, Batch([5], [0]), reserve)
    r.check_figures()
    r.check_seen()


@pytest.mark.parametrize(
    "make",
    [
        kvcache.CausalCache,
        kvcache.EncoderCache,
        lambda: kvcache.WrapperCache(kvcache.CausalCache(), SlidingWindowCache(4)),
    ],
    ids=["causal", "encoder", "wrapper"],
)
@pytest.mark.parametrize("seen", [False, True], ids=["at first", "after its own context"])
def test_what_is_put_and_read_goes_by_a_context_of_the_caches_backend(
    backend: ml.Backend, ctx: ml.Context, make: Callable[[], Any], seen: bool
) -> None:
    cache = bound(make(), backend, 1, 8, 8)
    cache.start_forward(ctx, Batch([0, 1], [0, 0], multimodal=[(0, "item")]))
    rows = ctx.full((2, 1, 4), 1.0, ml.DType.F32)
    cache.put(ctx, rows, rows)
    if seen:
        cache.get(ctx)
        cache.attend(ctx, rows, 1.0)
    with ml.open_backend("numpy") as other, other.new_context() as foreign:
        for name, call in {
            "put": lambda: cache.put(foreign, rows, rows),
            "get": lambda: cache.get(foreign),
            "attend": lambda: cache.attend(foreign, rows, 1.0),
        }.items():
            with pytest.raises(ml.DeviceError, match=rf"^{name}: ctx=.* is not of .*, where the cache is"):
                call()
    assert (cache.get(ctx)[0].to_numpy() == 1).all()
    assert (cache.attend(ctx, rows, 1.0).to_numpy() == 1).all()


def test_states_are_made_by_a_context_of_the_caches_backend(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = bound(kvcache.RecurrentCache((2,), (2,)), backend, 1, 8, 8)
    cache.start_forward(ctx, Batch([0], [0]))
    says = r"conv_state: ctx=.* is not of .*, where the cache is"
    with (
        ml.open_backend("numpy") as other,
        other.new_context() as foreign,
        pytest.raises(ml.DeviceError, match=says),
    ):
        cache.conv_state(foreign, 0)
    assert cache.conv_state(ctx, 0).to_numpy().tolist() == [[0, 0]]


def test_a_position_that_is_held_is_named(rig: MakeRig) -> None:
    r = rig()
    r.forward(range(5), 0)
    with pytest.raises(
        kvcache.InvalidBatchError, match=r"already holds position 3; call remove\(0, 3\) first"
    ):
        r.cache.start_forward(r.ctx, Batch([9, 3, 4], [0, 0, 0]))
