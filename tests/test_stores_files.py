"""FileStore's folder: the order of what it writes, damage and strangers in it, and a system that fails."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import xxhash

from kvcache.stores import (
    FileStore,
    MemoryStore,
    Page,
    SnapshotCorrupt,
    StoreClosedError,
    StoreFull,
    StoreUnavailable,
    StoreValueError,
    folder,
    pack,
    unpack,
)
from kvcache.testing.stores import UNIT, content, fill, present, read

pytestmark = pytest.mark.skipif(os.name != "posix", reason="FileStore needs a POSIX system")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(where: Path) -> Iterator[FileStore]:
    with FileStore(where, durable=False) as store:
        yield store


def names(where: Path) -> list[str]:
    return sorted(path.name for path in (where / "pages").iterdir())


def both(*keys: str) -> list[str]:
    return sorted(key + suffix for key in keys for suffix in (".json", ".safetensors"))


# What lies in the folder.


def test_an_entry_is_its_bytes_and_a_manifest(store: FileStore, where: Path) -> None:
    store.put("a", [b"one", b"two"])
    assert names(where) == both("a")
    assert (where / "pages" / "a.safetensors").read_bytes() == b"onetwo"
    assert json.loads((where / "pages" / "a.json").read_text()) == {
        "format": "kvcache.entry/1",
        "key": "a",
        "nbytes": 6,
        "xxh3_128": xxhash.xxh3_128(b"onetwo").hexdigest(),
    }


def test_a_page_on_disk_is_opened_by_safetensors(store: FileStore, where: Path) -> None:
    page = Page({"x": 1}, {"k": np.arange(6, dtype=np.float32)})
    store.put("a", pack(page))
    with safetensors.safe_open(where / "pages" / "a.safetensors", framework="numpy") as file:
        assert file.get_tensor("k").tolist() == [0, 1, 2, 3, 4, 5]
    assert unpack(read(store, "a") or b"").meta == {"x": 1}


def test_the_data_are_on_the_device_before_the_manifest_names_them(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(where, durable=True)
    calls: list[str] = []
    known: dict[int, str] = {}

    def spy(name: str, told: Callable[..., str]) -> None:
        original = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            calls.append(f"{name} {told(result, *args)}")
            return result

        monkeypatch.setattr(os, name, call)

    def opened(fd: int, path: str, *args: Any) -> str:
        known[fd] = "data" if "data" not in known.values() else "manifest"
        return known[fd]

    original_open = os.open

    def watched_open(path: Any, *args: Any, **options: Any) -> int:
        fd = original_open(path, *args, **options)
        if str(path).endswith(".tmp"):
            opened(fd, str(path))
        return fd

    monkeypatch.setattr(os, "open", watched_open)
    spy("fsync", lambda _, fd: known.get(fd, "folder"))
    spy("rename", lambda _, old, new: new.rpartition(".")[2])
    store.put("a", [b"x"])
    store.close()
    assert calls == [
        "fsync data", "fsync manifest", "rename safetensors", "fsync folder", "rename json", "fsync folder"
    ]  # fmt: skip


def test_without_durable_nothing_waits_for_the_device(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", None)
    assert store.put("a", [b"x"]) is True


def test_usage_counts_bytes_and_events(where: Path) -> None:
    with FileStore(where, 3 * UNIT) as store:
        fill(store, "abcd")
        (where / "pages" / "b.json").write_text("{}")
        assert store.stat(["b"]) == [None]
        usage = store.usage()
    assert (usage.entries, usage.nbytes, usage.budget) == (2, 2 * UNIT, 3 * UNIT)
    assert (usage.evicted, usage.dropped, usage.swept) == (1, 1, 0)


# Other openers of the same folder.


def test_another_opener_sees_what_is_put_and_deleted(store: FileStore, where: Path) -> None:
    with FileStore(where) as other:
        fill(store, "ab")
        assert read(other, "a") == content("a")
        assert other.put("a", [b"other"]) is False
        other.delete("a")
        assert present(store, "ab") == "b"
        assert other.usage() == store.usage()


def test_eviction_goes_by_the_use_that_all_openers_made(where: Path) -> None:
    with FileStore(where, 4 * UNIT) as one, FileStore(where, 4 * UNIT) as other:
        fill(one, "ab")
        fill(other, "cd")
        assert read(other, "a") == content("a")
        assert one.prefix(["b"]) == 1
        fill(one, "ef")
        assert present(other, "abcdef") == "abef"
        assert one.usage().nbytes == other.usage().nbytes == 4 * UNIT


def test_an_entry_evicted_and_put_again_while_it_is_read_is_no_damage(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reader's look at the manifest and its reading of the data, another one takes its place."""
    fill(store, "a")
    original = store._folder.open_file
    other = FileStore(where)

    def open_file(name: str) -> int:
        if name == "a.safetensors" and other.delete("a"):
            other.put("a", [content("b")])
            monkeypatch.undo()
        return original(name)

    monkeypatch.setattr(store._folder, "open_file", open_file)
    buffer = bytearray(UNIT)
    assert store.get_into("a", buffer) is True
    assert buffer == content("b")
    assert store.usage().dropped == 0
    other.close()


