"""Attention of one query over what ``get`` returns, and of eight sequences at once."""

from __future__ import annotations

from collections.abc import Iterator

import ml
import ml.nn
from benchmarks import cases
from benchmarks.cases import EACH, SEQUENCES
from benchmarks.record import Row, rows_of
from benchmarks.shapes import DIM, DTYPES, GROUPS, HEADS
from kvcache.bench.timing import Contender, interleave
from kvcache.integrations import bench_torch

__all__ = ["run"]


def run(quick: bool) -> Iterator[Row]:
    bench_torch.fix_threads(1)
    backend = ml.open_backend("torch", device="cpu")
    for case in cases.attention(quick):
        if case.history is None:
            yield from _several(backend, case.dtype, case.rounds)
        else:
            yield from _one(backend, case.history, case.dtype, case.rounds)


def _one(backend: ml.Backend, history: int, dtype: str, rounds: int) -> Iterator[Row]:
    by_hand = bench_torch.Contiguous(history, HEADS, GROUPS, DIM, dtype)
    cache, ctx = cases.filled(backend, 1, history, DTYPES[dtype])
    key, value, _ = cache.get(ctx)
    k, v = (x.native.transpose(0, 1).unsqueeze(0) for x in (key, value))
    query = ctx.from_native(by_hand.query.reshape(1, HEADS * GROUPS, DIM))
    scale = DIM**-0.5
    floor = {"floor (contiguous head-major)": Contender(by_hand.step)}
    # Apart: the two read the same memory, and the second would find it in the processor's caches.
    ways = {
        "ours, over what get returns": Contender(lambda: by_hand.step(k, v)),
        "attend, its checks included": Contender(lambda: cache.attend(ctx, query, scale)),
    }
    for name, way in ways.items():
        trial = interleave(floor | {name: way}, rounds, seconds=10)
        rows = rows_of(f"torch {dtype}", f"attention, 1 query, {history}", trial)
        yield from (row for row in rows if row.contender == name or name.startswith("attend"))


def _several(backend: ml.Backend, dtype: str, rounds: int) -> Iterator[Row]:
    """Floor: eight calls over one sequence's contiguous tensors each (its own tensors, as in the cache)."""
    hands = [bench_torch.Contiguous(EACH, HEADS, GROUPS, DIM, dtype) for _ in range(SEQUENCES)]
    cache, ctx = cases.filled(backend, SEQUENCES, EACH, DTYPES[dtype])
    query = ctx.full((SEQUENCES, HEADS * GROUPS, DIM), 0.1, DTYPES[dtype])
    scale = DIM**-0.5

    def masked() -> object:
        key, value, mask = cache.get(ctx)
        return ml.nn.attention(ctx, query, key, value, mask, scale)

    trial = interleave(
        {
            "floor (8 calls, contiguous)": Contender(lambda: [hand.step() for hand in hands]),
            "ours, attend": Contender(lambda: cache.attend(ctx, query, scale)),
            "one masked call over all cells": Contender(masked),
        },
        rounds,
        warmup=2,
        seconds=30,
    )
    yield from rows_of(f"torch {dtype}", f"attention, {SEQUENCES} sequences of {EACH}", trial)
