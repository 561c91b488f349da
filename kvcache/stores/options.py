"""Options of stores, as arguments or as the text of a URL. ``owner`` begins the message of an error."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from kvcache.stores.errors import StoreValueError

__all__ = ["check_options", "read_prefix", "read_truth"]

_PREFIX = re.compile(r"[0-9A-Za-z._:-]{1,64}")
_TRUTH = dict.fromkeys(("yes", "true", "1", "on"), True) | dict.fromkeys(("no", "false", "0", "off"), False)


def check_options(owner: str, given: Iterable[str], known: Collection[str]) -> None:
    """TypeError for the first that is not known."""
    for name in given:
        if name not in known:
            raise TypeError(f"{owner}: no option {name!r}; there are: {', '.join(sorted(known))}")


def read_prefix(owner: str, value: Any) -> str:
    """What the names of all entries in a shared place begin with."""
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise StoreValueError(f"{owner}: prefix={value!r}; it must be 1 to 64 of 0-9 A-Z a-z . _ : -")
    return value


def read_truth(owner: str, name: str, value: Any) -> bool:
    """Of True, "yes", "on", "1", "true" and their opposites."""
    found = value if isinstance(value, bool) else _TRUTH.get(str(value).lower())
    if found is None:
        raise StoreValueError(f"{owner}: {name}={value!r}; it must be yes or no")
    return found
