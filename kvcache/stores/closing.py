"""Context managers that close at the end of a block, and stores, which close when calls in flight have
ended.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn, Protocol, Self, SupportsIndex

from kvcache.cache import NotSupportedError
from kvcache.stores.errors import StoreClosedError

__all__ = ["Address", "Closing", "InFlightCalls", "RemoteStore"]


class Closing(abc.ABC):
    """A context manager that calls ``close``, whatever ends the block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything that is held open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied, as files, connections, threads and secrets cannot be."""
        name = type(self).__name__
        raise NotSupportedError(f"pickle: {name} cannot be pickled or copied; open one in each process")


class InFlightCalls:
    """Counts calls in flight, so that no file descriptor is closed during one; after ``close`` none can
    begin.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def running(self, op: str) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise StoreClosedError(f"{op}: this store is closed")
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Wait for the calls in flight. True for the first caller, which then releases everything."""
        with self._changed:
            first = not self._closed
            self._closed = True
            self._changed.wait_for(lambda: self._under_way == 0)
            return first


class Address(Protocol):
    """Settings of a store."""

    @property
    def url(self) -> str:
        """Where it is; no user and no password."""

    @property
    def prefix(self) -> str:
        """The prefix of the names of all its entries."""


class RemoteStore(Closing):
    """A store with an address, which releases its connections when the calls in flight have ended."""

    def __init__(self, where: Address) -> None:
        self._where = where
        self._in_flight = InFlightCalls()

    @property
    def url(self) -> str:
        """Where it is; no user and no password."""
        return self._where.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, prefix={self._where.prefix!r})"

    def close(self) -> None:
        if self._in_flight.close():
            self._let_go()

    @abc.abstractmethod
    def _let_go(self) -> None:
        """Close what is open; called once, when no call is under way and none will begin."""
