"""Arithmetic of strided views: pure functions on shapes and strides, in elements.

Nothing here uses arrays. Backends and adapters share these functions, so that shapes, offsets and strides are
checked in one place, with the same messages.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ml.errors import BoundsError, ShapeError

__all__ = [
    "Region",
    "Shape",
    "as_shape",
    "broadcast_shapes",
    "check_count",
    "check_ndim",
    "contiguous_strides",
    "extent",
    "find_region",
    "integers",
    "normalize_axes",
    "normalize_axis",
    "overlaps_itself",
    "regular_region",
    "reshape_strides",
    "resolve_shape",
    "slice_length",
    "view_geometry",
]

Shape = tuple[int, ...]

LARGEST_COUNT = (2**63 - 1) // 8
"""The most elements of the widest dtype whose bytes fit in a 64-bit integer."""
LARGEST_NDIM = 64
"""The most axes of a tensor: NumPy's limit, since every tensor can be copied to the host."""
_INT = {int}


def integers(op: str, *values: object) -> Shape:
    """``values`` as Python ints; ShapeError for anything that is not an integer, such as a float."""
    try:
        return tuple(map(int, map(operator.index, values)))  # type: ignore[arg-type]
    except TypeError:
        raise ShapeError(f"{op}: takes integers, not {values}") from None


def check_count(op: str, shape: Shape) -> None:
    """Raise ShapeError for more elements than ``LARGEST_COUNT``, which frameworks do not report well.

    The non-zero sizes of an empty shape are limited too, as frameworks multiply them.
    """
    count = math.prod(shape) or math.prod(size or 1 for size in shape)
    if count > LARGEST_COUNT:
        raise ShapeError(
            f"{op}: the sizes other than 0 of shape {shape} come to {count} elements; the maximum is "
            f"{LARGEST_COUNT}"
        )


def as_shape(op: str, shape: Sequence[int] | int) -> Shape:
    """``shape`` as a tuple of ints, all >= 0, of at most ``LARGEST_NDIM`` axes; ShapeError otherwise."""
    if (
        type(shape) is tuple
        and {*map(type, shape)} == _INT
        and min(shape) >= 0
        and len(shape) <= LARGEST_NDIM
    ):
        return shape
    try:
        axes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        sizes = tuple(map(int, map(operator.index, axes)))
    except TypeError:
        raise ShapeError(f"{op}: a shape must be a sequence of integers, not {shape!r}") from None
    if sizes and min(sizes) < 0:
        raise ShapeError(f"{op}: shape {sizes} has a negative size; sizes must be at least 0")
    check_ndim(op, len(sizes))
    return sizes


def check_ndim(op: str, ndim: int) -> None:
    """Raise ShapeError for more axes than ``LARGEST_NDIM``."""
    if ndim > LARGEST_NDIM:
        raise ShapeError(f"{op}: a shape of {ndim} axes; the maximum is {LARGEST_NDIM}")


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Strides of a C-contiguous tensor: ``(2, 3, 4) -> (12, 4, 1)``."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


