"""Configs and caches of models whose layers are of several types, as config.json names them."""

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
"""Types of layers, as config.json names them."""
SLIDING, FULL = 0, 1
"""Layer types of ``sliding_cache``."""


@dataclass(frozen=True, slots=True)
class SlidingConfig(ModelConfig):
    """Of sliding and full layers: ``kinds`` has the type of each by name, and ``window`` counts the token
    itself, as config.json does. ``rope`` is that of full layers, ``local_rope`` that of sliding ones.
    """

    kinds: tuple[str, ...]
    window: int
    local_rope: nn.RopeSpec

    def cache_kind(self, i: int) -> int:
        """What layer i is to ``sliding_cache``."""
        return SLIDING if self.kinds[i] == SLIDING_ATTENTION else FULL

    def cached_tokens(self, layer: int, max_sequences: int, capacity: int, max_batch: int) -> int:
        kept = self.window - (max_sequences == 1)
        if self.cache_kind(layer) == FULL or kept >= capacity:
            return max_sequences * capacity
        return max_sequences * kept + max_batch


def layer_types(
    raw: Mapping[str, Any], known: Sequence[str], default: Callable[[int], str]
) -> tuple[str, ...]:
    """The type of each layer, ``default(i)`` where config.json does not list them."""
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
    """Those of a SlidingConfig: the common ``fields``, with the layers' types and their window."""
    kinds = layer_types(raw, (SLIDING_ATTENTION, FULL_ATTENTION), default)
    window = int(raw["sliding_window"] or fields["max_positions"])
    return {**fields, "kinds": kinds, "window": window}


def sliding_cache(
    config: SlidingConfig, dtype: ml.DType | None = None, memory: int | None = None
) -> WrapperCache:
    """For sliding layers (type SLIDING) and full ones (type FULL), of any ``dtype`` alike.

    ``memory`` is as SlidingWindowCache has it. Hugging Face's window counts the token itself: it is our
    ``window - 1``.
    """
    sliding = SlidingWindowCache(config.window - 1, memory, nn.rope_shift(config.local_rope))
    return WrapperCache(sliding, CausalCache(nn.rope_shift(config.rope)))
