"""Stores for offloaded snapshots, the keys of their entries, and the format of serialized snapshots.

``FileStore``, ``MooncakeStore`` and ``ValkeyStore`` are imported on first use; they need the extras
``[disk]``, ``[mooncake]`` and ``[valkey]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvcache.stores import strict_json
from kvcache.stores.buffers import Buffer, WritableBuffer, as_bytes, as_writable
from kvcache.stores.builtin import path_of
from kvcache.stores.closing import Closing
from kvcache.stores.composing import Part, compose, digest_of
from kvcache.stores.errors import (
    SnapshotCorruptError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    StoreValueError,
    UnknownModelError,
)
from kvcache.stores.hookspecs import StoreSpec, hookimpl
from kvcache.stores.identity import files_digest, identity_of
from kvcache.stores.inspection import SnapshotFile, StoreFolder
from kvcache.stores.keys import Chain, Keys, SaltedToken
from kvcache.stores.memory import MemoryStore
from kvcache.stores.options import parse_bytes, without_secrets
from kvcache.stores.plugins import open_store, store_schemes
from kvcache.stores.protocol import SnapshotStore, Stat, Usage, check_budget, check_key
from kvcache.stores.serialized_snapshot import (
    SNAPSHOT_DIGEST,
    SNAPSHOT_FORMAT,
    SerializedSnapshot,
    digest_of_snapshot,
    get_snapshot,
    pack,
    put_snapshot,
    snapshots_of,
    unpack,
)

if TYPE_CHECKING:
    from kvcache.stores.file import FileStore
    from kvcache.stores.mooncake import MooncakeStore
    from kvcache.stores.valkey import ValkeyStore

__all__ = [
    "SNAPSHOT_DIGEST",
    "SNAPSHOT_FORMAT",
    "Buffer",
    "Chain",
    "Closing",
    "FileStore",
    "Keys",
    "MemoryStore",
    "MooncakeStore",
    "Part",
    "SaltedToken",
    "SerializedSnapshot",
    "SnapshotCorruptError",
    "SnapshotFile",
    "SnapshotStore",
    "Stat",
    "StoreClosedError",
    "StoreError",
    "StoreFolder",
    "StoreFullError",
    "StoreReadOnlyError",
    "StoreSpec",
    "StoreUnavailableError",
    "StoreValueError",
    "UnknownModelError",
    "Usage",
    "ValkeyStore",
    "WritableBuffer",
    "as_bytes",
    "as_writable",
    "check_budget",
    "check_key",
    "compose",
    "digest_of",
    "digest_of_snapshot",
    "files_digest",
    "get_snapshot",
    "hookimpl",
    "identity_of",
    "open_store",
    "pack",
    "parse_bytes",
    "path_of",
    "put_snapshot",
    "snapshots_of",
    "store_schemes",
    "strict_json",
    "unpack",
    "without_secrets",
]


def __getattr__(name: str) -> Any:
    if name == "FileStore":
        return importlib.import_module("kvcache.stores.file").FileStore
    if name == "MooncakeStore":
        return importlib.import_module("kvcache.stores.mooncake").MooncakeStore
    if name == "ValkeyStore":
        return importlib.import_module("kvcache.stores.valkey").ValkeyStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
