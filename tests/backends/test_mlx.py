"""What is MLX's own about the mlx backend; the contract itself is tested by ml.testing."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache
from ml import CAUSAL, DType
from ml.nn import LinearScaling, RopeSpec, YarnScaling, apply_rope, generic_attention, rope_tables
from ml.testing.attention import causal_matrix, reference

mx = pytest.importorskip("mlx.core")

from backends.mlx import work as work_module  # noqa: E402
from backends.mlx.backend import MlxBackend, MlxContext  # noqa: E402
from backends.mlx.regions import is_contiguous, region_of, row_region_of, runs_of  # noqa: E402
from backends.mlx.tensor import MlxTensor  # noqa: E402
from backends.mlx.work import PENDING_RESULTS  # noqa: E402

FLOATS = {DType.F32: mx.float32, DType.F16: mx.float16, DType.BF16: mx.bfloat16}
HEADS, CELLS, DIM = 4, 4096, 64
BUFFER = HEADS * CELLS * DIM * 4  # 4 MiB
NOISE = BUFFER // 8


@pytest.fixture
def backend() -> Iterator[MlxBackend]:
    with MlxBackend(device="cpu") as opened:
        yield opened


@pytest.fixture
def ctx(backend: MlxBackend) -> MlxContext:
    return backend.new_context()


def cells_of(ctx: MlxContext, dtype: DType = DType.F32) -> Any:
    """A head-major buffer seen as (cells, heads, dim), in memory already."""
    cells = ctx.zeros((HEADS, CELLS, DIM), dtype).permute(ctx, 1, 0, 2)
    ctx.compute(cells)
    return cells


def taken(backend: MlxBackend, work: Callable[[], Any]) -> int:
    """Bytes that MLX held at the most during ``work``, beyond what it held before."""
    gc.collect()
    mx.synchronize(backend.work.stream)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    keep = work()
    mx.synchronize(backend.work.stream)
    peak: int = mx.get_peak_memory()
    del keep
    return max(0, peak - before)


# The plugin.


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(ml.DeviceError, match="no device 'tpu'"):
        MlxBackend(device="tpu")
    if not mx.is_available(mx.gpu):
        with pytest.raises(ml.DeviceError, match="'cpu' only"):
            MlxBackend(device="gpu")


def test_neither_default_device_nor_default_stream_is_changed(ctx: MlxContext) -> None:
    before = mx.default_device(), mx.default_stream(mx.cpu)
    x = ctx.from_numpy(np.ones((2, 3), np.float32))
    x.add(ctx, x).gelu(ctx).copy(ctx, x)
    x.to_numpy()
    assert (mx.default_device(), mx.default_stream(mx.cpu)) == before


# Donation: a buffer is never copied whole because someone holds a view of it.


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_held_views_cost_no_copy(backend: MlxBackend, ctx: MlxContext, dtype: DType) -> None:
    cells, token = cells_of(ctx, dtype), ctx.full((1, HEADS, DIM), 1, dtype)
    held = []

    def steps() -> None:
        for position in range(40):
            token.copy(ctx, cells.slice(ctx, 0, position, position + 1))
            held.append(cells.slice(ctx, 0, 0, position + 1))
            assert held[-1].slice(ctx, 0, position, position + 1).to_numpy().all()
            ctx.compute(*held)

    assert taken(backend, steps) < NOISE
    assert held[0].to_numpy().all()  # and they see what was written since
    ctx.zeros(token.shape, dtype).copy(ctx, cells.slice(ctx, 0, 0, 1))
    assert not held[0].to_numpy().any()


def test_chained_writes_cost_no_copy_and_a_bounded_graph(backend: MlxBackend, ctx: MlxContext) -> None:
    cells, token = cells_of(ctx), ctx.full((1, HEADS, DIM), 1, DType.F32)
    count = 3 * PENDING_RESULTS

    def steps() -> list[Any]:
        held = []
        for position in range(count):
            token.copy(ctx, cells.slice(ctx, 0, position, position + 1))
            held.append(cells.slice(ctx, 0, 0, position + 1))
            assert backend.work.pending <= PENDING_RESULTS
        cells.slice(ctx, 0, count, count + 1).to_numpy()
        return held

    assert taken(backend, steps) < NOISE
    assert cells.to_numpy()[:, 0, 0].sum() == count


def test_much_written_data_is_not_left_waiting(
    backend: MlxBackend, ctx: MlxContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_module, "PENDING_BYTES", 1000)
    x = ctx.zeros((100,), DType.F32)
    before = backend.work.epoch
    ctx.zeros((100,), DType.F32).copy(ctx, x)
    ctx.zeros((100,), DType.F32).copy(ctx, x)
    assert backend.work.epoch == before
    ctx.zeros((100,), DType.F32).copy(ctx, x)
    assert backend.work.epoch == before + 1


def test_what_a_write_of_everything_leaves_is_the_hosts_to_write(
    backend: MlxBackend, ctx: MlxContext
) -> None:
    key, value = (ctx.zeros((2, 4, 8), DType.F32).permute(ctx, 1, 0, 2) for _ in range(2))
    store = backend.kv_store(key, value)
    assert store is not None
    given = np.arange(64, dtype=np.float32).reshape(4, 2, 8)
    new = ctx.from_numpy(given)
    assert store.write(ctx, 0, 4, new, new)
    np.testing.assert_array_equal(key.to_numpy(), given)
    place = backend.overwrite(ctx, key)
    assert place is not None
    place[...] = 2 * given
    del place
    np.testing.assert_array_equal(key.to_numpy(), 2 * given)
    np.testing.assert_array_equal(new.to_numpy(), given)
    np.testing.assert_array_equal(value.to_numpy(), given)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("layout", ml.Layout)
@pytest.mark.parametrize("dtype", [DType.F32, "Q8_0", "Q4_0"])
def test_a_cache_of_any_number_of_heads_is_written_by_its_store(
    backend: MlxBackend, ctx: MlxContext, dtype: Any, layout: ml.Layout, heads: int
) -> None:
    read = []
    with ml.open_backend("numpy") as other, other.new_context() as beside:
        for owner, place in ((backend, ctx), (other, beside)):
            cache = CausalCache()
            cache.set_config(ml.CacheConfig(layout=layout))
            cache.init(owner, dtype, 1, 8, 8)
            for begin, count in ((0, 3), (3, 1), (4, 2)):
                cache.start_forward(place, Batch(range(begin, begin + count), [0] * count))
                new = np.random.default_rng(begin).normal(size=(count, heads, 64)).astype(np.float32)
                cache.put(place, place.from_numpy(new), place.from_numpy(-new))
                read.append([part.to_numpy() for part in cache.get(place)[:2]])
            stored = cache.storage.buffers[0].store is not None
            assert stored or owner is other
    for own, theirs in zip(read[:3], read[3:], strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-6)


def test_a_write_waits_for_readers_in_flight_instead_of_copying(backend: MlxBackend, ctx: MlxContext) -> None:
    cells, token = cells_of(ctx), ctx.full((1, HEADS, DIM), 1, DType.F32)
    query = ctx.full((1, HEADS, DIM), 0.1, DType.F32)
    results = []

    def steps() -> None:
        for position in range(6):
            token.copy(ctx, cells.slice(ctx, 0, position, position + 1))
            seen = cells.slice(ctx, 0, 0, CELLS)
            results.append(backend.attention(ctx, query, seen, seen, None, 1.0))
            if position % 2:
                ctx.compute(results[-1])  # otherwise the read is still pending at the next write

    assert taken(backend, steps) < NOISE
    # Each result saw the writes before it and none after: the mean of p + 1 ones among zeros.
    expected = [(p + 1) * math.exp(6.4) / ((p + 1) * math.exp(6.4) + CELLS - p - 1) for p in range(6)]
    np.testing.assert_allclose([r.to_numpy()[0, 0, 0] for r in results], expected, rtol=2e-4)


def test_a_pass_is_built_while_the_one_before_runs(
    backend: MlxBackend, ctx: MlxContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [cells_of(ctx) for _ in range(3)]
    query = ctx.full((1, HEADS, DIM), 0.1, DType.F32)
    waited: list[str] = []
    where, synchronize = "", mx.synchronize
    monkeypatch.setattr(mx, "synchronize", lambda stream: waited.append(where) or synchronize(stream))
    results = []

    def steps() -> None:
        nonlocal where
        for position in range(6):
            where = "building"
            x = query
            for cells in layers:
                x.copy(ctx, cells.slice(ctx, 0, position, position + 1))
                seen = cells.slice(ctx, 0, 0, position + 1)
                x = backend.attention(ctx, x, seen, seen, None, 1.0)
            where = "handing over"
            ctx.compute(x)
            results.append(x)

    assert taken(backend, steps) < NOISE, "and no buffer is copied"
    assert waited[1:-1] == ["handing over"] * 6, "once a pass"
    for result in results:
        np.testing.assert_allclose(result.to_numpy(), np.full((1, HEADS, DIM), 0.1), rtol=1e-5)


def test_moving_cells_within_a_buffer_copies_those_cells_only(backend: MlxBackend, ctx: MlxContext) -> None:
    cells = cells_of(ctx)
    ctx.arange(0, 20, 1, DType.F32).view(ctx, 0, (20, HEADS, DIM), (1, 0, 0)).copy(
        ctx, cells.slice(ctx, 0, 0, 20)
    )
    ctx.compute(cells)
    assert taken(backend, lambda: cells.slice(ctx, 0, 0, 19).copy(ctx, cells.slice(ctx, 0, 1, 20))) < NOISE
    assert cells.slice(ctx, 0, 0, 20).to_numpy()[:, 1, 2].tolist() == [0, *range(19)]


@pytest.mark.parametrize("device", [False, True])
def test_scattered_rows_are_written_without_a_copy(
    backend: MlxBackend, ctx: MlxContext, device: bool
) -> None:
    cells, rows = cells_of(ctx), np.arange(0, 400, 5, dtype=np.int32)[::-1].copy()
    source = ctx.from_numpy(np.arange(80, dtype=np.float32).repeat(HEADS * DIM).reshape(80, HEADS, DIM))
    indices = ctx.from_numpy(rows) if device else rows
    assert taken(backend, lambda: cells.set_rows(ctx, source, indices).slice(ctx, 0, 0, 1).to_numpy()) < NOISE
    half = cells.view(ctx, 0, (CELLS, 2, DIM), cells.strides)  # not whole layers of the storage
    assert (
        taken(
            backend,
            lambda: half.set_rows(ctx, source.slice(ctx, 1, 0, 2), indices).slice(ctx, 0, 0, 1).to_numpy(),
        )
        < NOISE
    )
    host = cells.to_numpy()
    assert host[rows, 3, 5].tolist() == list(range(80))
    assert host.sum() == source.to_numpy().sum()


def test_an_irregular_write_is_made_without_a_copy(backend: MlxBackend, ctx: MlxContext) -> None:
    cells = cells_of(ctx)
    odd = cells.view(ctx, 3, (50, 4), (7, 1001))
    ones = ctx.full((50, 4), 1, DType.F32)
    assert taken(backend, lambda: ones.copy(ctx, odd).to_numpy()) < NOISE
    assert cells.to_numpy().sum() == 200


def test_contiguous_and_a_cast_to_the_same_dtype_hold_nothing_of_a_large_buffer(
    backend: MlxBackend, ctx: MlxContext
) -> None:
    cells, token = cells_of(ctx), ctx.full((1, HEADS, DIM), 1, DType.F32)
    whole = cells.permute(ctx, 1, 0, 2)
    kept = [whole.slice(ctx, 0, 0, 1).contiguous(ctx), whole.slice(ctx, 0, 0, 1).cast(ctx, DType.F32)]
    ctx.compute(*kept)
    assert taken(backend, lambda: token.copy(ctx, cells.slice(ctx, 0, 0, 1)).to_numpy()) < NOISE
    assert not any(tensor.to_numpy().any() for tensor in kept)


def test_native_is_a_snapshot_and_costs_one_copy_at_most(backend: MlxBackend, ctx: MlxContext) -> None:
    cells, token = cells_of(ctx), ctx.full((1, HEADS, DIM), 1, DType.F32)
    snapshots = [cells.native, cells.slice(ctx, 0, 0, 2).native]
    assert all(isinstance(snapshot, mx.array) for snapshot in snapshots)

    def steps() -> None:
        for position in range(5):
            token.copy(ctx, cells.slice(ctx, 0, position, position + 1))
            cells.slice(ctx, 0, position, position + 1).to_numpy()

    assert BUFFER <= taken(backend, steps) < BUFFER + NOISE
    assert not any(np.array(snapshot).any() for snapshot in snapshots)
    whole = cells.permute(ctx, 1, 0, 2).native
    whole[0, 0, 0] = 7  # the user's object changes, the storage does not
    assert cells.slice(ctx, 0, 0, 1).to_numpy()[0, 0, 0] == 1


# from_native.


def test_from_native_copies_nothing(backend: MlxBackend, ctx: MlxContext) -> None:
    array = mx.ones((HEADS, CELLS, DIM))
    mx.eval(array)
    tensors: list[Any] = []

    def wrap() -> None:
        tensors.append(ctx.from_native(array))
        assert tensors[0].slice(ctx, 1, 5, 6).to_numpy().all()

    assert taken(backend, wrap) < NOISE
    assert backend.memory().allocated == 0
    ctx.zeros((HEADS, 1, DIM), DType.F32).copy(ctx, tensors[0].slice(ctx, 1, 0, 1))
    assert backend.memory().allocated >= BUFFER  # from the first write on the buffer is ours
    assert array.sum().item() == HEADS * CELLS * DIM  # and the user's array is not written
    array[:, 5] = 3
    assert tensors[0].slice(ctx, 1, 5, 6).to_numpy().max() == 1


def test_from_native_takes_any_layout(ctx: MlxContext) -> None:
    array = mx.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)
    tensor = ctx.from_native(array)
    assert tensor.shape == (4, 2, 3)
    np.testing.assert_array_equal(tensor.slice(ctx, 0, 1, 3).to_numpy(), np.array(array)[1:3])
    ctx.zeros((4, 3), DType.I32).copy(ctx, tensor.view(ctx, 3, (4, 3), (6, 1)))
    expected = np.array(array)
    expected[:, 1] = 0
    np.testing.assert_array_equal(tensor.to_numpy(), expected)


@pytest.mark.parametrize("dtype", ["complex64", "int16", "uint16", "uint32", "uint64", "float64"])
def test_from_native_refuses_other_dtypes(ctx: MlxContext, dtype: str) -> None:
    array = mx.zeros((2,), dtype=getattr(mx, dtype), stream=mx.cpu)
    with pytest.raises(ml.DTypeError, match=dtype):
        ctx.from_native(array)


@pytest.mark.parametrize("array", [np.zeros(2), [1.0], 3, None], ids=str)
def test_from_native_refuses_other_arrays(ctx: MlxContext, array: Any) -> None:
    with pytest.raises(ml.DTypeError, match="from_numpy"):
        ctx.from_native(array)


# Threads.


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def test_pending_work_of_a_thread_that_ended_is_computed_by_another(
    backend: MlxBackend, ctx: MlxContext
) -> None:
    x = ctx.full((3,), 2, DType.F32)

    def work() -> Any:
        other = backend.new_context()
        y = x.add(other, x)
        y.copy(other, x.view(other, 0, (3,)))
        return y.exp(other).log(other)

    y = in_thread(work)
    np.testing.assert_allclose(y.to_numpy(), [4, 4, 4], rtol=1e-6)
    assert x.to_numpy().tolist() == [4, 4, 4]
    lazy = in_thread(lambda: backend.new_context().from_native(mx.ones((3,)) + 1))
    assert lazy.add(ctx, x).to_numpy().tolist() == [6, 6, 6]
    assert in_thread(lambda: np.array(x.mul(ctx, x).native + 0)).tolist() == [16, 16, 16]


def test_calls_of_mlx_in_the_shared_stream_form_one_graph(backend: MlxBackend, ctx: MlxContext) -> None:
    x = ctx.full((3,), 2, DType.F32)
    before = backend.work.epoch
    with backend.shared_stream(), backend.shared_stream():  # a pass within a pass changes nothing
        own = mx.ones((3,)) + x.native
        y = ctx.from_native(own * 2).add(ctx, x)
        y.copy(ctx, x)
        z = ctx.from_native(y.native + x.native)
        assert backend.work.epoch == before
    assert backend.work.epoch == before + 1
    assert in_thread(z.to_numpy).tolist() == [16, 16, 16]


def test_other_threads_wait_for_the_end_of_the_shared_stream(backend: MlxBackend, ctx: MlxContext) -> None:
    """MLX crashes if one evaluates a graph, such as pending writes, to which another adds."""
    x = ctx.full((3,), 2, DType.F32)
    read: list[list[float]] = []
    other = threading.Thread(target=lambda: read.append(x.to_numpy().tolist()))
    with backend.shared_stream():
        ctx.from_native(mx.ones((3,)) + x.native).copy(ctx, x)
        other.start()
        other.join(0.2)
        assert not read
    other.join()
    assert read == [[3, 3, 3]]


def test_an_error_in_the_shared_stream_ends_it(backend: MlxBackend, ctx: MlxContext) -> None:
    default = mx.default_stream(mx.default_device())
    with pytest.raises(KeyError), backend.shared_stream():
        assert mx.default_stream(mx.default_device()) == backend.work.stream
        raise KeyError
    assert mx.default_stream(mx.default_device()) == default
    before = backend.work.epoch
    assert ctx.full((2,), 1, DType.F32).native.tolist() == [1, 1]
    assert backend.work.epoch > before


# Errors and memory.


def test_a_late_error_surfaces_at_compute_and_at_to_numpy(
    ctx: MlxContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arrays: Any) -> None:
        raise RuntimeError("[malloc] no memory")

    x = ctx.full((3,), 1, DType.F32).exp(ctx)
    with monkeypatch.context() as patched:
        patched.setattr(work_module, "schedule", failing)
        with pytest.raises(ml.DeviceError, match="no memory"):
            ctx.compute(x)
        with pytest.raises(ml.DeviceError, match="no memory"):
            x.to_numpy()
    np.testing.assert_allclose(x.to_numpy(), np.exp(np.ones(3)), rtol=1e-6)


def test_an_error_of_another_result_does_not_spoil_this_one(
    ctx: MlxContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, other = ctx.full((3,), 1, DType.F32), ctx.full((3,), 2, DType.F32)
    real = work_module.schedule

    def failing_together(*arrays: Any) -> None:
        if len(arrays) > 1:
            raise RuntimeError("one of them fails")
        real(*arrays)

    monkeypatch.setattr(work_module, "schedule", failing_together)
    assert healthy.to_numpy().tolist() == [1, 1, 1]
    assert other.to_numpy().tolist() == [2, 2, 2]


def test_views_of_more_elements_than_mlx_counts_are_refused(ctx: MlxContext) -> None:
    wide = ctx.full((1,), 1, DType.U8).view(ctx, 0, (2**33,), (0,))
    for use in (wide.to_numpy, lambda: wide.contiguous(ctx), lambda: wide.native):
        with pytest.raises(ml.DeviceError):
            use()
    with pytest.raises(ml.DeviceError, match="MLX"):
        ctx.zeros((2**20, 2**20), DType.I8)


def test_close_frees_the_arrays_of_held_tensors() -> None:
    gc.collect()
    before = mx.get_active_memory()
    backend = MlxBackend()
    ctx = backend.new_context()
    x = cells_of(ctx)
    view = x.slice(ctx, 0, 0, 3)
    assert backend.memory().allocated == BUFFER
    assert mx.get_active_memory() >= before + BUFFER
    backend.close()
    backend.close()
    assert mx.get_active_memory() < before + NOISE
    uses: list[Callable[[], Any]] = [
        x.to_numpy,
        lambda: view.native,
        lambda: x.slice(ctx, 0, 0, 1),
        backend.memory,
    ]
    for use in uses:
        with pytest.raises(ml.ClosedError):
            use()


def test_memory_follows_tensors(backend: MlxBackend, ctx: MlxContext) -> None:
    x = ctx.zeros((1000,), DType.F32)
    view = x.slice(ctx, 0, 0, 10)
    y = x.cast(ctx, DType.BF16)
    report = backend.memory().devices[0]
    assert report.allocated == 4000 + 2000
    assert report.total is None or report.total > report.allocated
    del x, y
    gc.collect()
    assert backend.memory().allocated == 4000
    del view
    gc.collect()
    assert backend.memory().allocated == 0
    assert not backend.work.storages


# Attention, rope, caches.


def exact(tensor: MlxTensor) -> np.ndarray:
    return tensor.to_numpy().astype(np.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_attention_as_on_a_gpu_matches_float64(
    backend: MlxBackend, ctx: MlxContext, dtype: DType, tokens: int
) -> None:
    """Without widening, which is for the CPU."""
    backend.work.widens = False
    random = np.random.default_rng(tokens)
    query = ctx.from_numpy(random.normal(size=(tokens, 8, 16)), dtype)
    buffers = [ctx.from_numpy(random.normal(size=(2, 40, 16)), dtype) for _ in range(2)]
    key, value = (buffer.permute(ctx, 1, 0, 2).slice(ctx, 0, 3, 33) for buffer in buffers)
    matrix = causal_matrix(tokens, 30)
    mask = ctx.from_numpy(np.pad(matrix, [(0, 5), (0, 0)], constant_values=-np.inf), DType.F32)
    tolerance = {DType.F32: 1e-5, DType.F16: 2e-3, DType.BF16: 2e-2}[dtype]
    for given, seen in ((None, None), (CAUSAL, matrix), (mask, matrix)):
        result = backend.attention(ctx, query, key, value, given, 0.25)
        assert result.dtype is dtype
        expected = reference(exact(query), exact(key), exact(value), seen, 0.25)
        np.testing.assert_allclose(exact(result), expected, rtol=tolerance, atol=tolerance)


def test_what_mlx_raises_in_attention_names_the_operation(
    backend: MlxBackend, ctx: MlxContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no kernel")

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fail)
    x = ctx.zeros((1, 1, 8), DType.F32)
    with pytest.raises(ml.DeviceError, match="attention: MLX failed: no kernel"):
        backend.attention(ctx, x, x, x, None, 1.0)


def test_attention_of_no_queries_is_left_to_the_generic_body(backend: MlxBackend, ctx: MlxContext) -> None:
    query, key = ctx.zeros((0, 4, 8), DType.F32), ctx.zeros((5, 2, 8), DType.F32)
    assert backend.attention(ctx, query, key, key, None, 1.0).shape == (0, 4, 8)
    assert generic_attention(ctx, query, key, key, None, 1.0).shape == (0, 4, 8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "spec",
    [RopeSpec(16), RopeSpec(8, 5e5, interleaved=True), RopeSpec(16, scaling=LinearScaling(4.0))],
    ids=str,
)
def test_fused_rope_is_the_generic_rope_at_any_positions(
    backend: MlxBackend, ctx: MlxContext, dtype: DType, spec: RopeSpec
) -> None:
    x = ctx.from_numpy(np.random.default_rng(1).normal(size=(5, 3, 16)), dtype)
    positions = ctx.from_numpy(np.array([7, 0, 3000, 2, 2]), DType.I32)
    assert backend.rope(ctx, x, positions, spec) is None  # slower than the generic body on the CPU
    backend.fused_rope = True
    expected = exact(apply_rope(ctx, x, *rope_tables(ctx, positions, spec), spec))
    tolerance = {DType.F32: 3e-4, DType.F16: 2e-3, DType.BF16: 1e-2}[dtype]
    np.testing.assert_allclose(
        exact(backend.rope(ctx, x, positions, spec)), expected, rtol=0, atol=2 * tolerance
    )
    assert backend.rope(ctx, x, positions, RopeSpec(16, scaling=YarnScaling(4.0, 4096))) is None


def test_a_plan_is_not_attended_to_over_tensors_of_another_backend(ctx: MlxContext) -> None:
    """Whose memory the CPU's kernels would read."""
    plan = ml.RaggedPlan(1, np.array([[0, 0, 4, 0, 1]]), np.array([[0, 0, 4]]), np.zeros(0, np.int32))
    own = ctx.zeros((4, 2, DIM), DType.F32)
    with MlxBackend(device="cpu") as other, ml.open_backend("numpy") as numpy:
        for there in (other, numpy):
            foreign: Any = there.new_context().zeros((4, 2, DIM), DType.F32)
            sinks: Any = there.new_context().zeros((2,), DType.F32)
            query = own.slice(ctx, 0, 0, 1)
            for call in (
                (foreign.slice(there.new_context(), 0, 0, 1), own, own, plan, 1.0),
                (query, foreign, own, plan, 1.0),
                (query, own, foreign, plan, 1.0),
                (query, own, own, plan, 1.0, sinks),
            ):
                with pytest.raises(ml.DeviceError, match="ragged_attention: a tensor of"):
                    ctx.backend.ragged_attention(ctx, *call)


