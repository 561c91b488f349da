"""Replies of a Valkey server: each is what was asked for, in its size and time, or the call is refused.

Whatever a server sends, a call ends in its time, in little memory, with what was put or an error of a store.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey
from valkey.exceptions import ConnectionError as LostError
from valkey.exceptions import InvalidResponse, OutOfMemoryError, ResponseError

from kvcache.stores import StoreError, StoreUnavailableError, ValkeyStore
from kvcache.stores.valkey.link import Wire
from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest
from kvcache.stores.valkey.replies import (
    BLOCK,
    SHARE,
    Deadline,
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
from kvcache.testing.stores import content, read

from ...rigs.memory import peak_memory
from .valkey_rig import Open, client, open_here, server, store

__all__ = ["client", "open_here", "server", "store"]

# Single replies, as https://valkey.io/topics/protocol/ has them.


class Peer:
    """Replies that read one end of a pair of sockets; what is sent goes into the other, in small pieces."""

    def __init__(self) -> None:
        self.mine, self.open_socket = socket.socketpair()
        self.replies = Replies()
        self.replies.deadline = Deadline(60)
        self.replies.on_connect(self)
        self.read = self.replies.read

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
        self.open_socket.close()
        self.thread.join(10)
        self.mine.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


REPLIES: list[tuple[Shape, bytes, Any]] = [
    (status, b"+OK\r\n", b"OK"),
    (status_or_nothing, b"+OK\r\n", b"OK"),
    (status_or_nothing, b"$-1\r\n", None),
    (integer, b":-12\r\n", -12),
    (value(9), b"$5\r\nhe\r\no\r\n", b"he\r\no"),
    (value(9), b"$0\r\n\r\n", b""),
    (value(9), b"$-1\r\n", None),
    (value(2), b"$5\r\nhello\r\n", b"he"),
    (array(), b"*0\r\n", []),
    (array(integer, array(value(1), value(1))), b"*2\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n", [1, [b"a", None]]),
    (names, b"*2\r\n$1\r\na\r\n$2\r\nbc\r\n", [b"a", b"bc"]),
]


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_reply_is_read_and_told_apart_from_the_next(peer: Peer, seed: int) -> None:
    order = random.Random(seed).choices(REPLIES, k=3000)
    peer.sends(b"".join(data for _, data, _ in order), seed)
    for shape, data, expected in order:
        assert peer.read(shape) == expected, data
    with pytest.raises(LostError):
        peer.read(integer)


@pytest.mark.parametrize("shape", [status, status_or_nothing, integer, value(1), array(), names])
def test_an_error_in_place_of_a_reply_is_returned(peer: Peer, shape: Shape) -> None:
    peer.sends(b"-WRONGTYPE x\r\n-OOM command not allowed\r\n-ERR " + b"y" * 2000 + b"\r\n")
    found = [peer.read(shape) for _ in range(3)]
    assert [type(error) for error in found] == [ResponseError, OutOfMemoryError, ResponseError]
    assert max(len(str(error)) for error in found) == 500


@pytest.mark.parametrize("seed", range(2))
def test_values_go_where_they_belong_and_are_digested_in_order(peer: Peer, seed: int) -> None:
    values = [
        random.Random(i).randbytes(size) for i, size in enumerate([1, BLOCK - 1, BLOCK + 70_001, 3 * BLOCK])
    ]
    peer.sends(b"".join(b"$%d\r\n%b\r\n:7\r\n" % (len(value), value) for value in values), seed)
    for data in values:
        room, seen = bytearray(len(data) + 20), bytearray()
        assert peer.read(into(memoryview(room)[10:-10], len(data) + 1, seen.extend)) == len(data)
        assert room[10:-10] == seen == data
        assert room[:10] == room[-10:] == bytes(10)
        assert peer.read(integer) == 7


@pytest.mark.parametrize("length", [0, 99, 101])
def test_a_value_of_another_length_is_read_past_and_touches_nothing(peer: Peer, length: int) -> None:
    peer.sends(b"$%d\r\n%b\r\n:7\r\n" % (length, b"x" * length))
    room = bytearray(100)
    assert peer.read(into(memoryview(room), 101, lambda block: None)) == length
    assert room == bytes(100)
    assert peer.read(integer) == 7


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


@pytest.mark.parametrize("shape, found", UNASKED)  # noqa: PT006
def test_what_was_not_asked_for_is_refused(shape: Shape, found: Sequence[bytes]) -> None:
    for data in found:
        with contextlib.closing(Peer()) as peer:
            peer.sends(data)
            with pytest.raises(InvalidResponse):
                peer.read(shape)


def test_whether_something_is_there_is_known_without_waiting(peer: Peer) -> None:
    assert peer.replies.can_read(0) is False
    peer.mine.sendall(b":1\r\n:2\r\n")
    for number in (1, 2):
        assert peer.replies.can_read(1) is True
        assert peer.read(integer) == number
    peer.sends(b"")
    with pytest.raises(LostError):
        peer.replies.can_read(1)


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


# Replies that never end. None of these needs a real server.

CALLS: dict[str, Callable[[ValkeyStore], object]] = {
    "ping": lambda store: store.ping(),
    "put": lambda store: store.put("new", [content("new")]),
    "stat": lambda store: store.stat(["a", "x", "b"]),
    "get_into": lambda store: read(store, "a"),
    "prefix": lambda store: store.prefix(["a", "b", "x"]),
    "delete": lambda store: store.delete("b"),
    "usage": lambda store: store.usage(),
}


class Listening:
    """A place to connect to, where each connection is served by ``serve(its socket)`` in a thread."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.url = f"valkey://127.0.0.1:{self._socket.getsockname()[1]}/0"

    def _accept(self) -> None:
        while not self._ended.is_set():
            if select.select([self._socket], [], [], 0.01)[0]:
                connection, _ = self._socket.accept()
                connection.settimeout(0.05)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._threads.append(threading.Thread(target=self._run, args=[connection]))
                self._threads[-1].start()

    def _run(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            while not self._ended.is_set():
                with contextlib.suppress(TimeoutError):
                    self._serve(connection)

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
        self._socket.close()


class Feeding:
    """Sends ``head`` at the first word, and ``more`` for ever, ``pause`` seconds apart."""

    def __init__(self, head: bytes, more: bytes, pause: float = 0) -> None:
        self._rest, self._more, self._pause = head, more, pause
        self._asked = False

    def __call__(self, connection: socket.socket) -> None:
        if not self._asked:
            self._asked = bool(connection.recv(1 << 16))
        threading.Event().wait(self._pause)
        self._rest = self._rest or self._more
        self._rest = self._rest[connection.send(self._rest) :]


ENDLESS: dict[str, Callable[[], Feeding]] = {
    "a value": lambda: Feeding(b"$536870912\r\n", bytes(1 << 16)),
    "a value in a list": lambda: Feeding(b"*1\r\n$536870912\r\n", bytes(1 << 16)),
    "a list": lambda: Feeding(b"*1000000000\r\n", b"$1\r\na\r\n" * 1000),
    "a list in a list": lambda: Feeding(b"", b"*1\r\n" * 1000),
    "a status": lambda: Feeding(b"+", b"O" * 1000),
    "an error": lambda: Feeding(b"-ERR ", b"x" * 1000),
    "dripped": lambda: Feeding(b"", b"+", 0.01),
    "a value, dripped": lambda: Feeding(b"*1\r\n$4000\r\n", b"x", 0.01),
    "nothing": lambda: Feeding(b"", b"", 0.01),
}


@pytest.mark.parametrize(
    ("feeding", "call"),
    [
        *((feeding, "stat") for feeding in ENDLESS),
        *(("a value in a list", call) for call in CALLS if call != "stat"),
    ],
)
def test_a_reply_that_never_ends_ends_the_call(feeding: str, call: str) -> None:
    """In its time, and in little memory."""
    raised: list[BaseException] = []

    def work(store: ValkeyStore) -> None:
        try:
            CALLS[call](store)
        except BaseException as error:
            raised.append(error)

    with (
        Listening(ENDLESS[feeding]()) as listening,
        ValkeyStore(listening.url, timeout=0.05, connect_timeout=0.1) as store,
        peak_memory() as most,
    ):
        working = threading.Thread(target=work, args=[store], daemon=True)
        working.start()
        working.join(60)
        assert isinstance(raised[0], StoreUnavailableError), "the call never came to its end"
        assert most() < 8 << 20


def test_signing_in_and_sending_are_part_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"timeout": 0.1, "connect_timeout": 0.1}
    told = r"timeout=0\.1: a call has 0\.1 s, and again for each 4 MiB"
    with Listening(Feeding(b"+O", b"K", 0.01)) as listening:
        store = ValkeyStore(listening.url.replace("//", "//me:secret@"), **limits)
        with store, pytest.raises(StoreUnavailableError, match=told):
            store.ping()
    with Listening(lambda connection: connection.settimeout(0.05)) as listening:  # takes nothing in
        store = ValkeyStore(listening.url, **limits)
        monkeypatch.setattr(store._entries, "look", lambda wire, keys: [None] * len(keys))
        with store, pytest.raises(StoreUnavailableError, match=r"[Tt]ime"):
            store.put("a", [bytes(8 * CHUNK)])


