"""One pass, one thread: another thread's call is refused. And a layer that is put again behind a read is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    ChunkedCache,
    EncoderCache,
    OrderError,
    RecurrentCache,
    SlidingWindowCache,
    StateCache,
    WrapperCache,
)
from kvcache.caches import branches
from ml import DType

from ...rigs.threads import at_once, other
from .small_passes import SUM, bound, evaluate

__all__ = ["other"]

KINDS: dict[str, Callable[[], Any]] = {
    "causal": CausalCache,
    "window": lambda: SlidingWindowCache(3, 6),
    "chunks": lambda: ChunkedCache(4),
    "encoder": EncoderCache,
    "recurrent": lambda: RecurrentCache.of(StateCache(SUM)),
    "wrapper": lambda: WrapperCache(SlidingWindowCache(3, 6), CausalCache()),
}
Call = Callable[[Any, ml.Context], object]


def _put(cache: Any, ctx: ml.Context, value: float = 1.0, tokens: int = 1) -> None:
    new = ctx.full((tokens, 1, 4), value, DType.F32)
    cache.put(ctx, new, new)


def _attend(cache: Any, ctx: ml.Context, tokens: int = 1) -> np.ndarray:
    found: np.ndarray = cache.attend(ctx, ctx.zeros((tokens, 1, 4), DType.F32), 1.0).to_numpy()
    return found


def _finish(cache: Any, ctx: ml.Context, layers: int = 2) -> None:
    """Put and read all that a pass of these caches does."""
    for kind in range(len(cache.caches) if type(cache) is WrapperCache else 1):
        if type(cache) is WrapperCache:
            cache.set_layer_type(kind)
        for layer in range(layers):
            cache.set_layer(layer)
            _put(cache, ctx)
            _attend(cache, ctx)
            if isinstance(cache, RecurrentCache):
                cache.update_state(ctx, "sum", ctx.zeros((1, 1), DType.F32))


IN_A_PASS: dict[str, Call] = {
    "put": _put,
    "get": lambda cache, ctx: cache.get(ctx),
    "attend": _attend,
    "set_layer": lambda cache, ctx: cache.set_layer(1),
    "undo_forward": lambda cache, ctx: cache.undo_forward(),
}
MORE_IN_A_PASS: dict[str, dict[str, Call]] = {
    "causal": {
        "put_stored": lambda cache, ctx: cache.put_stored(ctx, [], DType.F32),
        "get_extra": lambda cache, ctx: cache.get_extra(ctx, "index"),
        "set_causal": lambda cache, ctx: cache.set_causal(ctx, [0]),
        "graph_rows": lambda cache, ctx: cache.graph_rows(ctx, 0),
        "upload_fixed": lambda cache, ctx: cache.upload_fixed(ctx),
    },
    "wrapper": {"set_layer_type": lambda cache, ctx: cache.set_layer_type(1)},
    "recurrent": {
        "state": lambda cache, ctx: cache.state(ctx, "sum"),
        "update_state": lambda cache, ctx: cache.update_state(ctx, "sum", ctx.zeros((1, 1), DType.F32)),
        "sequences": lambda cache, ctx: cache.sequences,
        "wanted_states": lambda cache, ctx: cache.wanted_states(),
    },
    "encoder": {"encoder_cached": lambda cache, ctx: cache.encoder_cached()},
}  # fmt: skip
BETWEEN_PASSES: dict[str, Call] = {
    "remove": lambda cache, ctx: cache.remove(0, 0),
    "copy_prefix": lambda cache, ctx: cache.copy_prefix(0, 1, 1),
    "snapshot": lambda cache, ctx: cache.snapshot(0),
}
MORE_BETWEEN_PASSES: dict[str, dict[str, Call]] = {
    name: {
        "defrag": lambda cache, ctx: cache.defrag(),
        "rollback": lambda cache, ctx: branches.rollback(cache, 0, 1),
        "fork": lambda cache, ctx: branches.fork(cache, 0, [1]),
        "drop": lambda cache, ctx: branches.drop(cache, [0]),
        "keep": lambda cache, ctx: branches.keep(cache, 0, 1),
        **({} if name == "recurrent" else {"evict": lambda cache, ctx: cache.evict(0, [0])}),
    }
    for name in ("causal", "window", "recurrent", "wrapper")
}
CASES = [
    (kind, name, call)
    for kind in KINDS
    for name, call in {
        **IN_A_PASS, **BETWEEN_PASSES, **MORE_IN_A_PASS.get(kind, {}), **MORE_BETWEEN_PASSES.get(kind, {})
    }.items()
]  # fmt: skip


def _begun(kind: str, backend: ml.Backend, ctx: ml.Context) -> Any:
    """A cache in a pass of this thread, behind another one."""
    cache = bound(KINDS[kind](), backend, 2, 8, 4)
    cache.start_forward(ctx, Batch([0], [0]))
    _finish(cache, ctx)
    cache.start_forward(ctx, Batch([1], [0]))
    return cache


@pytest.mark.parametrize(("kind", "name", "call"), CASES, ids=[f"{kind}-{name}" for kind, name, _ in CASES])
def test_another_threads_call_in_a_pass_is_refused_and_the_pass_goes_on(
    backend: ml.Backend, ctx: ml.Context, other: Any, kind: str, name: str, call: Call
) -> None:
    cache = _begun(kind, backend, ctx)
    if kind != "encoder" or name not in (*BETWEEN_PASSES, *MORE_BETWEEN_PASSES):
        with pytest.raises(OrderError, match="thread"):
            other(lambda: call(cache, ctx))
    _put(cache, ctx, 5.0)
    with pytest.raises(OrderError, match="thread"):
        other(lambda: call(cache, ctx))
    seen = 5.0 if kind == "encoder" else 3.0
    np.testing.assert_array_equal(_attend(cache, ctx), np.full((1, 1, 4), seen, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_may_be_begun_by_any_thread_and_ends_that_of_another(
    backend: ml.Backend, ctx: ml.Context, other: Any, kind: str
) -> None:
    cache = _begun(kind, backend, ctx)
    _finish(cache, ctx)
    other(lambda: cache.start_forward(ctx, Batch([0], [1])))
    for call in IN_A_PASS.values():
        with pytest.raises(OrderError, match="thread"):
            call(cache, ctx)
    other(lambda: _finish(cache, ctx))
    cache.start_forward(ctx, Batch([2], [0]))
    _finish(cache, ctx)
    assert not hasattr(cache, "offset") or (cache.offset(0), cache.offset(1)) == (3, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_is_refused_leaves_the_pass_of_another_thread(
    backend: ml.Backend, ctx: ml.Context, other: Any, kind: str
) -> None:
    cache = _begun(kind, backend, ctx)
    _put(cache, ctx)
    with pytest.raises(ValueError, match="sequence 7"):
        other(lambda: cache.start_forward(ctx, Batch([0], [7])))
    _attend(cache, ctx)


@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_pass_any_thread_may_go_on(
    backend: ml.Backend, ctx: ml.Context, other: Any, kind: str
) -> None:
    cache = _begun(kind, backend, ctx)
    _finish(cache, ctx)
    other(lambda: cache.copy_prefix(0, 1, 2))
    with pytest.raises(OrderError, match="no current pass"):
        _attend(cache, ctx)
    other(lambda: cache.remove(0, 0))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "encoder"])
def test_a_pass_that_is_left_in_its_middle_can_be_cleared(
    backend: ml.Backend, ctx: ml.Context, other: Any, kind: str
) -> None:
    """By a thread that takes it over, by one that begins another, and by any when its own has ended."""
    cache = _begun(kind, backend, ctx)
    with pytest.raises(OrderError, match="start_forward"):
        other(lambda: cache.remove(0, 1))
    other(cache.take_over)
    other(lambda: cache.remove(0, 1))
    assert cache.offset(0) == (0 if kind == "recurrent" else 1)
    cache.start_forward(ctx, Batch([cache.offset(0)], [0]))
    other(lambda: cache.start_forward(ctx, Batch([0], [0]), reserve=True))
    other(lambda: cache.remove(0, 0))
    ended = threading.Thread(target=lambda: cache.start_forward(ctx, Batch([0], [0])))
    ended.start()
    ended.join()
    cache.remove(0, 0)
    assert cache.offset(0) == 0


def _evaluated(cache: Any, ctx: ml.Context, seq: int, position: int) -> list[float]:
    """What two layers see of a token of ``seq`` that is not this number, as all tokens of it are."""
    wrong: list[float] = []
    cache.start_forward(ctx, Batch([position], [seq]))
    for kind in range(len(cache.caches) if type(cache) is WrapperCache else 1):
        if type(cache) is WrapperCache:
            cache.set_layer_type(kind)
        for layer in range(2):
            cache.set_layer(layer)
            _put(cache, ctx, seq)
            found = _attend(cache, ctx)
            wrong.extend(found[abs(found - seq) > 1e-3].tolist())
    return wrong


class _Appearing:
    """The buffers of a layer; whenever they are looked at, another thread's layer has appeared."""

    def __init__(self, buffers: Any, layers: dict[int, Any]) -> None:
        self._buffers, self._layers = buffers, layers

    def __getattr__(self, name: str) -> Any:
        self._layers[len(self._layers)] = self._buffers
        return getattr(self._buffers, name)


