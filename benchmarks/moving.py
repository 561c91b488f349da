"""What moving tokens takes beside the cache: removing some from the middle, and defragmentation.

    python -m benchmarks.moving [--backend torch] [--rounds 5]

A cache of 8 layers holds 8,192 tokens in F32: 64 MiB of keys and as much of values, of 2 heads of 128.
*extra* is the growth of the process's own peak during the call, *time* the median. Each line is measured in a
process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import ml
from benchmarks.memory import peak, reset_peak, resident, store
from kvcache import CausalCache
from ml import nn

TOKENS, HEADS, DIM, MAX_BATCH = 8192, 2, 128, 512


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moving")
    parser.add_argument("--backend", action="append", help="repeatable (numpy, torch, mlx)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.backend or ["numpy", "torch", "mlx"]
    if options.run:
        print(f"| {names[0]}, {options.run} | {_measure(names[0], options.run, options.rounds)} |")
        return
    print("| | extra | time |\n|---|---|---|", flush=True)
    for name in names:
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.moving", "--backend", name, "--run", way]
            subprocess.run([*command, "--rounds", str(options.rounds)], check=True)


def _measure(name: str, way: str, rounds: int) -> str:
    """Extra bytes of the first call, and the median time of all."""
    options = {} if name == "numpy" else {"device": "cpu"}
    with ml.open_backend(name, **options) as backend, backend.new_context() as ctx:
        _fill(_cache(backend, 64), ctx, 64)  # warms up
        cache, times, extra = _cache(backend, TOKENS), [], 0
        for number, call in enumerate(WAYS[way](cache, ctx, rounds)):
            base = resident()
            reset_peak()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
            extra = extra if number else peak() - base
        return f"{extra / 2**20:.0f} MiB | {1e3 * statistics.median(times):.0f} ms"


def _cache(backend: ml.Backend, capacity: int) -> CausalCache:
    cache = CausalCache(nn.rope_shift(nn.RopeSpec(DIM)))
    cache.init(backend, ml.DType.F32, 2, capacity, MAX_BATCH)
    return cache


def _fill(cache: CausalCache, ctx: ml.Context, end: int, seq: int = 0) -> None:
    """Put tokens from where a sequence ends up to ``end``."""
    while (begin := cache.offset(seq)) < end:
        count = min(MAX_BATCH, end - begin)
        store(cache, ctx, ctx.full((count, HEADS, DIM), 0.5, ml.DType.F32), begin, seq)


def _removing(cache: CausalCache, ctx: ml.Context, rounds: int) -> Iterator[Callable[[], None]]:
    """One token goes, all but 16 of the others move."""
    for _ in range(rounds):
        _fill(cache, ctx, TOKENS)
        yield lambda: _finished(cache, ctx, lambda: cache.remove(0, 16, 17))


def _defragmenting(cache: CausalCache, ctx: ml.Context, rounds: int) -> Iterator[Callable[[], None]]:
    """A sequence that began as a copy lies where the other was, and goes home."""
    _fill(cache, ctx, TOKENS, seq=1)  # so that the system has given all cells their memory
    for _ in range(rounds):
        cache.remove(1, 0)
        _fill(cache, ctx, 16)
        cache.copy_prefix(0, 1, 16)
        cache.remove(0, 0)
        _fill(cache, ctx, TOKENS, seq=1)
        yield lambda: _finished(cache, ctx, cache.defrag)


def _finished(cache: CausalCache, ctx: ml.Context, call: Callable[[], None]) -> None:
    """``call``, and what it left to be computed."""
    call()
    for layer in cache.storage.buffers.values():
        layer.key.read(ctx, 0, 1).to_numpy()


WAYS = {"remove one token near the start": _removing, "defrag": _defragmenting}


if __name__ == "__main__":
    main()
