"""Large masks, made where the backend keeps its tensors: what is filled is not written by the host first.

A mask of 512 tokens over 32k cells is 64 MiB, of which all but a triangle at its right edge is one
value. Here the one value comes from ``zeros`` or ``full``, and the host writes the triangle::

    0 0 0 0 0 0 0 | 0 - - -
    0 0 0 0 0 0 0 | 0 0 - -      what every query sees, and the rim that some of them see
    0 0 0 0 0 0 0 | 0 0 0 -
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import ml
from kvcache.attention.read_plan import HIDDEN, LowerBound, ReadPlan, sees_all, unmask, visible

__all__ = ["HOST_LIMIT", "KEEP_LIMIT", "KeptMask", "build_mask", "seen_mask"]

HOST_LIMIT = 1 << 20
"""Bytes (as F32) of a mask that is still built on the host, in one piece."""
KEEP_LIMIT = 1 << 18
"""Bytes (as F32) of a decoding mask from which on it is kept for the next step."""
_SPARE = 256
"""Columns that a kept mask may grow by."""


@dataclass(slots=True)
class KeptMask:
    """The mask of sequences that decode together, from one step to the next.

    Each step shows each of them one cell more: only those elements are written, whatever the length.
    """

    tensor: ml.Tensor
    """(rows, width), its first columns those of the history."""
    start: int
    sequences: list[int]
    columns: list[int]
    sizes: list[int]
    rows: list[int]

    @classmethod
    def build(cls, ctx: ml.Context, reading: ReadPlan, rows: int, dtype: ml.DType) -> KeptMask | None:
        """None where the mask is small, or says more than that each token sees all of its sequence."""
        if len(reading.groups) < 2 or rows * reading.length * 4 <= KEEP_LIMIT or reading.index is not None:
            return None
        columns = _decoding(reading)
        if columns is None:
            return None
        width = reading.length + _SPARE
        tensor = ctx.full((rows, width), -np.inf, dtype)
        seen = ctx.zeros((1, 1), dtype)
        sizes = [len(row) for row in reading.rows]
        places = [group.first_token for group in reading.groups]
        for row, column, size in zip(places, columns, sizes, strict=True):
            _fill(ctx, tensor, seen, (row, row + 1), (column, column + size))
        return cls(tensor, reading.start, [group.seq for group in reading.groups], columns, sizes, places)

    def follow(self, ctx: ml.Context, reading: ReadPlan) -> bool:
        """Show each sequence its newest cell; False, and nothing changed, where more than that is to do."""
        sizes = [len(row) for row in reading.rows]
        if (
            reading.index is not None
            or reading.start != self.start
            or reading.length > self.tensor.shape[1]
            or [group.seq for group in reading.groups] != self.sequences
            or any(size != before + 1 for size, before in zip(sizes, self.sizes, strict=True))
            or _decoding(reading) != self.columns
            or [group.first_token for group in reading.groups] != self.rows
        ):
            return False
        rows, width = self.tensor.shape
        places = zip(self.rows, self.columns, self.sizes, strict=True)
        newest = [row * width + column + size for row, column, size in places]
        flat = self.tensor.view(ctx, 0, (rows * width, 1))
        flat.set_rows(ctx, ctx.zeros((len(newest), 1), self.tensor.dtype), newest)
        self.sizes = sizes
        return True

    def shown(self, ctx: ml.Context, length: int) -> ml.Tensor:
        """The mask over the first ``length`` columns, a view."""
        return self.tensor.slice(ctx, 1, 0, length)


def _decoding(reading: ReadPlan) -> list[int] | None:
    """Where each row's run begins, if each group is one token that sees all of its row, and no more."""
    found = []
    for group, row, column in zip(reading.groups, reading.rows, reading.columns, strict=True):
        if not isinstance(column, int) or not sees_all(group, row, None):
            return None
        found.append(column)
    return found


@dataclass(slots=True)
class _Part:
    """Rows ``[row, row + len(first))`` of a mask see the columns ``[first[i], stop[i])``."""

    row: int
    first: np.ndarray
    stop: np.ndarray

    def everyone(self) -> tuple[int, int]:
        """The columns that all of these rows see; (n, n) where there are none."""
        low, high = int(self.first.max()), int(self.stop.min())
        return (low, high) if low < high else (low, low)

    def anyone(self) -> tuple[int, int]:
        return int(self.first.min()), int(self.stop.max())


