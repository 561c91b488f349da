"""The suite of stores is itself tested: every bug planted here has to make it fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcache.stores import (
    FileStore,
    MemoryStore,
    SnapshotStore,
    StoreError,
    StoreFull,
    StoreValueError,
    file,
    memory,
    streams,
)
from kvcache.stores.catalog import Catalog
from kvcache.stores.entries import Entries
from kvcache.stores.folder import Folder
from kvcache.stores.index import Index, Row, State

Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {}
"""What is wrong -> (the store it is planted in, how)."""

SUITES = {
    "memory": """
class TestStore(StoreTests):
    def make(self, folder, budget=None):
        return MemoryStore(budget)
""",
    "file": """
class TestStore(StoreTests):
    persistent = True

    def make(self, folder, budget=None):
        return FileStore(folder / "store", budget, durable=False)

    def damage(self, store, folder, key):
        path = folder / "store" / "pages" / f"{key}.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return True
""",
}


def bug(store: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def plant(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[f"{store}: {function.__name__}"] = store, function
        return function

    return plant


# In memory.


@bug("memory")
def a_key_is_written_twice(patch: Patch) -> None:
    original = MemoryStore.put

    def put(self: MemoryStore, key: str, parts: Sequence[Any]) -> bool:
        self.delete(key)
        return original(self, key, parts)

    patch.setattr(MemoryStore, "put", put)


@bug("memory")
def the_second_put_of_a_key_says_that_it_wrote(patch: Patch) -> None:
    original = MemoryStore.put
    patch.setattr(MemoryStore, "put", lambda *args: original(*args) or True)


@bug("memory")
def the_last_part_is_lost(patch: Patch) -> None:
    original = MemoryStore.put
    patch.setattr(
        MemoryStore, "put", lambda self, key, parts: original(self, key, parts[: max(1, len(parts) - 1)])
    )


@bug("memory")
def parts_are_not_copied(patch: Patch) -> None:
    def joined(views: Sequence[memoryview], nbytes: int) -> Any:
        whole = memory.np.frombuffer(b"".join(views), memory.np.uint8)
        return memory.np.frombuffer(views[0], memory.np.uint8) if len(views) == 1 and nbytes else whole

    patch.setattr(memory, "_joined", joined)


@bug("memory")
def first_in_goes_first_whatever_was_used(patch: Patch) -> None:
    patch.setattr(MemoryStore, "_touch", staticmethod(lambda entries, key: None))


@bug("memory")
def stat_counts_as_use(patch: Patch) -> None:
    original = MemoryStore.stat

    def stat(self: MemoryStore, keys: Sequence[str]) -> Any:
        self.prefix(keys)
        return original(self, keys)

    patch.setattr(MemoryStore, "stat", stat)


@bug("memory")
def of_a_chain_the_first_goes_first(patch: Patch) -> None:
    original = MemoryStore.prefix

    def prefix(self: MemoryStore, keys: Sequence[str]) -> int:
        count = original(self, keys)
        for key in keys[:count]:
            self.view(key)
        return count

    patch.setattr(MemoryStore, "prefix", prefix)


@bug("memory")
def prefix_counts_beyond_a_hole(patch: Patch) -> None:
    patch.setattr(MemoryStore, "prefix", lambda self, keys: sum(x is not None for x in self.stat(keys)))


@bug("memory")
def one_byte_more_than_the_budget(patch: Patch) -> None:
    original = MemoryStore.__init__

    def init(self: MemoryStore, budget: int | None = None) -> None:
        original(self, None if budget is None else budget + 1)

    patch.setattr(MemoryStore, "__init__", init)


@bug("memory")
def what_is_too_big_empties_the_store(patch: Patch) -> None:
    original = MemoryStore.put

    def put(self: MemoryStore, key: str, parts: Sequence[Any]) -> bool:
        try:
            return original(self, key, parts)
        except StoreFull:
            self._make_room(self._open("put"), self._nbytes + (self.budget or 0) - self._nbytes)
            raise

    patch.setattr(MemoryStore, "put", put)


@bug("memory")
def deleting_gives_no_room(patch: Patch) -> None:
    original = MemoryStore.delete

    def delete(self: MemoryStore, key: str) -> bool:
        before = self._nbytes
        found = original(self, key)
        self._nbytes = before
        return found

    patch.setattr(MemoryStore, "delete", delete)


@bug("memory")
def a_buffer_too_long_is_filled_from_the_front(patch: Patch) -> None:
    original = MemoryStore.get_into

    def get_into(self: MemoryStore, key: str, buffer: Any) -> bool:
        (found,) = self.stat([key])
        return original(self, key, memoryview(buffer)[: found.nbytes] if found and len(buffer) else buffer)

    patch.setattr(MemoryStore, "get_into", get_into)


@bug("memory")
def a_closed_store_goes_on(patch: Patch) -> None:
    patch.setattr(MemoryStore, "close", lambda self: None)


@bug("memory")
def a_closed_store_raises_something_else(patch: Patch) -> None:
    def raise_error(self: MemoryStore, op: str) -> Any:
        if self._entries is None:
            raise StoreError(f"{op}: closed")
        return self._entries

    patch.setattr(MemoryStore, "_open", raise_error)


@bug("memory")
def any_key_is_let_in(patch: Patch) -> None:
    patch.setattr(memory, "check_key", lambda key: key)


@bug("memory")
def only_names_of_folders_are_refused(patch: Patch) -> None:
    def check(key: Any) -> Any:
        if not isinstance(key, str) or "/" in key:
            raise StoreValueError(f"the key {key!r}")
        return key

    patch.setattr(memory, "check_key", check)


@bug("memory")
def a_miss_raises(patch: Patch) -> None:
    original = MemoryStore.get_into

    def get_into(self: MemoryStore, key: str, buffer: Any) -> bool:
        if not original(self, key, buffer):
            raise KeyError(key)
        return True

    patch.setattr(MemoryStore, "get_into", get_into)


# On disk.


@bug("file")
def digests_are_not_looked_at(patch: Patch) -> None:
    from kvcache.stores import entries

    patch.setattr(entries, "_check_digest", lambda manifest, count, digest: None)


@bug("file")
def what_is_damaged_stays(patch: Patch) -> None:
    patch.setattr(FileStore, "_drop", lambda *args: None)


@bug("file")
def a_block_is_written_once_too_often(patch: Patch) -> None:
    original = streams.write_all

    def write(fd: int, batch: list[memoryview]) -> None:
        again = batch[:1] if len(batch) > 400 else []
        original(fd, [*batch, *again])

    patch.setattr(streams, "write_all", write)


@bug("file")
def short_writes_are_not_continued(patch: Patch) -> None:
    patch.setattr(streams, "write_all", lambda fd, batch: batch and os.write(fd, batch[0]))


@bug("file")
def recency_is_not_kept_on_disk(patch: Patch) -> None:
    patch.setattr(Folder, "touch", lambda *args: None)


@bug("file")
def the_youngest_goes_first(patch: Patch) -> None:
    original = Index.by_use

    def by_use(self: Index) -> Generator[Row, None, None]:
        yield from reversed(list(original(self)))

    patch.setattr(Index, "by_use", by_use)


@bug("file")
def what_was_there_is_not_counted_at_opening(patch: Patch) -> None:
    original = FileStore.close

    def close(self: FileStore) -> None:
        (self.path / "index" / "entries.sqlite").unlink(missing_ok=True)
        original(self)

    patch.setattr(FileStore, "close", close)
    patch.setattr(Catalog, "_scan", lambda self, held: self._index.replace(held.changes, []))


@bug("file")
def what_is_removed_goes_on_counting(patch: Patch) -> None:
    original = Index.write

    def write(
        self: Index, before: State, changes: int, gone: Mapping[str, bool], there: Sequence[Row]
    ) -> State:
        return original(self, before, changes, {}, there)

    patch.setattr(Index, "write", write)


@bug("file")
def what_was_used_since_is_not_looked_at_again(patch: Patch) -> None:
    patch.setattr(Catalog, "_last_used", lambda self, stem: 0)


@bug("file")
def of_a_chain_on_disk_the_first_goes_first(patch: Patch) -> None:
    original = FileStore._used
    patch.setattr(FileStore, "_used", lambda self, keys: original(self, list(reversed(keys))))


@bug("file")
def opening_starts_anew(patch: Patch) -> None:
    original = FileStore.__init__

    def init(self: FileStore, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        for name, _ in list(self._folder.entries()):
            self._folder._unlink(name)

    patch.setattr(FileStore, "__init__", init)


@bug("file")
def two_threads_may_write_one_key(patch: Patch) -> None:
    original = FileStore._commit

    def commit(self: FileStore, key: str, *rest: Any) -> bool:
        self.delete(key)
        return original(self, key, *rest)

    patch.setattr(FileStore, "_commit", commit)


@bug("file")
def a_change_while_reading_is_taken_for_damage(patch: Patch) -> None:
    original = Entries.read
    from kvcache.stores import SnapshotCorrupt
    from kvcache.stores.entries import BrokenEntryError

    def read(self: Entries, key: str, view: memoryview) -> bool:
        try:
            return original(self, key, view)
        except BrokenEntryError as error:
            raise SnapshotCorrupt(f"{key}: {error}") from error

    patch.setattr(Entries, "read", read)


@bug("file")
def names_are_not_checked(patch: Patch) -> None:
    patch.setattr(file, "check_key", lambda key: key)


# The tests.


class Recorder:
    """Which tests failed in an inner run."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.passed and report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)


