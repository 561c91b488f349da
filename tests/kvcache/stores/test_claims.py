"""What entries claim of their sizes costs nothing, and limits in bytes hold at every moment."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import ml
from kvcache import CausalCache, NotSupportedError, PrefixCache
from kvcache.prefix.tiers import HostTier
from kvcache.stores import (
    FileStore,
    Keys,
    MemoryStore,
    SerializedSnapshot,
    SnapshotCorruptError,
    StoreError,
    StoreFullError,
    get_snapshot,
    open_store,
    put_snapshot,
    serialized_snapshot,
)
from kvcache.stores import memory as memory_module
from kvcache.stores.serialized_snapshot import read_outline
from kvcache.testing.stores import UNIT, content, fill, present, read

from ...rigs.memory import peak_memory
from ...rigs.threads import at_once
from .stores_rig import MIB, parts_of, posix, with_manifest

SECRET = {"digest": "blake3", "secret": "of the hosts"}


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[FileStore]:
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    with FileStore(tmp_path / "store", 10 * MIB, durable=False, **SECRET) as store:
        yield store


def file_of(store: FileStore, key: str) -> Path:
    return store.path / "pages" / f"{store._naming.stem(key)}.entry"


def claim(store: FileStore, key: str, nbytes: int) -> None:
    """Have an entry be so large, at no cost of the disk."""
    path = file_of(store, key)
    fields = json.loads(parts_of(path)[1])
    os.truncate(path, nbytes)
    with path.open("ab") as file:
        file.write(json.dumps({**fields, "nbytes": nbytes}).encode().ljust(512))


def outline(store: Any, key: str) -> object:
    reader = store.reader(key)
    return None if reader is None else read_outline(reader)


CALLS: dict[str, Any] = {
    "stat": lambda store: store.stat(["a"])[0],
    "prefix": lambda store: store.prefix(["a"]) or None,
    "view": lambda store: store.view("a"),
    "get_snapshot": lambda store: get_snapshot(store, "a"),
    "get_into": lambda store: store.get_into("a", bytearray(1000)) or None,
    "an outline": lambda store: outline(store, "a"),
}


@posix
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("nbytes", [64 * MIB, 9 * MIB, 1 << 40])
def test_with_a_secret_a_size_that_somebody_claims_allocates_nothing(
    keyed: FileStore, call: Any, nbytes: int
) -> None:
    """Within the budget too: the manifest itself is sealed."""
    keyed.put("a", [b"x" * 1000])
    claim(keyed, "a", nbytes)
    with peak_memory() as most:
        with contextlib.suppress(SnapshotCorruptError):
            assert call(keyed) is None
        assert most() < MIB
    assert keyed.stat(["a"]) == [None]


@posix
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_entry_of_more_bytes_than_the_budget_is_read(tmp_path: Path, call: Any) -> None:
    """Without a secret whoever may write says what there is; sparse, it takes no room on the disk."""
    with FileStore(tmp_path / "store", 10 * MIB, durable=False) as store:
        store.put("a", [b"x" * 1000])
        claim(store, "a", 64 * MIB)
        with peak_memory() as most:
            assert call(store) is None
            assert most() < MIB
        assert store.put("a", [content("a")])
        assert read(store, "a") == content("a")


@posix
@pytest.mark.parametrize("call", ["view", "get_snapshot", "an outline"])
def test_with_a_secret_nothing_is_parsed_before_all_of_it_was_verified(
    keyed: FileStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    page = SerializedSnapshot({"x": 1}, {"k": np.arange(6, dtype=np.float32)})
    put_snapshot(keyed, "a", page)
    assert outline(keyed, "a").meta == {"x": 1}  # type: ignore[attr-defined]
    data, manifest = parts_of(file_of(keyed, "a"))
    data[-1] ^= 1
    file_of(keyed, "a").write_bytes(data + manifest)
    parse = Mock(side_effect=AssertionError("it was parsed"))
    monkeypatch.setattr(serialized_snapshot, "_outline", parse)
    monkeypatch.setattr(serialized_snapshot, "_header_length", parse)
    with pytest.raises(SnapshotCorruptError):
        CALLS[call](keyed)


@posix
@pytest.mark.parametrize("field", ["nbytes", "blake3", "seal"])
def test_a_sealed_manifest_with_another_field_is_no_entry(keyed: FileStore, field: str) -> None:
    fill(keyed, "ab")
    fields, other = (json.loads(parts_of(file_of(keyed, key))[1]) for key in "ab")
    fields[field] = UNIT + 1 if field == "nbytes" else other[field]
    with_manifest(file_of(keyed, "a"), json.dumps(fields).encode())
    assert present(keyed, "ab") == "b"
    assert keyed.usage().dropped == 1


@posix
@pytest.mark.parametrize("options", [{}, SECRET], ids=["plain", "keyed"])
def test_what_a_reader_has_begun_with_it_reads_whatever_becomes_of_the_entry(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Evicted, and put anew: neither is damage, for which who reads would drop the new one."""
    pytest.importorskip("blake3", reason="the package blake3 is not installed")
    with FileStore(tmp_path / "store", durable=False, **options) as store:
        store.put("a", [b"old"])
        reader = store.reader("a")
        assert reader is not None
        store.delete("a")
        store.put("a", [b"other"])
        found = bytearray(3)
        reader.fill([memoryview(found)[:1]])
        reader.fill([memoryview(found)[1:]])
        assert (bytes(found), reader.left) == (b"old", 0)
        reader.close()
        assert bytes(store.view("a") or b"") == b"other"


