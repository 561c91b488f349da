"""mlx-lm's speculative decoding on our prompt caches.

It asks once, before it starts, whether drafts of the model can be taken back. A sliding layer without
``rollback`` says yes as long as nothing has left its window, and silently keeps rejected drafts later on.
That is refused here. So is a ``rollback`` of a draft model that is less than its drafts, made one by one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm.layers import Attention
from kvcache.integrations.mlx_lm.lru import rows_of

__all__ = ["check_speculation"]


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
    _check(given["prompt_cache"], len(given["model"].layers), given["num_draft_tokens"])
    return original(*arguments, **options)


def _check(prompt_cache: Any, layers: int, drafts: int) -> None:
    found = rows_of(prompt_cache)
    if not found:
        return
    storage = found[0].pool.storage
    if len(prompt_cache) <= len(storage.entries):
        raise InvalidRangeError(
            f"speculative_generate_step: prompt_cache has {len(prompt_cache)} entries, those of the model "
            "alone; pass make_prompt_cache(model) + make_prompt_cache(draft_model)"
        )
    _check_rollback(prompt_cache[:layers], 1, drafts)
    _check_rollback(prompt_cache[layers:], max(1, drafts - 1), drafts)


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
