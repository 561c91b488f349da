"""Finds the places of a token's K and V in a block of vLLM's cache, by writing numbers through its own
kernel. To vLLM, a block is (heads, tokens, content); the layout inside depends on the attention backend (the
CPU's transposes keys). The kernel that fills the cache gets K and V with the numbers 0, 1, 2, ..., and the
block then shows the place of each element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["BASE", "Strides", "digits", "places", "strides_of"]

BASE = 128
"""The base of digits that F16 and BF16 represent exactly."""


class Strides(NamedTuple):
    """Element (token, head, dim) is at ``offset + token * s0 + head * s1 + dim * s2`` of its block."""

    offset: int
    steps: tuple[int, int, int]


def digits(count: int) -> list[np.ndarray]:
    """The digits of the numbers 0 to ``count - 1`` in BASE, lowest first, each plus 1: float32 (count,)."""
    numbers = np.arange(count)
    planes = []
    while True:
        planes.append((numbers % BASE + 1).astype(np.float32))
        numbers = numbers // BASE
        if not numbers.any():
            return planes


def places(planes: Sequence[np.ndarray], count: int) -> np.ndarray | None:
    """The place of each of ``count`` numbers, as int64 indices into the block; None unless each occurs once.
    ``planes`` are the block's content (elements,) for each of the ``digits``; 0 if nothing was written.
    """
    written = [plane != 0 for plane in planes]
    if not all(np.isfinite(plane).all() and (plane == np.floor(plane)).all() for plane in planes):
        return None
    if any((mask != written[0]).any() for mask in written):
        return None
    numbers = sum((plane.astype(np.int64) - 1) * BASE**i for i, plane in enumerate(planes))
    where = np.flatnonzero(written[0])
    read_back = np.asarray(numbers)[where]
    if read_back.size != count or not np.array_equal(np.sort(read_back), np.arange(count)):
        return None
    back = np.empty(count, np.int64)
    back[read_back] = where
    return back


def strides_of(where: np.ndarray) -> Strides | None:
    """The strides of ``where`` (tokens, heads, dim), or None if it has none."""
    first = int(where[0, 0, 0])
    steps = tuple(
        int(where.take(1, axis).flat[0]) - first if size > 1 else 0 for axis, size in enumerate(where.shape)
    )
    expected = first + sum(
        step * np.arange(size).reshape([-1 if other == axis else 1 for other in range(3)])
        for axis, (step, size) in enumerate(zip(steps, where.shape, strict=True))
    )
    return Strides(first, (steps[0], steps[1], steps[2])) if np.array_equal(where, expected) else None
