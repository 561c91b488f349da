"""Prompt caches of a pool in two of mlx-lm's loops: its ``LRUPromptCache``, and speculative decoding.

The former copies what it keeps and trims the copies. A copy that would need a sequence where there is none,
or that cannot be trimmed so far back, is a miss, as it is where mlx-lm's own caches cannot be trimmed.

The latter asks once, before it starts, whether drafts of the model can be taken back. A sliding layer without
``rollback`` says yes as long as nothing has left its window, and silently keeps rejected drafts later on.
That is refused here. So is a ``rollback`` of a draft model that is less than its drafts, made one by one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm.layers import Attention
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.sequences import SequencesTakenError

__all__ = ["check_speculation", "incoming", "is_serving", "keep_prompt_caches", "rows_of"]

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


@functools.cache
def check_speculation() -> None:
    """Put this module before ``speculative_generate_step``, once."""
    loops: Any = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
    original = loops.speculative_generate_step
    loops.speculative_generate_step = functools.wraps(original)(functools.partial(_checked, original))


def _checked(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    bound = inspect.signature(original).bind(*arguments, **options)
    bound.apply_defaults()
    given = bound.arguments
    model, prompt_cache, drafts = given["model"], given["prompt_cache"], given["num_draft_tokens"]
    if prompt_cache is None:  # those that it makes are like these
        own, drafted = make_prompt_cache(model), make_prompt_cache(given["draft_model"])
    else:
        _check_both(prompt_cache)
        own, drafted = prompt_cache[: len(model.layers)], prompt_cache[len(model.layers) :]
    _check_rollback(own, 1, drafts)
    _check_rollback(drafted, max(1, drafts - 1), drafts)
    return original(*arguments, **options)


def _check_both(prompt_cache: Any) -> None:
    found = rows_of(prompt_cache)
    if found and len(prompt_cache) <= len(found[0].pool.storage.entries):
        raise InvalidRangeError(
            f"speculative_generate_step: prompt_cache has {len(prompt_cache)} entries, those of the model "
            "alone; pass make_prompt_cache(model) + make_prompt_cache(draft_model)"
        )


def _check_rollback(entries: Any, least: int, drafts: int) -> None:
    for rows in rows_of(entries):
        storage = rows.pool.storage
        windows = [layer.window for layer in storage.layers if isinstance(layer, Attention) and layer.used]
        if storage.rollback < least and any(window is not None for window in windows):
            raise NotSupportedError(
                f"speculative_generate_step: a pool has rollback={storage.rollback}, so that its sliding "
                f"layers cannot take back rejected drafts, num_draft_tokens={drafts}, once their windows are "
                f"full; make it with rollback={least} or more"
            )
