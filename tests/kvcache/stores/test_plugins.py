"""Stores by name and URL: the built-in ones and their options, those of plugins; nothing shows a secret."""

from __future__ import annotations

import subprocess
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
    StoreUnavailableError,
    StoreValueError,
    hookimpl,
    open_store,
)
from kvcache.stores.mooncake.options import MooncakeOptions
from kvcache.stores.options import without_secrets
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


def test_a_file_store_is_opened_by_name_and_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for store in (
        open_store("file", path=tmp_path / "k v", budget=4096, durable=False),
        open_store(f"file://{tmp_path}/k%20v?budget=4KiB&durable=no"),
        open_store("file:k%20v?durable=off", budget=4096),
        open_store(f"file://localhost{tmp_path}/k%20v?durable=0&budget=4096"),
        open_store(tmp_path / "k v", durable=False, budget="4KiB"),
        open_store(Path("k v"), durable=False, budget=4096),
        open_store("./k v", durable=False, budget=4096),
        open_store(f"{tmp_path}/k v", durable=False, budget=4096),
        FileStore("k v", "4KiB", durable=False),
    ):
        assert isinstance(store, FileStore)
        assert (store.path, store.budget, store.durable) == (tmp_path / "k v", 4096, False)
        store.close()


def test_other_stores_are_opened_by_name_and_by_url_and_contact_nobody() -> None:
    for store in (
        open_store("memory", budget="2kB"), open_store("memory:?budget=2000"), MemoryStore("2kB"),
    ):  # fmt: skip
        assert isinstance(store, MemoryStore)
        assert store.budget == 2000
    pytest.importorskip("valkey")
    addresses = {
        "valkey": "valkey://localhost:6379/0",
        "redis": "valkey://localhost:6379/0",
        "rediss": "valkeys://localhost:6379/0",
        "valkey://host.invalid:1/2": "valkey://host.invalid:1/2",
    }
    for name, url in addresses.items():
        with open_store(name) as store:  # type: ignore[attr-defined]
            assert store.url == url


