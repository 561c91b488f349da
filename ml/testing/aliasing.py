"""A random walk of views and writes against a plain model of memory.

The model of a storage is a flat NumPy array, the model of a tensor an integer array that says
where in it each element lies. A view is then plain indexing of those integers, and a copy is
``flat[to] = flat[from]``: nothing of the geometry under test is used to predict it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import ml
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same
from ml.testing.samples import counting

__all__ = ["AliasingTests"]

SIZE = 40
STEPS = 14


@dataclass(eq=False)
class Memory:
    """The model of one storage."""

    flat: np.ndarray
    root: Tensor


@dataclass(eq=False)
class Shown:
    """A tensor and the model of what it shows."""

    tensor: Tensor
    memory: Memory
    where: np.ndarray

    @property
    def values(self) -> np.ndarray:
        return self.memory.flat[self.where]

    @property
    def writable(self) -> bool:
        return np.unique(self.where).size == self.where.size


def is_affine(where: np.ndarray) -> bool:
    """Whether an offset and strides can say these positions."""
    if where.size == 0:
        return True
    origin = where[(0,) * where.ndim]
    expected = np.full(where.shape, origin)
    for axis, size in enumerate(where.shape):
        if size > 1:
            second = where[tuple(1 if other == axis else 0 for other in range(where.ndim))]
            if second < origin:
                return False
            index = np.arange(size).reshape([-1 if other == axis else 1 for other in range(where.ndim)])
            expected = expected + index * (second - origin)
    return bool((expected == where).all())


@dataclass
class World:
    """Everything that lives during one walk, and the moves it can make."""

    draw: st.DataObject
    contexts: list[Context]
    memories: list[Memory] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)

    @property
    def ctx(self) -> Context:
        return self.draw.draw(st.sampled_from(self.contexts))

    def number(self, low: int, high: int) -> int:
        return self.draw.draw(st.integers(low, high))

    def some_shape(self, axes: int = 3, size: int = 4) -> tuple[int, ...]:
        return tuple(self.draw.draw(st.lists(st.integers(0, size), max_size=axes)))

    def add(self, tensor: Tensor, memory: Memory, where: np.ndarray) -> Shown:
        self.shown.append(Shown(tensor, memory, where))
        assert tensor.shape == where.shape
        return self.shown[-1]

    def add_memory(self, tensor: Tensor, values: np.ndarray) -> None:
        self.memories.append(Memory(values.ravel().copy(), tensor))
        self.add(tensor, self.memories[-1], np.arange(values.size).reshape(values.shape))

    def pick(self) -> Shown:
        return self.draw.draw(st.sampled_from(self.shown))

    def view_of(self, memory: Memory, shape: tuple[int, ...]) -> Shown:
        """A random view of that shape, taken from the storage's first tensor."""
        room = memory.flat.size - 1
        strides = []
        for size in shape:
            stride = self.number(0, min(room // max(size - 1, 1), 9)) if size > 1 else self.number(0, 9)
            strides.append(stride)
            room -= (size - 1) * stride if size > 1 else 0
        offset = self.number(0, max(room, 0))
        where = np.full(shape, offset)
        for index, stride in zip(np.indices(shape), strides, strict=True):
            where = where + index * stride
        flat = memory.root
        return self.add(flat.view(self.ctx, offset, shape, tuple(strides)), memory, where)

    # Moves.

    def view(self) -> None:
        old = self.pick()
        if old.where.size == 0:
            return
        shape = self.some_shape()
        strides = tuple(self.draw.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))))
        offset = self.number(-SIZE, SIZE)
        first = int(old.where.flat[0]) + offset
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        inside = 0 <= first <= old.memory.flat.size if 0 in shape else 0 <= first <= last < old.memory.flat.size
        if not inside:
            with pytest.raises(ml.BoundsError):
                old.tensor.view(self.ctx, offset, shape, strides)
            return
        where = np.full(shape, first)
        for index, stride in zip(np.indices(shape), strides, strict=True):
            where = where + index * stride
        self.add(old.tensor.view(self.ctx, offset, shape, strides), old.memory, where)

    def slice(self) -> None:
        old = self.pick()
        if not old.where.ndim:
            return
        axis = self.number(0, old.where.ndim - 1)
        start = self.number(0, old.where.shape[axis])
        stop = self.number(start, old.where.shape[axis])
        step = self.number(1, 3)
        where = old.where[(slice(None),) * axis + (slice(start, stop, step),)]
        self.add(old.tensor.slice(self.ctx, axis, start, stop, step), old.memory, where)

    def permute(self) -> None:
        old = self.pick()
        axes = tuple(self.draw.draw(st.permutations(range(old.where.ndim))))
        if axes:
            self.add(old.tensor.permute(self.ctx, *axes), old.memory, old.where.transpose(axes))

    def reshape(self) -> None:
        """It succeeds exactly where an offset and strides can say the result."""
        old = self.pick()
        shape, rest = [], old.where.size
        while rest > 1 and len(shape) < 4:
            factor = self.draw.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
            shape.append(factor)
            rest //= factor
        where = old.where.reshape([*shape, rest])
        if is_affine(where):
            self.add(old.tensor.reshape(self.ctx, *where.shape), old.memory, where)
        else:
            with pytest.raises(ml.ShapeError):
                old.tensor.reshape(self.ctx, *where.shape)

    def copy(self) -> None:
        """Between two views of one shape, most often of one storage."""
        shape = self.some_shape(size=3)
        dst = self.view_of(self.draw.draw(st.sampled_from(self.memories)), shape)
        src = self.view_of(self.draw.draw(st.sampled_from([dst.memory, *self.memories])), shape)
        self.write(src, dst)

    def copy_known(self) -> None:
        """Into a tensor that views, slices and permutations made."""
        dst = self.pick()
        self.write(self.view_of(self.draw.draw(st.sampled_from(self.memories)), dst.where.shape), dst)

    def write(self, src: Shown, dst: Shown) -> None:
        if not dst.writable:
            with pytest.raises(ml.ReadOnlyError):
                src.tensor.copy(self.ctx, dst.tensor)
            return
        values = src.values.astype(dst.memory.flat.dtype)
        src.tensor.copy(self.ctx, dst.tensor)
        dst.memory.flat[dst.where] = values

    def set_rows(self) -> None:
        dst = self.pick()
        if not dst.where.ndim or not dst.writable:
            return
        axis = self.number(0, dst.where.ndim - 1)
        rows = self.draw.draw(st.permutations(range(dst.where.shape[axis])))
        rows = rows[: self.number(0, len(rows))]
        shape = (*dst.where.shape[:axis], len(rows), *dst.where.shape[axis + 1 :])
        src = self.view_of(self.draw.draw(st.sampled_from([dst.memory, *self.memories])), shape)
        values = src.values.astype(dst.memory.flat.dtype)
        on_device = self.draw.draw(st.booleans())
        given_rows = self.ctx.from_numpy(np.array(rows, np.int32)) if on_device else rows
        dst.tensor.set_rows(self.ctx, src.tensor, given_rows, axis)
        dst.memory.flat[dst.where.take(np.array(rows, int), axis)] = values

    def new_storage(self) -> None:
        old = self.pick()
        if old.where.size > SIZE * 2 or len(self.memories) > 6:
            return
        if self.draw.draw(st.booleans()):
            self.add_memory(old.tensor.contiguous(self.ctx), old.values)
        else:
            self.add_memory(old.tensor.cast(self.ctx, DType.F32), old.values.astype(np.float32))

    def check(self, shown: Shown) -> None:
        assert_same(shown.tensor, shown.values)