# Replies of a real server, some bytes of them changed on the way.

WRONG = [
    *(b"-%b no\r\n" % kind for kind in (b"ERR", b"WRONGTYPE", b"OOM", b"NOPERM", b"LOADING")),
    b":-7\r\n", b":0\r\n", b":123456789\r\n", b"$-1\r\n", b"$0\r\n\r\n", b"$3\r\nabc\r\n",
    b"$5000\r\n" + b"x" * 5000 + b"\r\n", b"*-1\r\n", b"*0\r\n", b"*1\r\n:1\r\n", b"*1\r\n$1\r\n{\r\n",
    b"*1\r\n-ERR in\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", b"*3\r\n$-1\r\n$-1\r\n$-1\r\n", b"+OK\r\n",
    b"%1\r\n+a\r\n+b\r\n", b"?\r\n",
]  # fmt: skip


def one_call(
    store: ValkeyStore, direct: ValkeyStore, call: str, change: Callable[[int, bytearray], bytes]
) -> int:
    """It ends as it should or with an error of a store; how often it received something."""
    for key, found in zip("ab", direct.stat(["a", "b"]), strict=True):
        assert found or direct.put(key, [content(key)])
    count, original, got = 0, Replies._received, None

    def received(self: Replies, view: memoryview) -> int:
        nonlocal count
        data = change(count, bytearray(view[: original(self, view)]))[: len(view)]
        view[: len(data)] = data
        count += 1
        return len(data)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(StoreError):
        patch.setattr(Replies, "_received", received)
        got = CALLS[call](store)
    if call == "get_into":
        assert got in (None, content("a"))
    if call == "put":
        assert read(direct, "new") in (None, content("new"))
        direct.delete("new")
    return count


