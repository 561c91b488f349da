"""Prompt caches of a pool in mlx-lm's ``LRUPromptCache``, which copies what it keeps and trims the copies.

A copy that would need a sequence where there is none, or that cannot be trimmed so far back, is a miss, as it
is where mlx-lm's own caches cannot be trimmed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import LRUPromptCache

from kvcache.cache import NotSupportedError
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.sequences import SequencesTakenError

__all__ = ["incoming", "is_serving", "keep_prompt_caches", "rows_of"]

incoming = threading.local()
"""Of the thread in which a server generates. ``queue``: where it answers the request that it took last."""


def is_serving() -> bool:
    """Whether this is the thread in which a server generates."""
    return hasattr(incoming, "serving")


def rows_of(prompt_cache: Sequence[Any] | None) -> list[BatchRows]:
    """Of the entries of a prompt cache of ours; of anything else none."""
    found = [getattr(entry, "rows", None) for entry in prompt_cache or ()]
    return [rows for rows in found if isinstance(rows, BatchRows)]


@functools.cache
def keep_prompt_caches() -> None:
    """Put this module around ``LRUPromptCache``, once."""
    for name, around in (("insert_cache", _insert_cache), ("fetch_nearest_cache", _fetch_nearest_cache)):
        setattr(LRUPromptCache, name, functools.partialmethod(around, getattr(LRUPromptCache, name)))


def _insert_cache(
    lru: LRUPromptCache,
    original: Callable[..., None],
    model: Any,
    tokens: Any,
    prompt_cache: Any,
    **more: Any,
) -> None:
    found = rows_of(prompt_cache)
    for rows in found:
        rows.kept = True
        rows.pool.keepers.add(lru)
    if found and is_serving():
        # The server is done with the list, and has names for it that live on and would hold the sequence.
        prompt_cache, given = list(prompt_cache), prompt_cache
        given.clear()
    if prompt_cache:
        original(lru, model, tokens, prompt_cache, **more)


def _fetch_nearest_cache(lru: LRUPromptCache, original: Callable[..., Any], model: Any, tokens: Any) -> Any:
    try:
        return original(lru, model, tokens)
    except (SequencesTakenError, NotSupportedError):  # a copy of the beginning of a longer one
        return None, tokens
