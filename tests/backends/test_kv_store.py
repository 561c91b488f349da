"""How backends write and read K and V at once: the answers of slice and copy, and the same refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache
from kvcache import cache as errors
from ml import DType

ROWS, HEADS, DIM, V_DIM = 12, 2, 4, 6
ORDERS = {"head major": (1, 0, 2), "token major": (0, 1, 2)}


@pytest.fixture(params=["numpy", "torch", "mlx"])
def backend(request: pytest.FixtureRequest) -> Iterator[ml.Backend]:
    pytest.importorskip({"numpy": "numpy", "torch": "torch", "mlx": "mlx.core"}[request.param])
    with ml.open_backend(request.param, device="cpu") as opened:
        yield opened


@pytest.fixture
def ctx(backend: ml.Backend) -> Iterator[ml.Context]:
    with backend.new_context() as context:
        yield context


def halves(ctx: ml.Context, order: tuple[int, ...]) -> tuple[ml.Tensor, ml.Tensor]:
    """Keys (ROWS, HEADS, DIM) and values (ROWS, HEADS, V_DIM) of zeros, in an order of axes."""
    made = []
    for dim in (DIM, V_DIM):
        sizes = (ROWS, HEADS, dim)
        whole = ctx.zeros([sizes[axis] for axis in order], DType.F32)
        made.append(whole.permute(ctx, *(order.index(axis) for axis in range(3))))
    return made[0], made[1]


def store_of(backend: Any, key: ml.Tensor, value: ml.Tensor) -> ml.KVStore:
    assert isinstance(backend, ml.SupportsKVStorage)
    store = backend.kv_store(key, value)
    assert store is not None
    return store


def numbers(count: int, dim: int) -> np.ndarray:
    return np.arange(1, 1 + count * HEADS * dim, dtype=np.float32).reshape(count, HEADS, dim)


def test_a_narrower_cache_converts_what_is_put(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = CausalCache()
    cache.init(backend, DType.BF16, 1, 8, 4)
    for position in range(3):
        cache.start_forward(ctx, Batch([position], [0]))
        some = ctx.from_numpy(numbers(1, DIM) / 3)
        cache.put(ctx, some, some)
    key = cache.get(ctx)[0].to_numpy().astype(np.float32)
    np.testing.assert_array_equal(key[2:], some.cast(ctx, DType.BF16).to_numpy().astype(np.float32))


@pytest.mark.parametrize("count", [1, 3])
def test_refusals_of_put_say_what_is_wrong_and_leave_the_cache(
    backend: ml.Backend, ctx: ml.Context, count: int
) -> None:
    cache = CausalCache()
    cache.init(backend, DType.F32, 1, 8, 4)
    cache.start_forward(ctx, Batch(range(count), [0] * count))
    good = ctx.full((count, HEADS, DIM), 1, DType.F32)
    cache.put(ctx, good, good)
    for bad in ((count + 1, HEADS, DIM), (count, HEADS + 1, DIM), (count, HEADS, DIM + 1), (count, DIM)):
        wrong = ctx.full(bad, 2, DType.F32)
        for pair in ((wrong, good), (good, wrong)):
            with pytest.raises(errors.InvalidRangeError, match="put"):
                cache.put(ctx, *pair)
    whole = ctx.full((count, HEADS, DIM), 2, DType.I32)
    for pair in ((whole, good), (good, whole)):
        with pytest.raises(ml.DTypeError, match="they must be of float dtypes"):
            cache.put(ctx, *pair)
    foreign = ml.open_backend("numpy")
    with foreign, foreign.new_context() as other, pytest.raises(ml.DeviceError):
        cache.put(ctx, good, other.full((count, HEADS, DIM), 2, DType.F32))
    key, value, _ = cache.get(ctx)
    assert key.to_numpy().max() == 1
    assert value.to_numpy().max() == 1
    closed = backend.new_context()
    closed.close()
    with pytest.raises(ml.ClosedError):
        cache.put(closed, good, good)
    with pytest.raises(ml.ClosedError):
        cache.get(closed)


def test_put_of_what_get_returned_reads_before_it_writes(backend: ml.Backend, ctx: ml.Context) -> None:
    cache = CausalCache()
    cache.init(backend, DType.F32, 1, 8, 4)
    cache.start_forward(ctx, Batch([0, 1, 2], [0] * 3))
    first = ctx.from_numpy(numbers(3, DIM))
    cache.put(ctx, first, first)
    key, value, _ = cache.get(ctx)
    backwards = key.rows(ctx, [2, 1, 0])
    cache.remove(0, 0)
    cache.start_forward(ctx, Batch([0, 1, 2], [0] * 3))  # the same cells
    cache.put(ctx, backwards, value)
    key, value, _ = cache.get(ctx)
    np.testing.assert_array_equal(key.to_numpy(), numbers(3, DIM)[::-1])
    np.testing.assert_array_equal(value.to_numpy(), numbers(3, DIM))


@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("rows", [(1, 4, 7), (0, 1, 2), (7, 4, 1), (2, 5, 6), (11,), (0, 11), (1, 6, 11)])
def test_rows_apart_are_written_evenly_spaced_or_not(
    backend: Any, ctx: ml.Context, rows: tuple[int, ...], order: str
) -> None:
    pair = halves(ctx, ORDERS[order])
    store = store_of(backend, *pair)
    if not isinstance(store, ml.KVRowStore):
        pytest.skip("no rows apart")
    new = [numbers(len(rows), dim) for dim in (DIM, V_DIM)]
    listed = np.array([*rows, 9, ROWS - 2, ROWS, -1, 2], np.int32)  # a pass uploads several lists together
    if isinstance(backend, ml.SupportsTransfers):
        (where,) = backend.upload(ctx, [(listed, DType.I32)])
    else:
        where = ctx.from_numpy(listed)
    count = len(rows)
    assert store.write_rows(ctx, where.slice(ctx, 0, 0, count), *map(ctx.from_numpy, new))
    for whole, part in zip(pair, new, strict=True):
        expected = np.zeros(whole.shape)
        expected[list(rows)] = part
        np.testing.assert_array_equal(whole.to_numpy(), expected)
    two = [ctx.from_numpy(numbers(2, dim)) for dim in (DIM, V_DIM)]
    for beyond in (count + 1, count + 2, count + 3) if backend.name == "torch" else ():
        assert not store.write_rows(ctx, where.slice(ctx, 0, beyond, beyond + 2), *two)
    for whole, part in zip(pair, new, strict=True):
        np.testing.assert_array_equal(whole.to_numpy()[list(rows)], part)


def test_a_native_array_over_the_memory_that_is_written_is_declined(
    backend: ml.Backend, ctx: ml.Context
) -> None:
    if backend.name == "mlx":
        pytest.skip("MLX copies an array that others have before it is written")
    key, value = halves(ctx, ORDERS["token major"])
    store, elsewhere = (
        store_of(backend, key, value),
        [ctx.zeros((2, HEADS, dim), DType.F32) for dim in (DIM, V_DIM)],
    )
    own: list[Any] = [key, value]
    for i in range(2):
        given = list(elsewhere)
        given[i] = ctx.from_native(own[i].native).slice(ctx, 0, 1, 3)
        assert not store.write(ctx, 0, 2, *given)


def test_tensors_that_show_an_element_twice_are_not_written(backend: ml.Backend, ctx: ml.Context) -> None:
    half = ctx.zeros((1, 1, 4), DType.F32)
    twice, new = half.view(ctx, 0, (4, 1, 4), (0, 0, 1)), ctx.full((2, 1, 4), 1, DType.F32)
    assert isinstance(backend, ml.SupportsKVStorage)
    for pair in ((twice, ctx.zeros((4, 1, 4), DType.F32)), (ctx.zeros((4, 1, 4), DType.F32), twice)):
        store = backend.kv_store(*pair)
        assert store is None or not store.write(ctx, 0, 2, new, new)
        assert not half.to_numpy().any()


@pytest.mark.parametrize("batch", [Batch([0, 1], [0, 0]), Batch([0, 0], [0, 2])], ids=["a run", "apart"])
@pytest.mark.parametrize("layout", list(ml.Layout))
@pytest.mark.parametrize("dtype", [DType.F32, ("F32", "Q8_0")], ids=["plain", "keys beside codes"])
def test_keys_and_values_of_get_may_be_put_the_other_way_round(
    backend: ml.Backend, ctx: ml.Context, batch: Batch, layout: ml.Layout, dtype: Any
) -> None:
    """Each lies in the memory that the other is written to."""
    cache = CausalCache()
    cache.set_config(ml.CacheConfig(layout=layout))
    cache.init(backend, dtype, 3, 8, 4)
    cache.start_forward(ctx, Batch([0], [1]))  # between the two sequences of the other pass
    cache.put(ctx, *[ctx.zeros((1, HEADS, 32), DType.F32)] * 2)
    cache.start_forward(ctx, batch)
    one, two = (ctx.full((2, HEADS, 32), number, DType.F32) for number in (127, 254))
    cache.put(ctx, one, two)
    key, value, _ = cache.get(ctx)
    rows = [x.slice(ctx, 0, x.shape[0] - 2, x.shape[0]) for x in (value, key)]
    before = [x.to_numpy() for x in rows]
    for seq in {*batch.sequences}:
        cache.remove(seq, 0)
    cache.start_forward(ctx, batch)  # the same cells
    cache.put(ctx, *rows)
    key, value, _ = cache.get(ctx)
    for found, wanted in zip((key, value), before, strict=True):
        np.testing.assert_allclose(found.to_numpy()[-2:], wanted, rtol=1e-5)


def test_without_the_faster_view_torch_uses_as_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from backends.torch import store

    monkeypatch.setattr(store, "alias", store._strided)
    with ml.open_backend("torch", device="cpu") as backend, backend.new_context() as ctx:
        key, value = halves(ctx, ORDERS["head major"])
        kept = store_of(backend, key.slice(ctx, 0, 4, ROWS), value.slice(ctx, 0, 4, ROWS))
        new = ctx.from_numpy(numbers(2, DIM)), ctx.from_numpy(numbers(2, V_DIM))
        assert kept.write(ctx, 1, 2, *new)
        np.testing.assert_array_equal(key.to_numpy()[5:7], numbers(2, DIM))
        found = kept.read(ctx, 1, 2)
        assert found is not None
        assert torch.equal(found[1].native, new[1].native)


def test_a_store_of_a_part_of_a_storage_stays_inside_it() -> None:
    pytest.importorskip("torch")
    with ml.open_backend("torch", device="cpu") as backend, backend.new_context() as ctx:
        key, value = halves(ctx, ORDERS["token major"])
        kept = store_of(backend, key.slice(ctx, 0, 4, 8), value.slice(ctx, 0, 4, 8))
        new = ctx.from_numpy(numbers(2, DIM)), ctx.from_numpy(numbers(2, V_DIM))
        assert not kept.write(ctx, 3, 2, *new)
        assert kept.write(ctx, 2, 2, *new)
        assert np.flatnonzero(key.to_numpy().any(axis=(1, 2))).tolist() == [6, 7]
