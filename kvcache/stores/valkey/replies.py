"""Replies of the server: each is read as what was asked for, within its size and time, or is no reply.

It is what the client calls a parser, for RESP2 (https://valkey.io/topics/protocol/). The client's own parsers
take whatever comes, of any kind and size; and they build a ``bytes`` of every value, whose memory is
fresh each time, and copy it once or twice, where here large values go straight into the caller's buffer.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse, OutOfMemoryError, ResponseError

__all__ = [
    "BLOCK",
    "SHARE",
    "Deadline",
    "Replies",
    "Shape",
    "array",
    "integer",
    "into",
    "names",
    "status",
    "status_or_nothing",
    "value",
]

BLOCK: Final = 1 << 19
"""Bytes that are digested at a time, while the processor's cache holds them."""
SHARE: Final = 1 << 22
"""Bytes that a call may move in each further ``timeout``."""
_LINE: Final = 1 << 16
"""Bytes of the longest line."""
_LARGEST: Final = 1 << 29
"""Bytes: no server holds a longer value."""
_ERROR: Final = 500
"""Bytes of a server's error that are shown."""
_NAMES, _NAME = 1 << 16, 1 << 12
"""Names in one reply, and bytes of each that are kept: ours are shorter."""
_CRLF = b"\r\n"


class Deadline:
    """``timeout`` seconds for a call, and as long again for each SHARE bytes that it moves."""

    def __init__(self, timeout: float, nbytes: int = 0) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self.allow(nbytes)

    def allow(self, nbytes: int) -> None:
        """The call will move so many bytes more."""
        self._end += self._timeout * nbytes / SHARE

    def left(self) -> float:
        """Seconds that the next step may take, at most ``timeout``. TimeoutError: none are left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time limit of this call is over")
        return min(left, self._timeout)


Shape = Callable[["Replies"], Any]
"""Reads one reply of a kind; any reply may be the server's error instead, which is returned as well."""


