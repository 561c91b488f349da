"""The shipped suites on the strict backend, and that it refuses what the contract does not promise."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import ml
from kvcache.testing import CacheTests
from ml import DType
from ml.testing import BackendTests
from ml.testing.strict import strict

from ..rigs.each_backend import opener


def strict_numpy() -> ml.Backend:
    return strict(ml.open_backend("numpy"))


class OnStrict:
    open_backend = opener(strict_numpy)

    @pytest.fixture
    def foreign(self) -> Iterator[ml.Context]:
        with strict_numpy() as backend, backend.new_context() as ctx:
            yield ctx


class TestBackend(OnStrict, BackendTests):
    case_stride = 5


class TestCaches(OnStrict, CacheTests):
    colours = (1,)
    traces = 60
    state_traces = encoder_traces = quantized_traces = 8
    fault_stride = 9


@pytest.fixture
def ctx() -> Iterator[ml.Context]:
    with strict_numpy() as backend, backend.new_context() as ctx:
        yield ctx


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.name not in ("Q8_0", "Q4_0")])
def test_unwritten_elements_are_nothing_that_one_would_expect(ctx: ml.Context, dtype: DType) -> None:
    empty = ctx.empty((3,), dtype).to_numpy()
    assert not np.isfinite(empty.astype(np.float32)).any() if dtype.is_float else empty.all()
    assert ctx.zeros((3,), dtype).to_numpy().astype(np.int64).tolist() == [0] * 3


def test_strides_that_mean_nothing_are_absurd(ctx: ml.Context) -> None:
    tensor = ctx.zeros((4, 1, 3), DType.F32)
    assert (tensor.strides[0], tensor.strides[2]) == (3, 1)
    assert tensor.strides[1] > 1 << 30
    assert min(tensor.slice(ctx, 0, 2, 2).strides) > 1 << 30


def test_a_native_is_a_snapshot_that_a_write_spoils(ctx: ml.Context) -> None:
    tensor = ctx.arange(0, 6, 1, DType.F32)
    held, unrelated = tensor.slice(ctx, 0, 2, 4).native, ctx.zeros((2,), DType.F32).native
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 1
    assert held.tolist() == [2, 3]
    ctx.zeros((1,), DType.F32).copy(ctx, tensor.slice(ctx, 0, 5, 6))
    assert np.isnan(held).all()
    assert unrelated.tolist() == [0, 0]
    assert tensor.native.tolist() == [0, 1, 2, 3, 4, 0]


def test_indices_that_the_caller_answers_for_are_checked(ctx: ml.Context) -> None:
    tensor, rows = ctx.zeros((3, 2), DType.F32), ctx.full((2, 2), 1, DType.F32)
    for indices, error in ([0, 3], ml.BoundsError), ([-1, 0], ml.BoundsError), ([1, 1], ml.ShapeError):
        with pytest.raises(error, match="set_rows"):
            tensor.set_rows(ctx, rows, ctx.from_numpy(np.array(indices, np.int32)))
    with pytest.raises(ml.BoundsError, match="rows"):
        tensor.rows(ctx, ctx.from_numpy(np.array([3], np.int32)))
    assert not tensor.to_numpy().any()


def test_a_float_that_the_integer_does_not_hold_becomes_an_extreme(ctx: ml.Context) -> None:
    values = ctx.from_numpy(np.array([1.5, 3e9, -3e9, np.nan, np.inf], np.float32))
    assert values.cast(ctx, DType.I32).to_numpy().tolist() == [1, *[-(2**31)] * 4]


def test_a_context_is_of_one_thread(ctx: ml.Context) -> None:
    tensor = ctx.zeros((2,), DType.F32)
    errors: list[Exception] = []

    def elsewhere() -> None:
        for call in (lambda: ctx.zeros((2,), DType.F32), lambda: tensor.neg(ctx)):
            try:
                call()
            except ml.DeviceError as error:
                errors.append(error)
        tensor.to_numpy()  # takes no context

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 2


def test_only_the_protocol_is_there(ctx: ml.Context) -> None:
    tensor = ctx.zeros((2,), DType.F32)
    for thing, protocol in (tensor, ml.Tensor), (ctx, ml.Context), (ctx.backend, ml.Backend):
        public = {name for name in dir(thing) if not name.startswith("_")}
        assert public == {name for name in dir(protocol) if not name.startswith("_")}
    assert ctx.layer(0) is not ctx
    assert ctx.forward(tensor) is ctx
    with pytest.raises(ml.DeviceError, match="wrapped"):
        tensor.add(ctx, tensor._inner)
