"""What is torch's own about the torch backend; the contract itself is tested by ml.testing."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ml
from ml import CAUSAL, DType
from ml.testing.attention import causal_matrix, reference

torch = pytest.importorskip("torch")

from backends.torch.attention import attend  # noqa: E402
from backends.torch.backend import TorchBackend, TorchContext  # noqa: E402
from backends.torch.partial import attend_partially  # noqa: E402
from backends.torch.tensor import TorchTensor  # noqa: E402

FLOATS = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


@pytest.fixture
def backend() -> Iterator[TorchBackend]:
    with TorchBackend(device="cpu") as opened:
        yield opened


@pytest.fixture
def ctx(backend: TorchBackend) -> TorchContext:
    return backend.new_context()


# The plugin.


@pytest.mark.usefixtures("unprobed")
def test_an_old_torch_is_refused_with_the_version_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    info = {row.name: row for row in ml.available_backends()}["torch"]
    assert not info.available
    assert "2.5.1+cpu is older than 2.6" in info.reason


def test_the_probe_reports_version_and_devices() -> None:
    info = {row.name: row for row in ml.available_backends()}["torch"]
    assert info.available
    assert info.version == torch.__version__
    assert "cpu" in info.devices


# The user's tensors.


def test_from_native_and_native_alias_the_users_tensor(ctx: TorchContext) -> None:
    theirs = torch.arange(12.0).reshape(3, 4)
    ours = ctx.from_native(theirs)
    assert ours.native is theirs
    ctx.full((4,), -1, DType.F32).copy(ctx, ours.slice(ctx, 0, 1, 2).reshape(ctx, 4))
    assert theirs[1].tolist() == [-1] * 4
    theirs[2, 3] = 99
    assert ours.to_numpy()[2, 3] == 99
    ctx.zeros((2,), DType.I32).native[1] = 7  # and the other way round
    assert ours.permute(ctx, 1, 0).native.data_ptr() == theirs.data_ptr()


def test_views_of_a_users_tensor_are_bound_by_its_whole_storage(ctx: TorchContext) -> None:
    theirs = torch.arange(10.0)
    ours = ctx.from_native(theirs[4:6])
    assert ours.view(ctx, -4, (10,)).to_numpy().tolist() == list(range(10))
    with pytest.raises(ml.BoundsError, match="storage of 10"):
        ours.view(ctx, 0, (7,))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: np.zeros(3), ml.DTypeError, "numpy|ndarray"),
        (lambda: [1.0], ml.DTypeError, "list"),
        (lambda: torch.zeros(2, dtype=torch.float64), ml.DTypeError, r"float64; .*\.float\(\)"),
        (lambda: torch.zeros(2, dtype=torch.complex64), ml.DTypeError, "complex64"),
        (lambda: torch.zeros(2, dtype=torch.int16), ml.DTypeError, "int16"),
        (lambda: torch.zeros(2, dtype=torch.uint16), ml.DTypeError, "uint16"),
        (lambda: torch.zeros(2, 2).to_sparse(), ml.DTypeError, "sparse"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ml.DTypeError, "nested"),
        (lambda: torch.zeros(2, device="meta"), ml.DeviceError, "meta.*opened on cpu"),
    ],
    ids=["numpy", "list", "float64", "complex", "int16", "uint16", "sparse", "nested", "meta"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_from_native_refuses(ctx: TorchContext, make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ctx.from_native(make())


def test_results_never_require_a_gradient(ctx: TorchContext) -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    x, weight = ctx.from_native(leaf), ctx.from_native(parameter)
    assert x.native.data_ptr() == leaf.data_ptr()
    for result in (x, x.mul(ctx, weight), x.view(ctx, 0, (6,)), x.softmax(ctx), x.cast(ctx, DType.F16)):
        assert not result.native.requires_grad
    ctx.zeros((2, 3), DType.F32).copy(ctx, x)  # a leaf may not be written in place, its memory may
    assert leaf.detach().sum() == 0


def test_inference_mode_may_begin_and_end_at_any_time(ctx: TorchContext) -> None:
    with torch.inference_mode():
        made, computed = ctx.zeros((4,), DType.F32), ctx.zeros((4,), DType.F32).exp(ctx)
        theirs = ctx.from_native(torch.ones(4))
    ones = ctx.full((4,), 5, DType.F32)
    for tensor in (made, computed, theirs):
        ones.copy(ctx, tensor)
        tensor.set_rows(ctx, ones.slice(ctx, 0, 0, 1), [3])
        with torch.inference_mode():
            tensor.copy(ctx, made)
        assert tensor.to_numpy().tolist() == [5] * 4


def test_a_tensor_with_lazy_negation_reads_as_it_looks(ctx: TorchContext) -> None:
    theirs = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert theirs.is_neg()
    ours = ctx.from_native(theirs)
    assert ours.to_numpy().tolist() == [-2, 4]
    assert ours.add(ctx, ours).to_numpy().tolist() == [-4, 8]


# Overlap.


@pytest.mark.parametrize(("src", "dst"), [((0, 6), (2, 8)), ((2, 8), (0, 6)), ((1, 7), (1, 7))])
def test_copies_between_two_wrappers_of_one_memory_read_first(
    ctx: TorchContext, src: tuple[int, int], dst: tuple[int, int]
) -> None:
    memory = np.arange(16, dtype=np.float32)
    expected = memory.copy()
    expected[2 * dst[0] : 2 * dst[1] : 2] = memory[2 * src[0] : 2 * src[1] : 2].copy()
    # Storages of their own, as far as torch knows.
    a, b = torch.from_numpy(memory[2 * src[0] :]), torch.from_numpy(memory[2 * dst[0] :])
    source = ctx.from_native(a).view(ctx, 0, (6,), (2,))
    source.copy(ctx, ctx.from_native(b).view(ctx, 0, (6,), (2,)))
    assert memory.tolist() == expected.tolist()


def test_a_users_wrapper_of_our_storage_is_found_to_overlap(ctx: TorchContext) -> None:
    ours = ctx.arange(0, 8, 1, DType.F32)
    for _ in range(2):  # the first copy notes where the storage lies, the second uses it
        theirs = ctx.from_native(ours.native[0:6])
        before = ours.to_numpy()
        theirs.copy(ctx, ours.slice(ctx, 0, 2, 8))
        assert ours.to_numpy().tolist() == [*before[:2], *before[:6]]


def test_set_rows_from_the_same_memory_reads_first(ctx: TorchContext) -> None:
    grid = ctx.arange(0, 8, 1, DType.I32).reshape(ctx, 4, 2)
    grid.set_rows(ctx, ctx.from_native(grid.native[0:3]), [1, 2, 3])
    assert grid.to_numpy().tolist() == [[0, 1], [0, 1], [2, 3], [4, 5]]


# Memory.


@pytest.mark.parametrize("count", [3, 1 << 20])
def test_the_users_gradients_may_flow_into_a_tensor_made_without_them(ctx: TorchContext, count: int) -> None:
    with torch.no_grad():
        ours = ctx.zeros((count,), DType.F32).native
    ours[1:3] = torch.ones(2, requires_grad=True)
    assert ours.requires_grad


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_zeros_take_memory_when_they_are_written(ctx: TorchContext) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    ours = ctx.zeros((2, 32 << 20), DType.F32)
    assert resident() - before < 32 << 20, "of 256 MiB"
    ours.native[0, ::1024] = 1
    assert resident() - before > 96 << 20
    assert ours.native.is_contiguous()
    assert not ours.native[1].any()


def test_the_ledger_counts_allocations_until_their_last_view_goes(backend: TorchBackend) -> None:
    ctx = backend.new_context()
    assert backend.memory().allocated == 0
    tensor = ctx.zeros((4, 256), DType.F16)
    view = tensor.slice(ctx, 0, 1, 2)
    theirs = ctx.from_native(torch.zeros(1000))
    assert backend.memory().allocated == 2048
    result = theirs.add(ctx, theirs)
    top, _ = result.top_k(ctx, 3)
    assert backend.memory().allocated == 2048 + 4000 + 12 + 12
    del result, _
    del tensor
    gc.collect()
    assert backend.memory().allocated == 2048 + 12
    del view, top
    gc.collect()
    assert backend.memory().allocated == 0
    row = backend.memory().devices[0]
    assert row.device == "cpu"
    assert row.total is None or row.free is None or 0 < row.free <= row.total


def test_what_does_not_fit_names_the_bytes_and_the_device(ctx: TorchContext) -> None:
    with pytest.raises(ml.DeviceError, match=f"{4 << 59} bytes.*on cpu"):
        ctx.empty((1 << 59,), DType.F32)
    wide = ctx.zeros((1,), DType.F32).view(ctx, 0, (1 << 56,), (0,))
    with pytest.raises(ml.DeviceError, match=f"exp: out of memory on cpu.*{4 << 56} bytes"):
        wide.exp(ctx)


def test_results_are_contiguous_so_that_views_of_them_count_as_expected(ctx: TorchContext) -> None:
    turned = ctx.arange(0, 6, 1, DType.F32).reshape(ctx, 2, 3).permute(ctx, 1, 0)
    for result in (
        turned.exp(ctx),
        turned.add(ctx, turned),
        turned.cast(ctx, DType.F32),
        turned.softmax(ctx),
    ):
        assert result.strides == (2, 1)


# Devices.


@pytest.mark.parametrize("device", ["cuda:77", "no such device", "meta", "cpu:x", 3, None])
def test_an_absent_device_is_refused_with_those_that_exist(device: Any) -> None:
    with pytest.raises(ml.DeviceError, match=r"torch has no device .*available: .*cpu"):
        TorchBackend(devices=[device])


def test_devices_are_named_once_and_said_in_one_way() -> None:
    for options in (
        {"device": "cpu", "devices": ["cpu"]},
        {"devices": []},
        {"devices": "cpu"},
        {"devices": ["cpu", torch.device("cpu")], "layers": 2},
    ):
        with pytest.raises(ml.DeviceError):
            TorchBackend(**options)  # type: ignore[arg-type]
    for layers in (None, 0):
        with pytest.raises(ml.ShapeError, match="layers"):
            TorchBackend(devices=["cpu:0", "cpu:1"], layers=layers)


def test_a_torch_device_is_a_device_too() -> None:
    with ml.open_backend("torch", device=torch.device("cpu")) as backend:
        assert [(device.name, device.kind) for device in backend.devices] == [("cpu", "cpu")]


@pytest.mark.parametrize(
    ("layers", "devices", "expected"),
    [(4, 2, [0, 0, 1, 1]), (5, 2, [0, 0, 0, 1, 1]), (2, 3, [0, 1]), (3, 1, [0, 0, 0])],
)
def test_layers_are_split_evenly_in_order(layers: int, devices: int, expected: list[int]) -> None:
    names = [f"cpu:{i}" for i in range(devices)]
    with TorchBackend(devices=names, layers=layers) as backend, backend.new_context() as ctx:
        assert [ctx.layer(i).device for i in range(layers)] == [names[i] for i in expected]
        assert ctx.layer(layers - 1).layer(0).device == ctx.input().device == "cpu:0"
        with pytest.raises(ml.BoundsError, match=f"layers={layers}"):
            ctx.layer(layers)


def test_results_lie_on_the_device_of_the_context_and_writes_on_the_destinations() -> None:
    with TorchBackend(devices=["cpu:0", "cpu:1"], layers=2) as backend:
        first = backend.new_context()
        second = first.layer(1)
        a, b = first.full((256,), 1, DType.F32), second.full((256,), 2, DType.F32)
        assert [row.allocated for row in backend.memory().devices] == [1024, 1024]
        results = [a.add(ctx, b) for ctx in (first, second)]
        assert [result.device for result in results] == ["cpu:0", "cpu:1"]
        assert a.copy(second, b) is b
        assert (b.device, b.view(first, 1, (3,)).device, a.cast(second, DType.F16).device) == ("cpu:1",) * 3
        assert second.from_native(torch.zeros(2)).device == "cpu:1"
        assert [row.allocated for row in backend.memory().devices] == [2048, 2048]


def test_attention_of_a_closed_backend_is_refused(backend: TorchBackend) -> None:
    ctx = backend.new_context()
    tensor = ctx.zeros((4, 1, 8), DType.F32)
    backend.close()
    with pytest.raises(ml.ClosedError):
        backend.attention(ctx, tensor, tensor, tensor, None, 1.0)


# Values where torch needs help.


def test_a_mean_of_large_f16_does_not_overflow_as_its_sum_would(ctx: TorchContext) -> None:
    assert ctx.full((100,), 60000, DType.F16).mean(ctx, 0).to_numpy() == np.float16(60000)


def test_bounds_beyond_f16_clamp_nothing_away(ctx: TorchContext) -> None:
    x = ctx.from_numpy(np.array([-np.inf, -2, 2, np.inf], np.float16))
    assert x.clamp(ctx, -1e9, 1e9).to_numpy().tolist() == [-np.inf, -2, 2, np.inf]
    assert ctx.full((1,), 1e9, DType.F16).to_numpy()[0] == np.inf


def test_read_only_and_reversed_host_arrays_raise_no_warning(ctx: TorchContext) -> None:
    host = np.arange(4)
    host.flags.writeable = False
    grid = ctx.from_numpy(host)
    assert grid.rows(ctx, host[::-1]).to_numpy().tolist() == [3, 2, 1, 0]


# Attention, against a reference in float64.


def made(ctx: TorchContext, rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> TorchTensor:
    return ctx.from_numpy(rng.standard_normal(shape).astype(np.float32), dtype)  # type: ignore[return-value]


def test_both_ways_to_share_a_kv_head_give_the_same(
    ctx: TorchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (made(ctx, rng, shape, DType.F32) for shape in ((5, 4, 8), (9, 2, 8), (9, 2, 8)))
    mask, sinks = ctx.from_numpy(causal_matrix(5, 9)), made(ctx, rng, (4,), DType.F32)
    stacked = [attend(ctx, ctx.backend.causal_masks, q, k, v, mask, 0.4, s).to_numpy() for s in (None, sinks)]
    monkeypatch.setattr("backends.torch.kernels.STACKED_MASK_LIMIT", 0)
    grouped = [attend(ctx, ctx.backend.causal_masks, q, k, v, mask, 0.4, s).to_numpy() for s in (None, sinks)]
    np.testing.assert_allclose(grouped, stacked, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("v_dim", [8, 6])
def test_parts_in_blocks_or_with_a_mask_for_each_group_are_the_same(
    ctx: TorchContext, monkeypatch: pytest.MonkeyPatch, v_dim: int
) -> None:
    rng = np.random.default_rng(3)
    q, k, v = (made(ctx, rng, shape, DType.F32) for shape in ((1, 5, 4, 8), (1, 9, 2, 8), (1, 9, 2, v_dim)))
    masks = (ctx.from_numpy(causal_matrix(5, 9)[None]), CAUSAL, None)

    def parts() -> list[np.ndarray]:
        found = [attend_partially(ctx, ctx.backend.causal_masks, q, k, v, mask, 0.4) for mask in masks]
        return [x.to_numpy() for part in found for x in part]

    before = parts()
    monkeypatch.setattr("backends.torch.kernels.STACKED_MASK_LIMIT", 0)
    monkeypatch.setattr("backends.torch.kernels.SCORES_LIMIT", 4 * 9 * 3)
    for found, expected in zip(parts(), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_body_without_sdpa_goes_in_blocks_of_queries(
    ctx: TorchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (made(ctx, rng, shape, DType.F32) for shape in ((7, 4, 8), (9, 2, 8), (9, 2, 6)))
    monkeypatch.setattr("backends.torch.kernels.SCORES_LIMIT", 4 * 9 * 3)
    result = attend(ctx, ctx.backend.causal_masks, q, k, v, CAUSAL, 0.4, None).to_numpy()
    expected = reference(*(x.to_numpy() for x in (q, k, v)), causal_matrix(7, 9), 0.4)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_masks_of_any_float_dtype_and_layout_are_taken(ctx: TorchContext) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (made(ctx, rng, shape, DType.F32) for shape in ((3, 2, 8), (6, 2, 8), (6, 2, 8)))
    bias = np.where(causal_matrix(3, 6) < 0, -np.inf, rng.integers(-4, 4, (3, 6)) / 4).astype(np.float32)
    expected = reference(*(x.to_numpy() for x in (q, k, v)), bias, 0.3)
    turned = ctx.from_numpy(np.ascontiguousarray(bias.T)).permute(ctx, 1, 0)
    spread = ctx.from_numpy(np.repeat(bias, 2, axis=1)).slice(ctx, 1, 0, 12, 2)
    for mask in (turned, spread, *(ctx.from_numpy(bias, dtype) for dtype in FLOATS)):
        for sinks in (None, ctx.full((2,), -1e9, DType.BF16)):
            result = attend(ctx, ctx.backend.causal_masks, q, k, v, mask, 0.3, sinks).to_numpy()
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_attention_refuses_values_of_two_axes(ctx: TorchContext) -> None:
    """What else does not fit is in the suite's table."""
    q, k, v = (ctx.zeros(shape, DType.F32) for shape in ((3, 4, 8), (5, 2, 8), (5, 2)))
    with pytest.raises(ml.ShapeError, match="attention"):
        ctx.backend.attention(ctx, q, k, v, None, 1.0)


