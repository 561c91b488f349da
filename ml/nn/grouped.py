"""Products of rows with individual matrices, as a mixture of experts needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ml.capabilities import SupportsGroupedMatmul
from ml.dtypes import DType
from ml.errors import DTypeError, ShapeError
from ml.nn.attention import offers
from ml.protocols import Context, Tensor

_DENSE_ROWS = 256
"""Up to this many rows, a product costs a device as much as reading the matrix."""
_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""The possible numbers of rows of a block."""
_PIECE_BYTES = 128 << 20
"""The most bytes of matrices copied for a piece of the product, unless a single one is larger."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows laid out in blocks of ``size``, each for one matrix; their number is known without reading from
    the device.

    With rows of matrices 0, 2 and 3 in blocks of 4::

        rows     0 1 2 | 3 4 5 6 7 | 8
        blocks   0 1 2 . | 3 4 5 6 | 7 . . . | 8 . . . | . . . .

    A matrix with n rows has n / size blocks, rounded up; the blocks suffice for any distribution of rows.
    """

    size: int
    matrices: Tensor
    """I32 (blocks,): the matrix of each block; arbitrary for an empty block."""
    sources: Tensor
    """I32 (blocks, size): the row at each place; arbitrary for an empty place."""
    places: Tensor
    """I32 (rows,): the place of each row, counted over all blocks."""


