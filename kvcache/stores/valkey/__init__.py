"""Snapshots in a Valkey or Redis server, shared by all hosts that name it. Needs the extra ``[valkey]``."""

from __future__ import annotations

try:
    from kvcache.stores.valkey.store import ValkeyStore
except ImportError as error:
    raise ImportError(
        f"ValkeyStore needs the package valkey: pip install 'ml-kvcache[valkey]' ({error})"
    ) from error

__all__ = ["ValkeyStore"]
