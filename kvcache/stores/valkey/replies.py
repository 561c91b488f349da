"""Replies of the server, read so that large values go straight into the caller's buffer.

It is what the client calls a parser, for RESP2 (https://valkey.io/topics/protocol/). The client's own
parsers build a ``bytes`` of every value, whose memory is fresh each time, and copy it once or twice.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, Final

from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse, OutOfMemoryError, ResponseError

__all__ = ["BLOCK", "SHORT", "Replies", "Target"]

BLOCK: Final = 1 << 19
"""Bytes that are digested at a time, while the processor's cache holds them."""
SHORT: Final = 1 << 16
"""Bytes of the longest value that is returned; of a longer one only so much: nobody asks for such."""
_LARGEST = 1 << 29
"""Bytes: no server holds a longer value."""
_DEEPEST = 4
_CRLF = b"\r\n"


class Target:
    """Where the next value goes: into ``view``, each block passed to ``update`` when it is there."""

    __slots__ = ("update", "view")

    def __init__(self, view: memoryview, update: Callable[[memoryview], object]) -> None:
        self.view, self.update = view, update


class Replies:
    """Reads one connection's replies. The client makes one for each connection, and drives it."""

    def __init__(self, socket_read_size: int = SHORT) -> None:
        self.target: Target | None = None
        """For one bulk reply, which is then the value's length: filled where that is the target's own."""
        self._sock: Any = None
        self._timeout: float | None = None
        self._bytes = bytearray(max(socket_read_size, SHORT))
        self._buffer = memoryview(self._bytes)
        self._begin = self._end = 0

    # What the client calls.

    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        self._sock = connection._sock
        self._timeout = connection.socket_timeout
        self._begin = self._end = 0
        self.target = None

    def on_disconnect(self) -> None:
        self._sock = self.target = None
        self._begin = self._end = 0

    def can_read(self, timeout: float) -> bool:
        """Whether something is there, or comes within ``timeout`` seconds; LostError: the server has gone."""
        if self._begin < self._end:
            return True
        if self._sock is None:
            raise LostError("the connection is closed")
        self._sock.settimeout(timeout)
        try:
            self._more()
            return True
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            self._sock.settimeout(self._timeout)

    def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:
        """The next reply; the server's errors are returned, not raised."""
        if self._sock is None:
            raise LostError("the connection is closed")
        try:
            return self._reply(0)
        finally:
            self.target = None

    # RESP2.

    def _reply(self, depth: int) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return _error(rest)
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            return self._bulk(_number(rest))
        if kind == b"*" and depth < _DEEPEST:
            count = _number(rest)
            return None if count < 0 else [self._reply(depth + 1) for _ in range(count)]
        raise InvalidResponse(f"a reply that begins with {line[:16]!r}")

    def _bulk(self, length: int) -> Any:
        target = self.target
        if length < 0:
            return None
        if length > _LARGEST:
            raise InvalidResponse(f"a value of {length} bytes")
        if target is not None and length == len(target.view):
            self._fill(target.view, target.update)
            found: Any = length
        else:
            kept = bytearray(0 if target is not None else min(length, SHORT))
            self._fill(memoryview(kept), None)
            self._skip(length - len(kept))
            found = length if target is not None else bytes(kept)
        if self._take(2) != _CRLF:
            raise InvalidResponse("a value without an end")
        return found

    def _fill(self, view: memoryview, update: Callable[[memoryview], object] | None) -> None:
        done = min(len(view), self._end - self._begin)
        view[:done] = self._buffer[self._begin : self._begin + done]
        self._begin += done
        for start in range(0, len(view), BLOCK):
            stop = min(start + BLOCK, len(view))
            while done < stop:
                done += self._receive(view[done:])
            if update is not None:
                update(view[start:stop])

    def _skip(self, count: int) -> None:
        while count:
            if self._begin == self._end:
                self._more()
            step = min(count, self._end - self._begin)
            self._begin += step
            count -= step

    def _take(self, count: int) -> bytes:
        while self._end - self._begin < count:
            self._more()
        self._begin += count
        return bytes(self._buffer[self._begin - count : self._begin])

    def _line(self) -> bytes:
        looked = 0
        while True:
            found = self._bytes.find(_CRLF, self._begin + looked, self._end)
            if found >= 0:
                return self._take(found + 2 - self._begin)[:-2]
            looked = max(0, self._end - self._begin - 1)
            self._more()

    # The socket.

    def _more(self) -> None:
        """Read what there is behind what is buffered."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            kept = bytes(self._buffer[self._begin : self._end])
            if len(kept) == len(self._buffer):
                raise InvalidResponse(f"a line of more than {len(kept)} bytes")
            self._buffer[: len(kept)] = kept
            self._begin, self._end = 0, len(kept)
        self._end += self._receive(self._buffer[self._end :])

    def _receive(self, view: memoryview) -> int:
        count: int = self._sock.recv_into(view)
        if not count:
            raise LostError("the server closed the connection")
        return count


def _error(text: bytes) -> ResponseError:
    message = text.decode("utf-8", "replace")
    return (OutOfMemoryError if message.startswith("OOM ") else ResponseError)(message)


def _number(text: bytes) -> int:
    digits = text[1:] if text.startswith(b"-") else text
    if not digits.isdigit() or len(digits) > 19:
        raise InvalidResponse(f"the number {text[:32]!r}")
    return int(text)
