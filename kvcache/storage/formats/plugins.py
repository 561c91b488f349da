"""Formats by name: those built in, those given to ``init``, those of plugins (group ``kvcache.formats``)."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Iterable

from kvcache.cache import StorageFormat
from kvcache.storage.formats import affine, hookspecs
from kvcache.storage.formats.float8 import F8_E4M3
from kvcache.storage.formats.ggml import Q4_0, Q8_0
from kvcache.storage.formats.hookspecs import FormatSpec, check_name, hookimpl
from kvcache.storage.formats.plain import PLAIN
from kvcache.storage.formats.rotated import Rotated
from ml import DTypeError, NotSupportedError, PluginError
from ml.plugin_host import Hook, PluginHost

ENTRY_POINT_GROUP = "kvcache.formats"
BUILT_IN: dict[str, StorageFormat] = {
    **PLAIN,
    **{one.name: one for one in (Q8_0, Q4_0, F8_E4M3)},
    **affine.FORMATS,
}
BUILT_IN |= {
    one.name: one for one in map(Rotated, list(BUILT_IN.values())) if one.inner not in PLAIN.values()
}
METHODS = ("parts", "head_dim", "encode", "decode", "bound")

_HOOK = Hook(
    provides="storage format",
    project=hookspecs.PROJECT,
    group=ENTRY_POINT_GROUP,
    specs=hookspecs,
    name="kvcache_format",
    record=FormatSpec,
    record_name="kvcache.storage.formats.FormatSpec",
    marker="@kvcache.storage.formats.hookimpl",
    opens="kvcache.StorageFormat",
    methods=METHODS,
    call="open_format",
    unknown=DTypeError,
    unavailable=NotSupportedError,
)


class _BuiltIn:
    def __init__(self, stored: StorageFormat) -> None:
        self._stored = stored

    @hookimpl
    def kvcache_format(self) -> FormatSpec:
        return FormatSpec(self._stored.name, lambda: self._stored)


class FormatRegistry(PluginHost[FormatSpec]):
    """The formats of plugins, beside those built in, whose names are taken."""

    def __init__(self, entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> None:
        super().__init__(_HOOK, entry_points)
        for stored in BUILT_IN.values():
            self.register(_BuiltIn(stored), stored.name)

    def open(self, name: str) -> StorageFormat:
        stored: StorageFormat = self.opened(self.usable(name))
        if stored.name != name:
            raise PluginError(
                f"open_format: the plugin of {name!r} gave a format that is named {stored.name!r}"
            )
        return stored

    def _listed(self) -> str:
        return ", ".join(self.specs())


_registry: FormatRegistry | None = None
_kept: dict[str, StorageFormat] = {}
"""Opened, or given to ``init``."""
_lock = threading.RLock()


def registry() -> FormatRegistry:
    global _registry
    with _lock:
        if _registry is None:
            _registry = FormatRegistry()
        return _registry


def open_format(name: str) -> StorageFormat:
    """The format of this name, in capitals or small letters.

    Raises DTypeError for a name that there is none of (the message lists those that exist), NotSupportedError
    for one that cannot be used here.
    """
    known = name.upper()
    stored = BUILT_IN.get(known) or _kept.get(known)
    if stored is None:
        stored = registry().open(known)
        with _lock:
            stored = _kept.setdefault(known, stored)
    return stored


def keep_format(stored: StorageFormat) -> StorageFormat:
    """Know a format by its name from now on: snapshots name no more of it.

    Raises PluginError for a name that no format can have, and one that another kind of format has.
    """
    check_name(stored.name)
    with _lock:
        known = BUILT_IN.get(stored.name) or _kept.setdefault(stored.name, stored)
    if type(known) is not type(stored):
        raise PluginError(
            f"{stored!r:.60} is named {stored.name}, as {known!r:.60}; give it a name of its own"
        )
    return stored


def format_names() -> tuple[str, ...]:
    """The names of all formats that are built in or come with plugins."""
    return tuple(registry().specs())
