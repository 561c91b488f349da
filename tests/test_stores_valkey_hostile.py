"""Servers that do not keep to what was asked: whatever they send, a call ends in its time, in little memory,
with what was put or an error of a store.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import StoreError, StoreUnavailable, ValkeyStore
from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import content, read

from .valkey_rig import client, open_here, served, server, store

__all__ = ["client", "open_here", "server", "store"]

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
        self.port: int = self._socket.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}/0"

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


# Replies that never end. None of these needs a real server.


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
    "a number": lambda: Feeding(b":", b"1" * 1000),
    "dripped": lambda: Feeding(b"", b"+", 0.01),
    "a value, dripped": lambda: Feeding(b"*1\r\n$4000\r\n", b"x", 0.01),
    "nothing": lambda: Feeding(b"", b"", 0.01),
}


@pytest.mark.parametrize(
    ("feeding", "call"),
    [(feeding, "stat") for feeding in ENDLESS]
    + [("a value in a list", call) for call in CALLS if call != "stat"],
)
def test_a_reply_that_never_ends_ends_the_call(feeding: str, call: str) -> None:
    """In its time, and in little memory."""
    ended = threading.Event()
    raised: list[BaseException] = []

    def work(store: ValkeyStore) -> None:
        try:
            CALLS[call](store)
        except BaseException as error:
            raised.append(error)
        ended.set()

    with (
        Listening(ENDLESS[feeding]()) as listening,
        ValkeyStore(listening.url, timeout=0.1, connect_timeout=0.1) as store,
    ):
        tracemalloc.start()
        working = threading.Thread(target=work, args=[store], daemon=True)
        working.start()
        assert ended.wait(60), "the call never came to its end"
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        working.join()
    assert isinstance(raised[0], StoreUnavailable)
    assert most < 8 << 20


def test_signing_in_is_part_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listening(Feeding(b"+O", b"K", 0.01)) as listening:
        url = listening.url.replace("//", "//me:secret@")
        with (
            ValkeyStore(url, timeout=0.1, connect_timeout=0.1) as store,
            pytest.raises(
                StoreUnavailable, match=r"timeout=0\.1: a call has 0\.1 s, and again for each 4 MiB"
            ),
        ):
            store.ping()


def test_a_server_that_takes_nothing_in_ends_a_put_in_its_time() -> None:
    with (
        Listening(lambda connection: connection.settimeout(0.05)) as listening,
        ValkeyStore(listening.url, timeout=0.1, connect_timeout=0.1) as store,
        pytest.raises(StoreUnavailable, match=r"[Tt]ime"),
    ):
        store._entries.look = lambda wire, keys: [None] * len(keys)  # type: ignore[method-assign]
        store.put("a", [bytes(8 * CHUNK)])


# Replies of a real server, one of them replaced on the way.


def split(data: bytes) -> int:
    """Bytes of the first reply in ``data``; 0: it is not whole."""
    end = data.find(b"\r\n") + 2
    if end < 2:
        return 0
    kind, number = data[:1], data[1 : end - 2]
    if kind == b"$" and number != b"-1":
        stop = end + int(number) + 2
        return stop if stop <= len(data) else 0
    for _ in range(max(0, int(number)) if kind == b"*" else 0):
        size = split(data[end:])
        if not size:
            return 0
        end += size
    return end


class Between:
    """Passes everything on between a store and a server; ``change(number, reply)`` replaces replies."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._servers: dict[socket.socket, tuple[socket.socket, list[bytes]]] = {}
        self.change: Callable[[int, bytes], bytes] = lambda number, reply: reply
        self.count = 0

    def __call__(self, mine: socket.socket) -> None:
        if mine not in self._servers:
            self._servers[mine] = socket.create_connection(("127.0.0.1", self._port)), [b""]
        theirs, rest = self._servers[mine]
        for ready in select.select([mine, theirs], [], [], 0.05)[0]:
            data = ready.recv(1 << 16)
            if not data:
                theirs.close()
                raise ConnectionError
            if ready is mine:
                theirs.sendall(data)
                continue
            rest[0] += data
            replies = b""
            while size := split(rest[0]):
                reply, rest[0] = rest[0][:size], rest[0][size:]
                replies += self.change(self.count, reply)
                self.count += 1
            mine.sendall(replies)

    def close(self) -> None:
        for theirs, _ in self._servers.values():
            theirs.close()


