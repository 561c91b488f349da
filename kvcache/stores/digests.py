"""Digests of entries: xxh3_128 detects damage, keyed blake3 also detects forgery."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, Final, Protocol

from kvcache.stores.errors import StoreUnavailableError, StoreValueError

__all__ = ["BLAKE3", "XXH3", "Digest", "Digests", "check_digest", "is_family", "load"]

XXH3: Final = "xxh3_128"
BLAKE3: Final = "blake3"
_CONTEXT = "ml-kvcache 2026-11 digests of entries in a remote store"
_FAMILY = re.compile(r"blake3(-[0-9a-f]{16})?")


class Digest(Protocol):
    """The interface that both packages share."""

    def update(self, data: Any, /) -> Any: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


class Digests:
    """The digests of one store: ``name`` is XXH3, or BLAKE3 with an optional ``secret`` as its key.

    ``family`` is part of the names of entries: stores with another digest or secret do not see one another's
    entries, and so never take them for damaged. Raises StoreUnavailableError if the package is missing; the
    message names the ``owner`` that needs it and the ``extra`` that installs it.
    """

    def __init__(self, owner: str, extra: str, name: str = XXH3, secret: str | None = None) -> None:
        self.name = name
        self.keyed = secret is not None
        self._new: Callable[[], Digest]
        if name == XXH3:
            self._new, self.family = load(owner, extra, "xxhash").xxh3_128, "xxh3"
            return
        blake3 = load(owner, extra, "blake3").blake3
        if secret is None:
            self._new, self.family = blake3, BLAKE3
        else:
            key = blake3(secret.encode("utf-8"), derive_key_context=_CONTEXT).digest()
            self._new = lambda: blake3(key=key)
            self.family = f"{BLAKE3}-{blake3(b'family', key=key).hexdigest()[:16]}"

    def start(self, *of: object) -> Digest:
        """A digest that includes a line for each of ``of``, so that the data of one key do not pass for
        another's.
        """
        digest = self._new()
        digest.update("".join(f"{word}\n" for word in of).encode("ascii"))
        return digest


def check_digest(owner: str, name: object, secret: object) -> None:
    """Raise StoreValueError for an unknown digest, or a secret that it does not take; secrets are never
    shown.
    """
    if name not in (XXH3, BLAKE3):
        raise StoreValueError(f"{owner}: digest={name!r}; it must be {XXH3!r} or {BLAKE3!r}")
    if secret is None:
        return
    if not isinstance(secret, str) or not secret:
        raise StoreValueError(f"{owner}: the secret must be non-empty text")
    if name != BLAKE3:
        raise StoreValueError(f"{owner}: a secret can only be used with digest={BLAKE3!r}, not {name!r}")


def is_family(text: str) -> bool:
    """Whether this is the family name of a digest other than XXH3."""
    return _FAMILY.fullmatch(text) is not None


def load(owner: str, extra: str, package: str) -> Any:
    """The digest package. Raises StoreUnavailableError, naming the extra, if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise StoreUnavailableError(
            f"{owner}: its digests need the package {package} ({error}); pip install 'ml-kvcache[{extra}]'"
        ) from error
