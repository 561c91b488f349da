"""The place of a view in its storage, for MLX's slice update and scatter. Pure arithmetic, cached, since all
layers of a cache need the same results in a step.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ml.strided import Shape, base_of, contiguous_strides, regular_region


class Region(NamedTuple):
    """A view as the block ``base[start : start + sizes]``.

    ``base`` is the storage's shape, or another shape with as many elements. ``sources[k]`` is the view axis
    along base axis k, -1 if the block has width 1 there. ``axes`` are those on which the block is narrower
    than the base, and ``start`` (an ``mx.array``) is its beginning on them.
    """

    base: Shape
    sizes: Shape
    sources: Shape
    axes: Shape
    start: Any

    def order(self, strides: Shape) -> Shape:
        """Strides of the source's axes, in the order of the base."""
        return tuple([strides[axis] if axis >= 0 else 1 for axis in self.sources])


class RowRegion(NamedTuple):
    """A view whose rows are whole layers of the storage: row i is ``storage[..., first + i * step, ...]``."""

    axis: int
    first: int
    step: int
    sources: Shape


@lru_cache(maxsize=4096)
def may_overlap(shape: Shape, strides: Shape) -> bool:
    """Whether different indices may refer to the same element, apart from strides of 0."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


@lru_cache(maxsize=4096)
def region_of(allocated: Shape, offset: int, shape: Shape, strides: Shape) -> Region | None:
    """A non-empty view as a block, or None if it is not one."""
    for base in (allocated or (1,), base_of(math.prod(allocated), shape, strides)):
        region = None if base is None else regular_region(base, offset, shape, strides)
        if base is None or region is None or any(part.step != 1 for part in region[0]):
            continue
        slices, placed = region
        sizes = tuple(part.stop - part.start for part in slices)
        axes = tuple(k for k, size in enumerate(sizes) if size != base[k]) or (0,)
        start = mx.array([slices[k].start for k in axes], mx.int32)
        return Region(base, sizes, _inverse(len(base), placed), axes, start)
    return None


@lru_cache(maxsize=4096)
def row_region_of(allocated: Shape, offset: int, shape: Shape, strides: Shape, axis: int) -> RowRegion | None:
    """The place of rows along ``axis`` of a view in the storage, if each is a whole layer of it."""
    region = regular_region(allocated, offset, shape, strides)
    if region is None or region[1][axis] < 0:
        return None
    slices, placed = region
    along = placed[axis]
    if any(
        part != slice(0, n, 1)
        for k, (part, n) in enumerate(zip(slices, allocated, strict=True))
        if k != along
    ):
        return None
    part = slices[along]
    return RowRegion(along, part.start, part.step, _inverse(len(allocated), placed))


def _inverse(ndim: int, placed: Shape) -> Shape:
    sources = [-1] * ndim
    for view_axis, base_axis in enumerate(placed):
        if base_axis >= 0:
            sources[base_axis] = view_axis
    return tuple(sources)


@lru_cache(maxsize=4096)
def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether the strides are those of a C-contiguous tensor, ignoring axes of size 1."""
    wanted = contiguous_strides(shape)
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True))


def element_offsets(offset: int, shape: Shape, strides: Shape) -> np.ndarray:
    """The offset of each element of a view in its storage, int64 of the view's shape."""
    result = np.full((1,) * len(shape), offset, np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = np.arange(size, dtype=np.int64) * stride
        result = result + steps.reshape((size,) + (1,) * (len(shape) - axis - 1))
    return result


def runs_of(indices: np.ndarray) -> list[tuple[int, int, int]]:
    """``(begin, end, first)`` of each run ``indices[begin:end] == first, first + 1, ...``."""
    cuts = (np.flatnonzero(np.diff(indices) != 1) + 1).tolist()
    return [(a, b, int(indices[a])) for a, b in zip([0, *cuts], [*cuts, indices.size], strict=True)]
