"""ValkeyStore against a real server on loopback: what lies there, for how long, who may come in."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from valkey import Valkey

from benchmarks import stores as benchmark
from kvcache.stores import (
    SnapshotCorruptError,
    StoreFullError,
    StoreUnavailableError,
    StoreValueError,
    ValkeyStore,
    open_store,
)
from kvcache.stores.valkey import store as store_module
from kvcache.stores.valkey import transfer
from kvcache.stores.valkey.entries import SLACK
from kvcache.stores.valkey.manifest import CHUNK, ENTRY_FORMAT, RemoteManifest
from kvcache.stores.valkey.options import ValkeyOptions
from kvcache.testing.stores import content, read

from ...needs import need_program
from ...rigs.servers import ValkeyServer
from .valkey_rig import BIG, Open, chunk_of, client, names, open_here, served, server, store

__all__ = ["client", "open_here", "server", "store"]

pytestmark = served
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "remote-stores.md").read_text(encoding="utf-8")


def small_chunks(patch: pytest.MonkeyPatch, size: int = 1 << 16) -> None:
    for module in (store_module, transfer):
        patch.setattr(module, "CHUNK", size)


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
    assert b"".join(client.get(chunk) for chunk in chunks) == data
    assert [client.strlen(chunk) for chunk in chunks] == [CHUNK, CHUNK, 5]
    assert sum(client.memory_usage(name, samples=0) for name in chunks) < 1.01 * BIG
    assert read(store, "a") == data
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
    with ValkeyStore(one.url.removesuffix("0") + "3", prefix="one") as three:
        assert three.stat(["a"]) == [None], "databases do not mix either"


def test_usage_counts_entries_bytes_and_what_was_lost(store: ValkeyStore, client: Valkey) -> None:
    for key, size in (("a", 10), ("b", 0), ("c", 2000), ("d", 1), ("e", 1)):
        store.put(key, [content(key, size)])
    assert (store.usage().entries, store.usage().nbytes, store.usage().budget) == (5, 2012, None)
    client.delete(chunk_of(client, "d"))
    client.set("kvcache:xxh3:m:e", b"no manifest")
    usage = store.usage()
    assert (usage.entries, usage.nbytes, usage.evicted, usage.dropped, usage.swept) == (3, 2010, 1, 1, 0)


def test_thousands_of_keys_are_asked_for_at_once(store: ValkeyStore) -> None:
    keys = [f"k{i}" for i in range(700)]
    for key in keys[:600]:
        store.put(key, [b"x"])
    assert store.prefix(keys) == store.usage().entries == 600
    assert [found is not None for found in store.stat(keys)] == [True] * 600 + [False] * 100


def test_entries_in_chunks_of_another_size_are_read(open_here: Open, client: Valkey) -> None:
    """As hosts with another version of this package put them."""
    data = content("a", 3 * CHUNK + 17)
    theirs, ours = open_here(), open_here()
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, 4 << 20)
        assert theirs.put("a", [data])
    assert read(ours, "a") == data
    assert not ours.put("a", [data])
    assert ours.delete("a")


def test_an_entry_of_many_chunks_is_whole_or_a_miss(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    data = content("a", (600 << 16) + 7)
    assert store.put("a", [data])
    assert read(store, "a") == data
    client.delete(*client.keys("*:c:*:600"))
    assert store.stat(["a"]) == [None]
    assert client.dbsize() == 0


# What is damaged, or went meanwhile.


def test_a_chunk_lost_between_look_and_get_is_a_miss(store: ValkeyStore, client: Valkey) -> None:
    store.put("a", [content("a", BIG)])
    assert store.stat(["a"])[0] is not None
    client.delete(chunk_of(client, "a", 1))
    assert store.get_into("a", bytearray(BIG)) is False
    assert store.usage().evicted == 1


@pytest.mark.parametrize("name", ["chunk", "manifest"])
def test_a_value_that_is_no_string_is_damage(store: ValkeyStore, client: Valkey, name: str) -> None:
    store.put("a", [content("a")])
    there = chunk_of(client, "a") if name == "chunk" else b"kvcache:xxh3:m:a"
    client.delete(there)
    client.rpush(there, b"x")
    if name == "chunk":
        with pytest.raises(SnapshotCorruptError, match="get_into: a in valkey://127"):
            store.get_into("a", bytearray(1000))
    assert store.stat(["a"]) == [None]
    assert store.usage().dropped == (name == "chunk")


@pytest.mark.parametrize("value", [b"", b"{}", b"\x80\x04pickle", b"[" * 100_000, b'{"format": 1}'])
def test_a_value_that_is_no_manifest_is_dropped(store: ValkeyStore, client: Valkey, value: bytes) -> None:
    client.set("kvcache:xxh3:m:a", value)
    assert store.stat(["a"]) == [None]
    assert client.dbsize() == 0
    client.set("kvcache:xxh3:m:a", value)
    with pytest.raises(SnapshotCorruptError):
        store.get_into("a", bytearray(3))
    client.set("kvcache:xxh3:m:a", value)
    assert store.put("a", [b"x"])
    assert store.usage().dropped == 3


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

    def replace(data: bytes | None) -> None:
        assert store.put("a", [content("a", 2000)]) or store.stat(["a"])[0] is not None
        assert other.delete("a")
        assert data is None or other.put("a", [data])

    replace(content("new", 2000))
    buffer = bytearray(2000)
    assert store.get_into("a", buffer)
    assert buffer == content("new", 2000)
    replace(b"short")
    with pytest.raises(StoreValueError, match="has 5"):
        store.get_into("a", bytearray(2000))
    replace(None)
    assert store.get_into("a", bytearray(5)) is False


def during_the_put(store: ValkeyStore, patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """``act()`` when the chunks have been sent, and the manifest not yet."""
    send = store._send

    def sent(*args: Any) -> RemoteManifest:
        manifest = send(*args)
        act()
        return manifest

    patch.setattr(store, "_send", sent)


def test_a_put_that_is_late_gives_way(
    store: ValkeyStore, client: Valkey, open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw no entry, and there is one by the time it publishes its own."""
    other = open_here()
    during_the_put(store, monkeypatch, lambda: other.put("a", [b"first"]))
    assert store.put("a", [content("a", BIG)]) is False
    assert read(store, "a") == b"first"
    assert len(names(client, "c")) == 1


