"""The shipped suites by the other way to attention: NumPy by numba's kernels, PyTorch and MLX by calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ml
from backends import cpu_attention
from backends.numpy.backend import NumpyBackend
from kvcache.testing.suites.attending import AttendingTests
from kvcache.testing.suites.extras import ExtrasTests
from kvcache.testing.suites.properties import PropertyTests
from ml.testing.attention import AttentionTests

from ..conftest import COMPILED


class CompiledBackend(NumpyBackend):
    ragged_attention = COMPILED


@pytest.fixture
def compiled() -> Iterator[ml.Backend]:
    pytest.importorskip("numba")
    with CompiledBackend() as backend:
        yield backend


class TestNumpyByKernels(AttendingTests, ExtrasTests, PropertyTests, AttentionTests):
    backend_name = "numpy"
    colours = (0,)
    traces = 60
    state_traces = 2
    encoder_traces = 2

    @pytest.fixture
    def backend(self, compiled: ml.Backend) -> ml.Backend:
        return compiled


class _ByCalls(AttendingTests, ExtrasTests, PropertyTests):
    colours = (0,)
    traces = 60
    state_traces = 2
    encoder_traces = 2

    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[ml.Backend]:
        monkeypatch.setattr(cpu_attention, "kernels", lambda: None)
        with ml.open_backend(self.backend_name) as backend:
            yield backend


class TestTorchByCalls(_ByCalls):
    backend_name = "torch"


class TestMlxByCalls(_ByCalls):
    backend_name = "mlx"


@pytest.fixture(params=["numpy", "mlx"])
def by_kernels(request: pytest.FixtureRequest, compiled: ml.Backend) -> Iterator[ml.Backend]:
    if request.param == "numpy":
        yield compiled
        return
    pytest.importorskip("mlx.core")
    with ml.open_backend(request.param) as backend:
        yield backend


@pytest.mark.parametrize("head_dim", [5, 8, 64, 80])
@pytest.mark.parametrize("dtype", [ml.DType.F32, ml.DType.BF16])
def test_no_call_of_attention_is_made_where_a_kernel_does_it(
    by_kernels: ml.Backend, head_dim: int, dtype: ml.DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcache import Batch, CausalCache

    monkeypatch.setattr(ml.nn, "partial_attention", lambda *_: pytest.fail("a call"))
    monkeypatch.setattr(ml.nn, "attention", lambda *_: pytest.fail("a call"))
    cache, ctx = CausalCache(), by_kernels.new_context()
    cache.init(by_kernels, dtype, 3, 16, 16)
    cache.start_forward(ctx, Batch([0, 1, 0, 0], [0, 0, 1, 2]))
    new = ctx.full((4, 2, head_dim), 0.5, dtype)
    cache.put(ctx, new, new)
    found = cache.attend(ctx, ctx.full((4, 4, head_dim), 1, dtype), 0.1)
    assert found.dtype is dtype
    assert (found.to_numpy() == 0.5).all()
