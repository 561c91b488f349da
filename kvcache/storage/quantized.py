"""Quantized buffers: encoded on ``put`` and decoded on ``get``.

Each part of the format has a plain buffer of its own (see ``kvcache.StorageFormat``). The format encodes and
decodes: through the backend if that supports it (``ml.SupportsKVStorage``), else with protocol operations
only, so that every backend with compute supports it, in every attention cache.
"""

from __future__ import annotations

import copy

import ml
from kvcache.cache import StorageFormat
from kvcache.storage.buffer import Buffer, Cells
from kvcache.storage.formats import Rotated


class QuantizedBuffer:
    """As ``kvcache.storage.buffer.Buffer``, stored in the parts of a format."""

    __slots__ = ("activations", "cells", "coded_dim", "dim", "format", "heads", "parts")

    def __init__(
        self,
        ctx: ml.Context,
        stored: StorageFormat,
        shape: tuple[int, int, int],
        order: tuple[int, int, int],
        activations: ml.DType,
    ) -> None:
        self.cells, self.heads, self.dim = cells, heads, dim = shape
        self.coded_dim = dim
        """The numbers of a head that are stored together, of which the first ``dim`` are read."""
        self.format, self.activations = stored, activations
        widths = stored.parts(dim, activations)
        self.parts = [Buffer(ctx, dtype, cells, heads, width, order) for width, dtype in widths]

    @property
    def part_count(self) -> int:
        """The number of tensors that ``read_stored`` returns."""
        return len(self.parts)

    def narrowed(self, dim: int) -> QuantizedBuffer:
        """The first ``dim`` numbers of each head, over the same parts."""
        narrow = copy.copy(self)
        narrow.dim = dim
        return narrow

    @property
    def as_stored(self) -> QuantizedBuffer:
        """A view without rotating back, if the format rotates heads; otherwise itself."""
        if not isinstance(self.format, Rotated):
            return self
        codes = copy.copy(self)
        codes.format, codes.dim = self.format.inner, self.coded_dim
        return codes

    def turn(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """Rotate x (..., dim) as the stored heads are rotated, or back."""
        return self.format.turn(ctx, x) if isinstance(self.format, Rotated) else x

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def blank(self, ctx: ml.Context, cells: Cells, count: int) -> None:
        for part in self.parts:
            part.blank(ctx, cells, count)

    def read(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        """Cells ``[start, start + count)``, decoded: (count, heads, dim)."""
        return self._decode(ctx, [part.read(ctx, start, count) for part in self.parts])

    def read_permuted(self, ctx: ml.Context, start: int, count: int) -> ml.Tensor:
        return self.read(ctx, start, count).permute(ctx, 1, 2, 0)

    def read_batch(
        self, ctx: ml.Context, start: int, step: int, batch: int, count: int, heads_first: bool = False
    ) -> ml.Tensor:
        read = [part.read_batch(ctx, start, step, batch, count, heads_first) for part in self.parts]
        return self._decode(ctx, read, heads_first)

    def gather_batch(
        self, ctx: ml.Context, cells: ml.Tensor, batch: int, count: int, heads_first: bool = False
    ) -> ml.Tensor:
        read = [part.gather_batch(ctx, cells, batch, count, heads_first) for part in self.parts]
        return self._decode(ctx, read, heads_first)

    def gather(self, ctx: ml.Context, cells: ml.Tensor) -> ml.Tensor:
        return self._decode(ctx, [part.gather(ctx, cells) for part in self.parts])

    def decode(self, ctx: ml.Context, parts: list[ml.Tensor]) -> ml.Tensor:
        """The numbers (..., dim) that parts (..., width) encode."""
        values = self.format.decode(ctx, parts, self.coded_dim)
        if self.dim != self.coded_dim:
            values = values.slice(ctx, len(values.shape) - 1, 0, self.dim)
        return values if values.dtype is self.activations else values.cast(ctx, self.activations)

    def write(self, ctx: ml.Context, cells: Cells, source: ml.Tensor) -> ml.Tensor:
        first, *rest = zip(self.parts, self.format.encode(ctx, source), strict=True)
        for part, new in rest:
            ctx.forward(part.write(ctx, cells, new))
        return first[0].write(ctx, cells, first[1])

    def read_stored(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ...]:
        """Copies of the parts (count, heads, width), for ``write_stored``."""
        return tuple(tensor for part in self.parts for tensor in part.read_stored(ctx, cells, count))

    def write_stored(self, ctx: ml.Context, cells: Cells, tensors: tuple[ml.Tensor, ...]) -> None:
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.write_stored(ctx, cells, (tensor,))

    def stored_views(self, ctx: ml.Context, start: int, count: int) -> tuple[ml.Tensor, ...]:
        return tuple(part.read(ctx, start, count) for part in self.parts)

    def _decode(self, ctx: ml.Context, parts: list[ml.Tensor], heads_first: bool = False) -> ml.Tensor:
        """Decode parts (..., cells, heads, width), or heads first, keeping their axis order in memory."""
        if (self.parts[0].order[0] == 1) == heads_first:
            return self.decode(ctx, parts)
        axes = [*range(len(parts[0].shape))]
        axes[-3], axes[-2] = axes[-2], axes[-3]
        return self.decode(ctx, [part.permute(ctx, *axes) for part in parts]).permute(ctx, *axes)
