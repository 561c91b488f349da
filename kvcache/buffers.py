"""The K and V buffers of one layer: how cells lie in memory, and how they are read and written.

=============  ======================================  =============================
layout         buffer of cells C, heads H, dims D       one cell's strides (head, dim)
=============  ======================================  =============================
head_major     (H, C, D)                                C * D, 1
token_major    (C, H, D)                                D, 1
permuted_v     (H, D, C), values only                   D * C, C
=============  ======================================  =============================

Whatever the layout, callers see (cells, heads, dims).
"""

from __future__ import annotations

import ml
from kvcache.cache import InvalidRangeError

__all__ = ["Buffer", "LayerBuffers"]

Cells = int | ml.Tensor
"""The first of a run of cells, or an I32 tensor of cells."""


class Buffer:
    """One preallocated tensor of ``cells`` places for (heads, dim) each."""

    __slots__ = ("axis", "cells", "dim", "heads", "order", "strides", "tensor")

    def __init__(
        self, ctx: ml.Context, dtype: ml.DType, cells: int, heads: int, dim: int, order: tuple[int, int, int]
    ) -> None:
        """``order`` lists the axes (0 cells, 1 heads, 2 dims) from the outermost in."""
        self.cells, self.heads, self.dim = cells, heads, dim
        self.order = order
        self.axis = order.index(0)
        sizes = (cells, heads, dim)
        # Zeros, not empty: a masked cell still meets a weight of 0, and 0 * NaN is NaN.
        self.tensor = ctx.zeros([sizes[axis] for axis in order], dtype)
        steps = [1, 1, 1]
        steps[order[1]] = sizes[order[2]]
        steps[order[0]] = sizes[order[1]] * sizes[order[2]]
        self.strides = tuple(steps)

    def read(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        """Cells ``[start, start + count)`` as a view (count, heads, dim)."""
        return self.tensor.view(ctx, start * self.strides[0], (count, self.heads, self.dim), self.strides)

    def read_permuted(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        """The same cells as a view (heads, dim, count)."""
        cell, head, step = self.strides
        return self.tensor.view(ctx, start * cell, (self.heads, self.dim, count), (head, step, cell))

    def gather(self, ctx: ml.Context, cells: ml.Tensor) -> ml.Tensor:
        """Scattered cells as new storage (count, heads, dim)."""
        found = self.tensor.rows(ctx, cells, axis=self.axis)
        return found.permute(ctx, *(self.order.index(axis) for axis in range(3)))

    def write(self, ctx: ml.Context, cells: Cells, source: ml.Tensor) -> ml.Tensor:
        """Store (count, heads, dim): one strided copy into a run, else a scatter."""
        if isinstance(cells, int):
            return source.copy(ctx, self.read(ctx, cells, source.shape[0]))
        return self.tensor.set_rows(ctx, source.permute(ctx, *self.order), cells, axis=self.axis)


class LayerBuffers:
    """K and V of one layer, allocated at the first ``put`` for all cells at once."""

    __slots__ = ("key", "permuted_v", "value")

    def __init__(
        self,
        ctx: ml.Context,
        dtype: ml.DType,
        config: ml.CacheConfig,
        cells: int,
        key: tuple[int, int],
        value: tuple[int, int],
    ) -> None:
        """``key`` and ``value`` are (heads, dim)."""
        order = (1, 0, 2) if config.layout == ml.Layout.HEAD_MAJOR else (0, 1, 2)
        self.permuted_v = config.permuted_v
        self.key = Buffer(ctx, dtype, cells, *key, order)
        self.value = Buffer(ctx, dtype, cells, *value, (1, 2, 0) if self.permuted_v else order)

    @property
    def nbytes(self) -> int:
        return self.key.tensor.nbytes + self.value.tensor.nbytes

    def check(self, layer: int, key: ml.Tensor, value: ml.Tensor) -> None:
        """Raise InvalidRangeError unless K and V have the shape that this layer stores."""
        for name, tensor, buffer in (("key", key, self.key), ("value", value, self.value)):
            if tensor.shape[1] != buffer.heads or tensor.shape[2] != buffer.dim:
                raise InvalidRangeError(
                    f"put: {name} {tensor.shape} in layer {layer}, which stores (tokens, {buffer.heads}, "
                    f"{buffer.dim})"
                )

    def write(self, ctx: ml.Context, cells: Cells, key: ml.Tensor, value: ml.Tensor) -> None:
        ctx.forward(self.key.write(ctx, cells, key), self.value.write(ctx, cells, value))

    def read(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V as (count, heads, dim)."""
        if isinstance(cells, int):
            return self.key.read(ctx, cells, count), self.value.read(ctx, cells, count)
        return self.key.gather(ctx, cells), self.value.gather(ctx, cells)

    def read_as_configured(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ml.Tensor]:
        """The same, with values as (heads, dim, count) where ``permuted_v`` asks for it."""
        if not self.permuted_v:
            return self.read(ctx, cells, count)
        if isinstance(cells, int):
            return self.key.read(ctx, cells, count), self.value.read_permuted(ctx, cells, count)
        return self.key.gather(ctx, cells), self.value.gather(ctx, cells).permute(ctx, 1, 2, 0)
