"""Limits for connections: the time for a client to send, and their number, since descriptors are limited."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["GuardedProtocol", "Shedding", "descriptors"]

log = logging.getLogger("kvcache_engine.serve")

AGAIN: Final = 60.0
"""Seconds between two warnings about descriptors."""
_LEAST, _ANY, _SPARE = 4, 1 << 30, 128


class Shedding:
    """Closes connections if there are more than ``most``, first those that have waited longest for their
    client.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._warned_at = -AGAIN

    def make_room(self, connections: set[Any], most: int | None = None) -> None:
        """Close connections without a complete request until ``most`` are left (None: the usual limit)."""
        most = self.most if most is None else most
        if len(connections) <= most:
            return
        waiting = sorted((each for each in connections if each.awaited), key=lambda each: each.since)
        for each in waiting[: len(connections) - most]:
            connections.discard(each)
            each.transport.abort()
        self.tell()

    def tell(self) -> None:
        """Log a warning, but not too often."""
        if time.monotonic() - self._warned_at >= AGAIN:
            self._warned_at = time.monotonic()
            log.warning(
                "more than %d connections, the most that the limit of open files (ulimit -n) allows: closing "
                "those that have waited longest for their client",
                self.most,
            )


class GuardedProtocol(H11Protocol):
    """Closes a connection whose client does not send the head of a request within ``timeout`` seconds.

    uvicorn's own timeout ends at the first byte.
    """

    def __init__(self, *args: Any, timeout: float, shedding: Shedding, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeout, self._shedding = timeout, shedding
        self._timer: asyncio.TimerHandle | None = None
        self.since = time.monotonic()
        """The time since which the server has waited for the client."""

    @property
    def awaited(self) -> bool:
        """Whether the server waits for its client, since no request is complete."""
        return not self._asked or self.cycle.more_body

    @property
    def _asked(self) -> bool:
        """Whether there is an unanswered request with at least a complete head."""
        cycle: Any = self.cycle  # None before the first
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        self._shedding.make_room(self.connections)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self._asked:
            self._stop()

    def on_response_complete(self) -> None:
        self._wait()  # before an already received request begins
        super().on_response_complete()

    def _wait(self) -> None:
        self._stop()
        self.since = time.monotonic()
        self._timer = self.loop.call_later(self._timeout, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def descriptors() -> tuple[int, int]:
    """The number of connections that the limit of open files allows, and the number of spare descriptors,
    beyond those open now, those for stores, and connections about to be closed.
    """
    if os.name != "posix":
        return _ANY, _SPARE
    resource: Any = importlib.import_module("resource")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _ANY, _SPARE
    spare = min(_SPARE, limit // 4)
    return max(_LEAST, limit - _open_files() - spare), spare


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))  # noqa: PTH208
    except OSError:
        return 0
