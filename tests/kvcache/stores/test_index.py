"""FileStore's index: it spares reading the folder, can be made anew from it, and orders by sequence."""

from __future__ import annotations

import functools
import gc
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.stores import FileStore, folder, index, lockfile, streams
from kvcache.stores.folder import Folder
from kvcache.testing.stores import UNIT, content, fill, present, read

from .stores_rig import entries, names, posix, where

__all__ = ["where"]

pytestmark = posix


opened = functools.partial(FileStore, durable=False)


def index_of(where: Path) -> Path:
    return where / "index" / "entries.sqlite"


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A folder for each time that all names of one were read."""
    found: list[Path] = []
    original = Folder.entries

    def entries(self: Folder) -> Iterator[tuple[str, os.stat_result]]:
        found.append(self.path)
        return original(self)

    monkeypatch.setattr(Folder, "entries", entries)
    return found


def usual(where: Path) -> None:
    """What has to hold of a folder with a, b, c and d, of which b was used last."""
    with opened(where, 4 * UNIT) as store:
        assert (store.usage().entries, store.usage().nbytes) == (4, 4 * UNIT)
        fill(store, "ef")
        assert present(store, "abcdef") == "bdef"
        assert store.usage().nbytes == 4 * UNIT
        assert [read(store, key) for key in "bdef"] == [content(key) for key in "bdef"]
    assert names(where) == entries(*"bdef")


@pytest.fixture
def filled(where: Path) -> Path:
    with opened(where, 4 * UNIT) as store:
        fill(store, "abcd")
        assert read(store, "b") == content("b")
    return where


# What it spares.


def test_the_folder_is_read_once_whoever_puts_evicts_deletes_and_opens(
    where: Path, scans: list[Path]
) -> None:
    with opened(where, 3 * UNIT) as one, opened(where, 3 * UNIT) as other:
        for i in range(6):
            fill(one, [f"one{i}"])
            fill(other, [f"other{i}"])
            assert one.usage().nbytes == other.usage().nbytes
        other.delete("other5")
        assert one.usage().entries == 2
    with opened(where) as again:
        assert again.usage().entries == 2
    assert scans == [where]


def test_a_process_that_died_in_a_put_costs_a_look_at_the_entries_that_came_or_went(
    where: Path, scans: list[Path]
) -> None:
    with opened(where) as store:
        fill(store, "ab")
        with store._index.locked():
            store._folder.withdraw("a")  # it was about to be evicted
            _, fd = store._folder.create("c", UNIT)
            store._index.add("c", UNIT, 5)  # it was about to be published
        os.close(fd)
        assert store.usage().entries == 1
        assert names(where) == entries("b")
        assert store.usage().swept == 2
        assert len(scans) == 1


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system's clock two changes may see the same time; here each change of a name has its own."""

    def changed(self: Folder) -> int:
        return zlib.crc32(repr(sorted(stem for stem, _ in original(self))).encode())

    original = Folder.entries
    monkeypatch.setattr(Folder, "changed", property(changed))


def added(where: Path) -> None:
    with opened(where.with_name("backup")) as backup:
        fill(backup, "xy")
    for path in (where.with_name("backup") / "pages").iterdir():
        shutil.copy2(path, where / "pages")


def removed(where: Path) -> None:
    for path in (where / "pages").glob("a.*"):
        path.unlink()


def died(store: FileStore) -> None:
    """Of a put of d, with its files in place; and another process has looked at them."""
    with store._index.locked():
        _, fd = store._folder.create("d", UNIT)
        store._index.add("d", UNIT, 5)
        path = store.path / "pages" / "b.entry"
        shutil.copy2(path, path.with_stem("d"))
    os.close(fd)
    store.usage()


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("change", "kept"), [(added, "abcdxy"), (removed, "bcd")])
@pytest.mark.parametrize("then", [lambda store: fill(store, "d"), died], ids=["put", "died"])
def test_what_other_programs_change_beside_an_open_store_is_counted_by_the_next_to_open(
    where: Path,
    scans: list[Path],
    change: Callable[[Path], None],
    kept: str,
    then: Callable[[FileStore], None],
) -> None:
    with opened(where, 9 * UNIT) as store:
        fill(store, "abc")
        change(where)
        then(store)
        fill(store, "ef")
        store.delete("e")
        assert scans.count(where) == 1, "calls do not read the folder"
        with opened(where, 9 * UNIT) as other:
            assert names(where) == entries(*kept, "f")
            for one in (store, other):
                assert (one.usage().entries, one.usage().nbytes) == (len(kept) + 1, UNIT * (len(kept) + 1))
        with opened(where, 3 * UNIT) as other:
            assert other.usage().nbytes == store.usage().nbytes == 3 * UNIT
        assert scans.count(where) == 2, "it is read once"
    assert len(names(where)) == 3