def build_mask(
    ctx: ml.Context,
    reading: ReadPlan,
    shape: tuple[int, int],
    lower: LowerBound | None,
    lifted: frozenset[int],
    dtype: ml.DType,
) -> ml.Tensor | None:
    """The mask of ``reading.mask``, made on the backend.

    None where it is small, or where the rows or the columns of a sequence lie scattered.
    """
    rows, length = shape
    if rows * length * 4 <= HOST_LIMIT:
        return None
    parts = []
    for group, row, column in zip(reading.groups, reading.rows, reading.columns, strict=True):
        if not isinstance(group.rows, slice) or not isinstance(column, int):
            return None
        first, stop = visible(group, row, lower, lifted)
        parts.append(_Part(group.rows.start, first + column, stop + column))
    return _of_parts(ctx, parts, shape, dtype)


def seen_mask(
    ctx: ml.Context, seen: np.ndarray, rows: int, length: int, dtype: ml.DType
) -> ml.Tensor | np.ndarray:
    """(batch, rows, length): query i sees ``[seen[0, b, i], seen[1, b, i])`` of batch b; more rows none.

    On the host where it is small.
    """
    _, batch, queries = seen.shape
    if batch == 1 and rows * length * 4 > HOST_LIMIT:
        mask = _of_parts(ctx, [_Part(0, seen[0, 0], seen[1, 0])], (rows, length), dtype)
        return mask.view(ctx, 0, (1, rows, length))
    host = np.full((batch, rows, length), HIDDEN, dtype=np.float32)
    if queries == 1:
        columns = np.arange(length)
        host[:, 0][(columns >= seen[0]) & (columns < seen[1])] = 0
    else:
        for own, begin, end in zip(host, *seen, strict=True):
            unmask(own[:queries], begin, end)
    return host


def _of_parts(ctx: ml.Context, parts: list[_Part], shape: tuple[int, int], dtype: ml.DType) -> ml.Tensor:
    low, high = parts[0].everyone()
    if len(parts) == 1 and parts[0].row == 0 and 2 * (high - low) > shape[1]:
        return _mostly_seen(ctx, parts[0], shape, dtype)
    mask = ctx.full(shape, -np.inf, dtype)
    seen = ctx.zeros((1, 1), dtype)
    for part in parts:
        _show(ctx, mask, seen, part, dtype)
    return mask


def _mostly_seen(ctx: ml.Context, part: _Part, shape: tuple[int, int], dtype: ml.DType) -> ml.Tensor:
    """Zeros, with what is hidden written over them."""
    rows, length = shape
    count = len(part.first)
    mask = ctx.zeros(shape, dtype)
    hidden = ctx.full((1, 1), -np.inf, dtype)
    low, high = part.anyone()
    _fill(ctx, mask, hidden, (0, count), (0, low))
    _fill(ctx, mask, hidden, (0, count), (high, length))
    _fill(ctx, mask, hidden, (count, rows), (0, length))
    _rims(ctx, mask, part, dtype)
    return mask


def _show(ctx: ml.Context, mask: ml.Tensor, seen: ml.Tensor, part: _Part, dtype: ml.DType) -> None:
    """What a part sees, written over what was hidden."""
    _fill(ctx, mask, seen, (part.row, part.row + len(part.first)), part.everyone())
    _rims(ctx, mask, part, dtype)


def _rims(ctx: ml.Context, mask: ml.Tensor, part: _Part, dtype: ml.DType) -> None:
    """The columns that some rows see and others do not."""
    (low, high), (inner, outer) = part.anyone(), part.everyone()
    for begin, end in ((low, inner), (outer, high)):
        if begin >= end:
            continue
        columns = np.arange(begin, end)
        block = np.full((len(part.first), end - begin), HIDDEN, dtype=np.float32)
        block[(columns >= part.first[:, None]) & (columns < part.stop[:, None])] = 0
        rim = ctx.from_numpy(block, dtype)
        rim.copy(ctx, _block(ctx, mask, (part.row, part.row + len(part.first)), (begin, end)))


def _fill(
    ctx: ml.Context, mask: ml.Tensor, one: ml.Tensor, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Write the element of ``one`` (1, 1) all over a block."""
    size = rows[1] - rows[0], columns[1] - columns[0]
    if size[0] > 0 and size[1] > 0:
        one.view(ctx, 0, size, (0, 0)).copy(ctx, _block(ctx, mask, rows, columns))


def _block(ctx: ml.Context, mask: ml.Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> ml.Tensor:
    width = mask.shape[1]
    size = rows[1] - rows[0], columns[1] - columns[0]
    return mask.view(ctx, rows[0] * width + columns[0], size, (width, 1))