def test_layers_that_appear_while_another_thread_asks(backend: ml.Backend, other: Any) -> None:
    cache: Any = bound(CausalCache(), backend, 1, 16, 4)
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch([0], [0]))
        cache.set_layer(0)
        _put(cache, ctx)
        own = cache.nbytes
        layers = cache.storage.buffers
        layers[1] = _Appearing(layers[0], layers)
        assert cache.nbytes == 2 * own
        assert other(cache.foreign_pass)
        assert len(layers) > 2
        for layer in [*layers][1:]:
            del layers[layer]


@pytest.mark.parametrize("kind", ["causal", "window", "wrapper"])
def test_threads_that_use_one_cache_get_what_is_right_or_an_error(backend: ml.Backend, kind: str) -> None:
    """Each has a sequence of its own, whose tokens are all its number."""
    cache: Any = bound(KINDS[kind](), backend, 3, 64, 4)
    wrong: list[float] = []

    def work(seq: int) -> None:
        ctx, position = backend.new_context(), 0
        for _ in range(60):
            with contextlib.suppress(OrderError):
                if not position:
                    cache.remove(seq, 0)
                at, position = position, 0
                wrong.extend(_evaluated(cache, ctx, seq, at))
                position = (at + 1) % 8

    at_once(work, range(3))
    assert not wrong
    ctx = backend.new_context()
    for seq in range(3):
        cache.remove(seq, 0)
        assert not [value for at in range(3) for value in _evaluated(cache, ctx, seq, at)]


