"""FileStore on a system that fails: nothing half-written, nothing lost, and the error says which."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.stores import (
    FileStore,
    StoreClosedError,
    StoreFull,
    StoreUnavailable,
    folder,
)
from kvcache.testing.stores import UNIT, content, fill, present, read

from .file_store_rig import both, names, posix, store, where
from .stores_crash import CALLS

__all__ = ["store", "where"]

pytestmark = posix

SYSTEM_CALLS = (*(name for name in CALLS if name != "close"), "read")


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


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


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
    until(lambda: store._calls._closed)
    with pytest.raises(StoreClosedError):
        store.stat(["a"])
    assert closing.is_alive()
    go_on.set()
    putting.join(60)
    closing.join(60)
    assert results == [True]
