"""Refusals: invalid arguments, closed objects, foreign tensors, pickling, declared absences."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import ml
from ml.backend_spec import BINARY_OPERATIONS, COMPUTE_OPERATIONS, UNARY_OPERATIONS, Features
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, each, evaluate, needs, refused, unchanged
from ml.testing.samples import DTYPES, counting

CREATION: Mapping[str, str] = {
    "empty": "ctx.empty((2,), F32)", "zeros": "ctx.zeros((2,), F32)", "full": "ctx.full((2,), 1, F32)",
    "arange": "ctx.arange(0, 2, 1, F32)", "from_numpy": "ctx.from_numpy(np.zeros(2, np.float32))",
    "from_native": "ctx.from_native(native)", "from_bytes": "ctx.from_bytes(bytes(8), (2,), F32)",
}  # fmt: skip
MAKING: Mapping[str, str] = {
    "contiguous": "a.contiguous(ctx)", "cast": "a.cast(ctx, F32)", "rows": "a.rows(ctx, [0])",
    "concat": "a.concat(ctx, b, 0)", "repeat": "a.repeat(ctx, 0, 2)",
}  # fmt: skip
COMPUTE: Mapping[str, str] = {
    **{op: f"a.{op}(ctx)" for op in (*UNARY_OPERATIONS, "gelu", "softmax", "argsort")},
    **{op: f"a.{op}(ctx, b)" for op in (*BINARY_OPERATIONS, "matmul")},
    **{op: f"a.{op}(ctx, 0)" for op in ("sum", "mean", "max", "argmax")},
    "scale": "a.scale(ctx, 2.0)", "clamp": "a.clamp(ctx, 0, 1)", "top_k": "a.top_k(ctx, 1)",
    "rms_norm": "a.rms_norm(ctx, None, 1e-5)", "compare": "a.compare(ctx, '<', b)",
    "where": "truth.where(ctx, a, b)",
}  # fmt: skip
OPERATIONS: Mapping[str, str] = {
    **CREATION, **MAKING, **COMPUTE,
    "view": "a.view(ctx, 0, (2,))", "slice": "a.slice(ctx, 0, 0, 1)", "permute": "a.permute(ctx, 1, 0)",
    "reshape": "a.reshape(ctx, 4)", "copy": "a.copy(ctx, b)", "set_rows": "a.set_rows(ctx, b, [0, 1])",
}  # fmt: skip
"""A valid call of each operation on F32 tensors ``a`` and ``b`` of shape (2, 2)."""
WITH_TWO_TENSORS = ("concat", "copy", "set_rows", *BINARY_OPERATIONS, "matmul", "compare", "where")

_NO_SHAPES = ["(-1,)", "(2, -3)", "(2.0,)", "('2',)", "None", "(1,) * 65"]
_NO_DTYPES = ["Q8_0", "Q4_0", "'F32'", "np.float32", "None"]
_HUGE = ["(2**50,)", "(2**40, 2**40)"]
_OF_FLOATS = sorted({*UNARY_OPERATIONS, "gelu", "softmax"} - {"neg", "abs", "relu", "round"})
_OTHERS = ("F16", "BF16", "I32", "BOOL")
_WHOLE = ("I8", "U8", "I32", "I64", "BOOL")
REFUSED: Mapping[type[ml.MLError], list[str]] = {
    ml.BoundsError: [
        "v.view(ctx, 0, (25,))", "v.view(ctx, 24, (1,))", "v.view(ctx, -1, (2,))", "v.view(ctx, 1, (4, 6))",
        "v.view(ctx, 0, (2, 2), (23, 1))", "v.view(ctx, 25, (0,))", "v.view(ctx, -1, (0,))",
        "v.view(ctx, 24, ())",
        "v.view(ctx, 10**30, (1,))", "v.view(ctx, 0, (2,), (10**30,))", "v.view(ctx, 0, (2**62, 2**62))",
        *(f"v.slice(ctx, 0, 8, 10).view(ctx, {at})" for at in ("0, (17,)", "-9, (1,)", "16, (1,)")),
        *(f"x.slice(ctx, 0, {cut})" for cut in ("-1, 2", "0, 5", "3, 2", "5, 5", "-3, -1")),
        *(f"f.top_k(ctx, {k})" for k in (0, -1, 7)),
    ],
    ml.ShapeError: [
        "v.view(ctx, 0, (-1,))", "v.view(ctx, 0, (2, -3))", "v.view(ctx, 4, (2,), (-1,))",
        "v.view(ctx, 0, (2, 2), (1,))", "v.view(ctx, 0, (2,), (1, 1))", "v.view(ctx, 0, (), (1,))",
        "x.slice(ctx, 0, 0, 4, 0)", "x.slice(ctx, 0, 0, 4, -1)", "x.slice(ctx, 2, 0, 1)",
        "x.slice(ctx, -3, 0, 1)",
        *(f"x.permute(ctx, {axes})" for axes in ("0", "0, 0", "0, 2", "0, 1, 2", "0, -3", "0, -2")),
        *(f"v.reshape(ctx, *{to})" for to in ("(23,)", "(5, -1)", "(-1, -1)", "(-2, 12)", "(0, -1)", "()",
            "(24, 0)")),
        # Reshapes that need a copy.
        "x.permute(ctx, 1, 0).reshape(ctx, 24)", "x.slice(ctx, 1, 0, 4).reshape(ctx, 16)",
        "x.reshape(ctx, 2, 3, 4).slice(ctx, 1, 0, 2).reshape(ctx, 4, 4)",
        "v.view(ctx, 0, (3, 4), (0, 1)).reshape(ctx, 12)",
        "x.reshape(ctx, 2, 3, 4).permute(ctx, 1, 0, 2).reshape(ctx, 6, 4)",
        # Axes that do not exist.
        *(call for axis in (2, -3) for call in (
            f"x.rows(ctx, [0], {axis})", f"x.set_rows(ctx, x.slice(ctx, 0, 0, 1), [0], {axis})",
            f"x.concat(ctx, x, {axis})", f"x.repeat(ctx, {axis}, 2)",
            *(f"f.{op}(ctx, {axis})" for op in ("sum", "mean", "max", "argmax", "softmax", "argsort")))),
        *(f"s.{call}" for call in ("rows(ctx, [0])", "set_rows(ctx, s, [0])", "concat(ctx, s, 0)",
            "repeat(ctx, 0, 2)",
            "slice(ctx, 0, 0, 1)", "slice(ctx, -1, 0, 1)", "matmul(ctx, f)", "rms_norm(ctx, None, 1e-5)",
            *(f"{op}(ctx, {axis})" for op in ("sum", "mean", "max", "argmax", "softmax", "argsort")
                for axis in (0, -1)))),
        "x.repeat(ctx, 0, -1)",
        *(f"f.concat(ctx, ctx.zeros({shape}, F32), {axis})"
          for shape, axis in (((4, 7), 0), ((5, 6), 1), ((4, 6, 1), 0), ((6,), 0))),
        *(f"f.{op}(ctx, ctx.full({shape}, 1, F32))" for op in BINARY_OPERATIONS for shape in ((4,), (2, 6),
            (4, 6, 2))),
        *(f"f.matmul(ctx, ctx.zeros({shape}, F32))" for shape in ((4, 3), (), (7,), (2, 4, 5))),
        "ctx.zeros((2, 4, 5), F32).matmul(ctx, ctx.zeros((3, 5, 4), F32))",
        "ctx.zeros((4, 6), BOOL).where(ctx, f, ctx.zeros((5,), F32))", "f.clamp(ctx, 5, 4)",
        *(f"f.rms_norm(ctx, ctx.zeros({shape}, F32), 1e-5)" for shape in ((7,), (1,), (4, 6), ())),
        *(f"ctx.zeros((3, 0), F32).{op}(ctx, 1)" for op in ("mean", "max", "argmax")),
        *(call for shape in _NO_SHAPES for call in (f"ctx.empty({shape}, F32)", f"ctx.zeros({shape}, F32)",
            f"ctx.full({shape}, 1, F32)", f"ctx.from_bytes(b'', {shape}, F32)")),
        *(f"ctx.from_bytes(bytes({length}), (3,), F32)" for length in (0, 11, 13, 16)),
        "ctx.arange(0, 5, 0, F32)", "ctx.arange(0, inf, 1, F32)", "ctx.arange(nan, 5, 1, F32)",
        *(f"ctx.arange({steps}, F32)" for steps in ("-1e308, 1e308, 1.0", "0, 1, 1e-320", "0, 10**300, 1")),
        "v.reshape(ctx, *(1,) * 64, 24)", "v.view(ctx, 0, (1,) * 65)", "v.view(ctx, 0, (1,) * 65, (0,) * 65)",
        "v.view(ctx, 0, (0,) * 65)", "x.slice(ctx, 0, 0, 4, 0.5)",
        *(f"f.{op}(ctx, 0, np.array([1, 2]))" for op in ("sum", "mean", "max", "argmax")),
        "f.compare(ctx, np.array(['=='] * 2), f)", "f.gelu(ctx, np.array(['none'] * 2))",
    ],
    ml.DTypeError: [
        *(call for dtype in _NO_DTYPES for call in (f"ctx.empty((32,), {dtype})",
            f"ctx.zeros((32,), {dtype})",
            f"ctx.full((32,), 0, {dtype})", f"ctx.arange(0, 32, 1, {dtype})",
            f"ctx.from_bytes(bytes(34), (32,), {dtype})",
            f"f.cast(ctx, {dtype})", *([f"ctx.from_numpy(np.zeros(32), {dtype})"]
                if dtype != "None" else []))),
        *(f"ctx.full((2,), {held})" for held in ("300, U8", "-1, U8", "128, I8", "1.5, I32", "2**31, I32",
            "2**63, I64",
            "nan, I32", "inf, I64", "2, BOOL")),
        *(call for number in ("10**400", "'2'", "None", "1j", "np.array([1, 2])", "[1]") for call in (
            f"f.scale(ctx, {number})", f"x.scale(ctx, {number})", f"f.rms_norm(ctx, None, {number})",
            f"ctx.full((2,), {number}, F32)", f"ctx.arange(0, {number}, 1, F32)")),
        "f.clamp(ctx, '0', 1)", "f.clamp(ctx, 0, '1')", "f.clamp(ctx, [0], 1)",
        *(f"ctx.arange({steps})" for steps in ("0.5, 5, 1, I32", "0, 5, 0.5, I32",
            "2**31 - 2, 2**31 + 5, 1, I32",
            "0, 2**40, 2**35, I32", "0, 2, 1, BOOL")),
        "f.concat(ctx, x, 0)", "f.compare(ctx, '==', x)", "f.where(ctx, f, f)",
        "ctx.zeros((4, 6), BOOL).where(ctx, f, x)",
        "f.rms_norm(ctx, ctx.zeros((6,), I32), 1e-5)", "x.clamp(ctx, 0.5, None)", "x.clamp(ctx, None, 1.5)",
        *(f"x.cast(ctx, {whole}).scale(ctx, {factor})" for whole in _WHOLE[:-1] for factor in ("0.5", "nan",
            "inf")),
        *(f"ones(F32).{op}(ctx, ones({other}))"
          for op in (*BINARY_OPERATIONS, "matmul") for other in _OTHERS),
        *(f"ones({whole}).{op}(ctx)" for op in _OF_FLOATS for whole in _WHOLE),
        *(f"ones({whole}).{call}" for whole in _WHOLE for call in (
            f"div(ctx, ones({whole}))", f"matmul(ctx, ones({whole}))", "rms_norm(ctx, None, 1e-5)",
            "mean(ctx, 0)")),
        *(f"truth.{call}" for call in ("add(ctx, truth)", "sub(ctx, truth)", "mul(ctx, truth)", "neg(ctx)",
            "abs(ctx)",
            "relu(ctx)", "round(ctx)", "scale(ctx, 1)", "clamp(ctx, 0, 1)")),
    ],
    ml.MLError: [
        *(f"ctx.compute({call})" for shape in _HUGE for call in (
            f"ctx.empty({shape}, F32)", f"ctx.zeros({shape}, F32)", f"ctx.full({shape}, 1, F32)",
            f"one.repeat(ctx, 0, {shape}[0])",
            f"one.view(ctx, 0, {shape}, (0,) * len({shape})).contiguous(ctx)",
            f"one.view(ctx, 0, {shape}, (0,) * len({shape})).cast(ctx, I32)")),
        *(f"ctx.compute({call})" for call in ("ctx.empty((0, 2**62), F32)", "v.view(ctx, 0, (0, 2**62))",
            "ctx.zeros((2**40, 0, 2**40), F32)", "ctx.zeros((0,), F32).reshape(ctx, 2**62, 0)",
            "ctx.zeros((0,), F32).repeat(ctx, 0, 2**62)")),
        "ctx.arange(0, 1e17, 1, F32)", "ctx.arange(0, 10**17, 1, I64)",
        "x.view(ctx, 0, (2.0,))", "x.view(ctx, 0, (2,), (1.5,))", "x.view(ctx, 0.5, (2,))",
        "x.view(ctx, None, (2,))",
        "x.slice(ctx, 0, 0.0, 2.0)", "x.slice(ctx, 0, 0, 2, 1.5)", "x.slice(ctx, 0, None, None)",
        "x.slice(ctx, 0.0, 0, 1)",
        "x.permute(ctx, 0.0, 1)", "x.reshape(ctx, 2.0, 12)", "x.repeat(ctx, 0, 1.5)", "s.top_k(ctx, 1)",
        "f.gelu(ctx, 'erf')", *(f"f.compare(ctx, {symbol!r}, f)" for symbol in ("=", "<>", "", "is", ["=="])),
        *(f"ctx.layer({i})" for i in ("'a'", "1.5", "None")),
        *(f"ctx.backend.new_context({nodes})" for nodes in ("'a'", "1.5")),
        *(f"f.{op}(ctx, 1.0)" for op in (*BINARY_OPERATIONS, "matmul")),
        "f.copy(ctx, np.zeros((4, 6), np.float32))",
        *(f"x.{call}" for rows in ("ctx.zeros((2,), I64)", "ctx.zeros((2,), F32)", "ctx.zeros((1, 2), I32)",
            "ctx.zeros((), I32)") for call in (f"rows(ctx, {rows})",
            f"set_rows(ctx, x.slice(ctx, 0, 0, 2), {rows})")),
        "ctx.compute('text')",
    ],
}  # fmt: skip
"""The calls that raise each error; the first test creates the operands."""


def checks_absence(test: Any) -> Any:
    """Marks a test that checks absences itself, and so is never skipped because of one."""
    test.ml_checks_absence = True
    return test


def _operands(ctx: Context) -> dict[str, Tensor]:
    one, two = (ctx.from_numpy(np.full((2, 2), value, np.float32)) for value in (1, 2))
    return {"a": one, "b": two, "truth": ctx.full((2, 2), True, DType.BOOL)}


def call(op: str, ctx: Context, operands: Mapping[str, Tensor]) -> Any:
    native = {"native": operands["a"].native} if op == "from_native" and "native" not in operands else {}
    return evaluate(OPERATIONS[op], ctx=ctx, **operands, **native)


class RefusalTests(BackendCase):
    @each(case=[(text, error) for error, calls in REFUSED.items() for text in calls])
    def test_bad_arguments_are_refused_and_nothing_is_written(
        self, ctx: Context, case: tuple[str, type[ml.MLError]]
    ) -> None:
        text, error = case
        vector = ctx.from_numpy(counting((24,), DType.I32))
        names = {"v": vector, "x": vector.reshape(ctx, 4, 6),
            "f": ctx.from_numpy(counting((4, 6), DType.F32)),
                 "s": ctx.zeros((), DType.F32), "one": ctx.full((1,), 2, DType.F32),
                 "truth": ctx.full((2,), True, DType.BOOL)}  # fmt: skip
        with unchanged(*names.values(), error=error):
            evaluate(text, ctx=ctx, ones=lambda dtype: ctx.full((2, 2), 1, dtype), **names)

    # Declared absences.

    def test_every_operation_of_the_contract_is_listed_here(self) -> None:
        assert set(COMPUTE) == set(COMPUTE_OPERATIONS)

    @checks_absence
    @pytest.mark.parametrize("op", OPERATIONS)
    def test_an_operation_is_offered_exactly_when_it_is_not_declared_absent(
        self, ctx: Context, declared: Features, op: str
    ) -> None:
        operands = _operands(ctx)
        if declared.has(op):
            call(op, ctx, operands)
            return
        with unchanged(*operands.values(), error=ml.NotSupportedError):
            call(op, ctx, operands)

    @checks_absence
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_dtype_is_offered_exactly_when_it_is_declared(
        self, ctx: Context, declared: Features, dtype: DType
    ) -> None:
        if dtype in declared.dtypes:
            assert ctx.zeros((2,), dtype).dtype is dtype
            return
        host = np.zeros(2, dtype.numpy)
        refused(
            lambda: ctx.zeros((2,), dtype),
            lambda: ctx.empty((2,), dtype),
            lambda: ctx.from_numpy(host),
            lambda: ctx.zeros((2,), DType.F32).cast(ctx, dtype),
            error=ml.NotSupportedError,
        )

    @checks_absence
    def test_what_is_declared_absent_exists_in_the_contract(self, declared: Features) -> None:
        unknown = sorted(declared.absent - {"compute", *OPERATIONS})
        assert not unknown, f"Features(absent=) names no operations of the contract: {unknown}"

    def test_a_backend_has_the_name_that_it_is_opened_by(
        self, request: pytest.FixtureRequest, open_backend: Callable[[], Backend]
    ) -> None:
        own, shipped = (inspect.getattr_static(cls, "open_backend") for cls in (type(self), BackendCase))
        if own is not shipped:
            pytest.skip("needs the name of a plugin")
        assert open_backend().name == (self._name(request) or pytest.skip("needs the name of a plugin"))

    # Closed objects.

    @each(op=OPERATIONS.keys())
    def test_a_closed_context_refuses_every_operation(self, backend: Backend, ctx: Context, op: str) -> None:
        operands = _operands(ctx)
        closed = backend.new_context()
        closed.close()
        closed.close()
        with unchanged(*operands.values(), error=ml.ClosedError):
            call(op, closed, operands)

    def test_a_closed_context_refuses_to_order_work(self, backend: Backend, ctx: Context) -> None:
        tensor = ctx.zeros((2,), DType.F32)
        with backend.new_context() as closed:
            pass
        refused(
            lambda: closed.forward(tensor),
            lambda: closed.compute(tensor),
            closed.reserve,
            closed.input,
            lambda: closed.layer(0),
            closed.__enter__,
            error=ml.ClosedError,
            keep=(tensor,),
        )

    def test_a_closed_backend_refuses_every_operation(self, backend: Backend) -> None:
        ctx = backend.new_context()
        operands: dict[str, Any] = _operands(ctx)
        operands["native"] = operands["a"].native
        backend.close()
        for op in filter(self._declared.has, OPERATIONS):
            with unchanged(error=ml.ClosedError):
                call(op, ctx, operands)

    def test_a_closed_backend_refuses_everything_else_too(self, backend: Backend) -> None:
        ctx = backend.new_context()
        tensor = ctx.zeros((2,), DType.F32)
        backend.close()
        backend.close()
        refused(
            backend.new_context,
            backend.memory,
            backend.__enter__,
            tensor.to_numpy,
            ctx.compute,
            lambda: ctx.forward(tensor),
            error=ml.ClosedError,
        )

    def test_leaving_the_with_block_closes(self, backend: Backend) -> None:
        with backend as entered, entered.new_context() as ctx:
            assert entered is backend
            assert_same(ctx.zeros((1,), DType.F32), [0], DType.F32)
        refused(lambda: ctx.zeros((1,), DType.F32), backend.new_context, error=ml.ClosedError)

    # Foreign tensors.

    @each(op=WITH_TWO_TENSORS)
    def test_a_tensor_of_another_backend_is_refused(self, ctx: Context, foreign: Context, op: str) -> None:
        operands, theirs = _operands(ctx), foreign.full((2, 2), 2, DType.F32)
        with unchanged(*operands.values(), theirs):
            call(op, ctx, {**operands, "b": theirs})

    @each(op=WITH_TWO_TENSORS)
    def test_a_tensor_of_another_instance_is_refused(
        self, ctx: Context, open_backend: Callable[[], Backend], op: str
    ) -> None:
        operands, theirs = _operands(ctx), open_backend().new_context().full((2, 2), 2, DType.F32)
        with unchanged(*operands.values(), theirs):
            call(op, ctx, {**operands, "b": theirs})

    @each(op=[*MAKING, *COMPUTE])
    def test_a_context_of_another_backend_makes_nothing_of_our_tensors(
        self, ctx: Context, foreign: Context, op: str
    ) -> None:
        operands = _operands(ctx)
        with unchanged(*operands.values()):
            call(op, foreign, operands)

    def test_foreign_tensors_are_neither_indices_nor_work(self, ctx: Context, foreign: Context) -> None:
        tensor = ctx.zeros((2, 2), DType.F32)
        rows = foreign.from_numpy(np.array([0, 1], np.int32))
        refused(
            lambda: tensor.rows(ctx, rows),
            lambda: tensor.set_rows(ctx, tensor, rows),
            lambda: ctx.forward(rows),
            lambda: ctx.compute(rows),
            keep=(tensor, rows),
        )

    # Pickling, options.

    def test_tensors_contexts_and_backends_refuse_to_be_pickled(self, backend: Backend, ctx: Context) -> None:
        for thing in (ctx.zeros((2,), DType.F32), ctx, backend):
            for protocol in (2, pickle.HIGHEST_PROTOCOL):
                with unchanged(error=ml.NotSupportedError):
                    pickle.dumps(thing, protocol)
            with unchanged(error=ml.NotSupportedError):
                copy.deepcopy(thing)

    def test_an_unknown_option_or_device_is_refused(self, request: pytest.FixtureRequest) -> None:
        name = self._name(request)
        if name is None:
            pytest.skip("needs the name of a plugin")
        with unchanged():
            ml.open_backend(name, device="no such device")

    @needs(DType.F16)
    def test_a_dtype_option_changes_the_default_float(self, request: pytest.FixtureRequest) -> None:
        name = self._name(request)
        if name is None or "dtype" in self.backend_options:
            pytest.skip("needs the name of a plugin")
        options = {**self.backend_options, "dtype": DType.F16}
        with ml.open_backend(name, **options) as backend, backend.new_context() as ctx:
            assert ctx.from_numpy([1.5]).dtype is DType.F16
            assert ctx.from_numpy(np.ones(2, np.float32)).dtype is DType.F32
        with unchanged():
            ml.open_backend(name, dtype=DType.I32)
