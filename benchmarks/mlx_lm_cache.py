"""Our prompt caches beside mlx-lm's own, inside mlx-lm: ``python -m benchmarks.mlx_lm_cache``.

What one decoded token costs in the cache alone, per layer (8 KV heads of 128, four layers), each step waited
for, and with one step in flight while the next is built, as ``generate_step`` does it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from kvcache.integrations.mlx_lm import Attention, CachePool

__all__ = ["main"]

LAYERS, HEADS, DIM = 4, 8, 128


def times(histories: list[int], count: int) -> None:
    print("| history | mlx-lm's, waited for | ours | mlx-lm's, one in flight | ours |")
    print("|---|---|---|---|---|")
    for history in histories:
        found = {}
        for name in ("theirs", "ours"):
            entries = _filled(name, history, 3 * count)
            for in_flight in (False, True):
                found[name, in_flight] = _steps(entries, count, in_flight)
            del entries
        row = [found[name, flight] for flight in (False, True) for name in ("theirs", "ours")]
        print(f"| {history} | {' | '.join(f'{x:,.0f} us' for x in row)} |")


def _filled(name: str, history: int, room: int) -> list[Any]:
    layers = [Attention(None, HEADS, DIM, DIM, mx.float32)] * LAYERS
    entries = [KVCache() for _ in layers]
    if name == "ours":
        entries = CachePool(layers, capacity=history + room).make_prompt_cache()
    x = mx.zeros((1, HEADS, history, DIM))
    for entry in entries:
        mx.eval(entry.update_and_fetch(x, x))
    return entries


def _steps(entries: list[Any], count: int, in_flight: bool) -> float:
    """The median over the steps, microseconds per layer."""
    taken, before, x = [], None, mx.ones((1, HEADS, 1, DIM))
    for _ in range(count):
        start = time.perf_counter()
        entries[0].make_mask(1, return_array=False, window_size=None)
        for entry in entries:
            keys, values = entry.update_and_fetch(x, x)
            x = keys[..., -1:, :] * 0.5 + values[..., :1, :]
            del keys, values
        if in_flight:
            mx.async_eval(x)
            if before is not None:
                mx.eval(before)
            before = x
        else:
            mx.eval(x)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[3:])) * 1e6 / len(entries)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mlx_lm_cache", description=__doc__)
    parser.add_argument("--histories", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    times(options.histories, options.steps)


if __name__ == "__main__":
    main()
