"""Arithmetic, elementwise functions and products against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from ml.capabilities import BINARY_OPERATIONS, UNARY_OPERATIONS
from ml.dtypes import DType
from ml.protocols import Context, Tensor
from ml.testing.harness import BackendCase, assert_close, assert_same, needs, unchanged
from ml.testing.samples import DTYPES, FLOATS, INTEGERS, LAYOUTS, counting

__all__ = ["ComputeTests"]

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide
}  # fmt: skip
UNARY: dict[str, Callable[[np.ndarray], Any]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "abs": np.abs,
    "round": np.rint,
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": np.equal, "eq": np.equal, "!=": np.not_equal, "ne": np.not_equal, "<": np.less, "lt": np.less,
    "<=": np.less_equal, "le": np.less_equal, ">": np.greater, "gt": np.greater, ">=": np.greater_equal,
    "ge": np.greater_equal,
}  # fmt: skip
BROADCASTS = [
    ((4, 3), (4, 3)), ((4, 3), (3,)), ((4, 3), (4, 1)), ((1, 3), (4, 1)), ((), (2, 2)), ((5,), ()), ((), ()),
    ((2, 1, 3), (4, 1)), ((0, 3), (1, 3)), ((3, 0), (0,)), ((1,), (0,)),
]  # fmt: skip
WHOLE_NUMBER_OPERATIONS = ("neg", "abs", "relu", "round")


def normal(shape: tuple[int, ...], dtype: DType, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    """Random values that ``dtype`` holds exactly, in that dtype."""
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * spread).astype(dtype.numpy)


def exact(array: np.ndarray) -> np.ndarray:
    """In float64, which holds every value of the float dtypes and of the integers tested here."""
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64)


class ComputeTests(BackendCase):
    # Binary.

    @pytest.mark.parametrize("op", BINARY_OPERATIONS)
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(("left", "right"), BROADCASTS, ids=str)
    def test_binary_operations_broadcast_as_numpy(
        self, ctx: Context, op: str, dtype: DType, left: tuple[int, ...], right: tuple[int, ...]
    ) -> None:
        a, b = normal(left, dtype, 1), normal(right, dtype, 2)
        result = getattr(ctx.from_numpy(a), op)(ctx, ctx.from_numpy(b))
        assert_close(result, np.asarray(BINARY[op](exact(a), exact(b))), dtype)

    @pytest.mark.parametrize("op", ["add", "sub", "mul"])
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_integers_keep_their_dtype(self, ctx: Context, op: str, dtype: DType) -> None:
        a, b = np.array([[7, 9, 11]], dtype.numpy), np.array([[3], [0], [7]], dtype.numpy)
        assert_same(getattr(ctx.from_numpy(a), op)(ctx, ctx.from_numpy(b)), BINARY[op](a, b))

    @needs("add", "mul")
    def test_64_bit_integers_are_exact(self, ctx: Context) -> None:
        big = ctx.from_numpy(np.array([2**53 + 1, -(2**62)]))
        assert_same(big.add(ctx, ctx.full((), 2, DType.I64)), [2**53 + 3, 2 - 2**62], DType.I64)
        assert_same(
            ctx.full((1,), 3**19, DType.I64).mul(ctx, ctx.full((1,), 3**19, DType.I64)), [3**38], DType.I64
        )

    @pytest.mark.parametrize("op", BINARY_OPERATIONS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_binary_operations_read_strided_operands(self, ctx: Context, op: str, layout: str) -> None:
        for dtype in self.offered(FLOATS):
            a, b = normal((4, 3, 2), dtype, 3), normal((4, 3, 2), dtype, 4)
            left, right = LAYOUTS[layout](ctx, a).tensor, LAYOUTS["permuted"](ctx, b).tensor
            assert_close(getattr(left, op)(ctx, right), BINARY[op](exact(a), exact(b)), dtype)

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("add", "sub", "mul", "div")
    def test_infinities_and_nan_are_values_and_no_warnings(self, ctx: Context, dtype: DType) -> None:
        a = np.array([np.inf, np.inf, 1, 0, -1, np.nan, 0]).astype(dtype.numpy)
        b = np.array([np.inf, 1, 0, 0, 0, 1, np.inf]).astype(dtype.numpy)
        left, right = ctx.from_numpy(a), ctx.from_numpy(b)
        for op in BINARY_OPERATIONS:
            with np.errstate(all="ignore"):
                expected = BINARY[op](exact(a), exact(b))
            assert_close(getattr(left, op)(ctx, right), expected, dtype)

    @needs("mul")
    def test_a_result_beyond_the_largest_is_an_infinity(self, ctx: Context) -> None:
        for dtype in self.offered(FLOATS):
            large = 60000.0 if dtype is DType.F16 else 3e38
            tensor = ctx.full((2,), large, dtype)
            assert_same(tensor.mul(ctx, ctx.full((2,), -3, dtype)), [-np.inf] * 2, dtype)

    @needs("add")
    def test_narrow_floats_round_once_to_nearest_even(self, ctx: Context) -> None:
        for dtype in self.offered(FLOATS):
            ulp = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7, DType.F32: 2.0**-23}[dtype]
            ones = ctx.from_numpy(np.array([1, 1 + ulp, 1, 1]).astype(dtype.numpy))
            small = ctx.from_numpy(np.array([ulp / 2, ulp / 2, ulp * 0.75, ulp * 0.25]).astype(dtype.numpy))
            assert_same(ones.add(ctx, small), np.array([1, 1 + 2 * ulp, 1 + ulp, 1]).astype(dtype.numpy))

    # Unary.

    @pytest.mark.parametrize("op", UNARY_OPERATIONS)
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_unary_operations_match_float64(self, ctx: Context, op: str, dtype: DType) -> None:
        edges = [0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1.0, -1.0, 20.0, -20.0, 1e-3]
        x = np.concatenate([normal((101,), dtype, 5), np.array(edges).astype(dtype.numpy)])
        with np.errstate(all="ignore"):
            expected = UNARY[op](exact(x))
        assert_close(
            getattr(ctx.from_numpy(x), op)(ctx), expected, dtype, slack=2 if dtype is DType.F32 else 1
        )

    @pytest.mark.parametrize("op", UNARY_OPERATIONS)
    @pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1, 1)], ids=str)
    def test_unary_operations_keep_shape_and_dtype(
        self, ctx: Context, op: str, shape: tuple[int, ...]
    ) -> None:
        for dtype in self.offered(FLOATS):
            x = np.full(shape, 2.0).astype(dtype.numpy)
            assert_close(getattr(ctx.from_numpy(x), op)(ctx), np.asarray(UNARY[op](exact(x))), dtype)

    @pytest.mark.parametrize("op", UNARY_OPERATIONS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_unary_operations_read_strided_operands(self, ctx: Context, op: str, layout: str) -> None:
        x = np.abs(normal((4, 3), DType.F32, 6))
        assert_close(getattr(LAYOUTS[layout](ctx, x).tensor, op)(ctx), UNARY[op](exact(x)), DType.F32)

    @pytest.mark.parametrize("op", WHOLE_NUMBER_OPERATIONS)
    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_whole_number_operations_take_integers(self, ctx: Context, op: str, dtype: DType) -> None:
        x = np.array([0, 1, 7, 120] if dtype is DType.U8 else [0, 1, -7, 120, -120], dtype.numpy)
        if op == "neg" and dtype is DType.U8:
            x = np.zeros(3, np.uint8)
        assert_same(getattr(ctx.from_numpy(x), op)(ctx), UNARY[op](x.astype(np.int64)), dtype)

    @pytest.mark.parametrize("op", UNARY_OPERATIONS)
    def test_unary_operations_at_the_ends_of_the_line(self, ctx: Context, op: str) -> None:
        x = np.array([np.inf, -np.inf, np.nan, 0.0, -1.0], dtype=np.float32)
        if op in ("silu", "sin", "cos"):
            x = x[2:]
        with np.errstate(all="ignore"):
            expected = np.asarray(UNARY[op](exact(x)))
        if op == "relu":
            expected[np.isnan(x)] = np.nan
        assert_close(getattr(ctx.from_numpy(x), op)(ctx), expected, DType.F32)

    @needs("sigmoid", "silu")
    def test_sigmoid_and_silu_survive_large_arguments(self, ctx: Context) -> None:
        x = ctx.from_numpy(np.array([-1000, -100, 100, 1000], dtype=np.float32))
        assert_close(x.sigmoid(ctx), np.array([0, 0, 1.0, 1.0]), DType.F32)
        assert_close(x.silu(ctx), np.array([0, 0, 100.0, 1000.0]), DType.F32)

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("round")
    def test_round_takes_halves_to_even(self, ctx: Context, dtype: DType) -> None:
        x = np.array([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 2.25, 2.75]).astype(dtype.numpy)
        assert_close(ctx.from_numpy(x).round(ctx), np.array([0, 2, 2, 4, -0.0, -2, -2, 2, 3]), dtype)

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("gelu")
    def test_gelu_is_exact_by_default_and_tanh_on_request(self, ctx: Context, dtype: DType) -> None:
        x = np.concatenate([normal((60,), dtype, 7), np.array([0, 10, -10, 100, -100]).astype(dtype.numpy)])
        wide = exact(x)
        erf = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in wide])
        tanh = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        assert np.abs(erf - tanh).max() > 1e-4
        slack = 2 if dtype is DType.F32 else 1
        tensor = ctx.from_numpy(x)
        assert_close(tensor.gelu(ctx), erf, dtype, slack)
        assert_close(tensor.gelu(ctx, "none"), erf, dtype, slack)
        assert_close(tensor.gelu(ctx, approximate="tanh"), tanh, dtype, slack)
        with unchanged(tensor):
            tensor.gelu(ctx, "erf")  # type: ignore[arg-type]

    # Scale and clamp.

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("scale")
    def test_scale_multiplies_by_a_number(self, ctx: Context, dtype: DType) -> None:
        x = normal((3, 4), dtype, 8)
        for factor in (0.125, -3, 2.0**0.5, 0, 1e300, np.float32(0.5)):
            with np.errstate(all="ignore"):
                expected = exact(x) * float(np.float32(factor))
            assert_close(ctx.from_numpy(x).permute(ctx, 1, 0).scale(ctx, float(factor)), expected.T, dtype)

    @pytest.mark.parametrize("dtype", INTEGERS)
    @needs("scale")
    def test_integers_scale_by_whole_numbers_only(self, ctx: Context, dtype: DType) -> None:
        tensor = ctx.from_numpy(np.array([0, 1, 7], dtype.numpy))
        assert_same(tensor.scale(ctx, 3), [0, 3, 21], dtype)
        assert_same(tensor.scale(ctx, 2.0), [0, 2, 14], dtype)
        for factor in (0.5, float("nan"), float("inf")):
            with unchanged(tensor, error=ml.DTypeError):
                tensor.scale(ctx, factor)

    @pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
    @needs("clamp")
    def test_clamp_bounds_either_side_or_none(self, ctx: Context, dtype: DType) -> None:
        x = np.array([0, 3, 5, 9, 120], dtype.numpy)
        tensor = ctx.from_numpy(x)
        for lo, hi in ((3, 9), (None, 5), (4, None), (None, None), (5, 5), (0, 127)):
            expected = x if lo is None else np.maximum(x, np.array(lo, dtype.numpy))
            expected = expected if hi is None else np.minimum(expected, np.array(hi, dtype.numpy))
            assert_same(tensor.clamp(ctx, lo, hi), expected)
        with unchanged(tensor, error=ml.ShapeError):
            tensor.clamp(ctx, 5, 4)

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("clamp")
    def test_clamp_takes_infinite_and_huge_bounds_and_keeps_nan(self, ctx: Context, dtype: DType) -> None:
        x = np.array([np.inf, -np.inf, np.nan, 1.0]).astype(dtype.numpy)
        tensor = ctx.from_numpy(x)
        assert_same(tensor.clamp(ctx, float("-inf"), 1e6 if dtype is DType.F16 else 1e300), x)
        assert_same(tensor.clamp(ctx, -0.5, 0.5), np.array([0.5, -0.5, np.nan, 0.5]).astype(dtype.numpy))

    @needs("clamp")
    def test_clamp_of_integers_takes_bounds_of_that_dtype(self, ctx: Context) -> None:
        tensor = ctx.from_numpy(np.array([1, 2], np.int32))
        for lo, hi in ((0.5, None), (None, 1.5)):
            with unchanged(tensor, error=ml.DTypeError):
                tensor.clamp(ctx, lo, hi)

    # Results never alias an operand.

    @pytest.mark.parametrize("op", [*UNARY_OPERATIONS, "gelu"])
    def test_unary_results_are_new_storage(self, ctx: Context, op: str) -> None:
        source = ctx.from_numpy(np.array([[1.0, 2.0]], np.float32))
        self._result_is_new(ctx, source, getattr(source, op)(ctx))

    @needs("clamp", "scale", "add", "mul", "softmax", "sum", "max", "mean", "where", "compare")
    def test_other_results_are_new_storage(self, ctx: Context) -> None:
        values = np.array([[1.0, 2.0]], np.float32)
        computations: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda t: t.clamp(ctx, None, None),
            lambda t: t.clamp(ctx, 0, 9),
            lambda t: t.scale(ctx, 1),
            lambda t: t.add(ctx, ctx.zeros((), DType.F32)),
            lambda t: t.mul(ctx, ctx.full((), 1, DType.F32)),
            lambda t: t.sum(ctx, 0, keepdims=True),
            lambda t: t.max(ctx, 0, keepdims=True),
            lambda t: t.mean(ctx, 0, keepdims=True),
            lambda t: t.compare(ctx, "==", t).where(ctx, t, t),
        )
        for compute in computations:
            source = ctx.from_numpy(values)
            self._result_is_new(ctx, source, compute(source))
        whole = ctx.from_numpy(np.array([[1, 2]], np.int32))
        self._result_is_new(ctx, whole, whole.clamp(ctx, None, None))

    def _result_is_new(self, ctx: Context, source: Tensor, result: Tensor) -> None:
        before = result.to_numpy()
        ctx.full(source.shape, 77, source.dtype).copy(ctx, source)
        assert_same(result, before)
        ctx.zeros(result.shape, result.dtype).copy(ctx, result)
        assert_same(source, np.full(source.shape, 77), source.dtype)

    # Products.

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize(
        ("left", "right"),
        [((4, 5), (5, 3)), ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 4, 5), (5, 3)),
         ((4, 5), (2, 5, 3)), ((2, 1, 4, 5), (3, 5, 6)), ((2, 4, 0), (2, 0, 3)), ((0, 5), (5, 3)),
         ((4, 5), (5, 0)), ((2, 4, 5), (5,)),
         ((1, 1), (1, 1)), ((0,), (0,)), ((0, 4, 5), (1, 5, 3))],
        ids=str,
    )  # fmt: skip
    @needs("matmul")
    def test_matmul_is_numpys(
        self, ctx: Context, dtype: DType, left: tuple[int, ...], right: tuple[int, ...]
    ) -> None:
        a, b = normal(left, dtype, 9), normal(right, dtype, 10)
        result = ctx.from_numpy(a).matmul(ctx, ctx.from_numpy(b))
        assert_close(result, np.asarray(np.matmul(exact(a), exact(b))), dtype, slack=4)

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    @needs("matmul")
    def test_matmul_reads_strided_operands(self, ctx: Context, dtype: DType, layout: str) -> None:
        a, b = normal((3, 4, 5), dtype, 11), normal((3, 5, 2), dtype, 12)
        for other in LAYOUTS:
            result = LAYOUTS[layout](ctx, a).tensor.matmul(ctx, LAYOUTS[other](ctx, b).tensor)
            assert_close(result, np.matmul(exact(a), exact(b)), dtype, slack=4)
        shared = ctx.from_numpy(a).view(ctx, 0, (3, 4, 5), (0, 5, 1))
        result = shared.matmul(ctx, ctx.from_numpy(b))
        assert_close(result, np.matmul(exact(a[0]), exact(b)), dtype, slack=4)

    @needs("matmul")
    def test_matmul_refuses_what_does_not_fit(self, ctx: Context) -> None:
        tensor = ctx.zeros((4, 5), DType.F32)
        for shape in ((4, 3), (), (6,), (2, 4, 5)):
            with unchanged(tensor, error=ml.ShapeError):
                tensor.matmul(ctx, ctx.zeros(shape, DType.F32))
        with unchanged(error=ml.ShapeError):
            ctx.zeros((2, 4, 5), DType.F32).matmul(ctx, ctx.zeros((3, 5, 4), DType.F32))
        with unchanged(error=ml.ShapeError):
            ctx.zeros((), DType.F32).matmul(ctx, tensor)

    @pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
    @needs("matmul")
    def test_matmul_accumulates_in_f32_or_better(self, ctx: Context, dtype: DType) -> None:
        """Ones summed in F16 stop at 2048, in BF16 at 256."""
        count = 8192
        ones = ctx.full((2, count), 1, dtype)
        assert_same(ones.matmul(ctx, ctx.full((count, 3), 1, dtype)), np.full((2, 3), count), dtype)
        assert_same(ones.matmul(ctx, ctx.full((count,), 1, dtype)), [count, count], dtype)
        halves = np.where(np.arange(count) % 2, -30000.0, 30000.0).astype(
            dtype.numpy
        )  # partial sums overflow F16
        rows = ctx.from_numpy(np.stack([halves, np.sort(halves)]))
        assert_same(rows.matmul(ctx, ctx.full((count, 1), 1, dtype)), [[0], [0]], dtype)

    # Comparison and choice.

    @pytest.mark.parametrize("symbol", COMPARE)
    @pytest.mark.parametrize("dtype", DTYPES)
    @needs("compare")
    def test_compare_gives_bool_by_symbol_and_by_name(self, ctx: Context, symbol: str, dtype: DType) -> None:
        a, b = counting((3, 4), dtype), counting((4,), dtype, start=4)
        result = ctx.from_numpy(a).compare(ctx, symbol, ctx.from_numpy(b))
        assert_same(result, COMPARE[symbol](a, b), DType.BOOL)

    @pytest.mark.parametrize("dtype", FLOATS)
    @needs("compare")
    def test_nan_equals_nothing_and_zeros_are_equal(self, ctx: Context, dtype: DType) -> None:
        a = np.array([np.nan, np.nan, -0.0, np.inf]).astype(dtype.numpy)
        b = np.array([np.nan, 1.0, 0.0, np.inf]).astype(dtype.numpy)
        for symbol, function in COMPARE.items():
            result = ctx.from_numpy(a).compare(ctx, symbol, ctx.from_numpy(b))
            assert_same(result, function(exact(a), exact(b)), DType.BOOL)

    @needs("compare")
    def test_compare_is_exact_on_64_bit_integers_and_refuses_other_symbols(self, ctx: Context) -> None:
        a = ctx.from_numpy(np.array([2**53, 2**53 + 1]))
        assert_same(a.compare(ctx, "==", ctx.full((), 2**53, DType.I64)), [True, False], DType.BOOL)
        for symbol in ("=", "<>", "", "is"):
            with unchanged(a):
                a.compare(ctx, symbol, a)

    @pytest.mark.parametrize("dtype", DTYPES)
    @needs("where")
    def test_where_chooses_and_broadcasts(self, ctx: Context, dtype: DType) -> None:
        condition = np.array([[True], [False], [True]])
        a, b = counting((4,), dtype), counting((3, 4), dtype, start=40)
        result = ctx.from_numpy(condition).where(ctx, ctx.from_numpy(a), ctx.from_numpy(b))
        assert_same(result, np.where(condition, a, b))
        turned = LAYOUTS["permuted"](ctx, b).tensor
        result = ctx.from_numpy(condition).where(ctx, turned, ctx.from_numpy(a))
        assert_same(result, np.where(condition, b, a))
        scalar = ctx.full((), True, DType.BOOL).where(ctx, ctx.from_numpy(a[0]), ctx.from_numpy(b[0]))
        assert_same(scalar, np.broadcast_to(a[0], (4,)))
        empty = ctx.zeros((0, 1), DType.BOOL).where(ctx, ctx.from_numpy(a), ctx.from_numpy(a))
        assert empty.shape == (0, 4)

    @needs("where")
    def test_where_keeps_infinities_and_nan_on_the_side_not_taken(self, ctx: Context) -> None:
        condition = ctx.from_numpy(np.array([True, False]))
        a, b = ctx.from_numpy(np.array([1.0, np.nan], np.float32)), ctx.full((2,), float("-inf"), DType.F32)
        assert_same(condition.where(ctx, a, b), [1, -np.inf], DType.F32)

    @needs("where")
    def test_where_refuses_other_conditions_dtypes_and_shapes(self, ctx: Context) -> None:
        condition, a = ctx.zeros((3,), DType.BOOL), ctx.zeros((3,), DType.F32)
        with unchanged(a, error=ml.DTypeError):
            a.where(ctx, a, a)
        with unchanged(a, error=ml.DTypeError):
            condition.where(ctx, a, ctx.zeros((3,), DType.I32))
        with unchanged(a, error=ml.ShapeError):
            condition.where(ctx, a, ctx.zeros((4,), DType.F32))

    # Dtypes and shapes refused.

    @pytest.mark.parametrize("op", [*BINARY_OPERATIONS, "matmul"])
    def test_binary_operands_share_a_dtype(self, ctx: Context, op: str) -> None:
        tensor = ctx.full((2, 2), 1, DType.F32)
        for other in self.offered((DType.F16, DType.BF16, DType.I32, DType.BOOL)):
            with unchanged(tensor, error=ml.DTypeError):
                getattr(tensor, op)(ctx, ctx.full((2, 2), 1, other))
        with unchanged(tensor):
            getattr(tensor, op)(ctx, 1.0)

    @needs("compare")
    def test_compared_operands_share_a_dtype(self, ctx: Context) -> None:
        with unchanged(error=ml.DTypeError):
            ctx.zeros((2,), DType.F32).compare(ctx, "==", ctx.zeros((2,), DType.I32))

    @pytest.mark.parametrize("op", BINARY_OPERATIONS)
    def test_shapes_that_do_not_broadcast_are_refused(self, ctx: Context, op: str) -> None:
        tensor = ctx.full((4, 3), 1, DType.F32)
        for shape in ((4,), (2, 3), (4, 3, 2)):
            with unchanged(tensor, error=ml.ShapeError):
                getattr(tensor, op)(ctx, ctx.full(shape, 1, DType.F32))

    @pytest.mark.parametrize(
        "op", sorted({*UNARY_OPERATIONS, "gelu", "softmax"} - {*WHOLE_NUMBER_OPERATIONS})
    )
    def test_functions_of_floats_refuse_integers_and_bool(self, ctx: Context, op: str) -> None:
        for dtype in self.offered((*INTEGERS, DType.BOOL)):
            tensor = ctx.full((2,), 1, dtype)
            with unchanged(tensor, error=ml.DTypeError):
                getattr(tensor, op)(ctx)

    @needs("div", "matmul", "rms_norm")
    def test_division_and_products_refuse_integers(self, ctx: Context) -> None:
        for dtype in self.offered((*INTEGERS, DType.BOOL)):
            tensor = ctx.full((2, 2), 1, dtype)
            for op in ("div", "matmul"):
                with unchanged(tensor, error=ml.DTypeError):
                    getattr(tensor, op)(ctx, tensor)
            with unchanged(tensor, error=ml.DTypeError):
                tensor.rms_norm(ctx, None, 1e-5)

    @pytest.mark.parametrize("op", ["add", "sub", "mul"])
    def test_arithmetic_refuses_bool(self, ctx: Context, op: str) -> None:
        tensor = ctx.full((2,), True, DType.BOOL)
        with unchanged(tensor, error=ml.DTypeError):
            getattr(tensor, op)(ctx, tensor)

    @pytest.mark.parametrize("op", [*WHOLE_NUMBER_OPERATIONS, "scale", "clamp"])
    def test_numbers_are_asked_for_and_bool_is_none(self, ctx: Context, op: str) -> None:
        tensor = ctx.full((2,), True, DType.BOOL)
        arguments: dict[str, tuple[Any, ...]] = {"scale": (1,), "clamp": (0, 1)}
        with unchanged(tensor, error=ml.DTypeError):
            getattr(tensor, op)(ctx, *arguments.get(op, ()))
