"""Special values: signed zeros, infinities, NaN, denormals and the ends of each dtype, in every layout.

The reference is float64; ``assert_near`` has the tolerances.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ml.backend_spec import BINARY_OPERATIONS, UNARY_OPERATIONS
from ml.dtypes import DType
from ml.protocols import Context
from ml.testing.compute import BINARY, COMPARE, UNARY, gelu, softmax
from ml.testing.harness import BackendCase, assert_same, each, evaluate, needs, unchanged
from ml.testing.samples import DTYPES, FLOATS, INTEGERS, LAYOUTS, Place, counting, exact, float_limits

PLAIN = (0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 86.5, 88.5, 100.0, 1e4, 1e-3, 1e-5)
"""Ordinary values, including halves and arguments near the overflow of F32's exponential (88.7)."""
RELATIVE = {DType.F32: 8e-6, DType.F16: 1e-3, DType.BF16: 8e-3}
"""The largest relative error: of a function in F32; one unit in the last place of the narrow floats."""
WIDTH = 7
"""The length of a row: values fall at every place of a kernel's vectors, and in the remainder."""
FUNCTIONS: Mapping[str, tuple[str, float]] = {
    **{f"a.{op}(ctx)": (UNARY[op], 0.0) for op in UNARY_OPERATIONS},
    "a.sin(ctx)": (UNARY["sin"], 1e-6), "a.cos(ctx)": (UNARY["cos"], 1e-6),  # near their zeros
    "a.silu(ctx)": (UNARY["silu"], 2e-36),  # x times a sigmoid that may be denormal
    "a.gelu(ctx)": ("gelu(a)", 4e-6), "a.gelu(ctx, 'tanh')": ("gelu(a, True)", 4e-6),  # 1 + erf cancels out
    **{f"a.scale(ctx, {x})": (f"a * np.float32({x})", 0.0) for x in ("0.0", "-1.0", "0.5", "inf", "nan")},
    "a.clamp(ctx, -1.0, 88.0)": ("np.clip(a, -1, 88)", 0.0), "a.clamp(ctx, None, inf)": ("a", 0.0),
    **{f"a.{op}(ctx, b)": (BINARY[op], 0.0) for op in BINARY_OPERATIONS},
}  # fmt: skip
"""The expression, its NumPy equivalent, and the absolute error allowed besides the relative one."""
KEEPING = frozenset(f"a.{op}(ctx)" for op in ("neg", "sqrt", "sin", "tanh", "abs", "round", "silu", "gelu"))
"""Functions that map zero to zero and must preserve its sign."""
MANY = 1_000_000
SUMMED: Mapping[str, tuple[tuple[int, ...], int]] = {
    "one axis": ((MANY,), 0), "the outer of two": ((MANY, 2), 0), "the inner of two": ((2, MANY), 1),
}  # fmt: skip


@functools.cache
def special(dtype: DType) -> np.ndarray:
    """All special values, in an order that depends on the dtype."""
    info = float_limits(dtype)
    least = float(info.tiny)
    both = [0.0, math.inf, float(info.max), least, 1 + float(info.eps), *PLAIN]
    both += [float(info.smallest_subnormal), least / 2]
    with np.errstate(over="ignore"):
        values = np.array([*both, *(-x for x in both), math.nan]).astype(dtype.numpy)
    return np.random.default_rng(dtype.itemsize).permutation(values)


