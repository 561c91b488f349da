"""FileStore on a system that fails: nothing half-written, nothing lost, and the error says which."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvcache.stores import (
    FileStore,
    SnapshotCorruptError,
    StoreClosedError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from kvcache.stores.lockfile import LOCK, STORE_FORMAT, fcntl
from kvcache.testing.stores import UNIT, content, fill, present, read

from ...rigs.servers import wait_until
from .stores_crash import CALLS
from .stores_rig import entries, names, parts_of, posix, store, where, with_manifest

__all__ = ["store", "where"]

pytestmark = posix

SYSTEM_CALLS = (*(name for name in CALLS if name != "close"), "read")


class Failing:
    """The ``at``-th of the calls to the system raises ``code``; ``called`` says how many there were."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, code: int, after: bool) -> None:
        self.called = 0
        for module, name in [*((os, name) for name in SYSTEM_CALLS), (fcntl, "flock")]:
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


def refusing(code: int) -> Mock:
    return Mock(side_effect=OSError(code, os.strerror(code)))


@pytest.mark.parametrize(
    ("code", "after"), [(errno.ENOSPC, False), (errno.EACCES, False), (errno.EIO, True)], ids=str
)
def test_a_put_that_fails_at_any_call_leaves_no_debris(where: Path, code: int, after: bool) -> None:
    """An eviction may have happened by then; the entry is whole or not there, and the counts are exact."""
    expected = StoreFullError if code == errno.ENOSPC else StoreUnavailableError
    store = FileStore(where, 3 * UNIT, durable=True)  # each fsync is a place to fail
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
        with FileStore(where, 3 * UNIT, durable=False) as other:
            there = present(other, "abcd")
            assert names(where) == entries(*there), at
            assert [read(store, key) for key in there] == [content(key) for key in there]
            assert store.usage().nbytes == other.usage().nbytes == UNIT * len(there)
        store.delete("d")
        if failing.called < at:
            break
    assert failed > 20
    store.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not list open files")
@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("failing", ["writev", "flock", "rename"])
def test_a_put_that_fails_where_nothing_can_be_removed_leaves_no_file_open_and_says_why(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch, code: int, failing: str
) -> None:
    """A file system that is full may refuse to remove files, too. Its temporaries go when a store opens."""
    fill(store, "a")
    before, flock, fail = open_files(), fcntl.flock, refusing(errno.ENOSPC)

    def lock(fd: int, how: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".tmp":
            fail()
        flock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing(code))
        if failing == "flock":
            patch.setattr(fcntl, "flock", lock)
        else:
            patch.setattr(os, failing, fail)
        with pytest.raises(StoreFullError):
            store.put("b", [content("b")])
    assert open_files() == before
    assert any(name.endswith(".tmp") for name in names(where))
    with FileStore(where) as again:
        assert names(where) == entries("a")
        assert (again.usage().entries, present(again, "ab")) == (1, "a")


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
            except StoreUnavailableError:
                failed += 1
        if op != "delete":
            assert present(store, "ab") == "ab"
        if failing.called < at:
            break
    assert failed >= 1
    assert store.usage().dropped == 0
    store.close()