class AliasingTests(BackendCase):
    @pytest.mark.parametrize("dtypes", [(DType.F32, DType.F32), (DType.BF16, DType.I32)], ids=str)
    def test_any_walk_of_views_and_writes_agrees_with_flat_memory(
        self, backend: Backend, dtypes: tuple[DType, ...]
    ) -> None:
        @settings(
            max_examples=60,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
        )
        @given(st.data())
        def walk(draw: st.DataObject) -> None:
            with backend.new_context() as first, backend.new_context() as second:
                world = World(draw, [first, second])
                for i, dtype in enumerate(dtypes):
                    values = counting((SIZE,), dtype, start=40 * i)
                    world.add_memory(first.from_numpy(values), values)
                moves = [world.view, world.slice, world.permute, world.reshape, world.copy, world.copy,
                         world.copy_known, world.set_rows, world.new_storage]  # fmt: skip
                for _ in range(STEPS):
                    draw.draw(st.sampled_from(moves))()
                    world.check(world.pick())
                for shown in world.shown:
                    world.check(shown)

        walk()

    def test_the_model_of_reshape_knows_what_strides_can_say(self) -> None:
        grid = np.arange(math.prod((2, 3, 4))).reshape(2, 3, 4)
        assert is_affine(grid)
        assert is_affine(grid.transpose(2, 0, 1).reshape(4, 6))
        assert not is_affine(grid.transpose(2, 1, 0).reshape(24))
        assert not is_affine(grid[::-1])
