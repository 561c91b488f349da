"""Products of rows with matrices of their own: what a mixture of experts comes down to."""

from __future__ import annotations

import numpy as np

from ml.capabilities import SupportsGroupedMatmul
from ml.dtypes import DType
from ml.errors import DTypeError, ShapeError
from ml.protocols import Context, Tensor

__all__ = ["Groups", "generic_grouped_matmul", "grouped_matmul", "runs"]

_DENSE_ROWS = 256
"""Up to here a product with a matrix costs a device what reading the matrix does."""


class Groups:
    """Which matrix each row is for: ``tensor`` I32 (rows,), ascending. The caller answers for its range."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._runs: list[tuple[int, int, int]] | None = None

    def runs(self) -> list[tuple[int, int, int]]:
        """(matrix, start, stop) of each matrix that has rows. The device is asked, once."""
        if self._runs is None:
            self._runs = runs(self.tensor.to_numpy())
        return self._runs


def grouped_matmul(ctx: Context, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """x (rows, in), weight (matrices, in, out) -> (rows, out): row i is ``x[i] @ weight[groups[i]]``.

    Raises ShapeError or DTypeError for operands that do not go together.
    """
    if len(x.shape) != 2 or len(weight.shape) != 3 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"grouped_matmul: x {x.shape} by weight {weight.shape}; "
            "they are (rows, in) and (matrices, in, out)"
        )
    if groups.tensor.shape != x.shape[:1]:
        raise ShapeError(f"grouped_matmul: groups {groups.tensor.shape} for x {x.shape}; they are (rows,)")
    if x.dtype is not weight.dtype:
        raise DTypeError(f"grouped_matmul: x {x.dtype!r} by weight {weight.dtype!r}; they are of one dtype")
    backend = ctx.backend
    if isinstance(backend, SupportsGroupedMatmul):
        found = backend.grouped_matmul(ctx, x, weight, groups.tensor)
        if found is not None:
            return found
    return generic_grouped_matmul(ctx, x, weight, groups)


def generic_grouped_matmul(ctx: Context, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """``grouped_matmul`` on Tensor.

    Few rows, as of a pass that decodes, do without asking the device which matrices they are for: a copy of
    each row's matrix, or the product with all of them. For more that is too much work, and waiting for the
    answer takes little of such a pass; where the device is the host there is nothing to wait for.
    """
    rows, (count, _, size) = x.shape[0], weight.shape
    if ctx.backend.devices[0].kind == "cpu" or rows > _DENSE_ROWS or rows == 0:
        return _by_runs(ctx, x, weight, groups)
    if 3 * rows <= count:  # a copy is read, written and read again
        own = weight.rows(ctx, groups.tensor)
        return x.reshape(ctx, rows, 1, x.shape[1]).matmul(ctx, own).reshape(ctx, rows, size)
    whole = x.reshape(ctx, 1, rows, x.shape[1]).matmul(ctx, weight).reshape(ctx, count * rows, size)
    place = groups.tensor.scale(ctx, rows).add(ctx, ctx.arange(0, rows, 1, DType.I32))
    return whole.rows(ctx, place)


def _by_runs(ctx: Context, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    result = ctx.empty((x.shape[0], weight.shape[2]), x.dtype)
    for i, start, stop in groups.runs():
        matrix = weight.slice(ctx, 0, i, i + 1).reshape(ctx, *weight.shape[1:])
        x.slice(ctx, 0, start, stop).matmul(ctx, matrix).copy(ctx, result.slice(ctx, 0, start, stop))
    return result


def runs(groups: np.ndarray) -> list[tuple[int, int, int]]:
    """As ``Groups.runs``, of an array on the host."""
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    stops = np.append(starts, len(groups))[1:]
    return list(zip(groups[starts].tolist(), starts.tolist(), stops.tolist(), strict=True))
