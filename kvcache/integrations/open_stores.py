"""Stores named by URLs in another runtime's options, open in this process: its parts share them."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.cache import InvalidRangeError
from kvcache.offload.tiers import StoreTier
from kvcache.stores import SnapshotStore, open_store

__all__ = ["StoresInUse", "at_exit", "check_number", "check_urls"]


@dataclass(slots=True)
class _Opened:
    store: SnapshotStore
    users: int = 0


_lock = threading.Lock()
_opened: dict[str, _Opened] = {}


class StoresInUse:
    """The stores of these URLs, until ``close``; ``tier`` reads them in order and writes to all of them.

    Raises what ``open_store`` raises; none is held open then.
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
        """Write what is left; the last one to use a store closes it. A second call does nothing."""
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


def at_exit(close: Callable[[], None]) -> None:
    """Have a bound method called when the process ends, unless its object has gone by then."""
    method = weakref.WeakMethod(close)

    def call() -> None:
        if (found := method()) is not None:
            found()

    atexit.register(call)


def check_urls(where: str, given: object) -> tuple[str, ...]:
    """The URLs of the option ``store``; InvalidRangeError, naming ``where`` it stands, for anything else."""
    urls = [given] if isinstance(given, str) else given
    if (
        not isinstance(urls, list | tuple)
        or not urls
        or not all(isinstance(url, str) and url for url in urls)
    ):
        raise InvalidRangeError(
            f"{where}: store={given!r}; it must be the URL of a store, such as "
            "'file:///var/cache/kv', or a list of them, the nearest first"
        )
    return tuple(urls)


def check_number(name: str, value: Any, kind: type | tuple[type, ...], least: float) -> None:
    """Raise InvalidRangeError if an option is of another type, or less than ``least``."""
    right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not right or value < least:
        raise InvalidRangeError(f"{name}={value!r}; it must be at least {least}")
