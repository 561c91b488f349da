"""Finding stores by name or URL, with the plugin host of backends and the group ``kvcache.stores``."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Iterable
from os import PathLike, fspath
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvcache.stores import builtin, hookspecs
from kvcache.stores.errors import StoreUnavailableError, StoreValueError
from kvcache.stores.hookspecs import StoreSpec
from kvcache.stores.options import without_secrets
from kvcache.stores.protocol import SnapshotStore
from ml.plugin_host import Hook, PluginHost, misfit

__all__ = ["ENTRY_POINT_GROUP", "StoreRegistry", "open_store", "registry", "store_schemes"]

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
    unknown=StoreUnavailableError,
    unavailable=StoreUnavailableError,
)


class StoreRegistry(PluginHost[StoreSpec]):
    """The built-in stores and those of plugins. ``registry()`` returns that of the process."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        super().__init__(_HOOK, entry_points)
        for spec in builtin.specs():
            self.register(builtin.BuiltinStore(spec), spec.name)

    def open(self, store: str | PathLike[str], options: dict[str, Any]) -> SnapshotStore:
        name, url, fields = _parsed(store)
        if twice := fields.keys() & options.keys():
            shown = without_secrets(fspath(store))
            raise StoreValueError(f"open_store: {sorted(twice)} given in {shown!r} and as an option")
        spec = self.claimed(name)
        self._check(spec, url, {**fields, **options})
        opened: SnapshotStore = self.opened(self.ready(spec), url, **fields, **options)
        return opened

    def _check(self, spec: StoreSpec, url: str | None, options: dict[str, Any]) -> None:
        """Refuse an invalid address before the probe, which loads the store's client library."""
        check = spec.check
        for takes in filter(None, (spec.open, check)):
            if wrong := misfit(takes, url, **options):
                raise StoreValueError(f"open_store: {spec.name!r}: {wrong}")
        if check is not None:
            self.called(spec, lambda: check(url, **options), given=True)

    def _listed(self) -> str:
        names = ", ".join(sorted(self.specs()))
        url = "file:///var/cache/kv?budget=10GiB"
        return f"{names}, each by its name or a URL such as {url}, and folders: ./folder, or a pathlib.Path"


def _parsed(store: str | PathLike[str]) -> tuple[str, str | None, dict[str, Any]]:
    """(name, URL without its query, fields of the query)."""
    name_or_url = fspath(store)
    if isinstance(store, PathLike) or "/" in name_or_url.partition(":")[0]:
        return "file", None, {"path": name_or_url}
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


def open_store(store: str | PathLike[str], **options: Any) -> SnapshotStore:
    """Open a store by name ("file", with ``path=``), URL ("file:///var/cache/kv?budget=10GiB") or folder.

    A folder is a ``pathlib.Path``, or a string that contains a slash ("./kept"); "kept" would be the name of
    a store.

    Raises StoreUnavailableError for an unknown name (the message lists the known ones) and for a store that
    cannot be used here, StoreValueError for an option that is unknown, given twice or out of range.

    >>> from kvcache.stores import open_store
    >>> with open_store("memory:?budget=2GiB") as store:
    ...     store.budget
    2147483648
    """
    return registry().open(store, options)


def store_schemes() -> tuple[str, ...]:
    """The URL schemes that ``open_store`` accepts, of built-in stores and plugins, in alphabetical order."""
    return tuple(sorted(registry().specs()))
