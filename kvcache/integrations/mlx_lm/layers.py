"""What each layer of an mlx-lm model stores, found by asking the model.

A model says which caches it wants (``make_cache``), and one pass over a single token shows the shapes:
MLX is lazy, so that the pass builds a graph, is read for its shapes, and is thrown away unevaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache

from kvcache.cache import NotSupportedError

__all__ = ["Attention", "Layer", "Recurrent", "layers_of"]

mlx_caches: Any = cache
"""``mlx_lm.models.cache``, which is typed in parts only."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer with K and V.

    ``window`` is mlx-lm's: a query sees itself and the ``window - 1`` tokens before it; None: all of the
    past. Shapes that are None become known with the first K and V.
    """

    window: int | None = None
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    dtype: Any = None
    """MLX's dtype of K and V as the model computes them."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with states of fixed size: entry 0, a convolution's, and entry 1, the recurrence's."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]


Layer = Attention | Recurrent


def layers_of(model: Any) -> list[Layer]:
    """The layers of ``model``, in the order of its prompt cache.

    Raises NotSupportedError for a layer that needs a kind of cache that there is none of here.
    """
    make = getattr(type(model), "make_cache", None)  # not the instance's: it may be ours already
    wanted = make(model) if make is not None else [mlx_caches.KVCache() for _ in model.layers]
    model(mx.zeros((1, 1), mx.int32), cache=wanted)
    return [_layer(i, entry) for i, entry in enumerate(wanted)]


def _layer(i: int, entry: Any) -> Layer:
    kind = type(entry)
    if kind is mlx_caches.KVCache:
        return _attention(entry, None)
    if kind is mlx_caches.RotatingKVCache and not entry.keep:
        return _attention(entry, entry.max_size)
    if kind is mlx_caches.ArraysCache and 1 <= len(entry.cache) <= 2:
        return _recurrent(i, entry.cache)
    detail = f" with keep={entry.keep}" if kind is mlx_caches.RotatingKVCache else ""
    if kind is mlx_caches.ArraysCache:
        detail = f" of {len(entry.cache)} states"
    raise NotSupportedError(
        f"make_prompt_cache: layer {i} of the model wants mlx-lm's {kind.__name__}{detail}; there are "
        "KVCache, RotatingKVCache with keep=0, and ArraysCache of one or two states; use mlx-lm's own cache"
    )


def _attention(entry: Any, window: int | None) -> Attention:
    if entry.keys is None:  # the pass did not come by: it is never asked for, or later
        return Attention(window)
    heads, key_dim = entry.keys.shape[1], entry.keys.shape[3]
    return Attention(window, heads, key_dim, entry.values.shape[3], entry.keys.dtype)


def _recurrent(i: int, states: Sequence[Any]) -> Recurrent:
    if any(state is None for state in states):
        raise NotSupportedError(
            f"make_prompt_cache: layer {i} of the model sets only some of its {len(states)} states in a "
            "pass; use mlx-lm's own cache"
        )
    return Recurrent(tuple(tuple(x.shape[1:]) for x in states), tuple(x.dtype for x in states))
