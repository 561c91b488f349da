"""The largest elements of NumPy arrays, without sorting the others."""

from __future__ import annotations

import numpy as np

_LONG = 2048
"""Sorting a shorter axis is faster than partitioning it."""


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Indices (..., k) of the ``k`` largest of the last axis, descending; ties are in index order.

    NaN comes first.
    """
    size = x.shape[-1]
    if size < _LONG or 4 * k > size or x.dtype.kind != "f":
        return _sorted(x)[..., :k]
    rows = [_of_row(row, k) for row in x.reshape(-1, size)]
    return np.array(rows, np.intp).reshape(*x.shape[:-1], k)


def _of_row(row: np.ndarray, k: int) -> np.ndarray:
    top = np.partition(row, -k)[-k:]
    if np.isnan(top.max()):
        return _sorted(row)[:k]
    reaching = np.flatnonzero(row >= top[0])
    places: np.ndarray = reaching[_sorted(row[reaching])[:k]]
    return places


def _sorted(x: np.ndarray) -> np.ndarray:
    """A stable ascending sort of the reversed axis, read backwards: ties keep their order."""
    order: np.ndarray = x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return order