# Limits.


def removed_and_open(folder: Path) -> list[int]:
    """Bytes of the folder's files that have no name any more, and take room as long as they are open."""
    sizes, fds = [], Path("/proc/self/fd")
    for fd in fds.iterdir() if fds.is_dir() else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = str(fd.readlink())
            if name.startswith(str(folder)) and name.endswith("(deleted)"):
                sizes.append(fd.stat().st_size)
    return sizes


@posix
@pytest.mark.parametrize("writers", [1, 3])
def test_a_folder_never_has_more_than_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int
) -> None:
    """What is being written counts, of all writers; each waits where another's entry takes the room."""
    seen: list[int] = []
    folder, writev = tmp_path / "store", os.writev
    watching = threading.Lock()

    def write(fd: int, parts: Any) -> int:
        count = writev(fd, parts)
        with watching:
            names = [*(folder / "pages").glob("*.entry"), *(folder / "changing").glob("*.tmp")]
            sizes = removed_and_open(folder)
            for path in names:
                with contextlib.suppress(FileNotFoundError):  # another writer has just moved it
                    sizes.append(path.stat().st_size)
            seen.append(sum(sizes) - 512 * len(sizes))  # without their manifests
        return count

    monkeypatch.setattr(os, "writev", write)
    with FileStore(folder, 2 * UNIT, durable=False) as store:
        at_once(lambda n: [store.put(f"{n}-{i}", [content("a")]) for i in range(6)], range(writers))
        assert store.usage().entries == 2
        with pytest.raises(StoreFullError):
            store.put("large", [bytes(2 * UNIT + 1)])
        assert store.usage().entries == 2
    assert max(seen) <= 2 * UNIT
    assert len(seen) >= 6 * writers


