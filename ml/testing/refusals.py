"""What is refused whatever the operation: closed things, foreign tensors, pickling, declared absences."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ml
from ml.capabilities import BINARY_OPERATIONS, COMPUTE_OPERATIONS, UNARY_OPERATIONS, Features
from ml.dtypes import DType
from ml.protocols import Backend, Context, Tensor
from ml.testing.harness import BackendCase, assert_same, needs, refused, unchanged
from ml.testing.samples import DTYPES

__all__ = ["OPERATIONS", "RefusalTests"]

Call = Callable[[Context, Tensor, Tensor], Any]
"""One valid call, given F32 tensors of shape (2, 2) and (2, 2)."""

MOVEMENT: dict[str, Call] = {
    "view": lambda ctx, a, b: a.view(ctx, 0, (2,)),
    "slice": lambda ctx, a, b: a.slice(ctx, 0, 0, 1),
    "permute": lambda ctx, a, b: a.permute(ctx, 1, 0),
    "reshape": lambda ctx, a, b: a.reshape(ctx, 4),
    "contiguous": lambda ctx, a, b: a.contiguous(ctx),
    "cast": lambda ctx, a, b: a.cast(ctx, DType.F32),
    "rows": lambda ctx, a, b: a.rows(ctx, [0]),
    "concat": lambda ctx, a, b: a.concat(ctx, b, 0),
    "repeat": lambda ctx, a, b: a.repeat(ctx, 0, 2),
    "copy": lambda ctx, a, b: a.copy(ctx, b),
    "set_rows": lambda ctx, a, b: a.set_rows(ctx, b, [0, 1]),
}


def _method(op: str, *arguments: Any) -> Call:
    return lambda ctx, a, b: getattr(a, op)(ctx, *arguments)


def _with_other(op: str) -> Call:
    return lambda ctx, a, b: getattr(a, op)(ctx, b)


COMPUTE: dict[str, Call] = {
    **{op: _method(op) for op in UNARY_OPERATIONS},
    **{op: _with_other(op) for op in (*BINARY_OPERATIONS, "matmul")},
    **{op: _method(op, 0) for op in ("sum", "mean", "max", "argmax")},
    "scale": lambda ctx, a, b: a.scale(ctx, 2.0),
    "gelu": lambda ctx, a, b: a.gelu(ctx),
    "clamp": lambda ctx, a, b: a.clamp(ctx, 0, 1),
    "softmax": lambda ctx, a, b: a.softmax(ctx),
    "argsort": lambda ctx, a, b: a.argsort(ctx),
    "top_k": lambda ctx, a, b: a.top_k(ctx, 1),
    "rms_norm": lambda ctx, a, b: a.rms_norm(ctx, None, 1e-5),
    "compare": lambda ctx, a, b: a.compare(ctx, "<", b),
    "where": lambda ctx, a, b: ctx.full((2, 2), True, DType.BOOL).where(ctx, a, b),
}  # fmt: skip
CREATION: dict[str, Call] = {
    "empty": lambda ctx, a, b: ctx.empty((2,), DType.F32),
    "zeros": lambda ctx, a, b: ctx.zeros((2,), DType.F32),
    "full": lambda ctx, a, b: ctx.full((2,), 1, DType.F32),
    "arange": lambda ctx, a, b: ctx.arange(0, 2, 1, DType.F32),
    "from_numpy": lambda ctx, a, b: ctx.from_numpy(np.zeros(2, np.float32)),
    "from_native": lambda ctx, a, b: ctx.from_native(a.native),
    "from_bytes": lambda ctx, a, b: ctx.from_bytes(bytes(8), (2,), DType.F32),
}
OPERATIONS: dict[str, Call] = {**CREATION, **MOVEMENT, **COMPUTE}
WITH_TWO_TENSORS = ("concat", "copy", "set_rows", "add", "sub", "mul", "div", "matmul", "compare", "where")


def checks_absence(test: Any) -> Any:
    """This test looks at absences itself, so it is never skipped for one."""
    test.ml_checks_absence = True
    return test


class RefusalTests(BackendCase):
    # Declared absences.

    def test_every_operation_of_the_contract_is_listed_here(self) -> None:
        assert set(COMPUTE) == set(COMPUTE_OPERATIONS)

    @checks_absence
    @pytest.mark.parametrize("op", OPERATIONS)
    def test_an_operation_is_offered_exactly_when_it_is_not_declared_absent(
        self, ctx: Context, declared: Features, op: str
    ) -> None:
        a, b = (ctx.from_numpy(np.ones((2, 2), np.float32)) for _ in range(2))
        if declared.has(op):
            OPERATIONS[op](ctx, a, b)
            return
        with unchanged(a, b, error=ml.NotSupportedError):
            OPERATIONS[op](ctx, a, b)

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
        assert declared.absent <= {"compute", *OPERATIONS}
        assert {DType.F32, DType.I32, DType.I64, DType.BOOL} <= declared.dtypes <= frozenset(DTYPES)

    # Closed.

    @pytest.mark.parametrize("op", OPERATIONS)
    def test_a_closed_context_refuses_every_operation(self, backend: Backend, ctx: Context, op: str) -> None:
        a, b = (ctx.full((2, 2), value, DType.F32) for value in (1, 2))
        closed = backend.new_context()
        closed.close()
        closed.close()
        with unchanged(a, b, error=ml.ClosedError):
            OPERATIONS[op](closed, a, b)

    def test_a_closed_context_refuses_to_order_work(self, backend: Backend, ctx: Context) -> None:
        tensor = ctx.zeros((2,), DType.F32)
        with backend.new_context() as closed:
            pass
        refused(
            lambda: closed.forward(tensor),
            lambda: closed.compute(tensor),
            lambda: closed.reserve(),
            lambda: closed.input(),
            lambda: closed.layer(0),
            lambda: closed.__enter__(),
            error=ml.ClosedError,
            keep=(tensor,),
        )

    @pytest.mark.parametrize("op", OPERATIONS)
    def test_a_closed_backend_refuses_every_operation(self, backend: Backend, op: str) -> None:
        ctx = backend.new_context()
        a, b = (ctx.full((2, 2), value, DType.F32) for value in (1, 2))
        native = a.native
        backend.close()
        with unchanged(error=ml.ClosedError):
            if op == "from_native":
                ctx.from_native(native)
            else:
                OPERATIONS[op](ctx, a, b)

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
        with unchanged(error=ml.ClosedError):
            ctx.zeros((1,), DType.F32)
        with unchanged(error=ml.ClosedError):
            backend.new_context()

    # Foreign tensors.

    @pytest.mark.parametrize("op", WITH_TWO_TENSORS)
    def test_a_tensor_of_another_backend_is_refused(self, ctx: Context, foreign: Context, op: str) -> None:
        ours, theirs = ctx.full((2, 2), 1, DType.F32), foreign.full((2, 2), 2, DType.F32)
        with unchanged(ours, theirs):
            OPERATIONS[op](ctx, ours, theirs)

    @pytest.mark.parametrize("op", ["contiguous", "cast", "rows", "concat", "repeat", *COMPUTE])
    def test_a_context_of_another_backend_makes_nothing_of_our_tensors(
        self, ctx: Context, foreign: Context, op: str
    ) -> None:
        a, b = ctx.full((2, 2), 1, DType.F32), ctx.full((2, 2), 2, DType.F32)
        call = OPERATIONS[op]
        if op == "where":
            condition = ctx.full((2, 2), True, DType.BOOL)
            call = lambda ctx, a, b: condition.where(ctx, a, b)  # noqa: E731
        with unchanged(a, b):
            call(foreign, a, b)

    @pytest.mark.parametrize("op", WITH_TWO_TENSORS)
    def test_a_tensor_of_another_instance_is_refused(
        self, ctx: Context, open_backend: Callable[[], Backend], op: str
    ) -> None:
        other = open_backend().new_context()
        ours, theirs = ctx.full((2, 2), 1, DType.F32), other.full((2, 2), 2, DType.F32)
        with unchanged(ours, theirs):
            OPERATIONS[op](ctx, ours, theirs)

    def test_foreign_tensors_are_neither_indices_nor_work(self, ctx: Context, foreign: Context) -> None:
        tensor = ctx.zeros((2, 2), DType.F32)
        rows = foreign.from_numpy(np.array([0, 1], np.int32))
        refused(
            lambda: tensor.rows(ctx, rows),
            lambda: tensor.set_rows(ctx, tensor, rows),
            lambda: ctx.forward(rows),
            lambda: ctx.compute(rows),
            lambda: ctx.compute("text"),  # type: ignore[arg-type]
            keep=(
                tensor,
                rows,
            ),
        )

    # Pickling.

    def test_tensors_contexts_and_backends_refuse_to_be_pickled(self, backend: Backend, ctx: Context) -> None:
        for thing in (ctx.zeros((2,), DType.F32), ctx, backend):
            for protocol in (2, pickle.HIGHEST_PROTOCOL):
                with unchanged(error=ml.NotSupportedError):
                    pickle.dumps(thing, protocol)
            with unchanged(error=ml.NotSupportedError):
                copy.deepcopy(thing)

    # Options.

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
