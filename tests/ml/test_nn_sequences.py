"""Running sums, padding, causal convolutions, softplus and L2 norms, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import ml
from ml import DType, nn

from ..rigs.each_backend import each_context

ctx = each_context("numpy", "torch", "mlx")


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (3, 64), (2, 3, 65), (4, 1000), (0, 5), (3, 0)])
def test_running_sums_of_the_last_axis(ctx: ml.Context, shape: tuple[int, ...]) -> None:
    array = values(*shape)
    got = nn.cumsum(ctx, ctx.from_numpy(array))
    np.testing.assert_allclose(got.to_numpy(), array.astype(np.float64).cumsum(-1), rtol=0, atol=1e-4)


def test_running_sums_of_a_view_and_of_halves(ctx: ml.Context) -> None:
    array = values(5, 6)
    view = ctx.from_numpy(array).permute(ctx, 1, 0)
    np.testing.assert_allclose(nn.cumsum(ctx, view).to_numpy(), array.T.cumsum(-1), atol=1e-5)
    ones = nn.cumsum(ctx, ctx.full((3000,), 1.0, DType.F16))
    assert ones.dtype is DType.F32
    np.testing.assert_array_equal(ones.to_numpy(), np.arange(1, 3001))


def test_padding_on_either_side_of_any_axis(ctx: ml.Context) -> None:
    array = values(2, 3)
    x = ctx.from_numpy(array)
    for axis, before, after in ((0, 1, 0), (1, 0, 2), (0, 2, 1), (1, 0, 0)):
        edges = [(0, 0), (0, 0)]
        edges[axis] = before, after
        got = nn.pad(ctx, x, axis, before, after, 7.0).to_numpy()
        np.testing.assert_array_equal(got, np.pad(array, edges, constant_values=7.0))
    with pytest.raises(ml.ShapeError, match="pad: -1 before and 0 after; they must be at least 0"):
        nn.pad(ctx, x, 0, -1)


@pytest.mark.parametrize(("taps", "tokens"), [(1, 4), (2, 1), (4, 1), (4, 3), (3, 9)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_causal_convolution_goes_on_from_its_state(
    ctx: ml.Context, taps: int, tokens: int, biased: bool
) -> None:
    x, state, kernel = values(2, tokens, 5), values(2, 5, taps - 1, seed=1), values(taps, 5, seed=2)
    bias = values(5, seed=3) if biased else None
    known = np.concatenate([state.swapaxes(1, 2), x], 1).astype(np.float64)
    expected = sum(known[:, i : i + tokens] * kernel[i] for i in range(taps))
    if bias is not None:
        expected = expected + bias
    tensors = [ctx.from_numpy(array) for array in (x, state, kernel)]
    got, inputs = nn.causal_conv1d(ctx, *tensors, None if bias is None else ctx.from_numpy(bias))
    np.testing.assert_allclose(got.to_numpy(), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(inputs.to_numpy(), known.astype(np.float32))


def test_a_convolution_whose_shapes_do_not_fit_is_refused(ctx: ml.Context) -> None:
    x, kernel = ctx.zeros((2, 3, 5), DType.F32), ctx.zeros((4, 5), DType.F32)
    with pytest.raises(ml.ShapeError, match=r"state \(2, 5, 4\) and kernel \(4, 5\)"):
        nn.causal_conv1d(ctx, x, ctx.zeros((2, 5, 4), DType.F32), kernel)


def test_softplus_neither_overflows_nor_loses_what_is_small(ctx: ml.Context) -> None:
    array = np.array([-90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 90.0, 1e4], np.float32)
    expected = np.logaddexp(0.0, array.astype(np.float64))
    np.testing.assert_allclose(
        nn.softplus(ctx, ctx.from_numpy(array)).to_numpy(), expected, rtol=1e-5, atol=1e-7
    )


def test_an_l2_norm_is_that_of_the_last_axis(ctx: ml.Context) -> None:
    array = values(4, 6)
    expected = array / np.sqrt((array.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(nn.l2_norm(ctx, ctx.from_numpy(array)).to_numpy(), expected, atol=1e-6)
    assert not nn.l2_norm(ctx, ctx.zeros((2, 6), DType.F32)).to_numpy().any()
