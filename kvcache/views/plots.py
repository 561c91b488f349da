"""How full a cache was over time: samples that a loop takes, and plots of them.

Plots need matplotlib (``pip install 'ml-kvcache[plots]'``). Each draws into ``axes``, or into a figure of its
own, and returns the axes; ``axes.figure.savefig(...)`` writes it. Nothing global is touched: no pyplot, no
backend is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.views.blocks import CellMap
from kvcache.views.caches import render_cache
from kvcache.views.colors import KEPT, SHARED, sequence_color, tier_color

__all__ = ["Filled", "Occupancy", "Sample", "occupancy", "tiers"]


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
        maps = tuple(map(_counts, render_cache(self._cache).maps))
        sample = Sample(now - self._began, maps, tiers)
        self.samples.append(sample)
        return sample

    def record(self) -> list[dict[str, Any]]:
        """All samples, JSON-able."""
        return [asdict(sample) for sample in self.samples]


def _counts(cells: CellMap) -> Filled:
    own: dict[int, int] = {}
    for run in cells.runs:
        if run.kind == "own":
            own[run.sequences[0]] = own.get(run.sequences[0], 0) + run.size
    return Filled(
        cells.name, cells.cells, own, cells.count("shared"), cells.count("kept"), cells.count("free")
    )


def occupancy(samples: Sequence[Sample], axes: Any = None, index: int = 0) -> Any:
    """Cells over the samples, stacked: each sequence's own, shared ones, those that snapshots keep.

    ``index``: which table of cells, where there are several. InvalidRangeError for no samples or no such
    table.
    """
    if not samples or not 0 <= index < len(samples[0].maps):
        have = len(samples[0].maps) if samples else 0
        raise InvalidRangeError(f"occupancy: {len(samples)} samples of {have} tables of cells; index={index}")
    maps = [sample.maps[index] for sample in samples]
    sequences = sorted({seq for filled in maps for seq in filled.own})
    layers = [[filled.own.get(seq, 0) for filled in maps] for seq in sequences]
    layers += [[filled.shared for filled in maps], [filled.kept for filled in maps]]
    labels = [*(f"sequence {seq}" for seq in sequences), "shared", "kept by snapshots"]
    colors = [*map(sequence_color, sequences), SHARED, KEPT]
    axes = _axes(axes, (8, 4))
    axes.stackplot(range(len(maps)), layers, labels=labels, colors=colors, linewidth=0)
    axes.axhline(maps[0].cells, color="#1b1f24", linewidth=1, linestyle="--")
    axes.set(title=maps[0].name, xlabel="sample", ylabel="cells", ylim=(0, maps[0].cells * 1.05))
    axes.margins(x=0)
    axes.legend(loc="upper left", fontsize=8)
    return axes


def tiers(samples: Sequence[Sample], axes: Any = None) -> Any:
    """Bytes of snapshots over the samples, a line for each tier of a PrefixCache."""
    axes = _axes(axes, (8, 4))
    for name in dict.fromkeys(name for sample in samples for name in sample.tiers):
        sizes = [sample.tiers.get(name, 0) / 2**20 for sample in samples]
        axes.plot(range(len(samples)), sizes, label=name, color=tier_color(name))
    axes.set(xlabel="sample", ylabel="MiB of snapshots")
    axes.set_ylim(bottom=0)
    if samples and samples[0].tiers:
        axes.legend(fontsize=8)
    return axes


def _axes(axes: Any, size: tuple[float, float]) -> Any:
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupportedError("plots need matplotlib: pip install 'ml-kvcache[plots]'") from error
    return Figure(figsize=size, layout="constrained").subplots()
