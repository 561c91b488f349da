"""Creation, transfers to and from the host, and the attributes of a new tensor."""

from __future__ import annotations

import gc
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ml
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, each, needs, unchanged
from ml.testing.samples import DTYPES, FLOATS, INTEGERS, counting, in_records, special_values

SHAPES = [(), (1,), (5,), (0,), (2, 3), (3, 0, 2), (1, 1, 1), (2, 1, 3, 2), (2, 1, 2, 1, 2, 3)]
FILLED = [
    *[(1.5, dtype) for dtype in FLOATS], (0.1, DType.F16), (0.1, DType.BF16), (1e6, DType.F16),
    (1e300, DType.F32),
    (2.0**-149, DType.F32), (-0.0, DType.F32), (float("nan"), DType.F32), (float("-inf"), DType.F32),
    (float("-inf"), DType.F16), (float("inf"), DType.BF16), (-128, DType.I8), (127, DType.I8),
    (255, DType.U8),
    (-(2**31), DType.I32), (2**31 - 1, DType.I32), (3.0, DType.I32), (2**63 - 1, DType.I64),
    (-(2**63), DType.I64),
    (2**53 + 1, DType.I64), (True, DType.BOOL), (1, DType.BOOL), (False, DType.BOOL),
]  # fmt: skip
RANGES = [
    (0, 10, 1),
    (3, 20, 4),
    (0, 0, 1),
    (5, 2, 1),
    (10, 0, -3),
    (2, 10, 8),
    (2, 10, 9),
    (0, 2.5, 1),
    (7, 8, 1),
]
FRACTIONS = [(-1, 1, 0.25), (1.5, -2, -0.5)]
COUNTED: list[tuple[tuple[Any, Any, Any], DType, list[float]]] = [
    # NumPy scalars are taken by value: arithmetic in their own dtype would wrap.
    ((np.uint8(5), np.uint8(2), -1), DType.I64, [5, 4, 3]),
    ((np.uint8(5), 2, np.int8(-1)), DType.F32, [5, 4, 3]),
    ((np.int8(-100), np.int8(100), np.int8(50)), DType.I8, [-100, -50, 0, 50]),
    ((np.int32(-(2**31)), np.int32(2**31 - 1), np.int32(2**30)), DType.I32, [-(2**31), -(2**30), 0, 2**30]),
    ((np.uint64(2**63 - 2), np.uint64(2**63 + 1), np.uint64(1)), DType.F32, [2.0**63] * 3),
    ((np.float32(0.5), np.float16(2), np.float64(0.5)), DType.F16, [0.5, 1, 1.5]),
    ((False, np.True_, True), DType.I32, [0]),
    # Integers that F64 does not represent.
    ((0, 2**53 + 1, 2**53), DType.I64, [0, 2**53]), ((0, -(2**53) - 1, -(2**53)), DType.I64, [0, -(2**53)]),
    ((0, 10**18, 333333333333333333), DType.I64, [333333333333333333 * i for i in range(4)]),
    ((2**63 - 1, -(2**63), -(2**62)), DType.I64, [2**63 - 1, 2**62 - 1, -1, -(2**62) - 1]),
    ((-(2**63), 2**63, 2**63 - 1), DType.I64, [-(2**63), -1, 2**63 - 2]),
    ((0, 2**63, 2**62), DType.I64, [0, 2**62]), ((0, 255, 254), DType.U8, [0, 254]),
    ((255, -1, -255), DType.U8, [255, 0]), ((-128, 128, 127), DType.I8, [-128, -1, 126]),
    ((0.0, 2.0**53 + 2, 2.0**53), DType.I64, [0, 2**53]),
    ((-(2**60), 10, 2**60 - 1), DType.F32, [-(2.0**60), -1]),
    ((2.0**60, -2, -(2.0**60)), DType.F32, [2.0**60, 0]),
    ((1 + 2**-8 + 2**-40, 2, 1), DType.BF16, [1 + 2**-7]), ((3e38, 3.15e38, 1e37), DType.F16, [math.inf] * 2),
    ((0, 5, math.ldexp(1, 1023)), DType.F32, [0]), ((-1e308, 1e308, 1e308), DType.F32, [-math.inf, 0]),
]  # fmt: skip
"""Ranges whose end or length is easily wrong, and their elements."""
NUMBERS_OF_NUMPY: list[tuple[Any, DType, float]] = [
    (np.uint8(200), DType.I32, 200), (np.int8(-3), DType.I64, -3), (np.float16(1.5), DType.F32, 1.5),
    (np.True_, DType.U8, 1), (np.int64(2**53 + 1), DType.I64, 2**53 + 1), (np.array(7), DType.I8, 7),
    (np.float32(0.1), DType.F32, float(np.float32(0.1))), (1 + 2**-8 + 2**-40, DType.BF16, 1 + 2**-7),
    (2**24 + 1, DType.F32, 2.0**24), (2**70, DType.F32, 2.0**70), (ml_dtypes.bfloat16(1.5), DType.F16, 1.5),
]  # fmt: skip
NATURAL: dict[str, tuple[Any, DType]] = {
    "nested lists": ([[1.5, 2.0], [3.0, 4.0]], DType.F32), "integers": ([1, 2, 3], DType.I64),
    "truth": ([True, False], DType.BOOL), "a float": (2.5, DType.F32), "an integer": (7, DType.I64),
    "nothing": ([], DType.F32), "a mixture": ((1, 2.5), DType.F32),
    "numpy's float64": (np.float64(2.5), DType.F32),
    **{kind: (np.arange(3).astype(kind), wanted) for kind, wanted in (
        ("uint16", DType.I64), ("int16", DType.I64), ("uint32", DType.I64), (">i4", DType.I32),
        (">i8", DType.I64),
        (">f2", DType.F16), (">f4", DType.F32), (">f8", DType.F32))},
}  # fmt: skip
NO_NUMBERS = {
    "text": np.array(["a"]), "complex": np.array([1j]), "objects": np.array([object()]), "None": None,
    "uint64 beyond I64": np.array([2**63], dtype=np.uint64), "dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "ragged": [[1, 2], [3]],
}  # fmt: skip


