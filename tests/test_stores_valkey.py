"""ValkeyStore against a real server on loopback: what lies there, damage, time, memory, who may come in."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import (
    SnapshotCorrupt,
    StoreFull,
    StoreUnavailable,
    StoreValueError,
    ValkeyStore,
    open_store,
)
from kvcache.stores.valkey.entries import SLACK
from kvcache.stores.valkey.manifest import CHUNK, RemoteManifest
from kvcache.testing.servers import ValkeyServer
from kvcache.testing.stores import content, read

pytestmark = pytest.mark.skipif(
    ValkeyServer.program() is None, reason="neither valkey-server nor redis-server is installed"
)
BIG = 2 * CHUNK + 5
"""Bytes of an entry of three chunks."""
Open = Callable[..., ValkeyStore]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[Valkey]:
    """The server, empty, without the store in between."""
    with Valkey(port=server.port) as client:
        client.flushall()
        yield client


@pytest.fixture
def open_here(server: ValkeyServer) -> Iterator[Open]:
    opened: list[ValkeyStore] = []

    def make(**options: Any) -> ValkeyStore:
        opened.append(ValkeyStore(server.url, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(client: Valkey, open_here: Open) -> ValkeyStore:
    return open_here()


def names(client: Valkey, kind: str) -> list[bytes]:
    """Of the manifests ("m") or the chunks ("c") that are there."""
    return sorted(client.keys(f"*:{kind}:*"))


# What lies on the server.


def test_an_entry_is_chunks_of_4_mib_under_a_random_id_and_a_manifest(
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


# Damage and loss.


def chunk_of(client: Valkey, key: str, i: int = 0) -> bytes:
    manifest = RemoteManifest.parse(client.get(f"kvcache:xxh3:m:{key}"), key)
    return f"kvcache:xxh3:c:{manifest.writer}:{i}".encode()


@pytest.mark.parametrize("call", ["get_into", "stat", "prefix"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_chunk_is_a_miss_and_nothing_of_the_entry_stays(
    store: ValkeyStore, client: Valkey, open_here: Open, lost: int, call: str
) -> None:
    store.put("a", [content("a", BIG)])
    store.put("b", [b"x"])
    client.delete(chunk_of(client, "a", lost))
    other = open_here()
    if call == "get_into":
        assert other.get_into("a", bytearray(BIG)) is False
    elif call == "stat":
        assert other.stat(["b", "a"])[1] is None
    else:
        assert other.prefix(["b", "a"]) == 1
    assert names(client, "m") == [b"kvcache:xxh3:m:b"]
    assert len(names(client, "c")) == 1
    assert other.put("a", [content("a", BIG)])
    assert read(store, "a") == content("a", BIG)


def test_a_chunk_lost_between_look_and_get_is_a_miss(store: ValkeyStore, client: Valkey) -> None:
    store.put("a", [content("a", BIG)])
    assert store.stat(["a"])[0] is not None
    client.delete(chunk_of(client, "a", 1))
    assert store.get_into("a", bytearray(BIG)) is False
    assert store.usage().evicted == 1


DAMAGE: dict[str, Callable[[Valkey, bytes], object]] = {
    "a flipped bit": lambda client, name: client.setbit(name, 77, 1 - client.getbit(name, 77)),
    "a byte too many": lambda client, name: client.append(name, b"x"),
    "a byte too few": lambda client, name: client.set(name, client.get(name)[:-1]),
    "another value": lambda client, name: client.set(name, b"?"),
    "no string": lambda client, name: (client.delete(name), client.rpush(name, b"x")),
}


@pytest.mark.parametrize("place", [0, 2], ids=["first", "last"])
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_chunk_is_corrupt_and_dropped(
    store: ValkeyStore, client: Valkey, damage: str, place: int
) -> None:
    store.put("a", [content("a", BIG)])
    store.put("b", [content("b", BIG)])
    DAMAGE[damage](client, chunk_of(client, "a", place))
    with pytest.raises(SnapshotCorrupt, match="get_into: a in valkey://127"):
        store.get_into("a", bytearray(BIG))
    assert store.stat(["a"]) == [None]
    assert len(names(client, "c")) == 3
    assert read(store, "b") == content("b", BIG)
    assert (store.usage().dropped, store.usage().evicted) == (1, 0)
    assert store.put("a", [b"again"])


def test_the_data_of_one_key_are_not_those_of_another(store: ValkeyStore, client: Valkey) -> None:
    store.put("a", [content("a")])
    raw = client.get("kvcache:xxh3:m:a")
    client.set("kvcache:xxh3:m:b", raw.replace(b'"key":"a"', b'"key":"b"'))
    with pytest.raises(SnapshotCorrupt, match="digest"):
        store.get_into("b", bytearray(1000))
    client.set("kvcache:xxh3:m:c", raw)
    assert store.stat(["c"]) == [None]


@pytest.mark.parametrize("value", [b"", b"{}", b"\x80\x04pickle", b"[" * 100_000, b'{"format": 1}'])
def test_a_value_that_is_no_manifest_is_dropped(store: ValkeyStore, client: Valkey, value: bytes) -> None:
    client.set("kvcache:xxh3:m:a", value)
    assert store.stat(["a"]) == [None]
    assert client.dbsize() == 0
    client.set("kvcache:xxh3:m:a", value)
    with pytest.raises(SnapshotCorrupt):
        store.get_into("a", bytearray(3))
    client.set("kvcache:xxh3:m:a", value)
    assert store.put("a", [b"x"])
    assert store.usage().dropped == 3


def test_who_does_not_know_the_secret_can_forge_nothing(client: Valkey, open_here: Open) -> None:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    mine = open_here(digest="blake3", secret="of the hosts")
    theirs = open_here(digest="blake3", secret="a guess")
    mine.put("a", [content("a")])
    theirs.put("a", [content("forged")])
    assert read(mine, "a") == content("a")
    ours, forged = sorted(
        names(client, "m"), key=lambda name: client.get(name) != client.get(manifest_of(mine))
    )
    client.rename(forged, ours)  # its chunk, put under our names too
    writer = RemoteManifest.parse(client.get(ours), "a").writer
    stem = ours.rpartition(b":m:")[0]
    client.set(b"%b:c:%b:0" % (stem, writer.encode()), content("forged"))
    with pytest.raises(SnapshotCorrupt, match="digest"):
        mine.get_into("a", bytearray(1000))


def manifest_of(store: ValkeyStore, key: str = "a") -> bytes:
    return store._entries.name(key)


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
    chunks = [client.pttl(chunk_of(client, key, i)) for i in range(len(manifest.sizes))]
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
    store = open_here(ttl=2.5)
    store.put("used", [b"x"])
    store.put("idle", [b"x"])
    end = time.monotonic() + 20
    while store.stat(["idle"])[0] is not None and time.monotonic() < end:
        assert store.get_into("used", bytearray(1))
        time.sleep(0.05)
    assert store.stat(["idle"]) == [None]
    assert read(store, "used") == b"x"


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


# Memory.


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
        hits = 0
        with ValkeyStore(server.url) as store:
            for i in range(30):
                key = f"k{i}"
                assert store.put(key, [content(key, CHUNK + 1000)])
                for back in (0, 1, 5, 12):
                    found = read(store, f"k{i - back}")
                    assert found is None or found == content(f"k{i - back}", CHUNK + 1000)
                    hits += found is not None
            assert read(store, "k29") == content("k29", CHUNK + 1000)
            assert 30 <= hits < 110
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


# Time limits and connections.


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
    with ValkeyServer() as server, ValkeyStore(server.url, timeout=1, connect_timeout=1) as store:
        store.put("a", [content("a", BIG)])
        server.freeze()
        with pytest.raises(StoreUnavailable, match=r"[Tt]im"):
            store.get_into("a", bytearray(BIG))
        with pytest.raises(StoreUnavailable, match=r"[Tt]im"):
            store.put("b", [content("b", 8 * CHUNK)])
        server.thaw()
        with ValkeyStore(server.url) as patient:
            assert read(patient, "a") == content("a", BIG)
            assert patient.stat(["b"]) == [None]
        assert read(store, "a") == content("a", BIG)


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


# Who may come in.


def chain(error: BaseException) -> str:
    """All that is told of an error, its causes too."""
    found, cause = "", error
    while cause is not None:
        found += f"{cause!r} {cause} "
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    return found


def test_a_password_lets_in_and_is_never_shown() -> None:
    with ValkeyServer("--requirepass", "open sesame") as server:
        host = f"127.0.0.1:{server.port}"
        for store in (
            open_store(f"valkey://:open%20sesame@{host}"),
            open_store(f"valkey://{host}?password=open%20sesame"),
            open_store(f"valkey://{host}", password="open sesame"),
            open_store(f"valkey://default@{host}", password="open sesame"),
        ):
            assert isinstance(store, ValkeyStore)
            store.ping()
            assert "sesame" not in repr(store)
            store.close()
        for url in (
            f"valkey://{host}",
            f"valkey://:open%20barley@{host}",
            f"valkey://ali:open%20sesame@{host}",
        ):
            with ValkeyStore(url) as store, pytest.raises(StoreUnavailable) as caught:
                store.put("a", [b"x"])
            assert "open " not in chain(caught.value)
            assert server.url in str(caught.value)


def test_a_server_that_quotes_the_password_in_its_error_does_not_make_it_known() -> None:
    with ValkeyServer("--rename-command", "AUTH", "") as server:
        url = f"valkey://:sesame@127.0.0.1:{server.port}"
        with ValkeyStore(url) as store, pytest.raises(StoreUnavailable) as caught:
            store.ping()
    assert "sesame" not in chain(caught.value)
    assert "***" in str(caught.value)


def test_a_user_with_few_rights_is_enough() -> None:
    rights = ["get", "mget", "set", "getdel", "getrange", "exists", "pttl", "pexpire", "unlink", "eval"]
    rights += ["multi", "exec"]
    user = [
        "cache",
        "on",
        ">pass",
        "~kvcache:*",
        "resetchannels",
        "-@all",
        *(f"+{right}" for right in rights),
    ]
    with ValkeyServer("--user", *user) as server:
        with ValkeyStore(f"valkey://cache:pass@127.0.0.1:{server.port}/0") as store:
            assert store.put("a", [content("a", BIG)])
            assert not store.put("a", [b"x"])
            assert read(store, "a") == content("a", BIG)
            assert store.prefix(["a", "b"]) == 1
            client = Valkey(port=server.port)
            client.delete(chunk_of(client, "a"))
            client.close()
            assert store.stat(["a"]) == [None]
            assert store.put("a", [b"x"])
            assert store.delete("a")
            with pytest.raises(StoreUnavailable, match=r"NOPERM|permission"):
                store.usage()
        other = ValkeyStore(f"valkey://cache:pass@127.0.0.1:{server.port}/0", prefix="other")
        with other, pytest.raises(StoreUnavailable, match=r"NOPERM|permission"):
            other.stat(["a"])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate for 127.0.0.1 by it, one for another name, and another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    new = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    )
    for name in ("ca", "stranger"):
        run(*new, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, alternative in (("server", "IP:127.0.0.1"), ("elsewhere", "DNS:elsewhere.example")):
        issued = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", f"subjectAltName={alternative}")
        run(*new, *issued, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    return folder


def over_tls(folder: Path, name: str) -> ValkeyServer:
    files = [
        ("--tls-cert-file", f"{name}.pem"),
        ("--tls-key-file", f"{name}.key"),
        ("--tls-ca-cert-file", "ca.pem"),
    ]
    return ValkeyServer(tls=[word for option, file in files for word in (option, str(folder / file))])


def test_tls_is_encrypted_and_both_sides_are_checked(certificates: Path) -> None:
    mine = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
    with over_tls(certificates, "server") as server:
        with ValkeyStore(server.url, tls_ca=certificates / "ca.pem", **mine) as store:
            assert store.put("a", [content("a", BIG)])
            assert read(store, "a") == content("a", BIG)
        with open_store(
            f"{server.url.replace('valkeys', 'rediss')}?tls_verify=no&tls_cert={mine['tls_cert']}"
            f"&tls_key={mine['tls_key']}"
        ) as store:  # type: ignore[attr-defined]
            assert read(store, "a") == content("a", BIG)
        refused: list[dict[str, Any]] = [
            mine,  # the system's authorities do not know this one
            {**mine, "tls_ca": certificates / "stranger.pem"},
            {"tls_ca": certificates / "ca.pem"},  # the server wants to know who comes
            {**mine, "tls_ca": certificates / "nowhere.pem"},
        ]
        for options in refused:
            with ValkeyStore(server.url, **options) as store, pytest.raises(StoreUnavailable):
                store.ping()
        plain = server.url.replace("valkeys", "valkey")
        with ValkeyStore(plain, timeout=1) as store, pytest.raises(StoreUnavailable):
            store.ping()


def test_tls_refuses_a_certificate_of_another_name(certificates: Path) -> None:
    mine = {"tls_cert": certificates / "elsewhere.pem", "tls_key": certificates / "elsewhere.key"}
    with over_tls(certificates, "elsewhere") as server:
        store = ValkeyStore(server.url, tls_ca=certificates / "ca.pem", **mine)
        with store, pytest.raises(StoreUnavailable, match="certificate"):
            store.ping()
