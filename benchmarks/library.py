"""ValkeyStore's replies read by the client's own library, libvalkey, within the same bounds of size and time.

``python -m benchmarks.library`` says what it would cost to have no reader of replies of our own, for some
MiB; ``benchmarks.stores valkey`` for one of 64. The library builds a ``bytes`` of every value, from a
buffer that it has copied what came into.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import libvalkey
import numpy as np
from valkey.exceptions import InvalidResponse, ResponseError

from kvcache.stores import ValkeyStore
from kvcache.stores.valkey import link
from tests.rigs.servers import ValkeyServer

_NONE = object()
_BLOCK = 1 << 19
"""Bytes that a digest is updated with at a time."""
_MOST = 1 << 23
"""Bytes that may come before a reply is whole: more than any that the store asks for."""


class _ByLibrary(link.Replies):
    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        super().on_connect(connection)
        self._reader = libvalkey.Reader(
            protocolError=InvalidResponse, replyError=ResponseError, notEnoughData=_NONE
        )
        self._items: list[Any] = []
        self._value = b""

    def head(self, *kinds: bytes) -> tuple[bytes, Any]:
        found = self._items.pop() if self._items else self._next()
        if isinstance(found, ResponseError):
            return b"-", found
        kind = b":" if isinstance(found, int) else b"*" if isinstance(found, list) else b"$"
        if kind == b"$" and b"+" in kinds and found is not None:
            return b"+", found
        if kind not in kinds:
            raise InvalidResponse(f"a reply of another kind: {found!r}")
        if isinstance(found, list):
            self._items += reversed(found)
            return kind, len(found)
        if isinstance(found, int):
            return kind, found
        self._value = found
        return kind, -1 if found is None else len(found)

    def bulk(
        self, length: int, view: memoryview, update: Callable[[memoryview], object] | None = None
    ) -> None:
        view[:] = self._value[: len(view)]
        for start in range(0, len(view) if update is not None else 0, _BLOCK):
            update(view[start : start + _BLOCK])  # type: ignore[misc]

    def _next(self) -> Any:
        came = 0
        while (found := self._reader.gets()) is _NONE:
            count = self._receive(self._buffer)
            came += count
            if came > _MOST:
                raise InvalidResponse(f"a reply of more than {_MOST} bytes")
            self._reader.feed(self._bytes, 0, count)
        return found


@contextlib.contextmanager
def read_by_library() -> Iterator[None]:
    """Connections that are made within the block read their replies so."""
    ours = link.Replies
    link.Replies = _ByLibrary  # type: ignore[misc]
    try:
        yield
    finally:
        link.Replies = ours  # type: ignore[misc]


def measured(store: ValkeyStore, buffer: np.ndarray) -> tuple[float, float]:
    """Seconds that a get takes, and those of this process's processor."""
    began, used = time.perf_counter(), time.process_time()
    assert store.get_into("a", buffer)
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    print("| get_into | milliseconds | by libvalkey | processor's | by libvalkey |\n|---|---|---|---|---|")
    with ValkeyServer() as server, ValkeyStore(server.url) as ours, ValkeyStore(server.url) as by_library:
        with read_by_library():
            by_library.ping()  # its one connection, which serves all its calls
        for mib in (1, 4, 8):
            buffer = np.random.default_rng(0).integers(0, 256, mib << 20, np.uint8)
            ours.delete("a")
            ours.put("a", [buffer])
            times = [[measured(store, buffer) for store in (ours, by_library)] for _ in range(rounds)]
            least = 1000 * np.array(times).min(axis=0)  # of each: what others used the machine for is no cost
            cells = [f"{ours:.2f} | {library:.2f} ({library / ours:.2f}x)" for ours, library in least.T]
            print(f"| {mib} MiB | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
