"""Entries of a prompt cache in which every token of a pass is a separate row, whatever its sequence. A model
of mlx-lm has one offset for each row, and needs no mask for rows of one token. So a pass over the prompts and
answers of many sequences is one call with a row per token; attention, computed by the cache, separates the
sequences::

    sequence   0  0  0  1  2  2
    offset     7  8  9 41  0  1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml
from kvcache import SlidingWindowCache
from kvcache.cache import NotSupportedError
from kvcache.integrations.mlx_lm.layers import Attention, Layer, OwnKVCache, OwnRotatingKVCache
from kvcache.integrations.mlx_lm.storage import Storage

__all__ = ["Given", "PackedPass"]


@dataclass(frozen=True, slots=True)
class PackedPass:
    """A pass over tokens at ``positions``, an array (tokens,), begun in the caches of ``storage``."""

    storage: Storage
    ctx: ml.Context
    positions: Any

    def entry(self, layer: Layer, i: int) -> Any:
        """The entry of a layer. Raises NotSupportedError for a layer that needs the tokens of a sequence in
        one row.
        """
        if not isinstance(layer, Attention) or layer.chunked or layer.keys_only or layer.assigned:
            raise NotSupportedError(f"layer {i} wants the tokens of a sequence as one row")
        return _PackedKVCache(self, i) if layer.window is None else _PackedRotatingKVCache(self, i)


class Given:
    """A placeholder for the K or V that the tokens of a pass see; usable only in attention."""

    __slots__ = ("_entry",)

    def __init__(self, entry: _Packed) -> None:
        self._entry = entry

    def attend(self, queries: Any, values: Any, scale: float, mask: Any, sinks: Any) -> Any:
        """Attention of queries (tokens, heads, 1, dim), in that shape; the caches apply the mask."""
        entry = self._entry
        if mask is not None or not isinstance(values, Given) or values._entry is not entry:
            raise NotSupportedError(f"layer {entry.layer} has a mask or values of its own")
        one = entry.one
        cache, ctx = one.storage.attention_of(entry.layer), one.ctx.layer(entry.layer)
        cache.set_layer(entry.layer)
        logits = None if sinks is None else ctx.from_native(sinks)
        attended = cache.attend(ctx, ctx.from_native(queries[:, :, 0]), scale, logits)
        return attended.native[:, :, None].astype(queries.dtype)


class _Packed:
    """Shared by all entries."""

    def __init__(self, one: PackedPass, layer: int) -> None:
        self.one, self.layer = one, layer

    @property
    def offset(self) -> Any:
        """The position of each token, (tokens,)."""
        return self.one.positions

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Given, Given]:
        """Store K and V (tokens, kv_heads, 1, dim); returns placeholders for the visible K and V. What leads
        up to them is computed while Python builds the graph of the layers after.
        """
        one = self.one
        cache, ctx = one.storage.attention_of(self.layer), one.ctx.layer(self.layer)
        cache.set_layer(self.layer)
        cache.put(ctx, ctx.from_native(keys[:, :, 0]), ctx.from_native(values[:, :, 0]))
        ctx.compute()
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Given, Given]:
        """The result of ``update_and_fetch`` in this pass, for layers that share another's K and V."""
        return Given(self), Given(self)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:  # noqa: N803
        """None: the cache applies the mask, whose window must be the requested one."""
        cache = self.one.storage.attention_of(self.layer)
        own = cache.window + 1 if isinstance(cache, SlidingWindowCache) else None
        if N != 1 or window_size not in (None, own):
            raise NotSupportedError(
                f"layer {self.layer} asks for a mask of {N} tokens and a window of {window_size}"
            )


class _PackedKVCache(_Packed, OwnKVCache):  # type: ignore[misc]
    """K and V of a layer that attends to all of the past."""


class _PackedRotatingKVCache(_Packed, OwnRotatingKVCache):  # type: ignore[misc]
    """K and V of a layer with a sliding window."""

    @property
    def max_size(self) -> int:
        layer = self.one.storage.layers[self.layer]
        assert isinstance(layer, Attention)
        assert layer.window is not None
        return layer.max_size or layer.window

    keep = 0