def test_cache_config_asks_for_head_major_keys_and_no_needless_mask(backend: MlxBackend) -> None:
    config = backend.cache_config()
    assert (config.layout, config.elide_mask, config.mask_dtype) == ("head_major", True, DType.F32)
    with MlxBackend(dtype=DType.BF16) as narrow:
        assert narrow.cache_config().mask_dtype is DType.BF16


# Where a view lies.


@pytest.mark.parametrize(
    ("allocated", "view", "expected"),
    [
        # (offset, shape, strides) -> (base, sizes, sources, axes, start)
        ((8, 32, 4), (20, (1, 8, 4), (4, 128, 1)), ((8, 32, 4), (8, 1, 4), (1, -1, 2), (1,), [5])),
        ((8, 32, 4), (20, (3, 8, 4), (4, 128, 1)), ((8, 32, 4), (8, 3, 4), (1, 0, 2), (1,), [5])),
        ((6, 4), (0, (6, 4), (4, 1)), ((6, 4), (6, 4), (0, 1), (0,), [0])),
        ((24,), (2, (2, 5), (12, 2)), ((2, 6, 2), (2, 5, 1), (0, 1, -1), (1, 2), [1, 0])),
        ((24,), (0, (3, 3), (7, 2)), None),
        ((), (0, (1, 1), (5, 5)), ((1,), (1,), (-1,), (0,), [0])),
    ],
)
def test_region_of(allocated: Any, view: Any, expected: Any) -> None:
    region = region_of(allocated, *view)
    found = None if region is None else (*region[:4], np.array(region.start).tolist())
    assert found == expected


def test_rows_that_are_whole_layers() -> None:
    assert row_region_of((4, 10, 3), 6, (4, 4, 3), (30, 6, 1), 1) == (1, 2, 2, (0, 1, 2))
    assert row_region_of((4, 10, 3), 6, (4, 4, 2), (30, 6, 1), 1) is None  # narrower than a layer
    assert row_region_of((4, 10, 3), 0, (7, 3), (17, 1), 0) is None


def test_runs_and_contiguity() -> None:
    assert runs_of(np.array([5])) == [(0, 1, 5)]
    assert runs_of(np.array([3, 4, 5, 9, 8])) == [(0, 3, 3), (3, 4, 9), (4, 5, 8)]
    assert is_contiguous((2, 1, 3), (3, 77, 1))
    assert not is_contiguous((2, 3), (1, 2))