class Groups:
    """The matrix of each row: ``tensor`` I32 (rows,), ascending. The caller guarantees its range."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._runs: list[tuple[int, int, int]] | None = None
        self._blocks: dict[tuple[int, int], Blocks] = {}

    def runs(self) -> list[tuple[int, int, int]]:
        """(matrix, start, stop) of each matrix that has rows; read from the device once."""
        if self._runs is None:
            self._runs = runs(self.tensor.to_numpy())
        return self._runs

    def blocks(self, ctx: Context, matrices: int, size: int) -> Blocks:
        """The rows in blocks of ``size``, made on the device, once."""
        if (matrices, size) not in self._blocks:
            self._blocks[matrices, size] = _lay_out(ctx, self.tensor, matrices, size)
        return self._blocks[matrices, size]


def grouped_matmul(ctx: Context, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """x (rows, in), weight (matrices, in, out) -> (rows, out): row i is ``x[i] @ weight[groups[i]]``.

    Raises ShapeError or DTypeError for incompatible operands.
    """
    if len(x.shape) != 2 or len(weight.shape) != 3 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"grouped_matmul: x {x.shape} by weight {weight.shape}; "
            "they must be (rows, in) and (matrices, in, out)"
        )
    if groups.tensor.shape != x.shape[:1]:
        raise ShapeError(
            f"grouped_matmul: groups {groups.tensor.shape} for x {x.shape}; they must be (rows,)"
        )
    if x.dtype is not weight.dtype:
        raise DTypeError(
            f"grouped_matmul: x {x.dtype!r} by weight {weight.dtype!r}; they must have the same dtype"
        )
    backend: Any = ctx.backend
    if offers(backend, SupportsGroupedMatmul):
        product: Tensor | None = backend.grouped_matmul(ctx, x, weight, groups.tensor)
        if product is not None:
            return product
    return generic_grouped_matmul(ctx, x, weight, groups)


def generic_grouped_matmul(ctx: Context, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """``grouped_matmul`` on Tensor.

    The matrices of rows are not read from the device, unless the device is the host, where that needs no
    waiting. A few rows are multiplied by copies of their matrices, more by all matrices, and many in blocks.
    """
    rows, (count, _, size) = x.shape[0], weight.shape
    device = ctx.backend.devices[getattr(ctx, "device_index", 0)]
    if device.kind == "cpu" or 0 in (rows, *weight.shape):
        return _by_runs(ctx, x, weight, groups)
    if rows > _DENSE_ROWS:
        return _by_blocks(ctx, x, weight, groups)
    if 3 * rows <= count:  # a copy is read, written and read again
        own = _matrices(ctx, weight, groups.tensor)
        return x.reshape(ctx, rows, 1, x.shape[1]).matmul(ctx, own).reshape(ctx, rows, size)
    whole = x.reshape(ctx, 1, rows, x.shape[1]).matmul(ctx, weight).reshape(ctx, count * rows, size)
    place = groups.tensor.scale(ctx, rows).add(ctx, ctx.arange(0, rows, 1, DType.I32))
    return whole.rows(ctx, place)


def _by_blocks(ctx: Context, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Multiply blocks of rows, each by a copy of its matrix, in pieces of at most ``_PIECE_BYTES`` of
    copies.
    """
    count, inner, outer = weight.shape
    laid = groups.blocks(ctx, count, block_size(x.shape[0], weight.shape))
    blocks, size = laid.sources.shape
    step = max(1, _PIECE_BYTES // (inner * outer * weight.dtype.itemsize))
    result = ctx.empty((blocks, size, outer), x.dtype)
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        sources = laid.sources.slice(ctx, 0, start, stop).reshape(ctx, (stop - start) * size)
        own = _matrices(ctx, weight, laid.matrices.slice(ctx, 0, start, stop))
        product = x.rows(ctx, sources).reshape(ctx, stop - start, size, inner).matmul(ctx, own)
        product.copy(ctx, result.slice(ctx, 0, start, stop))
    return result.reshape(ctx, blocks * size, outer).rows(ctx, laid.places)


def block_count(rows: int, matrices: int, size: int) -> int:
    """The number of blocks of ``size`` that hold the rows, however they are distributed among the
    matrices.
    """
    used = min(rows, matrices)
    return (rows - used) // size + used


def block_size(rows: int, weight: tuple[int, ...]) -> int:
    """The block size that is likely to be fastest for ``weight`` (matrices, in, out).

    In units of reading a matrix: a block copies it, multiplies, and moves its rows in and out.
    """
    count, inner, outer = weight

    def cost(size: int) -> float:
        moved = 3 * size * (inner + outer) / (inner * outer)
        return block_count(rows, count, size) * (2 + max(1, size / _DENSE_ROWS) + moved)

    return min(_SIZES, key=cost)


def _lay_out(ctx: Context, groups: Tensor, matrices: int, size: int) -> Blocks:
    """The ``Blocks``, computed with integer operations on the device only."""
    (rows,) = groups.shape
    blocks = block_count(rows, matrices, size)
    before = _count_below(ctx, groups, _numbers(ctx, matrices + 1))  # rows of matrices before each
    start, end = before.slice(ctx, 0, 0, matrices), before.slice(ctx, 0, 1, matrices + 1)
    taken = _count_below(ctx, ctx.arange(0, rows, size, DType.I32), end.sub(ctx, start))
    upto = _numbers(ctx, matrices).reshape(ctx, matrices, 1).compare(ctx, "le", _numbers(ctx, matrices))
    last = upto.cast(ctx, DType.I32).mul(ctx, taken.reshape(ctx, matrices, 1)).sum(ctx, 0)
    last = last.cast(ctx, DType.I32)  # one past the last block of each matrix
    ahead = last.sub(ctx, taken).scale(ctx, size).sub(ctx, start)  # places before it minus rows before it
    numbers = _numbers(ctx, blocks)
    whose = _count_below(ctx, last, numbers.add(ctx, ctx.full((1,), 1, DType.I32)))
    whose = whose.clamp(ctx, 0, matrices - 1)
    first = numbers.scale(ctx, size).sub(ctx, ahead.rows(ctx, whose)).reshape(ctx, blocks, 1)
    sources = first.add(ctx, _numbers(ctx, size)).clamp(ctx, 0, rows - 1)
    return Blocks(size, whose, sources, _numbers(ctx, rows).add(ctx, ahead.rows(ctx, groups)))


def _numbers(ctx: Context, count: int) -> Tensor:
    return ctx.arange(0, count, 1, DType.I32)


def _count_below(ctx: Context, values: Tensor, bounds: Tensor) -> Tensor:
    """The number of ``values`` below each of ``bounds``, I32."""
    below = values.reshape(ctx, values.shape[0], 1).compare(ctx, "lt", bounds)
    return below.sum(ctx, 0).cast(ctx, DType.I32)


def _matrices(ctx: Context, weight: Tensor, indices: Tensor) -> Tensor:
    """Copies of the matrices, with their axis order in memory unchanged."""
    if weight.strides[1] >= weight.strides[2]:
        return weight.rows(ctx, indices)
    return weight.permute(ctx, 0, 2, 1).rows(ctx, indices).permute(ctx, 0, 2, 1)


def _by_runs(ctx: Context, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    result = ctx.empty((x.shape[0], weight.shape[2]), x.dtype)
    for i, start, stop in groups.runs():
        matrix = weight.slice(ctx, 0, i, i + 1).reshape(ctx, *weight.shape[1:])
        x.slice(ctx, 0, start, stop).matmul(ctx, matrix).copy(ctx, result.slice(ctx, 0, start, stop))
    return result


def runs(groups: np.ndarray) -> list[tuple[int, int, int]]:
    """As ``Groups.runs``, for a host array."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    stops = np.append(starts, len(groups))[1:]
    return list(zip(groups[starts].tolist(), starts.tolist(), stops.tolist(), strict=True))
