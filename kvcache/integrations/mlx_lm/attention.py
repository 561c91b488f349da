"""Entries of layers with K and V."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import base

import ml
from kvcache.cache import NotSupportedError, OrderError
from kvcache.integrations.mlx_lm.codes import SavedState
from kvcache.integrations.mlx_lm.layer_cache import BatchState, LayerCache
from kvcache.integrations.mlx_lm.layers import (
    Attention,
    OwnChunkedKVCache,
    OwnKVCache,
    OwnRotatingKVCache,
    mlx_caches,
)
from kvcache.integrations.mlx_lm.locking import waiting
from kvcache.integrations.mlx_lm.masks import seen_beside_kept
from kvcache.integrations.mlx_lm.packed import Given
from kvcache.integrations.mlx_lm.passes import ForwardPass

__all__ = [
    "Bystander", "ChunkedKVCache", "KVCache", "QuantizedKVCache", "RotatingKVCache", "attend_by_entries",
]  # fmt: skip


_schedule: Any = mx.async_eval


class Attending(LayerCache):
    """K and V of a layer."""

    _fetched: tuple[ForwardPass, Any, Any] | None = None
    """The result of ``update_and_fetch``, until the model attends to it or the next pass begins."""

    @waiting
    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Store (rows, kv_heads, tokens, dim) and return everything that the queries of this pass may see.
        The arrays are in the order of ``make_mask``'s columns. They are snapshots: drop them before the next
        pass, or its write copies the buffer.
        """
        self._fetched = None
        one = self.rows.pass_for(self._seen, keys.shape[2], keys.shape[0])
        self._storage.put(self.layer, one, keys, values)
        self._seen = self.rows.events
        fetched = self._read(one, keys.dtype, values.dtype)
        if self._storage.attends(self.layer, one):
            self._fetched = one, *fetched
        return fetched

    @waiting
    def attend(self, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any) -> Any:
        """The result of mlx-lm's ``scaled_dot_product_attention``; None to leave it to that function. Used if
        K, V and the mask are unchanged results of this entry, and if it reads less.
        """
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched[1] is not keys or fetched[2] is not values:
            return None
        one, storage = fetched[0], self._storage
        if not one.shows(mask, storage.attention_of(self.layer)):
            _schedule(keys, values)
            return None
        return storage.attend(self.layer, one, queries, scale, sinks)

    def _read(self, one: ForwardPass, key_dtype: Any, value_dtype: Any) -> tuple[Any, Any]:
        keys, values = self._storage.get(self.layer, one)
        if keys.dtype != key_dtype or values.dtype != value_dtype:
            return keys.astype(key_dtype), values.astype(value_dtype)
        return keys, values

    @waiting
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """The mask of the next ``N`` tokens: None (all visible), "causal", or BOOL (N, history) or (rows, 1,
        N, history). Begins the pass; the columns are those of the next ``update_and_fetch``.
        """
        one = self.rows.pass_for(self._seen, N)
        window = None if window_size is None else window_size - 1
        by_cells = self._storage.reads_cells(one)
        mask = (
            self._own_mask(N, return_array, window)
            if by_cells
            else self._batch_mask(one, return_array, window)
        )
        one.masks.append((mask, self._storage.attention_of(self.layer), window))
        return mask

    def _own_mask(self, tokens: int, return_array: bool, window: int | None) -> Any:
        cache = self._storage.attention_of(self.layer)
        seen = cache.pass_reads().mask(self._storage.ctx, window)
        self.rows.last.by_position &= seen is None or seen is ml.CAUSAL
        if seen is None:
            return None
        if seen is not ml.CAUSAL:
            return mx.array(np.asarray(seen))
        if not return_array:
            return "causal"
        history = self._storage.tokens_of(self.layer, self.rows.claimed[0].seq)
        return mx.arange(history)[None] <= mx.arange(history - tokens, history)[:, None]

    def _batch_mask(self, one: ForwardPass, return_array: bool, window: int | None) -> Any:
        cache = self._storage.attention_of(self.layer)
        reading = self._storage.reading(cache, one)
        first, stop = reading.visible_columns(one.positions(), window)
        size, tokens = reading.tokens, one.tokens
        if not first.any():
            if tokens == 1 and (stop == size).all():
                return None
            if tokens > 1 and not return_array and (stop == np.arange(size - tokens + 1, size + 1)).all():
                return "causal"
        if self._storage.one_length:  # such models may not accept a mask per row
            first, stop = first[:1], stop[:1]
        columns = mx.arange(size)
        after, below = mx.array(first)[:, None, :, None], mx.array(stop)[:, None, :, None]
        return (columns >= after) & (columns < below)

    @waiting
    def is_trimmable(self) -> bool:
        """Whether ``trim`` can go back.

        For a sliding layer, whether ``rollback`` is set or nothing has left its window yet.
        """
        if self._spec.window is None or (self._storage.rollback and not self.rows.kept):
            return True
        cache = self._storage.attention_of(self.layer)
        stored = [cache.positions(claim.seq) for claim in self.rows.claimed if claim.seq is not None]
        return all(not x.size or x[-1] + 1 == x.size for x in stored)

    # Stored tokens, in the order of positions.

    @waiting
    def _stored(self) -> tuple[Any, Any]:
        """K and V of all rows; (None, None) while nothing is stored."""
        self.rows.settle()
        if not any(self.rows.lengths):
            return None, None
        sequences = [claim.seq for claim in self.rows.claimed]
        stored = self._storage.stored(self.layer, sequences, self.rows.live())
        return self._kept(stored[0]), self._kept(stored[1])

    def _kept(self, x: Any) -> Any:
        window, keep = self._spec.window or 0, self._spec.keep
        if not keep or x.shape[2] <= window:
            return x[..., -window:, :]
        return mx.concatenate([x[..., :keep, :], x[..., keep - window :, :]], axis=2)

    @property
    def keys(self) -> Any:
        """K (rows, kv_heads, tokens, dim) in the order of positions, for inspection; None while empty."""
        return self._stored()[0]

    @keys.setter
    def keys(self, new: Any) -> None:
        self._assign("keys", new)

    @property
    def values(self) -> Any:
        return self._stored()[1]

    @values.setter
    def values(self, new: Any) -> None:
        self._assign("values", new)

    def _assign(self, name: str, new: Any) -> None:
        """Called if the model assigns K or V, which some do to order MLX's graph; a no-op, since every put is
        evaluated. Raises NotSupportedError unless the model is known to do so (``Attention.assigned``).
        """
        if not self._spec.assigned:
            raise NotSupportedError(
                f"{name}: {new.shape} is set in the entry of layer {self.layer}; only update_and_fetch "
                "stores its K and V"
            )

    @property
    def _spec(self) -> Attention:
        spec = self._storage.layers[self.layer]
        assert isinstance(spec, Attention)
        return spec

    @waiting
    def keys_and_values(self) -> tuple[Any, Any]:
        """The result of ``update_and_fetch`` in this pass, for layers that share another's K and V. Between
        passes, the stored tokens of one row, or of rows of equal length, in the order of positions.
        """
        one = self.rows.live()
        if one is not None:
            return self._storage.get(self.layer, one)
        last = self.rows.last
        if isinstance(last, ForwardPass) and not last.by_position:
            raise OrderError(
                "keys_and_values: another prompt cache of this pool was used since this one's pass, whose "
                "mask is not in the order of positions"
            )
        if len(set(self.rows.lengths)) > 1:
            raise OrderError(
                "keys_and_values: there is no current pass, and the rows have different lengths; "
                "extract one row"
            )
        return self._stored()

    def saved(self) -> Any:
        """The state that ``save_prompt_cache`` saves and mlx-lm's KVCache loads: K, V and the offset."""
        return self._with_codes(*self._stored(), self._saved_offset())

    def _with_codes(self, *state: Any) -> SavedState:
        """The state that mlx-lm's class loads, with the stored codes of one row."""
        claimed, storage = self.rows.claimed, self._storage
        return SavedState.of(
            state,
            self.layer,
            lambda: storage.codes(self.layer, claimed[0].seq) if len(claimed) == 1 else None,
        )

    def _groups(self) -> tuple[Any, Any]:
        """Words, scales and biases of K and of V of all rows, which have the same number of tokens, as in
        mlx-lm's QuantizedKVCache; (None, None) while nothing is stored.
        """
        self.rows.settle()
        each = [self._storage.codes(self.layer, claim.seq) for claim in self.rows.claimed]
        rows = [codes.parts for codes in each if codes is not None]
        if not rows:
            return None, None
        parts = [mx.concatenate([*part]) for part in zip(*rows, strict=True)]
        parts = [mx.view(x, mx.uint32) if x.dtype == mx.int32 else x for x in parts]
        return parts[:3], parts[3:]

    def _saved_offset(self) -> int | BatchState:
        """The number of tokens of each row, if the rows may be saved together."""
        lengths = self.rows.lengths_for(self._seen)
        return BatchState() if self.rows.batched or len(set(lengths)) > 1 else lengths[0]

    @property
    @waiting
    def nbytes(self) -> int:
        """Bytes of this layer's rows; shared tokens are counted for each row."""
        tokens = sum(self._storage.tokens_of(self.layer, claim.seq) for claim in self.rows.claimed)
        return self._storage.token_bytes(self.layer) * tokens


