"""The arithmetic of strided views against NumPy's own, and against plain enumeration."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ml
from ml import strided

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
FILLED = st.lists(st.integers(1, 5), max_size=4).map(tuple)
fast = settings(max_examples=150, derandomize=True, database=None, deadline=None)


def positions(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where the elements of a view lie, in C order, by enumerating every index."""
    indices = itertools.product(*(range(size) for size in shape))
    return [offset + sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]


@st.composite
def views(
    draw: st.DrawFn, shapes: Any = FILLED, largest: int = 12
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(shapes)
    return shape, tuple(draw(st.integers(0, largest)) for _ in shape)


@fast
@given(SHAPES)
def test_contiguous_strides_are_numpys_and_positive(shape: tuple[int, ...]) -> None:
    found = strided.contiguous_strides(shape)
    assert all(stride > 0 for stride in found)
    assert 0 in shape or found == np.empty(shape, np.int8).strides


@fast
@given(views(SHAPES))
def test_extent_is_from_the_first_to_the_last_element(view: Any) -> None:
    assert strided.extent(*view) == max(positions(0, *view), default=-1) + 1


@settings(fast, max_examples=300)
@given(views(SHAPES, largest=8))
def test_overlaps_itself_says_whether_an_element_is_shown_twice(view: Any) -> None:
    where = positions(0, *view)
    assert strided.overlaps_itself(*view) == (len(set(where)) != len(where))


@fast
@given(st.integers(0, 60), st.integers(0, 60), st.integers(-70, 70), views(SHAPES))
def test_view_geometry_accepts_exactly_what_lies_inside(
    size: int, first: int, offset: int, view: Any
) -> None:
    shape, strides = view
    where = positions(first + offset, shape, strides)
    inside = first + offset >= 0 and max(where, default=first + offset - 1) < size
    if inside:
        assert strided.view_geometry(size, first, offset, shape, strides) == (first + offset, shape, strides)
    else:
        with pytest.raises(ml.BoundsError):
            strided.view_geometry(size, first, offset, shape, strides)


@fast
@given(views(), st.data())
def test_reshape_strides_says_yes_exactly_when_strides_can_say_it(view: Any, data: st.DataObject) -> None:
    """Against enumeration: the target is one offset and strides, or it is not."""
    shape, strides = view
    target = data.draw(factorizations(math.prod(shape)))
    where = np.array(positions(0, shape, strides)).reshape(target)
    steps = tuple(
        int(where[tuple(int(i == axis) for i in range(where.ndim))] - where.flat[0]) if size > 1 else 1
        for axis, size in enumerate(target)
    )
    possible = min(steps, default=0) >= 0 and positions(0, target, steps) == where.ravel().tolist()
    found = strided.reshape_strides(shape, strides, target)
    assert (found is not None) == possible
    if found is not None:
        assert positions(0, target, found) == where.ravel().tolist()


@st.composite
def factorizations(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """A shape that holds ``count`` elements, axes of size 1 included."""
    shape: list[int] = []
    while count > 1:
        shape.append(draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0])))
        count //= shape[-1]
        if len(shape) > 5:
            shape.append(count)
            break
    return tuple(shape) + (1,) * draw(st.integers(0, 1))


@pytest.mark.parametrize("target", [(0,), (3, 0), (0, 2, 5)])
def test_an_empty_tensor_takes_any_empty_shape(target: tuple[int, ...]) -> None:
    assert strided.reshape_strides((2, 0, 3), (7, 1, 2), target) == strided.contiguous_strides(target)


@fast
@given(SHAPES, st.lists(st.integers(-2, 6), max_size=4))
def test_resolve_shape_is_numpys(shape: tuple[int, ...], target: list[int]) -> None:
    try:
        expected = np.empty(shape, np.int8).reshape(target).shape if -2 not in target else None
    except ValueError:
        expected = None
    if expected is None:
        with pytest.raises(ml.ShapeError):
            strided.resolve_shape("reshape", math.prod(shape), target)
    else:
        assert strided.resolve_shape("reshape", math.prod(shape), target) == expected


