"""``start_forward`` and the mask of ``get``, on NumPy: slot search, metadata, masks; no tensor work."""

from __future__ import annotations

import statistics
import time

import ml
from kvcache import Batch, CausalCache

__all__ = ["GO", "measure"]

GO = {
    (1024, 1, 1): 2.7, (8192, 1, 1): 20, (32768, 1, 1): 78, (131072, 1, 1): 290,
    (1024, 1, 512): 1600, (8192, 1, 512): 10000, (32768, 1, 512): 31000, (131072, 1, 512): 125000,
    (1024, 8, 8): 21, (8192, 8, 8): 130, (32768, 8, 8): 399, (131072, 8, 8): 2467,
}  # fmt: skip
"""Microseconds of Ollama's Go causal cache, by (history, sequences, tokens), measured elsewhere once."""


def measure(history: int, sequences: int, tokens: int, elide: bool) -> tuple[float, float]:
    """Median microseconds of start_forward, and of the mask that the first ``get`` adds."""
    rounds = 15 if tokens > 8 else 60
    backend = ml.open_backend("numpy")
    each = history // sequences
    cache = CausalCache()
    cache.set_config(ml.CacheConfig(elide_mask=elide))
    with backend.new_context() as ctx:
        cache.init(backend, ml.DType.F32, sequences, each + tokens * (rounds + 1), 512)
        one = ctx.zeros((each, 1, 1), ml.DType.F32)
        for seq in range(sequences):
            cache.start_forward(ctx, Batch(range(each), [seq] * each))
            cache.put(ctx, one, one)
        few = ctx.zeros((tokens, 1, 1), ml.DType.F32)
        begun, masked = [], []
        for i in range(rounds):
            batch = _batch(each, sequences, tokens, i)
            start = time.perf_counter()
            cache.start_forward(ctx, batch)
            middle = time.perf_counter()
            cache.get(ctx)
            masked.append(time.perf_counter() - middle)
            begun.append(middle - start)
            cache.put(ctx, few, few)
            if tokens > 8:
                cache.remove(0, each)
    return statistics.median(begun) * 1e6, statistics.median(masked) * 1e6


def _batch(each: int, sequences: int, tokens: int, i: int) -> Batch:
    if sequences > 1:
        return Batch([each + i] * sequences, list(range(sequences)))
    first = each if tokens > 8 else each + i
    return Batch(list(range(first, first + tokens)), [0] * tokens)