@pytest.mark.parametrize("kind", ["causal", "window", "chunks", "encoder"])
def test_a_pass_that_another_thread_begins_during_a_call_is_not_taken_for_its_own(
    backend: ml.Backend, ctx: ml.Context, other: Any, kind: str
) -> None:
    """A call looks once at which pass is under way."""
    cache: Any = bound(KINDS[kind](), backend, 2, 8, 4)
    passes = []
    for seq, start in enumerate((other, lambda call: call())):
        start(lambda seq=seq: cache.start_forward(ctx, Batch([0], [seq])))
        passes.append(cache.pass_under_way())
    theirs, mine = passes

    class Racing(type(cache)):  # type: ignore[misc]
        looks = iter([mine])
        _pass = property(lambda self: next(self.looks, theirs), lambda self, begun: None)

    cache.__class__ = Racing
    assert cache._started("put") is mine


def test_one_thread_at_a_time_is_in_a_call(backend: ml.Backend, ctx: ml.Context, other: Any) -> None:
    """As while one makes room: what it looks at would change."""
    cache = bound(CausalCache(), backend, 2, 2, 2)
    evaluate(cache, ctx, range(2))
    kept = cache.snapshot(0)
    cache.remove(0, 0)
    evaluate(cache, ctx, range(2), 1)
    refused = []

    def pressed(cells: int) -> bool:
        calls = lambda c, x: c.start_forward(x, Batch([0], [1])), lambda c, x: c.close()
        for call in (*BETWEEN_PASSES.values(), *calls):
            with pytest.raises(OrderError, match="another thread"):
                other(lambda call=call: call(cache, ctx))
            refused.append(call)
        kept.detach()
        return True

    cache.on_pressure = pressed
    cache.start_forward(ctx, Batch([0], [0]))
    assert len(refused) == 5


def test_a_wrapper_closes_all_of_its_caches_or_none(backend: ml.Backend, ctx: ml.Context, other: Any) -> None:
    caches = CausalCache(), CausalCache()
    wrapper = bound(WrapperCache(*caches), backend, 2, 2, 2)
    evaluate(caches[1], ctx, range(2))
    kept = caches[1].snapshot(0)
    caches[1].remove(0, 0)
    evaluate(caches[1], ctx, range(2), 1)

    def pressed(cells: int) -> bool:
        with pytest.raises(OrderError, match="close: another thread is in a call"):
            other(wrapper.close)
        kept.detach()
        return True

    caches[1].on_pressure = pressed
    caches[1].start_forward(ctx, Batch([0], [0]))
    caches[0].start_forward(ctx, Batch([0], [0]))  # still open
    wrapper.close()


# A layer that is put again.


AGAIN = {name: IN_A_PASS[name] for name in ("get", "attend")}


