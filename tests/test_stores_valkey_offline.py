"""What ValkeyStore understands without a server: addresses, manifests, and pieces of parts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("valkey", reason="the package valkey is not installed: pip install 'ml-kvcache[valkey]'")

from kvcache.stores import StoreUnavailable, StoreValueError, ValkeyStore, open_store
from kvcache.stores.digests import Digests
from kvcache.stores.redaction import without_secrets
from kvcache.stores.valkey.manifest import CHUNK, Broken, RemoteManifest, understood
from kvcache.stores.valkey.options import ValkeyOptions
from kvcache.stores.valkey.replies import BLOCK
from kvcache.stores.valkey.transfer import blocks

# Addresses.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://host", {"host": "host", "port": 6379, "db": 0, "tls": False}),
        ("redis://host:7000/3", {"host": "host", "port": 7000, "db": 3}),
        ("valkeys://host/", {"tls": True, "tls_verify": True}),
        ("rediss://[::1]:1", {"host": "::1", "port": 1, "tls": True}),
        ("valkey://:p%40ss@host", {"username": None, "password": "p@ss"}),
        ("valkey://me:w%2Ford@host", {"username": "me", "password": "w/ord"}),
    ],
)
def test_a_url_is_read_as_people_write_it(url: str, expected: dict[str, Any]) -> None:
    settings = ValkeyOptions.of(url, {})
    assert {name: getattr(settings, name) for name in expected} == expected


def test_options_may_be_text_as_they_stand_in_a_query() -> None:
    text = {"ttl": "12h", "connections": "3", "connect_timeout": "0.5", "timeout": "90s", "prefix": "a.b:c"}
    typed = {"ttl": 43200, "connections": 3, "connect_timeout": 0.5, "timeout": 90.0, "prefix": "a.b:c"}
    assert ValkeyOptions.of("valkey://host", text) == ValkeyOptions.of("valkey://host", typed)
    assert ValkeyOptions.of("valkeys://host", {"tls_verify": "no"}).tls_verify is False


@pytest.mark.parametrize("ttl", ["1d", "24h", "1440m", "86400s", "86400", 86400, 86400.0])
def test_a_time_to_live_has_units(ttl: Any) -> None:
    assert ValkeyOptions.of(None, {"ttl": ttl}).ttl == 86400


@pytest.mark.parametrize(
    "url",
    ["http://host", "valkey:host", "valkey:/host", "valkey://host:port", "valkey://host:0", "valkey://host:70000",
     "valkey://host/x", "valkey://host/-1", "valkey://host/1/2", "valkey://host#a", "valkey://host?ttl=1",
     "valkey://[::1", "valkey://me@host"],
)  # fmt: skip
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(StoreValueError):
        ValkeyStore(url)


@pytest.mark.parametrize(
    "options",
    [{"ttl": "0"}, {"ttl": -1}, {"ttl": "1w"}, {"ttl": True}, {"ttl": float("nan")}, {"ttl": "99999d"},
     {"prefix": ""}, {"prefix": "a*"}, {"prefix": "a b"}, {"prefix": "a" * 65}, {"prefix": 3},
     {"connections": 0}, {"connections": "1.5"}, {"connections": 1.5}, {"connections": True},
     {"timeout": 0}, {"connect_timeout": "x"}, {"digest": "md5"}, {"secret": "s"}, {"username": "me"},
     {"tls_ca": "/ca.pem"}, {"tls_verify": "no"}, {"password": ""}, {"password": 3}],
    ids=str,
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StoreValueError, match="ValkeyStore"):
        ValkeyStore("valkey://host", **options)


def test_tls_options_go_together() -> None:
    with pytest.raises(StoreValueError, match="tls_key"):
        ValkeyStore("valkeys://host", tls_cert="/c.pem")
    with pytest.raises(StoreValueError, match="perhaps"):
        ValkeyStore("valkeys://host", tls_verify="perhaps")


def test_an_unknown_option_is_a_type_error_that_lists_those_that_exist() -> None:
    with pytest.raises(TypeError, match=r"colour.*connections, digest.*ttl"):
        open_store("valkey://host?colour=red")


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("from a file\n", encoding="utf-8")
    assert ValkeyOptions.of("valkey://me@host", {"password_file": str(path)}).password == "from a file"
    with pytest.raises(StoreUnavailable, match="nowhere"):
        ValkeyOptions.of(None, {"password_file": tmp_path / "nowhere"})
    with pytest.raises(StoreValueError, match="twice"):
        ValkeyOptions.of("valkey://:a@host", {"password_file": path})


SECRETS = [
    "hunter2",
    "hun/ter2",
    "hun?ter2",
    "hun#ter2",
    "hun@ter2",
    "hun[ter2",
    "hun ter2",
    "hun%ter2",
    "hun:ter2",
]


@pytest.mark.parametrize("password", SECRETS)
@pytest.mark.parametrize(
    "address",
    ["valkey://:{}@host:x", "valkey://me:{}@host/db", "valkey://:{}@host?ttl=never", "nope://:{}@host",
     "valkey://host?password={}&ttl=never", "valkey://host?ttl=never&password={}", "valkey://:{}@host?a&b",
     "valkey://:{}@host?prefix=a&prefix=b", "valkey://:{}@host#x", "valkey://host?secret={}",
     "valkey://host?digest=blake3&secret={}&ttl=never", "valkey://host?password={}&password={}"],
)  # fmt: skip
def test_no_error_shows_a_password(address: str, password: str) -> None:
    with pytest.raises((StoreValueError, StoreUnavailable, TypeError)) as caught:
        open_store(address.replace("{}", password))
    shown = [str(caught.value)]
    cause: BaseException | None = caught.value
    while cause is not None:
        shown.append(f"{cause!r}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    assert not any("ter2" in text for text in shown), shown


def test_no_repr_shows_a_password() -> None:
    options = {"digest": "blake3", "secret": "hunter3"}
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    store = open_store("valkey://me:hunter2@host:1/2?prefix=mine", **options)
    assert repr(store) == "ValkeyStore('valkey://host:1/2', prefix='mine')"
    settings = ValkeyOptions.of("valkey://me:hunter2@host", options)
    for text in (repr(settings), str(settings), settings.url):
        assert "hunter" not in text


def test_a_url_is_shown_without_what_may_be_a_password() -> None:
    assert without_secrets("valkey://me:secret@host:1/0?ttl=1d") == "valkey://***@host:1/0?ttl=1d"
    assert without_secrets("x://host?a=b&password=1&c=2") == "x://host?a=b&password=***"
    assert without_secrets("file:///var/cache?budget=1GiB") == "file:///var/cache?budget=1GiB"


def test_opening_contacts_nobody() -> None:
    with open_store("valkey://host.invalid:1/0") as store:  # type: ignore[attr-defined]
        assert isinstance(store, ValkeyStore)


def test_a_store_by_name_is_on_this_machine() -> None:
    for name, scheme in (("valkey", "valkey"), ("redis", "valkey"), ("rediss", "valkeys")):
        store = open_store(name)
        assert isinstance(store, ValkeyStore)
        assert store.url == f"{scheme}://localhost:6379/0"


# Digests.


def test_stores_that_digest_otherwise_do_not_see_one_another() -> None:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    options: list[tuple[Any, ...]] = [("xxh3_128",), ("blake3",), ("blake3", "one"), ("blake3", "two")]
    made = [Digests("Store", "extra", *each) for each in options]
    assert len({digests.family for digests in made}) == 4
    assert len({digests.start("a", 0).hexdigest() for digests in made}) == 4
    assert made[2].family == Digests("Store", "extra", *options[2]).family == "blake3-ff56444a52ce3783"


def test_a_digest_knows_key_and_size() -> None:
    digests = Digests("Store", "extra")
    assert digests.start("a", 1).hexdigest() != digests.start("b", 1).hexdigest()
    assert digests.start("a", 1).hexdigest() != digests.start("a", 2).hexdigest()


@pytest.mark.usefixtures("unprobed")
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(StoreUnavailable, match=r"xxhash.*pip install 'ml-kvcache\[valkey\]'"):
        ValkeyStore()
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(StoreUnavailable, match=r"valkey.*pip install 'ml-kvcache\[valkey\]'"):
        open_store("valkey://host")


# Manifests.

GOOD = RemoteManifest("k", 2 * CHUNK + 5, CHUNK, "0" * 32, "f" * 32)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert RemoteManifest.parse(GOOD.encoded(), "k") == GOOD
    assert (list(GOOD.sizes), GOOD.count) == ([CHUNK, CHUNK, 5], 3)
    empty = RemoteManifest("k", 0, CHUNK, "0" * 32, "f" * 32)
    assert (list(empty.sizes), empty.count) == ([], 0)
    assert json.loads(GOOD.encoded())["format"] == "kvcache.remote/1"


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(GOOD.encoded()), **fields}).encode()


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 4000, GOOD.encoded()[:-1], GOOD.encoded() + b"x",
     changed(key="j"), changed(format="kvcache.remote/2"), changed(more=1), changed(nbytes=-1),
     changed(nbytes=1.0), changed(nbytes=True), changed(nbytes="5"), changed(nbytes=1 << 41),
     changed(nbytes=1 << 40, chunk=1), changed(nbytes=1000, chunk=1), changed(chunk=0), changed(chunk=-4),
     changed(chunk=None),
     changed(writer="../x"), changed(writer="A" * 32), changed(writer="0" * 31), changed(writer=5),
     changed(digest=""), changed(digest=None), changed(digest="g" * 32), changed(digest="f" * 5000),
     GOOD.encoded().replace(b"{", b'{"key":"k",', 1), changed(nbytes=float("nan"))],
)  # fmt: skip
def test_what_is_no_manifest_is_broken(raw: bytes) -> None:
    found = understood(raw, "k")
    assert isinstance(found, Broken)
    assert found.reason


# Pieces.


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_the_parts_one_after_another_and_none_crosses_a_chunk(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 7, 1000, 40_000, BLOCK, BLOCK + 1, 3 * BLOCK + 5]) for _ in range(120)]
    parts = [rng.randbytes(size) for size in sizes] + [b"ab"] * 20_000 + [rng.randbytes(1000)] * 1500
    pieces = list(blocks([memoryview(part) for part in parts]))
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) < 2 * BLOCK
    assert len(pieces) < 400
    at = 0
    for piece in pieces:
        assert at // CHUNK == (at + len(piece) - 1) // CHUNK
        at += len(piece)


def test_large_parts_are_not_copied() -> None:
    part = memoryview(bytearray(3 * BLOCK))
    assert all(piece.obj is part.obj for piece in blocks([part]))
