"""Norms, linear maps and embeddings of ml.nn against float64 references and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import ml
from ml import DType, nn

from ..rigs.each_backend import each_context

TOLERANCE = {DType.F32: 2e-6, DType.F16: 2e-3, DType.BF16: 1.6e-2}

ctx = each_context("numpy", "torch")


def random(ctx: ml.Context, *shape: int, dtype: DType = DType.F32, seed: int = 0) -> ml.Tensor:
    return ctx.from_numpy(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(x: ml.Tensor) -> np.ndarray:
    return x.to_numpy().astype(np.float64)


def close(got: ml.Tensor, expected: np.ndarray) -> None:
    tolerance = TOLERANCE[got.dtype]
    np.testing.assert_allclose(wide(got), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm(ctx: ml.Context, dtype: DType) -> None:
    x, weight = random(ctx, 3, 4, 16, dtype=dtype), random(ctx, 16, dtype=dtype, seed=1)
    plain = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-5)
    close(nn.rms_norm(ctx, x, None, 1e-5), plain)
    got = nn.rms_norm(ctx, x, weight, 1e-5)
    assert got.dtype is dtype
    close(got, plain * wide(weight))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_layer_norm(ctx: ml.Context, dtype: DType) -> None:
    x, weight, bias = (
        random(ctx, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(3, 16), (16,), (16,)])
    )
    x = x.add(ctx, ctx.full((1,), 5.0, dtype))
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    plain = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    close(nn.layer_norm(ctx, x, None, None, 1e-5), plain)
    close(nn.layer_norm(ctx, x, weight, None, 1e-5), plain * wide(weight))
    got = nn.layer_norm(ctx, x, weight, bias, 1e-5)
    assert got.dtype is dtype
    close(got, plain * wide(weight) + wide(bias))


def test_layer_norm_of_a_constant_row_is_the_bias(ctx: ml.Context) -> None:
    x, bias = ctx.full((2, 8), 3.0, DType.F32), random(ctx, 8)
    np.testing.assert_array_equal(
        nn.layer_norm(ctx, x, None, bias, 1e-5).to_numpy(), np.stack([bias.to_numpy()] * 2)
    )


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6), (6,), (0, 6)])
def test_linear(ctx: ml.Context, shape: tuple[int, ...]) -> None:
    x, weight, bias = random(ctx, *shape), random(ctx, 4, 6, seed=1), random(ctx, 4, seed=2)
    close(nn.linear(ctx, x, weight), wide(x) @ wide(weight).T)
    close(nn.linear(ctx, x, weight, bias), wide(x) @ wide(weight).T + wide(bias))


def test_linear_refusals(ctx: ml.Context) -> None:
    weight = random(ctx, 4, 6)
    with pytest.raises(ml.ShapeError, match=r"linear: x \(5, 4\) by weight \(4, 6\)"):
        nn.linear(ctx, random(ctx, 5, 4), weight)
    with pytest.raises(ml.ShapeError, match="linear"):
        nn.linear(ctx, random(ctx, 5, 6), random(ctx, 6))
    with pytest.raises(ml.ShapeError, match="bias"):
        nn.linear(ctx, random(ctx, 5, 6), weight, random(ctx, 6))


def test_embedding(ctx: ml.Context) -> None:
    weight = random(ctx, 7, 4)
    for ids in ([3, 0, 3], np.array([3, 0, 3]), ctx.from_numpy([3, 0, 3], DType.I32)):
        np.testing.assert_array_equal(nn.embedding(ctx, weight, ids).to_numpy(), weight.to_numpy()[[3, 0, 3]])
    with pytest.raises(ml.BoundsError):
        nn.embedding(ctx, weight, [7])
    with pytest.raises(ml.ShapeError, match="embedding"):
        nn.embedding(ctx, random(ctx, 7), [0])


def test_swiglu(ctx: ml.Context) -> None:
    gate, up = random(ctx, 3, 8), random(ctx, 3, 8, seed=1)
    close(nn.swiglu(ctx, gate, up), wide(gate) / (1 + np.exp(-wide(gate))) * wide(up))


@pytest.mark.parametrize(
    ("changed", "shape"),
    [
        (0, (2, 12)),
        (0, (3, 2, 4)),
        (1, (2, 3, 2)),
        (2, (2, 5, 6)),
        (2, (3, 4, 6)),
        (3, (2, 5, 5)),
        (3, (3, 6, 5)),
    ],
)
def test_latent_attention_refuses_shapes_before_it_attends(
    ctx: ml.Context, changed: int, shape: tuple[int, ...]
) -> None:
    shapes = [(2, 2, 4), (2, 2, 2), (2, 4, 6), (2, 6, 5)]
    asked: list[ml.Tensor] = []

    def attend(query: ml.Tensor) -> ml.Tensor:
        asked.append(query)
        return query

    whole = [random(ctx, *one) for one in shapes]
    given = [random(ctx, *shape) if i == changed else x for i, x in enumerate(whole)]
    with pytest.raises(ml.ShapeError, match=r"latent_attention: query_nope .*\(heads, rank, v_dim\)"):
        nn.latent_attention(ctx, *given, attend)
    with pytest.raises(ml.DTypeError, match="up_key F16"):
        nn.latent_attention(ctx, whole[0], whole[1], whole[2].cast(ctx, DType.F16), whole[3], attend)
    assert not asked
    with pytest.raises(ml.ShapeError, match=r"attend returned \(2, 2, 8\); it must return \(2, 2, 6\)"):
        nn.latent_attention(ctx, *whole, attend)