def test_a_call_whose_mask_has_fewer_rows_than_queries_is_refused(ctx: TorchContext) -> None:
    q, k = ctx.zeros((3, 2, 8), DType.F32), ctx.zeros((5, 2, 8), DType.F32)
    for mask in (ctx.zeros((1, 1, 5), DType.F32), ctx.zeros((1, 3, 5), DType.BOOL)):
        call = ml.AttentionCall(slice(0, 3), 1, 5, 0, 0, None, mask)
        with pytest.raises((ml.ShapeError, ml.DTypeError), match="attention_calls: mask"):
            ctx.backend.attention_calls(ctx, q, k, k, [[call]], 1.0)


@pytest.mark.parametrize(("dtype", "scale"), [(DType.F32, 0.5), (DType.BF16, 0.5), (DType.F32, -0.5)])
def test_a_decoding_step_for_layers_alike_fits_one_of_another_layout_or_size_too(
    ctx: TorchContext, dtype: DType, scale: float
) -> None:
    """Worked out once for the calls of a pass: the next layer may be stored otherwise."""
    levels = [[ml.AttentionCall(slice(0, 2), 2, 3, 1, 4, None, None)]]
    rng = np.random.default_rng(0)

    def stored(layout: str, dim: int) -> Any:
        shape = (2, 9, dim) if layout == "head-major" else (10, 2, dim)
        made = ctx.from_numpy(rng.standard_normal(shape).astype(np.float32)).cast(ctx, dtype)
        if layout == "head-major":
            return made.permute(ctx, 1, 0, 2)
        if layout == "first head":
            return made.slice(ctx, 1, 0, 1)
        return made.slice(ctx, 0, 1, 10) if layout == "later rows" else made

    layers = [("plain", "plain", 4, 8)] * 2 + [("plain", "plain", 2, 8), ("plain", "plain", 4, 16)]
    layers += [(one, other, 4, 8) for one in ("head-major", "later rows") for other in ("plain", one)]
    layers += [("plain", "head-major", 4, 8), ("first head", "first head", 4, 8)]
    for of_key, of_value, heads, dim in layers:
        key, value = stored(of_key, dim), stored(of_value, dim)
        query = ctx.from_numpy(rng.standard_normal((2, heads, dim)).astype(np.float32)).cast(ctx, dtype)
        found = ctx.backend.attention_calls(ctx, query, key, value, levels, scale)
        assert found.dtype is dtype
        q, k, v = (x.cast(ctx, DType.F32).to_numpy() for x in (query, key, value))
        for token, rows in enumerate((slice(1, 4), slice(5, 8))):
            for head in range(heads):
                at = head * key.shape[1] // heads
                weights = np.exp(scale * k[rows, at] @ q[token, head])
                right = weights @ v[rows, at] / weights.sum()
                got = found.cast(ctx, DType.F32).to_numpy()[token, head]
                np.testing.assert_allclose(got, right, atol=1e-5 if dtype is DType.F32 else 0.05)


