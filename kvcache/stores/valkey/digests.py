"""Digests of entries: xxh3_128 against accidents, keyed blake3 against who may write to the server."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from kvcache.stores.errors import StoreUnavailable
from kvcache.stores.valkey.manifest import ENTRY_FORMAT
from kvcache.stores.valkey.settings import Settings

__all__ = ["Digest", "Digests"]

_CONTEXT = "ml-kvcache 2026-11 digests of entries in a remote store"


class Digest(Protocol):
    """What both packages give."""

    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


class Digests:
    """Digests as one store makes them.

    ``family`` is part of the names on the server: stores that digest otherwise, or with another secret,
    do not see one another's entries, and so never take them for damage.
    """

    def __init__(self, settings: Settings) -> None:
        self._new: Callable[[], Digest]
        if settings.digest == "xxh3_128":
            self._new, self.family = _load("xxhash").xxh3_128, "xxh3"
        elif settings.secret is None:
            self._new, self.family = _load("blake3").blake3, "blake3"
        else:
            blake3 = _load("blake3").blake3
            key = blake3(settings.secret.encode("utf-8"), derive_key_context=_CONTEXT).digest()
            self._new = lambda: blake3(key=key)
            self.family = f"blake3-{blake3(b'family', key=key).hexdigest()[:16]}"

    def start(self, key: str, nbytes: int) -> Digest:
        """A digest that knows whose it is: the data of one key are not those of another."""
        digest = self._new()
        digest.update(f"{ENTRY_FORMAT}\n{key}\n{nbytes}\n".encode("ascii"))
        return digest


def _load(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise StoreUnavailable(
            f"ValkeyStore: its digests need the package {package} ({error}); pip install 'ml-kvcache[valkey]'"
        ) from error