def test_an_entry_that_vanishes_while_it_is_read_is_a_miss(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, "a")
    original = store._folder.open_file
    other = FileStore(where)

    def open_file(name: str) -> int:
        if name == "a.safetensors":
            other.delete("a")
        return original(name)

    monkeypatch.setattr(store._folder, "open_file", open_file)
    assert store.get_into("a", bytearray(UNIT)) is False
    assert store.usage().dropped == 0
    other.close()


# Damage.


def manifest(**changes: Any) -> bytes:
    digest = xxhash.xxh3_128(content("b")).hexdigest()
    fields = {"format": "kvcache.entry/1", "key": "b", "nbytes": UNIT, "xxh3_128": digest}
    return json.dumps({key: value for key, value in {**fields, **changes}.items() if value != "-"}).encode()


MANIFESTS = {
    "empty": b"",
    "no JSON": b"nonsense",
    "no UTF-8": b"\xff\xfe",
    "deep": b"[" * 4000,
    "long": b" " * 5000 + manifest(),
    "no object": b"[]",
    "of another format": manifest(format="kvcache.entry/2"),
    "of another key": manifest(key="c"),
    "without a size": manifest(nbytes="-"),
    "without a digest": manifest(xxh3_128="-"),
    "with a further field": manifest(x=1),
    "of another size": manifest(nbytes=UNIT - 1),
    "of a negative size": manifest(nbytes=-1),
    "of a size that is a bool": manifest(nbytes=True),
    "of a size that is text": manifest(nbytes="1000"),
    "cut short": manifest()[:-3],
}


@pytest.mark.parametrize("data", MANIFESTS.values(), ids=list(MANIFESTS))
@pytest.mark.parametrize("asked", ["stat", "get_into", "prefix", "put"])
def test_an_entry_with_a_bad_manifest_is_dropped_and_counted(
    store: FileStore, where: Path, data: bytes, asked: str
) -> None:
    fill(store, "abc")
    (where / "pages" / "b.json").write_bytes(data)
    if asked == "stat":
        assert present(store, "abc") == "ac"
    elif asked == "prefix":
        assert store.prefix(["a", "b", "c"]) == 1
    elif asked == "get_into":
        with pytest.raises(SnapshotCorrupt, match="b in"):
            store.get_into("b", bytearray(UNIT))
    else:
        assert store.put("b", [b"anew"]) is True
        assert read(store, "b") == b"anew"
        store.delete("b")
    assert names(where) == both("a", "c")
    usage = store.usage()
    assert (usage.dropped, usage.entries, usage.nbytes) == (1, 2, 2 * UNIT)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "one bit at the start": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "one bit at the end": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "two parts exchanged": lambda data: data[500:] + data[:500],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_data_are_never_served(
    store: FileStore, where: Path, damage: Callable[[bytes], bytes]
) -> None:
    fill(store, "abc")
    path = where / "pages" / "b.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SnapshotCorrupt, match="dropped"):
        store.get_into("b", bytearray(UNIT))
    assert store.stat(["b"]) == [None]
    assert store.get_into("b", bytearray(UNIT)) is False
    assert names(where) == both("a", "c")
    assert store.put("b", [content("b")]) is True
    assert [read(store, key) for key in "abc"] == [content(key) for key in "abc"]
    assert store.usage().dropped == 1


def test_halves_of_entries_are_cleared_away_when_the_folder_is_opened(where: Path) -> None:
    with FileStore(where) as store:
        fill(store, "abc")
    (where / "pages" / "a.safetensors").unlink()
    (where / "pages" / "b.json").unlink()
    with FileStore(where) as store:
        usage = store.usage()
        assert (usage.entries, usage.dropped, usage.swept) == (1, 1, 1)
        assert names(where) == both("c")


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(
    store: FileStore, where: Path
) -> None:
    with store._folder.locked():
        living, fd = store._folder.create_temporary()
    (where / "pages" / f"{'0' * 32}.tmp").write_bytes(b"left behind")
    with FileStore(where) as other:
        assert other.usage().swept == 1
        assert names(where) == [living]
    os.close(fd)
    with FileStore(where) as other:
        assert other.usage().swept == 1
        assert names(where) == []


# Strangers.


