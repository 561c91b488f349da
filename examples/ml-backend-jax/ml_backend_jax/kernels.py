"""Compiled functions of JAX arrays, with one program per shape and dtype.

Offsets and strides are arguments, not constants, so a cache that writes one row further in each step
runs the same program. F16 and BF16 are widened, computed in F32 and rounded once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ml.strided import Shape

Kernel = Callable[..., Any]
STATIC = {"base", "sizes", "axes", "shape", "axis", "dtype", "op", "keepdims", "k", "n", "tanh", "causal"}


def compiled(function: Kernel) -> Kernel:
    """``write_`` kernels are given their first array: XLA updates its memory in place, on CPUs too."""
    static = sorted(STATIC & set(inspect.signature(function).parameters))
    donated = (0,) if function.__name__.startswith("write_") else ()
    return jax.jit(function, static_argnames=static, donate_argnums=donated)


def wide(dtype: Any) -> np.dtype:
    return np.dtype(np.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype)


def widen(x: Array) -> Array:
    return x.astype(wide(x.dtype))


def scalar(number: Any, dtype: Any) -> Array:
    return jnp.asarray(number).astype(dtype)


def convert(x: Array, dtype: Any) -> Array:
    if dtype == np.bool_ and jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x.astype(np.float32), np.uint32)
        return bits << 1 != 0  # in a comparison XLA's CPU takes subnormals for 0
    return (x.astype(wide(dtype)) if jnp.issubdtype(x.dtype, jnp.integer) else x).astype(dtype)


# Views: a box of the storage (``ml.strided.Region``), else positions, from ``at``: an offset and strides.


@compiled
def read_box(array: Array, start: Any, base: Shape, sizes: Shape, axes: Shape, shape: Shape) -> Array:
    box = lax.dynamic_slice(array.reshape(base), list(start), sizes)
    kept = [axis for axis in axes if axis >= 0]
    return box.transpose(kept + [axis for axis in range(len(base)) if axis not in kept]).reshape(shape)


@compiled
def write_box(array: Array, value: Array, start: Any, base: Shape, sizes: Shape, axes: Shape) -> Array:
    kept = [axis for axis in axes if axis >= 0]
    value = value.reshape([sizes[axis] for axis in kept]).transpose(np.argsort(kept).tolist()).reshape(sizes)
    box = lax.dynamic_update_slice(array.reshape(base), convert(value, array.dtype), list(start))
    return box.reshape(array.shape)


def positions(at: Any, shape: Shape, rows: Any = None, axis: int = 0) -> Any:
    where = at[0]
    for i, size in enumerate(shape):
        steps = rows if rows is not None and i == axis else jnp.arange(size)
        where = where + (steps.astype(at.dtype) * at[i + 1]).reshape(size, *(1,) * (len(shape) - i - 1))
    return where


@compiled
def read_any(array: Array, at: Any, shape: Shape) -> Array:
    flat: Array = array.reshape(-1).at[positions(at, shape)].get(mode="promise_in_bounds")
    return flat


@compiled
def write_any(array: Array, value: Array, at: Any, rows: Any = None, axis: int = 0) -> Array:
    where, value = positions(at, value.shape, rows, axis), convert(value, array.dtype)
    flat = array.reshape(-1).at[where].set(value, mode="promise_in_bounds", unique_indices=True)
    return flat.reshape(array.shape)


# Results.

FUNCTIONS: dict[str, Kernel] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "neg": jnp.negative,
    "exp": jnp.exp, "log": jnp.log, "sqrt": jnp.sqrt, "sin": jnp.sin, "cos": jnp.cos, "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu, "relu": lambda x: jnp.maximum(x, x.dtype.type(0)),
    "abs": jnp.abs, "round": jnp.round, "mean": jnp.mean, "max": jnp.max, "eq": jnp.equal,
    "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater, "ge": jnp.greater_equal,
}  # fmt: skip


def reduce(x: Array, op: str, axis: int, keepdims: bool) -> Array:
    if op == "argmax":
        return jnp.argmax(x, axis, keepdims=keepdims).astype(np.int32)
    if op == "sum" and not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.sum(x, axis, np.int64, keepdims=keepdims)
    return (jnp.sum if op == "sum" else FUNCTIONS[op])(widen(x), axis, keepdims=keepdims).astype(x.dtype)


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    order = x.shape[-1] - 1 - jnp.argsort(x[..., ::-1], -1, stable=True)[..., ::-1][..., :k]
    return jnp.take_along_axis(x, order, -1), order.astype(np.int32)


def rms_norm(x: Array, weight: Array | None, eps: Any) -> Array:
    found = widen(x)
    found = found * lax.rsqrt(jnp.mean(found * found, -1, keepdims=True) + eps)
    return (found if weight is None else found * widen(weight)).astype(x.dtype)


def attention(
    query: Array, key: Array, value: Array, mask: Array | None, sinks: Array | None, scale: Any, causal: bool
) -> Array:
    """JAX's own attention, which wants keys and values of one width and knows no sinks."""
    tokens, history, width = len(query), len(key), max(query.shape[-1], value.shape[-1])
    bias = None if mask is None else mask[None, None, :tokens].astype(np.float32)
    if causal:
        ahead = jnp.arange(history) > jnp.arange(tokens)[:, None] + (history - tokens)
        bias = jnp.where(ahead, -np.inf, np.float32(0))[None, None]
    q, k, v = (jnp.pad(widen(x), ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (query, key, value))
    out, total = jax.nn.dot_product_attention(q, k, v, bias, scale=scale, return_residual=True)
    if sinks is not None:  # one more term of the softmax's sum, whose logarithm is the residual
        out = out * jax.nn.sigmoid(total - sinks.astype(np.float32))[..., None]
    return out[..., : value.shape[-1]].astype(query.dtype)


RESULTS: dict[str, Kernel] = {
    "cast": lambda x, dtype: convert(x, dtype.numpy),
    "take": lambda x, rows, axis: jnp.take(x, rows, axis, mode="clip"),
    "concat": lambda x, y, axis: jnp.concatenate((x, y), axis),
    "repeat": lambda x, axis, n: jnp.tile(x, [n if i == axis else 1 for i in range(x.ndim)]),
    "elementwise": lambda x, op, *others: FUNCTIONS[op](widen(x), *map(widen, others)).astype(x.dtype),
    "compare": lambda x, op, y: FUNCTIONS[op](x, y),
    "where": jnp.where,
    "scale": lambda x, by: (widen(x) * scalar(by, wide(x.dtype))).astype(x.dtype),
    "gelu": lambda x, tanh: jax.nn.gelu(widen(x), approximate=tanh).astype(x.dtype),
    "clamp": lambda x, lo, hi: jnp.clip(x, *(None if y is None else scalar(y, x.dtype) for y in (lo, hi))),
    "matmul": lambda x, y: jnp.matmul(widen(x), widen(y), precision="highest").astype(x.dtype),
    "softmax": lambda x, axis: jax.nn.softmax(widen(x), axis).astype(x.dtype) if x.size else x,
    "reduce": reduce,
    "argsort": lambda x, axis: jnp.argsort(x, axis, stable=True).astype(np.int32),
    "top_k": top_k,
    "rms_norm": rms_norm,
    "attention": attention,
}
KERNELS = {name: compiled(function) for name, function in RESULTS.items()}
