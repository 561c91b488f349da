"""Formats with a Hadamard rotation of each head, which spreads outlier channels over all channels.

One channel of keys that is many times larger than the others uses up the range of its block, so that the
others lose precision. After a rotation by an orthogonal matrix whose entries all have the same magnitude,
every channel has an equal part of it. Scores and weighted sums do not change, since the rotation is undone on
the other side (Ashkboos et al., "QuaRot", 2024; Shah et al., "FlashAttention-3", 2024). ``attend`` rotates
queries instead of stored keys, and its result instead of stored values, so that reading takes no longer than
without rotation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np

import ml
from kvcache.cache import StorageFormat

PREFIX = "ROTATED_"
"""The prefix of the names of these formats."""
_ROUNDING = {ml.DType.F32: 2.0**-24, ml.DType.F16: 2.0**-11, ml.DType.BF16: 2.0**-8}
_matrices: weakref.WeakKeyDictionary[ml.Backend, dict[tuple[int, int], ml.Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""For each backend, the rotation matrix of each size on each device, made once."""


class Rotated:
    """Stores rotated heads in the format ``inner``; ``decode`` rotates them back.

    A head is rotated in blocks of the largest power of two that divides head_dim.
    """

    def __init__(self, inner: StorageFormat) -> None:
        self.inner = inner
        self.name = PREFIX + inner.name

    def parts(self, dim: int, activations: ml.DType) -> tuple[tuple[int, ml.DType], ...]:
        return self.inner.parts(dim, activations)

    def head_dim(self, width: int) -> int:
        return self.inner.head_dim(width)

    def encode(self, ctx: ml.Context, x: ml.Tensor) -> tuple[ml.Tensor, ...]:
        return self.inner.encode(ctx, self.turn(ctx, x))

    def decode(self, ctx: ml.Context, parts: Sequence[ml.Tensor], dim: int) -> ml.Tensor:
        return self.turn(ctx, self.inner.decode(ctx, parts, dim))

    def bound(self, x: np.ndarray, activations: ml.DType) -> np.ndarray:
        """The Euclidean norm of the inner bounds, as all errors may add up in one value."""
        size = _size(x.shape[-1])
        blocks = x.reshape(*x.shape[:-1], -1, size).astype(np.float64)
        turned = (blocks @ _sylvester(size)).reshape(x.shape)
        rounded = np.abs(turned) * (_ROUNDING[activations] + 2.0**-20)
        inner = self.inner.bound(turned.astype(np.float32), activations) + rounded
        length = np.linalg.norm(inner.reshape(blocks.shape), axis=-1, keepdims=True)
        return np.broadcast_to(length * (1 + 1e-5), blocks.shape).reshape(x.shape)

    def turn(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """x (..., dim) rotated, in F32 and rounded once to its dtype; rotating twice gives x again."""
        wide = x if x.dtype is ml.DType.F32 else x.cast(ctx, ml.DType.F32)
        turned = wide.matmul(ctx, _matrix(ctx, x.shape[-1]))
        return turned if x.dtype is ml.DType.F32 else turned.cast(ctx, x.dtype)


def _size(dim: int) -> int:
    """The largest power of two that divides ``dim``."""
    return dim & -dim


def _sylvester(size: int) -> np.ndarray:
    """The symmetric, orthogonal Hadamard matrix of a power of two (Sylvester's construction), float64."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def _matrix(ctx: ml.Context, dim: int) -> ml.Tensor:
    """F32 (dim, dim): the blocks along its diagonal."""
    backend = getattr(ctx, "backend", None)  # a context may lack this attribute
    known = {} if backend is None else _matrices.setdefault(backend, {})
    place = getattr(ctx, "device_index", 0), dim
    if place not in known:
        size = _size(dim)
        known[place] = ctx.from_numpy(np.kron(np.eye(dim // size), _sylvester(size)), ml.DType.F32)
    return known[place]