def test_names_that_are_no_entries_are_left_alone(where: Path) -> None:
    FileStore(where).close()
    strangers = ["README", "Model.safetensors", "a.b.json", "UPPER.json", "note.txt", ".hidden.tmp"]
    for name in strangers:
        (where / "pages" / name).write_text("mine")
    with FileStore(where, 1) as store:
        store.put("a", [b"x"])
        store.put("b", [b"x"])
    assert names(where) == sorted([*strangers, *both("b")])


def test_a_folder_that_holds_something_else_is_refused_and_untouched(where: Path) -> None:
    where.mkdir()
    (where / "model.safetensors").write_text("precious")
    with pytest.raises(StoreUnavailable, match=r"model\.safetensors"):
        FileStore(where)
    assert [path.name for path in where.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("data", [b"something else", b"kvcache.store/2\n" + bytes(8)])
def test_a_folder_of_another_version_is_refused(where: Path, data: bytes) -> None:
    where.mkdir()
    (where / "kvcache.lock").write_bytes(data)
    with pytest.raises(StoreUnavailable, match="version"):
        FileStore(where)


def test_a_folder_whose_first_opener_died_at_once_is_taken_over(where: Path) -> None:
    where.mkdir()
    (where / "kvcache.lock").touch()
    with FileStore(where) as store:
        assert store.put("a", [b"x"])


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_link_is_never_followed(where: Path, tmp_path: Path, suffix: str) -> None:
    outside = tmp_path / "outside"
    with FileStore(where) as store:
        fill(store, "ab")
        inside = where / "pages" / f"b{suffix}"
        shutil.copy(inside, outside)
        before = outside.read_bytes(), outside.stat().st_mtime_ns
        inside.unlink()
        inside.symlink_to(outside)
        assert store.stat(["b"]) == [None]
        inside.symlink_to(outside)
        with contextlib.suppress(SnapshotCorrupt):
            assert store.get_into("b", bytearray(UNIT)) is False
        assert store.put("b", [b"anew"]) is True
        assert read(store, "b") == b"anew"
        assert not inside.is_symlink()
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before


def test_a_linked_folder_of_pages_is_refused(where: Path, tmp_path: Path) -> None:
    FileStore(where).close()
    (where / "pages").rename(tmp_path / "elsewhere")
    (where / "pages").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable):
        FileStore(where)


def test_a_pipe_in_place_of_an_entry_does_not_block(store: FileStore, where: Path) -> None:
    os.mkfifo(where / "pages" / "a.json")
    assert store.stat(["a"]) == [None]
    assert names(where) == []


# A system that fails.

SYSTEM_CALLS = (
    "open",
    "writev",
    "fsync",
    "rename",
    "unlink",
    "utime",
    "pwrite",
    "pread",
    "scandir",
    "read",
    "stat",
)