def test_an_interrupted_put_leaves_no_debris(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "writev", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.put("a", [b"x"])
    assert names(where) == []


def test_a_file_in_place_of_the_folder_is_unavailable(where: Path) -> None:
    where.write_text("mine")
    with pytest.raises(StoreUnavailableError):
        FileStore(where)
    with pytest.raises(StoreUnavailableError):
        FileStore(where / "below")
    assert where.read_text() == "mine"


def test_neither_kvcache_nor_its_stores_import_xxhash() -> None:
    code = "import sys, kvcache, kvcache.stores; sys.exit('xxhash' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_are_closed_with_the_store(where: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not list open files")
    before = open_files()
    store = FileStore(where, 2 * UNIT)
    fill(store, "abc")
    (where / "pages" / "c.entry").write_bytes(b"")
    read(store, "c")
    with pytest.raises(StoreFullError):
        store.put("d", [bytes(3 * UNIT)])
    store.close()
    FileStore(where)
    assert open_files() == before


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system does not list open files")
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_looked_at_is_closed(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fill(store, "a")
    before, original = open_files(), os.fstat

    def fstat(fd: int) -> os.stat_result:
        found = original(fd)
        if stat.S_ISREG(found.st_mode):
            raise OSError(code, os.strerror(code))
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    for call in (store.get_into, lambda key, _: store.view(key), lambda key, _: store.reader(key)):
        with pytest.raises(StoreUnavailableError):
            call("a", bytearray(UNIT))
    monkeypatch.undo()
    assert open_files() == before
    assert read(store, "a") == content("a")


def test_an_error_names_the_call_and_the_store_its_folder(store: FileStore, where: Path) -> None:
    assert repr(store) == f"<FileStore at {str(where)!r}>"
    assert repr(FileStore(where, "1KiB")) == f"<FileStore at {str(where)!r}, at most 1,024 bytes>"
    for op, call in (("view", store.view), ("get_into", lambda key: store.get_into(key, bytearray(UNIT)))):
        fill(store, "a")
        (where / "pages" / "a.entry").write_bytes(b"?")
        with pytest.raises(SnapshotCorruptError, match=f"^{op}: a in "):
            call("a")
    store.close()
    with pytest.raises(StoreClosedError, match=r"^view: "):
        store.view("a")


# A device that is read-only, all at once.


def only_read(patch: pytest.MonkeyPatch, code: int = errno.EROFS) -> None:
    """Whatever would change something on the device fails."""
    refuse, original = refusing(code), os.open

    def open_to_read(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return original(path, flags, *args, **options)

    patch.setattr(os, "open", open_to_read)
    for name in ("unlink", "rename", "utime", "mkdir", "write", "writev", "pwrite", "fsync", "ftruncate"):
        patch.setattr(os, name, refuse)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_device_that_turns_read_only_goes_on_serving_what_is_sound(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fill(store, "abcd")
    pages = where / "pages"
    _, manifest = parts_of(pages / "b.entry")
    (pages / "b.entry").write_bytes(b"?" * UNIT + manifest)
    with_manifest(pages / "c.entry", b"{}")
    before = names(where)
    only_read(monkeypatch, code)
    assert store.stat(["c"]) == [None]
    for _ in range(2):
        with contextlib.suppress(SnapshotCorruptError):
            assert store.get_into("b", bytearray(UNIT)) is False
    assert present(store, "abcd") == "ad"
    assert store.prefix(["a", "d", "b"]) == 2
    assert (read(store, "a"), store.view("d")) == (content("a"), content("d"))
    assert (store.usage().entries, store.usage().dropped) == (2, 2)
    for call in (lambda: store.put("e", [b"x"]), lambda: store.delete("a")):
        with pytest.raises(StoreReadOnlyError if code == errno.EROFS else StoreUnavailableError):
            call()
    monkeypatch.undo()
    assert names(where) == before
    assert store.put("e", [content("e")]), "it may be written to again"
    assert store.usage().nbytes == 5 * UNIT


def test_entries_that_may_not_be_removed_are_passed_over(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock may be taken, and the folder of entries not be changed."""
    fill(store, "ab")
    (where / "pages" / "b.entry").write_bytes(b"?")
    monkeypatch.setattr(os, "unlink", refusing(errno.EACCES))
    for _ in range(2):
        assert store.stat(["a", "b"])[1] is None
    assert read(store, "a") == content("a")
    assert store.usage().dropped == 1


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "not empty"])
def test_a_folder_in_place_of_an_entrys_file_is_moved_aside(
    store: FileStore, where: Path, empty: bool
) -> None:
    fill(store, "abc")
    path = where / "pages" / "b.entry"
    path.unlink()
    path.mkdir()
    if not empty:
        (path / "mine").write_text("precious")
    assert present(store, "abc") == "ac"
    assert read(store, "a") == content("a")
    assert store.put("b", [content("b")]) is True
    assert [read(store, key) for key in "abc"] == [content(key) for key in "abc"]
    (aside,) = (name for name in names(where) if name.endswith(".foreign"))
    assert aside.startswith("b.entry.")
    assert [inside.name for inside in (where / "pages" / aside).iterdir()] == ["mine"] * (not empty)
    with FileStore(where) as again:
        assert present(again, "abc") == "abc"
    assert aside in names(where)


def test_a_folder_in_place_of_an_entrys_file_is_a_miss_where_nothing_may_be_changed(
    store: FileStore, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, "ab")
    (where / "pages" / "b.entry").unlink()
    (where / "pages" / "b.entry").mkdir()
    only_read(monkeypatch)
    for _ in range(2):
        assert present(store, "ab") == "a"
        with contextlib.suppress(SnapshotCorruptError):
            assert store.get_into("b", bytearray(UNIT)) is False
    assert store.usage().dropped <= 2


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
    wait_until(lambda: store._in_flight._closed)
    with pytest.raises(StoreClosedError):
        store.stat(["a"])
    assert closing.is_alive()
    go_on.set()
    putting.join(60)
    closing.join(60)
    assert results == [True]


# Folders that may only be read from the start.


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
@pytest.mark.parametrize("left", ["nothing", "an empty lock file", "a lock file"])
def test_a_fresh_folder_that_may_only_be_read_is_an_empty_store(
    where: Path, monkeypatch: pytest.MonkeyPatch, code: int, left: str
) -> None:
    where.mkdir()
    if left != "nothing":
        (where / LOCK).write_bytes(STORE_FORMAT + bytes(16) if left == "a lock file" else b"")
    only_read(monkeypatch, code)
    with FileStore(where) as store:
        assert (store.stat(["a"]), store.prefix(["a"]), store.view("a")) == ([None], 0, None)
        assert (store.get_into("a", bytearray(1)), store.reader("a")) == (False, None)
        assert store.usage().entries == 0
        for call in (lambda: store.put("a", [b"x"]), lambda: store.delete("a")):
            with pytest.raises(StoreReadOnlyError, match="read-only"):
                call()


def test_a_folder_of_entries_that_may_not_be_read_is_unavailable(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FileStore(where).close()
    opened = os.open

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if path == "pages":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnavailableError, match="Permission denied"):
        FileStore(where)


@pytest.mark.parametrize("call", ["put", "delete", "usage", "open"])
def test_an_unlock_that_fails_undoes_nothing_and_says_nothing(
    where: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Closing the file lets go of the lock all the same."""
    store, flock = FileStore(where, durable=False), fcntl.flock

    def fail(fd: int, how: int) -> None:
        flock(fd, how)
        if how == fcntl.LOCK_UN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    fill(store, "a")
    monkeypatch.setattr(fcntl, "flock", fail)
    if call == "put":
        assert store.put("b", [content("b")]) is True
    elif call == "delete":
        assert store.delete("a") is True
    elif call == "usage":
        assert store.usage().entries == 1
    else:
        FileStore(where, durable=False).close()
    monkeypatch.undo()
    assert present(store, "ab") == {"put": "ab", "delete": ""}.get(call, "a")
    store.close()


@pytest.mark.parametrize("kind", ["a folder", "a full folder", "a link", "a broken link", "a pipe", "a loop"])
def test_a_put_takes_the_place_of_whatever_stands_there(store: FileStore, where: Path, kind: str) -> None:
    """At the first attempt. What a folder holds is kept, and what a link leads to is not touched."""
    path, elsewhere = where / "pages" / "a.entry", where.parent / "elsewhere"
    elsewhere.write_text("mine")
    if kind.endswith("folder"):
        path.mkdir()
        if "full" in kind:
            (path / "mine").write_text("mine")
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"a link": elsewhere, "a broken link": where / "gone", "a loop": path}[kind])
    assert store.put("a", [content("a")]) is True
    assert read(store, "a") == content("a")
    assert elsewhere.read_text() == "mine"
    aside = [inside for inside in (where / "pages").iterdir() if inside.suffix == ".foreign"]
    assert len(aside) == kind.endswith("folder")
    assert [inside.name for one in aside for inside in one.iterdir()] == ["mine"] * ("full" in kind)
