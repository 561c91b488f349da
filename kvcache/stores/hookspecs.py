"""The hook that a plugin with a store implements.

A plugin is any module (or object) named by an entry point of the group ``kvcache.stores``, with::

    from kvcache.stores import StoreSpec, hookimpl

    @hookimpl
    def kvcache_store() -> StoreSpec: ...

The module imports without the client library of its store: ``probe`` and ``open`` import it, ``check``
does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pluggy

from kvcache.stores.protocol import SnapshotStore
from ml import Availability
from ml.records import CALLABLE, NAME, TEXT, check

__all__ = ["PROJECT", "StoreSpec", "hookimpl", "hookspec", "kvcache_store"]

PROJECT = "kvcache"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A plugin's record. Making one imports no client library; ``probe`` and ``open`` may.

    ``name`` is also the scheme of the store's URLs. ``open(url, **options)`` gets the URL without its
    query, None where the store was asked for by name alone; fields of the query are options, as text.
    ``check``, given the same, raises StoreValueError for an address or an option that makes no sense; it is
    called before ``probe``, so that they are refused where the client library is missing too.
    """

    name: str
    install_hint: str
    probe: Callable[[], Availability]
    open: Callable[..., SnapshotStore]
    check: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        check(self, name=NAME, install_hint=TEXT, probe=CALLABLE, open=CALLABLE)
        if self.check is not None:
            check(self, check=CALLABLE)


@hookspec
def kvcache_store() -> StoreSpec:  # type: ignore[empty-body]
    """The record of one kind of store."""
