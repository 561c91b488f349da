"""Plots with matplotlib: cells, masks, occupancy over time. ``pip install 'ml-kvcache[plots]'``.

Each draws into ``axes``, or into a figure of its own, and returns the axes; ``axes.figure.savefig(...)``
writes it. Nothing global is touched: no pyplot, no backend is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.views import binning
from kvcache.views.colors import FREE, KEPT, SHARED, sequence_color, tier_color
from kvcache.views.data import CacheData, CellMap, MaskData
from kvcache.views.occupancy import Sample

__all__ = ["cells", "mask", "occupancy", "tiers"]

_PER_LINE = 128


def cells(picture: CacheData | CellMap, axes: Any = None) -> Any:
    """The map of cells, 128 to a line; of a picture of several maps the first."""
    found = picture if isinstance(picture, CellMap) else _first_map(picture)
    binned = binning.binned(found, _PER_LINE * 64)
    columns = min(_PER_LINE, binned.codes.size)
    lines = -(-binned.codes.size // columns)
    colors = np.ones((lines * columns, 3))
    for code in np.unique(binned.codes).tolist():
        colors[: binned.codes.size][binned.codes == code] = _rgb(_code_color(code))
    axes = _axes(axes, (8, 0.8 + 0.12 * lines))
    axes.imshow(colors.reshape(lines, columns, 3), interpolation="nearest", aspect="auto")
    axes.set(title=f"{found.name}: {found.used:,} of {found.cells:,} cells used", xlabel="cell", yticks=[])
    if binned.size > 1:
        axes.set_xlabel(f"marks of {binned.size} cells")
    return axes


def mask(picture: MaskData, axes: Any = None) -> Any:
    """Who sees what: a row for each token of the batch, in its sequence's colour; columns are cells."""
    part, down, _ = binning.thinned(picture.seen, 1024, 2048)
    owners = [picture.queries[i * down][0] for i in range(part.shape[0])]
    colors = np.array([_rgb(sequence_color(seq)) for seq in owners]).reshape(-1, 1, 3)
    shown = 1 - part[:, :, None] * (1 - colors)
    axes = _axes(axes, (6, 6))
    height, width = picture.seen.shape
    axes.imshow(shown, interpolation="nearest", aspect="auto", extent=(-0.5, width - 0.5, height - 0.5, -0.5))
    axes.set(title=f"mask of {picture.name}", xlabel="column of the history", ylabel="token of the batch")
    return axes


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


def _first_map(picture: CacheData) -> CellMap:
    if not picture.maps:
        raise NotSupportedError(f"cells: {picture.name} has no cells")
    return picture.maps[0]


def _axes(axes: Any, size: tuple[float, float]) -> Any:
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupportedError("plots need matplotlib: pip install 'ml-kvcache[plots]'") from error
    return Figure(figsize=size, layout="constrained").subplots()


def _code_color(code: int) -> str:
    return {0: FREE, 1: KEPT, 2: SHARED}.get(code) or sequence_color(code - 3)


def _rgb(color: str) -> np.ndarray:
    return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
