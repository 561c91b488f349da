"""Many cells in few marks: what each mark of a drawing stands for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcache.views.blocks import CellMap

__all__ = ["Binned", "binned", "thinned"]


@dataclass(frozen=True, slots=True)
class Binned:
    """A code (see ``CellMap.codes``) for every mark, ``size`` cells each (the last one maybe fewer)."""

    size: int
    codes: np.ndarray
    """What most of the used cells of a mark are; 0 where none of them is used."""
    filled: np.ndarray
    """Which part of a mark's cells is used: 0 to 1."""


def binned(cells: CellMap, marks: int) -> Binned:
    """The cells in at most ``marks`` (>= 1) marks of equal size."""
    size = max(1, -(-cells.cells // marks))
    if size == 1:
        return Binned(1, cells.codes, (cells.codes > 0).astype(float))
    count = -(-cells.cells // size)
    bins = np.arange(cells.cells) // size
    kinds, of_run = np.unique(cells.run_codes, return_inverse=True)
    where = np.repeat(of_run, [run.size for run in cells.runs])
    table = np.bincount(bins * kinds.size + where, minlength=count * kinds.size).reshape(count, kinds.size)
    used = table[:, kinds > 0]
    if not used.shape[1]:
        return Binned(size, np.zeros(count, dtype=np.int64), np.zeros(count))
    best = np.where(used.any(axis=1), kinds[kinds > 0][used.argmax(axis=1)], 0)
    return Binned(size, best, used.sum(axis=1) / np.bincount(bins, minlength=count))


def thinned(seen: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, int, int]:
    """A mask in at most ``rows`` by ``columns`` marks: which part of each is seen, and its size."""
    down, across = (max(1, -(-size // most)) for size, most in zip(seen.shape, (rows, columns), strict=True))
    if seen.size == 0 or (down == 1 and across == 1):
        return seen.astype(float), down, across
    sums = np.add.reduceat(seen, np.arange(0, seen.shape[0], down), axis=0, dtype=np.int64)
    sums = np.add.reduceat(sums, np.arange(0, seen.shape[1], across), axis=1)
    heights = np.minimum(down, seen.shape[0] - np.arange(0, seen.shape[0], down))
    widths = np.minimum(across, seen.shape[1] - np.arange(0, seen.shape[1], across))
    return sums / (heights[:, None] * widths), down, across
