"""The layers of vLLM's cache as it registers them. Imports PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcache.integrations.vllm.paged_cache import CacheLayer, Fill

__all__ = ["cache_layers", "spec_of"]


def cache_layers(
    group: Any, caches: Mapping[str, torch.Tensor], modules: Mapping[str, Any]
) -> Sequence[CacheLayer]:
    """The layers of a ``KVCacheGroupSpec``, in its order."""
    return [_layer(name, spec_of(group, name), caches[name], modules[name]) for name in group.layer_names]


def spec_of(group: Any, name: str) -> Any:
    """The spec of a group's layer, which has its own if layers differ in width."""
    return getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)


def _layer(name: str, spec: Any, cache: torch.Tensor, module: Any) -> CacheLayer:
    return CacheLayer(name, cache, spec.num_kv_heads, spec.head_size, spec.head_size_v, _fill(module, spec))


def _fill(module: Any, spec: Any) -> Fill | None:
    """vLLM's kernel that stores K and V of a layer; None if there is none, or if it uses scales."""
    update = getattr(module.impl, "do_kv_cache_update", None)
    if update is None or spec.kv_quant_mode != 0:
        return None

    def fill(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        update(module, key, value, cache, slots)

    return fill
