"""The CuPy backend without a GPU: all of its code on a double of CuPy.

The double (fake_cupy.py) is NumPy behind CuPy's signatures, with CuPy's rules on devices, streams
and conversions. On a real GPU test_conformance_cupy.py and test_cache_cupy.py run.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ml
from kvcache import Batch, CausalCache
from kvcache.testing.suites.attending import AttendingTests
from kvcache.testing.suites.properties import PropertyTests
from kvcache.testing.suites.quantized import QuantizedTests
from ml import DType
from ml.nn import Groups, generic_attention, grouped_matmul
from ml.testing import BackendTests

from ..rigs.cupy_double import CUPY, double, fails, module
from ..rigs.each_backend import opener


@pytest.fixture
def backend() -> Iterator[Any]:
    with module.CupyBackend() as opened:
        yield opened


@pytest.fixture
def ctx(backend: Any) -> Any:
    return backend.new_context()


# The contract, on the double.


class TestDouble(BackendTests):
    case_stride = 10

    open_backend = opener(module.CupyBackend)


class TestDoubleCaches(AttendingTests, QuantizedTests, PropertyTests):
    """The part of the cache suite that asks most of tensors; the rest it asks in random traces."""

    colours = (0,)
    traces = 16
    state_traces = encoder_traces = quantized_traces = 4

    @pytest.fixture
    def backend(self) -> Iterator[Any]:
        with module.CupyBackend() as opened:
            yield opened


def signatures() -> list[tuple[str, Any, Any]]:
    real = pytest.importorskip("cupy")
    pairs = [(f.__name__, f, getattr(real, f.__name__)) for f in double.FUNCTIONS]
    pairs.append(("RawModule", double.RawModule, real.RawModule))
    pairs += [
        (name, getattr(double.ndarray, name), getattr(real.ndarray, name))
        for name in ("astype", "copy", "fill", "set", "max", "sum", "mean", "view", "__dlpack__")
    ]
    return pairs


def test_the_double_has_the_signatures_of_cupy() -> None:
    for name, ours, theirs in signatures():
        wanted = inspect.signature(ours).parameters
        try:
            found = set(inspect.signature(theirs).parameters)
        except ValueError:  # Cython's methods tell theirs in the docstring
            found = {word.split("=")[0].split()[-1] for word in _arguments(theirs.__doc__)}
        assert set(wanted) - found <= {"self"}, name


def _arguments(doc: str) -> list[str]:
    return [word for word in doc[doc.index("(") + 1 : doc.index(")")].split(",") if word.strip(" *")]


def test_what_the_double_stands_for_is_in_cupy() -> None:
    real = pytest.importorskip("cupy")
    assert not [name for name in double.UFUNCS if not isinstance(getattr(real, name), real.ufunc)]
    for thing in double.CUDA:
        assert hasattr(real.cuda, thing.__name__)
    for name in (
        "getDeviceCount",
        "getDeviceProperties",
        "driverGetVersion",
        "runtimeGetVersion",
        "memGetInfo",
        "memcpy2DAsync",
        "getDevice",
    ):
        assert hasattr(real.cuda.runtime, name)
    assert issubclass(real.cuda.memory.OutOfMemoryError, MemoryError)
    from cupyx.scipy.special import erf

    assert isinstance(erf, real.ufunc)


# Streams.


def work(ctx: Any) -> None:
    x = ctx.from_numpy(np.arange(8.0)).reshape(ctx, 2, 4)
    y = ctx.full((2, 4), 2, DType.F16).cast(ctx, DType.F32)
    x.copy(ctx, y)
    y.set_rows(ctx, x, [1, 0]).add(ctx, x).softmax(ctx).gelu(ctx).argsort(ctx).to_numpy()
    x.top_k(ctx, 2)[0].matmul(ctx, y.rows(ctx, [0]).permute(ctx, 1, 0).slice(ctx, 0, 0, 2)).to_numpy()


def test_all_work_goes_to_the_stream_that_the_backend_was_given() -> None:
    stream = double.Stream()
    with double.logged() as log, module.CupyBackend(stream=stream) as backend:
        work(backend.new_context())
    assert len(log) > 20
    assert {(device, used) for _, device, used in log} == {(0, stream)}


def test_without_one_it_goes_to_the_stream_that_is_current_in_the_thread(backend: Any) -> None:
    used: list[set[Any]] = []
    streams = [double.NULL, double.Stream(), double.Stream()]
    log: list[Any]
    for stream in streams:
        with double.logged() as log, stream:
            thread = threading.Thread(target=lambda: work(backend.new_context()))
            work(backend.new_context())
        used.append({used for _, _, used in log})
        with double.logged() as log, stream:
            thread.start()
            thread.join()
        assert {used for _, _, used in log} == {double.NULL}
    assert used == [{stream} for stream in streams]


def test_device_and_stream_are_entered_only_where_they_are_not_current(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []
    enter = double._Scope.__enter__
    monkeypatch.setattr(double._Scope, "__enter__", lambda self: entered.append(self) or enter(self))
    work(backend.new_context())
    assert not entered
    stream = double.Stream()
    with module.CupyBackend(stream=stream) as given:
        with stream:
            entered.clear()
            work(given.new_context())
            assert not entered
        work(given.new_context())
        assert set(entered) == {stream}


# Uploads.


@pytest.mark.parametrize("kernel", [True, False], ids=["by-kernel", "by-calls"])
def test_what_a_pass_needs_goes_to_the_device_in_one_copy_from_pinned_memory(
    backend: Any, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    """The cells, the plan, and what the kernel works by; the first pass included."""
    if not kernel:
        monkeypatch.setattr(backend, "ragged_attention", lambda *args: None)
    ctx, cache, rng = backend.new_context(), CausalCache(), np.random.default_rng(3)
    cache.init(backend, DType.F32, 3, 64, 64)
    for step in range(3):
        places = [(s, p) for s in range(3) for p in ([9 * s + step + 9] if step else range(9 * s + 10))]
        rows = [rng.standard_normal((len(places), heads, 16)) for heads in (2, 2, 4)]
        key, value, query = (ctx.from_numpy(x.astype(np.float32)) for x in rows)
        with double.logged() as log:
            cache.start_forward(ctx, Batch([p for _, p in places], [s for s, _ in places]))
            for layer in range(2):
                cache.set_layer(layer)
                cache.put(ctx, key, value)
                cache.attend(ctx, query, 0.25)
        operations = [op for op, _, _ in log]
        assert operations.count("asarray") == (1 if kernel or step else 0)
        assert not {"set", "synchronize", "asnumpy"} & set(operations)


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("counts", [[5, 0, 3], [0, 150, 250, 1]], ids=["few", "many"])
def test_products_with_matrices_of_their_own_ask_nothing_of_the_host(
    ctx: Any, dtype: DType, counts: list[int]
) -> None:
    groups, random = np.repeat(np.arange(len(counts), dtype=np.int32), counts), np.random.default_rng(4)
    x, weight = random.normal(size=(len(groups), 8)), random.normal(size=(len(counts), 8, 8))
    given = [ctx.from_numpy(x, dtype), ctx.from_numpy(weight, dtype), Groups(ctx.from_numpy(groups))]
    with double.logged() as log:
        found = grouped_matmul(ctx, *given)
    assert not {"set", "synchronize", "asnumpy", "asarray"} & {op for op, _, _ in log}
    right = np.einsum("ri,rio->ro", x, weight[groups])
    np.testing.assert_allclose(found.to_numpy().astype(np.float32), right, atol=0.15, rtol=0.05)


# Pages.


def test_pages_wait_for_what_is_current_and_are_waited_for_where_they_are_joined(backend: Any) -> None:
    ctx = backend.new_context()
    compute = double.Stream()
    with compute, double.logged() as log:
        x = ctx.full((4, 8, 512), 3, DType.F32)
        (array,), out = backend.page_out(ctx, [x.permute(ctx, 1, 0, 2)])
        arriving = backend.page_in(ctx, [array[1:5]], [x.slice(ctx, 1, 2, 6).permute(ctx, 1, 0, 2)])
        arriving.join()
        out.wait()
    streams = [found for op, _, found in log if op == "memcpy2D"]
    assert compute not in streams
    assert double.NULL not in streams
    leaves, arrives = streams[0], streams[-1]
    assert leaves is not arrives
    steps = [
        (op, found) for op, _, found in log if op in ("record", "wait_event", "memcpy2D", "synchronize event")
    ]
    assert steps == [
        *(("record", compute), ("wait_event", leaves), ("memcpy2D", leaves), ("record", leaves)),
        *(("record", compute), ("wait_event", arrives), ("memcpy2D", arrives), ("record", arrives)),
        *(("wait_event", compute), ("synchronize event", leaves)),
    ]


def test_a_run_of_cells_of_every_head_is_one_copy(backend: Any) -> None:
    ctx = backend.new_context()
    cells = ctx.zeros((4, 64, 32), DType.BF16).slice(ctx, 1, 16, 48)
    page = np.random.default_rng(3).random((4, 32, 32), np.float32).astype(DType.BF16.numpy)
    for least, copies in ((4096, 1), (1, 1)):
        part = cells.slice(ctx, 1, 0, 32 if least > 1 else 8)
        with double.logged() as log:
            backend.page_in(ctx, [page[:, : part.shape[1]]], [part]).join()
        steps = [op for op, _, _ in log]
        assert steps.count("memcpy2D") == copies
        np.testing.assert_array_equal(part.to_numpy(), page[:, : part.shape[1]])


# Products.


def narrow(dtype: DType, *shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-4, 5, shape).astype(dtype.numpy)


PRODUCTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "weights": lambda ctx, t: (t(3, 64), t(64, 96)),
    "weights, transposed": lambda ctx, t: (t(3, 64), t(96, 64).permute(ctx, 1, 0)),
    "both transposed": lambda ctx, t: (t(64, 3).permute(ctx, 1, 0), t(96, 64).permute(ctx, 1, 0)),
    "one row": lambda ctx, t: (t(1, 64), t(64, 96)),
    "one column": lambda ctx, t: (t(3, 64), t(64, 1)),
    "vectors": lambda ctx, t: (t(64), t(64)),
    "a vector and matrices": lambda ctx, t: (t(64), t(4, 64, 5)),
    "the history of every head": lambda ctx, t: (
        t(4, 3, 32), t(4, 128, 32).slice(ctx, 1, 16, 80).permute(ctx, 0, 2, 1)
    ),
    "what every sequence shares": lambda ctx, t: (t(2, 4, 3, 32), t(4, 32, 16)),
    "several batches": lambda ctx, t: (
        t(2, 4, 3, 32), t(4, 2, 32, 16).permute(ctx, 1, 0, 2, 3)
    ),
    "parts of rows": lambda ctx, t: (t(3, 128).slice(ctx, 1, 32, 96), t(64, 8)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("case", PRODUCTS)
def test_narrow_products_are_cublas_own_and_widen_nothing(
    ctx: Any, monkeypatch: pytest.MonkeyPatch, case: str, dtype: DType
) -> None:
    left, right = PRODUCTS[case](ctx, lambda *shape: ctx.from_numpy(narrow(dtype, *shape)))
    wide = [x.to_numpy().astype(np.float32) for x in (left, right)]
    sizes: list[int] = []
    alloc = double.alloc
    monkeypatch.setattr(double, "alloc", lambda size: sizes.append(size) or alloc(size))
    with double.logged() as log:
        found = left.matmul(ctx, right)
    assert {op for op, _, _ in log} == {"gemm", "astype"}
    assert sizes == [2 * found.nbytes, found.nbytes], "F32 once, and as it is"
    np.testing.assert_array_equal(found.to_numpy(), np.asarray(np.matmul(*wide)).astype(dtype.numpy))


def test_an_operand_without_a_dense_axis_is_copied_in_its_own_bits(ctx: Any) -> None:
    left = ctx.from_numpy(narrow(DType.BF16, 6, 4, 64)).slice(ctx, 2, 0, 64, 2)
    right = ctx.from_numpy(narrow(DType.BF16, 32, 8))
    with double.logged() as log:
        found = left.matmul(ctx, right)
    assert [op for op, _, _ in log] == ["copy", "gemm", "astype"]
    expected = left.to_numpy().astype(np.float32) @ right.to_numpy().astype(np.float32)
    np.testing.assert_array_equal(found.to_numpy(), expected.astype(DType.BF16.numpy))


def test_attention_copies_no_history(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [ctx.from_numpy(narrow(DType.BF16, 4, 2048, 64)).permute(ctx, 1, 0, 2) for _ in range(2)]
    query = ctx.from_numpy(narrow(DType.BF16, 1, 8, 64))
    sizes: list[int] = []
    alloc = double.alloc
    monkeypatch.setattr(double, "alloc", lambda size: sizes.append(size) or alloc(size))
    generic_attention(ctx, query, *(x.slice(ctx, 0, 8, 2040) for x in cells), None, 0.125)
    scores = 8 * 2032 * 4
    assert max(sizes) == scores < cells[0].nbytes / 4


# Several devices.


def test_results_lie_on_the_device_of_the_context_and_writes_on_the_destinations() -> None:
    with module.CupyBackend(devices=["cuda:1", "cuda:0"], layers=2) as backend:
        first = backend.new_context()
        second = first.layer(1)
        assert (first.device, second.device, second.input().device) == ("cuda:1", "cuda:0", "cuda:1")
        with pytest.raises(ml.BoundsError, match="layers=2"):
            first.layer(2)
        a, b = first.arange(0, 256, 1, DType.F32), second.full((256,), 2, DType.F32)
        results = [a.add(ctx, b) for ctx in (first, second)]
        assert [result.device for result in results] == ["cuda:1", "cuda:0"]
        assert [result.to_numpy()[3] for result in results] == [5, 5]
        turned = a.reshape(first, 16, 16).permute(first, 1, 0).cast(first, DType.BF16)
        moved = turned.contiguous(second)
        assert moved.device == "cuda:0"
        np.testing.assert_array_equal(moved.to_numpy(), turned.to_numpy())
        a.copy(second, b)
        b.set_rows(second, first.zeros((1,), DType.F32), first.full((1,), 7, DType.I32))
        assert b.device == "cuda:0"
        assert b.to_numpy().tolist() == [0 if i == 7 else i for i in range(256)]
        assert a.rows(second, second.full((2,), 5, DType.I32)).to_numpy().tolist() == [5, 5]
        assert [d.allocated > 0 for d in backend.memory().devices] == [True, True]


def test_a_copy_between_devices_waits_for_both_sides() -> None:
    with module.CupyBackend(devices=[0, 1], layers=2) as backend, double.logged() as log:
        ctx = backend.new_context()
        ctx.zeros((4,), DType.F32).contiguous(ctx.layer(1))
    steps = [(op, device) for op, device, _ in log]
    at = steps.index(("copy_from_device", 1))
    assert ("synchronize", 0) in steps[:at]
    assert steps[at + 1] == ("synchronize", 1)


def test_an_operand_that_does_not_fit_beside_the_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with module.CupyBackend(devices=[0, 1], layers=2) as backend:
        first = backend.new_context()
        a, b = first.zeros((4,), DType.F32), first.layer(1).zeros((4,), DType.F32)
        monkeypatch.setattr(module.cupy.cuda, "alloc", lambda size: double.alloc(1 << 40))
        with pytest.raises(ml.DeviceError, match=r"^move: 16 bytes: out of memory on cuda:0"):
            a.add(first, b)


def test_contexts_of_layers_close_with_the_one_they_came_from() -> None:
    with module.CupyBackend(devices=[0, 1], layers=2) as backend:
        ctx = backend.new_context()
        layer = ctx.layer(1)
        layer.close()
        layer = ctx.layer(1)
        assert layer.zeros((1,), DType.F32).device == "cuda:1"
        ctx.close()
        for closed in (ctx, layer):
            with pytest.raises(ml.ClosedError):
                closed.zeros((1,), DType.F32)


# The user's arrays.


def test_from_native_aliases_and_keeps_the_users_array(ctx: Any) -> None:
    theirs = double.made(np.arange(12, dtype=np.float32).reshape(3, 4))
    ours = ctx.from_native(theirs)
    assert ours.native is theirs
    ctx.full((4,), -1, DType.F32).copy(ctx, ours.slice(ctx, 0, 1, 2).reshape(ctx, 4))
    assert theirs.array[1].tolist() == [-1] * 4
    assert ours.permute(ctx, 1, 0).native.data.ptr == theirs.data.ptr
    part = ctx.from_native(theirs[1:, ::2])
    assert part.strides == (4, 2)
    assert part.to_numpy().tolist() == [[-1, -1], [8, 10]]


def on(device: int, dtype: Any = np.float32) -> Any:
    with double.Device(device):
        return double.ndarray((2,), dtype)


class Exporter:
    """As a torch.Tensor: it has DLPack."""

    def __dlpack__(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("array", "error", "match"),
    [
        (np.zeros(2), ml.DTypeError, r"ndarray is not a cupy.ndarray; use cupy.from_dlpack|from_numpy"),
        ([1.0], ml.DTypeError, "list is not a cupy.ndarray; use from_numpy"),
        (Exporter(), ml.DTypeError, r"Exporter is not a cupy.ndarray; use cupy.from_dlpack\(it\)"),
        (on(1), ml.DeviceError, "an array on cuda:1; the backend was opened on cuda:0"),
        (on(0, np.float64), ml.DTypeError, "float64"),
        (on(0)[::-1], ml.ShapeError, "strides"),
    ],
    ids=["numpy", "list", "dlpack", "other device", "float64", "reversed"],
)
def test_from_native_refuses(ctx: Any, array: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ctx.from_native(array)


def test_two_wrappers_of_one_memory_overlap(ctx: Any) -> None:
    ours = ctx.arange(0, 8, 1, DType.F32)
    theirs = ctx.from_native(ours.native[0:6])
    theirs.copy(ctx, ours.slice(ctx, 0, 2, 8))
    assert ours.to_numpy().tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


def test_dlpack_hands_out_the_device_and_names_what_is_not_offered(ctx: Any) -> None:
    assert ctx.zeros((2,), DType.F32).__dlpack_device__() == (2, 0)
    with pytest.raises(ml.NotSupportedError, match=r"dlpack: not supported for DType\.BF16"):
        ctx.zeros((2,), DType.BF16).__dlpack__()


def test_a_row_whose_stride_says_nothing_has_one_that_cublas_takes(ctx: Any) -> None:
    row = ctx.arange(0, 4, 1, DType.F32).view(ctx, 0, (1, 4), (0, 1))
    assert row.native.strides == (16, 4)
    assert row.matmul(ctx, row.permute(ctx, 1, 0)).to_numpy().tolist() == [[14]]


# Memory.


def test_memory_counts_ours_and_asks_cuda_for_the_rest(backend: Any) -> None:
    gc.collect()  # the pool is the process's: what earlier tests left is not freed in between
    ctx = backend.new_context()
    tensor = ctx.zeros((1000,), DType.F32)
    (device,) = backend.memory().devices
    assert (device.device, device.allocated, device.total) == ("cuda:0", 4000, double.TOTAL)
    assert device.free == double.TOTAL - double.POOL.total[0]
    used, kept = backend.pool_bytes()
    assert 4000 < 4096 <= used <= kept
    del tensor
    gc.collect()
    assert backend.memory().allocated == 0
    assert backend.pool_bytes()[0] == used - 4096


def test_close_gives_free_blocks_back_to_the_device() -> None:
    backend = module.CupyBackend()
    ctx = backend.new_context()
    dropped = ctx.zeros((1 << 20,), DType.F32)
    before = backend.memory().devices[0].free
    del dropped
    gc.collect()
    backend.close()
    backend.close()
    with double.Device(0):
        assert double.memGetInfo()[0] >= before + (4 << 20)
    with pytest.raises(ml.ClosedError):
        backend.pool_bytes()


def test_what_does_not_fit_names_bytes_shape_and_device(ctx: Any) -> None:
    with pytest.raises(
        ml.DeviceError,
        match=rf"allocate: {4 << 30} bytes for \(1073741824,\) of DType.F32: out of memory on cuda:0: Out",
    ):
        ctx.empty((1 << 30,), DType.F32)


def test_a_result_that_does_not_fit_names_operation_and_device(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.cupy, "exp", lambda x: double.alloc(1 << 31))
    with pytest.raises(
        ml.DeviceError, match=r"^exp: out of memory on cuda:0: Out of memory allocating 2,147"
    ):
        ctx.zeros((1,), DType.F32).exp(ctx)


def test_what_cuda_raises_is_a_device_error_that_names_operation_and_device(
    ctx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.cupy, "matmul", lambda a, b: fails("CUBLAS_STATUS_EXECUTION_FAILED\nmore")())
    square = ctx.zeros((2, 2), DType.F32)
    with pytest.raises(
        ml.DeviceError, match=r"^matmul: CuPy failed on cuda:0: CUBLAS_STATUS_EXECUTION_FAILED$"
    ):
        square.matmul(ctx, square)


def test_a_double_that_is_used_wrongly_says_so() -> None:
    """The double is as strict as it claims."""
    bf16, f32 = double.made(np.zeros(2, DType.BF16.numpy)), double.made(np.zeros(2, np.float32))
    for use in (
        lambda: CUPY.add(f32, np.zeros(2)),
        lambda: CUPY.exp(bf16),
        lambda: bf16.astype(np.int32),
        lambda: CUPY.copyto(f32, f32),
        lambda: CUPY.take(bf16, f32),
        lambda: np.asarray(f32),
        lambda: CUPY.exp(on(1)),
    ):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            use()
