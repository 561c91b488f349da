"""A picture of any cache, or of a PrefixCache."""

from __future__ import annotations

from typing import Any, overload

from kvcache.cache import NotSupportedError
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.views.caches import render_cache
from kvcache.views.pictures import CachePicture, PrefixPicture
from kvcache.views.prefixes import render_prefix
from kvcache.views.words import Decode

__all__ = ["render"]

NODES = 200


@overload
def render(cache: PrefixCache, decode: Decode | None = None, nodes: int = NODES) -> PrefixPicture: ...
@overload
def render(cache: Any) -> CachePicture: ...
def render(
    cache: Any, decode: Decode | None = None, nodes: int | None = None
) -> CachePicture | PrefixPicture:
    """A picture of what a cache holds: ``print`` it, or ``save`` it as .html, .svg or .json.

    Plain data that the next pass leaves as it is; taking it changes nothing and copies no tensor. A cache of
    another package shows its name and ``nbytes`` alone.

    Of a PrefixCache, a picture of its radix tree, tiers, sessions and cache. ``decode``
    (``Tokenizer.decode``, say) gives the text of token ids, None shows the ids; of a larger radix tree the
    ``nodes`` (200) that were used last are drawn. NotSupportedError where either is given for another cache.

    Raises OrderError for a cache that is bound to no backend, ClosedError for one that is closed,
    InvalidRangeError for nodes < 0.
    """
    if isinstance(cache, PrefixCache):
        return render_prefix(cache, decode, NODES if nodes is None else nodes)
    if decode is not None or nodes is not None:
        raise NotSupportedError(
            f"render: {type(cache).__name__} has no prefix tree; decode and nodes are for a PrefixCache"
        )
    return render_cache(cache)