@pytest.mark.usefixtures("ticking")
def test_what_other_programs_change_while_the_folder_is_read_is_counted_by_the_next_to_open(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Folder.entries

    def entries(self: Folder) -> Iterator[tuple[str, os.stat_result]]:
        yield from original(self)
        if self.path == where:
            added(where)

    with opened(where) as store:
        fill(store, "a")
    shutil.rmtree(where / "index")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "entries", entries)
        opened(where).close()
    with opened(where) as store:
        assert store.usage().entries == 3


def test_what_was_used_since_is_looked_at_once(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    original = index.Index._last_used
    with opened(where, 40 * UNIT) as store:
        keys = [f"k{i}" for i in range(40)]
        fill(store, keys)
        store.prefix(keys[:30])

        def last_used(self: index.Index, row: index.Row) -> int:
            looked.append(row.stem)
            return original(self, row)

        monkeypatch.setattr(index.Index, "_last_used", last_used)
        fill(store, ["x"])
        assert looked == keys[:31]
        fill(store, ["y"])
        assert looked == keys[:32]
        assert [found is None for found in store.stat(keys)] == [False] * 30 + [True] * 2 + [False] * 8


def test_an_eviction_looks_at_so_many_that_were_used_and_no_more(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than that it takes the least recently used among those it has seen."""
    monkeypatch.setattr(index, "LOOKED", 8)
    with opened(where, 40 * UNIT) as store:
        keys = [f"k{i}" for i in range(40)]
        fill(store, keys)
        store.prefix(list(reversed(keys[1:])))
        store.prefix(keys[:1])
        fill(store, ["x"])
        assert [key for key, found in zip(keys, store.stat(keys), strict=True) if found is None] == ["k1"]


def test_opening_evicts_so_many_at_a_time_and_lets_others_in_between(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "AT_ONCE", 2)
    original, counts = index.Index.trim, list[int]()

    def trim(self: index.Index) -> bool:
        before, more = self.evicted, original(self)
        counts.append(self.evicted - before)
        return more

    monkeypatch.setattr(index.Index, "trim", trim)
    with opened(where) as store:
        fill(store, "abcdefg")
        store.put("large", [bytes(3 * UNIT)])
    counts.clear()
    with opened(where, 2 * UNIT) as store:
        assert present(store, "abcdefg") == "fg"
        assert store.usage().nbytes == 2 * UNIT
        assert names(where) == entries("f", "g")
    assert counts == [1, 2, 2, 1, 0], "first what cannot stay, though it was used last"


# Whatever became of it.


def killed_in_a_transaction(where: Path) -> None:
    """Half of the index is written, and its journal lies beside it."""
    code = (
        "import os, signal, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 1'); db.execute('PRAGMA synchronous = OFF')\n"
        "db.execute('PRAGMA journal_mode = TRUNCATE'); db.execute('BEGIN')\n"
        "db.execute('DELETE FROM entries')\n"
        "db.executemany('INSERT INTO entries VALUES (?, 7, 7)', ((f'x{i}',) for i in range(5000)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = index_of(where).read_bytes()
    done = subprocess.run([sys.executable, "-c", code, str(index_of(where))], check=False)
    assert done.returncode == -signal.SIGKILL
    assert index_of(where).read_bytes() != before
    assert Path(f"{index_of(where)}-journal").stat().st_size > 0


def changed(sql: str, *values: object) -> Callable[[Path], None]:
    def change(where: Path) -> None:
        db = sqlite3.connect(index_of(where))
        db.execute(sql, values)
        db.commit()
        db.close()

    return change


def replaced(data: bytes) -> Callable[[Path], object]:
    return lambda where: index_of(where).write_bytes(data)


def in_place_of_it(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(where: Path) -> None:
        index_of(where).unlink()
        make(index_of(where))

    return change


def folder_of_it(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda where: change(where / "index")


def of_another_folder(where: Path) -> None:
    other = where.with_name("other")
    with opened(other) as store:
        fill(store, "x")
    shutil.copy(index_of(other), index_of(where))


def beside_times_of_nonsense(where: Path) -> None:
    """In the lock file, from which times of use go on."""
    with open(where / "kvcache.lock", "r+b") as lock:
        lock.seek(16)
        lock.write(b"\xff" * 8)


def of_an_earlier_time(where: Path) -> None:
    with opened(where) as store:
        fill(store, "x")
        earlier = index_of(where).read_bytes()
        store.delete("x")
    index_of(where).write_bytes(earlier)


STATES: dict[str, Callable[[Path], object]] = {
    "as it was left": lambda where: None,
    "deleted": lambda where: index_of(where).unlink(),
    "deleted with its folder": folder_of_it(shutil.rmtree),
    "empty": replaced(b""),
    "no database": replaced(b"nonsense" * 1000),
    "cut short": lambda where: os.truncate(index_of(where), 4096),
    "with a name in its schema that is no text": lambda where: index_of(where).write_bytes(
        index_of(where).read_bytes().replace(b"by_use", b"by_\xc5se")
    ),
    "of another folder": of_another_folder,
    "of an earlier time": of_an_earlier_time,
    "beside times of nonsense": beside_times_of_nonsense,
    "of an older version": changed("PRAGMA user_version = 1"),
    "of a newer version": changed("PRAGMA user_version = 4"),
    "of another schema": changed("CREATE TABLE more (x)"),
    "a write-ahead log not checkpointed": changed("PRAGMA journal_mode = WAL"),
    "without totals": changed("DELETE FROM totals"),
    "with totals of nonsense": changed("UPDATE totals SET entries = ?", "x"),
    "with another count": changed("UPDATE totals SET entries = 3"),
    "with another size": changed("UPDATE entries SET nbytes = 1 WHERE stem = 'a'"),
    "with a name that leads out": changed("UPDATE entries SET stem = '../../out' WHERE stem = 'a'"),
    "with a name that is no text": changed("UPDATE entries SET stem = x'ff' WHERE stem = 'a'"),
    "killed in a transaction": killed_in_a_transaction,
    "a folder": in_place_of_it(lambda path: (path / "inside").mkdir(parents=True)),
    "a pipe": in_place_of_it(os.mkfifo),
    "in a folder that others may enter": folder_of_it(lambda folder: folder.chmod(0o755)),
    "in a folder that may not be written": folder_of_it(lambda folder: folder.chmod(0o500)),
    "with a file in place of its folder": folder_of_it(
        lambda folder: (shutil.rmtree(folder), folder.touch())
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_in_whatever_state_the_index_is_found_entries_and_order_are_the_same(
    filled: Path, state: str
) -> None:
    STATES[state](filled)
    usual(filled)


@pytest.mark.parametrize("state", STATES)
def test_in_whatever_state_the_index_is_left_under_an_open_store_it_goes_on(where: Path, state: str) -> None:
    with opened(where, 4 * UNIT) as store, opened(where, 4 * UNIT) as other:
        fill(store, "abcd")
        assert read(other, "b") == content("b")
        STATES[state](where)
        fill(store, "ef")
        assert present(store, "abcdef") == "bdef"
        fill(other, "g")
        assert present(store, "abcdefg") == "befg"
        assert store.usage().nbytes == other.usage().nbytes == 4 * UNIT
    assert names(where) == entries(*"befg")


def test_a_flipped_bit_of_the_index_changes_nothing_that_is_served_or_kept(where: Path) -> None:
    """Of many a byte one bit, as a store finds it that opens."""
    with opened(where, 4 * UNIT) as store:
        fill(store, "abcd")
    whole = {path: path.read_bytes() for path in where.rglob("*") if path.is_file()}
    data, rng = whole[index_of(where)], random.Random(0)
    for at in rng.sample([at for at, byte in enumerate(data) if byte], 60):
        shutil.rmtree(where)
        for path, saved in whole.items():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(saved)
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        index_of(where).write_bytes(flipped)
        with open(where / "kvcache.lock", "r+b") as lock:  # the index is believed to know all files
            lock.seek(24)
            lock.write((where / "pages").stat().st_mtime_ns.to_bytes(8, "little"))
        with opened(where, 4 * UNIT) as store:
            fill(store, "ef")
            kept = present(store, "abcdef")
            assert kept[-2:] == "ef"
            assert len(kept) == 4
            assert store.usage().nbytes == 4 * UNIT
            assert [read(store, key) for key in kept] == [content(key) for key in kept], at


def test_an_entry_that_the_index_does_not_find_is_noticed_when_it_goes(filled: Path) -> None:
    """As a damaged page may have it, which SQLite does not always notice."""
    changed("DELETE FROM entries WHERE stem = 'a'")(filled)
    with opened(filled) as store:
        assert store.delete("a")
        assert (store.usage().entries, store.usage().nbytes) == (3, 3 * UNIT)


def test_an_index_that_links_elsewhere_is_not_followed(filled: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copy(index_of(filled), outside)
    before = outside.read_bytes()
    index_of(filled).unlink()
    index_of(filled).symlink_to(outside)
    usual(filled)
    assert outside.read_bytes() == before
    assert not index_of(filled).is_symlink()


def test_after_a_restart_of_the_machine_the_folder_is_read_once(
    where: Path, scans: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not written to the device may be lost, of the files and of the index."""
    monkeypatch.setattr(Folder, "changed", 1)
    with opened(where) as store:
        fill(store, "abcd")
    for path in (where / "pages").glob("a.*"):
        path.unlink()
    assert bool(index.boot_id()) == Path("/proc/sys/kernel/random/boot_id").is_file()
    for boot, count, read_so_far in (("this", 4, 1), ("another", 3, 2), ("another", 3, 2)):
        if boot == "another":
            monkeypatch.setattr(index, "boot_id", lambda: "another")
        with opened(where) as store:
            assert store.usage().entries == count
        assert len(scans) == read_so_far


def test_a_database_that_fails_at_any_statement_costs_no_entry(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = at = 0

    class Failing(sqlite3.Connection):
        def execute(self, *args: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(*args)

        def executemany(self, *args: Any) -> Any:
            self.execute("SELECT 1")
            return super().executemany(*args)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Failing))
    while count >= at:
        count, at = 0, at + 1
        with opened(where, 3 * UNIT) as store:
            fill(store, "abcd")
            assert present(store, "abcd") == "bcd"
            assert store.usage().nbytes == 3 * UNIT
        with opened(where, 3 * UNIT) as store:
            assert store.usage().nbytes == 3 * UNIT
        assert names(where) == entries(*"bcd")
        shutil.rmtree(where)
    assert at > 30


# The order of use.


def test_a_clock_that_was_set_back_does_not_make_new_entries_the_oldest(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(where, 4 * UNIT) as store:
        fill(store, "abcd")
    now = time.time_ns()
    monkeypatch.setattr(lockfile.time, "time_ns", lambda: now - 86_400 * 10**9)
    with opened(where, 4 * UNIT) as store:
        fill(store, "ef")
        assert present(store, "abcdef") == "cdef"
        assert read(store, "c") == content("c")
        fill(store, "gh")
        assert present(store, "abcdefgh") == "cfgh"
    shutil.rmtree(where / "index")
    with opened(where, 4 * UNIT) as store:
        fill(store, "i")
        assert present(store, "cfghi") == "cghi"


def test_hosts_whose_clocks_differ_use_one_folder_in_one_order(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset, real = 0, time.time_ns
    monkeypatch.setattr(lockfile.time, "time_ns", lambda: real() + offset)
    with opened(where, 4 * UNIT) as ahead, opened(where, 4 * UNIT) as behind:
        for key in "abcdefgh":
            offset = 0 if key in "bdfh" else 3600 * 10**9
            fill(behind if key in "bdfh" else ahead, key)
        assert present(ahead, "abcdefgh") == "efgh"
        offset = 0
        assert read(behind, "e") == content("e")
        fill(behind, "i")
        assert present(ahead, "efghi") == "eghi"


@pytest.mark.parametrize("date", [-(10**18), 1 << 62, (1 << 63) + 10])
@pytest.mark.parametrize("seen", ["when it is to go", "by a scan", "after a process died"])
def test_an_entry_with_a_date_that_no_use_gave_it_counts_as_the_oldest(
    where: Path, date: int, seen: str
) -> None:
    """As of a restored backup, say: before 1970, after 2116, or beyond what SQLite can hold."""
    with opened(where, 3 * UNIT) as store:
        fill(store, "abc")
        path = where / "pages" / "b.entry"
        os.utime(path, ns=(date, date))
        if path.stat().st_mtime_ns != date:
            pytest.skip("this file system has no such dates")
        if seen == "by a scan":
            shutil.rmtree(where / "index")
        elif seen == "after a process died":
            (where / "changing" / f"b.{'0' * 32}.tmp").touch()
        assert read(store, "a") == content("a")
        fill(store, "d")
        assert present(store, "abcd") == "acd"
        fill(store, "ef")
        assert present(store, "abcdef") == "def"


def test_an_open_store_ends_silently_with_the_interpreter(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the names in modules may be None; what is raised in ``__del__`` would be printed."""
    store: Any = opened(where)
    fill(store, "ab")
    reader: Any = store.reader("a")
    with monkeypatch.context() as ending:
        for module, name in [
            (index, "contextlib"),
            (index, "sqlite3"),
            *((m, "os") for m in (folder, lockfile, streams)),
        ]:
            ending.setattr(module, name, None)
        del store, reader
        gc.collect()