def run_suite(folder: Path, store: str) -> Recorder:
    program = folder / f"test_store_{store}.py"  # imported once under its name
    imports = (
        "from kvcache.stores import FileStore, MemoryStore\nfrom kvcache.testing.stores import StoreTests\n"
    )
    program.write_text(imports + SUITES[store])
    (folder / "none.ini").write_text("[pytest]\n")
    recorder = Recorder()
    options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-c", str(folder / "none.ini")]
    base = f"--basetemp={folder / 'base'}"
    pytest.main(
        [str(program), f"--rootdir={folder}", base, "--import-mode=importlib", *options], plugins=[recorder]
    )
    return recorder


@pytest.mark.parametrize("store", SUITES)
def test_the_suite_passes_without_a_bug(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_suite(tmp_path, store)
    assert found.failed == []
    assert found.passed > 40


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_suite_notices(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, plant = MUTATIONS[name]
    plant(monkeypatch)
    found = run_suite(tmp_path, store)
    monkeypatch.undo()
    print(name, "->", *found.failed)
    assert found.failed, f"{name}: {found.passed} tests passed, and none failed"


def test_a_store_that_is_not_written_fails_the_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SUITES["none"] = "\n\nclass TestStore(StoreTests):\n    pass\n"
    try:
        assert run_suite(tmp_path, "none").failed
    finally:
        del SUITES["none"]


def test_the_stores_are_seen_as_stores_by_type_checkers() -> None:
    stores: list[type[SnapshotStore]] = [MemoryStore, FileStore]
    assert all(issubclass(store, SnapshotStore) for store in stores)
