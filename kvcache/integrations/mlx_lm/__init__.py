"""These caches inside mlx-lm: prompt caches for ``generate``, batches, speculative decoding, files and LRU.

::

    from kvcache.integrations.mlx_lm import make_prompt_cache

    prompt_cache = make_prompt_cache(model, capacity=8192)
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, prompt_cache=prompt_cache):
        ...

Prompt caches that are used together (rows of a batch, copies, entries of an ``LRUPromptCache``) must come
from one ``CachePool``. ``MLXPrefixCache`` shares prefixes between conversations, in memory and in stores.
``install`` makes mlx-lm create its prompt caches from such a pool; ``MLXModel`` is a model for our engine.
For mlx-lm 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    import mlx_lm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvcache.integrations.mlx_lm needs mlx-lm: pip install 'ml-kvcache[mlx-lm]' ({error})",
        name=error.name,
    ) from error

from kvcache.cache import InvalidRangeError, check_whole
from kvcache.integrations.conversations import show_options
from kvcache.integrations.mlx_lm.attention import ChunkedKVCache, KVCache, RotatingKVCache
from kvcache.integrations.mlx_lm.layer_cache import CacheList, LayerCache
from kvcache.integrations.mlx_lm.layers import Attention, Recurrent, Several, layers_of
from kvcache.integrations.mlx_lm.loops import check_loops
from kvcache.integrations.mlx_lm.model import MLXModel
from kvcache.integrations.mlx_lm.pool import CachePool, PoolOptions
from kvcache.integrations.mlx_lm.prefixes import MLXPrefixCache, MLXSession
from kvcache.integrations.mlx_lm.recurrent import ArraysCache
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.saving import adopt, load_prompt_cache
from kvcache.integrations.mlx_lm.sequences import SequencesTakenError
from kvcache.integrations.mlx_lm.serving import guard

__all__ = [
    "ArraysCache",
    "Attention",
    "CacheList",
    "CachePool",
    "ChunkedKVCache",
    "KVCache",
    "LayerCache",
    "MLXModel",
    "MLXPrefixCache",
    "MLXSession",
    "PoolOptions",
    "Recurrent",
    "RotatingKVCache",
    "SequencesTakenError",
    "Several",
    "adopt",
    "install",
    "layers_of",
    "load_prompt_cache",
    "make_prompt_cache",
    "rewind",
    "uninstall",
]


check_loops()  # early, so that loops imported by name later are the checked ones


def make_prompt_cache(model: Any, **options: Any) -> list[Any]:
    """A prompt cache for ``model`` in its own ``CachePool``, which has the same ``options``. The default is
    one sequence of ``capacity`` tokens; a copy needs a second one (``max_sequences=2``) as soon as either
    continues.
    """
    PoolOptions.of("make_prompt_cache", options)
    return CachePool(model, **options).make_prompt_cache()


def install(model: Any, **options: Any) -> CachePool:
    """Make mlx-lm create the prompt caches of ``model`` from one pool.

    ``generate``, ``BatchGenerator`` and the server call the model's ``make_cache``, which this replaces. In
    the server, requests wait until the pool has room for them, and entries of its ``LRUPromptCache`` are
    dropped if necessary. Returns the pool; ``uninstall`` restores the model. A second call makes a new pool;
    existing prompt caches stay in theirs.
    """
    PoolOptions.of("install", options)
    pool = CachePool(model, **options)
    guard()
    model.make_cache = pool.make_prompt_cache
    return pool


def uninstall(model: Any) -> None:
    """Restore mlx-lm's own caches for ``model``; no effect without ``install``."""
    vars(model).pop("make_cache", None)


for _takes_options in (CachePool, make_prompt_cache, install):
    show_options(_takes_options, "model", PoolOptions)


def rewind(prompt_cache: Sequence[Any], position: int) -> int:
    """Go back to ``position``, or to the last possible position before it; returns the position reached.
    Sliding layers may no longer store what a token at ``position`` sees, and recurrent layers keep the states
    of some positions only. Then the nearest position before it is used, or 0. Tokens from the returned
    position on must be computed again. Also repairs a prompt cache whose last pass failed, by undoing that
    pass.
    """
    rows = getattr(prompt_cache[0], "rows", None) if prompt_cache else None
    if not isinstance(rows, BatchRows):
        raise InvalidRangeError(
            "rewind: this is not a prompt cache of a CachePool; use trim_prompt_cache for mlx-lm's own"
        )
    if len(rows.claimed) != 1:
        raise InvalidRangeError(
            f"rewind: the prompt cache is a batch of {len(rows.claimed)} rows; extract one row first"
        )
    position = check_whole("rewind", "position", position)
    with rows.pool.lock:
        return rows.rewind(prompt_cache, position)


def __dir__() -> list[str]:
    return sorted(__all__)
