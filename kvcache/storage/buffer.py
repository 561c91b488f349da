"""A preallocated buffer of cells: their memory layout, and how they are read and written.

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

import copy

import ml

Cells = int | ml.Tensor
"""The first of a run of cells, or an I32 tensor of cells."""


class Buffer:
    """One preallocated tensor of ``cells`` places for (heads, dim) each."""

    __slots__ = ("axis", "cells", "dim", "heads", "order", "strides", "tensor")
    part_count = 1
    """The number of tensors that ``read_stored`` returns."""

    def __init__(
        self, ctx: ml.Context, dtype: ml.DType, cells: int, heads: int, dim: int, order: tuple[int, int, int]
    ) -> None:
        """``order`` lists the axes (0 cells, 1 heads, 2 dims), outermost first."""
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

    def narrowed(self, dim: int) -> Buffer:
        """A view of the first ``dim`` numbers of each head."""
        narrow = copy.copy(self)
        narrow.dim = dim
        return narrow

    def touch(self, ctx: ml.Context) -> None:
        zero = ctx.zeros((1, 1, 1), self.tensor.dtype)
        ctx.forward(zero.view(ctx, 0, self.tensor.shape, (0, 0, 0)).copy(ctx, self.tensor))

    def blank(self, ctx: ml.Context, cells: Cells, count: int) -> None:
        ctx.forward(self.write(ctx, cells, ctx.zeros((count, self.heads, self.dim), self.tensor.dtype)))

    def read(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        """Cells ``[start, start + count)`` as a view (count, heads, dim)."""
        return self.tensor.view(ctx, start * self.strides[0], (count, self.heads, self.dim), self.strides)

    def read_permuted(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        """The same cells as a view (heads, dim, count)."""
        cell, head, step = self.strides
        return self.tensor.view(ctx, start * cell, (self.heads, self.dim, count), (head, step, cell))

    def read_batch(
        self, ctx: ml.Context, start: int, step: int, batch: int, count: int, heads_first: bool = False
    ) -> ml.Tensor:
        """A view (batch, count, heads, dim) of runs; run i begins at ``start + i * step``.

        (batch, heads, count, dim) with ``heads_first``.
        """
        cell, head, dim = self.strides
        shape, strides = (batch, count, self.heads, self.dim), (step * cell, cell, head, dim)
        if heads_first:
            shape, strides = (batch, self.heads, count, self.dim), (step * cell, head, cell, dim)
        return self.tensor.view(ctx, start * cell, shape, strides)

    def gather_batch(
        self, ctx: ml.Context, cells: ml.Tensor, batch: int, count: int, heads_first: bool = False
    ) -> ml.Tensor:
        """Scattered cells in the shapes of ``read_batch``."""
        gathered = self.gather(ctx, cells)  # not reshaped, which would copy permuted values
        cell, head, dim = gathered.strides
        shape, strides = (batch, count, self.heads, self.dim), (count * cell, cell, head, dim)
        if heads_first:
            shape, strides = (batch, self.heads, count, self.dim), (count * cell, head, cell, dim)
        return gathered.view(ctx, 0, shape, strides)

    def gather(self, ctx: ml.Context, cells: ml.Tensor) -> ml.Tensor:
        """Scattered cells as new storage (count, heads, dim)."""
        gathered = self.tensor.rows(ctx, cells, axis=self.axis)
        gathered = gathered.permute(ctx, *(self.order.index(axis) for axis in range(3)))
        return gathered if gathered.shape[2] == self.dim else gathered.slice(ctx, 2, 0, self.dim)

    def write(self, ctx: ml.Context, cells: Cells, source: ml.Tensor) -> ml.Tensor:
        """Store (count, heads, dim): one strided copy into a run, else a scatter."""
        if isinstance(cells, int):
            return source.copy(ctx, self.read(ctx, cells, source.shape[0]))
        return self.tensor.set_rows(ctx, source.permute(ctx, *self.order), cells, axis=self.axis)

    def read_stored(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ...]:
        """Copies (count, heads, dim) of cells, for ``write_stored`` of any layout.

        In memory they have this buffer's axis order.
        """
        if not isinstance(cells, int):
            return (self.gather(ctx, cells),)
        in_memory_order = self.read(ctx, cells, count).permute(ctx, *self.order).contiguous(ctx)
        return (in_memory_order.permute(ctx, *(self.order.index(axis) for axis in range(3))),)

    def write_stored(self, ctx: ml.Context, cells: Cells, parts: tuple[ml.Tensor, ...]) -> None:
        ctx.forward(self.write(ctx, cells, parts[0]))

    def stored_views(self, ctx: ml.Context, start: int, count: int) -> tuple[ml.Tensor, ...]:
        """Views of the cells ``[start, start + count)``, in the shape of ``read_stored``."""
        return (self.read(ctx, start, count),)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes
