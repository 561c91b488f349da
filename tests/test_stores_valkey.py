"""ValkeyStore against a real server on loopback: what lies there, for how long, several hosts at one key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import (
    StoreValueError,
    ValkeyStore,
    open_store,
)
from kvcache.stores.valkey.entries import SLACK
from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import content, read

from .valkey_rig import BIG, Open, chunk_of, client, names, open_here, served, server, store

__all__ = ["client", "open_here", "server", "store"]

pytestmark = served

# What lies on the server.


def test_an_entry_is_chunks_of_almost_4_mib_under_a_random_id_and_a_manifest(
    store: ValkeyStore, client: Valkey
) -> None:
    data = content("a", BIG)
    assert store.put("a", [data[:5], data[5:]])
    (name,) = names(client, "m")
    assert name == b"kvcache:xxh3:m:a"
    manifest = RemoteManifest.parse(client.get(name), "a")
    chunks = [f"kvcache:xxh3:c:{manifest.writer}:{i}".encode() for i in range(3)]
    assert names(client, "c") == chunks
    assert [client.get(chunk) for chunk in chunks] == [
        data[:CHUNK],
        data[CHUNK : 2 * CHUNK],
        data[2 * CHUNK :],
    ]
    store.delete("a")
    store.put("a", [data])
    assert not set(names(client, "c")) & set(chunks)
    assert store.delete("a")
    assert client.dbsize() == 0


def test_every_name_begins_with_the_prefix_and_prefixes_do_not_mix(client: Valkey, open_here: Open) -> None:
    one, two = open_here(prefix="one"), open_here(prefix="two")
    one.put("a", [b"1"])
    assert two.put("a", [b"22"])
    assert (read(one, "a"), read(two, "a")) == (b"1", b"22")
    assert {name.split(b":")[0] for name in client.keys("*")} == {b"one", b"two"}
    assert one.usage().entries == 1


def test_databases_do_not_mix(server: ValkeyServer, client: Valkey) -> None:
    base = server.url.removesuffix("0")
    with ValkeyStore(base + "0") as zero, ValkeyStore(base + "3") as three:
        zero.put("a", [b"x"])
        assert three.stat(["a"]) == [None]


@pytest.mark.parametrize("scheme", ["valkey", "redis"])
def test_it_is_opened_by_url_with_options_in_the_query(
    server: ValkeyServer, client: Valkey, scheme: str
) -> None:
    store = open_store(
        f"{scheme}://127.0.0.1:{server.port}/0?prefix=mine&ttl=1h&connections=2&digest=xxh3_128"
    )
    assert store.put("a", [b"x"])
    assert names(client, "m") == [b"mine:xxh3:m:a"]
    assert 3_599_000 <= client.pttl(names(client, "m")[0]) <= 3_600_000
    store.close()


def test_usage_counts_entries_bytes_and_what_was_lost(store: ValkeyStore, client: Valkey) -> None:
    for key, size in (("a", 10), ("b", 0), ("c", 2000), ("d", 1), ("e", 1)):
        store.put(key, [content(key, size)])
    assert (store.usage().entries, store.usage().nbytes, store.usage().budget) == (5, 2012, None)
    client.delete(chunk_of(client, "d"))
    client.set("kvcache:xxh3:m:e", b"no manifest")
    usage = store.usage()
    assert (usage.entries, usage.nbytes, usage.evicted, usage.dropped, usage.swept) == (3, 2010, 1, 1, 0)


def test_thousands_of_keys_are_asked_for_at_once(store: ValkeyStore) -> None:
    keys = [f"k{i}" for i in range(1500)]
    for key in keys[:1200]:
        store.put(key, [b"x"])
    assert store.prefix(keys) == 1200
    assert [found is not None for found in store.stat(keys)] == [True] * 1200 + [False] * 300
    assert store.usage().entries == 1200


# Several hosts.


def test_nothing_is_removed_that_another_has_put_meanwhile(
    store: ValkeyStore, client: Valkey, open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get that finds its chunks gone, because the entry has been replaced while it was reading."""
    other = open_here()
    store.put("a", [content("old")])
    began = store._entries.read

    def replaced(*args: Any) -> Any:
        monkeypatch.undo()
        now, _ = began(*args)
        other.delete("a")
        other.put("a", [content("new")])
        return now, "missing"

    monkeypatch.setattr(store._entries, "read", replaced)
    assert store.get_into("a", bytearray(1000)) is False
    assert read(store, "a") == content("new")


