"""On MLX: attention of one query over what ``get`` returns, and of eight sequences at once."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

import ml
import ml.nn
from benchmarks import cases
from benchmarks.cases import EACH, SEQUENCES
from benchmarks.record import Row, rows_of
from benchmarks.shapes import DIM, DTYPES, GROUPS, HEADS
from kvcache.bench.timing import Contender, interleave

__all__ = ["run"]

SCALE = DIM**-0.5


def run(quick: bool) -> Iterator[Row]:
    backend = ml.open_backend("mlx", device="cpu")
    for case in cases.attention(quick):
        if case.history is None:
            yield from _several(backend, case.dtype, case.rounds)
        else:
            yield from _one(backend, case.history, case.dtype, case.rounds)


class _Contiguous:
    """Attention of one query over contiguous head-major K and V, as hand-written code would call it."""

    def __init__(self, history: int, dtype: str) -> None:
        kind = getattr(mx, dtype)
        self.query = mx.random.normal((1, HEADS * GROUPS, 1, DIM)).astype(kind)
        self.k, self.v = (mx.random.normal((1, HEADS, history, DIM)).astype(kind) for _ in "kv")
        mx.eval(self.query, self.k, self.v)

    def lazy(self, k: mx.array | None = None, v: mx.array | None = None) -> mx.array:
        key, value = (self.k if k is None else k), (self.v if v is None else v)
        return mx.fast.scaled_dot_product_attention(self.query, key, value, scale=SCALE)

    def step(self, k: mx.array | None = None, v: mx.array | None = None) -> None:
        mx.eval(self.lazy(k, v))


def _one(backend: ml.Backend, history: int, dtype: str, rounds: int) -> Iterator[Row]:
    by_hand = _Contiguous(history, dtype)
    cache, ctx = cases.filled(backend, 1, history, DTYPES[dtype])
    key, value, _ = cache.get(ctx)
    k, v = (x.native.transpose(1, 0, 2)[None] for x in (key, value))
    mx.eval(k, v)
    query = ctx.from_native(by_hand.query.reshape(1, HEADS * GROUPS, DIM))
    floor = {"floor (contiguous head-major)": Contender(by_hand.step)}
    # Apart: the two read the same memory, and the second would find it in the processor's caches.
    ways = {
        "ours, over what get returns": Contender(lambda: by_hand.step(k, v)),
        "attend, its checks included": Contender(lambda: mx.eval(cache.attend(ctx, query, SCALE).native)),
    }
    for name, way in ways.items():
        trial = interleave(floor | {name: way}, rounds, seconds=10, own_threads=False)
        rows = rows_of(f"mlx {dtype}", f"attention, 1 query, {history}", trial)
        yield from (row for row in rows if row.contender == name or name.startswith("attend"))


def _several(backend: ml.Backend, dtype: str, rounds: int) -> Iterator[Row]:
    """Floor: eight calls over one sequence's contiguous tensors each (its own tensors, as in the cache)."""
    hands = [_Contiguous(EACH, dtype) for _ in range(SEQUENCES)]
    cache, ctx = cases.filled(backend, SEQUENCES, EACH, DTYPES[dtype])
    query = ctx.full((SEQUENCES, HEADS * GROUPS, DIM), 0.1, DTYPES[dtype])

    def masked() -> None:
        key, value, mask = cache.get(ctx)
        mx.eval(ml.nn.attention(ctx, query, key, value, mask, SCALE).native)

    contenders = {
        "floor (8 calls, contiguous)": Contender(lambda: mx.eval([hand.lazy() for hand in hands])),
        "ours, attend": Contender(lambda: mx.eval(cache.attend(ctx, query, SCALE).native)),
        "one masked call over all cells": Contender(masked),
    }
    trial = interleave(contenders, rounds, warmup=2, seconds=30, own_threads=False)
    yield from rows_of(f"mlx {dtype}", f"attention, {SEQUENCES} sequences of {EACH}", trial)
