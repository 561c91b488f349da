"""Calls out of order, closing, and binding anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.testing import values
from kvcache.testing.harness import KINDS, CacheCase, MakeRig, every_kind
from kvcache.testing.model import Setup
from ml import DType

__all__ = ["OrderTests"]

Call = Callable[[kvcache.CausalCache, ml.Context], object]


def _put(cache: kvcache.CausalCache, ctx: ml.Context) -> None:
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
NEEDS_START = {name: NEEDS_INIT[name] for name in ("put", "get", "attend", "set_causal")}
NEEDS_PUT = {name: NEEDS_INIT[name] for name in ("get", "attend")}
ENDS_A_PASS: dict[str, Call] = {
    "remove": lambda cache, ctx: cache.remove(0, 1),
    "copy_prefix": lambda cache, ctx: cache.copy_prefix(0, 1, 1),
    "defrag": lambda cache, ctx: cache.defrag(),
}


def each(calls: dict[str, Call]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", list(calls.values()), ids=list(calls))


class OrderTests(CacheCase):
    def test_the_caches_have_the_protocol(self) -> None:
        for kind in KINDS.values():
            assert isinstance(kind.unbound(), kvcache.Cache)

    @each(NEEDS_INIT)
    def test_before_init_it_is_an_order_error(self, ctx: ml.Context, call: Call) -> None:
        with pytest.raises(kvcache.OrderError) as caught:
            call(Setup().unbound(), ctx)
        assert "init" in str(caught.value)

    @each(NEEDS_START)
    def test_before_start_forward_it_is_an_order_error(
        self, backend: ml.Backend, ctx: ml.Context, call: Call
    ) -> None:
        with pytest.raises(kvcache.OrderError):
            call(Setup().make(backend), ctx)

    @each(NEEDS_PUT)
    def test_before_the_first_put_of_a_layer_it_is_an_order_error(self, rig: MakeRig, call: Call) -> None:
        r = rig()
        r.forward([0], 0)
        r.cache.set_layer(1)
        with pytest.raises(kvcache.OrderError):
            call(r.cache, r.ctx)
        r.check_seen()

    @each(ENDS_A_PASS)
    def test_what_changes_sequences_ends_the_pass(self, rig: MakeRig, call: Call) -> None:
        r = rig()
        r.forward([0, 1], 0)
        call(r.cache, r.ctx)
        with pytest.raises(kvcache.OrderError):
            r.cache.get(r.ctx)

    @each(NEEDS_INIT)
    def test_after_close_it_is_a_closed_error(self, rig: MakeRig, call: Call) -> None:
        r = rig()
        r.forward([0, 1], 0)
        r.cache.close()
        with pytest.raises(kvcache.ClosedError) as caught:
            call(r.cache, r.ctx)
        assert isinstance(caught.value, ml.ClosedError)

    def test_close_drops_the_tensors_and_may_be_repeated(self, rig: MakeRig, backend: ml.Backend) -> None:
        before = backend.memory().allocated
        r = rig(capacity=512)
        r.forward([0, 1], 0)
        assert backend.memory().allocated > before
        r.cache.close()
        r.cache.close()
        assert r.cache.nbytes == 0
        assert backend.memory().allocated <= before

    @every_kind
    def test_a_closed_cache_can_be_bound_anew_and_is_empty(self, rig: MakeRig, kind: Setup) -> None:
        r = rig(kind, layers=3)
        r.forward([0, 1, 0], [0, 0, 1])
        r.cache.close()
        r.cache.init(r.backend, DType.F32, 2, 16, 8)
        assert r.cache.held() == {}
        assert r.cache.free_cells == r.cache.cells
        r.cache.start_forward(r.ctx, Batch([0], [0]))
        _put(r.cache, r.ctx)  # layer 0, and shapes of its own
        assert r.cache.get(r.ctx)[0].shape[1:] == (2, 8)
        r.cache.set_layer(2)
        with pytest.raises(kvcache.OrderError):
            r.cache.get(r.ctx)

    def test_init_of_a_bound_cache_is_refused_and_changes_nothing(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1], 0)
        with pytest.raises(kvcache.OrderError):
            r.cache.init(r.backend, DType.F16, 9, 9, 9)
        r.check_figures()
        r.check_seen()

    def test_tensors_of_get_outlive_close(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1], 0)
        key = r.cache.get(r.ctx)[0]
        before = key.to_numpy()
        r.cache.close()
        assert (key.to_numpy() == before).all()

    def test_a_negative_layer_is_refused(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0], 0)
        with pytest.raises(kvcache.InvalidRangeError):
            r.cache.set_layer(-1)
        r.check_seen()

    # Configuration.

    def test_the_backend_says_how_it_wants_its_tensors(self, backend: ml.Backend) -> None:
        cache = kvcache.CausalCache()
        cache.init(backend, DType.F32, 1, 8, 8)
        wanted = backend.cache_config() if isinstance(backend, ml.SupportsCacheConfig) else ml.CacheConfig()
        assert cache.config == wanted

    def test_a_config_may_be_set_before_and_after_init(self, backend: ml.Backend) -> None:
        config = ml.CacheConfig(cache_padding=6)
        for after in (False, True):
            cache = kvcache.CausalCache()
            if after:
                cache.init(backend, DType.F32, 1, 8, 8)
            cache.set_config(config)
            if not after:
                cache.init(backend, DType.F32, 1, 8, 8)
            assert cache.config == config
            assert cache.cells == 12

    def test_a_config_is_refused_once_a_pass_has_started(self, rig: MakeRig) -> None:
        r = rig()
        r.forward([0, 1], 0)
        with pytest.raises(kvcache.OrderError):
            r.cache.set_config(ml.CacheConfig(permuted_v=True))
        r.check_seen()
        r.remove(0, 1)
        with pytest.raises(kvcache.OrderError):
            r.cache.set_config(ml.CacheConfig(permuted_v=True))

    def test_a_context_may_be_closed_between_passes(self, rig: MakeRig, backend: ml.Backend) -> None:
        r = rig()
        for first in (0, 2, 4):
            with backend.new_context() as r.ctx:
                r.forward([first, first + 1], 0)
                assert r.cache.get(r.ctx)[0].shape[1:] == (values.KV_HEADS, values.KEY_DIM)
