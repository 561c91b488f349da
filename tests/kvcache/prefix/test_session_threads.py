"""A PrefixCache and its sessions: one thread at a time, between passes. And the lock of those who wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ml
from kvcache import (
    Batch,
    CausalCache,
    OrderError,
    PrefixOptions,
    RecurrentCache,
    SlidingWindowCache,
    StateCache,
    StateSpec,
)
from kvcache.caches.turns import Turns
from kvcache.prefix.prefix_cache import PrefixCache, SessionLimitError
from ml import DType

from ...rigs.threads import at_once, other

__all__ = ["other"]

KINDS: dict[str, Callable[[], Any]] = {
    "causal": CausalCache,
    "window": lambda: SlidingWindowCache(3, 6),
    "recurrent": lambda: RecurrentCache.of(StateCache({None: {"sum": StateSpec((1,), DType.F32)}})),
}
TOKENS = list(range(1, 9))


@pytest.fixture(params=KINDS)
def prefix(request: pytest.FixtureRequest) -> Iterator[PrefixCache]:
    with ml.open_backend("numpy") as backend:
        cache = KINDS[request.param]()
        cache.init(backend, DType.F32, 3, 64, 16)
        with PrefixCache(cache, 1 << 20, options=PrefixOptions(interval=4)) as opened:
            yield opened


def _evaluate(prefix: PrefixCache, seq: int, begin: int, count: int, ends: bool = True) -> None:
    """A pass over ``count`` tokens; without ``ends`` its second layer is still to come."""
    cache: Any = prefix.cache
    with cache.backend.new_context() as ctx:
        new = ctx.full((count, 1, 4), 1.0, DType.F32)
        cache.start_forward(ctx, Batch(range(begin, begin + count), [seq] * count))
        for layer in range(1 + ends):
            cache.set_layer(layer)
            cache.put(ctx, new, new)
            cache.attend(ctx, new, 1.0)
            if isinstance(cache, RecurrentCache):
                cache.update_state(ctx, "sum", ctx.full((1, 1), float(begin + count), DType.F32))


def test_no_other_thread_comes_in_while_a_pass_is_in_its_middle(prefix: PrefixCache, other: Any) -> None:
    first, second = prefix.begin(TOKENS), prefix.begin([9, 8, 7])
    _evaluate(prefix, second.seq, 0, 3)
    _evaluate(prefix, first.seq, 0, 8)
    first.extend([9])
    _evaluate(prefix, first.seq, 8, 1, ends=False)
    calls = [
        lambda: prefix.begin(TOKENS),
        lambda: prefix.longest(TOKENS),
        prefix.evict,
        prefix.clear,
        lambda: second.extend([1]),
        lambda: second.rewind(1),
        second.keep,
        second.close,
    ]
    for call in calls:
        with pytest.raises(OrderError, match="a pass of another thread is under way"):
            other(call)
    assert prefix.sessions == (first, second)
    reached = first.rewind(8)  # 0 of a state, of which none is kept there
    other(second.close)
    other(first.close)
    assert other(lambda: prefix.begin([*TOKENS, 9])).cached == reached


def test_threads_that_use_one_get_what_is_right_or_an_error(prefix: PrefixCache) -> None:
    """Each begins and ends sessions of its own as fast as it can, and evaluates in none of them wrongly."""
    lock, begun = threading.Lock(), []

    def work(i: int) -> None:
        for n in range(30):
            with (
                contextlib.suppress(OrderError, SessionLimitError),
                lock if n % 3 else contextlib.nullcontext(),
            ):
                session = prefix.begin([*TOKENS, i])
                begun.append(session.cached)
                if n % 3:
                    _evaluate(prefix, session.seq, session.cached, 9 - session.cached)
                session.close(keep=bool(n % 3))

    at_once(work, range(3))
    assert begun
    for session in prefix.sessions:
        prefix.cache.remove(session.seq, 0)
        session.close(keep=False)
    with prefix.begin([*TOKENS, 7]) as session:
        assert session.cached in (0, 4, 8)
        assert prefix.cache.offset(session.seq) == session.cached
        _evaluate(prefix, session.seq, session.cached, 9 - session.cached)


def test_turns_come_in_the_order_in_which_threads_asked() -> None:
    begun: list[int] = []
    turns, order = Turns(lambda: begun.append(threading.get_ident())), []

    def take(i: int) -> None:
        with turns, turns:  # again, as a call that makes another one
            order.append(i)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(4)]
    with turns:
        for i, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) <= i:
                pass
        with turns:
            pass
        assert not order
    with turns:  # behind all that waited
        assert order == [0, 1, 2, 3]
    for thread in threads:
        thread.join()
    assert len(begun) == 5, "each of them has come behind another one, and so has this one"


def test_a_turn_that_cannot_begin_is_the_next_ones() -> None:
    fails = [True]

    def begin() -> None:
        if fails.pop():
            raise ValueError("not now")

    turns = Turns(begin)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ValueError, match="not now"):
            pool.submit(turns.__enter__).result()
        fails.append(False)
        pool.submit(lambda: turns.__enter__().__exit__()).result(timeout=60)
    fails.append(False)
    with turns:
        pass