@waiting
def _to_quantized(self: Attending, group_size: int = 64, bits: int = 4) -> Any:
    """mlx-lm's QuantizedKVCache with the stored tokens, for ``kv_bits=``; it is independent of the pool. Only
    some entries have this method: mlx-lm checks for it, and leaves a ChunkedKVCache unchanged. If the pool
    stores the same format (``dtype="AFFINE4_64"``, for example), its codes, scales and biases are copied.

    Raises NotSupportedError for models with sliding layers, before any layer is converted, and for
    batches, which mlx-lm does not quantize either.
    """
    if self.rows.batched:
        raise NotSupportedError("to_quantized: a batch of rows; extract(row) gives the entries of one")
    layers = self._storage.layers
    if any(isinstance(layer, Attention) and layer.window and not layer.chunked for layer in layers):
        raise NotSupportedError(
            f"to_quantized: bits={bits} for a model with sliding layers, which mlx-lm has no quantized "
            "cache for; store them quantized here instead: dtype=ml.DType.Q8_0 or Q4_0"
        )
    made = mlx_caches.QuantizedKVCache(group_size=group_size, bits=bits)
    if self._storage.groups == (group_size, bits):
        made.keys, made.values = self._groups()
    else:
        keys, values = self._stored()
        if keys is not None:
            pair = (mx.quantize(x, group_size=group_size, bits=bits) for x in (keys, values))
            made.keys, made.values = pair
    if made.keys is not None:
        made.offset = made.keys[0].shape[2]
    return made


