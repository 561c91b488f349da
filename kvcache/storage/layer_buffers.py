"""K, V and extras of one layer, plain or quantized, and how a pass reads and writes them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import numpy as np

import ml
from kvcache.cache import InvalidRangeError
from kvcache.storage.buffer import Buffer, Cells
from kvcache.storage.formats import CacheFormat
from kvcache.storage.layer_shape import LayerShape
from kvcache.storage.quantized import QuantizedBuffer


class LayerBuffers:
    """K and V of one layer, each in its format, and extras, allocated at the first ``put`` for all cells.

    If values are the first numbers of the keys, ``value`` reads them there. Extras are stored in plain
    buffers with one head, each in its own dtype.
    """

    __slots__ = (
        "absent", "activations", "bytes_per_cell", "cells", "doubted", "extra", "key", "nbytes",
        "permuted_v", "places", "read_dtype", "rotated", "row_store", "shape", "stamp", "store", "stored",
        "value", "whole",
    )  # fmt: skip

    def __init__(
        self,
        ctx: ml.Context,
        stored: CacheFormat,
        config: ml.CacheConfig,
        cells: int,
        shape: LayerShape,
        activations: ml.DType,
    ) -> None:
        """Unless K and V are plain numbers of one dtype, both are read back as ``activations``."""
        self.permuted_v = config.permuted_v
        self.activations, self.cells = activations, cells
        self.shape = shape
        self.key: Buffer | QuantizedBuffer
        self.value: Buffer | QuantizedBuffer
        self._allocate(ctx, stored, config)
        key, value, plain = shape.key, shape.value, stored.plain
        self.extra = {one.name: Buffer(ctx, one.dtype, cells, 1, one.size, (0, 1, 2)) for one in shape.extra}
        """The extras by name, each with one head that has all numbers of a token."""
        self.stored = (self.key, *(() if shape.is_latent else (self.value,)), *self.extra.values())
        """Everything that is written: K, V if it is stored separately, and the extras."""
        self.nbytes: int = sum(buffer.nbytes for buffer in self.stored)
        self.read_dtype = activations if plain is None else plain
        """The dtype of what ``read`` returns."""
        numbers = key[0] * key[1] + (0 if shape.is_latent else value[0] * value[1])
        self.bytes_per_cell = max(1, numbers * self.read_dtype.itemsize)
        """Bytes per cell of what ``read`` returns, K and V together."""
        self.stamp = 0
        """``ForwardPass.stamp`` of the last pass that was put here, plus 1 (odd) if it has been read since.

        0: the content was restored.
        """
        self.doubted = False
        """Whether a refused ``put`` would have been the first into these buffers."""
        self.absent: np.ndarray | None = None
        """For each cell, the number (``CellTable.taken``) of a token that other layers store and this one
        lacks.

        None: there is no such token.
        """
        self.whole = _whole_of(ctx, self.key, self.value)
        """Views of all of K and all of V, in parts (cells, heads, ...)."""
        self.places = frozenset(id(_storage_of(part)) for half in self.whole for part in half)
        """The storages of K and V."""
        self.rotated = self._as_rotated(ctx)
        """These buffers as ``attend`` reads them if a format rotates heads: without rotating back. Else
        None.
        """
        self.store = self._find_store(ctx)
        """The backend's own store for a run of cells, which is tried first; None if it has none."""
        self.row_store = self.store if isinstance(self.store, ml.KVRowStore) else None
        """The same store, if it also writes scattered cells."""

    def _allocate(self, ctx: ml.Context, stored: CacheFormat, config: ml.CacheConfig) -> None:
        """K, and V if it is stored separately."""
        order = (1, 0, 2) if config.layout == ml.Layout.HEAD_MAJOR else (0, 1, 2)
        (key, value), cells = (self.shape.key, self.shape.value), self.cells
        plain, latent = stored.plain, self.shape.is_latent
        if plain is None:
            stored.check(
                key[1], None if latent else value[1], self.activations
            )  # before anything is allocated
            self.key = QuantizedBuffer(ctx, stored.key, (cells, *key), order, self.activations)
        else:
            self.key = Buffer(ctx, plain, cells, *key, order)
        if latent:
            self.value = self.key.narrowed(value[1])
        elif plain is None:
            self.value = QuantizedBuffer(ctx, stored.value, (cells, *value), order, self.activations)
        else:
            self.value = Buffer(ctx, plain, cells, *value, (1, 2, 0) if self.permuted_v else order)

    def _as_rotated(self, ctx: ml.Context) -> LayerBuffers | None:
        if not isinstance(self.key, QuantizedBuffer) or not isinstance(self.value, QuantizedBuffer):
            return None
        key, value = self.key.as_stored, self.value.as_stored
        if key is self.key and value is self.value:
            return None
        rotated = copy.copy(self)
        rotated.key, rotated.value, rotated.rotated = key, value, None
        rotated.whole = _whole_of(ctx, key, value)
        rotated.store = rotated.row_store = None
        return rotated

    def _find_store(self, ctx: ml.Context) -> ml.KVStore | None:
        key, value, backend = self.key, self.value, getattr(ctx, "backend", None)
        if self.shape.is_latent or self.extra:
            return None
        if not isinstance(backend, ml.SupportsKVStorage):
            return None
        if self.is_quantized:
            return backend.kv_store(*self.whole, self.formats)
        if self.permuted_v or not isinstance(key, Buffer) or not isinstance(value, Buffer):
            return None
        return backend.kv_store(key.read(ctx, 0, key.cells), value.read(ctx, 0, value.cells))

    def touch(self, ctx: ml.Context) -> None:
        """Write zeros into new buffers, so that the operating system commits their memory now.

        Otherwise the first write to each memory page would pay for it during decoding.
        """
        for buffer in self.stored:
            if isinstance(buffer, Buffer):
                buffer.touch(ctx)

    def blank(self, ctx: ml.Context, cells: Cells, count: int) -> None:
        """Write zeros."""
        if isinstance(cells, int) and self.store is not None and not self.is_quantized:
            key, value = self.shape.key, self.shape.value
            zeros = ctx.zeros((count, *key), self.read_dtype)
            beside = zeros if key == value else ctx.zeros((count, *value), self.read_dtype)
            if self.store.write(ctx, cells, count, zeros, beside):
                return
        for buffer in self.stored:
            buffer.blank(ctx, cells, count)

    def note_read(self) -> None:
        """Record that the last ``put`` has been read, so that it may not be replaced in the same pass."""
        if self.stamp:
            self.stamp |= 1

    def fits(self, tokens: int, key: tuple[int, ...], value: tuple[int, ...]) -> bool:
        """Whether K and V of these shapes are everything that the layer stores of ``tokens`` tokens."""
        own = self.shape
        return (
            not own.is_latent
            and not own.extra
            and key == (tokens, *own.key)
            and value == (tokens, *own.value)
        )

    def check(self, layer: int, shape: LayerShape, tokens: int) -> None:
        """Raise InvalidRangeError unless ``shape``, of ``tokens`` tokens, is that of the layer."""
        if shape != self.shape:
            self.doubted = not self.stamp
            raise InvalidRangeError(f"put: {shape.told(tokens)} in layer {layer}, which stores {self.shape}")

    def lack(self, taken: np.ndarray, cells: slice | np.ndarray) -> None:
        """Record that the tokens in ``cells``, with the numbers ``taken``, were not put here."""
        if self.absent is None:
            self.absent = np.zeros_like(taken)
        self.absent[cells] = taken[cells]

    def lacks(self, taken: np.ndarray, cells: np.ndarray) -> np.ndarray | None:
        """Which of the tokens in ``cells`` were not put here; None if all were."""
        if self.absent is None:
            return None
        lacking = self.absent[cells] == taken[cells]
        return lacking if lacking.any() else None

    def apart(self, ctx: ml.Context, new: Sequence[ml.Tensor]) -> list[ml.Tensor]:
        """``new``, with copies of tensors that alias K or V and would change during the write."""
        return [one.contiguous(ctx) if id(_storage_of(one)) in self.places else one for one in new]

    def write(self, ctx: ml.Context, cells: Cells, new: Sequence[ml.Tensor]) -> None:
        """Store tensors (count, heads, dim) in the order of ``stored``; further stored tensors are
        unchanged.
        """
        rows = self.row_store if len(new) == 2 else None
        if rows is not None and not isinstance(cells, int) and rows.write_rows(ctx, cells, *new):
            return
        # No ctx.forward: writes are seen in program order without it.
        for buffer, tensor in zip(self.stored, new, strict=False):
            buffer.write(ctx, cells, tensor)

    def read(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V as (count, heads, dim)."""
        if isinstance(cells, int):
            views = None if self.store is None else self.store.read(ctx, cells, count)
            if views is not None:
                return views
            key = self.key.read(ctx, cells, count)
            return key, self._part(ctx, key) if self.shape.is_latent else self.value.read(ctx, cells, count)
        key = self.key.gather(ctx, cells)
        return key, self._part(ctx, key) if self.shape.is_latent else self.value.gather(ctx, cells)

    def read_extra(self, ctx: ml.Context, name: str, cells: Cells, count: int) -> ml.Tensor:
        """An extra as (count, *shape)."""
        buffer = self.extra[name]
        extra = buffer.read(ctx, cells, count) if isinstance(cells, int) else buffer.gather(ctx, cells)
        (shape,) = (one.shape for one in self.shape.extra if one.name == name)
        return extra.reshape(ctx, count, *shape)

    def _part(self, ctx: ml.Context, key: ml.Tensor) -> ml.Tensor:
        return key.slice(ctx, len(key.shape) - 1, 0, self.value.dim)

    @property
    def is_quantized(self) -> bool:
        """Whether reading decodes into new tensors."""
        return isinstance(self.key, QuantizedBuffer)

    @property
    def formats(self) -> tuple[str, str]:
        """The names of the formats of K and V."""
        key, value = (part.format.name if isinstance(part, QuantizedBuffer) else part.tensor.dtype.name
                      for part in (self.key, self.value))  # fmt: skip
        return key, value

    @property
    def parts(self) -> list[Buffer]:
        """The buffers of the parts of K in its format, then of V if it is stored separately."""
        parts: list[Buffer] = []
        for half in (self.key,) if self.shape.is_latent else (self.key, self.value):
            parts += half.parts if isinstance(half, QuantizedBuffer) else [half]
        return parts

    def read_batch(
        self, ctx: ml.Context, start: int, step: int, batch: int, count: int, heads_first: bool = False
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V of runs at even distances, (batch, count, heads, dim): see ``Buffer.read_batch``."""
        key = self.key.read_batch(ctx, start, step, batch, count, heads_first)
        if self.shape.is_latent:
            return key, self._part(ctx, key)
        return key, self.value.read_batch(ctx, start, step, batch, count, heads_first)

    def gather_batch(
        self, ctx: ml.Context, cells: ml.Tensor, batch: int, count: int, heads_first: bool = False
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V of scattered cells, in the shapes of ``Buffer.read_batch``."""
        key = self.key.gather_batch(ctx, cells, batch, count, heads_first)
        if self.shape.is_latent:
            return key, self._part(ctx, key)
        return key, self.value.gather_batch(ctx, cells, batch, count, heads_first)

    def read_as_configured(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ml.Tensor]:
        """As ``read``, with values as (heads, dim, count) if the configuration has ``permuted_v``."""
        if not self.permuted_v:
            return self.read(ctx, cells, count)
        if isinstance(cells, int):
            return self.key.read(ctx, cells, count), self.value.read_permuted(ctx, cells, count)
        return self.key.gather(ctx, cells), self.value.gather(ctx, cells).permute(ctx, 1, 2, 0)

    def read_stored(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ...]:
        """Copies of all parts in the order of ``stored``, (count, heads, ...) each."""
        return tuple(part for one in self.stored for part in one.read_stored(ctx, cells, count))

    def write_stored(self, ctx: ml.Context, cells: Cells, parts: tuple[ml.Tensor, ...]) -> None:
        """Write the result of ``read_stored`` into other cells, or into those of another cache."""
        rest = iter(parts)
        for one in self.stored:
            one.write_stored(ctx, cells, tuple(itertools.islice(rest, one.part_count)))

    def stored_views(self, ctx: ml.Context, start: int, count: int) -> tuple[ml.Tensor, ...]:
        """Views of a run of cells, in the parts of ``read_stored``."""
        return tuple(part for one in self.stored for part in one.stored_views(ctx, start, count))


def _storage_of(tensor: ml.Tensor) -> object:
    """An object that all views of the same memory share, if the backend has one."""
    return getattr(tensor, "storage", tensor)


def _whole_of(
    ctx: ml.Context, *halves: Buffer | QuantizedBuffer
) -> tuple[tuple[ml.Tensor, ...], tuple[ml.Tensor, ...]]:
    key, value = (half.stored_views(ctx, 0, half.cells) for half in halves)
    return key, value
