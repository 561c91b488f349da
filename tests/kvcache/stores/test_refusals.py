"""What each class of stores, and their keys, refuse: by class, the arguments and what the message names.

Calls on an open store are refused by the suite that every store passes (``kvcache.testing.stores``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import stores
from kvcache.stores import StoreUnavailableError, StoreValueError, open_store

Rows = list[tuple[tuple[Any, ...], dict[str, Any], str]]


def options(name: str, *values: Any, url: str | None = None, says: str = "") -> Rows:
    """One option of a store at ``url``, with each of these values."""
    return [((url,) if url else (), {name: value}, says or name) for value in values]


def urls(*addresses: str, says: str) -> Rows:
    return [((address,), {}, says) for address in addresses]


FILE: Rows = [
    *options("budget", -1, 1.5, "lots", True),
    *options("digest", "md5", None),
    ((), {"secret": "s"}, "secret"),
    *(((), {"digest": "blake3", "secret": secret}, "secret") for secret in ("", 3)),
]
VALKEY: Rows = [
    *urls(
        *("http://host", "valkey:host", "valkey:/host", "valkey://host:port", "valkey://host:0"),
        *("valkey://host:70000", "valkey://host/x", "valkey://host/-1", "valkey://host/1/2", "valkey://host#a"),
        *("valkey://host?ttl=1", "valkey://[::1", "valkey://me@host"),
        says="ValkeyStore",
    ),
    *(row for name, values in {
        "ttl": ["0", -1, "1w", True, float("nan"), "99999d"], "prefix": ["", "a*", "a b", "a" * 65, 3],
        "connections": [0, "1.5", 1.5, True], "timeout": [0], "connect_timeout": ["x"], "digest": ["md5"],
        "secret": ["s"], "username": ["me"], "tls_ca": ["/ca.pem"], "tls_verify": ["no"], "password": ["", 3],
    }.items() for row in options(name, *values, url="valkey://host", says="ValkeyStore")),
    *(row for name, value in {"tls_cert": "/c.pem", "tls_verify": "perhaps", "tls_ca": 3}.items()
      for row in options(name, value, url="valkeys://host", says="ValkeyStore")),
]  # fmt: skip
MOONCAKE: Rows = [
    *urls("http://here", says="mooncake://host"),
    *(((), {name: value}, f"mooncake: .*{value}") for name, value in [
        ("lanes", None), ("segment", None), ("staging", None), ("timeout", None), ("replicas", 1.5),
        ("lanes", True), ("port", 65536), ("host", 5), ("devices", None),
    ]),
]  # fmt: skip
ADDRESSES: Rows = [
    *urls("file", "file:", "file://host/path", "file:/x%00y", "file:/a#b", says="."),
    *urls("file:/x?durable=perhaps", says="."),
    *options("budget", -1, url="file:/x", says="-1"),
    *urls("file:/x?digest=md5", says="md5"),
    *urls("valkey://host?ttl=never", says="never"),
    *urls("rediss://host/x", says="db"),
    *urls("memory:?budget=much", says="much"),
    *urls("memory:?budget=1&budget=2", says="twice"),
    *urls("memory:?budget", says="."),
    *urls("memory:?budget=-1", says="size"),
    *options("budget", 2, url="memory:?budget=1"),
    *urls("mooncake://", says="master"),
    *urls("mooncake://me:hunter2@here", says="user"),
    *urls("mooncake://here:99999", says="Port"),
    *urls("mooncake://here/folder", says="mooncake://host"),
    *options("host", "there", url="mooncake://here", says="beside"),
    *(row for name, values in {
        "prefix": ["a b"], "staging": ["1KiB"], "segment": ["some", "15MiB", -1], "lanes": ["0"],
        "digest": ["md5"], "replicas": [0], "timeout": ["soon", -1],
    }.items() for row in options(name, *values, url="mooncake://here")),
    *urls(
        *(f"{address}?colour=red" for address in ("memory:", "file:x", "mooncake://host", "valkey://host")),
        says=r"no option 'colour'; there are: .*(budget|prefix)",
    ),
]  # fmt: skip
IDENTITY = {"model": "m"}
KEYS: Rows = [
    *(((identity,), {}, "identity") for identity in
      [{"a": float("nan")}, {1: 2}, {"a": {1: 2}}, {"a": object()}, {"a": {3}}]),
    *(((IDENTITY, block_size), {}, "block_size") for block_size in [0, -1, 2.0, True]),
]  # fmt: skip
NO_TOKENS = [
    *([1.0], ["a"], [None], [b"x", 1.5], [2**63], [-(2**63) - 1], [b"x", 2**63], "abc", b"abc", [[1]]),
    *(np.zeros(3), np.zeros((2, 2), np.int64), np.array([2**63], np.uint64), np.array(3)),
]
TABLES: dict[str, Rows] = {
    "FileStore": [(("store",), given, says) for _, given, says in FILE],
    "MemoryStore": options("budget", -1, 1.5, "lots", True),
    "ValkeyStore": VALKEY,
    "MooncakeStore": MOONCAKE,
    "Keys": KEYS,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, unprobed: None) -> None:
    """None of the packages that stores load can be imported, and no store has been probed before."""
    for package in ("xxhash", "blake3", "valkey", "valkey.exceptions", "mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("name", TABLES)
def test_what_makes_no_sense_is_refused_and_nothing_is_made(name: str, here: Path) -> None:
    if name == "ValkeyStore":
        pytest.importorskip("valkey", reason="the package valkey is not installed")
    makes = getattr(stores, name)
    for args, given, says in TABLES[name]:
        with pytest.raises(StoreValueError, match=says):
            makes(*args, **given)
            raise AssertionError(f"{args} {given} are not refused")
    assert not [*here.iterdir()]


@pytest.mark.usefixtures("no_library", "here")
def test_an_address_that_makes_no_sense_is_refused_without_any_library() -> None:
    for (address,), given, says in ADDRESSES:
        with pytest.raises(StoreValueError, match=says) as raised:
            open_store(address, **given)
            raise AssertionError(f"{address} {given} are not refused")
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("name", ["nope", "nope://host/x"])
def test_an_unknown_store_is_told_with_those_that_exist(name: str) -> None:
    with pytest.raises(StoreUnavailableError, match=r"file, memory.*file:///"):
        open_store(name)


def test_what_is_no_token_has_no_key() -> None:
    for tokens in NO_TOKENS:
        with pytest.raises(StoreValueError, match=r"Keys\.chain"):
            stores.Keys(IDENTITY).chain(tokens)
            raise AssertionError(f"{tokens!r} are not refused")