ERRORS = [b"-%b no\r\n" % kind for kind in (b"ERR", b"WRONGTYPE", b"OOM", b"NOPERM", b"LOADING")]
NUMBERS = [b":-7\r\n", b":0\r\n", b":123456789\r\n"]
VALUES = [b"$-1\r\n", b"$0\r\n\r\n", b"$3\r\nabc\r\n", b"$5000\r\n" + b"x" * 5000 + b"\r\n"]
LISTS = [b"*-1\r\n", b"*0\r\n", b"*1\r\n:1\r\n", b"*1\r\n$1\r\n{\r\n", b"*1\r\n-ERR in\r\n"]
LISTS += [b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", b"*3\r\n$-1\r\n$-1\r\n$-1\r\n"]
WRONG = [*ERRORS, *NUMBERS, *VALUES, *LISTS, b"+OK\r\n", b"%1\r\n+a\r\n+b\r\n", b"?\r\n", b""]


Rig = tuple[Between, ValkeyStore, ValkeyStore]
"""What lies between; the store behind it, and one that speaks with the server itself."""


@pytest.fixture
def rig(server: ValkeyServer, store: ValkeyStore) -> Iterator[Rig]:
    passing = Between(server.port)
    with (
        Listening(passing) as listening,
        ValkeyStore(listening.url, connections=1, timeout=0.1) as behind,
    ):
        yield passing, behind, store
    passing.close()


def one_call(rig: Rig, call: str, change: Callable[[int, bytes], bytes]) -> None:
    """It ends as it should or with an error of a store."""
    passing, behind, store = rig
    for key, found in zip("ab", store.stat(["a", "b"]), strict=True):
        assert found or store.put(key, [content(key)])
    passing.count, passing.change = 0, change
    got: Any = None
    with contextlib.suppress(StoreError):
        got = CALLS[call](behind)
    if call == "get_into":
        assert got in (None, content("a"))
    if call == "put":
        assert read(store, "new") in (None, content("new"))
        store.delete("new")


@served
@pytest.mark.parametrize("call", CALLS)
def test_a_reply_of_another_kind_is_an_error_of_the_store_or_a_miss(rig: Rig, call: str) -> None:
    one_call(rig, call, lambda number, reply: reply)
    for at in range(rig[0].count):
        for wrong in WRONG:
            one_call(rig, call, lambda number, reply: wrong if number == at else reply)  # noqa: B023
    assert all(read(rig[2], key) in (None, content(key)) for key in "ab")


@served
@pytest.mark.parametrize("call", CALLS)
def test_a_flipped_bit_on_the_way_is_an_error_of_the_store_or_a_miss(rig: Rig, call: str) -> None:
    rng = random.Random(0)
    for _ in range(40):
        at, bit = rng.randrange(9), rng.randrange(1 << 20)

        def flip(number: int, reply: bytes) -> bytes:
            flipped = bytearray(reply)
            flipped[bit // 8 % len(flipped)] ^= 1 << bit % 8  # noqa: B023
            return bytes(flipped) if number == at else reply  # noqa: B023

        one_call(rig, call, flip)


@served
def test_an_error_of_the_server_is_no_damage(rig: Rig) -> None:
    """A right that is missing says nothing of what is stored."""
    passing, behind, store = rig
    store.put("a", [content("a")])
    passing.change = lambda number, reply: b"-NOPERM no\r\n" if reply[:1] in b"$:" else reply
    for call in ("stat", "get_into", "prefix"):
        with pytest.raises(StoreUnavailable, match="NOPERM"):
            CALLS[call](behind)
    assert read(store, "a") == content("a")


# What a manifest claims.


@served
@pytest.mark.parametrize("stored", [0, 3, 40])
def test_a_manifest_costs_no_more_than_what_is_stored(
    store: ValkeyStore, client: Valkey, stored: int
) -> None:
    manifest = RemoteManifest("a", (1 << 36) - 5, 1 << 16, "0" * 32, "f" * 32)
    assert manifest.count == 1 << 20
    client.set("kvcache:xxh3:m:a", manifest.encoded())
    for i in range(stored):
        client.set(f"kvcache:xxh3:c:{manifest.writer}:{i}", bytes(1 << 16))
    client.config_resetstat()
    tracemalloc.start()
    assert store.stat(["a"]) == [None]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
    assert client.info("commandstats")["cmdstat_strlen"]["calls"] <= 16 + 512
    assert client.dbsize() == 0
    assert store.put("a", [content("a")])
    assert read(store, "a") == content("a")


@served
def test_an_entry_of_many_chunks_is_whole_or_a_miss(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcache.stores.valkey import store as store_module
    from kvcache.stores.valkey import transfer

    for module in (store_module, transfer):
        monkeypatch.setattr(module, "CHUNK", 1 << 16)
    data = content("a", (600 << 16) + 7)
    assert store.put("a", [data])
    assert store.stat(["a"])[0] is not None
    assert read(store, "a") == data
    (last,) = client.keys("*:c:*:600")
    client.delete(last)
    assert store.stat(["a"]) == [None]
    assert client.dbsize() == 0
