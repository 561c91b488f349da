"""Interleaved timing of short calls on a shared machine. Every round runs each contender once, so that other
load affects all of them equally, and the order rotates by one each round. A round in which the process was
preempted is dropped and counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_MOST_TRIES = 4
"""The largest number of rounds, as a multiple of the requested number."""
_SHORT = 10e-3
"""Seconds; a longer round may be preempted on any machine."""
_TOLERATED = 0.1
_FEWEST = 5
"""The smallest number of rounds kept; on a busy machine, the least disturbed ones."""


@dataclass(frozen=True, slots=True)
class Contender:
    """The timed call, and untimed calls before and after it."""

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    finish: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Sample:
    """Microseconds per call: median, 10th and 90th percentile; ``ratio``: the median ratio per round."""

    median: float
    low: float
    high: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.median:,.1f} [{self.low:,.1f}, {self.high:,.1f}]"


@dataclass(slots=True)
class Trial:
    """Times in microseconds by contender, one per kept round."""

    times: dict[str, list[float]]
    dropped: int = 0
    floor: str = ""
    """The contender that ratios refer to; the fastest if there are several floors."""

    def sample(self, name: str) -> Sample:
        values = self.times[name]
        ratios = [mine / floor for mine, floor in zip(values, self.times[self.floor], strict=True)]
        cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        return Sample(statistics.median(values), cuts[0], cuts[-1], statistics.median(ratios))

    def samples(self) -> dict[str, Sample]:
        return {name: self.sample(name) for name in self.times}


@dataclass(slots=True)
class Round:
    """Detects whether the process was preempted since the round began."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=time.process_time)
    switches: int = field(default_factory=lambda: _switches())

    def lost(self) -> float:
        """The share of the wall time in which the process did not run. 1 if a short round was preempted."""
        wall, used = time.perf_counter() - self.wall, time.process_time() - self.processor
        if wall < _SHORT and _switches() > self.switches:
            return 1.0
        return max(0.0, wall - used - 100e-6) / wall

    def disturbed(self) -> bool:
        return self.lost() > _TOLERATED


def _switches() -> int:
    """The number of involuntary context switches so far; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def interleave(
    contenders: Mapping[str, Contender],
    rounds: int,
    warmup: int = 5,
    floors: Sequence[str] = (),
    seconds: float = 60.0,
    own_threads: bool = True,
) -> Trial:
    """Time each contender once a round; the first one is the floor unless ``floors`` names others.

    Stops after ``rounds`` undisturbed rounds, four times as many in all, or ``seconds``, whichever is
    first. ``own_threads`` False: the work runs elsewhere (on a device, in another thread), so only context
    switches indicate a disturbance.
    """
    order = list(contenders.items())
    runs: list[tuple[float, dict[str, float]]] = []
    undisturbed, began = 0, time.perf_counter()
    for i in range(warmup + _MOST_TRIES * rounds):
        turn = i % len(order)
        watch = Round()
        times_of_round: dict[str, float] = {}
        for name, contender in order[turn:] + order[:turn]:
            contender.prepare()
            start = time.perf_counter()
            contender.call()
            times_of_round[name] = (time.perf_counter() - start) * 1e6
            contender.finish()
        lost = watch.lost()
        if i < warmup:
            continue
        if not own_threads and lost < 1.0:
            lost = 0.0
        runs.append((lost, times_of_round))
        undisturbed += lost <= _TOLERATED
        if undisturbed >= rounds or time.perf_counter() - began > seconds:
            break
    kept = [times_of_round for lost, times_of_round in runs if lost <= _TOLERATED]
    if len(kept) < _FEWEST:
        kept = [times_of_round for _, times_of_round in sorted(runs, key=lambda run: run[0])[:_FEWEST]]
    times = {name: [times_of_round[name] for times_of_round in kept] for name in contenders}
    candidates = list(floors) or [order[0][0]]
    floor = min(candidates, key=lambda name: statistics.median(times[name]))
    return Trial(times, len(runs) - len(kept), floor)
