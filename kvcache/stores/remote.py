"""What stores at an address have in common: they say where it is, and close when calls have ended."""

from __future__ import annotations

import abc
from typing import Protocol

from kvcache.stores.closing import Closing
from kvcache.stores.in_flight import InFlightCalls

__all__ = ["Address", "RemoteStore"]


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
