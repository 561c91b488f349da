"""Replies of a Valkey server: each is what was asked for, in its size and time, or the call is refused."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse, OutOfMemoryError, ResponseError

from kvcache.stores.valkey.deadline import SHARE, Deadline
from kvcache.stores.valkey.replies import (
    BLOCK,
    Replies,
    Shape,
    array,
    integer,
    into,
    names,
    status,
    status_or_nothing,
    value,
)

# As https://valkey.io/topics/protocol/ has them.


class Peer:
    """Replies that read one end of a pair of sockets; what is sent goes into the other, in small pieces."""

    def __init__(self) -> None:
        self.mine, self.socket = socket.socketpair()
        self.open_socket = self.socket
        self.replies = Replies()
        self.replies.deadline = Deadline(60)
        self.replies.on_connect(self)

    def sends(self, data: bytes, seed: int = 0) -> None:
        def send() -> None:
            rng, at = random.Random(seed), 0
            while at < len(data):
                step = rng.choice([1, 2, 7, 100, 70_000, 300_000])
                self.mine.sendall(data[at : at + step])
                at += step
            self.mine.shutdown(socket.SHUT_WR)

        self.thread = threading.Thread(target=send)
        self.thread.start()

    def close(self) -> None:
        self.socket.close()
        self.thread.join(10)
        self.mine.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


@pytest.mark.parametrize(
    ("shape", "data", "expected"),
    [
        (status, b"+OK\r\n", b"OK"),
        (status_or_nothing, b"+OK\r\n", b"OK"),
        (status_or_nothing, b"$-1\r\n", None),
        (integer, b":-12\r\n", -12),
        (value(9), b"$5\r\nhe\r\no\r\n", b"he\r\no"),
        (value(9), b"$0\r\n\r\n", b""),
        (value(9), b"$-1\r\n", None),
        (value(2), b"$5\r\nhello\r\n", b"he"),
        (array(), b"*0\r\n", []),
        (
            array(integer, array(value(1), value(1))),
            b"*2\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n",
            [1, [b"a", None]],
        ),
        (names, b"*2\r\n$1\r\na\r\n$2\r\nbc\r\n", [b"a", b"bc"]),
    ],
)
def test_every_kind_of_reply_is_read(peer: Peer, shape: Shape, data: bytes, expected: Any) -> None:
    peer.sends(data + b":7\r\n")
    assert peer.replies.read(shape) == expected
    assert peer.replies.read(integer) == 7
    with pytest.raises(LostError):
        peer.replies.read(integer)


@pytest.mark.parametrize("shape", [status, status_or_nothing, integer, value(1), array(), names])
def test_an_error_in_place_of_a_reply_is_returned(peer: Peer, shape: Shape) -> None:
    peer.sends(b"-WRONGTYPE x\r\n-OOM command not allowed\r\n-ERR " + b"y" * 2000 + b"\r\n")
    found = [peer.replies.read(shape) for _ in range(3)]
    assert [type(error) for error in found] == [ResponseError, OutOfMemoryError, ResponseError]
    assert max(len(str(error)) for error in found) == 500


@pytest.mark.parametrize("seed", range(3))
def test_values_go_where_they_belong_and_are_digested_in_order(peer: Peer, seed: int) -> None:
    values = [
        random.Random(i).randbytes(size) for i, size in enumerate([1, BLOCK - 1, BLOCK + 70_001, 3 * BLOCK])
    ]
    peer.sends(
        b"".join(b"$%d\r\n%b\r\n:%d\r\n" % (len(value), value, i) for i, value in enumerate(values)), seed
    )
    for i, content in enumerate(values):
        room, seen = bytearray(len(content) + 20), bytearray()
        shape = into(memoryview(room)[10:-10], len(content) + 1, seen.extend)
        assert peer.replies.read(shape) == len(content)
        assert room[10:-10] == seen == content
        assert room[:10] == room[-10:] == bytes(10)
        assert peer.replies.read(integer) == i


@pytest.mark.parametrize("seed", range(3))
def test_replies_that_come_together_are_told_apart(peer: Peer, seed: int) -> None:
    peer.sends(b"".join(b":%d\r\n$3\r\n%03d\r\n" % (i, i % 1000) for i in range(15_000)), seed)
    for i in range(15_000):
        assert peer.replies.read(integer) == i
        assert peer.replies.read(value(3)) == b"%03d" % (i % 1000)


@pytest.mark.parametrize("length", [0, 99, 101])
def test_a_value_of_another_length_is_read_past_and_touches_nothing(peer: Peer, length: int) -> None:
    peer.sends(b"$%d\r\n%b\r\n:7\r\n" % (length, b"x" * length))
    room = bytearray(100)
    assert peer.replies.read(into(memoryview(room), 101, lambda block: None)) == length
    assert room == bytes(100)
    assert peer.replies.read(integer) == 7


NUMBERS = b":" + b"9" * 30 + b"\r\n", b":1x\r\n", b":1_0\r\n", b":--1\r\n", b":\r\n"
LISTS = b"*0\r\n", b"*-1\r\n", b"*2\r\n:1\r\n:2\r\n", b"*1\r\n*1\r\n:1\r\n", b"*1\r\n$1\r\n1\r\n"
UNASKED: list[tuple[Shape, Sequence[bytes]]] = [
    (status, [b":1\r\n", b"$2\r\nOK\r\n", b"*0\r\n", b"?\r\n", b"\r\n", b"+" + b"x" * 70_000]),
    (status_or_nothing, [b"$2\r\nOK\r\n", b":1\r\n", b"$-2\r\n"]),
    (integer, [*NUMBERS, b"+1\r\n"]),
    (value(9), [b":1\r\n", b"*1\r\n$1\r\na\r\n", b"$ 3\r\nabc\r\n", b"$-2\r\n", b"$99999999999\r\n"]),
    (value(9), [b"$3\r\nabcde\r\n", b"$3\r\nab\r\n:"]),
    (array(integer), [*LISTS, b":1\r\n", b"%1\r\n+a\r\n+b\r\n"]),
    (names, [b"*-1\r\n", b"*1000000\r\n", b"*1\r\n:1\r\n"]),
    (into(memoryview(bytearray(3)), 4, bytes), [b":3\r\n", b"$5\r\nabcde\r\n", b"$3\r\nabcd\r\n"]),
]


@pytest.mark.parametrize(
    ("shape", "data"),
    [(shape, data) for shape, found in UNASKED for data in found],
    ids=lambda item: item[:12] if isinstance(item, bytes) else "",
)
def test_what_was_not_asked_for_is_refused(peer: Peer, shape: Shape, data: bytes) -> None:
    peer.sends(data)
    with pytest.raises(InvalidResponse):
        peer.replies.read(shape)


def test_whether_something_is_there_is_known_without_waiting(peer: Peer) -> None:
    assert peer.replies.can_read(0) is False
    peer.mine.sendall(b":1\r\n:2\r\n")
    assert peer.replies.can_read(1) is True
    assert peer.replies.read(integer) == 1
    assert peer.replies.can_read(0) is True
    assert peer.replies.read(integer) == 2
    peer.sends(b"")
    with pytest.raises(LostError):
        peer.replies.can_read(1)


# Deadlines.


def test_a_call_has_its_time_and_as_much_again_for_each_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    deadline = Deadline(2.0, SHARE // 2)  # ends at 103
    assert deadline.left() == 2, "one step has no more than the time limit"
    now = 102.5
    assert deadline.left() == 0.5
    deadline.allow(SHARE)
    assert deadline.left() == 2
    now = 105.0
    with pytest.raises(TimeoutError):
        deadline.left()