@functools.lru_cache(maxsize=4096)
def extent(shape: Shape, strides: Shape) -> int:
    """The number of elements from the first to the last of the view, inclusive; 0 if it is empty."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@functools.lru_cache(maxsize=4096)
def overlaps_itself(shape: Shape, strides: Shape) -> bool:
    """Whether two indices of the view refer to the same element, so that it cannot be written."""
    if math.prod(shape) < 2:
        return False
    axes = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    if axes[0][0] == 0:
        return True
    # Interleaved strides may still be distinct, e.g. shape (2, 3), strides (3, 2): count them.
    offsets = np.zeros(1, dtype=np.int64)
    for stride, size in axes:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return np.unique(offsets).size != offsets.size


def view_geometry(
    storage_size: int, first: int, offset: int, shape: Sequence[int] | int, strides: Sequence[int] | None
) -> tuple[int, Shape, Shape]:
    """Check ``view(offset, shape, strides)`` of a tensor whose first element is ``first``.

    Returns the absolute offset, shape and strides of the view.

    Raises ShapeError for a negative size or stride, or a number of strides other than that of the axes;
    BoundsError if the view leaves ``[0, storage_size)``.
    """
    sizes = as_shape("view", shape)
    start = first + integers("view", offset)[0]
    if strides is None:
        steps = contiguous_strides(sizes)
    else:
        try:
            steps = tuple(map(operator.index, strides))
        except TypeError:
            raise ShapeError(f"view: strides must be integers, in elements, not {strides!r}") from None
        if len(steps) != len(sizes):
            raise ShapeError(f"view: {len(steps)} strides for {len(sizes)} axes (shape {sizes})")
        if steps and min(steps) < 0:
            raise ShapeError(f"view: strides {steps} contain a negative one; strides must be at least 0")
    count = extent(sizes, steps)
    if start < 0 or start + count > storage_size:
        raise BoundsError(
            f"view: offset {offset}, shape {sizes}, strides {steps} covers elements "
            f"[{start}, {start + count}) of a storage of {storage_size}"
        )
    if not count or 0 in steps:  # a repeated element may occur more often than can be counted
        check_count("view", sizes)
    if steps and max(steps) > storage_size:  # the stride of an axis of size 1, which frameworks multiply
        steps = tuple(min(step, max(storage_size, 1)) for step in steps)
    return start, sizes, steps


def slice_length(size: int, axis: int, start: int, stop: int, step: int) -> int:
    """The length of ``[start, stop)`` with ``step``, without wrapping or clamping."""
    if step < 1:
        raise ShapeError(f"slice: step {step} on axis {axis}; a step must be at least 1")
    if not 0 <= start <= stop <= size:
        raise BoundsError(
            f"slice: [{start}, {stop}) on axis {axis} of size {size}; "
            "it must satisfy 0 <= start <= stop <= size; nothing wraps or is clamped"
        )
    return (stop - start + step - 1) // step


def normalize_axis(op: str, axis: int, ndim: int) -> int:
    """``axis`` counted from the front; negative axes count from the end, as in NumPy."""
    try:
        number = operator.index(axis)
    except TypeError:
        raise ShapeError(f"{op}: axis {axis!r} is not an integer") from None
    if not -ndim <= number < ndim:
        raise ShapeError(f"{op}: axis {axis} of a tensor with {ndim} axes")
    return number % ndim if ndim else 0


def normalize_axes(op: str, axes: Sequence[int], ndim: int) -> Shape:
    """A permutation of all ``ndim`` axes; without axes they are reversed, as in ``numpy.transpose``."""
    if not axes:
        return tuple(range(ndim - 1, -1, -1))
    normal = tuple(axis + ndim if axis < 0 else axis for axis in integers(op, *axes))
    if sorted(normal) != list(range(ndim)):
        raise ShapeError(f"{op}: axes {tuple(axes)} are not a permutation of {ndim} axes")
    return normal


def resolve_shape(op: str, count: int, shape: Sequence[int]) -> Shape:
    """``shape`` with a ``-1`` replaced so that it has ``count`` elements."""
    sizes = integers(op, *shape)
    if sizes.count(-1) == 1:
        known = math.prod(size for size in sizes if size != -1)
        if known and count % known == 0:
            sizes = tuple(count // known if size == -1 else size for size in sizes)
    sizes = as_shape(op, sizes)
    if math.prod(sizes) != count:
        raise ShapeError(f"{op}: shape {tuple(shape)} does not have {count} elements")
    if not count:
        check_count(op, sizes)
    return sizes


def reshape_strides(shape: Shape, strides: Shape, target: Shape) -> Shape | None:
    """Strides that show a strided view as ``target`` without moving data, or None.

    Runs of axes that are contiguous with each other are merged, then split as required: ``(2, 3, 4)`` with
    strides ``(24, 4, 1)`` reshapes to ``(2, 12)`` as ``(24, 1)``, to ``(6, 4)`` not at all.
    """
    if 0 in shape:
        return contiguous_strides(target)
    blocks: list[tuple[int, int]] = []  # (elements, stride of the innermost axis)
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == size * stride:
            blocks[-1] = (blocks[-1][0] * size, stride)
        else:
            blocks.append((size, stride))
    result = [1] * len(target)
    axis = len(target) - 1
    for count, innermost in reversed(blocks):
        remaining, step = count, innermost
        while remaining > 1:
            while axis >= 0 and target[axis] == 1:
                axis -= 1
            if axis < 0 or remaining % target[axis]:
                return None
            result[axis] = step
            step *= target[axis]
            remaining //= target[axis]
            axis -= 1
    return tuple(result)


@functools.lru_cache(maxsize=1024)
def broadcast_shapes(op: str, *shapes: Shape) -> Shape:
    """The common shape by NumPy's rules; ShapeError when there is none."""
    common: list[int] = []  # np.broadcast_shapes takes 32 axes
    for sizes in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            listed = " and ".join(str(shape) for shape in shapes)
            raise ShapeError(f"{op}: shapes {listed} do not broadcast")
        common.append(wide.pop() if wide else 1)
    return tuple(reversed(common))


