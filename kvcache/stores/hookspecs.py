"""The hook that a plugin with a store implements.

A plugin is any module (or object) named by an entry point of the group ``kvcache.stores``, with::

    from kvcache.stores import StoreSpec, hookimpl

    @hookimpl
    def kvcache_store() -> StoreSpec: ...

The module must be importable without the client library of its store: ``probe`` and ``open`` import it,
``check`` does not.
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

    ``name`` is also the scheme of the store's URLs. ``open(url, **options)`` receives the URL without its
    query, or None if the store was requested by name; the fields of the query are options, as text. ``check``
    takes the same arguments and raises StoreValueError for an invalid address or option. It is called before
    ``probe``, so that these are refused even if the client library is missing.
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
