"""Our stores behind vLLM: a KV connector that is named in a launch flag.

::

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "KVCacheConnector", "kv_connector_module_path": "kvcache.integrations.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "file:///var/cache/kv?budget=100GiB"}}'

``connector`` and ``metrics`` are what vLLM loads, and import it; ``paged_cache`` imports PyTorch. What is
planned, named, read and written is decided without either: ``planner`` for the scheduler, ``transfers`` for
a worker, ``steps`` is what passes between them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.integrations.vllm.connector import KVCacheConnector

__all__ = ["KVCacheConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVCacheConnector":
        return importlib.import_module("kvcache.integrations.vllm.connector").KVCacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
