"""Formats by name: the built-in ones, and those passed to ``init`` in this process."""

from __future__ import annotations

import threading

from kvcache.cache import StorageFormat
from kvcache.storage.formats import affine
from kvcache.storage.formats.float8 import F8_E4M3
from kvcache.storage.formats.ggml import Q4_0, Q8_0
from kvcache.storage.formats.plain import PLAIN
from kvcache.storage.formats.rotated import Rotated
from ml import DTypeError

BUILT_IN: dict[str, StorageFormat] = {
    **PLAIN,
    **{one.name: one for one in (Q8_0, Q4_0, F8_E4M3)},
    **affine.FORMATS,
}
BUILT_IN |= {
    one.name: one for one in map(Rotated, list(BUILT_IN.values())) if one.inner not in PLAIN.values()
}
METHODS = ("parts", "head_dim", "encode", "decode", "bound")

_given: dict[str, StorageFormat] = {}
"""Custom formats by name."""
_lock = threading.Lock()


def format_names() -> tuple[str, ...]:
    """The names of the built-in formats."""
    return tuple(BUILT_IN)


def open_format(name: str) -> StorageFormat:
    """The format of this name, ignoring case. Raises DTypeError for an unknown name.

    >>> from kvcache import open_format
    >>> open_format("q8_0").name
    'Q8_0'
    """
    stored = BUILT_IN.get(name.upper()) or _given.get(name.upper())
    if stored is None:
        known = ", ".join((*BUILT_IN, *_given))
        raise DTypeError(
            f"open_format: no storage format {name!r:.60}; known: {known}. A format of your own is known by "
            "its name once it has been passed to init"
        )
    return stored


def keep_format(stored: StorageFormat) -> StorageFormat:
    """Register a format under its name, since snapshots, serialized or not, contain only the name.

    Raises DTypeError for an invalid name ("/" separates the names of a pair), and for one that a format of
    another class has.
    """
    name = stored.name
    if not (name and name.isascii() and name.isprintable() and name == name.upper()) or set(name) & set(
        "/, "
    ):
        raise DTypeError(
            f"init: a storage format named {name!r:.60}; a name must be uppercase ASCII without '/', ',' "
            "and spaces"
        )
    with _lock:
        known = BUILT_IN.get(name) or _given.setdefault(name, stored)
    if type(known) is not type(stored):
        raise DTypeError(f"init: {stored!r:.60} is named {name}, as {known!r:.60}; give it a name of its own")
    return stored