@pytest.mark.parametrize("call", CALLS)
def test_a_reply_of_another_kind_or_with_a_flipped_bit_is_an_error_of_the_store_or_a_miss(
    store: ValkeyStore, open_here: Open, call: str
) -> None:
    rng, behind = random.Random(call), open_here(connections=1, timeout=0.03)
    for at in range(one_call(open_here(connections=1), store, call, lambda number, data: data)):
        for wrong in WRONG:
            one_call(behind, store, call, lambda number, data: wrong if number == at else data)  # noqa: B023
        for bit in rng.sample(range(1 << 20), 10):

            def flip(number: int, data: bytearray) -> bytes:
                data[bit // 8 % len(data)] ^= (number == at) << bit % 8  # noqa: B023
                return data

            one_call(behind, store, call, flip)
    assert all(read(store, key) in (None, content(key)) for key in "ab")


@pytest.mark.parametrize("call", ["stat", "get_into", "prefix"])
def test_an_error_of_the_server_is_no_damage(store: ValkeyStore, open_here: Open, call: str) -> None:
    """A right that is missing says nothing of what is stored."""
    store.put("a", [content("a")])
    behind = open_here(connections=1)
    for at in range(one_call(behind, store, call, lambda number, data: data)):
        refused = b"*1\r\n-NOPERM no\r\n" if not at else b"-NOPERM no\r\n" * 20
        one_call(behind, store, call, lambda number, data: refused if number == at else data)  # noqa: B023
        assert read(store, "a") == content("a")


def test_a_call_that_was_interrupted_leaves_no_half_command_behind(
    client: Valkey, open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(wire: Wire, pieces: Iterable[bytes | memoryview]) -> None:
        stream(wire, [b"".join(pieces)[:20]])
        raise KeyboardInterrupt

    store, stream = open_here(timeout=0.5), Wire.stream
    store.ping()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Wire, "stream", interrupted)
        store.put("a", [b"x"])
    assert store.put("a", [b"x"])
    assert read(store, "a") == b"x"


@pytest.mark.parametrize("stored", [0, 3, 40])
def test_a_manifest_costs_no_more_than_what_is_stored(
    store: ValkeyStore, client: Valkey, stored: int
) -> None:
    """It claims what it likes."""
    manifest = RemoteManifest("a", (1 << 36) - 5, 1 << 16, "0" * 32, "f" * 32)
    client.set("kvcache:xxh3:m:a", manifest.encoded())
    for i in range(stored):
        client.set(f"kvcache:xxh3:c:{manifest.writer}:{i}", bytes(1 << 16))
    client.config_resetstat()
    with peak_memory() as most:
        assert store.stat(["a"]) == [None]
        assert most() < 4 << 20
    assert client.info("commandstats")["cmdstat_strlen"]["calls"] <= 16 + 512
    assert client.dbsize() == 0
