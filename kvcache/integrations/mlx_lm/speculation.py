"""mlx-lm's speculative decoding on our prompt caches.

It asks once, before it starts, whether drafts can be taken back. A sliding layer without ``rollback`` says
yes as long as nothing has left its window, and silently keeps rejected drafts later on: that is refused here.
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
    given = inspect.signature(original).bind(*arguments, **options).arguments
    _check(given.get("prompt_cache"))
    return original(*arguments, **options)


def _check(prompt_cache: Any) -> None:
    found = rows_of(prompt_cache)
    if not found:
        return
    storage = found[0].pool.storage
    if len(prompt_cache) <= len(storage.entries):
        raise InvalidRangeError(
            f"speculative_generate_step: prompt_cache has {len(prompt_cache)} entries, those of the model "
            "alone; pass make_prompt_cache(model) + make_prompt_cache(draft_model)"
        )
    for rows in found:
        storage = rows.pool.storage
        windows = [layer.window for layer in storage.layers if isinstance(layer, Attention) and layer.used]
        if not storage.rollback and any(window is not None for window in windows):
            raise NotSupportedError(
                "speculative_generate_step: the pool has rollback=0, so that its sliding layers cannot take "
                "back rejected drafts once their windows are full; make it with rollback=1 or more"
            )
