"""K and V of one layer, plain or quantized, and how a pass reads and writes them."""

from __future__ import annotations

import copy

import ml
from kvcache.cache import InvalidRangeError
from kvcache.formats import CacheFormat
from kvcache.storage.buffer import Buffer, Cells
from kvcache.storage.quantized import QuantizedBuffer

__all__ = ["LayerBuffers"]


class LayerBuffers:
    """K and V of one layer, each in its format, allocated at the first ``put`` for all cells at once."""

    __slots__ = (
        "_key_shape", "_value_shape", "activations", "bytes_per_cell", "cells", "exact", "key", "no_kernel",
        "permuted_v", "read_dtype", "rotated", "stamp", "store", "value",
    )  # fmt: skip

    def __init__(
        self,
        ctx: ml.Context,
        stored: CacheFormat,
        config: ml.CacheConfig,
        cells: int,
        key: tuple[int, int],
        value: tuple[int, int],
        activations: ml.DType,
        slots: int = 0,
    ) -> None:
        """``key`` and ``value`` are (heads, dim); where they are not plain numbers of one dtype, both are
        read back as ``activations``, and a residual window has ``slots``.
        """
        order = (1, 0, 2) if config.layout == ml.Layout.HEAD_MAJOR else (0, 1, 2)
        self.permuted_v = config.permuted_v
        self.activations, self.cells = activations, cells
        self._key_shape, self._value_shape = tuple(key), tuple(value)
        self.key: Buffer | QuantizedBuffer
        self.value: Buffer | QuantizedBuffer
        plain = stored.plain
        if plain is None:
            stored.nbytes(1, key[1], value[1], activations)  # refuses both before the first is allocated
            self.key = QuantizedBuffer(ctx, stored.key, cells, *key, order, activations)
            self.value = QuantizedBuffer(ctx, stored.value, cells, *value, order, activations)
        else:
            self.key = Buffer(ctx, plain, cells, *key, order)
            self.value = Buffer(ctx, plain, cells, *value, (1, 2, 0) if self.permuted_v else order)
        self.read_dtype = activations if plain is None else plain
        """Of what ``read`` gives."""
        numbers = key[0] * key[1] + value[0] * value[1]
        self.bytes_per_cell = max(1, numbers * self.read_dtype.itemsize)
        """Of what ``read`` gives, K and V together."""
        self.no_kernel = False
        """Whether the backend is known to have no kernel for ragged batches that reads these buffers."""
        self.exact: LayerBuffers | None = None
        """The slots of a residual window: plain, in the dtype of the activations."""
        if slots:
            self.exact = LayerBuffers(
                ctx, CacheFormat.of(activations), config, slots, key, value, activations
            )
        self.stamp = 0
        """``Forward.stamp`` of the pass that was last put here."""
        self.rotated = None if slots else self._as_rotated()
        """These buffers as ``attend`` reads them where a format rotates: without turning back. Else None.

        Slots hold keys that are not turned: beside them all are read back as they were.
        """
        self.store = self._find_store(ctx)
        """The backend's own way for a run of cells, asked first; None where it has none."""

    def _as_rotated(self) -> LayerBuffers | None:
        if not isinstance(self.key, QuantizedBuffer) or not isinstance(self.value, QuantizedBuffer):
            return None
        key, value = self.key.as_stored, self.value.as_stored
        if key is self.key and value is self.value:
            return None
        found = copy.copy(self)
        found.key, found.value, found.rotated = key, value, None
        return found

    def _find_store(self, ctx: ml.Context) -> ml.KVStore | None:
        key, value, backend = self.key, self.value, getattr(ctx, "backend", None)
        if self.is_quantized and isinstance(backend, ml.SupportsQuantizedStore):
            return backend.quantized_store(*self.stored_parts(ctx), self.formats)
        if self.permuted_v or not isinstance(key, Buffer) or not isinstance(value, Buffer):
            return None
        if not isinstance(backend, ml.SupportsKVStore):
            return None
        return backend.kv_store(key.read(ctx, 0, key.cells), value.read(ctx, 0, value.cells))

    @property
    def nbytes(self) -> int:
        return self.stored_nbytes + (0 if self.exact is None else self.exact.nbytes)

    @property
    def stored_nbytes(self) -> int:
        """Of what snapshots are made of: without the slots of a residual window."""
        return self.key.nbytes + self.value.nbytes

    def touch(self, ctx: ml.Context) -> None:
        """Write the zeros that new buffers hold, so that the system gives them their memory now.

        It may have promised it only, and the pages would then be found one by one while decoding.
        """
        for buffer in (self.key, self.value):
            if isinstance(buffer, Buffer):
                buffer.touch(ctx)
        if self.exact is not None:
            self.exact.touch(ctx)

    def blank(self, ctx: ml.Context, cells: Cells, count: int) -> None:
        """Write zeros into cells."""
        self.key.blank(ctx, cells, count)
        self.value.blank(ctx, cells, count)

    def check(self, layer: int, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        """Raise InvalidRangeError unless K and V of these shapes are what this layer stores."""
        if key[1:] != self._key_shape or value[1:] != self._value_shape:
            raise InvalidRangeError(
                f"put: key {key} and value {value} in layer {layer}, which stores (tokens, kv_heads, dim) of "
                f"{self._key_shape} and {self._value_shape}"
            )

    def write(self, ctx: ml.Context, cells: Cells, key: ml.Tensor, value: ml.Tensor) -> None:
        # No ctx.forward: writes are seen in program order without it.
        self.key.write(ctx, cells, key)
        self.value.write(ctx, cells, value)

    def read(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V as (count, heads, dim)."""
        if isinstance(cells, int):
            found = None if self.store is None else self.store.read(ctx, cells, count)
            if found is not None:
                return found
            return self.key.read(ctx, cells, count), self.value.read(ctx, cells, count)
        return self.key.gather(ctx, cells), self.value.gather(ctx, cells)

    @property
    def is_quantized(self) -> bool:
        """Whether what is read is made anew from what is stored."""
        return isinstance(self.key, QuantizedBuffer)

    @property
    def formats(self) -> tuple[str, str]:
        """The names of K's and V's."""
        key, value = (part.format.name if isinstance(part, QuantizedBuffer) else part.tensor.dtype.name
                      for part in (self.key, self.value))  # fmt: skip
        return key, value

    def stored_parts(self, ctx: ml.Context) -> tuple[tuple[ml.Tensor, ...], tuple[ml.Tensor, ...]]:
        """Where all of K lies, and all of V, in parts (cells, heads, ...)."""
        return self.key.stored_views(ctx, 0, self.cells), self.value.stored_views(ctx, 0, self.cells)

    def read_batch(
        self, ctx: ml.Context, start: int, step: int, batch: int, count: int
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V of runs at even distances, (batch, count, heads, dim): see :meth:`Buffer.read_batch`."""
        return (
            self.key.read_batch(ctx, start, step, batch, count),
            self.value.read_batch(ctx, start, step, batch, count),
        )

    def gather_batch(
        self, ctx: ml.Context, cells: ml.Tensor, batch: int, count: int
    ) -> tuple[ml.Tensor, ml.Tensor]:
        """K and V of scattered cells, (batch, count, heads, dim)."""
        key = self.key.gather_batch(ctx, cells, batch, count)
        return key, self.value.gather_batch(ctx, cells, batch, count)

    def read_as_configured(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ml.Tensor]:
        """The same, with values as (heads, dim, count) where ``permuted_v`` asks for it."""
        if not self.permuted_v:
            return self.read(ctx, cells, count)
        if isinstance(cells, int):
            return self.key.read(ctx, cells, count), self.value.read_permuted(ctx, cells, count)
        return self.key.gather(ctx, cells), self.value.gather(ctx, cells).permute(ctx, 1, 2, 0)

    def read_stored(self, ctx: ml.Context, cells: Cells, count: int) -> tuple[ml.Tensor, ...]:
        """Copies of the parts of K, and then those of V, (count, heads, ...) each."""
        return *self.key.read_stored(ctx, cells, count), *self.value.read_stored(ctx, cells, count)

    def write_stored(self, ctx: ml.Context, cells: Cells, found: tuple[ml.Tensor, ...]) -> None:
        """Write what ``read_stored`` gave, into other cells or another cache's."""
        own = len(self.key.parts) if isinstance(self.key, QuantizedBuffer) else 1
        self.key.write_stored(ctx, cells, found[:own])
        self.value.write_stored(ctx, cells, found[own:])

    def stored_views(self, ctx: ml.Context, start: int, count: int) -> tuple[ml.Tensor, ...]:
        """Where a run of cells lies, in the parts of ``read_stored``."""
        return *self.key.stored_views(ctx, start, count), *self.value.stored_views(ctx, start, count)
