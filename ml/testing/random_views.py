"""Random strided views, read and written, compared with NumPy's ``as_strided`` of the same bits.

``ml.testing.aliasing`` walks through views of views. Here a view is one draw of offset, shape and strides,
which may be 0 or overlap, and is read and written in every way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

import ml
from ml.dtypes import DType
from ml.protocols import Context
from ml.testing.harness import BackendCase, assert_same, bits, each
from ml.testing.samples import DTYPES, special_values

SIZE = 48
SEEDS = range(12)
DRAWS = 6
"""The number of views for each seed and dtype. Few shapes occur, as each may be compiled."""
SHAPES = [(3, 4), (2, 3, 2), (5,), (2, 1, 4), (4, 0), ()]
Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]


def draw(random: np.random.Generator, shape: tuple[int, ...]) -> Geometry:
    """A view of this shape inside the storage: in C order with gaps, permuted, repeating or arbitrary."""
    room, strides = SIZE - 1, [0] * len(shape)
    for axis in random.permutation(len(shape)).tolist():
        strides[axis] = int(random.integers(0, min(room // max(shape[axis] - 1, 1), 11) + 1))
        room -= max(shape[axis] - 1, 0) * strides[axis]
    if random.integers(3) == 0:  # a dense slice
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        room = SIZE - max(int(np.prod(shape)), 1)
    return int(random.integers(0, room + 1)), shape, tuple(strides)


def shown(flat: np.ndarray, view: Geometry) -> np.ndarray:
    """The model: NumPy's writable view of the same memory."""
    offset, shape, strides = view
    steps = tuple(stride * flat.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, steps, writeable=True)


def overlaps(view: Geometry) -> bool:
    """Whether the view shows an element twice, by counting."""
    where = shown(np.arange(SIZE), view)
    return len(np.unique(where)) < where.size


@contextlib.contextmanager
def told(seed: int, *views: Geometry) -> Iterator[None]:
    """Add the seed and the views to errors raised in the block."""
    try:
        yield
    except Exception as error:
        listed = " and ".join(f"view{view}" for view in views)
        raise AssertionError(f"seed {seed}, {listed}: {type(error).__name__}: {error}") from error


class RandomViewTests(BackendCase):
    @each(seed=SEEDS, dtype=DTYPES)
    def test_random_views_are_read_as_numpys_as_strided(self, ctx: Context, seed: int, dtype: DType) -> None:
        random = np.random.default_rng(seed)
        flat = random.choice(special_values(dtype), SIZE)
        tensor = ctx.from_numpy(flat)
        for _ in range(DRAWS):
            view = draw(random, SHAPES[int(random.integers(len(SHAPES)))])
            model, actual = shown(flat, view).copy(), tensor.view(ctx, *view)
            with told(seed, view):
                assert_same(actual, model)
                assert_same(actual.contiguous(ctx), model)
                for axis in range(model.ndim):
                    size = model.shape[axis]
                    rows = random.integers(0, max(size, 1), 3 if size else 0)
                    taken = np.take(model, rows, axis)
                    assert_same(actual.rows(ctx, rows, axis), taken)
                    assert_same(actual.rows(ctx, ctx.from_numpy(rows.astype(np.int32)), axis), taken)
                    assert_same(actual.concat(ctx, actual, axis), np.concatenate([model, model], axis))
                    assert_same(actual.repeat(ctx, axis, 2), np.concatenate([model, model], axis))
        assert_same(tensor, flat)

    @each(seed=SEEDS, dtype=DTYPES)
    def test_random_views_are_written_as_numpys_as_strided(
        self, ctx: Context, seed: int, dtype: DType
    ) -> None:
        """Copy between views of one storage as if the source were read first. A view that repeats elements is
        read-only.
        """
        random = np.random.default_rng(1000 + seed)
        flat = random.choice(special_values(dtype), SIZE)
        tensor = ctx.from_numpy(flat)
        for _ in range(DRAWS):
            shape = SHAPES[int(random.integers(len(SHAPES)))]
            source, target = draw(random, shape), draw(random, shape)
            values, into = shown(flat, source).copy(), shown(flat, target)
            src, dst = tensor.view(ctx, *source), tensor.view(ctx, *target)
            with told(seed, source, target):
                if overlaps(target):
                    try:
                        src.copy(ctx, dst)
                    except ml.ReadOnlyError:
                        continue
                    raise AssertionError("a view that shows an element twice was written")
                if shape and random.integers(2):
                    axis = int(random.integers(len(shape)))
                    order = random.permutation(shape[axis])
                    dst.set_rows(ctx, src, order, axis)
                    into[(slice(None),) * axis + (order,)] = values
                else:
                    src.copy(ctx, dst)
                    into[...] = values
                assert bits(tensor.to_numpy()).tolist() == bits(flat).tolist()