class Failing:
    """The ``at``-th of the calls to the system raises ``code``; ``called`` says how many there were."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, code: int, after: bool) -> None:
        self.called = 0
        for module, name in [*((os, name) for name in SYSTEM_CALLS), (folder.fcntl, "flock")]:
            patch.setattr(module, name, self._wrap(getattr(module, name), at, code, after))

    def _wrap(self, original: Callable[..., Any], at: int, code: int, after: bool) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.called += 1
            if self.called == at:
                if after and original.__name__ != "open":
                    original(*args, **options)
                raise OSError(code, os.strerror(code))
            return original(*args, **options)

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_put_that_fails_at_any_call_leaves_no_debris(where: Path, code: int, after: bool) -> None:
    """An eviction may have happened by then; the entry is whole or not there, and the counts are exact."""
    expected = StoreFull if code == errno.ENOSPC else StoreUnavailable
    store = FileStore(where, 3 * UNIT, durable=True)
    failed = 0
    for at in itertools.count(1):
        for key in "abc":
            store.put(key, [content(key)])
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, at, code, after)
            try:
                assert store.put("d", [content("d")]) is True
            except expected:
                failed += 1
        with FileStore(where, 3 * UNIT) as other:
            there = present(other, "abcd")
            assert names(where) == both(*there), at
            assert [read(store, key) for key in there] == [content(key) for key in there]
            assert store.usage().nbytes == other.usage().nbytes == UNIT * len(there)
        store.delete("d")
        if failing.called < at:
            break
    assert failed > 20
    store.close()


@pytest.mark.parametrize("op", ["stat", "get_into", "prefix", "delete"])
def test_a_failing_device_is_unavailable_and_drops_nothing(where: Path, op: str) -> None:
    store = FileStore(where, durable=False)
    fill(store, "ab")
    arguments = {"stat": (["a"],), "prefix": (["a"],), "delete": ("a",), "get_into": ("a", bytearray(UNIT))}
    failed = 0
    for at in itertools.count(1):
        store.put("a", [content("a")])
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, at, errno.EIO, False)
            try:
                getattr(store, op)(*arguments[op])
            except StoreUnavailable:
                failed += 1
        if op != "delete":
            assert present(store, "ab") == "ab"
        if failing.called < at:
            break
    assert failed >= 2
    assert store.usage().dropped == 0
    store.close()


def test_an_interrupted_put_leaves_no_debris(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "writev", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put("a", [b"x"])
    assert names(where) == []


def test_a_folder_deleted_behind_the_store_is_unavailable(where: Path) -> None:
    store = FileStore(where)
    fill(store, "a")
    shutil.rmtree(where)
    calls: list[Callable[[], object]] = [
        lambda: store.put("b", [b"x"]),
        lambda: store.stat(["a"]),
        lambda: store.get_into("a", bytearray(UNIT)),
        lambda: store.prefix(["a"]),
        lambda: store.delete("a"),
        store.usage,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="deleted"):
            call()
    store.close()


def test_a_file_in_place_of_the_folder_is_unavailable(where: Path) -> None:
    where.write_text("mine")
    with pytest.raises(StoreUnavailable):
        FileStore(where)
    with pytest.raises(StoreUnavailable):
        FileStore(where / "below")
    assert where.read_text() == "mine"


def test_a_missing_xxhash_names_the_extra(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(StoreUnavailable, match=r"ml-kvcache\[disk\]"):
        FileStore(where)
    assert not where.exists()


def test_neither_kvcache_nor_its_stores_import_xxhash() -> None:
    code = "import sys, kvcache, kvcache.stores; sys.exit('xxhash' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_are_closed_with_the_store(where: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not list open files")
    before = open_files()
    store = FileStore(where, 2 * UNIT)
    fill(store, "abc")
    (where / "pages" / "c.safetensors").write_bytes(b"")
    read(store, "c")
    with pytest.raises(StoreFull):
        store.put("d", [bytes(3 * UNIT)])
    store.close()
    FileStore(where)
    assert open_files() == before


def test_closing_waits_for_the_call_under_way(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(where, durable=False)
    writing, go_on = threading.Event(), threading.Event()
    original = os.writev

    def writev(*args: Any) -> int:
        writing.set()
        assert go_on.wait(60)
        return original(*args)

    monkeypatch.setattr(os, "writev", writev)
    results: list[bool] = []
    putting = threading.Thread(target=lambda: results.append(store.put("a", [b"x"])))
    putting.start()
    assert writing.wait(60)
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._calls._closed:
        pass
    with pytest.raises(StoreClosedError):
        store.stat(["a"])
    assert closing.is_alive()
    go_on.set()
    putting.join(60)
    closing.join(60)
    assert results == [True]


@pytest.mark.parametrize("budget", [-1, 1.5, "1", True])
def test_a_budget_is_a_count_of_bytes(where: Path, budget: Any) -> None:
    for make in (lambda: FileStore(where, budget), lambda: MemoryStore(budget)):
        with pytest.raises(StoreValueError, match="budget"):
            make()


def test_a_view_of_a_memory_store_copies_nothing_and_outlives_eviction() -> None:
    store = MemoryStore(2 * UNIT)
    fill(store, "ab")
    view = store.view("a")
    assert view is not None
    assert view.readonly
    fill(store, "c")
    assert present(store, "abc") == "ac"
    fill(store, "d")
    assert view == content("a")
    assert store.view("a") is None


# What is shown in place.


def test_a_view_is_what_was_put_and_outlives_eviction_and_the_store(where: Path) -> None:
    with FileStore(where, 3 * UNIT) as store:
        fill(store, "abc")
        view = store.view("a")
        assert view == content("a")
        fill(store, "d")
        assert present(store, "abcd") == "acd", "a view is a hit"
        store.delete("a")
        assert store.view("a") is None
        store.put("empty", [b""])
        assert store.view("empty") == b""
    assert view == content("a")


def test_writing_into_a_view_does_not_reach_the_file(store: FileStore) -> None:
    fill(store, "a")
    view = store.view("a")
    assert view is not None
    view[:10] = bytes(10)
    assert read(store, "a") == content("a")
    assert store.view("a") == content("a")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_damaged_data_are_never_shown(
    store: FileStore, where: Path, damage: Callable[[bytes], bytes]
) -> None:
    fill(store, "ab")
    path = where / "pages" / "b.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SnapshotCorrupt, match="dropped"):
        store.view("b")
    assert store.view("b") is None
    assert names(where) == both("a")
    assert store.usage().dropped == 1


def test_a_view_that_vanishes_while_it_is_made_is_a_miss(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, "a")
    original = store._folder.open_file
    with FileStore(where) as other:

        def open_file(name: str) -> int:
            if name == "a.safetensors":
                other.delete("a")
            return original(name)

        monkeypatch.setattr(store._folder, "open_file", open_file)
        assert store.view("a") is None
        assert store.usage().dropped == 0
