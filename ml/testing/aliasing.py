"""A random walk of views and writes against a plain model of memory.

A flat NumPy array models a storage; an integer array of positions in it models a tensor. A view then indexes
these positions, and a copy is ``flat[to] = flat[from]``: the prediction shares no code with the geometry
under test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np
import pytest
from hypothesis import Phase, Verbosity, given, settings
from hypothesis import strategies as st

import ml
from ml.dtypes import DType
from ml.protocols import Backend, Context, Indices, Tensor
from ml.testing.harness import BackendCase, assert_same, each
from ml.testing.samples import counting, positions

SIZE = 40
LONG, LONG_SEED = 400, 1
"""Length in bytes and seed of the long walk, which finds bugs that short walks rarely do."""
_T = TypeVar("_T")


class TapeEndError(Exception):
    """The walk is over."""


@dataclass(eq=False)
class Memory:
    """The model of one storage, and a tensor that shows all of it."""

    flat: np.ndarray
    root: Tensor


@dataclass(eq=False)
class Shown:
    """A tensor and the model of what it shows."""

    name: str
    tensor: Tensor
    memory: Memory
    where: np.ndarray

    @property
    def values(self) -> np.ndarray:
        values: np.ndarray = self.memory.flat[self.where]
        return values

    @property
    def writable(self) -> bool:
        return np.unique(self.where).size == self.where.size


def is_affine(where: np.ndarray) -> bool:
    """Whether an offset and strides can express these positions."""
    if where.size == 0:
        return True
    origin = (0,) * where.ndim
    strides = []
    for axis, size in enumerate(where.shape):
        second = where[tuple(min(size - 1, 1) if other == axis else 0 for other in range(where.ndim))]
        strides.append(int(second - where[origin]))
    return min(strides, default=0) >= 0 and bool(
        (positions(int(where[origin]), where.shape, tuple(strides)) == where).all()
    )


@dataclass
class World:
    """The state of one walk, and its moves.

    Choices come from a tape of bytes, so that hypothesis can shrink a failing walk; ``log`` is the walk as
    code.
    """

    tape: Iterator[int]
    contexts: list[Context]
    memories: list[Memory] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    # Choices.

    def number(self, low: int, high: int) -> int:
        for byte in self.tape:
            return low + byte % (high - low + 1)
        raise TapeEndError

    def one_of(self, things: Sequence[_T]) -> _T:
        return things[self.number(0, len(things) - 1)]

    def order(self, count: int) -> list[int]:
        rest = list(range(count))
        return [rest.pop(self.number(0, len(rest) - 1)) for _ in range(count)]

    def some_shape(self, size: int = 4) -> tuple[int, ...]:
        return tuple(self.number(0, size) for _ in range(self.number(0, 3)))

    @property
    def ctx(self) -> Context:
        return self.one_of(self.contexts)

    def pick(self) -> Shown:
        return self.one_of(self.shown)

    # State.

    def add(self, tensor: Tensor, memory: Memory, where: np.ndarray, call: str) -> Shown:
        self.shown.append(Shown(f"t{len(self.shown)}", tensor, memory, where))
        self.log.append(f"{self.shown[-1].name} = {call}")
        assert tensor.shape == where.shape
        return self.shown[-1]

    def add_memory(self, tensor: Tensor, values: np.ndarray, call: str) -> None:
        self.memories.append(Memory(values.ravel().copy(), tensor))
        self.add(tensor, self.memories[-1], np.arange(values.size).reshape(values.shape), call)

    def view_of(self, memory: Memory, shape: tuple[int, ...]) -> Shown:
        """A random view of that shape, taken from the storage's first tensor."""
        room = memory.flat.size - 1
        strides = []
        for size in shape:
            stride = self.number(0, min(room // max(size - 1, 1), 9))
            strides.append(stride)
            room -= max(size - 1, 0) * stride
        offset = self.number(0, room)
        root = next(shown for shown in self.shown if shown.tensor is memory.root)
        tensor = memory.root.view(self.ctx, offset, shape, tuple(strides))
        call = f"{root.name}.view({offset}, {shape}, {tuple(strides)})"
        return self.add(tensor, memory, positions(offset, shape, tuple(strides)), call)

    # Moves.

    def view(self) -> None:
        old = self.pick()
        shape = self.some_shape()
        strides = tuple(self.number(0, 9) for _ in shape)
        offset = self.number(-SIZE, SIZE)
        if old.where.size == 0:  # the offset of an empty view is unspecified
            return
        call = f"{old.name}.view({offset}, {shape}, {strides})"
        first = int(old.where.flat[0]) + offset
        where = positions(first, shape, strides)
        end = int(where.max()) + 1 if where.size else first
        if first >= 0 and end <= old.memory.flat.size:
            self.add(old.tensor.view(self.ctx, offset, shape, strides), old.memory, where, call)
        else:
            self.refused(call, ml.BoundsError, lambda: old.tensor.view(self.ctx, offset, shape, strides))

    def slice(self) -> None:
        old = self.pick()
        if not old.where.ndim:
            return
        axis = self.number(0, old.where.ndim - 1)
        start = self.number(0, old.where.shape[axis])
        stop = self.number(start, old.where.shape[axis])
        step = self.number(1, 3)
        where = old.where[(slice(None),) * axis + (slice(start, stop, step),)]
        tensor = old.tensor.slice(self.ctx, axis, start, stop, step)
        self.add(tensor, old.memory, where, f"{old.name}.slice({axis}, {start}, {stop}, {step})")

    def permute(self) -> None:
        old = self.pick()
        axes = self.order(old.where.ndim)
        if axes:
            tensor = old.tensor.permute(self.ctx, *axes)
            self.add(tensor, old.memory, old.where.transpose(axes), f"{old.name}.permute{tuple(axes)}")

    def reshape(self) -> None:
        """Succeeds exactly if an offset and strides can express the result."""
        old = self.pick()
        shape: list[int] = []
        rest = old.where.size
        while rest > 1 and len(shape) < 3:
            shape.append(self.one_of([n for n in range(1, rest + 1) if rest % n == 0]))
            rest //= shape[-1]
        where = old.where.reshape([*shape, rest])
        call = f"{old.name}.reshape{where.shape}"
        if is_affine(where):
            self.add(old.tensor.reshape(self.ctx, *where.shape), old.memory, where, call)
        else:
            self.refused(call, ml.ShapeError, lambda: old.tensor.reshape(self.ctx, *where.shape))

    def copy(self) -> None:
        """Copy between two views of the same shape, usually of one storage."""
        shape = self.some_shape(size=3)
        dst = self.view_of(self.one_of(self.memories), shape)
        self.write(self.view_of(self.one_of([dst.memory, *self.memories]), shape), dst)

    def copy_known(self) -> None:
        """Copy into a tensor from earlier moves."""
        dst = self.pick()
        self.write(self.view_of(self.one_of(self.memories), dst.where.shape), dst)

    def write(self, src: Shown, dst: Shown) -> None:
        call = f"{src.name}.copy({dst.name})"
        if not dst.writable:
            self.refused(call, ml.ReadOnlyError, lambda: src.tensor.copy(self.ctx, dst.tensor))
            return
        values = src.values.astype(dst.memory.flat.dtype)
        self.log.append(call)
        src.tensor.copy(self.ctx, dst.tensor)
        dst.memory.flat[dst.where] = values

    def set_rows(self) -> None:
        dst = self.pick()
        if not dst.where.ndim or not dst.writable:
            return
        axis = self.number(0, dst.where.ndim - 1)
        rows = self.order(dst.where.shape[axis]) if dst.where.shape[axis] < 20 else [3, 11, 0]
        rows = rows[: self.number(0, len(rows))]
        shape = (*dst.where.shape[:axis], len(rows), *dst.where.shape[axis + 1 :])
        src = self.view_of(self.one_of([dst.memory, *self.memories]), shape)
        values = src.values.astype(dst.memory.flat.dtype)
        where = dst.where.take(np.array(rows, int), axis)
        kinds: list[Indices] = [rows, self.ctx.from_numpy(np.array(rows, np.int32))]
        indices = self.one_of(kinds)
        self.log.append(
            f"{dst.name}.set_rows({src.name}, {rows}, {axis})  # indices: {type(indices).__name__}"
        )
        dst.tensor.set_rows(self.ctx, src.tensor, indices, axis)
        dst.memory.flat[where] = values

    def new_storage(self) -> None:
        old = self.pick()
        if not 0 < old.where.size <= 2 * SIZE or len(self.memories) > 6:
            return
        if self.number(0, 1):
            self.add_memory(old.tensor.contiguous(self.ctx), old.values, f"{old.name}.contiguous()")
        else:
            wide = old.values.astype(np.float32)
            self.add_memory(old.tensor.cast(self.ctx, DType.F32), wide, f"{old.name}.cast(F32)")

    def refused(self, call: str, error: type[Exception], refused: Callable[[], object]) -> None:
        self.log.append(f"{call}  # {error.__name__}")
        with pytest.raises(error):
            refused()

    def check(self, shown: Shown) -> None:
        self.log.append(f"{shown.name}.to_numpy()")
        assert_same(shown.tensor, shown.values)
        self.log.pop()

    def walk(self) -> None:
        moves = [self.view, self.slice, self.permute, self.reshape, self.copy, self.copy, self.copy_known,
                 self.set_rows, self.new_storage]  # fmt: skip
        try:
            with contextlib.suppress(TapeEndError):
                while True:
                    self.one_of(moves)()
                    self.check(self.pick())
            for shown in self.shown:
                self.check(shown)
        except Exception as error:
            error.add_note("the walk:\n    " + "\n    ".join(self.log))
            raise


def _walk(backend: Backend, dtypes: tuple[DType, ...], tape: bytes) -> None:
    """Walk as ``tape`` says, in two contexts, from one tensor of each dtype."""
    with backend.new_context() as first, backend.new_context() as second:
        world = World(iter(tape), [first, second])
        for i, dtype in enumerate(dtypes):
            values = counting((SIZE,), dtype, start=SIZE * i)
            world.add_memory(first.from_numpy(values), values, f"{SIZE} elements of {dtype}")
        world.walk()


PAIRS = {"F32-F32": (DType.F32, DType.F32), "BF16-I32": (DType.BF16, DType.I32)}


class AliasingTests(BackendCase):
    examples: ClassVar[int] = 30
    """The number of walks that hypothesis generates for each pair of dtypes."""

    @each(dtypes=PAIRS)
    def test_any_walk_of_views_and_writes_agrees_with_flat_memory(
        self, backend: Backend, dtypes: tuple[DType, ...]
    ) -> None:
        @settings(
            max_examples=self.examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
        )
        @given(st.binary(min_size=120, max_size=300))
        def walk(tape: bytes) -> None:
            _walk(backend, dtypes, tape)

        walk()

    @each(dtypes=PAIRS)
    def test_one_long_walk_agrees_with_flat_memory(self, backend: Backend, dtypes: tuple[DType, ...]) -> None:
        _walk(backend, dtypes, np.random.default_rng(LONG_SEED).bytes(LONG))