class KVCache(Attending, OwnKVCache):  # type: ignore[misc]
    """K and V of a layer that attends to all of the past."""

    to_quantized = _to_quantized


class QuantizedKVCache(KVCache):
    """The same in a pool that stores mlx-lm's own groups: saved as its QuantizedKVCache, code by code."""

    def saved(self) -> Any:
        """The state that mlx-lm's QuantizedKVCache loads: codes of K and V, offset, group size and bits."""
        offset = self._saved_offset()
        keys, values = (None, None) if isinstance(offset, BatchState) else self._groups()
        assert self._storage.groups is not None
        return keys, values, offset, *self._storage.groups


class RotatingKVCache(Attending, OwnRotatingKVCache):  # type: ignore[misc]
    """K and V of a layer with a sliding window."""

    to_quantized = _to_quantized

    @property
    def keep(self) -> int:
        """The number of first tokens that are never evicted."""
        return self._spec.keep

    @property
    def max_size(self) -> int:
        """As in mlx-lm: the window, or less if the model's masks look further back (see ``Attention``)."""
        size = self._spec.max_size or self._spec.window
        assert size is not None
        return size

    @waiting
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """As for KVCache. Raises NotSupportedError for a window that exceeds the tokens kept."""
        window = self._spec.window
        if window_size is not None and window is not None and window_size > window:
            raise NotSupportedError(
                f"make_mask: window_size={window_size} of layer {self.layer}, which keeps {window} tokens; "
                f"make the pool with Attention(window={window_size}, max_size={self.max_size}) for it"
            )
        if not self.keep:
            return super().make_mask(N, return_array, window_size)
        return self._mask_beside_kept(self.rows.pass_for(self._seen, N), return_array, window_size)

    def _mask_beside_kept(self, one: ForwardPass, return_array: bool, window_size: int | None) -> Any:
        """BOOL (N, history) for one row, (rows, 1, N, history) for several."""
        storage, cache = self._storage, self._storage.attention_of(self.layer)
        by_cells = storage.reads_cells(one)
        if by_cells:
            read = [cache.pass_reads().positions(storage.ctx)]
        else:
            length = storage.reading(cache, one).tokens
            stored = [cache.positions(seq) if seq is not None else np.empty(0, int) for seq in one.sequences]
            read = [np.pad(x, (0, length - x.size), constant_values=-1) for x in stored]
        size = min(self.max_size, window_size or self.max_size)
        each = zip(read, one.positions(), one.before, strict=True)
        seen = np.stack(
            [seen_beside_kept(x, queries, before, size, self.keep) for x, queries, before in each]
        )
        in_order = all(np.array_equal(x, np.arange(one.before[0] + one.tokens)) for x in read)
        causal = in_order and one.is_full and read[0].size <= size
        if one.tokens == 1 and seen.all():
            return None
        if one.tokens > 1 and causal and not return_array:
            return "causal"
        one.by_position &= not by_cells or in_order
        if storage.one_length:
            seen = seen[:1]
        return mx.array(seen[0] if by_cells else seen[:, None])

    def size(self) -> int:
        return min(super().size(), self.max_size)

    def saved(self) -> Any:
        """The state that mlx-lm's RotatingKVCache loads: the window in the order of positions. A full one
        overwrites its oldest token next; if that token is no longer stored, zeros replace it.
        """
        keys, values = self._stored()
        offset, at = self._saved_offset(), 0 if keys is None else keys.shape[2]
        if isinstance(offset, int) and 0 < at < self.max_size <= offset:
            keys, values = (
                mx.concatenate(
                    [x[..., : self.keep, :], mx.zeros_like(x[..., :1, :]), x[..., self.keep :, :]], 2
                )
                for x in (keys, values)
            )
            at = self.keep
        return self._with_codes(keys, values, offset, self.keep, self.max_size, at)