class Replies:
    """Reads one connection's replies. The client makes one for each connection, and drives it."""

    def __init__(self, socket_read_size: int = _LINE) -> None:
        self.deadline: Deadline | None = None
        """Of the call that this connection is used for."""
        self._sock: Any = None
        self._bytes = bytearray(max(socket_read_size, _LINE))
        self._buffer = memoryview(self._bytes)
        self._begin = self._end = 0

    # What the client calls.

    def on_connect(self, connection: Any, **kwargs: Any) -> None:
        self._sock = connection.open_socket
        self._begin = self._end = 0

    def on_disconnect(self) -> None:
        self._sock = None
        self._begin = self._end = 0

    def can_read(self, timeout: float) -> bool:
        """Whether something is there, or comes within ``timeout`` seconds; LostError: the server has gone."""
        if self._begin < self._end:
            return True
        if self._sock is None:
            raise LostError("the connection is closed")
        self._sock.settimeout(timeout)
        try:
            self._receive_more()
            return True
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False

    def read_response(self, disable_decoding: bool = False, push_request: bool = False) -> Any:
        """The reply to what the client sends by itself, to sign in: a status."""
        return self.read(status)

    # What the store reads.

    def read(self, shape: Shape) -> Any:
        """The next reply; the server's errors are returned, not raised. InvalidResponse for anything else."""
        if self._sock is None:
            raise LostError("the connection is closed")
        return shape(self)

    def head(self, *kinds: bytes) -> tuple[bytes, Any]:
        """The first line of a reply of one of these kinds: its kind, and its text or number."""
        line = self._line()
        kind = line[:1]
        if kind not in kinds:
            if kind == b"-":
                return kind, _error(line[1:])
            wanted = " or ".join(map(repr, kinds))
            raise InvalidResponse(f"a reply begins with {line[:16]!r}, and not with {wanted}")
        if kind == b"+":
            return kind, line[1:]
        number = _number(line[1:])
        if number < -1 and kind != b":":
            raise InvalidResponse(f"a length of {number}")
        return kind, number

    def bulk(
        self, length: int, view: memoryview, update: Callable[[memoryview], object] | None = None
    ) -> None:
        """The bytes of a value of this length: ``view`` is filled from its start, the rest is read past."""
        if length > _LARGEST:
            raise InvalidResponse(f"a value of {length} bytes")
        self._fill(view, update)
        self._skip(length - len(view))
        while self._end - self._begin < 2:
            self._more()
        self._begin += 2
        if self._bytes[self._begin - 2 : self._begin] != _CRLF:
            raise InvalidResponse("a value without an end")

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

    def _line(self) -> bytes:
        looked = 0
        while True:
            end = self._bytes.find(_CRLF, self._begin + looked, self._end)
            if end >= 0:
                line = bytes(self._buffer[self._begin : end])
                self._begin = end + 2
                return line
            looked = max(0, self._end - self._begin - 1)
            self._more()

    # The socket.

    def _more(self) -> None:
        """Read what there is behind what is buffered."""
        self._wait()
        self._receive_more()

    def _receive_more(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            kept = bytes(self._buffer[self._begin : self._end])
            if len(kept) == len(self._buffer):
                raise InvalidResponse(f"a line of more than {len(kept)} bytes")
            self._buffer[: len(kept)] = kept
            self._begin, self._end = 0, len(kept)
        self._end += self._received(self._buffer[self._end :])

    def _receive(self, view: memoryview) -> int:
        self._wait()
        return self._received(view)

    def _wait(self) -> None:
        if self.deadline is not None:
            self._sock.settimeout(self.deadline.left())

    def _received(self, view: memoryview) -> int:
        count: int = self._sock.recv_into(view)
        if not count:
            raise LostError("the server closed the connection")
        return count


# Shapes of replies.


def status(replies: Replies) -> Any:
    return replies.head(b"+")[1]


def status_or_nothing(replies: Replies) -> Any:
    kind, content = replies.head(b"+", b"$")
    if kind == b"$" and content != -1:
        raise InvalidResponse(f"a value of {content} bytes in place of a status")
    return None if kind == b"$" else content


def integer(replies: Replies) -> Any:
    return replies.head(b":")[1]


def value(most: int) -> Shape:
    """A value, or its first ``most`` bytes; None: there is none."""

    def read(replies: Replies) -> Any:
        kind, length = replies.head(b"$")
        if kind == b"-":
            return length
        if length < 0:
            return None
        kept = bytearray(min(length, most))
        replies.bulk(length, memoryview(kept))
        return bytes(kept)

    return read


def into(view: memoryview, most: int, update: Callable[[memoryview], object]) -> Shape:
    """The length of a value, of which ``most`` bytes were asked for; None: there is none.

    One as long as the view is there then, each block passed to ``update``; another leaves it as it was.
    """

    def read(replies: Replies) -> Any:
        kind, length = replies.head(b"$")
        if kind == b"-":
            return length
        if length > most:
            raise InvalidResponse(f"a value of {length} bytes, and {most} were asked for")
        if length == len(view):
            replies.bulk(length, view, update)
        elif length >= 0:
            replies.bulk(length, view[:0])
        return None if length < 0 else length

    return read


def array(*shapes: Shape) -> Shape:
    """A list of exactly these."""

    def read(replies: Replies) -> Any:
        kind, count = replies.head(b"*")
        if kind == b"-":
            return count
        if count != len(shapes):
            raise InvalidResponse(f"a list of {count}, and not of {len(shapes)}")
        return [shape(replies) for shape in shapes]

    return read


def names(replies: Replies) -> Any:
    kind, count = replies.head(b"*")
    if kind == b"-":
        return count
    if not 0 <= count <= _NAMES:
        raise InvalidResponse(f"a list of {count} names")
    return [_name(replies) for _ in range(count)]


_name = value(_NAME)


def _error(text: bytes) -> ResponseError:
    message = text[:_ERROR].decode("utf-8", "replace")
    return (OutOfMemoryError if message.startswith("OOM ") else ResponseError)(message)


def _number(text: bytes) -> int:
    digits = text[1:] if text.startswith(b"-") else text
    if not digits.isdigit() or len(digits) > 19:
        raise InvalidResponse(f"the number {text[:32]!r}")
    return int(text)
