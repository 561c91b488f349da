"""Stores named by URLs in another runtime's options, opened once per process and shared by its parts."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvcache import StoreTier
from kvcache.cache import InvalidRangeError
from kvcache.stores import SerializedSnapshot, SnapshotCorruptError, SnapshotStore, open_store

__all__ = ["StoresInUse", "at_exit", "check_number", "parse_options", "use_entry"]

T = TypeVar("T")
log = logging.getLogger("kvcache")


@dataclass(slots=True)
class _Opened:
    store: SnapshotStore
    users: int = 0


_lock = threading.Lock()
_opened: dict[str, _Opened] = {}


class StoresInUse:
    """The stores of these URLs, until ``close``; ``tier`` reads them in order and writes to all of them.

    Raises the errors of ``open_store``; no store then stays open.
    """

    def __init__(self, urls: Sequence[str], backlog: int) -> None:
        self._urls: list[str] = []
        try:
            stores = [self._open(url) for url in urls]
        except BaseException:
            self._let_go()
            raise
        self.tier = StoreTier(stores, backlog)

    def _open(self, url: str) -> SnapshotStore:
        with _lock:
            if url not in _opened:
                _opened[url] = _Opened(open_store(url))
            _opened[url].users += 1
        self._urls.append(url)
        return _opened[url].store

    def close(self) -> None:
        """Write pending entries; the last user of a store closes it. A second call has no effect."""
        self.tier.close()
        self._let_go()

    def _let_go(self) -> None:
        urls, self._urls = self._urls, []
        for url in urls:
            with _lock:
                opened = _opened[url]
                opened.users -= 1
                if not opened.users:
                    del _opened[url]
            if not opened.users:
                opened.store.close()


def use_entry(tier: StoreTier, key: str, use: Callable[[SerializedSnapshot], T]) -> T | None:
    """The result of ``use(entry)``; the entry's arrays are valid only during that call. None if no store has
    an intact copy, or if ``use`` raised SnapshotCorruptError; the entry was then dropped.
    """
    with tier.serialized(key) as entry:
        if entry is None:
            return None
        try:
            return use(entry)
        except SnapshotCorruptError as error:
            log.warning("%s; its content is computed again", error)
            tier.drop(key)
            return None


def at_exit(close: Callable[[], None]) -> None:
    """Call a bound method when the process ends, unless its object no longer exists."""
    method = weakref.WeakMethod(close)

    def call() -> None:
        if (bound := method()) is not None:
            bound()

    atexit.register(call)


def parse_options(
    where: str, options: Mapping[str, Any], known: Sequence[str], prefix: str = ""
) -> dict[str, Any]:
    """``options``, with the URLs of ``store`` as a tuple; errors put ``prefix`` before each name. Raises
    InvalidRangeError for an option that is not ``known``, and for an invalid ``store`` or ``identity``.
    """
    if unknown := options.keys() - set(known):
        names = ", ".join(prefix + name for name in known)
        raise InvalidRangeError(
            f"{where}: {prefix + min(unknown)!r} is not an option; known options: {names}"
        )
    store, identity = options.get("store"), options.get("identity")
    urls = [store] if isinstance(store, str) else store
    if not (isinstance(urls, list | tuple) and urls and all(isinstance(url, str) and url for url in urls)):
        raise InvalidRangeError(
            f"{where}: {prefix}store={store!r}; it must be the URL of a store, such as "
            "'file:///var/cache/kv', or a list of them, the nearest first"
        )
    if identity is not None and (not isinstance(identity, Mapping) or not identity):
        raise InvalidRangeError(
            f"{where}: {prefix}identity={identity!r}; it must be an object that names the model"
        )
    return {**options, "store": tuple(urls)}


def check_number(name: str, value: Any, kind: type | tuple[type, ...], least: float) -> None:
    """Raise InvalidRangeError if an option has the wrong type, or is less than ``least``."""
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not right or value < least:
        raise InvalidRangeError(f"{name}={value!r}; it must be at least {least}")
