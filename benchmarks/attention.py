"""Attention of one query over what ``get`` returns, and of eight sequences at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml
import ml.nn
from benchmarks.record import Row, rows_of
from benchmarks.shapes import DIM, DTYPES, GROUPS, HEADS
from kvcache import Batch, CausalCache
from kvcache.bench_timing import Contender, interleave
from kvcache.integrations import bench_torch

__all__ = ["run"]

SEQUENCES, EACH = 8, 4096


def run(quick: bool) -> Iterator[Row]:
    bench_torch.fix_threads(1)
    backend = ml.open_backend("torch", device="cpu")
    for dtype in DTYPES:
        for history in (1024,) if quick else (1024, 8192, 32768):
            yield from _one(backend, history, dtype, 20 if quick else 60 if history < 32768 else 20)
        yield from _several(backend, dtype, 3 if quick else 12)


def _filled(backend: ml.Backend, sequences: int, each: int, dtype: ml.DType) -> tuple[CausalCache, Any]:
    """A cache of ``sequences`` with random tokens, in a pass of one further token each."""
    import torch

    ctx = backend.new_context()
    cache = CausalCache()
    # Room beyond the history: what get returns is then strided, as it is in a decoding cache.
    cache.init(backend, dtype, sequences, each + 256, 512)
    for seq in range(sequences):
        for begin in range(0, each - 1, 512):
            count = min(512, each - 1 - begin)
            part = ctx.from_native(torch.randn(count, HEADS, DIM)).cast(ctx, dtype)
            cache.start_forward(ctx, Batch(range(begin, begin + count), [seq] * count))
            cache.put(ctx, part, part)
    cache.start_forward(ctx, Batch([each - 1] * sequences, list(range(sequences))))
    last = ctx.from_native(torch.randn(sequences, HEADS, DIM)).cast(ctx, dtype)
    cache.put(ctx, last, last)
    return cache, ctx


def _one(backend: ml.Backend, history: int, dtype: str, rounds: int) -> Iterator[Row]:
    by_hand = bench_torch.Contiguous(history, HEADS, GROUPS, DIM, dtype)
    cache, ctx = _filled(backend, 1, history, DTYPES[dtype])
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
    cache, ctx = _filled(backend, SEQUENCES, EACH, DTYPES[dtype])
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
