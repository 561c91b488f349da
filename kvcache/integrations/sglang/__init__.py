"""These stores behind SGLang: a storage backend of its hierarchical cache, named in launch flags.

::

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \\
        --hicache-mem-layout page_first --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{
            "backend_name": "kvcache", "module_path": "kvcache.integrations.sglang",
            "class_name": "HiCacheStore", "interface_v1": 1, "store": "file:///var/cache/kv?budget=100GiB"}'

SGLang loads ``storage``, which imports it; ``host_pages`` imports PyTorch. ``page_store`` names, writes,
reads and finds pages without either.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.integrations.sglang.storage import HiCacheStore

__all__ = ["HiCacheStore"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheStore":
        return importlib.import_module("kvcache.integrations.sglang.storage").HiCacheStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
