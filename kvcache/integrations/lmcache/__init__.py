"""These stores as a remote backend of LMCache: a connector, named in its configuration.

::

    remote_storage_plugins: ["kvcache"]
    extra_config:
      remote_storage_plugin.kvcache.module_path: kvcache.integrations.lmcache
      remote_storage_plugin.kvcache.class_name: KVStoreConnector
      kvcache.store: "file:///var/cache/kv?budget=100GiB"

LMCache loads ``connector``, which imports LMCache; ``chunks`` does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.integrations.lmcache.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        return importlib.import_module("kvcache.integrations.lmcache.connector").KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
