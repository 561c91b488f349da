"""ValkeyStore's replies read by the client's own library, libvalkey, within the same bounds of size and time.

For ``benchmarks.stores``: what it would cost to have no reader of replies of our own. The library builds a
``bytes`` of every value, from a buffer that it has copied what came into.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import libvalkey
from valkey.exceptions import InvalidResponse, ResponseError

from kvcache.stores.valkey import link
from kvcache.stores.valkey.replies import BLOCK, Replies

__all__ = ["read_by_library"]

_NONE = object()
_MOST = 1 << 23
"""Bytes that may come before a reply is whole: more than any that the store asks for."""


class _ByLibrary(Replies):
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
        for start in range(0, len(view) if update is not None else 0, BLOCK):
            update(view[start : start + BLOCK])  # type: ignore[misc]

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