def test_an_entry_that_was_replaced_after_the_look_is_read_as_it_is_now(
    store: ValkeyStore, open_here: Open
) -> None:
    other = open_here()
    store.put("a", [content("old", BIG)])
    assert store.stat(["a"])[0] is not None
    other.delete("a")
    other.put("a", [content("new", BIG)])
    buffer = bytearray(BIG)
    assert store.get_into("a", buffer)
    assert buffer == content("new", BIG)
    assert store.stat(["a"])[0] is not None
    other.delete("a")
    other.put("a", [content("short", 10)])
    with pytest.raises(StoreValueError, match="has 10"):
        store.get_into("a", bytearray(BIG))
    assert store.stat(["a"])[0] is not None
    other.delete("a")
    assert store.get_into("a", bytearray(10)) is False


def test_of_two_hosts_that_put_one_key_at_once_one_writes_and_the_other_leaves_nothing(
    client: Valkey, open_here: Open
) -> None:
    stores = [open_here() for _ in range(2)]
    for round_ in range(20):
        barrier, key = threading.Barrier(2), f"k{round_}"

        def put(i: int, barrier: threading.Barrier = barrier, key: str = key) -> bool:
            data = content(f"{key} {i}", CHUNK + 1)
            barrier.wait(30)
            return stores[i].put(key, [data])

        with ThreadPoolExecutor(2) as pool:
            wrote = list(pool.map(put, range(2)))
        assert sorted(wrote) == [False, True]
        assert read(stores[0], key) == content(f"{key} {wrote.index(True)}", CHUNK + 1)
        assert len(names(client, "c")) == 2
        stores[1].delete(key)
    assert client.dbsize() == 0


def test_a_put_that_is_late_gives_way(
    store: ValkeyStore, client: Valkey, open_here: Open, monkeypatch: Any
) -> None:
    """It saw no entry, and there is one by the time it publishes its own."""
    other = open_here()
    send = store._send

    def overtaken(*args: Any) -> RemoteManifest:
        manifest = send(*args)
        assert other.put("a", [b"first"])
        return manifest

    monkeypatch.setattr(store, "_send", overtaken)
    assert store.put("a", [content("a", BIG)]) is False
    assert read(store, "a") == b"first"
    assert len(names(client, "c")) == 1


# Time to live.


def lives(client: Valkey, key: str) -> tuple[int, list[int]]:
    """Milliseconds left of the manifest and of the chunks."""
    manifest = RemoteManifest.parse(client.get(f"kvcache:xxh3:m:{key}"), key)
    chunks = [client.pttl(chunk_of(client, key, i)) for i in range(manifest.count)]
    return client.pttl(f"kvcache:xxh3:m:{key}"), chunks


def test_a_hit_starts_the_time_anew_and_chunks_outlive_their_manifest(
    client: Valkey, open_here: Open
) -> None:
    store = open_here(ttl="1h")
    store.put("a", [content("a", BIG)])
    store.put("b", [b"x"])

    def aged() -> None:
        for name in client.keys("*"):
            client.pexpire(name, 60_000)

    calls: list[Callable[[], object]] = [
        lambda: None,
        lambda: store.get_into("a", bytearray(BIG)),
        lambda: store.prefix(["a", "x"]),
    ]
    for call in calls:
        call()
        manifest, chunks = lives(client, "a")
        assert 3_590_000 < manifest <= 3_600_000
        assert all(chunk >= manifest + SLACK - 5_000 for chunk in chunks)
        aged()
    store.stat(["a"])
    store.put("a", [b"another"])
    assert lives(client, "a")[0] <= 60_000
    assert lives(client, "b")[0] <= 60_000


def test_what_is_used_stays_and_what_is_not_goes(client: Valkey, open_here: Open) -> None:
    store = open_here(ttl="1h")
    store.put("used", [b"x"])
    store.put("idle", [b"x"])
    for name in client.keys("*"):
        client.pexpire(name, 60_000)  # most of the hour is over
    assert store.get_into("used", bytearray(1))
    for name in client.keys("*"):
        client.pexpire(name, max(1, client.pttl(name) - 60_000))  # and now the last minute too
    end = time.monotonic() + 60
    while store.stat(["idle"])[0] is not None:
        assert time.monotonic() < end
    assert read(store, "used") == b"x"
    assert len(names(client, "m")) == 1


def test_the_time_of_last_use_is_known(client: Valkey, open_here: Open) -> None:
    store = open_here(ttl="1h")
    store.put("a", [b"x"])
    client.pexpire("kvcache:xxh3:m:a", 1_800_000)
    (found,) = store.stat(["a"])
    assert found is not None
    assert abs(time.time() - 1800 - found.last_used) < 60


def test_chunks_that_nobody_published_expire(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(store._entries, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        store.put("a", [content("a", BIG)])
    monkeypatch.undo()
    chunks = names(client, "c")
    assert len(chunks) == 3
    assert all(0 < client.pttl(chunk) <= 15 * 60 * 1000 for chunk in chunks)
    assert store.stat(["a"]) == [None]
    assert store.put("a", [b"x"])
