"""Chunks on their way: pipelined, digested as they pass, not copied on this side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvcache.stores.valkey.link import Command, Wire
from kvcache.stores.valkey.manifest import CHUNK
from kvcache.stores.valkey.replies import BLOCK, Target

__all__ = ["MISSING", "WRONG", "Reading", "blocks", "send_chunks"]

MISSING, WRONG = "missing", "wrong"
_SENT: Final = 2
"""Chunks that are sent before the reply to the first of them is read."""
_PIECE: Final = 1 << 20
"""Bytes of a chunk that are asked for at a time: the server copies them into memory that it has just used
for the one before, where for whole chunks it would take fresh pages."""
_ASKED: Final = 4
"""Pieces that are asked for before the first of them has come."""
_SMALL = 1 << 15
"""Bytes; shorter pieces are joined before they are sent."""

Update = Callable[[memoryview], object]


def blocks(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The views' bytes in pieces of BLOCK bytes or a little more, none across a multiple of CHUNK."""
    staged, left = bytearray(), CHUNK
    for view in views:
        while len(view):
            piece = view[: min(BLOCK, left)]
            view = view[len(piece) :]
            left -= len(piece)
            if len(piece) < _SMALL:
                staged += piece
            else:
                if staged:
                    yield memoryview(staged)
                    staged = bytearray()
                yield piece
            if staged and (len(staged) >= BLOCK or not left):
                yield memoryview(staged)
                staged = bytearray()
            left = left or CHUNK
    if staged:
        yield memoryview(staged)


def send_chunks(
    wire: Wire,
    names: Sequence[bytes],
    sizes: Sequence[int],
    views: Sequence[memoryview],
    update: Update,
    ttl: int,
) -> None:
    """Store chunks for ``ttl`` milliseconds. Raises the server's refusal, when all replies are read."""
    source = blocks(views)
    waiting, refused = 0, None
    for name, size in zip(names, sizes, strict=True):
        wire.stream(_set(name, size, source, update, ttl))
        waiting += 1
        if waiting > _SENT:
            refused = _refusal(wire.reply())
            waiting -= 1
        if refused is not None:
            break
    for _ in range(waiting):
        refused = _refusal(wire.reply()) or refused
    if refused is not None:
        raise refused


def _set(
    name: bytes, size: int, source: Iterator[memoryview], update: Update, ttl: int
) -> Iterator[bytes | memoryview]:
    """``SET name value PX ttl``, its value taken from the source."""
    yield b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
    while size:
        block = next(source)
        update(block)
        yield block
        size -= len(block)
    end = b"%d" % ttl
    yield b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(end), end)


def _refusal(reply: object) -> Exception | None:
    return reply if isinstance(reply, Exception) else None


class Reading:
    """The chunks of one entry on their way into ``view``: ``begin``, later ``finish``."""

    def __init__(
        self, wire: Wire, names: Sequence[bytes], sizes: Sequence[int], view: memoryview, update: Update
    ) -> None:
        self._wire, self._update = wire, update
        self._pieces = deque(_pieces(names, sizes, view))
        self._asked: deque[tuple[Command, memoryview]] = deque()

    def begin(self) -> None:
        """Ask for the first pieces."""
        self._ask(_ASKED)

    def finish(self) -> str:
        """Read them all: "", MISSING where a chunk is not there, WRONG where one is another.

        Stops asking at the first piece that is not as it should be; what was asked for is read.
        """
        result = ""
        while self._asked:
            _, target = self._asked.popleft()
            length = self._wire.reply(Target(target, self._update))
            if length == len(target):
                if not result:
                    self._ask(1)
            elif not result:
                result = MISSING if length == 0 or length is None else WRONG
        return result

    def _ask(self, count: int) -> None:
        count = min(count, len(self._pieces))
        wanted = [self._pieces.popleft() for _ in range(count)]
        if wanted:
            self._wire.send(*(command for command, _ in wanted))
            self._asked += wanted


def _pieces(
    names: Sequence[bytes], sizes: Sequence[int], view: memoryview
) -> Iterator[tuple[Command, memoryview]]:
    """What to ask for, and where it goes. A chunk's last piece asks for a byte more: there is none."""
    at = 0
    for name, size in zip(names, sizes, strict=True):
        for start in range(0, size, _PIECE):
            stop = min(start + _PIECE, size)
            last = stop if stop == size else stop - 1
            yield ("GETRANGE", name, start, last), view[at + start : at + stop]
        at += size
