"""The slowest of 5,000 decoding steps from an empty cache of 32k: growth, page faults, garbage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml
from benchmarks.record import Row
from benchmarks.shapes import DIM, DTYPES, HEADS
from kvcache import Batch, CausalCache
from kvcache.bench.timing import Round
from kvcache.integrations import bench_torch

__all__ = ["run"]

CAPACITY = 32768
STEPS = 5000


def run(quick: bool) -> Iterator[Row]:
    bench_torch.fix_threads(1)
    backend = ml.open_backend("torch", device="cpu")
    for dtype in DTYPES:
        yield from _measure(backend, dtype, 1000 if quick else STEPS)


class Decoding:
    """One layer, from position 0; the reserve pass has allocated and touched its buffers."""

    def __init__(self, backend: ml.Backend, dtype: ml.DType) -> None:
        self.ctx = backend.new_context()
        self.cache = CausalCache()
        self.cache.init(backend, dtype, 1, CAPACITY, 1)
        self.token = self.ctx.full((HEADS, 1, DIM), 1, dtype).permute(self.ctx, 1, 0, 2)
        self.cache.start_forward(self.ctx, Batch([0], [0]), reserve=True)
        self.cache.put(self.ctx, self.token, self.token)
        self.at = -1

    def start(self) -> None:
        self.at += 1
        self.cache.start_forward(self.ctx, Batch([self.at], [0]))

    def step(self) -> Any:
        self.cache.put(self.ctx, self.token, self.token)
        key, value, _ = self.cache.get(self.ctx)
        return key.native, value.native


def _measure(backend: ml.Backend, dtype: str, steps: int) -> Iterator[Row]:
    ours = Decoding(backend, DTYPES[dtype])
    floor = bench_torch.Strided(0, 1, HEADS, DIM, dtype, grow=True)
    floor.resize(CAPACITY)
    names = ("floor (as_strided)", "ours", "ours, with start_forward")
    times: dict[str, list[float]] = {name: [] for name in names}
    dropped = 0
    for i in range(steps):
        watch = Round()
        floor.at = i
        by_hand = _timed(lambda: floor.layer(*floor.layers[0]))
        started = _timed(ours.start)
        mine = _timed(ours.step)
        if watch.disturbed():
            dropped += 1
            continue
        for name, value in zip(names, (by_hand, mine, started + mine), strict=True):
            times[name].append(value)
    base = times[names[0]]
    third = len(base) // 3
    for name in names:
        values = times[name]
        early, late = statistics.median(values[:third]), statistics.median(values[-third:])
        ratio = _quantile(values) / _quantile(base)
        yield Row(
            f"torch {dtype}",
            f"decode from empty, {steps} steps",
            name,
            statistics.median(values),
            early,
            late,
            None,
            rounds=len(values),
            dropped=dropped,
            note="median; of the first third, of the last",
        )
        yield Row(
            f"torch {dtype}",
            f"decode from empty, p99.9 of {steps} steps",
            name,
            _quantile(values),
            max(values),
            max(values),
            ratio,
            rounds=len(values),
            dropped=dropped,
            target=2.0 if name == "ours" else None,
            note="p99.9; the worst step",
        )


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _quantile(values: list[float], q: float = 0.999) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
