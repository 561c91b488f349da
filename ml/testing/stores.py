"""Backends that write and read K and V at once: the results of slice and copy, and no partial writes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ml.capabilities import KVStore, SupportsKVStorage
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, each

ROWS, HEADS, DIM, V_DIM = 12, 2, 4, 6
ORDERS = {"head major": (1, 0, 2), "token major": (0, 1, 2), "dim first": (2, 1, 0)}
BUFFERS: dict[str, Callable[[Context, int], Tensor]] = {
    "reshaped": lambda ctx, dim: ctx.zeros((HEADS, ROWS, dim), DType.F32).reshape(ctx, ROWS, HEADS, dim),
    "stepped": lambda ctx, dim: ctx.zeros((2 * ROWS, HEADS, dim), DType.F32).slice(ctx, 0, 0, 2 * ROWS, 2),
    "some columns": lambda ctx, dim: ctx.zeros((ROWS, HEADS, dim + 3), DType.F32).slice(ctx, 2, 0, dim),
    "viewed": lambda ctx, dim: ctx.zeros((4, ROWS, HEADS * dim), DType.F32).view(ctx, 0, (ROWS, HEADS, dim)),
}
"""Kinds of buffers; a backend may lack a store for some of them."""


def halves(ctx: Context, order: tuple[int, ...], heads: int = HEADS) -> tuple[Tensor, Tensor]:
    """Zero keys (ROWS, heads, DIM) and values (ROWS, heads, V_DIM), laid out in the given order of axes."""
    made = []
    for dim in (DIM, V_DIM):
        sizes = (ROWS, heads, dim)
        whole = ctx.zeros([sizes[axis] for axis in order], DType.F32)
        made.append(whole.permute(ctx, *(order.index(axis) for axis in range(3))))
    return made[0], made[1]


def store_of(backend: Backend, key: Tensor, value: Tensor) -> KVStore:
    if not isinstance(backend, SupportsKVStorage):
        pytest.skip("no SupportsKVStorage: caches use slice and copy")
    store = backend.kv_store(key, value)
    if store is None:
        pytest.skip("no store for tensors like these")
    return store


def numbers(count: int, dim: int, first: int = 1) -> np.ndarray:
    return np.arange(first, first + count * HEADS * dim, dtype=np.float32).reshape(count, HEADS, dim)


DECLINED: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {
    "rows beyond the end": (ROWS - 1, 2, (2, HEADS, DIM), (2, HEADS, V_DIM)),
    "rows before the start": (-1, 1, (1, HEADS, DIM), (1, HEADS, V_DIM)),
    "no row": (0, 0, (0, HEADS, DIM), (0, HEADS, V_DIM)),
    "keys of another size": (0, 1, (1, HEADS, DIM + 1), (1, HEADS, V_DIM)),
    "values of another size": (0, 1, (1, HEADS, DIM), (1, HEADS, V_DIM - 1)),
    "more keys than rows": (0, 1, (2, HEADS, DIM), (1, HEADS, V_DIM)),
    "fewer axes": (0, 1, (HEADS, DIM), (1, HEADS, V_DIM)),
}


class KVStoreTests(BackendCase):
    """What ``ml.KVStore`` promises, for backends that have one."""

    @each(order=ORDERS, rows=[(0, 1), (3, 1), (2, 4), (0, ROWS), (ROWS - 1, 1)], heads=[HEADS, 1])
    def test_rows_that_were_written_are_read_back_and_no_others_change(
        self, backend: Backend, ctx: Context, order: tuple[int, ...], rows: tuple[int, int], heads: int
    ) -> None:
        start, count = rows
        key, value = halves(ctx, order, heads)
        store = store_of(backend, key, value)
        new_key, new_value = numbers(count, DIM)[:, :heads], numbers(count, V_DIM, 1000)[:, :heads]
        sources = [  # rows whose own storage has the buffer's shape
            ctx.from_numpy(new.reshape([new.shape[axis] for axis in order])).reshape(ctx, *new.shape)
            for new in (new_key, new_value)
        ]
        assert store.write(ctx, start, count, sources[0], sources[1])
        expected_key, expected_value = np.zeros((ROWS, heads, DIM)), np.zeros((ROWS, heads, V_DIM))
        expected_key[start : start + count], expected_value[start : start + count] = new_key, new_value
        for whole, expected in ((key, expected_key), (value, expected_value)):
            np.testing.assert_array_equal(whole.to_numpy(), expected)
        actual = store.read(ctx, start, count)
        assert actual is not None
        for part, expected in zip(actual, (new_key, new_value), strict=True):
            assert part.shape == expected.shape
            np.testing.assert_array_equal(part.to_numpy(), expected)

    @each(order=ORDERS)
    def test_sources_may_be_strided_views(
        self, backend: Backend, ctx: Context, order: tuple[int, ...]
    ) -> None:
        key, value = halves(ctx, order)
        store = store_of(backend, key, value)
        new_key = ctx.from_numpy(numbers(3, DIM).transpose(1, 0, 2).copy()).permute(ctx, 1, 0, 2)
        new_value = ctx.from_numpy(numbers(6, V_DIM)).slice(ctx, 0, 0, 6, 2)
        assert store.write(ctx, 5, 3, new_key, new_value)
        np.testing.assert_array_equal(key.to_numpy()[5:8], numbers(3, DIM))
        np.testing.assert_array_equal(value.to_numpy()[5:8], numbers(6, V_DIM)[::2])

    @each(buffer=BUFFERS)
    def test_any_buffers_are_written_where_the_rows_lie_or_left_to_copy(
        self, backend: Backend, ctx: Context, buffer: Callable[[Context, int], Tensor]
    ) -> None:
        key, value = buffer(ctx, DIM), buffer(ctx, V_DIM)
        store = store_of(backend, key, value)
        if store.write(ctx, 3, 2, ctx.from_numpy(numbers(2, DIM)), ctx.from_numpy(numbers(2, V_DIM))):
            for tensor, dim in ((key, DIM), (value, V_DIM)):
                expected = np.zeros((ROWS, HEADS, dim), np.float32)
                expected[3:5] = numbers(2, dim)
                np.testing.assert_array_equal(tensor.to_numpy(), expected)

    def test_what_is_read_aliases_the_storage(self, backend: Backend, ctx: Context) -> None:
        key, value = halves(ctx, ORDERS["head major"])
        store = store_of(backend, key, value)
        actual = store.read(ctx, 2, 3)
        assert actual is not None
        ctx.from_numpy(numbers(1, DIM)).copy(ctx, key.slice(ctx, 0, 3, 4))
        np.testing.assert_array_equal(actual[0].to_numpy()[1:2], numbers(1, DIM))
        ctx.full((3, HEADS, DIM), 5, DType.F32).copy(ctx, actual[0])
        assert key.to_numpy()[2:5].min() == 5
        assert actual[0].strides == key.strides

    @each(case=DECLINED)
    def test_what_is_not_plain_is_declined_and_nothing_written(
        self, backend: Backend, ctx: Context, case: tuple[int, int, tuple[int, ...], tuple[int, ...]]
    ) -> None:
        key, value = halves(ctx, ORDERS["head major"])
        store = store_of(backend, key, value)
        start, count, key_shape, value_shape = case
        new = ctx.full(key_shape, 1, DType.F32), ctx.full(value_shape, 1, DType.F32)
        assert not store.write(ctx, start, count, *new)
        assert not key.to_numpy().any()
        assert not value.to_numpy().any()
        if key_shape[-1] == DIM and value_shape[-1] == V_DIM and not 0 < count <= ROWS - start <= ROWS:
            assert store.read(ctx, start, count) is None

    def test_tensors_of_elsewhere_and_closed_contexts_are_declined(
        self, backend: Backend, ctx: Context, open_backend: Callable[[], Backend]
    ) -> None:
        key, value = halves(ctx, ORDERS["head major"])
        store = store_of(backend, key, value)
        mine = ctx.full((1, HEADS, DIM), 1, DType.F32), ctx.full((1, HEADS, V_DIM), 1, DType.F32)
        with open_backend() as again, again.new_context() as other:
            assert not store.write(other, 0, 1, *mine)
            assert store.read(other, 0, 1) is None
            assert not store.write(ctx, 0, 1, mine[0], other.full((1, HEADS, V_DIM), 1, DType.F32))
            assert not store.write(ctx, 0, 1, other.full((1, HEADS, DIM), 1, DType.F32), mine[1])
        closed = backend.new_context()
        closed.close()
        assert not store.write(closed, 0, 1, *mine)
        assert store.read(closed, 0, 1) is None
        assert not key.to_numpy().any()

    def test_a_source_in_the_memory_that_is_written_is_declined(self, backend: Backend, ctx: Context) -> None:
        key, value = halves(ctx, ORDERS["head major"])
        store = store_of(backend, key, value)
        elsewhere = ctx.zeros((2, HEADS, V_DIM), DType.F32)
        assert not store.write(ctx, 0, 2, key.slice(ctx, 0, 1, 3), elsewhere)
        keys, values = ctx.zeros((ROWS, HEADS, DIM), DType.F32), ctx.zeros((ROWS, HEADS, DIM), DType.F32)
        store = store_of(backend, keys, values)
        new = ctx.full((2, HEADS, DIM), 1, DType.F32)
        if store.write(ctx, 0, 2, new, keys.slice(ctx, 0, 0, 2)):  # reads the source first
            assert not values.to_numpy().any()
