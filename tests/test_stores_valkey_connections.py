"""ValkeyStore's connections: servers that are gone or frozen, limits, reuse, forked children."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import (
    StoreUnavailable,
    StoreValueError,
    ValkeyStore,
)
from kvcache.stores.valkey.manifest import CHUNK
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import content, read

from .valkey_rig import BIG, Open, client, open_here, served, server, store

__all__ = ["client", "open_here", "server", "store"]

pytestmark = served


def test_a_server_that_is_not_there_is_unavailable_until_it_is() -> None:
    server = ValkeyServer()
    server.start()
    server.kill()
    try:
        with ValkeyStore(server.url) as store:
            calls: list[Callable[[], object]] = [
                store.ping,
                lambda: store.put("a", [b"x"]),
                lambda: store.stat(["a"]),
                lambda: store.get_into("a", bytearray(1)),
                lambda: store.prefix(["a"]),
                lambda: store.delete("a"),
                store.usage,
            ]
            for call in calls:
                with pytest.raises(StoreUnavailable, match=rf"valkey://127.0.0.1:{server.port}/0"):
                    call()
            server.start()
            store.ping()
            assert store.put("a", [b"x"])
            server.kill()
            server.start()
            assert store.stat(["a"]) == [None]
    finally:
        server.close()


def test_a_server_that_is_frozen_is_unavailable_after_the_time_limit() -> None:
    with ValkeyServer() as server:
        store = ValkeyStore(server.url, timeout=1, connect_timeout=1)
        with store, ValkeyStore(server.url) as patient:
            patient.put("a", [content("a", BIG)])
            patient.put("small", [b"x"])
            server.freeze()
            with pytest.raises(StoreUnavailable, match=r"[Tt]im"):
                store.get_into("a", bytearray(BIG))
            with pytest.raises(StoreUnavailable, match=r"[Tt]im"):
                store.put("b", [content("b", 8 * CHUNK)])
            server.thaw()
            assert read(patient, "a") == content("a", BIG)
            assert patient.stat(["b"]) == [None]
            assert read(store, "small") == b"x"


def test_no_more_connections_are_made_than_allowed(client: Valkey, open_here: Open) -> None:
    store = open_here(connections=2, timeout=60)
    before = len(client.client_list())

    def work(i: int) -> int:
        store.put(f"k{i}", [content(f"k{i}", CHUNK)])
        return len(client.client_list())

    with ThreadPoolExecutor(8) as pool:
        most = max(pool.map(work, range(16)))
    assert most <= before + 2 + 8, "the store's two, and those of the threads that count"
    mine = [each for each in client.client_list() if each["cmd"] not in ("client|list", "client")]
    assert len(mine) <= 2
    assert store.usage().entries == 16


def test_a_connection_is_used_again(client: Valkey, open_here: Open) -> None:
    store = open_here()
    received = client.info("stats")["total_connections_received"]
    for i in range(20):
        store.put(f"k{i}", [b"x"])
        read(store, f"k{i}")
    assert client.info("stats")["total_connections_received"] == received + 1


def test_a_call_that_raises_leaves_the_connection_in_order(store: ValkeyStore) -> None:
    store.put("a", [content("a")])
    for _ in range(3):
        with pytest.raises(StoreValueError):
            store.get_into("a", bytearray(999))
        assert read(store, "a") == content("a")


def test_a_forked_child_uses_the_store_on_connections_of_its_own(store: ValkeyStore) -> None:
    store.put("a", [content("a")])
    assert read(store, "a") == content("a")
    pid = os.fork()
    if not pid:
        ok = all(read(store, "a") == content("a") for _ in range(20)) and store.put("child", [b"x"])
        os._exit(0 if ok else 1)
    for _ in range(20):
        assert read(store, "a") == content("a")
    assert os.waitpid(pid, 0)[1] == 0
    assert read(store, "child") == b"x"
