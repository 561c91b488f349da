"""Converts prompt caches of mlx-lm, from memory or from a file. Saving needs no function here: mlx-lm's
``save_prompt_cache`` writes our prompt caches, and its ``load_prompt_cache`` reads the file as its own
caches. Groups of mlx-lm's own format are saved as its QuantizedKVCache; for other quantized layers the file
has values for mlx-lm, and codes for us (``codes``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from kvcache import SlidingWindowCache
from kvcache.cache import Batch, CacheFullError, InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm.codes import codes_in
from kvcache.integrations.mlx_lm.layer_cache import LayerCache
from kvcache.integrations.mlx_lm.layers import (
    Attention,
    Layer,
    Recurrent,
    entries_in,
    is_compressed,
    mlx_caches,
)
from kvcache.integrations.mlx_lm.passes import ForwardPass
from kvcache.integrations.mlx_lm.pool import CachePool
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.storage import Codes, Storage

__all__ = ["adopt", "load_prompt_cache"]

_WITH_KEYS = (
    mlx_caches.KVCache,
    mlx_caches.QuantizedKVCache,
    mlx_caches.RotatingKVCache,
    mlx_caches.ChunkedKVCache,
)


def load_prompt_cache(
    file_name: str, pool: CachePool, return_metadata: bool = False, tokens: int | None = None
) -> Any:
    """Load a file of mlx-lm's ``save_prompt_cache``, with our caches or its own, as a prompt cache of
    ``pool``. With ``return_metadata``, returns a pair of it and the metadata. A quantized pool loads the
    codes of a pool with the same format unchanged. ``tokens`` and errors as for ``adopt``.
    """
    if not isinstance(pool, CachePool):
        raise InvalidRangeError(
            f"load_prompt_cache: pool is a {type(pool).__name__}; it must be the CachePool to load into"
        )
    try:
        loaded, metadata = mlx_caches.load_prompt_cache(file_name, return_metadata=True)
        codes = codes_in(file_name, loaded, pool.storage.layers)
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        raise InvalidRangeError(
            f"load_prompt_cache: {file_name} cannot be read as what save_prompt_cache writes ({error}); "
            "mlx_lm.load loads models, and kvcache load the files of kvcache save"
        ) from error
    prompt_cache = _adopted(loaded, pool, tokens, codes, "load_prompt_cache")
    return (prompt_cache, metadata) if return_metadata else prompt_cache


def adopt(prompt_cache: Sequence[Any], pool: CachePool, tokens: int | None = None) -> list[Any]:
    """A prompt cache of ``pool`` with the content of a prompt cache of mlx-lm's own classes; copies the data.
    Codes of quantized entries are copied if the pool has the same groups (``dtype="AFFINE4_64"``, for
    example), else they are dequantized and stored in the pool's format. A file of a quantized pool has codes
    that only this package's ``load_prompt_cache`` loads, wherever mlx-lm's own loader returns values; these
    are quantized again here.

    mlx-lm's recurrent entries do not know how many tokens they have seen. If all layers are recurrent,
    ``tokens`` gives the number; None counts as one token, and ``offset`` and ``rewind`` are then too small.

    Raises InvalidRangeError if the two belong to different models or ``tokens`` is wrong, NotSupportedError
    for classes that ``CachePool`` does not replace, CacheFullError and SequencesTakenError if it does not
    fit. The pool is then unchanged.
    """
    return _adopted(prompt_cache, pool, tokens, {}, "adopt")


def _adopted(
    prompt_cache: Sequence[Any], pool: CachePool, tokens: int | None, codes: Mapping[int, Codes], op: str
) -> list[Any]:
    """``codes``: by layer, what to store in place of K and V if the pool has the same format."""
    with pool.lock:
        return _filled(pool, prompt_cache, tokens, codes, op)


def _filled(
    pool: CachePool, prompt_cache: Sequence[Any], tokens: int | None, codes: Mapping[int, Codes], op: str
) -> list[Any]:
    layers, entries = pool.storage.layers, entries_in(prompt_cache)
    if len(prompt_cache) != len(pool.storage.entries) or len(entries) != len(layers):
        raise InvalidRangeError(
            f"adopt: {len(prompt_cache)} entries for a model of {len(pool.storage.entries)} layers"
        )
    contents = [
        _contents(i, entry, layer, pool.storage, codes.get(i))
        for i, (entry, layer) in enumerate(zip(entries, layers, strict=True))
    ]
    length = _length(contents, layers, tokens)
    made = pool.make_prompt_cache()
    if not length:
        return made
    rows: BatchRows = made[0].rows
    rows.check_room(op, [length])
    pool.sequences.undo_unwritten()
    pool.sequences.occupy(rows.claimed[0])
    seq = rows.claimed[0].seq
    assert seq is not None
    try:
        for cache in pool.storage.caches.tops:
            _fill(pool.storage, cache, seq, contents, length)
    except CacheFullError as error:
        raise CacheFullError(error.asked, error.free, error.held, op) from error
    except InvalidRangeError as error:
        raise InvalidRangeError(f"{op}: the prompt cache was made for another model ({error})") from error
    rows.lengths = [length]
    pool.sequences.current = None
    return made


@dataclass(frozen=True, slots=True)
class _Content:
    """The content of an entry of mlx-lm."""

    arrays: tuple[Any, ...] = ()
    """K and V in the order of positions, or states."""
    tokens: int | None = None
    """The number of tokens; None if unknown."""
    codes: Codes | None = None
    """The codes of K and V, if available."""

    @property
    def held(self) -> int:
        """The number of tokens with K and V."""
        arrays = self.arrays if self.codes is None else self.codes.parts
        return int(arrays[0].shape[2]) if arrays else 0


def _contents(i: int, entry: Any, layer: Layer, storage: Storage, codes: Codes | None) -> _Content:
    kind = type(entry)
    recurrent = kind is mlx_caches.ArraysCache or is_compressed(entry)
    if isinstance(entry, LayerCache):
        raise NotSupportedError(
            f"adopt: entry {i} is of a CachePool already; copy.deepcopy copies it within its pool, and "
            "save_prompt_cache and load_prompt_cache(file, pool) take it to another"
        )
    if not recurrent and kind not in _WITH_KEYS:
        raise NotSupportedError(
            f"adopt: entry {i} is {kind.__name__}; KVCache, QuantizedKVCache, RotatingKVCache, "
            "ChunkedKVCache, ArraysCache and DeepSeek-V4.1's LayerCache are supported"
        )
    size = getattr(entry, "max_size", getattr(entry, "chunk_size", None)), getattr(entry, "keep", 0)
    if recurrent is not isinstance(layer, Recurrent) or size != _sizes(layer):
        raise InvalidRangeError(f"adopt: entry {i} is {kind.__name__}; the layer is {layer}")
    if isinstance(layer, Attention) and not layer.used:
        return _Content()
    if isinstance(layer, Recurrent) and layer.names:
        return _Content(_grouped(entry, layer), entry.offset)
    if isinstance(layer, Attention) and not layer.keys_only and type(entry) is mlx_caches.QuantizedKVCache:
        codes = _codes_of(entry, storage)
    if recurrent:
        arrays = tuple(entry.cache)
    else:
        arrays = () if entry.keys is None else _in_order(entry)
    filled = [x for x in arrays if x is not None]
    if any(x.shape[0] != 1 for x in filled) or len(filled) not in (0, len(arrays)):
        raise NotSupportedError(
            f"adopt: entry {i} has several rows, or is partly filled; adopt one row at a time"
        )
    same = codes is not None and bool(filled) and codes.format == storage.format.name
    tokens = None if recurrent else entry.offset if filled else 0
    return _Content(tuple(filled), tokens, codes if same else None)


def _grouped(entry: Any, layer: Recurrent) -> tuple[Any, ...]:
    """The states of DeepSeek-V4.1's LayerCache, each (1, size, dim); () if empty."""
    if entry.empty():
        return ()
    named = zip(layer.names, layer.shapes, layer.dtypes, strict=True)
    states = ((getattr(entry, name), shape, dtype) for name, shape, dtype in named)
    return tuple(mx.zeros((1, 0, *shape[1:]), dtype) if x is None else x for x, shape, dtype in states)


