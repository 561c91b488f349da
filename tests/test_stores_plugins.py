"""Stores found by name and URL: the built-in ones, those of plugins, and broken ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ml
from kvcache.stores import (
    FileStore,
    MemoryStore,
    StoreSpec,
    StoreUnavailable,
    StoreValueError,
    hookimpl,
    open_store,
    parse_bytes,
)
from kvcache.stores.plugins import StoreRegistry

Install = Callable[..., Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(record, ...) gives a registry with one plugin for each; an exception is raised by its hook."""

    def install(*records: Any) -> StoreRegistry:
        return StoreRegistry([plugin(i, record) for i, record in enumerate(records)])

    def plugin(i: int, record: Any) -> EntryPoint:
        module = ModuleType(f"store_plugin_{i}")

        @hookimpl
        def kvcache_store() -> Any:
            if isinstance(record, Exception):
                raise record
            return record

        module.kvcache_store = kvcache_store  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return EntryPoint(f"plugin{i}", module.__name__, "kvcache.stores")

    return install


class Opened(MemoryStore):
    """A store that knows what it was opened with."""

    def __init__(self, url: str | None, **options: Any) -> None:
        super().__init__()
        self.asked = url, options


def spec(name: str = "mine", **changes: Any) -> StoreSpec:
    fields: dict[str, Any] = {
        "install_hint": f"pip install {name}",
        "probe": lambda: ml.Availability(True),
        "open": Opened,
    }
    return StoreSpec(name, **{**fields, **changes})


# The built-in ones.


def test_a_file_store_is_opened_by_name_and_by_url(tmp_path: Path) -> None:
    for store in (
        open_store("file", path=tmp_path / "kv", budget=4096, durable=False),
        open_store(f"file://{tmp_path}/kv?budget=4KiB&durable=no"),
        open_store(f"file://localhost{tmp_path}/kv?durable=off", budget=4096),
    ):
        assert isinstance(store, FileStore)
        assert (store.path, store.budget, store.durable) == (tmp_path / "kv", 4096, False)
        store.close()


def test_a_file_url_is_unquoted_and_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FileStore(tmp_path / "a b") as store:
        store.put("k", [b"x"])
    found = open_store("file:a%20b")
    assert found.stat(["k"])[0] is not None
    found.close()


def test_a_memory_store_is_opened_by_name_and_by_url() -> None:
    for store in (open_store("memory", budget="2kB"), open_store("memory:?budget=2000")):
        assert isinstance(store, MemoryStore)
        assert store.budget == 2000
    assert open_store("memory").put("a", [b"x"]) is True


@pytest.mark.parametrize(
    "url",
    [
        "file", "file:", "file://host/path", "file:/x%00y", "memory:?budget=much",
        "memory:?budget=1&budget=2", "file:/a#b", "memory:?budget",
        "file:/x?durable=perhaps", "memory:?budget=-1",
    ],
)  # fmt: skip
def test_an_address_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(StoreValueError):
        open_store(url)


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(StoreValueError, match="budget"):
        open_store("memory:?budget=1", budget=2)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        open_store("memory", colour="red")


@pytest.mark.parametrize("name", ["nope", "/var/cache/kv", "nope://host/x"])
def test_an_unknown_store_is_told_with_those_that_exist(name: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"file, memory.*file:///"):
        open_store(name)


@pytest.mark.usefixtures("unprobed")
def test_a_file_store_without_xxhash_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(StoreUnavailable, match=r"pip install 'ml-kvcache\[disk\]'"):
        open_store("file", path=tmp_path)


# Plugins.


def test_a_plugin_gets_the_url_without_its_query_and_the_options(install: Install) -> None:
    registry = install(spec())
    by_url, by_name = registry.open("mine://host:1/db?a=1&b=x%20y", {"c": 2}), registry.open("mine", {"c": 2})
    assert by_url.asked == ("mine://host:1/db", {"a": "1", "b": "x y", "c": 2})
    assert by_name.asked == (None, {"c": 2})


def test_a_broken_plugin_hides_no_other_and_says_why(install: Install) -> None:
    registry = install(RuntimeError("out of luck"), spec(), "no record")
    assert registry.open("mine", {}).asked == (None, {})
    assert set(registry.specs()) >= {"file", "memory", "mine"}
    with pytest.raises(StoreUnavailable, match="out of luck"):
        registry.open("plugin0", {})
    with pytest.raises(StoreUnavailable, match="StoreSpec"):
        registry.open("plugin2", {})


def test_a_name_that_two_plugins_claim_is_refused_and_no_other_is(install: Install) -> None:
    registry = install(spec("file"))
    with pytest.raises(ml.PluginError, match="store 'file' is provided twice, by plugin0 and by file"):
        registry.open("file:///x", {})
    assert isinstance(registry.open("memory", {}), MemoryStore)


@pytest.mark.parametrize("made", [None, "a store"])
def test_an_open_that_gives_no_store_is_said(install: Install, made: Any) -> None:
    refused = rf"its open\(\) returned {made!r}, which is no kvcache.stores.SnapshotStore: it lacks put"
    with pytest.raises(StoreUnavailable, match=refused):
        install(spec(open=lambda url: made)).open("mine", {})


def test_a_store_that_cannot_be_used_here_says_why_and_what_to_install(install: Install) -> None:
    registry = install(spec(probe=lambda: ml.Availability(False, "no server")))
    with pytest.raises(StoreUnavailable, match="no server; install it with: pip install mine"):
        registry.open("mine", {})


def test_a_store_that_fails_to_open_is_unavailable(install: Install) -> None:
    def fail(url: str | None) -> Any:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(StoreUnavailable, match="ConnectionRefusedError: nobody listens"):
        install(spec(open=fail)).open("mine", {})


@pytest.mark.parametrize(
    ("text", "size"),
    [(None, None), (7, 7), ("7", 7), ("1k", 1000), ("1KiB", 1024), ("1.5 GB", 1_500_000_000),
     ("10GiB", 10 << 30), ("2t", 2 * 10**12), ("0.5MiB", 1 << 19), ("3B", 3)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: Any, size: int | None) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "1ib", "GiB", "1.5.2", "1 0", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(StoreValueError, match="size"):
        parse_bytes(text)
