"""Peak memory over the cache's own bytes, while decoding and while a prompt of 8k is stored in chunks."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import ml
from benchmarks.report import Row
from kvcache import Batch, CausalCache
from kvcache.testing.bench import DIM, HEADS

LAYERS, CAPACITY, CHUNK = 8, 16384, 512


def run(quick: bool, _: str) -> Iterator[Row]:
    """The process's own peak: the part runs in a process of its own, and warms up with a small cache."""
    for name in ("torch", "mlx"):
        with ml.open_backend(name, device="cpu") as backend:
            yield from _measure(backend, quick)


def _measure(backend: ml.Backend, quick: bool) -> Iterator[Row]:
    with backend.new_context() as ctx:
        chunk = ctx.full((CHUNK, HEADS, DIM), 0.5, ml.DType.F32)
        token = ctx.full((1, HEADS, DIM), 0.5, ml.DType.F32)
        store(_cache(backend, 1024), ctx, chunk, 0)
        gc.collect()
        cache = _cache(backend, CAPACITY)
        base = resident()
        reset_peak()
        for begin in range(0, 8192, CHUNK):
            store(cache, ctx, chunk, begin)
        own = cache.nbytes
        prefill = peak() - base
        activations = 2 * chunk.nbytes
        target = (own + activations) / own
        yield _row(backend, "prefill of 8192 in chunks of 512", prefill, own, target)
        steps = 200 if quick else 2000
        reset_peak()
        for i in range(steps):
            store(cache, ctx, token, 8192 + i)
        yield _row(backend, f"decode, {steps} steps at 8192", peak() - base, own, 1.02)


def _cache(backend: ml.Backend, capacity: int) -> CausalCache:
    cache = CausalCache()
    cache.init(backend, ml.DType.F32, 1, capacity, CHUNK)
    return cache


def store(cache: CausalCache, ctx: ml.Context, tokens: ml.Tensor, begin: int, seq: int = 0) -> None:
    """A pass of all layers, each of which puts these tokens and gets all."""
    count = tokens.shape[0]
    cache.start_forward(ctx, Batch(range(begin, begin + count), [seq] * count))
    for layer in range(LAYERS):
        cache.set_layer(layer)
        cache.put(ctx, tokens, tokens)
        cache.get(ctx)
    ctx.compute()


def _row(backend: ml.Backend, measurement: str, peak: int, own: int, target: float) -> Row:
    return Row(
        f"{backend.name} float32", f"memory, {measurement}", "ours", peak / 2**20, 0, 0, peak / own, "MiB",
        target=round(target, 4), note=f"the cache holds {own / 2**20:.0f} MiB",
    )  # fmt: skip


def resident() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak()


def reset_peak() -> None:
    """Let the high-water mark start anew; where the system cannot, it is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        gc.collect()


def peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
