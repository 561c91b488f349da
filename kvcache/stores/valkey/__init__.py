"""Snapshots in a Valkey or Redis server, shared by all hosts that name it. Needs the extra ``[valkey]``.

The client library loads with ``ValkeyStore``, when that is first asked for: an address is checked without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache.stores.valkey.store import ValkeyStore

__all__ = ["ValkeyStore"]


def __getattr__(name: str) -> Any:
    if name != "ValkeyStore":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("kvcache.stores.valkey.store").ValkeyStore
    except ImportError as error:
        raise ImportError(
            f"ValkeyStore needs the package valkey: pip install 'ml-kvcache[valkey]' ({error})"
        ) from error
