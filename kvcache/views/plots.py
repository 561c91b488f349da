"""Plots with matplotlib: occupancy over time. ``pip install 'ml-kvcache[plots]'``.

Each draws into ``axes``, or into a figure of its own, and returns the axes; ``axes.figure.savefig(...)``
writes it. Nothing global is touched: no pyplot, no backend is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.views.colors import KEPT, SHARED, sequence_color, tier_color
from kvcache.views.occupancy import Sample

__all__ = ["occupancy", "tiers"]


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
