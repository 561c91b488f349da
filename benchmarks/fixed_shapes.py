"""What a pass of fixed shapes costs: ``python -m benchmarks.fixed_shapes``.

Many sequences in a cache with room for much more than they store; one token of each. By tables
(``fixed_context``), and without fixed shapes, on PyTorch's CPU with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

import ml
from kvcache import Batch, CausalCache
from kvcache.testing.bench.timing import machine

HEADS, KV, DIM = 8, 2, 64
CONFIGS = {
    "fixed": ml.CacheConfig(fixed_context=128, mask_dtype=ml.DType.F16),
    "not fixed": ml.CacheConfig(),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fixed_shapes", description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--capacity", type=int, default=4096, help="of each sequence")
    parser.add_argument("--stored", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = f"{options.sequences} sequences, capacity {options.capacity}"
    print(f"{machine()}; {sizes}, F16, {HEADS} over {KV} heads of {DIM}")
    print("| stored | shapes | start_forward, ms | a layer, ms | uploaded |")
    print("|---|---|---|---|---|")
    for stored in options.stored:
        with ml.open_backend("torch", device="cpu") as backend, backend.new_context() as ctx:
            steps = {
                name: _step(ctx, backend, config, options.sequences, options.capacity, stored)
                for name, config in CONFIGS.items()
            }
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
            for position in range(stored, stored + options.rounds):
                for name, (step, _) in steps.items():
                    times[name].append(step(position))
            for name, found in times.items():
                start, layer = (f"{_median(part)}" for part in zip(*found, strict=True))
                print(f"| {stored:,} | {name} | {start} | {layer} | {steps[name][1]()} |", flush=True)


def _median(seconds: tuple[float, ...]) -> str:
    """Milliseconds, with the least and the most."""
    return f"{statistics.median(seconds) * 1e3:.2f} [{min(seconds) * 1e3:.2f}, {max(seconds) * 1e3:.2f}]"


def _step(
    ctx: ml.Context, backend: ml.Backend, config: ml.CacheConfig, sequences: int, capacity: int, stored: int
) -> tuple[Callable[[int], tuple[float, float]], Callable[[], str]]:
    """A step at a position, which gives its seconds of ``start_forward`` and of a layer; bytes uploaded."""
    cache = CausalCache()
    cache.set_config(config)
    cache.init(backend, ml.DType.F16, sequences, capacity, sequences)
    for seq in range(sequences):
        for begin in range(0, stored, sequences):  # as many tokens as in a step: the same tensors
            count = min(sequences, stored - begin)
            history = ctx.full((count, KV, DIM), 0.5, ml.DType.F16)
            cache.start_forward(ctx, Batch(range(begin, begin + count), [seq] * count))
            cache.put(ctx, history, history)
    random = np.random.default_rng(0)
    query = ctx.from_numpy(random.random((sequences, HEADS, DIM)).astype(np.float16))
    token = ctx.from_numpy(random.random((sequences, KV, DIM)).astype(np.float16))

    def step(position: int) -> tuple[float, float]:
        began = time.perf_counter()
        cache.start_forward(ctx, Batch([position] * sequences, range(sequences)))
        started = time.perf_counter()
        cache.put(ctx, token, token)
        cache.attend(ctx, query, DIM**-0.5)
        return started - began, time.perf_counter() - started

    def uploaded() -> str:
        if not config.fixed_context:
            return ""
        return f"{sum(tensor.nbytes for tensor in cache.graph_rows(ctx, 0)[2:]) / 1e6:.2f} MB"

    return step, uploaded


if __name__ == "__main__":
    main()
