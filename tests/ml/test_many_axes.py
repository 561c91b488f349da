"""Tensors of 64 axes, as many as NumPy's arrays have: parts of NumPy take 32 of them, and of oneDNN 12."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ml
from ml import DType

from ..rigs.each_backend import each_context

ctx = each_context("numpy", "torch", "mlx")

SHAPE = (2, *(1,) * 61, 2, 3)
CALLS = {
    "gelu": lambda c, a, row: a.gelu(c),
    "gelu tanh": lambda c, a, row: a.gelu(c, "tanh"),
    "softmax": lambda c, a, row: a.softmax(c, 0),
    "sum": lambda c, a, row: a.sum(c, 0),
    "argmax": lambda c, a, row: a.argmax(c, -1),
    "argsort": lambda c, a, row: a.argsort(c, 0),
    "argsort of the last": lambda c, a, row: a.argsort(c),
    "top_k": lambda c, a, row: a.top_k(c, 2)[0],
    "where top_k": lambda c, a, row: a.top_k(c, 2)[1],
    "add": lambda c, a, row: a.add(c, row),
    "matmul": lambda c, a, row: a.matmul(c, row),
    "compare": lambda c, a, row: a.compare(c, "<", row),
    "where": lambda c, a, row: a.compare(c, "<", row).where(c, a, row),
    "rows": lambda c, a, row: a.rows(c, [1, 0]),
    "concat": lambda c, a, row: a.concat(c, a, 0),
    "repeat": lambda c, a, row: a.repeat(c, 0, 2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_64_axes_give_what_few_give(ctx: ml.Context, call: Any) -> None:
    host = np.array([[[3, -1, 0], [2, 2, 5]], [[-4, 8, 1], [0, 7, -2]]], np.float32)
    row = ctx.from_numpy(np.array([1, 2, 3], np.float32))
    few = call(ctx, ctx.from_numpy(host), row).to_numpy()
    many = call(ctx, ctx.from_numpy(host.reshape(SHAPE)), row)
    assert many.dtype is DType.from_numpy(few.dtype)
    np.testing.assert_allclose(many.to_numpy().reshape(few.shape), few, rtol=1e-6)
