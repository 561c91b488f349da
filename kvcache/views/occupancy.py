"""How full a cache was over time: samples that a loop takes, for a plot or a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.views.blocks import CellMap
from kvcache.views.caches import render_cache
from kvcache.views.pictures import CachePicture

__all__ = ["Filled", "Occupancy", "Sample"]


@dataclass(frozen=True, slots=True)
class Filled:
    """The cells of one table: ``own`` of each sequence alone, ``shared``, ``kept`` by snapshots, ``free``."""

    name: str
    cells: int
    own: dict[int, int]
    shared: int
    kept: int
    free: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment: seconds since the first sample, and the tables of cells of all caches inside."""

    seconds: float
    maps: tuple[Filled, ...]
    tiers: dict[str, int]
    """Bytes of snapshots per tier, of a PrefixCache."""


class Occupancy:
    """Samples of a cache, or of a PrefixCache and its tiers; call ``sample`` once a step, say.

    A sample costs O(cells) on the host, and keeps a few numbers.
    """

    def __init__(self, cache: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._prefix = cache if hasattr(cache, "tree") else None
        self._cache = cache if self._prefix is None else self._prefix.cache
        self._clock = clock
        self._began: float | None = None
        self.samples: list[Sample] = []

    def sample(self) -> Sample:
        """Look at the cache now; the sample is kept in ``samples``, too."""
        now = self._clock()
        if self._began is None:
            self._began = now
        tiers = {} if self._prefix is None else dict(self._prefix.nbytes)
        found = Sample(now - self._began, _filled(render_cache(self._cache)), tiers)
        self.samples.append(found)
        return found

    def record(self) -> list[dict[str, Any]]:
        """All samples, JSON-able."""
        return [asdict(sample) for sample in self.samples]


def _filled(picture: CachePicture) -> tuple[Filled, ...]:
    return tuple(_counts(cells) for cells in picture.maps)


def _counts(cells: CellMap) -> Filled:
    own: dict[int, int] = {}
    for run in cells.runs:
        if run.kind == "own":
            own[run.sequences[0]] = own.get(run.sequences[0], 0) + run.size
    return Filled(
        cells.name, cells.cells, own, cells.count("shared"), cells.count("kept"), cells.count("free")
    )
