"""``start_forward`` and what the first ``get`` or ``attend`` of a pass adds: slots, metadata, masks, plans.

On NumPy: what is timed is what the host does before a device begins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np

import ml
from benchmarks.report import Row, summary
from kvcache import Batch, CausalCache, SlidingWindowCache
from kvcache.testing.bench import Round

GO = {
    (1024, 1, 1): 2.7, (8192, 1, 1): 20, (32768, 1, 1): 78, (131072, 1, 1): 290,
    (1024, 1, 512): 1600, (8192, 1, 512): 10000, (32768, 1, 512): 31000, (131072, 1, 512): 125000,
    (1024, 8, 8): 21, (8192, 8, 8): 130, (32768, 8, 8): 399, (131072, 8, 8): 2467,
}  # fmt: skip
"""Microseconds of Ollama's Go causal cache, by (history, sequences, tokens), measured once elsewhere."""


def run(quick: bool, _: str) -> Iterator[Row]:
    for elide in (False, True):
        for (history, sequences, tokens), go in GO.items():
            if quick and history not in (1024, 8192):
                continue
            rounds = 10 if tokens > 8 else 60
            times = _measure(history, sequences, tokens, elide, rounds)
            yield summary(
                "numpy" + (", elided" if elide else ""),
                f"start_forward, {sequences} x {tokens // sequences} tokens, {history}",
                "ours",
                times,
                ratio=statistics.median(times) / go,
                dropped=rounds - len(times),
                target=1.0 if history >= 8192 else None,
                note=f"Go {go:g} us",
            )
    for sequences in (1, 64) if quick else (1, 64, 256):
        for name, cache in (("all", CausalCache()), ("a window of 512", SlidingWindowCache(512))):
            named = f"start_forward and plan, {sequences} x 1 tokens, {name} of 600"
            yield summary("numpy", named, "ours", _plan(cache, sequences, 600))
    for history in (8192, 131072):
        spent = [_write_bytes(history) for _ in range(20)]
        yield summary("numpy", f"writing a mask's bytes, 8 x {history}", "numpy.full", spent)


def _write_bytes(history: int) -> float:
    start = time.perf_counter()
    np.full((8, history), -np.inf, dtype=np.float32)
    return (time.perf_counter() - start) * 1e6


def _measure(history: int, sequences: int, tokens: int, elide: bool, rounds: int) -> list[float]:
    """Microseconds of start_forward and the plan and mask of get; no tensor work beyond the mask.

    The planning is asked of the pass itself: ``get`` would add the views, or a gathering, of K and V.
    """
    backend = ml.open_backend("numpy")
    each = history // sequences
    cache = CausalCache()
    cache.set_config(ml.CacheConfig(elide_mask=elide))
    times = []
    with backend.new_context() as ctx:
        room = tokens * 2 if tokens > 8 else 2 * rounds
        cache.init(backend, ml.DType.F32, sequences, each + room, 512)
        one, few = ctx.zeros((each, 1, 1), ml.DType.F32), ctx.zeros((tokens, 1, 1), ml.DType.F32)
        for seq in range(sequences):
            cache.start_forward(ctx, Batch(range(each), [seq] * each))
            cache.put(ctx, one, one)
        for i in range(rounds + 3):
            batch = _batch(each, sequences, tokens, i)
            watch = Round()
            start = time.perf_counter()
            cache.start_forward(ctx, batch)
            assert cache._pass is not None
            cache._pass.reading.shared(ctx)
            elapsed = time.perf_counter() - start
            if i >= 3 and not watch.disturbed():
                times.append(elapsed * 1e6)
            cache.put(ctx, few, few)
            if tokens > 8:
                cache.remove(0, each)
    return times or [elapsed * 1e6]


def _plan(cache: CausalCache, sequences: int, each: int) -> list[float]:
    """Microseconds of start_forward and the plan for a kernel that attends for the whole batch at once."""
    backend, rounds, times = ml.open_backend("numpy"), 60, []
    with backend.new_context() as ctx:
        cache.init(backend, ml.DType.F32, sequences, each + rounds, 512)
        for seq in range(sequences):
            for begin in range(0, each, 512):
                tokens = range(begin, min(begin + 512, each))
                cache.start_forward(ctx, Batch(tokens, [seq] * len(tokens)))
        for i in range(rounds):
            batch = Batch([each + i] * sequences, list(range(sequences)))
            start = time.perf_counter()
            cache.start_forward(ctx, batch)
            assert cache._pass is not None
            cache._pass.reading.kernel(256)
            times.append((time.perf_counter() - start) * 1e6)
    return times[3:]


def _batch(each: int, sequences: int, tokens: int, i: int) -> Batch:
    if sequences > 1:
        return Batch([each + i] * sequences, list(range(sequences)))
    first = each if tokens > 8 else each + i
    return Batch(list(range(first, first + tokens)), [0] * tokens)
