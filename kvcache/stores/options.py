"""Options of stores, as arguments or as text in a URL. Error messages begin with ``owner``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, overload

from kvcache.cache import InvalidRangeError
from kvcache.stores.errors import StoreValueError
from kvcache.stores.sizes import parse_bytes as read_bytes

__all__ = ["check_options", "parse_bytes", "read_prefix", "read_truth", "without_secrets"]

_PREFIX = re.compile(r"[0-9A-Za-z._:-]{1,64}")
_TRUTH = dict.fromkeys(("yes", "true", "1", "on"), True) | dict.fromkeys(("no", "false", "0", "off"), False)
_USER = re.compile(r"//.*@", re.DOTALL)
_FIELD = re.compile(r"\b((?:\w*_)?(?:password|secret|token))=.*", re.IGNORECASE | re.DOTALL)


def check_options(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise StoreValueError(f"{owner}: no option {name!r}; there are: {', '.join(sorted(known))}")


def read_prefix(owner: str, name: str, value: Any) -> str:
    """The prefix of the names of all entries in a shared place."""
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise StoreValueError(f"{owner}: {name}={value!r}; it must be 1 to 64 of 0-9 A-Z a-z . _ : -")
    return value


def read_truth(owner: str, name: str, value: Any) -> bool:
    """A bool from True, "yes", "on", "1", "true" and their opposites."""
    truth = value if isinstance(value, bool) else _TRUTH.get(str(value).lower())
    if truth is None:
        raise StoreValueError(f"{owner}: {name}={value!r}; it must be yes or no")
    return truth


@overload
def parse_bytes(size: int | str, what: str = "size") -> int: ...
@overload
def parse_bytes(size: int | str | None, what: str = "size") -> int | None: ...
def parse_bytes(size: int | str | None, what: str = "size") -> int | None:
    """The number of bytes of 4096, "4096", "1.5GB" (powers of 1000), "10GiB" or "10G" (powers of 1024); None
    stays None.

    Raises StoreValueError for anything else; the message begins with ``what``.
    """
    try:
        return None if size is None else read_bytes(size, what)
    except InvalidRangeError as error:
        raise StoreValueError(str(error)) from None


def without_secrets(url: str) -> str:
    """The URL with *** in place of anything that may be a user, a password or a secret, erring on the side of
    hiding.
    """
    return _USER.sub("//***@", _FIELD.sub(r"\1=***", url))
