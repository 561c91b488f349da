"""A place of each kind where a store keeps its entries, and what may befall them there behind its back."""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.stores import FileStore, StoreUnavailableError

from ...needs import need_server
from ...rigs.mooncake_pool import MooncakePool
from ...rigs.servers import ValkeyServer

posix = pytest.mark.skipif(os.name != "posix", reason="FileStore needs a POSIX system")
KINDS = ("file", "valkey", "mooncake")
every_kind = pytest.mark.parametrize("kind", KINDS)
MIB = 1 << 20
Change = Callable[[bytearray], object]


class Place(abc.ABC):
    """``size``: bytes of an entry that lies there in several parts, where the kind has such."""

    size = 1000
    ends: tuple[bool, ...] = (False,)
    """Which parts of an entry there are: not the last one, the last one."""
    reads: tuple[str, ...] = ("get_into",)

    def __init__(self) -> None:
        self._opened: list[Any] = []

    def open(self, **options: Any) -> Any:
        self._opened.append(self._make(**options))
        return self._opened[-1]

    def close(self) -> None:
        for store in self._opened:
            store.close()

    @abc.abstractmethod
    def _make(self, **options: Any) -> Any: ...

    @abc.abstractmethod
    def change(self, store: Any, key: str, change: Change, last: bool = False) -> int:
        """Change the stored bytes of an entry, of its last part or its first; the bytes to ask for then."""

    @abc.abstractmethod
    def lose(self, store: Any, key: str) -> None:
        """Take away a part without which an entry is none."""

    @abc.abstractmethod
    def move(self, key: str, source: Any, target: Any, new_key: str) -> None:
        """Have what ``source`` keeps of a key stand where ``target`` looks for ``new_key``."""

    @abc.abstractmethod
    def values(self) -> list[str] | None:
        """The names of all that lies there; None where they cannot be listed."""


class FilePlace(Place):
    reads = ("get_into", "view")

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _make(self, **options: Any) -> FileStore:
        return FileStore(self.folder, durable=False, **options)

    def file(self, store: FileStore, key: str) -> Path:
        return self.folder / "pages" / f"{store._naming.stem(key)}.entry"

    def change(self, store: Any, key: str, change: Change, last: bool = False) -> int:
        data, manifest = parts_of(self.file(store, key))
        nbytes = len(data)
        change(data)
        self.file(store, key).write_bytes(data + manifest)
        return nbytes

    def lose(self, store: Any, key: str) -> None:
        self.file(store, key).write_bytes(parts_of(self.file(store, key))[0])

    def move(self, key: str, source: Any, target: Any, new_key: str) -> None:
        data, manifest = parts_of(self.file(source, key))
        self.file(target, new_key).write_bytes(data + manifest.replace(*_keys(key, new_key)))

    def values(self) -> list[str]:
        return names(self.folder)


class ValkeyPlace(Place):
    """Entries of three chunks, which are small here."""

    size = 2 * (1 << 16) + 5
    ends = (False, True)

    def __init__(self, server: ValkeyServer, prefix: str, patch: pytest.MonkeyPatch) -> None:
        from valkey import Valkey

        from kvcache.stores.valkey import store, transfer

        super().__init__()
        for module in (store, transfer):
            patch.setattr(module, "CHUNK", 1 << 16)
        self.server, self.prefix = server, prefix
        self.client = Valkey(port=server.port)

    def _make(self, **options: Any) -> Any:
        from kvcache.stores import ValkeyStore

        return ValkeyStore(self.server.url, prefix=self.prefix, timeout=30, **options)

    def close(self) -> None:
        super().close()
        self.client.close()

    def _chunks(self, store: Any, key: str) -> list[bytes]:
        from kvcache.stores.valkey.manifest import RemoteManifest

        name = store._entries.name(key)
        return list(store._entries.chunks(RemoteManifest.parse(self.client.get(name), key)))

    def change(self, store: Any, key: str, change: Change, last: bool = False) -> int:
        name = self._chunks(store, key)[-1 if last else 0]
        data = bytearray(self.client.get(name))
        change(data)
        self.client.set(name, bytes(data))
        return self.size

    def lose(self, store: Any, key: str) -> None:
        self.client.delete(self._chunks(store, key)[1])

    def move(self, key: str, source: Any, target: Any, new_key: str) -> None:
        raw = self.client.get(source._entries.name(key)).replace(*_keys(key, new_key))
        data = [self.client.get(chunk) for chunk in self._chunks(source, key)]
        self.client.set(target._entries.name(new_key), raw)
        for chunk, value in zip(self._chunks(target, new_key), data, strict=True):
            self.client.set(chunk, value)

    def values(self) -> list[str]:
        return sorted(name.decode() for name in self.client.keys(f"{self.prefix}:*"))