def flushed(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The values in float64, with each denormal of ``dtype`` replaced by a zero of the same sign."""
    wide = exact(values)
    least = float(float_limits(dtype).tiny)
    return np.where(np.abs(wide) < least, np.copysign(0.0, wide), wide)


def assert_near(
    result: np.ndarray, reference: Callable[..., Any], operands: list[np.ndarray], absolute: float = 0.0
) -> None:
    """Check that ``result`` is ``reference`` of the operands, all of one float dtype, as exactly as the
    contract requires.

    The error is at most the relative error of the dtype, or ``absolute``; NaN and signed infinities are
    exactly where float64 has them. Devices may treat denormal operands and results as 0.
    """
    dtype = DType.from_numpy(result.dtype)
    actual, least = exact(result), float(float_limits(dtype).tiny)
    right = np.zeros(actual.shape, bool)
    with np.errstate(all="ignore"):
        for values in ([exact(x) for x in operands], [flushed(x, dtype) for x in operands]):
            wanted = exact(np.asarray(reference(*values)).astype(result.dtype))
            off = RELATIVE[dtype] * np.abs(wanted) + least + absolute
            right |= (actual == wanted) | (np.isfinite(wanted) & (np.abs(actual - wanted) <= off))
            right |= np.isnan(actual) & np.isnan(wanted)
        wanted = np.asarray(reference(*map(exact, operands)))
    if not right.all():
        wrong = [tuple(place) for place in np.argwhere(~right)[:4]]
        examples = (
            f"of {', '.join(str(exact(x)[place]) for x in operands)}: {actual[place]}, not {wanted[place]}"
            for place in wrong
        )
        raise AssertionError(f"{(~right).sum()} of {right.size} are wrong; {'; '.join(examples)}")


class SpecialValueTests(BackendCase):
    @each(call=FUNCTIONS.keys(), dtype=FLOATS, layout=LAYOUTS)
    def test_functions_of_special_values_match_float64(
        self, ctx: Context, call: str, dtype: DType, layout: Place
    ) -> None:
        """Two operands are combined in all pairs of values."""
        expression, absolute = FUNCTIONS[call]
        values = special(dtype)
        operands = [values]
        if call.endswith("b)"):
            operands = [values.repeat(len(values)), np.tile(values, len(values))]
        grids = [np.resize(x, (-(-len(x) // WIDTH), WIDTH)) for x in operands]
        actual = evaluate(
            call, ctx=ctx, **{n: layout(ctx, x).tensor for n, x in zip("ab", grids, strict=False)}
        )
        host = actual.to_numpy()
        assert (actual.dtype, host.shape) == (dtype, grids[0].shape)

        def reference(a: np.ndarray, b: np.ndarray | None = None) -> Any:
            return evaluate(expression, gelu=gelu, a=a, b=b)

        assert_near(host, reference, grids, absolute)
        if call in KEEPING:
            zeros = exact(grids[0]) == 0
            with np.errstate(all="ignore"):
                signs = np.signbit(reference(exact(grids[0])[zeros]))
            np.testing.assert_array_equal(np.signbit(exact(host)[zeros]), signs, "the sign of a zero")

    @each(call=[call for call in FUNCTIONS if not call.endswith("b)")], dtype=FLOATS)
    def test_a_special_value_alone_is_computed_as_among_others(
        self, ctx: Context, call: str, dtype: DType
    ) -> None:
        """A kernel treats the remainder that fills no vector separately."""
        expression, absolute = FUNCTIONS[call]
        for value in np.array([math.inf, -math.inf, math.nan, 1e30, 88.5, -0.0]):
            with np.errstate(over="ignore"):
                single = np.full((1,), value).astype(dtype.numpy)
            host = evaluate(call, ctx=ctx, a=ctx.from_numpy(single)).to_numpy()
            assert_near(host, lambda a: evaluate(expression, gelu=gelu, a=a), [single], absolute)

    # Comparisons.

    @needs("compare")
    @each(symbol=COMPARE.items(), dtype=FLOATS)
    def test_comparisons_of_special_values_are_exact(
        self, ctx: Context, symbol: tuple[str, Callable[[Any, Any], Any]], dtype: DType
    ) -> None:
        """All values except denormals, which a device may treat as 0."""
        name, function = symbol
        values = special(dtype)
        exactly = exact(values)
        column = values[(exactly == flushed(values, dtype)) | np.isnan(exactly)]
        actual = ctx.from_numpy(column[:, None]).compare(ctx, name, ctx.from_numpy(column))
        assert_same(actual, function(exact(column)[:, None], exact(column)), DType.BOOL)

    @needs("compare")
    @each(symbol=COMPARE.items(), dtype=(*FLOATS, *INTEGERS))
    def test_neighbouring_numbers_are_not_equal(
        self, ctx: Context, symbol: tuple[str, Callable[[Any, Any], Any]], dtype: DType
    ) -> None:
        """Comparison has no tolerance and does not use a dtype in which neighbours are equal."""
        name, function = symbol
        if dtype.is_float:
            host = np.array([1.0, 1e-3, -1.0, 1e4, 100.0]).astype(dtype.numpy)
            above = (host.view(f"i{dtype.itemsize}") + 1).view(dtype.numpy)
        else:
            info = np.iinfo(dtype.numpy)
            host = np.array([1, info.max - 1, info.min, min(2**24, info.max - 1)], dtype.numpy)
            above = host + 1
        for a, b in ((host, above), (above, host), (host, host)):
            actual = ctx.from_numpy(a).compare(ctx, name, ctx.from_numpy(b))
            assert_same(actual, function(a, b), DType.BOOL)

    # Sums.

    @needs("softmax")
    @each(axis=(-1, 0), dtype=FLOATS, layout=LAYOUTS)
    def test_a_logit_of_minus_infinity_weighs_exactly_nothing(
        self, ctx: Context, axis: int, dtype: DType, layout: Place
    ) -> None:
        """A weight of 1e-30 would let large masked values through."""
        logits = np.linspace(-3, 3, 60).reshape(6, 10)
        hidden = counting((6, 10), DType.BOOL)
        hidden[2, 3], hidden[:, 4], hidden[1] = False, False, False
        logits[hidden] = -math.inf
        actual = layout(ctx, logits.astype(dtype.numpy)).tensor.softmax(ctx, axis).to_numpy()
        assert (exact(actual)[hidden] == 0).all(), f"weights of -inf: up to {exact(actual)[hidden].max()}"
        assert (exact(actual)[~hidden] > 0).all()

    @needs("softmax")
    @each(dtype=FLOATS, layout=LAYOUTS)
    def test_softmax_at_the_ends_of_the_range_matches_float64(
        self, ctx: Context, dtype: DType, layout: Place
    ) -> None:
        """Signed zeros and denormals, the largest numbers, -inf, and where F32's exponential overflows."""
        info = float_limits(dtype)
        most, least = float(info.max), float(info.tiny)
        rows = [
            [0.0, -0.0, least, -least, float(info.smallest_subnormal)],
            [most, -most, 0.0, most, 1.0],
            [-math.inf, 0.0, -most, 1.0, -math.inf],
            [most] * 5,
            [88.7, -88.7, 0.0, 88.0, -103.0],
        ]
        host = np.array(rows).astype(dtype.numpy)
        assert_near(layout(ctx, host).tensor.softmax(ctx).to_numpy(), softmax, [host])

    @each(op=("sum", "mean"), given=SUMMED, dtype=(DType.F32, DType.BF16))
    def test_a_million_equal_numbers_are_added_without_drift(
        self, ctx: Context, op: str, given: tuple[tuple[int, ...], int], dtype: DType
    ) -> None:
        """Adding them one by one in F32 has an error of 1%."""
        shape, axis = given
        number = np.array(0.1).astype(dtype.numpy)
        actual = evaluate(f"a.{op}(ctx, {axis})", ctx=ctx, a=ctx.full(shape, 0.1, dtype)).to_numpy()
        factor = MANY if op == "sum" else 1
        wanted = np.full(actual.shape, number)
        assert_near(actual, lambda a: a * factor, [wanted])

    @each(dtype=DTYPES)
    def test_an_array_of_numpys_is_made_of_a_tensor(self, ctx: Context, dtype: DType) -> None:
        values = counting((2, 3), dtype)
        tensor = ctx.from_numpy(values.T.copy()).permute(ctx, 1, 0)
        for made in (np.asarray(tensor), np.array(tensor), np.array(tensor, copy=True)):
            assert (made.dtype, made.shape) == (dtype.numpy, (2, 3))
            assert made.tobytes() == values.tobytes()
            made[...] = 0
        assert_same(tensor, values)
        assert np.asarray(tensor, np.float64).tolist() == values.astype(np.float64).tolist()
        assert np.asarray(ctx.full((), 1, dtype)).shape == ()
        with unchanged(tensor, error=ValueError):
            np.asarray(tensor, copy=False)