class CreationTests(BackendCase):
    @each(shape=SHAPES, dtype=DTYPES)
    def test_new_tensors_have_the_shape_dtype_bytes_and_c_strides_asked_for(
        self, ctx: Context, shape: tuple[int, ...], dtype: DType
    ) -> None:
        zeros, values = ctx.zeros(shape, dtype), counting(shape, dtype)
        assert_same(zeros, np.zeros(shape), dtype)
        assert type(zeros.shape) is tuple
        assert zeros.nbytes == values.nbytes
        if 0 not in shape:
            c_order = np.zeros(shape, np.int8).strides
            sizes = zip(shape, zeros.strides, c_order, strict=True)
            assert all(size == 1 or stride == wanted for size, stride, wanted in sizes)
        assert_same(ctx.from_numpy(values), values)
        empty = ctx.empty(shape, dtype)
        assert (empty.shape, empty.dtype) == (shape, dtype)
        ctx.from_numpy(values).copy(ctx, empty)
        assert_same(empty, values)

    @each(filled=FILLED)
    def test_full_repeats_the_value_as_that_dtype(self, ctx: Context, filled: tuple[float, DType]) -> None:
        value, dtype = filled
        with np.errstate(over="ignore"):
            expected = np.full((2, 3), np.array(value).astype(dtype.numpy))
        assert_same(ctx.full((2, 3), value, dtype), expected)
        assert_same(ctx.full((), value, dtype), expected[0, 0])
        assert ctx.full((2, 0), value, dtype).shape == (2, 0)

    @each(steps=[*RANGES, *FRACTIONS], dtype=[*FLOATS, *INTEGERS])
    def test_arange_is_start_plus_i_steps_up_to_but_without_stop(
        self, ctx: Context, steps: tuple[float, float, float], dtype: DType
    ) -> None:
        if dtype.is_float or steps not in FRACTIONS:
            assert_same(ctx.arange(*steps, dtype), np.arange(*steps), dtype)

    @each(case=COUNTED)
    def test_arange_counts_exactly_whatever_kind_of_number_it_is_given(
        self, ctx: Context, case: tuple[tuple[Any, Any, Any], DType, list[float]]
    ) -> None:
        steps, dtype, expected = case
        assert_same(ctx.arange(*steps, dtype), np.array(expected, dtype.numpy))

    @each(case=NUMBERS_OF_NUMPY)
    def test_full_takes_numbers_of_any_kind_and_rounds_them_once(
        self, ctx: Context, case: tuple[Any, DType, float]
    ) -> None:
        value, dtype, expected = case
        assert_same(ctx.full((2,), value, dtype), np.full(2, expected, dtype.numpy))

    def test_sixty_four_axes_are_the_most(self, ctx: Context) -> None:
        """NumPy's limit: an array of all axes reaches the host."""
        most, number = (1,) * 63 + (2,), ctx.arange(0, 2, 1, DType.F32)
        shown = number.reshape(ctx, *most)
        for tensor in (
            shown, number.view(ctx, 0, most), ctx.from_numpy(shown.to_numpy()), shown.contiguous(ctx),
            ctx.from_bytes(number.to_numpy().tobytes(), most, DType.F32), shown.cast(ctx, DType.I32),
            shown.permute(ctx, *range(64)), shown.slice(ctx, 63, 0, 2), shown.rows(ctx, [0, 1], 63),
        ):  # fmt: skip
            assert tensor.to_numpy().ravel().tolist() == [0, 1]
            assert tensor.shape == most
        assert_same(shown.concat(ctx, shown, 0), np.concatenate([shown.to_numpy()] * 2, 0))
        assert_same(shown.repeat(ctx, 5, 2), np.repeat(shown.to_numpy(), 2, 5))
        shown.copy(ctx, copied := ctx.zeros(most, DType.F32))
        assert_same(copied.set_rows(ctx, shown, [1, 0], 63), shown.to_numpy()[..., ::-1])

    def test_arange_neither_gathers_rounding_errors_nor_passes_through_a_float(self, ctx: Context) -> None:
        actual = ctx.arange(0, 1000, 0.1, DType.F32).to_numpy()
        np.testing.assert_allclose(actual, np.arange(10000) * 0.1, rtol=2e-7)
        for first in (2**53 + 1, 2**63 - 5, -(2**63)):
            assert_same(ctx.arange(first, first + 4, 1, DType.I64), first + np.arange(4, dtype=np.int64))
        down = ctx.arange(3 - 2**63, -(2**63), -1, DType.I64)
        assert_same(down, 3 - 2**63 - np.arange(3, dtype=np.int64))

    # To and from the host.

    @each(dtype=DTYPES)
    def test_every_bit_goes_in_and_comes_out_again(self, ctx: Context, dtype: DType) -> None:
        values = special_values(dtype)
        little = values.astype(values.dtype.newbyteorder("<")).tobytes()
        assert_same(ctx.from_numpy(values), values)
        for data in (little, bytearray(little), memoryview(little)):
            assert_same(ctx.from_bytes(data, values.shape, dtype), values)
        for shape in ((), (2, 3), (3, 0)):
            part = np.resize(values, shape)
            assert_same(ctx.from_bytes(part.tobytes(), shape, dtype), part)

    def test_what_goes_in_and_comes_out_is_copied(self, ctx: Context) -> None:
        host, data = np.arange(6, dtype=np.float32), bytearray(np.arange(6, dtype=np.float32).tobytes())
        tensors = ctx.from_numpy(host), ctx.from_bytes(data, (6,), DType.F32)
        host[:], data[:] = -1, bytes(24)
        for tensor in tensors:
            for shown in (tensor, tensor.reshape(ctx, 2, 3).permute(ctx, 1, 0)):
                shown.to_numpy()[...] = -1
            assert_same(tensor, np.arange(6), DType.F32)

    @each(dtype=DTYPES)
    def test_from_numpy_takes_arrays_in_any_layout(self, ctx: Context, dtype: DType) -> None:
        grid = counting((4, 6), dtype)
        for host in (
            grid.T,
            grid[::2, 1::3],
            grid[::-1],
            grid[:, ::-2],
            grid[:1, ::-1],
            grid[2:3][::-1],  # NumPy calls this and the next two C-contiguous
            grid[:, :1].copy()[:, ::-1],
            in_records(grid[0, :1]),
            np.broadcast_to(grid[0], (3, 6)),
        ):
            assert_same(ctx.from_numpy(host), host)
        grid.flags.writeable = False
        assert_same(ctx.from_numpy(grid), grid)

    @each(given=NATURAL)
    def test_from_numpy_chooses_the_natural_dtype_of_any_array_like(
        self, backend: Backend, ctx: Context, given: tuple[Any, DType]
    ) -> None:
        host, dtype = given
        if dtype is DType.F32 and getattr(backend, "dtype", DType.F32) is not DType.F32:
            pytest.skip("opened with another default float")
        assert_same(ctx.from_numpy(host), np.asarray(host).astype(dtype.numpy))

    @each(
        dtype=DTYPES, source=[np.float64, np.int64, np.uint8, np.float16, ml_dtypes.bfloat16, np.bool_, ">f4"]
    )
    def test_from_numpy_converts_to_the_dtype_asked_for(
        self, ctx: Context, dtype: DType, source: Any
    ) -> None:
        host = np.array([0, 1, 1, 0]).astype(source)
        assert_same(ctx.from_numpy(host, dtype), [0, 1, 1, 0], dtype)
        assert_same(ctx.from_numpy(host, dtype=dtype), [0, 1, 1, 0], dtype)

    @each(given=NO_NUMBERS)
    def test_from_numpy_refuses_what_is_no_array_of_numbers(self, ctx: Context, given: Any) -> None:
        with unchanged():
            ctx.from_numpy(given)

    # The framework's own arrays.

    @needs("from_native")
    @each(dtype=DTYPES)
    def test_native_of_one_tensor_becomes_another_through_from_native(
        self, ctx: Context, dtype: DType
    ) -> None:
        values = counting((3, 4), dtype)
        tensor = ctx.from_numpy(values)
        for shown in (
            tensor,
            tensor.permute(ctx, 1, 0),
            tensor.slice(ctx, 1, 1, 3),
            ctx.zeros((2, 0), dtype),
            tensor.slice(ctx, 0, 1, 1).permute(ctx, 1, 0),
        ):
            assert_same(ctx.from_native(shown.native), shown.to_numpy())
        part = ctx.from_native(tensor.reshape(ctx, 12).slice(ctx, 0, 4, 9).native)
        assert_same(part, values.ravel()[4:9])
        assert_same(part.view(ctx, 1, (2, 2), (2, 1)), values.ravel()[[[5, 6], [7, 8]]])
        ctx.from_numpy(values[0, :2]).copy(ctx, part.slice(ctx, 0, 3, 5))
        assert_same(part, [*values.ravel()[4:7], *values[0, :2]], dtype)
        assert_same(ctx.from_native(ctx.zeros((), dtype).native), np.zeros(()), dtype)

    @needs("from_native")
    def test_from_native_tensors_are_views_like_any_other(self, ctx: Context) -> None:
        native = ctx.arange(0, 12, 1, DType.I32).reshape(ctx, 3, 4).native
        tensor = ctx.from_native(native)
        flipped = tensor.permute(ctx, 1, 0)
        ctx.full((3,), -1, DType.I32).copy(ctx, flipped.slice(ctx, 0, 1, 2).reshape(ctx, 3))
        assert_same(tensor, [[0, -1, 2, 3], [4, -1, 6, 7], [8, -1, 10, 11]], DType.I32)
        assert_same(flipped.view(ctx, 4, (2,)), [4, -1], DType.I32)
        with unchanged(tensor, error=ml.BoundsError):
            tensor.view(ctx, 0, (13,))

    @needs("from_native")
    def test_from_native_allocates_nothing(self, backend: Backend, ctx: Context) -> None:
        native = ctx.zeros((1 << 16,), DType.F32).native
        before = backend.memory().allocated
        tensor = ctx.from_native(native)
        ctx.compute(tensor)
        assert backend.memory().allocated <= before

    @needs("from_native")
    @each(array={"an object": object(), "a list": [1.0, 2.0], "text": "text", "None": None})
    def test_from_native_refuses_what_is_no_array_of_the_framework(self, ctx: Context, array: Any) -> None:
        with unchanged():
            ctx.from_native(array)

    @each(dtype=DTYPES)
    def test_dlpack_shows_the_same_elements_where_the_framework_offers_it(
        self, ctx: Context, dtype: DType
    ) -> None:
        values = counting((3, 4), dtype)
        tensor: Any = ctx.from_numpy(values).permute(ctx, 1, 0)
        if not hasattr(tensor.native, "__dlpack__"):
            pytest.skip("the framework has no DLPack")
        device: tuple[int, int] = tensor.__dlpack_device__()
        if int(device[0]) != 1:
            pytest.skip("not in host memory")
        try:
            capsule = tensor.__dlpack__()
        except BufferError:  # the error that callers of DLPack expect
            if dtype in (DType.BF16, DType.BOOL):
                return
            raise
        assert capsule is not None
        if dtype is not DType.BF16:  # NumPy does not read bfloat16
            np.testing.assert_array_equal(np.from_dlpack(tensor), values.T)

    # Memory, names, contexts.

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

    def test_a_backend_has_a_name_and_devices_with_memory(self, backend: Backend) -> None:
        names = [device.name for device in backend.devices]
        assert backend.name
        assert names
        assert len(set(names)) == len(names)
        assert all(device.name and device.kind for device in backend.devices)
        memory = backend.memory()
        assert [row.device for row in memory.devices] == names
        assert memory.allocated == sum(row.allocated for row in memory.devices)
        for row in memory.devices:
            assert row.allocated >= 0
            assert row.total is None or row.total > 0
            assert row.free is None or row.total is None or 0 <= row.free <= row.total

    def test_contexts_are_of_their_backend_and_satisfy_the_protocols(
        self, backend: Backend, ctx: Context
    ) -> None:
        assert isinstance(backend, ml.Backend)
        assert isinstance(ctx, ml.Context)
        assert isinstance(ctx.zeros((2,), DType.F32), ml.Tensor)
        for place in (ctx, ctx.input(), ctx.layer(0), ctx.layer(0).input(), ctx.layer(1000)):
            assert place.backend is backend
            assert_same(place.full((2,), 3, DType.I32), [3, 3], DType.I32)
        with unchanged():
            ctx.layer(-1)
        with backend.new_context(max_graph_nodes=17) as small:
            assert small.max_graph_nodes == 17
        assert ctx.max_graph_nodes > 0
        for nodes in (0, -1):
            with unchanged():
                backend.new_context(max_graph_nodes=nodes)
