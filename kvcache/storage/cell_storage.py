"""What an attention cache stores, and where: who holds which cell, and the tensors of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import ml
from kvcache.cache import InvalidRangeError
from kvcache.formats import CacheFormat
from kvcache.storage.cell_table import CellTable
from kvcache.storage.exact_slots import ExactSlots
from kvcache.storage.layer_buffers import LayerBuffers

__all__ = ["CellStorage", "exact_slots"]


def exact_slots(stored: CacheFormat, cells: int, max_sequences: int, max_batch: int) -> ExactSlots | None:
    """The slots of a residual window: for what each sequence retains, and a batch besides; None: none."""
    last, first = stored.residual_length, stored.sink_tokens
    if not stored.is_windowed:
        return None
    return ExactSlots(cells, min(cells, max_sequences * (last + first) + max_batch), last, first)


@dataclass(frozen=True, slots=True)
class CellStorage:
    """The cell table of a cache and its K/V buffers, from ``init`` to ``close``."""

    backend: ml.Backend
    dtype: CacheFormat
    config: ml.CacheConfig
    table: CellTable
    buffers: dict[int, LayerBuffers] = field(default_factory=dict)
    """By layer, from its first ``put`` on."""

    def shapes_of(
        self, parts: Sequence[ml.Tensor], tokens: int, activations: ml.DType
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(tokens, heads, dim) of K and of V whose parts these are, K's first, (tokens, heads, width) each.

        Raises InvalidRangeError for parts that the formats do not make of ``activations``.
        """
        shapes, stored = [part.shape for part in parts], self.dtype
        if any(len(shape) != 3 or shape[:2] != (tokens, shapes[0][1]) for shape in shapes):
            raise InvalidRangeError(f"put_stored: parts {shapes}; each is ({tokens}, kv_heads, width)")
        key, value = stored.dims([shape[2] for shape in shapes], activations)
        made = (*stored.key.parts(key, activations), *stored.value.parts(value, activations))
        if [part.dtype for part in parts] != [dtype for _, dtype in made]:
            raise InvalidRangeError(
                f"put_stored: parts of {[part.dtype.name for part in parts]}; {stored.name} of "
                f"{activations.name} has {[dtype.name for _, dtype in made]}"
            )
        return (*shapes[0][:2], key), (*shapes[0][:2], value)

    def allocate(
        self,
        ctx: ml.Context,
        layer: int,
        key: tuple[int, ...],
        value: tuple[int, ...],
        activations: ml.DType,
    ) -> LayerBuffers:
        """Buffers for keys and values (any, heads, dim), put as ``activations``; not yet in ``buffers``."""
        place, cells, exact = ctx.layer(layer), self.table.cells, self.table.exact
        shapes, slots = ((key[1], key[2]), (value[1], value[2])), 0 if exact is None else exact.slots
        return LayerBuffers(place, self.dtype, self.config, cells, *shapes, activations, slots)
