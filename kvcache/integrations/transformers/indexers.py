"""The keys of indexers, which choose what attention reads, between transformers and a cache."""

from __future__ import annotations

import torch

from kvcache.integrations.transformers.kinds import Kind
from kvcache.integrations.transformers.rows import BatchRows, untraced
from kvcache.integrations.transformers.stored import tokens_of

__all__ = ["Indexer"]

_PLACES = "positions"


class Indexer:
    """An indexer's keys (DeepSeek-AI, "DeepSeek-V3.2", 2025), one head, in the cells of its layer's K and V.

    They are a layer of latents of their own (``Plan.part``), since they come before K and V in some
    models and behind them in others. Positions that a model gives with several axes are extras of them.
    """

    def __init__(self, rows: BatchRows, layer: int, kind: Kind) -> None:
        self.rows, self.kind, self.part = rows, kind, rows.pool.plan.part(layer)
        self._brought: torch.Tensor | None = None
        """Positions (axes, rows or 1, new tokens) of a pass whose keys have not come yet."""

    @property
    def started(self) -> bool:
        """Whether there are keys."""
        return self.rows.seen[self.part] > 0

    @untraced
    def update(self, keys: torch.Tensor) -> torch.Tensor:
        """Store keys (rows, new tokens, dim); all that are held (rows, tokens, dim), which may be a view."""
        rows, part, kind = self.rows, self.part, self.kind
        current = rows.enter(part, keys.shape[1], keys.shape[0], keys)
        self.put(keys)
        rows.reached(part)
        reading = current.readings.get(kind)
        if reading is None:
            reading = current.readings[kind] = rows.reading(kind, current.begin)
        return rows.pool.read(reading, part, keys, keys)[0][:, 0]

    def put(self, keys: torch.Tensor) -> None:
        """Store keys (rows, tokens, dim) in the pass that the cache is in."""
        pool = self.rows.pool
        cache, ctx, bridge = pool.family.caches[self.kind], pool.place(self.part, keys), pool.bridge
        pool.check_dtype(self.part, keys)
        extra = {}
        if self._brought is not None:
            places = self._brought.expand(-1, keys.shape[0], -1).flatten(1).T
            extra[_PLACES] = bridge.to_backend(ctx, places.to(torch.int32))
        cache.set_layer(self.part)
        cache.put(ctx, bridge.to_backend(ctx, tokens_of(keys[:, None])), extra=extra)
        self._brought = None

    @untraced
    def keys(self) -> torch.Tensor | None:
        """All keys (rows, tokens, dim) that are held; None before the first."""
        if not self.started:
            return None
        pool = self.rows.pool
        like = pool.places.like(self.part)
        return pool.read(self.rows.reading(self.kind, self.rows.length), self.part, like, like)[0][:, 0]

    @untraced
    def positions(self) -> torch.Tensor | None:
        """Those that :meth:`bring` was given so far, I64 (axes, rows, tokens); None where there are none."""
        if not self.started:
            return None
        rows, pool = self.rows, self.rows.pool
        reading = rows.reading(self.kind, rows.length)
        found = reading.read_extra(pool.ctx.layer(self.part), self.part, _PLACES)
        if found is None:
            return None
        like = pool.places.like(self.part).to(torch.int64)
        return pool.bridge.to_torch(found, like)[:, : rows.seen[self.part]].permute(2, 0, 1)

    @untraced
    def bring(self, positions: torch.Tensor) -> None:
        """Take all positions (axes, rows, tokens), those of a pass that begins last."""
        self._brought = positions[..., self.rows.seen[self.part] :]
