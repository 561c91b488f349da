"""Tables of arithmetic, functions, products, reductions and sorts: against float64, and exact results.

A row is an expression and its NumPy equivalent; a failure shows the expression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ml.backend_spec import BINARY_OPERATIONS, UNARY_OPERATIONS
from ml.dtypes import DType
from ml.nn import BatchSampler, Draws, sample_on_host
from ml.protocols import Context, Tensor
from ml.testing.harness import BackendCase, assert_rounded_once, assert_same, each, evaluate, needs
from ml.testing.samples import DTYPES, FLOATS, INTEGERS, LAYOUTS, counting, exact, normal, positions

Shape = tuple[int, ...]
Operands = tuple[Any, ...]
"""Shapes of random operands, or the operands themselves."""

# Float dtypes, against float64.

NARROW = (DType.F16, DType.BF16)
BROADCASTS: list[Operands] = [
    ((4, 3), (4, 3)), ((4, 3), (3,)), ((4, 3), (4, 1)), ((1, 3), (4, 1)), ((), (2, 2)), ((5,), ()), ((), ()),
    ((2, 1, 3), (4, 1)), ((0, 3), (1, 3)), ((3, 0), (0,)), ((1,), (0,)),
    (np.array([np.inf, np.inf, 1, 0, -1, np.nan, 0]), np.array([np.inf, 1, 0, 0, 0, 1, np.inf])),
]  # fmt: skip
PRODUCTS: list[Operands] = [
    ((4, 5), (5, 3)), ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 4, 5), (5, 3)), ((4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 6)), ((2, 4, 0), (2, 0, 3)), ((0, 5), (5, 3)), ((4, 5), (5, 0)), ((2, 4, 5), (5,)),
    ((1, 1), (1, 1)), ((0,), (0,)), ((0, 4, 5), (1, 5, 3)), ((2, 1, 2, 3, 4), (2, 1, 4, 2)),
    (np.array([[0, 0], [1, 1]]), np.array([[np.nan, 1], [np.inf, 2]])),
]  # fmt: skip
SPREAD = np.concatenate(
    [normal((101,), DType.F32, 5), [0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1, -1, 20, -20, 1e-3]]
)
HALVES = np.array([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 2.25, 2.75])
FAR = np.array([0, 10, -10, 100, -100, -1000, 1000])
ENDS = np.array([np.inf, -np.inf, np.nan, 0.0, -1.0])
LOGITS = np.array([[3e4, 3e4, -3e4], [-np.inf, 1, 1], [-np.inf, -np.inf, 5], [0, -1e4, 3e4], [np.nan, 0, 1]])
NOT_FINITE = np.array([[1, np.nan, np.inf], [np.inf, 1, 2], [np.inf, -np.inf, 1]])
SINGLE: list[Operands] = [(SPREAD,), ((),), ((0,),), ((2, 0),), ((4, 3),)]
CUBE: list[Operands] = [((3, 4, 5),)]
UNARY = {
    "neg": "-a", "exp": "np.exp(a)", "log": "np.log(a)", "sqrt": "np.sqrt(a)", "sin": "np.sin(a)",
    "cos": "np.cos(a)",
    "tanh": "np.tanh(a)", "sigmoid": "1 / (1 + np.exp(-a))", "silu": "a / (1 + np.exp(-a))",
    "relu": "np.maximum(a, 0)", "abs": "np.abs(a)", "round": "np.rint(a)",
}  # fmt: skip
BINARY = {"add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b"}


def gelu(x: np.ndarray, approximate: bool = False) -> np.ndarray:
    if approximate:
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    weights = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(weights / weights.sum(axis=axis, keepdims=True))


def rms_norm(x: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps))


FUNCTIONS: list[tuple[str, str, list[Operands], float]] = [
    *[(f"a.{op}(ctx, b)", BINARY[op], BROADCASTS, 1) for op in BINARY_OPERATIONS],
    *[(f"a.{op}(ctx)", UNARY[op], SINGLE, 2) for op in UNARY_OPERATIONS],
    *[(f"a.{op}(ctx)", UNARY[op], [(ENDS,)], 2) for op in UNARY_OPERATIONS if op not in ("silu", "sin",
        "cos")],
    *[(f"a.{op}(ctx)", UNARY[op], [(FAR,)], 2) for op in ("sigmoid", "silu")],
    ("a.round(ctx)", "np.rint(a)", [(HALVES,)], 1),
    ("a.gelu(ctx)", "gelu(a)", [*SINGLE, (FAR,)], 2),
    ("a.gelu(ctx, 'none')", "gelu(a)", CUBE, 2),
    ("a.gelu(ctx, approximate='tanh')", "gelu(a, True)", [*SINGLE, (FAR,)], 2),
    *[(f"a.scale(ctx, {x})", f"a * np.float32({x})", [((3, 4),)], 1) for x in (0.125, -3, 2.0**0.5, 0,
        1e300)],
    ("a.scale(ctx, np.float32(0.5))", "a * 0.5", CUBE, 1),
    ("a.matmul(ctx, b)", "np.matmul(a, b)", PRODUCTS, 8),
    *[(f"a.{op}(ctx, {axis}{keep})", f"a.{op}(axis={axis}{named})", CUBE, 2) for op in ("sum", "mean", "max")
      for axis in (0, 1, -1) for keep, named in (("", ""), (", True", ", keepdims=True"))],
    ("a.sum(ctx, 0, keepdims=True)", "a.sum(axis=0, keepdims=True)", CUBE, 2),
    *[(f"a.{op}(ctx, 1)", f"a.{op}(1)", [(NOT_FINITE,)], 1) for op in ("sum", "mean", "max")],
    ("a.sum(ctx, 0)", "a.sum()", [(np.random.default_rng(14).uniform(0, 1, 200_000),)], 2),
    *[(f"a.softmax(ctx, {axis})", f"softmax(a, {axis})", CUBE, 4) for axis in (0, 1, -1, -3)],
    ("a.softmax(ctx)", "softmax(a)", [(LOGITS,)], 1),
    *[(f"a.rms_norm(ctx, None, {eps})", f"rms_norm(a, {eps})", [((2, 3, 8),), ((8,),)], 4) for eps in (1e-6,
        0.5)],
    *[(f"a.rms_norm(ctx, b, {eps})", f"rms_norm(a, {eps}) * b", [((2, 3, 8), (8,))], 4) for eps in (1e-6,
        0.5)],
    ("a.rms_norm(ctx, b.slice(ctx, 0, 0, 16, 2), 0.5)", "rms_norm(a, 0.5) * b[::2]", [((2, 3, 8), (16,))], 4),
    # 300 squared overflows F16 and 1e-4 squared underflows; summing 4096 squares in BF16 stalls.
    *[("a.rms_norm(ctx, None, 0.0)", "rms_norm(a, 0)", [(np.full((2, 4096), x),)], 4) for x in (300.0, 1e-4,
        6e4)],
]  # fmt: skip
"""The expression, its NumPy equivalent, its sets of operands, and the allowed error in tolerances."""
ARRANGEMENTS = [*((name, name) for name in LAYOUTS), ("permuted", "contiguous"), ("offset", "stepped"),
                ("interleaved", "permuted")]  # fmt: skip
"""Layouts of the first operand and of the others."""


class Computed(NamedTuple):
    """A row for one set of operands in one arrangement."""

    call: str
    reference: str
    operands: Operands
    slack: float
    layouts: tuple[str, str] = ("contiguous", "contiguous")


def _computed() -> Iterator[tuple[str, Computed]]:
    for call, reference, operand_sets, slack in FUNCTIONS:
        for operands in operand_sets:
            shapes = [operand if isinstance(operand, tuple) else operand.shape for operand in operands]
            name = f"{call} of {' and '.join(map(str, shapes))}"
            yield name, Computed(call, reference, operands, slack)
            if len(shapes[0]) > 1 and math.prod(shapes[0]) in range(1, 1000):
                for layouts in ARRANGEMENTS[1 : len(LAYOUTS) if len(shapes) == 1 else None]:
                    yield (
                        f"{name}, {' and '.join(layouts)}",
                        Computed(call, reference, operands, slack, layouts),
                    )


# Exact results.

SHUFFLED = np.random.default_rng(18).permutation(60).reshape(3, 20)
PARTIAL = np.stack([np.tile([30000.0, -30000.0], 4096), np.repeat([-30000.0, 30000.0], 4096)])
WIDE = np.zeros((2, 5000), int)
GRID = np.arange(12).reshape(4, 3) * 7 % 12
TURNED = "t(GRID.T).permute(ctx, 1, 0)"
"""GRID, laid out column by column."""
FRAMES = positions(0, (2, 7, 5), (3, 4, 1))
WIDE[0, [700, 3000, 4999]] = 1
NUMBERS = (*FLOATS, *INTEGERS)
LIMITS = {DType.F32: (2.0**-23, 3.4e38), DType.F16: (2.0**-10, 65504.0), DType.BF16: (2.0**-7, 3.38e38)}
"""One unit in the last place of 1, and about the largest number."""
I32, I64, BOOL = DType.I32, DType.I64, DType.BOOL
EXACT: list[tuple[Sequence[DType], str, Any, DType | None]] = [
    (INTEGERS, "t([[7, 9, 11]]).add(ctx, t([[3], [0], [7]]))", [[10, 12, 14], [7, 9, 11], [14, 16, 18]],
        None),
    (INTEGERS, "t([[7, 9, 11]]).sub(ctx, t([[3], [0], [7]]))", [[4, 6, 8], [7, 9, 11], [0, 2, 4]], None),
    (INTEGERS, "t([[7, 9, 11]]).mul(ctx, t([[3], [0], [7]]))", [[21, 27, 33], [0, 0, 0], [49, 63, 77]], None),
    *[(INTEGERS, f"t([0, 1, 7, 120]).{op}(ctx)", [0, 1, 7, 120], None) for op in ("abs", "relu", "round")],
    ((DType.I8, I32, I64), "t([0, 1, -7, 120, -120]).neg(ctx)", [0, -1, 7, -120, 120], None),
    ((DType.I8, I32, I64), "t([0, 1, -7, 120, -120]).abs(ctx)", [0, 1, 7, 120, 120], None),
    ((DType.I8, I32, I64), "t([0, 1, -7, 120, -120]).relu(ctx)", [0, 1, 0, 120, 0], None),
    (INTEGERS, "t([0, 1, 7]).scale(ctx, 3)", [0, 3, 21], None),
    # The least and the largest integer: results beyond them wrap.
    *[(INTEGERS, f"t(ends).{call}", expected, None) for call, expected in (
        ("add(ctx, t([3]))", "ends + 3"), ("sub(ctx, t([3]))", "ends - 3"), ("mul(ctx, t([3]))", "ends * 3"),
        ("scale(ctx, 3)", "ends * 3"), ("neg(ctx)", "-ends"), ("abs(ctx)", "np.abs(ends)"))],
    # U8 is unsigned.
    *[((DType.U8,), f"t([200, 100, 255, 3]).{call}", expected, result) for call, expected, result in (
        ("compare(ctx, '<', t([100, 200, 3, 255]))", [False, True, False, True], BOOL),
        ("max(ctx, 0)", 255, None), ("argmax(ctx, 0)", 2, I32), ("sum(ctx, 0)", 558, I64),
        ("argsort(ctx)", [3, 1, 0, 2], I32), ("top_k(ctx, 2)[0]", [255, 200], None),
        ("clamp(ctx, 101, 201)", [200, 101, 201, 101], None))],
    # Operands laid out column by column.
    *[(NUMBERS, f"{TURNED}.{call}", expected, result) for call, expected, result in (
        ("add(ctx, t([1, 2, 3]))", "GRID + [1, 2, 3]", None), ("argmax(ctx, 0)", "GRID.argmax(0)", I32),
        ("clamp(ctx, 3, 9)", "np.clip(GRID, 3, 9)", None), ("compare(ctx, '>', t([5]))", "GRID > 5", BOOL))],
    (NUMBERS, "t(GRID.T).compare(ctx, '>', t([5])).permute(ctx, 1, 0).where(ctx, t(GRID), t([0]))",
        "np.where(GRID > 5, GRID, 0)", None),
    (INTEGERS, "t([0, 1, 7]).scale(ctx, 2.0)", [0, 2, 14], None),
    # 64-bit integers never become floats.
    ((I64,), "t([2**53 + 1, -(2**62)]).add(ctx, ctx.full((), 2, D))", [2**53 + 3, 2 - 2**62], None),
    ((I64,), "t([3**19]).mul(ctx, t([3**19]))", [3**38], None),
    ((I64,), "t([2**53, 2**53 + 1]).compare(ctx, '==', ctx.full((), 2**53, D))", [True, False], BOOL),
    ((I64,), "t([2**53, 1, 1]).sum(ctx, 0)", 2**53 + 2, None),
    ((I64,), "t([2**53, 2**53 + 1, -(2**62)]).max(ctx, 0)", 2**53 + 1, None),
    ((I64,), "t([2**53, 2**53 + 1, -(2**62)]).argmax(ctx, 0)", 1, I32),
    ((I64,), "t([2**53 + 1, 2**53, -(2**60)]).argsort(ctx)", [2, 1, 0], I32),
    ((I64,), "t([2**53 + 1, 2**62 + 1, 5]).clamp(ctx, 2**53 - 1, 2**62)", [2**53 + 1, 2**62, 2**53 - 1],
        None),
    # Floats: one rounding, infinities, NaN.
    (FLOATS, "t([1, 1 + ulp, 1, 1]).add(ctx, t([ulp / 2, ulp / 2, ulp * 0.75, ulp * 0.25]))",
     "[1, 1 + 2 * ulp, 1 + ulp, 1]", None),
    (FLOATS, "t([largest]).mul(ctx, t([-3]))", [-np.inf], None),
    (FLOATS, "t([[-inf, -inf, -5], [-inf, -inf, -inf], [1, inf, inf]]).max(ctx, 1)", [-5, -np.inf, np.inf],
        None),
    (FLOATS, "t([[-inf, -inf, -5], [-inf, -inf, -inf], [1, inf, inf]]).argmax(ctx, 1)", [2, 0, 1], I32),
    (FLOATS, "t([inf, -1, -inf, 0]).argsort(ctx)", [2, 1, 3, 0], I32),
    (FLOATS, "t([1, nan, -inf, nan, inf]).argsort(ctx)", [2, 0, 4, 1, 3], I32),
    (FLOATS, "t([1, nan, -inf, nan, inf]).top_k(ctx, 4)[0]", [np.nan, np.nan, np.inf, 1], None),
    (FLOATS, "t([1, nan, -inf, nan, inf]).top_k(ctx, 4)[1]", [1, 3, 4, 0], I32),
    *[(NUMBERS, f"t([0, 3, 5, 9, 120]).clamp(ctx, {lo}, {hi})", np.clip([0, 3, 5, 9, 120], lo, hi), None)
      for lo, hi in ((3, 9), (None, 5), (4, None), (0, 127), (5, 5))],
    (NUMBERS, "t([0, 3, 5, 9, 120]).clamp(ctx, None, None)", [0, 3, 5, 9, 120], None),
    (FLOATS, "t([inf, -inf, nan, 1]).clamp(ctx, -inf, 1e300)", [np.inf, -np.inf, np.nan, 1], None),
    ((DType.F16,), "t([inf, -inf, nan, 1]).clamp(ctx, -inf, 1e6)", [np.inf, -np.inf, np.nan, 1], None),
    (FLOATS, "t([inf, -inf, nan, 1]).clamp(ctx, -0.5, 0.5)", [0.5, -0.5, np.nan, 0.5], None),
    ((DType.F32,), "ctx.from_numpy([True, False]).where(ctx, t([1, nan]), t([-inf, -inf]))", [1, -np.inf],
        None),
    # One matrix broadcast over all products.
    (FLOATS, "t(range(20)).view(ctx, 0, (3, 4, 5), (0, 5, 1)).matmul(ctx, t(np.ones((3, 5, 1))))",
     "np.tile([[10], [35], [60], [85]], (3, 1, 1))", None),
    # Overlapping frames.
    *[(FLOATS, f"t(range(33)).view(ctx, 0, FRAMES.shape, (3, 4, 1)).{op}(ctx, {axis})",
        f"FRAMES.{op}({axis})", result)
      for op, result in (("sum", None), ("max", None), ("argmax", I32)) for axis in (0, 1, 2)],
    # Accumulated in F32 or better: ones summed in F16 stop at 2048, in BF16 at 256.
    (NARROW, "ctx.full((2, 8192), 1, D).matmul(ctx, ctx.full((8192, 3), 1, D))", np.full((2, 3), 8192), None),
    (NARROW, "ctx.full((2, 8192), 1, D).matmul(ctx, ctx.full((8192,), 1, D))", [8192, 8192], None),
    (NARROW, "t(PARTIAL).matmul(ctx, ctx.full((8192, 1), 1, D))", [[0], [0]], None),
    (NARROW, "ctx.full((8192, 2), 1, D).sum(ctx, 0)", [8192, 8192], None),
    (NARROW, "ctx.full((8192, 2), 1, D).permute(ctx, 1, 0).sum(ctx, 1)", [8192, 8192], None),
    (NARROW, "ctx.full((4096,), 1024, D).mean(ctx, 0)", 1024, None),
    (NARROW, "ctx.full((1,), 64, D).concat(ctx, ctx.full((4096,), 2.0**-10, D), 0).sum(ctx, 0)", 68, None),
    (NARROW, "ctx.full((8192,), 3, D).softmax(ctx)", np.full(8192, 2.0**-13), None),
    # Reductions of integers, and ties.
    *[((*INTEGERS, BOOL), f"t(many).sum(ctx, {axis})", f"many.astype(np.int64).sum({axis})", I64)
      for axis in ("0", "1", "1, keepdims=True")],
    ((I32,), "ctx.full((3,), 2**31 - 1, D).sum(ctx, 0)", 3 * (2**31 - 1), I64),
    *[(NUMBERS, f"t(cube).{op}(ctx, {axis}, {keep})", f"exact(cube).{op}({axis}, keepdims={keep})", result)
      for op, result in (("max", None), ("argmax", I32)) for axis in (0, 1, 2, -1, -3) for keep in (False,
          True)],
    (NUMBERS, "t([[1, 5, 5, 2, 5], [0, 0, 0, 0, 0], [1, 2, 3, 4, 4]]).argmax(ctx, 1)", [1, 0, 3], I32),
    (NUMBERS, "t([[1, 5, 5, 2, 5], [0, 0, 0, 0, 0], [1, 2, 3, 4, 4]]).argmax(ctx, 0)", [0, 0, 0, 2, 0], I32),
    (NUMBERS, "t(WIDE).argmax(ctx, -1)", [700, 0], I32),
    *[(NUMBERS, f"t(SHUFFLED // 4).argsort(ctx, {axis})", f"np.argsort(SHUFFLED // 4, {axis}, kind='stable')",
        I32)
      for axis in (0, 1, -1)],
    (NUMBERS, "t(SHUFFLED.T // 4).permute(ctx, 1, 0).argsort(ctx)",
        "np.argsort(SHUFFLED // 4, kind='stable')", I32),
    (NUMBERS, "t(np.arange(9000) * 7 % 3).argsort(ctx)", "np.argsort(np.arange(9000) * 7 % 3, kind='stable')",
        I32),
    *[(NUMBERS, f"{source}.top_k(ctx, {k})[{part}]", f"{expected}[:, :{k}]", result)
      for source in ("t(SHUFFLED // 4)", "t(SHUFFLED.T // 4).permute(ctx, 1, 0)") for k in (1, 3, 20)
      for part, expected, result in ((0, "-np.sort(-(SHUFFLED // 4))", None),
                                     (1, "np.argsort(-(SHUFFLED // 4), kind='stable')", I32))],
    # Empty axes.
    (FLOATS, "ctx.zeros((3, 0), D).sum(ctx, 1)", [0, 0, 0], None),
    ((I32,), "ctx.zeros((0, 2), D).sum(ctx, 0)", [0, 0], I64),
    *[((DType.F32,), f"ctx.zeros((3, 0), D).{op}(ctx, 0{keep})", np.zeros(shape),
        I32 if op == "argmax" else None)
      for op in ("sum", "mean", "max", "argmax") for keep, shape in (("", (0,)), (", True", (1, 0)))],
    *[(FLOATS, f"ctx.zeros({shape}, D).{call}", np.zeros(shape), result) for shape in ((0, 3), (3, 0), (0,))
      for call, result in (("softmax(ctx)", None), ("argsort(ctx)", I32),
          ("rms_norm(ctx, None, 1e-5)", None))],
    (FLOATS, "ctx.zeros((0, 3), D).top_k(ctx, 2)[0]", np.zeros((0, 2)), None),
    (FLOATS, "ctx.zeros((0, 3), D).top_k(ctx, 2)[1]", np.zeros((0, 2)), I32),
]  # fmt: skip
"""The dtypes D, the expression over ``t(values)`` in D, the result, and its dtype if it is not D."""
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": np.equal, "eq": np.equal, "!=": np.not_equal, "ne": np.not_equal, "<": np.less, "lt": np.less,
    "<=": np.less_equal, "le": np.less_equal, ">": np.greater, "gt": np.greater, ">=": np.greater_equal,
    "ge": np.greater_equal,
}  # fmt: skip
KEEPING = [
    *(f"a.{op}(ctx)" for op in ("relu", "abs", "round")), "a.max(ctx, 0, keepdims=True)",
    "a.clamp(ctx, None, None)",
    "a.clamp(ctx, 0, 9)", "a.scale(ctx, 1)", "a.add(ctx, ctx.zeros((), D))", "a.mul(ctx, ctx.full((), 1, D))",
    "a.compare(ctx, '==', a).where(ctx, a, a)",
]  # fmt: skip
"""Expressions whose result may be the operand itself."""
NEW = [
    *((f"a.{op}(ctx)", DType.F32) for op in (*UNARY_OPERATIONS, "gelu", "softmax")),
    *((f"a.{op}(ctx, 0, keepdims=True)", DType.F32) for op in ("sum", "mean")),
    *((call, dtype) for call in KEEPING for dtype in (DType.F32, DType.U8, DType.I32)),
]


class ComputeTests(BackendCase):
    @each(case=dict(_computed()), dtype=FLOATS)
    def test_functions_match_float64(self, ctx: Context, case: Computed, dtype: DType) -> None:
        tensors, hosts = {}, {}
        for seed, (name, operand) in enumerate(zip("ab", case.operands, strict=False)):
            with np.errstate(over="ignore"):
                host = (
                    normal(operand, dtype, seed)
                    if isinstance(operand, tuple)
                    else operand.astype(dtype.numpy)
                )
            layout = LAYOUTS[case.layouts[seed] if host.ndim > 1 else "contiguous"]
            tensors[name], hosts[name] = layout(ctx, host).tensor, exact(host)
        with np.errstate(all="ignore"):
            expected = evaluate(case.reference, gelu=gelu, softmax=softmax, rms_norm=rms_norm, **hosts)
        actual = evaluate(case.call, ctx=ctx, **tensors)
        assert_rounded_once(actual, np.asarray(expected), dtype, case.slack)

    @each(case=[(dtype, *row) for dtypes, *row in EXACT for dtype in dtypes])
    def test_results_are_exact(self, ctx: Context, case: tuple[DType, str, Any, DType | None]) -> None:
        dtype, call, expected, result = case
        many, cube = counting((3, 50), dtype, start=60), counting((3, 4, 5), dtype, start=97)
        ulp, largest = LIMITS.get(dtype, (0, 0))
        info = np.iinfo(dtype.numpy) if dtype.is_integer else None
        values = {"many": many, "cube": cube if dtype in (DType.U8, BOOL) else -cube,
                  "exact": exact, "SHUFFLED": SHUFFLED, "WIDE": WIDE, "FRAMES": FRAMES, "PARTIAL": PARTIAL,
                  "GRID": GRID, "ulp": ulp, "largest": largest,
                  "ends": np.array([info.min, info.max], dtype.numpy) if info else None}  # fmt: skip

        def t(host: Any) -> Tensor:
            return ctx.from_numpy(np.asarray(host).astype(dtype.numpy))

        if isinstance(expected, str):
            expected = evaluate(expected, **values)
        assert_same(evaluate(call, ctx=ctx, t=t, D=dtype, **values), np.asarray(expected), result or dtype)

    @needs("top_k")
    def test_top_k_of_many_ties_keeps_their_order(self, ctx: Context) -> None:
        long = np.tile(np.array([0, 2, 1, 2], np.float32), (2, 1000))
        expected = np.argsort(-long, axis=1, kind="stable")
        for k in (3, 2100):
            assert_same(ctx.from_numpy(long).top_k(ctx, k)[1], expected[:, :k], DType.I32)

    @needs("top_k", "matmul", "exp", "argmax", "compare", "where")
    def test_tokens_are_drawn_as_on_the_host(self, ctx: Context) -> None:
        """By ml.nn.BatchSampler, for rows with different temperature, top-k, top-p and min-p."""
        random = np.random.default_rng(5)
        logits = random.normal(0, 3, (24, 333)).astype(np.float32)
        logits[:, ::7] = logits[:, 1:2]
        choices = ([0, 0.5, 1, 2], [0, 1, 20], [1, 0.6], [0, 0, 0.1, 0.3, 0])
        settings = [[choice[i % len(choice)] for choice in choices] for i in range(24)]
        temperature, top_k, top_p, min_p = np.array(settings).T
        draws = Draws(temperature, top_k, top_p, random.integers(1, 1 << 20, 24) * 2.0**-20, min_p)
        actual = BatchSampler(ctx, draws, 333)(ctx, ctx.from_numpy(logits))
        assert_same(actual, sample_on_host(logits, draws), DType.I32)

    @needs("compare")
    @each(symbol=COMPARE.items(), dtype=DTYPES)
    def test_compare_gives_bool_by_symbol_and_by_name(
        self, ctx: Context, symbol: tuple[str, Callable[[Any, Any], Any]], dtype: DType
    ) -> None:
        name, function = symbol
        pairs = [(counting((3, 4), dtype), counting((4,), dtype, start=4))]
        if dtype.is_float:
            ends = np.array([[np.nan, np.nan, -0.0, np.inf], [np.nan, 1.0, 0.0, np.inf]]).astype(dtype.numpy)
            pairs.append((ends[0], ends[1]))
        for a, b in pairs:
            result = ctx.from_numpy(a).compare(ctx, name, ctx.from_numpy(b))
            assert_same(result, function(exact(a), exact(b)), DType.BOOL)

    @needs("where")
    @each(dtype=DTYPES)
    def test_where_chooses_one_of_two(self, ctx: Context, dtype: DType) -> None:
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

    @each(case=NEW)
    def test_other_results_are_new_storage(self, ctx: Context, case: tuple[str, DType]) -> None:
        call, dtype = case
        source = ctx.from_numpy(np.array([[1, 2]], dtype.numpy))
        result = evaluate(call, ctx=ctx, a=source, D=dtype)
        before = result.to_numpy()
        ctx.full(source.shape, 77, source.dtype).copy(ctx, source)
        assert_same(result, before)
        ctx.zeros(result.shape, result.dtype).copy(ctx, result)
        assert_same(source, np.full(source.shape, 77), source.dtype)
