"""Layers that store entries of several tokens besides a window of K and V: DeepSeek-V4."""

from __future__ import annotations

import torch

from kvcache import DenseBatch
from kvcache.integrations.rows.caches import COMPRESSED, SLIDING
from kvcache.integrations.transformers.kinds import Compression, Kind
from kvcache.integrations.transformers.layers import AttentionLayer
from kvcache.integrations.transformers.passes import Pair
from kvcache.integrations.transformers.rows import BatchRows, untraced
from kvcache.integrations.transformers.stored import tokens_of

__all__ = ["CompressedLayer"]


class CompressedLayer(AttentionLayer):
    """K and V of a window, and the entries of the layer's compressors with their inputs."""

    def __init__(self, rows: BatchRows, layer: int, kind: Kind, compression: Compression) -> None:
        super().__init__(rows, layer, kind)
        self._compressors = {
            name: _Compressor(rows, compression, *rows.pool.plan.parts(layer, i))
            for i, name in enumerate(compression.names)
        }

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Store compressor inputs (rows, new tokens, dim). Returns the inputs of the windows that are now
        full, and the position of the first.
        """
        return self._compressors[name].take(kv, gate)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The first ``head_dim`` numbers of the window before those just returned; None at the start.

        ``chunk_gate`` belongs to those, (rows, windows, rate, 2 * head_dim), with the positional bias added.
        """
        return self._compressors[name].before(chunk_gate, head_dim)

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store new entries (rows, windows, dim), possibly none; returns all stored entries."""
        return self._compressors[name].store(compressed)


class _Compressor:
    """The entries of one compressor, and the window of inputs for the next ones. Inputs are stored as K (the
    summands) and V (their gates) of ``part``, entries as latents of ``entries``.
    """

    def __init__(self, rows: BatchRows, compression: Compression, part: int, entries: int) -> None:
        self.rows, self.rate, self.part, self.entries = rows, compression.rate, part, entries
        self.window, self.kind = Kind(SLIDING, compression.reach), Kind(COMPRESSED, compression.rate)
        self._gate: torch.Tensor
        self._before: Pair | None = None

    @untraced
    def take(self, kv: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        rows, rate = self.rows, self.rate
        keys, values = rows.update(self.part, self.window, kv[:, None], gate[:, None])
        current = rows.under_way
        assert current is not None
        begin, size = current.begin, self.window.size
        first, start = max(0, begin - size + 1), begin // rate * rate
        full = slice(start - first, (begin + current.tokens) // rate * rate - first)
        self._before = None
        if start and size > rate:
            earlier = slice(start - rate - first, start - first)
            self._before = keys[:, 0, earlier], values[:, 0, earlier]
        self._gate = values[:, 0, full]
        return keys[:, 0, full], self._gate, start

    def before(self, gates: torch.Tensor, dim: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self._before is None:
            return None, None
        bias = gates[:, 0] - self._gate[:, : self.rate]
        kv, gate = self._before
        return kv[..., :dim], (gate + bias)[..., :dim]

    @untraced
    def store(self, entries: torch.Tensor) -> torch.Tensor:
        rows, pool, part = self.rows, self.rows.pool, self.entries
        current, cache = rows.current(part), pool.family.caches[self.kind]
        if entries.shape[1]:
            ctx = pool.place(part, entries)
            pool.check_dtype(part, entries)
            cache.set_layer(part)
            cache.put(ctx, pool.bridge.to_backend(ctx, tokens_of(entries[:, None])))
        rows.reached(part)
        if current.begin + current.tokens < self.rate:
            return entries
        return pool.read(DenseBatch(cache, rows.sequences), part, entries, entries)[0][:, 0]