def test_a_manifest_that_the_server_has_no_room_for_leaves_no_chunks(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_the_put(store, monkeypatch, lambda: client.config_set("maxmemory", 1))
    try:
        with pytest.raises(StoreFullError, match="maxmemory"):
            store.put("a", [content("a", BIG)])
        assert client.dbsize() == 0
        assert store.usage().budget == 1
    finally:
        client.config_set("maxmemory", 0)


def test_a_server_that_was_emptied_during_a_put_keeps_nothing_of_it(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_the_put(store, monkeypatch, client.flushall)
    with pytest.raises(StoreFullError, match="was emptied"):
        store.put("a", [content("a", BIG)])
    assert client.dbsize() == 0


def test_a_server_that_evicts_gives_misses_and_never_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    with ValkeyServer("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server:
        hits, size = 0, 200_000
        with ValkeyStore(server.url) as store:
            for i in range(40):
                try:
                    assert store.put(f"k{i}", [content(f"k{i}", size)])
                except StoreFullError:  # entries of one second are as old: it may evict of this very put
                    assert store.stat([f"k{i}"]) == [None]
                for back in (0, 1, 5, 25):
                    found = read(store, f"k{i - back}")
                    assert found is None or found == content(f"k{i - back}", size)
                    hits += found is not None
            assert 20 <= hits < 150
            assert store.usage().entries < 20
            with pytest.raises(StoreFullError, match="chunks"):
                store.put("big", [bytes(6 << 20)])
            assert store.stat(["big"]) == [None]


# Time to live.


def test_a_hit_starts_the_time_anew_and_chunks_outlive_their_manifest(
    client: Valkey, open_here: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch)
    store, size = open_here(ttl="1h"), (2 << 16) + 5
    store.put("a", [content("a", size)])
    store.put("b", [b"x"])
    calls: list[Callable[[], object]] = [
        lambda: None,
        lambda: store.get_into("a", bytearray(size)),
        lambda: store.prefix(["a", "x"]),
    ]
    for call in calls:
        call()
        manifest = client.pttl("kvcache:xxh3:m:a")
        assert 3_590_000 < manifest <= 3_600_000
        assert all(client.pttl(chunk_of(client, "a", i)) >= manifest + SLACK - 5_000 for i in range(3))
        for name in client.keys("*"):
            client.pexpire(name, 60_000)
    store.put("a", [b"another"])
    (found,) = store.stat(["a"])
    assert found is not None
    assert abs(time.time() - 3540 - found.last_used) < 60
    assert all(client.pttl(f"kvcache:xxh3:m:{key}") <= 60_000 for key in "ab")


def test_chunks_that_nobody_published_expire(
    store: ValkeyStore, client: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    during_the_put(store, monkeypatch, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.put("a", [content("a", BIG)])
    monkeypatch.undo()
    assert len(names(client, "c")) == 3
    assert all(0 < client.pttl(chunk) <= 15 * 60 * 1000 for chunk in names(client, "c"))
    assert store.stat(["a"]) == [None]
    assert store.put("a", [b"x"])


# Connections.


def test_no_more_connections_are_made_than_allowed_and_one_is_used_again(
    client: Valkey, open_here: Open
) -> None:
    one, two = open_here(), open_here(connections=2, timeout=60)
    received = client.info("stats")["total_connections_received"]
    for i in range(20):
        one.put(f"k{i}", [b"x"])
        read(one, f"k{i}")
    assert client.info("stats")["total_connections_received"] == received + 1
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: two.put(f"big{i}", [content(f"{i}", BIG)]), range(8)))
    assert client.info("stats")["total_connections_received"] <= received + 3


# Who may come in.


def chain(error: BaseException | None) -> str:
    """All that is told of an error, its causes too."""
    return "" if error is None else f"{error!r} {error} {chain(error.__cause__ or error.__context__)}"


def test_a_password_lets_in_and_is_never_shown() -> None:
    with ValkeyServer("--requirepass", "open sesame") as server:
        host = f"127.0.0.1:{server.port}"
        for store in (
            open_store(f"valkey://:open%20sesame@{host}"),
            open_store(f"valkey://{host}?password=open%20sesame"),
            open_store(f"valkey://default@{host}", password="open sesame"),
        ):
            assert isinstance(store, ValkeyStore)
            store.ping()
            assert "sesame" not in repr(store)
            store.close()
        for user in ("", ":open%20barley@", "ali:open%20sesame@"):
            with (
                ValkeyStore(f"valkey://{user}{host}") as store,
                pytest.raises(StoreUnavailableError) as caught,
            ):
                store.put("a", [b"x"])
            assert "open " not in chain(caught.value)
            assert server.url in str(caught.value)


def test_a_server_that_quotes_the_password_in_its_error_does_not_make_it_known() -> None:
    with ValkeyServer("--rename-command", "AUTH", "") as server:
        url = f"valkey://:sesame@127.0.0.1:{server.port}"
        with ValkeyStore(url) as store, pytest.raises(StoreUnavailableError) as caught:
            store.ping()
    assert "sesame" not in chain(caught.value)
    assert "***" in str(caught.value)


def test_the_rights_of_the_page_are_enough() -> None:
    (rule,) = re.findall(r"^ACL SETUSER (.*)$", PAGE, re.MULTILINE)
    with ValkeyServer("--user", *rule.split()) as server:
        url = f"valkey://cache:password@127.0.0.1:{server.port}"
        with ValkeyStore(url) as store, Valkey(port=server.port) as client:
            assert store.put("a", [content("a", BIG)])
            assert not store.put("a", [b"x"])
            assert read(store, "a") == content("a", BIG)
            assert store.prefix(["a", "b"]) == 1
            client.delete(chunk_of(client, "a"))
            assert store.stat(["a"]) == [None]
            assert store.put("a", [b"x"])
            assert store.delete("a")
            with pytest.raises(StoreUnavailableError, match=r"NOPERM|permission"):
                store.usage()
        other = ValkeyStore(url, prefix="other")
        with other, pytest.raises(StoreUnavailableError, match=r"NOPERM|permission"):
            other.stat(["a"])


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate for 127.0.0.1 by it, one for another name, and another authority."""
    folder = tmp_path_factory.mktemp("certificates")
    openssl = need_program("openssl")
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    issued = "-CA ca.pem -CAkey ca.key -addext subjectAltName="
    by = {
        "ca": "",
        "stranger": "",
        "server": f"{issued}IP:127.0.0.1",
        "elsewhere": f"{issued}DNS:elsewhere.example",
    }
    for name, more in by.items():
        line = f"{openssl} {new} -keyout {name}.key -out {name}.pem -subj /CN={name} {more}"
        subprocess.run(line.split(), cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def over_tls(folder: Path, name: str) -> tuple[ValkeyServer, dict[str, Any]]:
    """A server with this certificate, and a client's options to have the same one."""
    files = {"cert": folder / f"{name}.pem", "key": folder / f"{name}.key"}
    words = [word for option, path in files.items() for word in (f"--tls-{option}-file", str(path))]
    mine = {f"tls_{option}": path for option, path in files.items()}
    return ValkeyServer(tls=[*words, "--tls-ca-cert-file", str(folder / "ca.pem")]), mine


def test_tls_is_encrypted_and_both_sides_are_checked(certificates: Path) -> None:
    running, mine = over_tls(certificates, "server")
    with running as server:
        with ValkeyStore(server.url, tls_ca=certificates / "ca.pem", **mine) as store:
            assert store.put("a", [content("a", BIG)])
            assert read(store, "a") == content("a", BIG)
        url = server.url.replace("valkeys", "rediss")
        with open_store(
            f"{url}?tls_verify=no&tls_cert={mine['tls_cert']}&tls_key={mine['tls_key']}"
        ) as store:  # type: ignore[attr-defined]
            assert read(store, "a") == content("a", BIG)
        refused: list[tuple[str, dict[str, Any]]] = [
            (server.url, mine),  # the system's authorities do not know this one
            (server.url, {**mine, "tls_ca": certificates / "stranger.pem"}),
            (server.url, {"tls_ca": certificates / "ca.pem"}),  # the server wants to know who comes
            (server.url, {**mine, "tls_ca": certificates / "nowhere.pem"}),
            (server.url.replace("valkeys", "valkey"), {"timeout": 0.5}),
        ]
        for url, options in refused:
            with ValkeyStore(url, **options) as store, pytest.raises(StoreUnavailableError):
                store.ping()


def test_tls_refuses_a_certificate_of_another_name(certificates: Path) -> None:
    running, mine = over_tls(certificates, "elsewhere")
    with running as server:
        store = ValkeyStore(server.url, tls_ca=certificates / "ca.pem", **mine)
        with store, pytest.raises(StoreUnavailableError, match="certificate"):
            store.ping()


# The page.


def test_the_code_of_the_page_runs(server: ValkeyServer, client: Valkey) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert any("localhost:6379" in block for block in blocks)
    for block in blocks:
        here = block.replace("localhost:6379", f"127.0.0.1:{server.port}")
        exec(compile(here, "docs/remote-stores.md", "exec"), namespace)
    namespace["prefixes"].close()
    namespace["store"].close()


def test_every_option_and_the_format_are_in_the_page() -> None:
    (table,) = re.findall(r"^\| option \|.*?(?=\n\n)", PAGE, re.MULTILINE | re.DOTALL)
    rows = dict(re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE))
    options = {
        name: text.strip("`") for names, text in rows.items() for name in re.findall(r"`(\w+)`", names)
    }
    made = ValkeyOptions()
    assert options.keys() ^ {field.name for field in fields(made)} == {
        "password_file",
        "host",
        "port",
        "db",
        "tls",
    }
    for name in ("prefix", "digest", "connections", "connect_timeout", "timeout"):
        assert options[name] == f"{getattr(made, name):{'g' if 'timeout' in name else ''}}"
    assert ValkeyOptions.of(None, {"ttl": options["ttl"]}).ttl == made.ttl
    assert f'"{ENTRY_FORMAT}"' in PAGE
    assert f'"chunk": {CHUNK}' in PAGE


def test_the_benchmark_of_the_page_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "AGE", 1.1)  # a tick of the server's clock
    monkeypatch.setattr("sys.argv", ["stores", "valkey", "--mib", "2", "--rounds", "1"])
    benchmark.main()
    printed = capsys.readouterr().out
    for row in ("plain TCP socket", "ValkeyStore.put, a server at its maxmemory", "ValkeyStore.get_into"):
        assert f"| {row} |" in printed