@pytest.mark.parametrize(("start", "step"), [(4, 4), (7, 0), (5, -1), (-1, 4)])
def test_calls_beyond_the_buffers_are_refused_not_read(ctx: TorchContext, start: int, step: int) -> None:
    call = ml.AttentionCall(slice(0, 2), 2, 5, start, step, None, None)
    query, key = ctx.zeros((2, 2, 8), DType.F32), ctx.zeros((9, 2, 8), DType.F32)
    with pytest.raises(ml.DeviceError, match="attention_calls"):
        ctx.backend.attention_calls(ctx, query, key, key, [[call]], 1.0)


def test_the_cache_is_asked_for_head_major_and_masks_of_the_default_dtype() -> None:
    for dtype in FLOATS:
        with TorchBackend(device="cpu", dtype=dtype) as backend:
            config = backend.cache_config()
            assert (config.layout, config.mask_dtype) == (ml.Layout.HEAD_MAJOR, dtype)
            assert config.elide_mask
            assert isinstance(backend, ml.SupportsAttention)
            assert isinstance(backend, ml.SupportsCacheConfig)


# On a GPU, where this machine has one.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_holds_tensors_attends_and_counts() -> None:
    with ml.open_backend("torch", devices=["cpu", "cuda:0"], layers=2) as backend:
        host = backend.new_context()
        ctx = host.layer(1)
        q = host.from_numpy(np.ones((1, 2, 8), np.float32))
        k = ctx.from_numpy(np.ones((4, 1, 8), np.float32))
        result = q.add(ctx, ctx.zeros((1, 2, 8), DType.F32))
        assert result.native.is_cuda
        out = backend.attention(ctx, q, k, k, None, 1.0)  # type: ignore[attr-defined]
        np.testing.assert_allclose(out.to_numpy(), 1, rtol=1e-6)
        assert backend.memory().devices[1].allocated > 0


def test_a_tensor_that_numpy_cannot_read_is_refused_with_a_way_to_pass_it() -> None:
    with ml.open_backend("torch") as backend, backend.new_context() as ctx:
        for tensor in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)):
            with pytest.raises(ml.DTypeError, match=r"NumPy cannot read a torch.Tensor.*from_native"):
                ctx.from_numpy(tensor)
        assert ctx.from_native(torch.ones(2, dtype=torch.bfloat16)).dtype is ml.DType.BF16


def test_a_stream_that_a_processor_does_not_have_is_a_refusal_as_dlpack_wants_it(ctx: TorchContext) -> None:
    with pytest.raises(ml.NotSupportedError) as refused:
        ctx.zeros((2,), DType.F32).__dlpack__(stream=99)
    assert isinstance(refused.value, BufferError)
