"""Configs and caches of models with several layer types, named as in config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml
from kvcache import CausalCache, SlidingWindowCache, WrapperCache
from kvcache_engine.config import ModelConfig
from kvcache_engine.errors import ModelError
from ml import nn

__all__ = [
    "FULL",
    "FULL_ATTENTION",
    "SLIDING",
    "SLIDING_ATTENTION",
    "SlidingConfig",
    "layer_types",
    "sliding_cache",
    "sliding_fields",
]

SLIDING_ATTENTION, FULL_ATTENTION = "sliding_attention", "full_attention"
"""Layer types, named as in config.json."""
SLIDING, FULL = 0, 1
"""Layer types of ``sliding_cache``."""


@dataclass(frozen=True, slots=True)
class SlidingConfig(ModelConfig):
    """A config with sliding and full layers: ``kinds`` has the type of each by name, and ``window`` includes
    the token itself, as in config.json. ``rope`` is for full layers, ``local_rope`` for sliding ones.
    """

    kinds: tuple[str, ...]
    window: int
    local_rope: nn.RopeSpec

    def cache_kind(self, i: int) -> int:
        """The type of layer i in ``sliding_cache``."""
        return SLIDING if self.kinds[i] == SLIDING_ATTENTION else FULL

    def cached_tokens(self, layer: int, max_sequences: int, capacity: int, max_batch: int) -> int:
        kept = self.window - (max_sequences == 1)
        if self.cache_kind(layer) == FULL or kept >= capacity:
            return max_sequences * capacity
        return max_sequences * kept + max_batch


def layer_types(
    raw: Mapping[str, Any], known: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """The type of each layer; ``default(i)`` if config.json does not list them."""
    count = raw["num_hidden_layers"]
    kinds = tuple(raw.get("layer_types") or [default(i) for i in range(count)])
    if len(kinds) != count:
        raise ModelError(f"{len(kinds)} layer_types for {count} layers; there must be one for each")
    for kind in kinds:
        if kind not in known:
            raise ModelError(f"layer type {kind!r} is not supported; {' and '.join(known)} are")
    return kinds


def sliding_fields(
    raw: Mapping[str, Any], fields: Mapping[str, Any], default: Callable[[int], str]
) -> dict[str, Any]:
    """The fields of a SlidingConfig: the common ``fields``, the layers' types and their window."""
    kinds = layer_types(raw, (SLIDING_ATTENTION, FULL_ATTENTION), default)
    window = int(raw["sliding_window"] or fields["max_positions"])
    return {**fields, "kinds": kinds, "window": window}


def sliding_cache(
    config: SlidingConfig, dtype: ml.DType | None = None, memory: int | None = None
) -> WrapperCache:
    """A cache for sliding layers (type SLIDING) and full ones (type FULL), for any ``dtype``. ``memory`` as
    in SlidingWindowCache. Hugging Face's window includes the token itself; ours excludes it and is one
    smaller.
    """
    sliding = SlidingWindowCache(config.window - 1, memory, nn.rope_shift(config.local_rope))
    return WrapperCache(sliding, CausalCache(nn.rope_shift(config.rope)))
