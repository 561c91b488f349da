"""What is closed when a ``with`` block ends, and stores, which are closed when calls under way have ended."""

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
    """Gives ``close`` the form of a context manager, whatever ends the block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what is held open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied: files, connections, threads and secrets have no copy elsewhere."""
        name = type(self).__name__
        raise NotSupportedError(f"pickle: {name} cannot be pickled or copied; open one in each process")


class InFlightCalls:
    """Counts calls, so that no file descriptor is closed beneath one; after ``close`` none begins."""

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
        """Wait for the calls under way. True for the first caller, who then lets go of everything."""
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
        """What the names of all its entries begin with."""


class RemoteStore(Closing):
    """Says where it is, and lets go of its connections when the calls under way have ended."""

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
