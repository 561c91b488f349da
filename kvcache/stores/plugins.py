"""Finding stores by name or URL: the host of backends' plugins, with the group ``kvcache.stores``."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvcache.stores import builtin, hookspecs
from kvcache.stores.errors import StoreUnavailable, StoreValueError
from kvcache.stores.hookspecs import StoreSpec
from kvcache.stores.options import without_secrets
from kvcache.stores.protocol import SnapshotStore
from ml.plugin_host import Hook, PluginHost

__all__ = ["ENTRY_POINT_GROUP", "StoreRegistry", "open_store", "registry"]

ENTRY_POINT_GROUP = "kvcache.stores"

_HOOK = Hook(
    provides="store",
    project=hookspecs.PROJECT,
    group=ENTRY_POINT_GROUP,
    specs=hookspecs,
    name="kvcache_store",
    record=StoreSpec,
    record_name="kvcache.stores.StoreSpec",
    marker="@kvcache.stores.hookimpl",
    opens="kvcache.stores.SnapshotStore",
    methods=("put", "stat", "get_into", "prefix", "delete", "close"),
    call="open_store",
    unknown=StoreUnavailable,
    unavailable=StoreUnavailable,
)


class StoreRegistry(PluginHost[StoreSpec]):
    """The built-in stores and those of plugins. :func:`registry` gives the process's own."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        super().__init__(_HOOK, entry_points)
        for spec in builtin.specs():
            self.register(builtin.BuiltinStore(spec), spec.name)

    def open(self, name_or_url: str, options: dict[str, Any]) -> SnapshotStore:
        name, url, fields = _parsed(name_or_url)
        if twice := fields.keys() & options.keys():
            shown = without_secrets(name_or_url)
            raise StoreValueError(f"open_store: {sorted(twice)} given in {shown!r} and as an option")
        store: SnapshotStore = self.opened(self.usable(name), url, **fields, **options)
        return store

    def _listed(self) -> str:
        names = ", ".join(sorted(self.specs()))
        url = "file:///var/cache/kv?budget=10GiB"
        return (
            f"{names}, each by its name or a URL such as {url} (PrefixCache takes a folder as pathlib.Path)"
        )


def _parsed(name_or_url: str) -> tuple[str, str | None, dict[str, Any]]:
    """(name, URL without its query, fields of the query)."""
    if ":" not in name_or_url:
        return name_or_url, None, {}
    shown = without_secrets(name_or_url)
    try:
        parts = urlsplit(name_or_url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        why = error if shown == name_or_url else "not well formed; a password must be percent-encoded"
        raise StoreValueError(f"open_store: {shown!r}: {why}") from None  # its cause quotes what it parsed
    if len(dict(pairs)) != len(pairs):
        raise StoreValueError(f"open_store: {shown!r} gives an option twice")
    if parts.fragment:
        raise StoreValueError(f"open_store: {shown!r} has a fragment; write %23 for a #")
    return parts.scheme, name_or_url.partition("?")[0], dict(pairs)


_registry: StoreRegistry | None = None
_registry_lock = threading.Lock()


def registry() -> StoreRegistry:
    """The process's registry, made at the first call."""
    global _registry
    with _registry_lock:
        if _registry is None:
            _registry = StoreRegistry()
        return _registry


def open_store(name_or_url: str, **options: Any) -> SnapshotStore:
    """Open a store by name ("file", with ``path=``) or by URL ("file:///var/cache/kv?budget=10GiB").

    Raises StoreUnavailable for an unknown name (the message lists those that exist) and where the store
    cannot be used here, StoreValueError for an option given twice or out of its range.
    """
    return registry().open(name_or_url, options)
