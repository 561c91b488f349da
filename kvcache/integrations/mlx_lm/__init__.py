"""Our caches inside mlx-lm: prompt caches for ``generate``, batches, speculative decoding, files and LRU.

::

    from kvcache.integrations.mlx_lm import make_prompt_cache

    prompt_cache = make_prompt_cache(model, capacity=8192)
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, prompt_cache=prompt_cache):
        ...

Prompt caches that meet (rows of a batch, copies, what an ``LRUPromptCache`` keeps) are made by one
``CachePool``; ``MLXPrefixCache`` shares prefixes between conversations, in memory and in stores.
``install`` lets mlx-lm make its prompt caches of such a pool by itself; ``MLXModel`` is a model that
our engine drives. For mlx-lm 0.32.
"""

from __future__ import annotations

import inspect
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


check_loops()  # now: who imports mlx-lm's loops by name later gets those that check


def make_prompt_cache(model: Any, **options: Any) -> list[Any]:
    """A prompt cache for ``model`` in a ``CachePool`` of its own, which takes the same ``options``.

    One sequence of ``capacity`` tokens by default: a copy of it needs another as soon as one of the two goes
    on (``max_sequences=2``).
    """
    PoolOptions.of("make_prompt_cache", options)
    return CachePool(model, **options).make_prompt_cache()


def install(model: Any, **options: Any) -> CachePool:
    """Let mlx-lm make the prompt caches of ``model`` in one pool, wherever it makes them itself.

    ``generate``, ``BatchGenerator`` and the server ask the model for its caches (``make_cache``); this
    answers for it. In the server, requests wait until the pool has room for them, and what its
    ``LRUPromptCache`` keeps gives way. Returns the pool; ``uninstall`` takes it back. Called again, it
    makes another pool; prompt caches of the one before stay in theirs.
    """
    PoolOptions.of("install", options)
    pool = CachePool(model, **options)
    guard()
    model.make_cache = pool.make_prompt_cache
    return pool


def uninstall(model: Any) -> None:
    """Let ``model`` make mlx-lm's own caches again; nothing where ``install`` was not called."""
    vars(model).pop("make_cache", None)


_shown = [
    inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD),
    *(
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for option in inspect.signature(PoolOptions).parameters.values()
    ),
]
for _takes_options in (CachePool, make_prompt_cache, install):  # for help and completion
    setattr(_takes_options, "__signature__", inspect.Signature(_shown))  # noqa: B010


def rewind(prompt_cache: Sequence[Any], position: int) -> int:
    """Go back to ``position``, or as little before it as the caches can; returns where they are then.

    Sliding layers may have lost what a token at ``position`` sees, and the states of recurrent layers
    are those of some positions only: then the nearest kept state before it holds, or 0. The tokens from
    there on are to be computed again. A prompt cache whose last pass failed half way is whole again
    where it was before it.
    """
    rows = getattr(prompt_cache[0], "rows", None) if prompt_cache else None
    if not isinstance(rows, BatchRows):
        raise InvalidRangeError(
            "rewind: this is no prompt cache of a CachePool; mlx-lm's own have trim_prompt_cache"
        )
    if len(rows.claimed) != 1:
        raise InvalidRangeError(
            f"rewind: the prompt cache is a batch of {len(rows.claimed)} rows; extract one row first"
        )
    check_whole("rewind", "position", position)
    with rows.pool.lock:
        return rows.rewind(prompt_cache, position)


def __dir__() -> list[str]:
    return sorted(__all__)