class ChunkedKVCache(Attending, OwnChunkedKVCache):  # type: ignore[misc]
    """K and V of a layer whose queries see their own chunk of positions, through a mask made by the model."""

    @property
    def chunk_size(self) -> int:
        size = self._spec.window
        assert size is not None
        return size

    @property
    @waiting
    def start_position(self) -> int:
        """The position of the first token that the next pass's ``update_and_fetch`` returns."""
        lengths, rows = self.rows.lengths_for(self._seen), self.rows
        begun = rows.lengths[0] - lengths[0]
        return lengths[0] - self._reach(self._storage.tokens_of(self.layer, rows.claimed[0].seq) - begun)

    def maybe_trim_front(self) -> None:
        """A no-op: tokens outside the window are dropped when a pass begins."""

    def _reach(self, stored: int) -> int:
        """The number of earlier tokens that ``update_and_fetch`` returns in a pass."""
        return max(0, min(self.chunk_size - 1, stored))

    def _read(self, one: ForwardPass, key_dtype: Any, value_dtype: Any) -> tuple[Any, Any]:
        keys, values = self._storage.get_by_position(self.layer, one)
        first = keys.shape[2] - one.tokens - self._reach(keys.shape[2] - one.tokens)
        return keys[..., first:, :].astype(key_dtype), values[..., first:, :].astype(value_dtype)

    def saved(self) -> Any:
        """The state that mlx-lm's ChunkedKVCache loads: the last tokens in the order of positions, and the
        first position.
        """
        keys, values = self._stored()
        size = 0 if keys is None else keys.shape[2]
        offset = self._saved_offset()
        start = offset - size if isinstance(offset, int) else offset
        return self._with_codes(keys, values, offset, self.chunk_size, start)


class Bystander(Attending, OwnKVCache):  # type: ignore[misc]
    """The entry of a layer that the model never reads or writes; it stores nothing. It follows all changes of
    the other entries automatically.
    """

    to_quantized = _to_quantized

    @property
    def _seen(self) -> int:
        return self.rows.seen_by_a_bystander(self._own_seen)

    @_seen.setter
    def _seen(self, events: int) -> None:
        self._own_seen = events

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Raises OrderError: the pool has no storage for this layer."""
        raise OrderError(
            f"update_and_fetch: layer {self.layer}, which the model did not use when the pool was created"
        )

    def _stored(self) -> tuple[Any, Any]:
        return None, None

    def saved(self) -> Any:
        return None, None, 0

    @property
    def nbytes(self) -> int:
        return 0


Bystander.__name__ = KVCache.__name__  # the name that save_prompt_cache writes


# Attention by ``Cache.attend`` if that reads less than the arrays of ``update_and_fetch``, in which every row
# is padded to the longest, shared tokens are repeated, and quantized storage is dequantized. Unused arrays
# are never computed, since MLX is lazy.

_NAME = "scaled_dot_product_attention"
_original: Any = getattr(base, _NAME)


def attend_by_entries(model: Any) -> bool:
    """Make the layers of ``model`` call their entries' ``attend``; False if none can. This affects all models
    of its classes. mlx-lm's models call ``scaled_dot_product_attention`` through their own module's
    namespace, where it is replaced by a function that tries the entry first; with mlx-lm's own entries the
    behaviour is unchanged.
    """
    names = {type(module).__module__ for _, module in model.named_modules()}
    places = [vars(sys.modules[name]) for name in names]
    asking = [place for place in places if place.get(_NAME) in (_original, _scaled_dot_product_attention)]
    for place in asking:
        place[_NAME] = _scaled_dot_product_attention
    return bool(asking)


def _scaled_dot_product_attention(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> Any:
    if isinstance(keys, Given):
        return keys.attend(queries, values, scale, mask, sinks)
    if isinstance(cache, Attending):
        attended = cache.attend(queries, keys, values, scale, mask, sinks)
        if attended is not None:
            return attended
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
