"""Masks of a pass: ``History.mask`` writes masks of up to 1 MiB on the host; larger ones are made here.

They are made on the device. A mask of 512 tokens over 32k cells is 64 MiB, in which everything but a triangle
at the right edge has one value. ``full`` fills in that value, and the host writes only the triangle, which is
uploaded with the other data of the pass::

    0 0 0 0 0 0 0 | 0 - - -
    0 0 0 0 0 0 0 | 0 0 - -      what every query sees, and the rim that some of them see
    0 0 0 0 0 0 0 | 0 0 0 -
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

import ml
from kvcache.attention.history import (
    HIDDEN,
    History,
    LowerBound,
    kept_entries,
    sees_all,
    unmask,
    visible,
)
from kvcache.storage.device_copies import HostArray, HostArrays, OnDevices, device_of

HOST_LIMIT = 1 << 20
"""The largest mask, in bytes as F32, that is built on the host in one piece."""
KEEP_LIMIT = 1 << 18
"""The smallest decoding mask, in bytes as F32, that is kept for the next step."""
_SPARE = 256
"""The number of columns that a kept mask may grow by."""


class KeptMask:
    """The mask of sequences that decode together, kept from step to step on each device that uses it.

    Each step reveals one more cell to each sequence: only these elements are written, whatever the length.
    """

    def __init__(self, reading: History, columns: list[int], rows: int, dtype: ml.DType) -> None:
        self.start, self.columns, self._dtype = reading.start, columns, dtype
        self._shape = rows, reading.length + _SPARE
        self._sequences = [group.seq for group in reading.groups]
        self._rows = [group.first_token for group in reading.groups]
        self._sizes = [len(row) for row in reading.rows]
        self._step = 0
        self._newest: HostArray | None = None
        """The elements that this step reveals, as indices into the flattened mask."""
        self._near: dict[int, tuple[int, ml.Tensor]] = {}
        """For each device, the step and the mask (rows, width), whose first columns are those of the history.
        """

    @classmethod
    def build(cls, reading: History, rows: int, dtype: ml.DType) -> KeptMask | None:
        """None if the mask is small, or if some token does not see all of its sequence."""
        if len(reading.groups) < 2 or rows * reading.length * 4 <= KEEP_LIMIT or reading.index is not None:
            return None
        columns = _decoding(reading)
        return None if columns is None else cls(reading, columns, rows, dtype)

    def follow(self, host: HostArrays, reading: History) -> bool:
        """Reveal its newest cell to each sequence; False, without a change, if more than that has changed."""
        sizes = [len(row) for row in reading.rows]
        width = self._shape[1]
        if (
            reading.index is not None
            or reading.start != self.start
            or reading.length > width
            or [group.seq for group in reading.groups] != self._sequences
            or any(size != before + 1 for size, before in zip(sizes, self._sizes, strict=True))
            or _decoding(reading) != self.columns
            or [group.first_token for group in reading.groups] != self._rows
        ):
            return False
        places = zip(self._rows, self.columns, self._sizes, strict=True)
        newest = np.array([row * width + column + size for row, column, size in places])
        self._newest, self._sizes, self._step = host.add(newest), sizes, self._step + 1
        return True

    def shown(self, ctx: ml.Context, length: int) -> ml.Tensor:
        """The mask over the first ``length`` columns, a view."""
        step, tensor = self._near.get(device_of(ctx), (-1, None))
        if tensor is None or step < self._step - 1:
            tensor = self._made(ctx)
        elif step < self._step and self._newest is not None:
            flat = tensor.view(ctx, 0, (tensor.shape[0] * tensor.shape[1], 1))
            flat.set_rows(ctx, ctx.zeros((len(self._rows), 1), self._dtype), self._newest.on(ctx))
        self._near[device_of(ctx)] = self._step, tensor
        return tensor.slice(ctx, 1, 0, length)

    def _made(self, ctx: ml.Context) -> ml.Tensor:
        tensor = ctx.full(self._shape, -np.inf, self._dtype)
        seen = ctx.zeros((1, 1), self._dtype)
        for row, column, size in zip(self._rows, self.columns, self._sizes, strict=True):
            _fill(ctx, tensor, seen, (row, row + 1), (column, column + size))
        return tensor


def _decoding(reading: History) -> list[int] | None:
    """The first cell of each row's run, if each group is one token that sees exactly its row."""
    columns = []
    for group, row, column in zip(reading.groups, reading.rows, reading.columns, strict=True):
        if not isinstance(column, int) or not sees_all(group, row, None):
            return None
        columns.append(column)
    return columns


@dataclass(slots=True)
class _Part:
    """Rows ``[row, row + len(first))`` of a mask see the columns ``[first[i], stop[i])``."""

    row: int
    first: np.ndarray
    stop: np.ndarray

    @property
    def rows(self) -> tuple[int, int]:
        return self.row, self.row + len(self.first)

    def everyone(self) -> tuple[int, int]:
        """The columns that all of these rows see; (n, n) if there are none."""
        low, high = int(self.first.max()), int(self.stop.min())
        return (low, high) if low < high else (low, low)

    def anyone(self) -> tuple[int, int]:
        return int(self.first.min()), int(self.stop.max())


