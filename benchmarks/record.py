"""What a measurement leaves behind: rows, and whether a target was met."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.bench.timing import Trial

__all__ = ["Row", "Target", "rows_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """One contender in one measurement; times in microseconds unless ``unit`` says otherwise."""

    group: str
    """The framework and dtype."""
    measurement: str
    contender: str
    median: float
    low: float = 0.0
    high: float = 0.0
    ratio: float | None = None
    unit: str = "us"
    rounds: int = 1
    dropped: int = 0
    target: float | None = None
    """The ratio that is at most wanted."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.target is None or self.ratio is None:
            return None
        return self.ratio <= self.target

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Target:
    """``ratio`` is what rows of ours named ``measurement...`` may be at most."""

    measurement: str
    ratio: float


TARGETS = (
    Target("put + get, 1 token, window", 1.2),
    Target("put + get, 1 token", 1.1),
    Target("put + get, 512", 1.2),
    Target("attention, 1 query", 1.05),
    Target("attention, 8 sequences", 1.3),
)


def rows_of(group: str, measurement: str, trial: Trial, ours: str = "ours", per: int = 1) -> Iterator[Row]:
    """One row per contender; a call did the work ``per`` times."""
    wanted = next((t.ratio for t in TARGETS if measurement.startswith(t.measurement)), None)
    for name, sample in trial.samples().items():
        yield Row(
            group,
            measurement,
            name,
            sample.median / per,
            sample.low / per,
            sample.high / per,
            sample.ratio,
            rounds=len(trial.times[name]),
            dropped=trial.dropped,
            target=wanted if name.startswith(ours) else None,
        )
