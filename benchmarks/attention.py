"""Attention of one query over what ``get`` returns, and of eight sequences at once, on PyTorch and MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
import ml.nn
from benchmarks.put_get import DTYPES, GROUPS, Framework, opened
from benchmarks.report import Row, rows_of
from kvcache import Batch, CausalCache
from kvcache.testing.bench import DIM, HEADS, Contender

SCALE = DIM**-0.5
SEQUENCES, EACH = 8, 4096
"""Sequences that are attended to at once, and tokens of each."""
CHUNK, PARTS, ROOM = 512, 7, 256


@dataclass(frozen=True, slots=True)
class Hand:
    """Attention of one query over contiguous head-major K and V, as hand-written code would call it.

    ``attend(query, k, v)`` may be lazy, ``done`` waits for what it gives.
    """

    query: Any
    k: Any
    v: Any
    attend: Callable[[Any, Any, Any], Any]
    done: Callable[[Any], object]

    def lazy(self) -> Any:
        return self.attend(self.query, self.k, self.v)

    def over(self, k: ml.Tensor, v: ml.Tensor) -> Contender:
        """The same call over tensors of a cache, (tokens, heads, dim)."""
        theirs = [x.native.swapaxes(0, 1)[None] for x in (k, v)]
        self.done(theirs)
        return Contender(lambda: self.done(self.attend(self.query, *theirs)))


def by_hand(on: Framework, history: int, dtype: str) -> Hand:
    if on.eager:
        contiguous = on.hand.Contiguous(history, HEADS, GROUPS, DIM, dtype)
        call = lambda _, k, v: contiguous.step(k, v)  # noqa: E731
        return Hand(contiguous.query, contiguous.k, contiguous.v, call, lambda found: found)
    import mlx.core as mx

    kind = getattr(mx, dtype)
    query = mx.random.normal((1, HEADS * GROUPS, 1, DIM)).astype(kind)
    k, v = (mx.random.normal((1, HEADS, history, DIM)).astype(kind) for _ in "kv")
    mx.eval(query, k, v)
    call = lambda query, k, v: mx.fast.scaled_dot_product_attention(query, k, v, scale=SCALE)  # noqa: E731
    return Hand(query, k, v, call, mx.eval)


def run(quick: bool, framework: str) -> Iterator[Row]:
    backend, on = opened(framework)
    for dtype in DTYPES:
        for history in (1024,) if quick else (1024, 8192, 32768):
            yield from _one(backend, on, history, dtype, 20 if quick or history > 8192 else 60)
        yield from _several(backend, on, dtype, 3 if quick else 12)


def _one(backend: ml.Backend, on: Framework, history: int, dtype: str, rounds: int) -> Iterator[Row]:
    hand = by_hand(on, history, dtype)
    made = filled(backend, 1, history, DTYPES[dtype])
    cache, ctx = made.cache, made.ctx
    key, value, _ = cache.get(ctx)
    query = ctx.from_native(hand.query.reshape(1, HEADS * GROUPS, DIM))
    floor = {"floor (contiguous head-major)": Contender(lambda: hand.done(hand.lazy()))}
    # Apart: the two read the same memory, and the second would find it in the processor's caches.
    ways = {
        "ours, over what get returns": hand.over(key, value),
        "attend, its checks included": Contender(lambda: hand.done(cache.attend(ctx, query, SCALE).native)),
    }
    for name, way in ways.items():
        trial = on.interleave(floor | {name: way}, rounds, seconds=10)
        rows = rows_of(f"{on.name} {dtype}", f"attention, 1 query, {history}", trial)
        yield from (row for row in rows if row.contender == name or name.startswith("attend"))


def _several(backend: ml.Backend, on: Framework, dtype: str, rounds: int) -> Iterator[Row]:
    """Floor: eight calls over one sequence's contiguous tensors each (its own tensors, as in the cache)."""
    hands = [by_hand(on, EACH, dtype) for _ in range(SEQUENCES)]
    done = hands[0].done
    made = filled(backend, SEQUENCES, EACH, DTYPES[dtype])
    cache, ctx = made.cache, made.ctx
    query = ctx.full((SEQUENCES, HEADS * GROUPS, DIM), 0.1, DTYPES[dtype])

    def masked() -> object:
        key, value, mask = cache.get(ctx)
        return done(ml.nn.attention(ctx, query, key, value, mask, SCALE).native)

    contenders = {
        "floor (8 calls, contiguous)": Contender(lambda: done([hand.lazy() for hand in hands])),
        "ours, attend": Contender(lambda: done(cache.attend(ctx, query, SCALE).native)),
        "one masked call over all cells": Contender(masked),
    }
    trial = on.interleave(contenders, rounds, warmup=2, seconds=30)
    yield from rows_of(f"{on.name} {dtype}", f"attention, {SEQUENCES} sequences of {EACH}", trial)


@dataclass(frozen=True, slots=True)
class Filled:
    """A cache in a pass of one further token of each sequence, the last of ``each`` that it has."""

    cache: CausalCache
    ctx: ml.Context
    parts: list[ml.Tensor]
    """Random tokens (CHUNK, heads, dim), of which all that is stored is made; keys are values."""
    each: int

    def stored(self, seq: int) -> Iterator[ml.Tensor]:
        """What a sequence has been given, part by part."""
        for number, begin in enumerate(range(0, self.each - 1, CHUNK)):
            part = self.parts[(seq + number) % len(self.parts)]
            yield part.slice(self.ctx, 0, 0, min(CHUNK, self.each - 1 - begin))
        yield self.parts[0].slice(self.ctx, 0, seq, seq + 1)

    def token(self, sequences: int) -> ml.Tensor:
        """The last token of each."""
        return self.parts[0].slice(self.ctx, 0, 0, sequences)


def filled(backend: ml.Backend, sequences: int, each: int, dtype: ml.DType) -> Filled:
    """At most CHUNK sequences of ``each`` random tokens. Little of it comes from the host."""
    ctx, cache, random = backend.new_context(), CausalCache(), np.random.default_rng(0)
    # Room beyond the history: what get returns is then strided, as it is in a decoding cache.
    cache.init(backend, dtype, sequences, each + ROOM, CHUNK)
    hosts = (random.normal(size=(CHUNK, HEADS, DIM)).astype(np.float32) for _ in range(PARTS))
    found = Filled(cache, ctx, [ctx.from_numpy(host).cast(ctx, dtype) for host in hosts], each)

    def put(part: ml.Tensor, positions: Sequence[int], owners: Sequence[int]) -> None:
        cache.start_forward(ctx, Batch(positions, owners))
        cache.put(ctx, part, part)
        ctx.compute()

    for seq in range(sequences):
        begin = 0
        for part in list(found.stored(seq))[:-1]:
            count = part.shape[0]
            put(part, range(begin, begin + count), [seq] * count)
            begin += count
    put(found.token(sequences), [each - 1] * sequences, range(sequences))
    return found
