"""Stores: where snapshots go when they are paged out, and how what they hold is named and laid out.

``FileStore``, ``MooncakeStore`` and ``ValkeyStore`` load when they are first asked for; they need the
extras ``[disk]``, ``[mooncake]`` and ``[valkey]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcache.stores.buffers import Buffer, WritableBuffer
from kvcache.stores.errors import (
    SnapshotCorrupt,
    StoreClosedError,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    StoreValueError,
)
from kvcache.stores.hookspecs import StoreSpec, hookimpl
from kvcache.stores.keys import Chain, Keys
from kvcache.stores.memory import MemoryStore
from kvcache.stores.page import PAGE_FORMAT, SerializedSnapshot, pack, unpack
from kvcache.stores.plugins import open_store
from kvcache.stores.protocol import SnapshotStore, Stat, Usage, check_budget, check_key
from kvcache.stores.sizes import parse_bytes
from kvcache.stores.snapshots import get_page, put_page

if TYPE_CHECKING:
    from kvcache.stores.file import FileStore
    from kvcache.stores.mooncake import MooncakeStore
    from kvcache.stores.valkey import ValkeyStore

__all__ = [
    "PAGE_FORMAT",
    "Buffer",
    "Chain",
    "FileStore",
    "Keys",
    "MemoryStore",
    "MooncakeStore",
    "SerializedSnapshot",
    "SnapshotCorrupt",
    "SnapshotStore",
    "Stat",
    "StoreClosedError",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "StoreSpec",
    "StoreUnavailable",
    "StoreValueError",
    "Usage",
    "ValkeyStore",
    "WritableBuffer",
    "check_budget",
    "check_key",
    "get_page",
    "hookimpl",
    "open_store",
    "pack",
    "parse_bytes",
    "put_page",
    "unpack",
]


def __getattr__(name: str) -> Any:
    if name == "FileStore":
        return importlib.import_module("kvcache.stores.file").FileStore
    if name == "MooncakeStore":
        return importlib.import_module("kvcache.stores.mooncake").MooncakeStore
    if name == "ValkeyStore":
        return importlib.import_module("kvcache.stores.valkey").ValkeyStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
