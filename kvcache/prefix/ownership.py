"""Which PrefixCache uses a cache: one at a time, as it uses all of its sequences."""

from __future__ import annotations

import weakref
from collections.abc import Sized
from typing import Any, Protocol

from kvcache.cache import InvalidRangeError, SupportsOffset
from kvcache.caches.wrapper import unwrapped

__all__ = ["check_empty", "check_unowned", "disown", "own"]


class Owner(Protocol):
    """What lives as long as a PrefixCache or one of its open sessions does."""

    @property
    def sessions(self) -> Sized:
        """Those that are open."""


_OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[Owner]] = weakref.WeakKeyDictionary()
"""By cache; of a wrapper, those that it wraps. One that is gone without ``close`` owns nothing."""


def check_unowned(cache: Any) -> None:
    """Two that use the same sequences would empty each other's sessions: refuse the second."""
    for part in unwrapped(cache):
        ref = _OWNERS.get(part)
        owner = None if ref is None else ref()
        if owner is not None:
            raise InvalidRangeError(
                f"PrefixCache: another PrefixCache, with {len(owner.sessions)} open sessions, uses this "
                f"{type(part).__name__} and all its sequences; close that one first, or begin sessions there"
            )


def check_empty(cache: SupportsOffset, sequences: int) -> None:
    """Sessions begin by emptying their sequence: refuse a cache with somebody's tokens."""
    for seq in range(sequences):
        length = cache.offset(seq)
        if length:
            raise InvalidRangeError(
                f"PrefixCache: sequence {seq} holds tokens up to position {length - 1}; a PrefixCache takes "
                f"an empty cache and uses all its sequences: call remove({seq}, 0) first"
            )


def own(cache: Any, owner: Owner) -> None:
    """``owner`` uses the cache, and all that it wraps."""
    for part in unwrapped(cache):
        _OWNERS[part] = weakref.ref(owner)


def disown(cache: Any) -> None:
    for part in unwrapped(cache):
        _OWNERS.pop(part, None)
