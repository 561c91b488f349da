"""Attention by ``Cache.attend``, where that reads less than the arrays that ``update_and_fetch`` gives.

Those have every row of a batch padded to the longest, and what rows share once for each of them; of quantized
storage they are floats. mlx-lm's models hand them to ``scaled_dot_product_attention``, by a name of their
own module. There stands a function of the same name that asks the entry first; for entries of mlx-lm's own it
does what theirs does. The arrays that are not used then are never computed: MLX is lazy.
"""

from __future__ import annotations

import sys
from typing import Any

from mlx_lm.models import base

from kvcache.integrations.mlx_lm.attention import Attending

__all__ = ["attend_by_entries"]

_NAME = "scaled_dot_product_attention"
_original: Any = getattr(base, _NAME)


def attend_by_entries(model: Any) -> bool:
    """Let the layers of ``model`` ask their entries, as others of its classes then do; False: none can."""
    names = {type(module).__module__ for _, module in model.named_modules()}
    places = [vars(sys.modules[name]) for name in names]
    asking = [place for place in places if place.get(_NAME) in (_original, _scaled_dot_product_attention)]
    for place in asking:
        place[_NAME] = _scaled_dot_product_attention
    return bool(asking)


def _scaled_dot_product_attention(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> Any:
    if isinstance(cache, Attending):
        found = cache.attend(queries, keys, values, scale, mask, sinks)
        if found is not None:
            return found
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