@pytest.mark.parametrize("read", AGAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_was_put_and_read_is_not_put_again_in_the_pass(
    backend: ml.Backend, ctx: ml.Context, kind: str, read: str
) -> None:
    cache = _begun(kind, backend, ctx)
    cache.set_layer(1)
    _put(cache, ctx, 7.0)
    _put(cache, ctx, 5.0)  # nobody has seen the one before
    AGAIN[read](cache, ctx)
    with pytest.raises(OrderError, match=r"layer 1 .* set_layer"):
        _put(cache, ctx, 100.0)
    seen = _attend(cache, ctx)[0, 0, 0]
    assert seen == (5.0 if kind == "encoder" else 3.0)
    cache.set_layer(0)
    _put(cache, ctx)
    cache.start_forward(ctx, Batch([0], [1]))
    cache.set_layer(1)
    _put(cache, ctx)


@pytest.mark.parametrize(
    ("dtype", "config", "tokens"),
    [
        (DType.F32, ml.CacheConfig(fixed_context=4), 1),
        (DType.F32, ml.CacheConfig(permuted_v=True), 1),
        (DType.F32, ml.CacheConfig(), 2),
        (DType.Q8_0, ml.CacheConfig(), 1),
    ],
    ids=["tables", "permuted", "scattered", "codes"],
)
@pytest.mark.parametrize("read", AGAIN)
def test_however_it_is_stored(
    backend: ml.Backend, ctx: ml.Context, dtype: Any, config: ml.CacheConfig, tokens: int, read: str
) -> None:
    cache = CausalCache()
    cache.set_config(config)
    cache.init(backend, dtype, 2, 8, 4)
    x = ctx.zeros((tokens, 1, 32), DType.F32)
    for position in range(2):
        cache.start_forward(ctx, Batch([position] * tokens, list(range(tokens))))
        for _ in range(2):
            cache.put(ctx, x, x)
        if read == "get":
            cache.get(ctx)
        else:
            cache.attend(ctx, x, 1.0)
        with pytest.raises(OrderError, match="set_layer"):
            cache.put(ctx, x, x)


def test_a_read_that_is_refused_is_none(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = bound(CausalCache(), backend, 1, 8, 4)
    cache.start_forward(ctx, Batch([0], [0]))
    _put(cache, ctx, 7.0)
    with pytest.raises(ValueError, match="query"):
        _attend(cache, ctx, tokens=3)
    _put(cache, ctx, 5.0)
    assert _attend(cache, ctx)[0, 0, 0] == 5.0


def test_a_layer_may_be_read_without_being_put_as_often_as_one_likes(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    """Layers that share K and V; and a pass that only reads, behind which the one before goes on."""
    cache = bound(CausalCache(), backend, 1, 8, 4)
    cache.start_forward(ctx, Batch([0], [0]))
    _put(cache, ctx, 5.0)
    for _ in range(3):
        cache.get(ctx)
        assert _attend(cache, ctx)[0, 0, 0] == 5.0
    cache.start_forward(ctx, Batch([0], [0]), read_only=True)
    assert _attend(cache, ctx)[0, 0, 0] == 5.0
    cache.start_forward(ctx, Batch([1], [0]))
    _put(cache, ctx, 7.0)
    assert _attend(cache, ctx)[0, 0, 0] == 6.0


def test_an_extra_that_was_read_is_not_replaced(backend: ml.Backend, ctx: ml.Context) -> None:
    cache, x = bound(CausalCache(), backend, 1, 8, 4), ctx.zeros((1, 1, 4), DType.F32)
    cache.start_forward(ctx, Batch([0], [0]))
    cache.put(ctx, x, x, extra={"index": x})
    cache.get_extra(ctx, "index")
    with pytest.raises(OrderError, match="set_layer"):
        cache.put(ctx, x, x, extra={"index": x})


@pytest.mark.parametrize("by_name", [True, False])
def test_a_state_that_was_updated_and_read_is_not_updated_again(
    backend: ml.Backend, ctx: ml.Context, by_name: bool
) -> None:
    cache: Any = bound(RecurrentCache((2, 3), (2, 2)), backend, 1, 8, 4)
    calls = {
        "conv": (cache.conv_state, cache.set_conv_state),
        "recurrent": (cache.recurrent_state, cache.set_recurrent_state),
    }
    cache.start_forward(ctx, Batch([0], [0]))
    for name, (read, update) in calls.items():
        get: Callable[[], ml.Tensor] = partial(cache.state, ctx, name) if by_name else partial(read, ctx, 0)
        give: Callable[[ml.Tensor], None] = (
            partial(cache.update_state, ctx, name) if by_name else partial(update, ctx, 0)
        )
        before = get()
        give(before.contiguous(ctx))
        give(before.contiguous(ctx).add(ctx, ctx.full(before.shape, 1.0, DType.F32)))
        seen = get().to_numpy()
        with pytest.raises(OrderError, match=f"state '{name}' of layer 0 .* set_layer"):
            give(ctx.full(before.shape, 9.0, DType.F32))
        np.testing.assert_array_equal(get().to_numpy(), seen)
        assert seen.max() == 1.0
