"""These stores as a remote backend of LMCache: a connector, named in its configuration.

::

    remote_storage_plugins: ["kvcache"]
    extra_config:
      remote_storage_plugin.kvcache.module_path: kvcache.integrations.lmcache
      remote_storage_plugin.kvcache.class_name: KVStoreConnector
      kvcache.store: "file:///var/cache/kv?budget=100GiB"

In LMCache's multiprocess mode, an adapter of its server::

    --l2-adapter '{"type": "plugin", "module_path": "kvcache.integrations.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"store": "file:///var/cache/kv?budget=100GiB"}}'

LMCache loads ``connector`` or ``l2_adapter``, which import LMCache; ``chunks`` does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.integrations.lmcache.connector import KVStoreConnector
    from kvcache.integrations.lmcache.l2_adapter import KVStoreL2Adapter

__all__ = ["KVStoreConnector", "KVStoreL2Adapter"]

_MODULES = {"KVStoreConnector": "connector", "KVStoreL2Adapter": "l2_adapter"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"kvcache.integrations.lmcache.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
