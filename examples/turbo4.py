"""TURBO4: 4 bits a number after a random rotation, as in TurboQuant (Zandieh et al., 2025; its MSE variant).

A fixed random rotation makes the numbers of any vector look as if drawn from a normal distribution: outliers
disappear, and one grid suits all vectors. A head is stored as its root mean square and, for each number, the
nearest of the 16 points of that grid (Lloyd, 1982; Max, 1960).
"""

from __future__ import annotations

import functools

import numpy as np

import ml
from kvcache import InvalidRangeError

_HALF = np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326])
GRID = np.concatenate([-_HALF[::-1], _HALF]).astype(np.float32)
EDGES = (GRID[1:] + GRID[:-1]) / 2
PAIRS = np.stack([GRID[np.arange(256) & 15], GRID[np.arange(256) >> 4]], -1)
"""The two numbers of each byte."""


@functools.cache
def rotation(dim: int) -> np.ndarray:
    """Orthogonal, F32 (dim, dim); its seed is part of the format."""
    found, _ = np.linalg.qr(np.random.default_rng(20250428).normal(size=(dim, dim)))
    return found.astype(np.float32)


class Turbo4:
    name = "TURBO4"

    def parts(self, dim, activations):
        if dim <= 0 or dim % 2:
            raise InvalidRangeError(f"put: head_dim {dim} in a cache of {self.name}; it is even")
        return (dim // 2, ml.DType.U8), (1, ml.DType.F32)

    def head_dim(self, width):
        return 2 * width

    def encode(self, ctx, x):
        *outer, dim = x.shape
        wide = x.cast(ctx, ml.DType.F32)
        size = wide.mul(ctx, wide).mean(ctx, -1, keepdims=True).sqrt(ctx)
        turned = wide.matmul(ctx, ctx.from_numpy(rotation(dim))).div(ctx, size.clamp(ctx, 1e-30, None))
        above = turned.reshape(ctx, *outer, dim, 1).compare(ctx, "ge", ctx.from_numpy(EDGES))
        codes = above.sum(ctx, -1).cast(ctx, ml.DType.F32).reshape(ctx, *outer, dim // 2, 2)
        low, high = (codes.slice(ctx, -1, half, half + 1).reshape(ctx, *outer, dim // 2) for half in (0, 1))
        return low.add(ctx, high.scale(ctx, 16)).cast(ctx, ml.DType.U8), size

    def decode(self, ctx, parts, dim):
        codes, size = parts
        listed = codes.contiguous(ctx).reshape(ctx, -1).cast(ctx, ml.DType.I32)
        turned = ctx.from_numpy(PAIRS).rows(ctx, listed).reshape(ctx, *codes.shape[:-1], dim)
        return turned.mul(ctx, size).matmul(ctx, ctx.from_numpy(rotation(dim).T.copy()))

    def bound(self, x, activations):
        """The length of the error: a rotation keeps it."""
        size = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True))
        turned = x.astype(np.float64) @ rotation(x.shape[-1]) / np.maximum(size, 1e-30)
        error = (turned - GRID[np.digitize(turned, EDGES)]) * size
        length = np.sqrt((error**2).sum(-1, keepdims=True)) * 1.001 + size * 1e-4
        return np.broadcast_to(length, x.shape)
