"""Interleaved timing: every round runs each contender once, so that foreign load hits all alike."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Contender", "Sample", "interleave", "machine"]


@dataclass(frozen=True, slots=True)
class Contender:
    """What is timed, and what has to happen before each call without being timed."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds per call: median, 10th and 90th percentile, and the median of ratios to the floor."""

    median: float
    low: float
    high: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.median:,.1f} [{self.low:,.1f}, {self.high:,.1f}]"


def interleave(contenders: Mapping[str, Contender], rounds: int, warmup: int = 5) -> dict[str, Sample]:
    """Time each contender once a round. The first is the floor: ratios are taken round by round."""
    order = list(contenders.items())
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + warmup):
        # Turned by one each round: nobody always runs behind the one that empties the caches.
        turn = i % len(order)
        for name, contender in order[turn:] + order[:turn]:
            contender.prepare()
            start = time.perf_counter()
            contender.call()
            elapsed = time.perf_counter() - start
            if i >= warmup:
                times[name].append(elapsed * 1e6)
    floor = times[next(iter(contenders))]
    return {name: _sample(values, floor) for name, values in times.items()}


def _sample(values: list[float], floor: list[float]) -> Sample:
    cuts = statistics.quantiles(values, n=10)
    ratios = [ours / theirs for ours, theirs in zip(values, floor, strict=True)]
    return Sample(statistics.median(values), cuts[0], cuts[-1], statistics.median(ratios))


def machine() -> str:
    """One line: processor, cores, system and Python."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