class MooncakePlace(Place):
    def __init__(self, url: str, native: Any, prefix: str) -> None:
        super().__init__()
        self.url, self.native, self.prefix = url, native, prefix

    def _make(self, **options: Any) -> Any:
        from kvcache.stores import MooncakeStore

        return MooncakeStore(self.url, client=self.native, **{"prefix": self.prefix, **options})

    def close(self) -> None:
        super().close()
        self.native.remove_by_regex(f"^{self.prefix}:.*", True)

    def change(self, store: Any, key: str, change: Change, last: bool = False) -> int:
        from kvcache.stores.mooncake.transfer import HEADER

        data = bytearray(self.native.get(store._name(key)))
        body = data[HEADER:]
        change(body)
        self.set(store, key, data[:HEADER] + body)
        return len(body)

    def set(self, store: Any, key: str, data: bytes) -> None:
        assert self.native.upsert(store._name(key), bytes(data)) == 0

    def lose(self, store: Any, key: str) -> None:
        self.set(store, key, self.native.get(store._name(key))[:63])

    def move(self, key: str, source: Any, target: Any, new_key: str) -> None:
        self.set(target, new_key, self.native.get(source._name(key)))

    def values(self) -> None:
        return None


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    need_server()
    with ValkeyServer() as running:
        yield running


@pytest.fixture(scope="module")
def pool() -> Iterator[MooncakePool]:
    if reason := MooncakePool.missing():
        pytest.skip(reason)
    with MooncakePool() as started:
        started.add_host(128 * MIB)
        yield started


@pytest.fixture(scope="module")
def native(pool: MooncakePool) -> Iterator[Any]:
    """One client of the package for all tests: closing one takes a second."""
    from kvcache.stores.mooncake.connecting import connect
    from kvcache.stores.mooncake.options import MooncakeOptions

    try:
        made = connect(MooncakeOptions.of(pool.url, {"timeout": 20}))
    except StoreUnavailableError as error:
        pytest.fail(str(error))
    yield made
    made.close()


@pytest.fixture
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Any]]:
    """``places(kind)``: the test's own place of this kind."""
    made: dict[str, Place] = {}
    prefix = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]

    def make(kind: str) -> Place:
        if kind == "file":
            return FilePlace(tmp_path / "store")
        if kind == "valkey":
            return ValkeyPlace(request.getfixturevalue("server"), prefix, monkeypatch)
        pool = request.getfixturevalue("pool")
        return MooncakePlace(pool.url, request.getfixturevalue("native"), prefix)

    yield lambda kind: made.get(kind) or made.setdefault(kind, make(kind))
    for place in made.values():
        place.close()


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(where: Path) -> Iterator[FileStore]:
    with FileStore(where, durable=False) as store:
        yield store


def names(where: Path) -> list[str]:
    """Of the files of entries, and of those that are being written."""
    return sorted(path.name for folder in ("pages", "changing") for path in (where / folder).iterdir())


def entries(*keys: str) -> list[str]:
    return sorted(f"{key}.entry" for key in keys)


def parts_of(file: Path) -> tuple[bytearray, bytes]:
    """An entry's bytes, and its manifest."""
    whole = file.read_bytes()
    return bytearray(whole[:-512]), whole[-512:]


def with_manifest(file: Path, manifest: bytes) -> None:
    """Have an entry end in this, and what is left of it in spaces."""
    file.write_bytes(parts_of(file)[0] + manifest.ljust(512)[:512])


def _keys(old: str, new: str) -> tuple[bytes, bytes]:
    return f'"key":"{old}"'.encode(), f'"key":"{new}"'.encode()
