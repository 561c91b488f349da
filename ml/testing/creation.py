"""Creation, transfer in and out of the host, and what a new tensor says of itself."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, bits, needs, refused, unchanged
from ml.testing.samples import DTYPES, FLOATS, INTEGERS, counting, special_values

__all__ = ["CreationTests"]

SHAPES = [(), (1,), (5,), (0,), (2, 3), (3, 0, 2), (1, 1, 1), (2, 1, 3, 2), (2, 1, 2, 1, 2, 3)]


class CreationTests(BackendCase):
    # Empty, zeros, full.

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_zeros_has_the_shape_dtype_bytes_and_c_strides_asked_for(
        self, ctx: Context, shape: tuple[int, ...], dtype: DType
    ) -> None:
        tensor = ctx.zeros(shape, dtype)
        assert_same(tensor, np.zeros(shape), dtype)
        assert type(tensor.shape) is tuple
        assert tensor.nbytes == np.zeros(shape, dtype.numpy).nbytes
        if 0 not in shape:
            assert len(tensor.strides) == len(shape)
            expected = np.zeros(shape, np.int8).strides
            for size, stride, wanted in zip(shape, tensor.strides, expected, strict=True):
                assert size == 1 or stride == wanted

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0, 2)], ids=str)
    def test_empty_can_be_written_then_read(self, ctx: Context, shape: tuple[int, ...], dtype: DType) -> None:
        tensor = ctx.empty(shape, dtype)
        assert tensor.shape == shape
        assert tensor.dtype is dtype
        values = counting(shape, dtype)
        ctx.from_numpy(values).copy(ctx, tensor)
        assert_same(tensor, values)

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [(1.5, DType.F32), (1.5, DType.F16), (1.5, DType.BF16), (0.1, DType.F16), (0.1, DType.BF16),
         (-128, DType.I8), (127, DType.I8), (255, DType.U8), (-(2**31), DType.I32), (2**31 - 1, DType.I32),
         (2**63 - 1, DType.I64), (-(2**63), DType.I64), (2**53 + 1, DType.I64), (True, DType.BOOL),
         (1, DType.BOOL), (False, DType.BOOL), (3.0, DType.I32), (-0.0, DType.F32),
         (float("-inf"), DType.F32), (float("-inf"), DType.F16), (float("inf"), DType.BF16),
         (float("nan"), DType.F32), (1e6, DType.F16), (1e300, DType.F32), (2.0**-149, DType.F32)],
        ids=str,
    )  # fmt: skip
    def test_full_repeats_the_value_as_that_dtype(self, ctx: Context, value: float, dtype: DType) -> None:
        with np.errstate(over="ignore"):
            expected = np.full((2, 3), np.array(value).astype(dtype.numpy))
        assert_same(ctx.full((2, 3), value, dtype), expected)
        assert_same(ctx.full((), value, dtype), expected[0, 0])
        assert ctx.full((2, 0), value, dtype).shape == (2, 0)

    @pytest.mark.parametrize(
        ("value", "dtype"),
        [(300, DType.U8), (-1, DType.U8), (128, DType.I8), (1.5, DType.I32), (2**31, DType.I32),
         (2**63, DType.I64), (float("nan"), DType.I32), (float("inf"), DType.I64), (2, DType.BOOL)],
        ids=str,
    )  # fmt: skip
    def test_full_refuses_a_value_that_the_integer_dtype_does_not_hold(
        self, ctx: Context, value: float, dtype: DType
    ) -> None:
        with pytest.raises(ml.DTypeError):
            ctx.full((2,), value, dtype)

    # Ranges.

    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
    @pytest.mark.parametrize(
        ("start", "stop", "step"),
        [(0, 10, 1), (3, 20, 4), (0, 0, 1), (5, 2, 1), (10, 0, -3), (2, 10, 8), (2, 10, 9), (0, 2.5, 1),
         (7, 8, 1)],
    )  # fmt: skip
    def test_arange_is_start_plus_i_steps_up_to_but_without_stop(
        self, ctx: Context, start: float, stop: float, step: float, dtype: DType
    ) -> None:
        assert_same(ctx.arange(start, stop, step, dtype), np.arange(start, stop, step), dtype)

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_arange_takes_fractions_where_the_dtype_is_a_float(self, ctx: Context, dtype: DType) -> None:
        assert_same(ctx.arange(-1, 1, 0.25, dtype), np.arange(-1, 1, 0.25), dtype)
        assert_same(ctx.arange(1.5, -2, -0.5, dtype), np.arange(1.5, -2, -0.5), dtype)

    def test_arange_of_many_does_not_gather_rounding_errors(self, ctx: Context) -> None:
        actual = ctx.arange(0, 1000, 0.1, DType.F32).to_numpy()
        np.testing.assert_allclose(actual, np.arange(10000) * 0.1, rtol=2e-7)

    def test_arange_of_large_integers_is_exact(self, ctx: Context) -> None:
        first = 2**53 + 1
        assert_same(ctx.arange(first, first + 4, 1, DType.I64), first + np.arange(4, dtype=np.int64))

    def test_arange_refuses_what_it_cannot_count(self, ctx: Context) -> None:
        refused(
            lambda: ctx.arange(0, 5, 0, DType.F32),
            lambda: ctx.arange(0, float("inf"), 1, DType.F32),
            lambda: ctx.arange(float("nan"), 5, 1, DType.F32),
            error=ml.ShapeError,
        )
        for start, stop, step, dtype in (
            (0.5, 5, 1, DType.I32), (0, 5, 0.5, DType.I32), (2**31 - 2, 2**31 + 5, 1, DType.I32),
            (0, 2**40, 2**35, DType.I32),
            (0, 2, 1, DType.BOOL),
        ):  # fmt: skip
            with pytest.raises(ml.DTypeError):
                ctx.arange(start, stop, step, dtype)

    # From the host.

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_bit_goes_in_and_comes_out_again(self, ctx: Context, dtype: DType) -> None:
        values = special_values(dtype)
        assert_same(ctx.from_numpy(values), values)
        assert_same(ctx.from_bytes(values.tobytes(), values.shape, dtype), values)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_from_numpy_keeps_shape_and_dtype(
        self, ctx: Context, shape: tuple[int, ...], dtype: DType
    ) -> None:
        values = counting(shape, dtype)
        assert_same(ctx.from_numpy(values), values)

    def test_from_numpy_copies(self, ctx: Context) -> None:
        host = np.arange(6, dtype=np.float32)
        tensor = ctx.from_numpy(host)
        host[:] = -1
        assert_same(tensor, np.arange(6), DType.F32)

    def test_to_numpy_copies(self, ctx: Context) -> None:
        tensor = ctx.from_numpy(np.arange(6, dtype=np.float32))
        for shown in (tensor, tensor.reshape(ctx, 2, 3).permute(ctx, 1, 0)):
            host = shown.to_numpy()
            host[...] = -1
        assert_same(tensor, np.arange(6), DType.F32)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_from_numpy_takes_arrays_in_any_layout(self, ctx: Context, dtype: DType) -> None:
        grid = counting((4, 6), dtype)
        for host in (grid.T, grid[::2, 1::3], grid[::-1], grid[:, ::-2], np.broadcast_to(grid[0], (3, 6))):
            assert_same(ctx.from_numpy(host), host)
        grid.flags.writeable = False
        assert_same(ctx.from_numpy(grid), grid)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [([[1.5, 2.0], [3.0, 4.0]], np.float32), ([1, 2, 3], np.int64), ([True, False], np.bool_),
         (2.5, np.float32), (7, np.int64), ([], np.float32), ((1, 2.5), np.float32),
         (np.arange(3, dtype=np.uint16), np.int64), (np.arange(3, dtype=np.int16), np.int64),
         (np.arange(3, dtype=np.uint32), np.int64), (np.float64(2.5), np.float32),
         (np.arange(3, dtype=">i4"), np.int32), (np.arange(3, dtype=">f4"), np.float32),
         (np.arange(3, dtype=">f8"), np.float32), (np.arange(3, dtype=">f2"), np.float16),
         (np.arange(3, dtype=">i8"), np.int64)],
        ids=repr,
    )  # fmt: skip
    def test_from_numpy_chooses_the_natural_dtype_of_any_array_like(
        self, backend: Backend, ctx: Context, given: Any, expected: Any
    ) -> None:
        if DType.from_numpy(expected) not in self.offered(DTYPES):
            pytest.skip("declared absent")
        if expected is np.float32 and getattr(backend, "dtype", DType.F32) is not DType.F32:
            pytest.skip("opened with another default float")
        assert_same(ctx.from_numpy(given), np.asarray(given).astype(expected))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_from_numpy_converts_to_the_dtype_asked_for(self, ctx: Context, dtype: DType) -> None:
        for source in (np.float64, np.int64, np.uint8, np.float16, ml_dtypes.bfloat16, np.bool_, ">f4"):
            host = np.array([0, 1, 1, 0]).astype(source)
            assert_same(ctx.from_numpy(host, dtype), [0, 1, 1, 0], dtype)
            assert_same(ctx.from_numpy(host, dtype=dtype), [0, 1, 1, 0], dtype)

    @needs(DType.F16, DType.BF16)
    def test_from_numpy_rounds_to_nearest_even(self, ctx: Context) -> None:
        halves = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20], dtype=np.float32)
        expected = np.array([1, 1 + 2.0**-6, 1 + 2.0**-7], dtype=np.float32)
        assert_same(ctx.from_numpy(halves, DType.BF16).cast(ctx, DType.F32), expected)
        assert_same(ctx.from_numpy([65519.0, 65520.0], DType.F16), np.array([65504, np.inf], np.float16))

    @pytest.mark.parametrize(
        "given",
        [np.array(["a"]), np.array([1j]), np.array([object()]), np.array([2**63], dtype=np.uint64),
         np.array(["2020-01-01"], dtype="M8[D]"), [[1, 2], [3]], None],
        ids=["text", "complex", "objects", "uint64 beyond I64", "dates", "ragged", "None"],
    )  # fmt: skip
    def test_from_numpy_refuses_what_is_no_array_of_numbers(self, ctx: Context, given: Any) -> None:
        with pytest.raises(ml.MLError):
            ctx.from_numpy(given)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (6,), (2, 3), (0,), (3, 0)], ids=str)
    def test_from_bytes_reads_little_endian_elements_in_c_order(
        self, ctx: Context, shape: tuple[int, ...], dtype: DType
    ) -> None:
        values = counting(shape, dtype, start=3)
        raw = values.astype(values.dtype.newbyteorder("<")).tobytes()
        for data in (raw, bytearray(raw), memoryview(raw)):
            assert_same(ctx.from_bytes(data, shape, dtype), values)

    def test_from_bytes_copies(self, ctx: Context) -> None:
        data = bytearray(np.arange(4, dtype=np.int32).tobytes())
        tensor = ctx.from_bytes(data, (4,), DType.I32)
        data[:] = bytes(16)
        assert_same(tensor, np.arange(4), DType.I32)

    def test_from_bytes_refuses_a_length_that_differs(self, ctx: Context) -> None:
        for length in (0, 11, 13, 16):
            with pytest.raises(ml.ShapeError):
                ctx.from_bytes(bytes(length), (3,), DType.F32)

    # Refusals that all creation shares.

    @pytest.mark.parametrize("dtype", [DType.Q8_0, DType.Q4_0, "F32", np.float32, None], ids=repr)
    def test_a_dtype_that_no_tensor_has_is_refused(self, ctx: Context, dtype: Any) -> None:
        refused(
            lambda: ctx.empty((32,), dtype),
            lambda: ctx.zeros((32,), dtype),
            lambda: ctx.full((32,), 0, dtype),
            lambda: ctx.arange(0, 32, 1, dtype),
            lambda: ctx.from_bytes(bytes(34), (32,), dtype),
            error=ml.DTypeError,
        )
        if dtype is not None:
            refused(lambda: ctx.from_numpy(np.zeros(32), dtype), error=ml.DTypeError)

    @pytest.mark.parametrize("shape", [(-1,), (2, -3), (2.0,), ("2",), None], ids=repr)
    def test_a_shape_that_is_none_is_refused(self, ctx: Context, shape: Any) -> None:
        refused(
            lambda: ctx.empty(shape, DType.F32),
            lambda: ctx.zeros(shape, DType.F32),
            lambda: ctx.full(shape, 1, DType.F32),
            lambda: ctx.from_bytes(b"", shape, DType.F32),
            error=ml.ShapeError,
        )

    @pytest.mark.parametrize("shape", [(2**50,), (2**40, 2**40)], ids=str)
    def test_more_than_any_machine_holds_is_an_ml_error(self, ctx: Context, shape: tuple[int, ...]) -> None:
        one = ctx.full((1,), 2, DType.F32)
        refused(
            lambda: ctx.compute(ctx.empty(shape, DType.F32)),
            lambda: ctx.compute(ctx.zeros(shape, DType.F32)),
            lambda: ctx.compute(ctx.full(shape, 1, DType.F32)),
            lambda: ctx.compute(one.repeat(ctx, 0, shape[0])),
            lambda: ctx.compute(one.view(ctx, 0, shape, (0,) * len(shape)).contiguous(ctx)),
            lambda: ctx.compute(one.view(ctx, 0, shape, (0,) * len(shape)).cast(ctx, DType.I32)),
        )
        assert_same(one, [2], DType.F32)

    # The framework's own arrays.

    @needs("from_native")
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_native_of_one_tensor_becomes_another_through_from_native(
        self, ctx: Context, dtype: DType
    ) -> None:
        values = counting((3, 4), dtype)
        tensor = ctx.from_numpy(values)
        for shown in (tensor, tensor.permute(ctx, 1, 0), tensor.slice(ctx, 1, 1, 3)):
            assert_same(ctx.from_native(shown.native), shown.to_numpy())
        assert_same(ctx.from_native(tensor.reshape(ctx, 12).slice(ctx, 0, 4, 5).native), values.ravel()[4:5])
        assert_same(ctx.from_native(ctx.zeros((2, 0), dtype).native), np.zeros((2, 0)), dtype)
        assert_same(ctx.from_native(ctx.zeros((), dtype).native), np.zeros(()), dtype)

    @needs("from_native")
    def test_from_native_tensors_are_views_like_any_other(self, ctx: Context) -> None:
        native = ctx.arange(0, 12, 1, DType.I32).reshape(ctx, 3, 4).native
        tensor = ctx.from_native(native)
        flipped = tensor.permute(ctx, 1, 0)
        ctx.full((3,), -1, DType.I32).copy(ctx, flipped.slice(ctx, 0, 1, 2).reshape(ctx, 3))
        assert_same(tensor, [[0, -1, 2, 3], [4, -1, 6, 7], [8, -1, 10, 11]], DType.I32)
        assert_same(flipped.view(ctx, 4, (2,)), [4, -1], DType.I32)

    @needs("from_native")
    def test_from_native_allocates_nothing(self, backend: Backend, ctx: Context) -> None:
        native = ctx.zeros((1 << 16,), DType.F32).native
        before = backend.memory().allocated
        tensor = ctx.from_native(native)
        ctx.compute(tensor)
        assert backend.memory().allocated <= before

    @needs("from_native")
    @pytest.mark.parametrize(
        "array", [object(), [1.0, 2.0], "text", None], ids=["object", "list", "text", "None"]
    )
    def test_from_native_refuses_what_is_no_array_of_the_framework(self, ctx: Context, array: Any) -> None:
        with pytest.raises(ml.MLError):
            ctx.from_native(array)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dlpack_shows_the_same_elements_where_the_framework_offers_it(
        self, ctx: Context, dtype: DType
    ) -> None:
        values = counting((3, 4), dtype)
        tensor: Any = ctx.from_numpy(values).permute(ctx, 1, 0)
        if not hasattr(tensor.native, "__dlpack__"):
            pytest.skip("the framework has no DLPack")
        device: tuple[int, int] = tensor.__dlpack_device__()
        if int(device[0]) != 1:
            pytest.skip("not in the host's memory")
        try:
            capsule = tensor.__dlpack__()
        except ml.NotSupportedError:
            assert dtype in (DType.BF16, DType.BOOL)
            return
        assert capsule is not None
        if dtype is not DType.BF16:  # NumPy reads no bfloat16
            np.testing.assert_array_equal(np.from_dlpack(tensor), values.T)

    # Memory.

    def test_memory_lists_every_device_and_counts_what_lives(self, backend: Backend, ctx: Context) -> None:
        memory = backend.memory()
        assert [row.device for row in memory.devices] == [device.name for device in backend.devices]
        assert memory.allocated == sum(row.allocated for row in memory.devices)
        for row in memory.devices:
            assert row.allocated >= 0
            assert row.total is None or row.total > 0
            assert row.free is None or row.total is None or 0 <= row.free <= row.total

    def test_memory_grows_with_a_tensor_and_shrinks_when_its_last_view_goes(
        self, backend: Backend, ctx: Context
    ) -> None:
        gc.collect()
        before = backend.memory().allocated
        tensor: Tensor | None = ctx.zeros((1 << 18,), DType.F32)
        assert tensor is not None
        ctx.compute(tensor)
        assert backend.memory().allocated - before >= 1 << 20
        view: Tensor | None = tensor.slice(ctx, 0, 0, 4)
        tensor = None
        gc.collect()
        assert backend.memory().allocated - before >= 1 << 20
        view = None  # noqa: F841
        gc.collect()
        assert backend.memory().allocated - before < 1 << 18

    def test_views_allocate_nothing_and_results_do(self, backend: Backend, ctx: Context) -> None:
        tensor = ctx.zeros((256, 1024), DType.F32)
        ctx.compute(tensor)
        before = backend.memory().allocated
        views = [tensor.permute(ctx, 1, 0), tensor.reshape(ctx, -1), tensor.view(ctx, 5, (4, 1024))]
        views += [views[0].slice(ctx, 0, 0, 1024, 2)]
        assert backend.memory().allocated - before < 1 << 18
        result = tensor.contiguous(ctx)
        ctx.compute(result)
        assert backend.memory().allocated - before >= 1 << 20
        assert len(views) == 4

    # Names of devices and contexts.

    def test_a_backend_has_a_name_and_devices(self, backend: Backend) -> None:
        assert backend.name
        assert backend.devices
        names = [device.name for device in backend.devices]
        assert all(names)
        assert len(set(names)) == len(names)
        assert all(device.kind for device in backend.devices)

    def test_backend_context_and_tensor_satisfy_the_protocols(self, backend: Backend, ctx: Context) -> None:
        assert isinstance(backend, ml.Backend)
        assert isinstance(ctx, ml.Context)
        assert isinstance(ctx.zeros((2,), DType.F32), ml.Tensor)
        assert ctx.backend is backend

    def test_max_graph_nodes_is_what_was_asked_for(self, backend: Backend) -> None:
        with backend.new_context(max_graph_nodes=17) as ctx:
            assert ctx.max_graph_nodes == 17
        with backend.new_context() as ctx:
            assert ctx.max_graph_nodes > 0
        for nodes in (0, -1):
            with pytest.raises(ml.MLError):
                backend.new_context(max_graph_nodes=nodes)

    def test_input_and_layer_give_contexts_of_the_same_backend(self, backend: Backend, ctx: Context) -> None:
        for place in (ctx.input(), ctx.layer(0), ctx.layer(0).input(), ctx.layer(1000)):
            assert place.backend is backend
            assert_same(place.full((2,), 3, DType.I32), [3, 3], DType.I32)
        with unchanged():
            ctx.layer(-1)

    def test_a_nan_comes_back_as_a_nan(self, ctx: Context) -> None:
        for dtype in self.offered(FLOATS):
            host = np.array([np.nan, -np.nan, 1.0]).astype(dtype.numpy)
            assert (bits(ctx.from_numpy(host).to_numpy()) == bits(host)).all()
