"""Entries of ValkeyStore that are damaged, forged or in part lost: dropped, and never served."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from kvcache.stores import (
    SnapshotCorrupt,
    ValkeyStore,
)
from kvcache.stores.valkey.manifest import RemoteManifest
from kvcache.testing.stores import content, read

from .valkey_rig import BIG, Open, chunk_of, client, names, open_here, served, server, store

__all__ = ["client", "open_here", "server", "store"]

pytestmark = served


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