def _sizes(layer: Layer) -> tuple[int | None, int]:
    """mlx-lm's ``max_size`` or ``chunk_size``, and ``keep``."""
    return (None, 0) if isinstance(layer, Recurrent) else (layer.max_size or layer.window, layer.keep)


def _codes_of(entry: Any, storage: Storage) -> Codes | None:
    """Words, scales and biases of K and then V from mlx-lm's QuantizedKVCache, if the pool has the same
    format.
    """
    if entry.keys is None or storage.groups != (entry.group_size, entry.bits):
        return None
    keys, values = entry.keys_and_values()
    return Codes(storage.format.name, storage.name_of(keys[-1].dtype), (*keys, *values))


def _in_order(entry: Any) -> tuple[Any, Any]:
    if type(entry) is mlx_caches.QuantizedKVCache:
        sizes = {"bits": entry.bits, "group_size": entry.group_size}
        keys, values = (mx.dequantize(*parts, **sizes) for parts in entry.keys_and_values())
        return keys, values
    if type(entry) in (mlx_caches.KVCache, mlx_caches.ChunkedKVCache):
        size = entry.offset - getattr(entry, "start_position", 0)
        return entry.keys[..., :size, :], entry.values[..., :size, :]
    keys, values, offset, keep, _, at = entry.state
    columns = np.arange(keys.shape[2])
    gap = at == keep  # unfilled cells in RotatingKVCache.state, before the stored tokens
    turned = np.concatenate([columns[:keep], columns[at + gap :], columns[keep:at]])
    order = mx.array(columns[:at] if at >= offset else turned if at < columns.size else columns)
    return keys[..., order, :], values[..., order, :]