def regular_region(
    base: Shape, offset: int, shape: Shape, strides: Shape
) -> tuple[tuple[slice, ...], tuple[int, ...]] | None:
    """Show a view of a C-contiguous ``base`` as ``base[slices]`` with its axes permuted.

    Returns ``(slices, axes)``, where ``axes[i]`` is the base axis of view axis ``i`` (-1 for an axis of size
    1 without a base axis), or None if the view is not such a box. Functional frameworks read and write boxes
    without a scatter:

    >>> regular_region((4, 8, 2), 6, (3, 4), (2, 16))   # base[:, 3:6, 0] transposed
    ((slice(0, 4, 1), slice(3, 6, 1), slice(0, 1, 1)), (1, 0))
    """
    if 0 in shape or 0 in base:
        return None
    unit = contiguous_strides(base)
    start, rest = [], offset
    for stride in unit:
        start.append(rest // stride)
        rest %= stride
    taken: dict[int, tuple[int, int, int]] = {}  # base axis -> (view axis, size, step)
    axes = [-1] * len(shape)
    for view_axis in sorted(range(len(shape)), key=lambda axis: -strides[axis]):
        size, stride = shape[view_axis], strides[view_axis]
        if size == 1:
            continue
        for axis, step in enumerate(unit):
            if axis in taken or base[axis] == 1 or stride == 0 or stride % step:
                continue
            if start[axis] + (size - 1) * (stride // step) < base[axis]:
                taken[axis] = (view_axis, size, stride // step)
                axes[view_axis] = axis
                break
        else:
            return None
    slices = []
    for axis, first in enumerate(start):
        _, size, step = taken.get(axis, (-1, 1, 1))
        slices.append(slice(first, first + (size - 1) * step + 1, step))
    return tuple(slices), tuple(axes)


class Region(NamedTuple):
    """A view as the box ``storage.reshape(base)[start : start + sizes * steps : steps]``.

    ``axes`` are the base axes of the view's axes, as in ``regular_region``.
    """

    base: Shape
    start: Shape
    sizes: Shape
    steps: Shape
    axes: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def find_region(allocated: Shape, offset: int, shape: Shape, strides: Shape) -> Region | None:
    """The view as a box of a storage allocated as ``allocated``, or of the same storage reshaped.

    None if it is not a box: an empty view, a stride of 0, or interleaved rows.

    >>> find_region((48,), 6, (3, 2), (8, 1))      # three rows of a matrix, kept flat
    Region(base=(6, 8), start=(0, 6), sizes=(3, 2), steps=(1, 1), axes=(0, 1))
    """
    for base in (allocated, base_of(math.prod(allocated), shape, strides)):
        region = None if base is None else regular_region(base, offset, shape, strides)
        if base is not None and region is not None:
            slices, axes = region
            sizes = tuple((part.stop - part.start - 1) // part.step + 1 for part in slices)
            return Region(
                base, tuple(part.start for part in slices), sizes, tuple(part.step for part in slices), axes
            )
    return None


def base_of(size: int, shape: Shape, strides: Shape) -> Shape | None:
    """The shape of ``size`` elements in which the view's strides are those of whole axes.

    >>> base_of(24, (2, 3), (12, 2))
    (2, 6, 2)
    """
    steps = sorted({stride for n, stride in zip(shape, strides, strict=True) if n > 1} | {1}, reverse=True)
    if steps[-1] < 1 or size % steps[0]:
        return None
    if any(outer % inner for outer, inner in itertools.pairwise(steps)):
        return None
    return (size // steps[0], *(outer // inner for outer, inner in itertools.pairwise(steps)))