def test_checking_an_address_loads_no_library() -> None:
    addresses = ["file:///x?digest=md5", "mooncake://host?lanes=0", "valkey://host?ttl=never"]
    libraries = ["xxhash", "blake3", "valkey", "mooncake"]
    code = f"""if True:
        import sys
        from kvcache.stores import StoreValueError, open_store
        for address in {addresses}:
            try:
                open_store(address)
            except StoreValueError:
                print(*(name for name in {libraries} if name in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n" * len(addresses)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize(
    ("package", "name", "extra", "options"),
    [
        ("xxhash", "file", "disk", {"path": "nowhere"}),
        ("blake3", "file", "disk", {"path": "nowhere", "digest": "blake3"}),
        ("xxhash", "valkey", "valkey", {}), ("valkey", "valkey", "valkey", {}),
        ("mooncake.store", "mooncake", "mooncake", {}),
    ],
)  # fmt: skip
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    package: str,
    name: str,
    extra: str,
    options: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StoreUnavailableError, match=rf"{package.split('.')[0]}.*ml-kvcache\[{extra}\]"):
        open_store(name, **options)
    assert not [*tmp_path.iterdir()]


def test_mooncake_options_are_understood() -> None:
    found = MooncakeOptions.of("mooncake://[::1]:7", {"segment": "4GiB", "lanes": "2", "timeout": "1.5"})
    assert (found.segment, found.lanes, found.timeout) == (4 << 30, 2, 1.5)
    assert (found.master, found.url) == ("[::1]:7", "mooncake://[::1]:7")
    assert MooncakeOptions.of("mooncake://here", {}).port == 50051


# Valkey's.


def valkey_options(url: str | None = None, **options: Any) -> Any:
    from kvcache.stores.valkey.options import ValkeyOptions

    return ValkeyOptions.of(url, options)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://host", {"host": "host", "port": 6379, "db": 0, "tls": False}),
        ("redis://host:7000/3", {"host": "host", "port": 7000, "db": 3}),
        ("valkeys://host/", {"tls": True, "tls_verify": True}),
        ("rediss://[::1]:1", {"host": "::1", "port": 1, "tls": True, "url": "valkeys://[::1]:1/0"}),
        ("valkey://:p%40ss@host", {"username": None, "password": "p@ss"}),
        ("valkey://me:w%2Ford@host", {"username": "me", "password": "w/ord"}),
    ],
)
def test_a_url_is_read_as_people_write_it(url: str, expected: dict[str, Any]) -> None:
    settings = valkey_options(url)
    assert {name: getattr(settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [*((("ttl", text), 86400) for text in ("1d", "24h", "1440m", "86400s", "86400", 86400, 86400.0)),
     (("connections", "3"), 3), (("connect_timeout", "0.5"), 0.5), (("timeout", "90s"), 90.0),
     (("prefix", "a.b:c"), "a.b:c"),
     (("tls_verify", "no"), False)],
)  # fmt: skip
def test_options_may_be_text_as_they_stand_in_a_query(text: tuple[str, Any], value: Any) -> None:
    found = getattr(valkey_options("valkeys://host", **dict([text])), text[0])
    assert (found, type(found)) == (value, type(found))


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("from a file\n", encoding="utf-8")
    assert valkey_options("valkey://me@host", password_file=str(path)).password == "from a file"
    with pytest.raises(StoreUnavailableError, match="nowhere"):
        valkey_options(password_file=tmp_path / "nowhere")
    with pytest.raises(StoreValueError, match="twice"):
        valkey_options("valkey://:a@host", password_file=path)


# Secrets.


@pytest.mark.parametrize(
    "address",
    ["valkey://:{}@host:x", "valkey://me:{}@host/db", "valkey://:{}@host?ttl=never", "nope://:{}@host",
     "valkey://host?password={}&ttl=never", "valkey://host?ttl=never&password={}", "valkey://:{}@host?a&b",
     "valkey://:{}@host?prefix=a&prefix=b", "valkey://:{}@host#x", "valkey://host?secret={}",
     "file:///x?secret={}",
     "valkey://host?digest=blake3&secret={}&ttl=never", "valkey://host?password={}&password={}"],
)  # fmt: skip
def test_no_error_shows_a_password(address: str) -> None:
    for mark in ("", "/", "?", "#", "@", "[", " ", "%", ":"):
        with pytest.raises((StoreValueError, StoreUnavailableError)) as caught:
            open_store(address.replace("{}", f"hun{mark}ter2"))
        shown, cause = [str(caught.value)], caught.value
        while cause is not None:
            shown.append(f"{cause!r}")

            cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)  # type: ignore[assignment]
        assert not any("ter2" in text for text in shown), shown


def test_no_repr_shows_a_password(tmp_path: Path) -> None:
    for package in ("valkey", "blake3"):
        pytest.importorskip(package, reason=f"the package {package} is not installed")
    options = {"digest": "blake3", "secret": "hunter3"}
    store = open_store("valkey://me:hunter2@host:1/2?prefix=mine", **options)
    assert repr(store) == "ValkeyStore('valkey://host:1/2', prefix='mine')"
    settings = valkey_options("valkey://me:hunter2@host", **options)

    with open_store(f"file://{tmp_path}/store?digest=blake3&secret=hunter3") as on_disk:  # type: ignore[attr-defined]
        assert on_disk.put("a", [b"x"])
        assert "hunter" not in f"{settings!r} {settings} {settings.url} {on_disk!r}"


def test_a_url_is_shown_without_what_may_be_a_password() -> None:
    assert without_secrets("valkey://me:secret@host:1/0?ttl=1d") == "valkey://***@host:1/0?ttl=1d"
    assert without_secrets("x://host?a=b&password=1&c=2") == "x://host?a=b&password=***"
    assert without_secrets("file:///var/cache?budget=1GiB") == "file:///var/cache?budget=1GiB"


# Plugins.


def test_a_plugin_gets_the_url_without_its_query_and_the_options(install: Install) -> None:
    registry = install(spec())
    by_url, by_name = registry.open("mine://host:1/db?a=1&b=x%20y", {"c": 2}), registry.open("mine", {"c": 2})
    assert by_url.asked == ("mine://host:1/db", {"a": "1", "b": "x y", "c": 2})
    assert by_name.asked == (None, {"c": 2})


def test_a_name_that_two_plugins_claim_is_refused_and_no_other_is(install: Install) -> None:
    registry = install(spec("file"))
    with pytest.raises(ml.PluginError, match="store 'file' is provided twice, by plugin0 and by file"):
        registry.open("file:///x", {})
    assert isinstance(registry.open("memory", {}), MemoryStore)


@pytest.mark.parametrize(
    ("opens", "options", "error"),
    [
        (lambda url, size=1: None, {"buget": 1}, "no option 'buget'; there are: size"),
        (lambda url, **options: None, {"url": 1}, "multiple values for argument 'url'"),
        (lambda url, *, token: None, {}, "missing a required .*'token'"),
    ],
)
def test_options_that_a_plugin_does_not_take_are_refused_in_its_name(
    install: Install, opens: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(StoreValueError, match=f"^open_store: 'mine': .*{error}"):
        install(spec(open=opens)).open("mine", options)


def test_a_plugin_checks_an_address_before_it_is_probed(install: Install) -> None:
    def check(url: str | None, **options: Any) -> None:
        asked.append((url, options))
        if options.get("size") == "red":
            raise StoreValueError("mine: size='red'")
        if options.get("size") == "broken":
            raise OSError("no such colour")

    def probe() -> ml.Availability:
        asked.append("probed")
        return ml.Availability(False, "its library is missing")

    asked: list[Any] = []
    registry = install(spec(check=check, probe=probe))
    with pytest.raises(StoreValueError, match="size='red'"):
        registry.open("mine://host?size=red", {})
    with pytest.raises(StoreUnavailableError, match="no such colour"):
        registry.open("mine", {"size": "broken"})
    assert asked == [("mine://host", {"size": "red"}), (None, {"size": "broken"})]
    with pytest.raises(StoreUnavailableError, match="its library is missing"):
        registry.open("mine://host", {})
    with pytest.raises(ml.PluginError, match="check"):
        spec(check="a word")


@pytest.mark.parametrize(
    ("record", "name", "error"),
    [
        ("no record", "plugin0", r"returned 'no record'; it must return one kvcache.stores.StoreSpec"),
        (
            spec(open=lambda url: None),
            "mine",
            "not implement kvcache.stores.SnapshotStore: it lacks put",
        ),
    ],
)
def test_a_plugin_without_a_store_is_unavailable_and_says_why(
    install: Install, record: Any, name: str, error: str
) -> None:
    with pytest.raises(StoreUnavailableError, match=error):
        install(record).open(name, {})
