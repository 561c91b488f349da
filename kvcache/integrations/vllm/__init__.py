"""These stores behind vLLM: a KV connector, or a tier below vLLM's own, named in a launch flag.

::

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "KVCacheConnector", "kv_connector_module_path": "kvcache.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "file:///var/cache/kv?budget=100GiB"}}'

vLLM loads ``connector`` and ``metrics``, or ``offloading`` and ``tier``, which import it; ``layers`` and
``paged_cache`` import PyTorch. Planning, naming, reading and writing need neither: ``planner`` runs in the
scheduler, ``transfers`` in a worker, and ``steps`` is the data passed between them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.integrations.vllm.connector import KVCacheConnector
    from kvcache.integrations.vllm.offloading import KVCacheOffloadingConnector
    from kvcache.integrations.vllm.tier import KVCacheTier

__all__ = ["KVCacheConnector", "KVCacheOffloadingConnector", "KVCacheTier"]

_MODULES = {
    "KVCacheConnector": "connector",
    "KVCacheOffloadingConnector": "offloading",
    "KVCacheTier": "tier",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"kvcache.integrations.vllm.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
