"""Prompt caches of mlx-lm taken over, from memory or from a file.

Saving needs nothing of its own: mlx-lm's ``save_prompt_cache`` writes our prompt caches, and its
``load_prompt_cache`` reads the file as its own caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvcache.cache import Batch, InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm.layers import Attention, mlx_caches
from kvcache.integrations.mlx_lm.passes import Pass
from kvcache.integrations.mlx_lm.pool import CachePool
from kvcache.integrations.mlx_lm.rows import Rows
from kvcache.integrations.mlx_lm.storage import Storage

__all__ = ["adopt", "load_prompt_cache"]


def load_prompt_cache(file_name: str, pool: CachePool, return_metadata: bool = False) -> Any:
    """What mlx-lm's ``save_prompt_cache`` wrote, of our caches or of its own, as a prompt cache of ``pool``.

    With ``return_metadata`` a pair of it and the metadata. Raises as :func:`adopt`.
    """
    found, metadata = mlx_caches.load_prompt_cache(file_name, return_metadata=True)
    prompt_cache = adopt(found, pool)
    return (prompt_cache, metadata) if return_metadata else prompt_cache


def adopt(prompt_cache: Sequence[Any], pool: CachePool) -> list[Any]:
    """A prompt cache of ``pool`` with what a prompt cache of mlx-lm's own classes holds; copies the data.

    Raises InvalidRangeError where the two are not of the same model, NotSupportedError for other classes
    than those that :class:`CachePool` stands in for, CacheFullError and SequencesTakenError where it does
    not fit. The pool is as it was then.
    """
    contents = [_contents(i, entry) for i, entry in enumerate(prompt_cache)]
    length = _check(contents, prompt_cache, pool)
    made = pool.make_prompt_cache()
    if not length:
        return made
    rows: Rows = made[0].rows
    pool.undo_unwritten()
    pool.occupy(rows.held[0])
    seq = rows.held[0].seq
    assert seq is not None
    for cache in pool.storage.parts:
        _fill(pool.storage, cache, seq, contents, length)
    rows.lengths = [length]
    pool.current = None
    return made


def _contents(i: int, entry: Any) -> tuple[int | None, tuple[Any, ...]]:
    """How many tokens an entry has seen (a recurrent one does not tell), and its arrays in order."""
    kind = type(entry)
    if kind is mlx_caches.ArraysCache:
        return None, tuple(entry.cache)
    if kind not in (mlx_caches.KVCache, mlx_caches.RotatingKVCache):
        raise NotSupportedError(
            f"adopt: entry {i} is {kind.__name__}; KVCache, RotatingKVCache and ArraysCache are taken over"
        )
    if entry.keys is None:
        return 0, ()
    if kind is mlx_caches.KVCache:
        return entry.offset, tuple(x[..., : entry.offset, :] for x in (entry.keys, entry.values))
    size, at = entry.keys.shape[2], entry._idx
    if entry.keep and entry.offset > size:
        raise NotSupportedError(
            f"adopt: entry {i} keeps its first {entry.keep} tokens for good; there is no such cache"
        )
    order = np.arange(min(at, size)) if at >= entry.offset else np.roll(np.arange(size), -at)
    return entry.offset, tuple(x[..., mx.array(order), :] for x in (entry.keys, entry.values))


def _check(contents: Sequence[tuple[int | None, tuple]], prompt_cache: Sequence[Any], pool: CachePool) -> int:
    layers = pool.storage.layers
    if len(contents) != len(layers):
        raise InvalidRangeError(f"adopt: {len(contents)} entries for a model of {len(layers)} layers")
    lengths = {length for length, _ in contents if length is not None}
    if len(lengths) != 1:
        raise InvalidRangeError(
            f"adopt: entries of {sorted(lengths)} tokens; those of a prompt cache hold as many"
        )
    for i, ((length, arrays), layer) in enumerate(zip(contents, layers, strict=True)):
        window = getattr(prompt_cache[i], "max_size", None)
        if (length is None) is isinstance(layer, Attention) or window != getattr(layer, "window", None):
            raise InvalidRangeError(
                f"adopt: entry {i} is {type(prompt_cache[i]).__name__}; the layer is {layer}"
            )
        if any(x is None or x.shape[0] != 1 for x in arrays) and lengths != {0}:
            raise NotSupportedError(
                f"adopt: entry {i} is of several rows, or not filled; one row is taken over"
            )
    return lengths.pop()


def _fill(storage: Storage, cache: Any, seq: int, contents: Sequence[tuple], length: int) -> None:
    """Store what belongs to one of the caches of the pool."""
    own = [
        i for i in range(len(contents)) if storage.attention[i] in (cache, getattr(cache, "attention", None))
    ]
    stored = contents[own[0]][1][0].shape[2] if own else length
    stored = length if cache is storage.recurrent else stored
    first = length - stored
    cache.start_forward(storage.ctx, Batch(range(first, length), [seq] * stored))
    one = Pass(stored, [first], [0], [stored], [seq])
    for i in own:
        storage.put(i, one, *contents[i][1])
    if cache is storage.recurrent:
        for i, layer in enumerate(storage.layers):
            for k, state in enumerate(() if isinstance(layer, Attention) else contents[i][1]):
                storage.set_state(i, k, one, state)
