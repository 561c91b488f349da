"""What a PrefixCache takes at most, by every allocation of NumPy and Python, and every file of its folder."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvcache
import ml
from kvcache import Batch, HostTier, PrefixCache, PrefixOptions
from kvcache.stores import FileStore
from kvcache.stores.buffers import Buffer

from ...rigs.memory import peak_memory

KIB, MIB = 1 << 10, 1 << 20
DIM = 2048
TOKEN = 2 * DIM * 4
"""Bytes of K and V of a token."""
BLOCK = 16
PAGE = (32 + 16) * (TOKEN + 8)
"""Bytes of the largest entry of a store: the tokens of an interval and a window, their positions included."""
BACKLOG, AHEAD = 2 * MIB, 2 * MIB
OPTIONS = PrefixOptions(interval=32, backlog=BACKLOG, in_flight=MIB, read_ahead=AHEAD)
HOST, FOLDER = 8 * MIB, 12 * MIB
BOOKS = 2 * MIB
"""For the tree, its queues, the tokens, and what a call needs for a moment."""


def make_cache(kind: str, backend: ml.Backend) -> Any:
    full = kvcache.CausalCache()
    cache: Any = full
    if kind == "window":
        cache = kvcache.WrapperCache(kvcache.SlidingWindowCache(16), full)
    elif kind == "states":
        cache = kvcache.RecurrentCache((), (16 * DIM,))
    cache.init(backend, ml.DType.F32, 2, 256, 64)
    return cache


def evaluate(cache: Any, kind: str, backend: ml.Backend, session: kvcache.Session) -> None:
    for part in session.chunks(64):
        at, count = cache.offset(session.seq), len(part)
        with backend.new_context() as ctx:
            cache.start_forward(ctx, Batch(range(at, at + count), [session.seq] * count))
            key = ctx.zeros((count, 1, DIM), ml.DType.F32)
            for layer in range(2 if kind == "window" else 1):
                if kind == "window":
                    cache.set_layer_type(layer)
                cache.set_layer(layer)
                cache.put(ctx, key, key)
            if kind == "states":
                cache.set_recurrent_state(ctx, 1, cache.recurrent_state(ctx, 1))
        session.keep()


class WatchedStore(FileStore):
    """``most`` is what its files came to, looked at after each that was written."""

    most = 0

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        done = super().put(key, parts)
        total = 0
        for path in self.path.rglob("*.entry"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        self.most = max(self.most, total)
        return done


@pytest.mark.parametrize("kind", ["full", "window", "states"])
def test_random_traffic_stays_within_the_sum_of_the_limits(kind: str, tmp_path: Path) -> None:
    rnd, largest = random.Random(7), 0
    histories = [[i << 20, *range(1, 40)] for i in range(24)]
    with ml.open_backend("numpy") as backend:
        cache = make_cache(kind, backend)
        store = WatchedStore(tmp_path, FOLDER, durable=False)
        tiers: list[Any] = [HostTier(HOST), store]
        with (
            store,
            PrefixCache(
                cache, tiers=tiers, identity={"model": "m"}, block_size=BLOCK, options=OPTIONS
            ) as prefix,
        ):
            with prefix.begin(histories[0]) as session:  # the cells are there then
                evaluate(cache, kind, backend, session)
            with peak_memory() as most:
                for turn in range(60):
                    history = histories[min(int(rnd.expovariate(0.15)), 23)]
                    if len(history) > 200 or rnd.random() < 0.1:
                        del history[rnd.randrange(20, len(history)) :]
                    history += [turn + 1] * rnd.randrange(1, 40)
                    ahead = prefix.prefetch(history) if rnd.random() < 0.5 else None
                    with prefix.begin(history) as session:
                        evaluate(cache, kind, backend, session)
                    if ahead is not None:
                        ahead.release()
                    nbytes = prefix.nbytes
                    largest = max(largest, nbytes["host"])
                    assert nbytes["host"] <= HOST
                    assert nbytes["writing"] <= BACKLOG + PAGE
                    assert nbytes["ahead"] <= AHEAD
                peak = most()
            limits = prefix.limits
    assert largest > HOST // 2
    assert FOLDER // 2 < store.most <= FOLDER + FOLDER // 100
    assert limits.keys() == {"leaving", "host", "writing", "ahead", *(["copies"] * (kind != "full"))}
    assert peak <= sum(limit or 0 for limit in limits.values()) + PAGE + BOOKS


def test_a_flush_holds_no_more_than_the_backlog(tmp_path: Path) -> None:
    count, size = 8, 32 * TOKEN
    with ml.open_backend("numpy") as backend:
        cache = make_cache("full", backend)
        with PrefixCache(cache, tiers=[tmp_path], identity={"model": "m"}, backlog=size + KIB) as prefix:
            for i in range(count):
                with prefix.begin([i << 20, *range(1, 32)]) as session:
                    evaluate(cache, "full", backend, session)
            with peak_memory() as most:
                prefix.flush()
                assert most() <= 4 * size
