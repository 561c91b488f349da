"""The hook that a plugin with a storage format implements.

A plugin is any module (or object) named by an entry point of the group ``kvcache.formats``, with::

    from kvcache.storage.formats import FormatSpec, hookimpl

    @hookimpl
    def kvcache_format() -> FormatSpec: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pluggy

from kvcache.cache import StorageFormat
from ml import Availability, PluginError
from ml.records import CALLABLE, NAME, TEXT, check

PROJECT = "kvcache"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


def _here() -> Availability:
    return Availability(True)


@dataclass(frozen=True, slots=True)
class FormatSpec:
    """A plugin's record: ``open()`` gives the format of this name, ``probe`` says whether it can here.

    The name is in capitals; the command line takes small letters too.
    """

    name: str
    open: Callable[[], StorageFormat]
    install_hint: str = ""
    probe: Callable[[], Availability] = _here

    def __post_init__(self) -> None:
        check(self, name=NAME, install_hint=TEXT, probe=CALLABLE, open=CALLABLE)
        check_name(self.name)


def check_name(name: str) -> None:
    """Raise PluginError for what cannot name a format: "/" is between the names of a pair."""
    if name != name.upper() or not name.isascii() or set(name) & set("/, ") or not name.isprintable():
        raise PluginError(
            f"FormatSpec: name={name!r}; a name must be uppercase ASCII without '/', ',' and spaces"
        )


@hookspec
def kvcache_format() -> FormatSpec:  # type: ignore[empty-body]
    """The record of one format."""
