"""Layers with an indexer, whose keys select what attention reads, besides K and V."""

from __future__ import annotations

import torch

from kvcache.integrations.transformers.kinds import Kind
from kvcache.integrations.transformers.layers import AttentionLayer
from kvcache.integrations.transformers.rows import BatchRows, untraced
from kvcache.integrations.transformers.stored import tokens_of

__all__ = ["IndexedLayer", "put_indexer_keys"]

_PLACES = "positions"


class IndexedLayer(AttentionLayer):
    """K and V of one layer, and the keys of the indexer that selects the tokens attended to. These keys
    (DeepSeek-AI, "DeepSeek-V3.2", 2025) have one head and use the cells of K and V. They form a separate
    layer of latents (``Plan.part``), since some models put them before K and V and others after. Positions
    with several axes are stored as their extras.
    """

    def __init__(self, rows: BatchRows, layer: int, kind: Kind) -> None:
        super().__init__(rows, layer, kind)
        self._part = rows.pool.plan.part(layer)
        self._brought: torch.Tensor | None = None
        """Positions (axes, rows or 1, new tokens) of a pass whose keys have not arrived yet."""

    @property
    def is_indexer_initialized(self) -> bool:
        return self.rows.seen[self._part] > 0

    @untraced
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store an indexer's keys (rows, new tokens, dim), before or after ``update``. Returns all stored
        keys, (rows, tokens, dim), which may be a view.
        """
        rows, part, kind, keys = self.rows, self._part, self.kind, indexer_key_states
        current = rows.enter(part, keys.shape[1], keys.shape[0], keys)
        put_indexer_keys(rows, part, kind, keys, self._brought)
        self._brought = None
        rows.reached(part)
        reading = current.readings.get(kind)
        if reading is None:
            reading = current.readings[kind] = rows.reading(kind, current.begin)
        return rows.pool.read(reading, part, keys, keys)[0][:, 0]

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """All keys (rows, tokens, dim) of the indexer; None before the first."""
        pair = self.rows.peek(self._part, self.kind)
        return None if pair is None else pair[0][:, 0]

    @property
    @untraced
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions (axes, rows, tokens) of all tokens, I64, as set by the model; None if it has set none.
        The model sets them at the beginning of a pass, those of new tokens last; they are stored with the
        keys.
        """
        if not self.is_indexer_initialized:
            return None
        rows, pool = self.rows, self.rows.pool
        reading = rows.reading(self.kind, rows.length)
        stored = reading.read_extra(pool.ctx.layer(self._part), self._part, _PLACES)
        if stored is None:
            return None
        like = pool.places.like(self._part).to(torch.int64)
        return pool.bridge.to_torch(stored, like)[:, : rows.seen[self._part]].permute(2, 0, 1)

    @indexer_position_ids.setter
    @untraced
    def indexer_position_ids(self, positions: torch.Tensor) -> None:
        self._brought = positions[..., self.rows.seen[self._part] :]


def put_indexer_keys(
    rows: BatchRows, part: int, kind: Kind, keys: torch.Tensor, positions: torch.Tensor | None = None
) -> None:
    """Store keys (rows, tokens, dim) with their positions in the current pass."""
    pool = rows.pool
    cache, ctx, bridge = pool.family.caches[kind], pool.place(part, keys), pool.bridge
    pool.check_dtype(part, keys)
    extra = {}
    if positions is not None:
        places = positions.expand(-1, keys.shape[0], -1).flatten(1).T
        extra[_PLACES] = bridge.to_backend(ctx, places.to(torch.int32))
    cache.set_layer(part)
    cache.put(ctx, bridge.to_backend(ctx, tokens_of(keys[:, None])), extra=extra)