@fast
@given(st.integers(0, 9), st.integers(-3, 12), st.integers(-3, 12), st.integers(-1, 4))
def test_slice_length_is_ranges_and_never_wraps_or_clamps(
    size: int, start: int, stop: int, step: int
) -> None:
    if step < 1:
        with pytest.raises(ml.ShapeError):
            strided.slice_length(size, 0, start, stop, step)
    elif 0 <= start <= stop <= size:
        assert strided.slice_length(size, 0, start, stop, step) == len(range(start, stop, step))
    else:
        with pytest.raises(ml.BoundsError):
            strided.slice_length(size, 0, start, stop, step)


@fast
@given(st.integers(0, 4).flatmap(lambda n: st.permutations(range(n))))
def test_normalize_axes_takes_every_permutation(axes: list[int]) -> None:
    if axes:
        assert strided.normalize_axes("op", axes, len(axes)) == tuple(axes)
        assert strided.normalize_axes("op", [axis - len(axes) for axis in axes], len(axes)) == tuple(axes)
    assert strided.normalize_axes("op", (), len(axes)) == tuple(reversed(range(len(axes))))


@fast
@given(SHAPES, SHAPES)
def test_broadcast_shapes_is_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        expected = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(ml.ShapeError, match="do not broadcast"):
            strided.broadcast_shapes("add", a, b)
    else:
        assert strided.broadcast_shapes("add", a, b) == expected
        more = (1,) * 60  # NumPy's takes 32 axes
        assert strided.broadcast_shapes("add", more + a, b) == more[len(expected) - len(a) :] + expected


@pytest.mark.parametrize(
    "shape", [(2**62, 2), (2**40, 2**40), (2**32,) * 3, (2**60,), (0, 2**62), (2**40, 0, 2**40)]
)
def test_more_elements_than_can_be_counted_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ml.ShapeError):
        strided.check_count("zeros", shape)
    with pytest.raises(ml.ShapeError):
        strided.view_geometry(4, 0, 0, shape, (0,) * len(shape))


def test_no_more_than_can_be_counted_is_fine() -> None:
    strided.check_count("zeros", (2**60 - 1,))
    strided.check_count("zeros", (2**30, 2**29, 0))


def test_an_empty_tensor_is_not_reshaped_to_sizes_that_cannot_be_counted() -> None:
    assert strided.resolve_shape("reshape", 0, (0, 2**59)) == (0, 2**59)
    with pytest.raises(ml.ShapeError, match="reshape"):
        strided.resolve_shape("reshape", 0, (0, 2**62))


@fast
@given(FILLED, st.data())
def test_regular_region_shows_a_box_of_the_base(base: tuple[int, ...], data: st.DataObject) -> None:
    """A view made by slicing and permuting is found; what is found shows the same elements."""
    grid = np.arange(math.prod(base)).reshape(base)
    slices = []
    for size in base:
        start = data.draw(st.integers(0, size - 1))
        slices.append(slice(start, data.draw(st.integers(start + 1, size)), data.draw(st.integers(1, 3))))
    axes = data.draw(st.permutations(range(len(base))))
    shown = grid[tuple(slices)].transpose(axes)
    strides = tuple(stride // 8 for stride in shown.strides)
    offset = int(shown.flat[0])
    check_region(
        grid, offset, shown.shape, strides, found=strided.regular_region(base, offset, shown.shape, strides)
    )


@fast
@given(FILLED, st.integers(0, 30), views(FILLED, largest=8))
def test_regular_region_is_right_or_none(base: tuple[int, ...], offset: int, view: Any) -> None:
    shape, strides = view
    assume(offset + strided.extent(shape, strides) <= math.prod(base))
    grid = np.arange(math.prod(base)).reshape(base)
    found = strided.regular_region(base, offset, shape, strides)
    if found is not None:
        check_region(grid, offset, shape, strides, found)


def check_region(grid: np.ndarray, offset: int, shape: Any, strides: Any, found: Any) -> None:
    assert found is not None
    slices, axes = found
    box = grid[slices]
    kept = [axis for axis in axes if axis >= 0]
    dropped = [axis for axis in range(grid.ndim) if axis not in kept]
    assert all(box.shape[axis] == 1 for axis in dropped)
    rebuilt = box.transpose([*kept, *dropped]).reshape(shape)
    assert rebuilt.ravel().tolist() == positions(offset, shape, strides)
