"""ValkeyStore on a server without room, one that evicts, and one that is emptied."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import (
    StoreFull,
    ValkeyStore,
)
from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import content, read

from .valkey_rig import BIG, client, names, open_here, served, server, store

__all__ = ["client", "open_here", "server", "store"]

pytestmark = served


def test_a_server_without_room_says_so_and_keeps_what_it_has() -> None:
    with ValkeyServer("--maxmemory", "24mb", "--maxmemory-policy", "noeviction") as server:
        client = Valkey(port=server.port)
        with ValkeyStore(server.url) as store, client:
            assert store.put("a", [content("a", BIG)])
            with pytest.raises(StoreFull, match="maxmemory"):
                store.put("b", [content("b", 5 * CHUNK)])
            assert len(names(client, "c")) == 3, "nothing of the refused entry stays"
            assert store.stat(["b"]) == [None]
            assert read(store, "a") == content("a", BIG)
            assert store.usage().budget == 24 << 20
            assert store.delete("a")
            assert store.put("b", [content("b", BIG)])
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreFull):
                store.put("c", [])
            assert read(store, "b") == content("b", BIG)


def test_a_manifest_that_the_server_has_no_room_for_leaves_no_chunks(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = store._send

    def filled(*args: Any) -> RemoteManifest:
        manifest = send(*args)
        client.config_set("maxmemory", 1)
        return manifest

    monkeypatch.setattr(store, "_send", filled)
    try:
        with pytest.raises(StoreFull):
            store.put("a", [content("a", BIG)])
        assert client.dbsize() == 0
    finally:
        client.config_set("maxmemory", 0)


def test_a_server_that_evicts_gives_misses_and_never_something_else() -> None:
    with ValkeyServer("--maxmemory", "40mb", "--maxmemory-policy", "allkeys-lru") as server:
        hits = refused = 0
        with ValkeyStore(server.url) as store:
            for i in range(30):
                key = f"k{i}"
                try:
                    assert store.put(key, [content(key, CHUNK + 1000)])
                except StoreFull:  # to the server all of one second are as old: it may evict of this very put
                    refused += 1
                    assert store.stat([key]) == [None]
                for back in (0, 1, 5, 12):
                    found = read(store, f"k{i - back}")
                    assert found is None or found == content(f"k{i - back}", CHUNK + 1000)
                    hits += found is not None
            assert refused < 10
            assert 20 <= hits < 110
            assert store.usage().entries < 10
            with pytest.raises(StoreFull, match="chunks"):
                store.put("big", [bytes(60 << 20)])
            assert store.stat(["big"]) == [None]


def test_a_server_that_was_emptied_during_a_put_keeps_nothing_of_it(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = store._send

    def emptied(*args: Any) -> RemoteManifest:
        manifest = send(*args)
        client.flushall()
        return manifest

    monkeypatch.setattr(store, "_send", emptied)
    with pytest.raises(StoreFull, match="was emptied"):
        store.put("a", [content("a", BIG)])
    assert client.dbsize() == 0
