"""Chunks on their way: pipelined, digested as they pass, not copied on this side."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from valkey.exceptions import ResponseError

from kvcache.stores.valkey.link import Command, Wire
from kvcache.stores.valkey.manifest import CHUNK
from kvcache.stores.valkey.replies import BLOCK, into, status

__all__ = ["LANES", "MISSING", "WRONG", "Reading", "blocks", "is_another_type", "send_chunks"]

MISSING, WRONG = "missing", "wrong"
LANES: Final = 3
"""Connections that the chunks of a put take turns on, where so many are free; and how many chunks are on
their way where there is one."""
_LARGE: Final = 1 << 20
"""Bytes that are digested and sent at a time: each time the server is woken costs more than cold memory."""
_PIECE: Final = 1 << 20
"""Bytes of a chunk that are asked for at a time: the server copies them into memory that it has just used
for the one before, where for whole chunks it would take fresh pages."""
_ASKED: Final = 4
"""Pieces that are asked for before the first of them has come."""
_SMALL = 1 << 15
"""Bytes; shorter pieces are joined before they are sent."""

Update = Callable[[memoryview], object]


def blocks(views: Sequence[memoryview], block: int = BLOCK) -> Iterator[memoryview]:
    """The views' bytes in pieces of ``block`` bytes or a little more, none across a multiple of CHUNK."""
    staged, left = bytearray(), CHUNK
    for view in views:
        while len(view):
            piece = view[: min(block, left)]
            view = view[len(piece) :]
            left -= len(piece)
            if len(piece) < _SMALL:
                staged += piece
            else:
                if staged:
                    yield memoryview(staged)
                    staged = bytearray()
                yield piece
            if staged and (len(staged) >= block or not left):
                yield memoryview(staged)
                staged = bytearray()
            left = left or CHUNK
    if staged:
        yield memoryview(staged)


def send_chunks(
    wires: Sequence[Wire],
    names: Sequence[bytes],
    sizes: Sequence[int],
    views: Sequence[memoryview],
    update: Update,
    ttl: int,
) -> None:
    """Store chunks for ``ttl`` milliseconds. Raises the server's refusal, when all replies are read.

    The wires take turns, and the head of a wire's next command goes with the end of the one before. The
    server has read it when the value follows, and receives that where it stays; what of a value it finds
    behind a head it would copy once more.
    """
    source, lanes = blocks(views, _LARGE), len(wires)
    ahead = lanes if lanes > 1 else LANES
    begun, answered, refused = min(lanes, len(names)), 0, None
    for wire, name, size in zip(wires, names, sizes, strict=False):
        wire.stream([_head(name, size)])
    for i, size in enumerate(sizes):
        if i == begun:
            break
        if i >= ahead:
            refused = _refusal(wires[answered % lanes].reply(status)) or refused
            answered += 1
        end = _end(ttl)
        if refused is None and begun < len(names):
            end += _head(names[begun], sizes[begun])
            begun += 1
        wires[i % lanes].stream(itertools.chain(_value(source, size, update), [end]))
    for i in range(answered, begun):
        refused = _refusal(wires[i % lanes].reply(status)) or refused
    if refused is not None:
        raise refused


def _head(name: bytes, size: int) -> bytes:
    """``SET name value PX ttl``, up to the value."""
    return b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)


def _value(source: Iterator[memoryview], size: int, update: Update) -> Iterator[memoryview]:
    while size:
        block = next(source)
        update(block)
        yield block
        size -= len(block)


def _end(ttl: int) -> bytes:
    end = b"%d" % ttl
    return b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(end), end)


def _refusal(reply: object) -> Exception | None:
    return reply if isinstance(reply, Exception) else None


class Reading:
    """The chunks of one entry on their way into ``view``: ``begin``, later ``finish``."""

    def __init__(
        self, wire: Wire, names: Iterable[bytes], sizes: Iterable[int], view: memoryview, update: Update
    ) -> None:
        self._wire = wire
        self._pieces = _pieces(names, sizes, view, update)
        self._asked: deque[tuple[Command, int]] = deque()

    def begin(self) -> None:
        """Ask for the first pieces."""
        self._ask(_ASKED)

    def finish(self) -> str:
        """Read them all: "", MISSING where a chunk is not there, WRONG where one is another.

        Stops asking at the first piece that is not as it should be; what was asked for is read. Raises the
        server's error, unless it says that a chunk is another.
        """
        result, error = "", None
        while self._asked:
            command, wanted = self._asked.popleft()
            length = self._wire.reply(command.reply)
            if length == wanted:
                if not result:
                    self._ask(1)
            elif not result:
                result = MISSING if length == 0 or length is None else WRONG
                if isinstance(length, ResponseError) and not is_another_type(length):
                    error = length
        if error is not None:
            raise error
        return result

    def _ask(self, count: int) -> None:
        wanted = list(itertools.islice(self._pieces, count))
        if wanted:
            self._wire.send(*(command for command, _ in wanted))
            self._asked += wanted


def is_another_type(error: ResponseError) -> bool:
    """Whether the server says that a name holds no string; any other error says nothing of what it holds."""
    return str(error).startswith("WRONGTYPE")


def _pieces(
    names: Iterable[bytes], sizes: Iterable[int], view: memoryview, update: Update
) -> Iterator[tuple[Command, int]]:
    """What to ask for, and its bytes. A chunk's last piece asks for a byte more: there is none."""
    at = 0
    for name, size in zip(names, sizes, strict=True):
        for start in range(0, size, _PIECE):
            stop = min(start + _PIECE, size)
            last = stop if stop == size else stop - 1
            target = view[at + start : at + stop]
            reply = into(target, last - start + 1, update)
            yield Command(["GETRANGE", name, start, last], reply), len(target)
        at += size