def _length(contents: Sequence[_Content], layers: Sequence[Layer], tokens: int | None) -> int:
    lengths = {content.tokens for content in contents if content.tokens is not None}
    pairs = zip(contents, layers, strict=True)
    filled = {bool(content.arrays) for content, layer in pairs if isinstance(layer, Recurrent)}
    length = max(lengths) if lengths else max(1, tokens or 1) if True in filled else 0
    if len(lengths) > 1 or filled - {length > 0}:
        states = f" and states that are {'' if True in filled else 'not '}set" if filled else ""
        raise InvalidRangeError(
            f"adopt: entries of {sorted(lengths)} tokens{states}; all entries of a prompt cache must hold "
            "the same number"
        )
    if tokens is not None and tokens != length:
        raise InvalidRangeError(f"adopt: tokens={tokens} of a prompt cache that holds {length}")
    return length


def _fill(storage: Storage, cache: Any, seq: int, contents: Sequence[_Content], length: int) -> None:
    """Store the entries of one of the pool's caches."""
    recurrent = cache is storage.states
    own = [i for i, one in enumerate(storage.attention) if one is cache and contents[i].arrays]
    stored_tokens = length if recurrent or not own else contents[own[0]].held
    positions = np.arange(length - stored_tokens, length)
    if isinstance(cache, SlidingWindowCache):
        positions[: cache.keep] = np.arange(min(cache.keep, stored_tokens))  # the first of them stay
        recent = positions >= length - max(
            1, cache.memory
        )  # mlx-lm's caches hold more until the token after a prompt
        columns = np.flatnonzero(recent | (positions < cache.keep))
    else:
        columns = np.arange(stored_tokens)
    stored = columns.size
    cache.start_forward(storage.ctx, Batch(positions[columns].tolist(), [seq] * stored))
    one = ForwardPass(stored, [length - stored], [0], [stored], [seq])
    for i in own:
        codes, taken = contents[i].codes, mx.array(columns)
        if codes is None:
            storage.put(i, one, *(x[..., taken, :] for x in contents[i].arrays))
        else:
            storage.put_codes(i, one, replace(codes, parts=tuple(x[..., taken, :] for x in codes.parts)))
    for i, layer in enumerate(storage.layers):
        if recurrent and isinstance(layer, Recurrent):
            for k, state in enumerate(contents[i].arrays):
                storage.set_state(i, k, one, state)