def build_mask(
    host: HostArrays,
    reading: History,
    shape: tuple[int, int],
    lower: LowerBound | None,
    lifted: frozenset[int],
    dtype: ml.DType,
) -> OnDevices | None:
    """The mask of ``reading.mask``, made on the backend.

    None if it is small, or if the rows or columns of a sequence are scattered.
    """
    rows, length = shape
    if rows * length * 4 <= HOST_LIMIT:
        return None
    parts = []
    for group, row, column in zip(reading.groups, reading.rows, reading.columns, strict=True):
        if not isinstance(group.batch_indices, slice) or not isinstance(column, int):
            return None
        first, stop = visible(group, row, lower, lifted)
        begin, kept = group.batch_indices.start, kept_entries(row, lower)
        late = int(np.count_nonzero(first == 0)) if kept else 0
        if late:  # these see contiguous columns
            parts.append(_Part(begin, first[:late] + column, stop[:late] + column))
        if late < len(first):
            parts.append(_Part(begin + late, first[late:] + column, stop[late:] + column))
            if kept:
                whole = np.full_like(first[late:], column)
                parts.append(_Part(begin + late, whole, whole + kept))
    return OnDevices(_Filled.of(host, parts, shape, dtype).made)


def seen_mask(
    host: HostArrays, seen: np.ndarray, rows: int, length: int, dtype: ml.DType
) -> OnDevices | HostArray:
    """(batch, rows, length): query i sees ``[seen[0, b, i], seen[1, b, i])`` of batch b; additional rows see
    none.

    A small mask is written by the host.
    """
    _, batch, queries = seen.shape
    if batch == 1 and rows * length * 4 > HOST_LIMIT:
        filled = _Filled.of(host, [_Part(0, seen[0, 0], seen[1, 0])], (rows, length), dtype)
        return OnDevices(lambda ctx: filled.made(ctx).view(ctx, 0, (1, rows, length)))
    mask = np.full((batch, rows, length), HIDDEN, dtype=np.float32)
    if queries == 1:
        columns = np.arange(length)
        mask[:, 0][(columns >= seen[0]) & (columns < seen[1])] = 0
    else:
        for own, begin, end in zip(mask, *seen, strict=True):
            unmask(own[:queries], begin, end)
    return host.add(mask, dtype)


_Block = tuple[tuple[int, int], tuple[int, int]]
"""The rows and columns of a block of a mask, as half-open ranges."""


@dataclass(slots=True)
class _Filled:
    """A mask of one value, with blocks of the other value, and the rims that the host wrote."""

    shape: tuple[int, int]
    dtype: ml.DType
    seen: bool
    """Whether the mask starts as visible, so that the blocks are hidden."""
    blocks: list[_Block]
    rims: list[tuple[HostArray, _Block]]

    @classmethod
    def of(cls, host: HostArrays, parts: list[_Part], shape: tuple[int, int], dtype: ml.DType) -> Self:
        (rows, length), part = shape, parts[0]
        low, high = part.everyone()
        rims = [
            (host.add(block, dtype), place) for part in parts for block, place in _rims(part)
        ]  # fmt: skip
        if len(parts) > 1 or part.row != 0 or 2 * (high - low) <= length:
            return cls(shape, dtype, False, [(part.rows, part.everyone()) for part in parts], rims)
        low, high = part.anyone()
        hidden = [(part.rows, (0, low)), (part.rows, (high, length)), ((part.rows[1], rows), (0, length))]
        return cls(shape, dtype, True, hidden, rims)

    def made(self, ctx: ml.Context) -> ml.Tensor:
        ground, other = (0.0, -np.inf) if self.seen else (-np.inf, 0.0)
        mask, one = ctx.full(self.shape, ground, self.dtype), ctx.full((1, 1), other, self.dtype)
        for block in self.blocks:
            _fill(ctx, mask, one, *block)
        for rim, block in self.rims:
            rim.on(ctx).copy(ctx, _block(ctx, mask, *block))
        return mask


def _rims(part: _Part) -> Iterator[tuple[np.ndarray, _Block]]:
    """The columns that some rows see and others do not."""
    (low, high), (inner, outer) = part.anyone(), part.everyone()
    for begin, end in ((low, inner), (outer, high)):
        if begin >= end:
            continue
        columns = np.arange(begin, end)
        block = np.full((len(part.first), end - begin), HIDDEN, dtype=np.float32)
        block[(columns >= part.first[:, None]) & (columns < part.stop[:, None])] = 0
        yield block, (part.rows, (begin, end))


def _fill(
    ctx: ml.Context, mask: ml.Tensor, one: ml.Tensor, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Fill a block with the element of ``one`` (1, 1)."""
    size = rows[1] - rows[0], columns[1] - columns[0]
    if size[0] > 0 and size[1] > 0:
        one.view(ctx, 0, size, (0, 0)).copy(ctx, _block(ctx, mask, rows, columns))


def _block(ctx: ml.Context, mask: ml.Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> ml.Tensor:
    width = mask.shape[1]
    size = rows[1] - rows[0], columns[1] - columns[0]
    return mask.view(ctx, rows[0] * width + columns[0], size, (width, 1))