@posix
def test_a_put_beside_one_of_more_than_its_own_budget_makes_all_the_room_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process with a larger budget, that begins to write meanwhile."""
    writev, opened = os.writev, []

    def write(fd: int, parts: Any) -> int:
        if not opened:
            with other._index.locked():
                opened.append(other._folder.create("large", 10 * UNIT)[1])
        return writev(fd, parts)

    with (
        FileStore(tmp_path, 2 * UNIT, durable=False) as store,
        FileStore(tmp_path, durable=False) as other,
    ):
        fill(store, "ab")
        monkeypatch.setattr(os, "writev", write)
        assert store.put("c", [content("c")])
        assert present(store, "abc") == "c"
        os.close(opened[0])


def test_memory_never_has_more_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry is copied once there is room for it, also beside others that are being copied."""
    store, joined = MemoryStore(2 * UNIT), memory_module._joined
    seen: list[int] = []

    def join(views: Any, nbytes: int) -> Any:
        seen.append(store._nbytes + store._pending)
        return joined(views, nbytes)

    monkeypatch.setattr(memory_module, "_joined", join)
    at_once(lambda n: [store.put(f"{n}-{i}", [content("a")]) for i in range(20)], range(4))
    assert max(seen) <= 2 * UNIT
    assert (store.usage().entries, store.usage().nbytes) == (2, 2 * UNIT)


def test_a_copy_that_fails_gives_its_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(UNIT)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(memory_module, "_joined", Mock(side_effect=MemoryError))
        store.put("a", [content("a")])
    assert store.put("a", [content("a")])
    assert store.usage().nbytes == UNIT


# A folder that is opened by its path.


@posix
def test_a_path_has_a_limit_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SimpleNamespace(f_frsize=4096, f_blocks=10 * (50 << 30) // 4096)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    folder = tmp_path / "store"
    with caplog.at_level(logging.INFO, "kvcache"):
        for asked in (folder, str(folder), folder.as_uri()):
            with open_store(asked) as store:  # type: ignore[attr-defined]
                assert store.budget == 50 << 30
    assert len(caplog.records) == 3
    for record in caplog.records:  # also while there is no such folder yet
        limited = f"{folder}: a store of at most {50 << 30} bytes, a tenth of its disk"
        assert record.getMessage().startswith(limited)
    for given, limit in (("1GiB", 1 << 30), (None, None), ("none", None), (0, 0)):
        with open_store(folder, budget=given) as store:  # type: ignore[attr-defined]
            assert store.budget == limit
    with open_store(f"{folder.as_uri()}?budget=none") as store:  # type: ignore[attr-defined]
        assert store.budget is None
    cache = CausalCache()
    cache.init(ml.open_backend("numpy"), ml.DType.F32, 1, 8, 8)
    with PrefixCache(cache, tiers=[folder], identity={"m": 1}) as prefix:
        assert prefix.tree.store.stores[0].budget == 50 << 30  # type: ignore[union-attr]
    disk.f_blocks = 0
    with open_store(folder) as store:  # type: ignore[attr-defined]
        assert store.budget == 1 << 30


# Copies.


@pytest.mark.parametrize("call", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", ["memory", "file", "a file with a secret", "valkey", "mooncake"])
def test_a_store_cannot_be_pickled_or_copied(tmp_path: Path, kind: str, call: Any) -> None:
    """Its files, locks and connections have no copy; a secret would be in it."""
    options: dict[str, Any] = SECRET if "secret" in kind else {}
    where = {"memory": "memory", "valkey": "valkey://localhost:1", "mooncake": "mooncake://localhost:1"}
    try:
        store = open_store(where.get(kind, tmp_path / "store"), **options)
    except StoreError as error:
        pytest.skip(str(error))
    with store, pytest.raises(NotSupportedError, match="cannot be pickled or copied; open one in each"):  # type: ignore[attr-defined]
        call(store)


def test_what_holds_nothing_open_can_be_pickled() -> None:
    keys = pickle.loads(pickle.dumps(Keys({"m": 1}, 4)))
    assert keys.chain(range(8)).aligned == Keys({"m": 1}, 4).chain(range(8)).aligned
    assert pickle.loads(pickle.dumps(HostTier("1GiB"))) == HostTier(1 << 30)


def test_a_prefix_cache_cannot_be_pickled_or_copied() -> None:
    cache = CausalCache()
    cache.init(ml.open_backend("numpy"), ml.DType.F32, 1, 8, 8)
    with PrefixCache(cache) as prefix:
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(NotSupportedError, match="PrefixCache cannot be pickled or copied"):
                call(prefix)
