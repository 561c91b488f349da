"""The index of a folder's entries, shared by all processes: sizes, and times of last use.

It is one SQLite table in the folder itself, and decides what counts against the budget and what is evicted
next. Each row has an entry's stem, its bytes, and its last known time of use. The entries' files contain
everything needed to rebuild the index (name, size, time of use). It is rebuilt if it is missing, damaged or
of another version, after a restart of the machine, and after other programs have changed files. The files
also describe their own content, so that no wrong data is read whatever happens to the index.

The index is read and written only with the folder's lock held. It has a rollback journal instead of a
write-ahead log, which hosts sharing a folder could not use together, and never waits for the device.

A file's modification time is its entry's time of last use. A hit updates it without the index, but only
forward: before the oldest entry in the index is evicted, its file is checked once more, and the entry goes
back into the queue if it has been used since.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kvcache.stores.errors import is_read_only
from kvcache.stores.folder import Folder
from kvcache.stores.lockfile import LAST_TIME
from kvcache.stores.manifest import MANIFEST_BYTES, is_stem

__all__ = ["Index"]

VERSION: Final = 3
NAME: Final = "entries.sqlite"
LOOKED: Final = 1024
"""How many recently used entries one eviction checks in search of an older one."""
UNTOLD: Final = 1 << 32
"""How many changes a process that died may have made without recording them in the lock file."""
AT_ONCE: Final = 512
"""How many entries are evicted per hold of the lock if opening finds more than the budget allows."""

_SCHEMA: Final = (
    "CREATE TABLE entries (stem TEXT PRIMARY KEY, nbytes INTEGER, used INTEGER) WITHOUT ROWID",
    "CREATE TABLE totals (entries INTEGER, nbytes INTEGER, complement INTEGER, changes INTEGER, boot TEXT)",
    "CREATE INDEX by_use ON entries (used, stem, nbytes)",
    """CREATE TRIGGER came AFTER INSERT ON entries BEGIN
    UPDATE totals SET
        entries = entries + 1, nbytes = nbytes + new.nbytes, complement = complement - 1 - new.nbytes,
        changes = changes + 1; END""",
    """CREATE TRIGGER went AFTER DELETE ON entries BEGIN
    UPDATE totals SET
        entries = entries - 1, nbytes = nbytes - old.nbytes, complement = complement + 1 + old.nbytes,
        changes = changes + 1; END""",
)
"""SQLite does not notice a flipped bit: the first numbers of ``totals`` add up to 0, and each row is compared
with its entry's file before that goes. The lock file knows ``changes``, which begin at a random number: a
copy from an earlier time has seen fewer, and another folder's index has seen others."""

log = logging.getLogger("kvcache")

T = TypeVar("T")


class IndexDamagedError(Exception):
    """The index is missing, of another version or inconsistent, or SQLite fails to read it."""


class Row(NamedTuple):
    """One entry; ``used`` in nanoseconds."""

    stem: str
    nbytes: int
    used: int


class Index:
    """The index of a folder; kept in this process's memory if it cannot have a file there.

    All methods except ``locked`` and ``close`` must be called within ``locked``.
    """

    def __init__(self, folder: Folder, budget: int | None) -> None:
        self.budget = budget
        self.evicted = self.dropped = self.swept = 0
        self._folder = folder
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, ...] = ()
        self._in_memory = self._all_known = self._warned = False
        self._changes: int | None = None
        """How many changes the index has seen, if the lock file does not know yet."""
        self.pending: list[int] = []
        """The bytes of each entry that somebody is writing."""

    _ignoring = contextlib.suppress(sqlite3.Error)
    """Of the class: when the interpreter ends, the module's own names are None already."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        db, self._db = getattr(self, "_db", None), None
        if db is not None:
            with self._ignoring:
                db.close()

    @contextlib.contextmanager
    def locked(self, *, opening: bool = False) -> Iterator[None]:
        """Hold the folder's lock, with the index consistent with the files. Must not be nested."""
        lock, folder = self._folder.lock, self._folder
        with lock.held():
            known = lock.known
            self._all_known = known == folder.changed
            try:
                in_step = known and not self._in_memory and (self._all_known or not opening)
                if in_step and self._usable(opening):
                    self._settle()
                else:
                    self._make_anew()
                yield
            finally:
                if self._changes is not None:
                    with contextlib.suppress(OSError):
                        lock.changes, self._changes = self._changes, None
                # Changes by other programs stay unknown: the next process that opens the folder checks
                # everything.
                if self._in_memory or self._all_known:
                    with contextlib.suppress(OSError):
                        lock.known = 0 if self._in_memory else folder.changed

    def totals(self) -> tuple[int, int]:
        """How many entries there are, and their bytes."""
        with contextlib.suppress(IndexDamagedError, sqlite3.Error):
            if self._db is not None:
                return _totals(self._db)
        self._make_anew()
        assert self._db is not None
        return _totals(self._db)

    def make_room(self, nbytes: int = 0) -> None:
        """Evict until there is room for ``nbytes`` in addition to all entries, including those being
        written.
        """
        self._evict(nbytes + sum(self.pending))

    def trim(self) -> bool:
        """Evict some of what exceeds the budget. False if nothing is left to evict.

        Entries larger than the budget itself, which are never read, go first.
        """
        if self.budget is None or self.totals()[1] <= self.budget:
            return False
        large = "SELECT stem, nbytes, used FROM entries WHERE nbytes > ? LIMIT ?"
        limits = min(self.budget, 2**63 - 1), AT_ONCE

        def evict_large(db: sqlite3.Connection) -> tuple[int, list[str]]:
            victims = [_row(row) for row in db.execute(large, limits)]
            return len(victims), self._withdraw(db, victims)

        count, withdrawn = self._run(evict_large)
        self._discard_evicted(withdrawn)
        if not count:
            self._evict(0, AT_ONCE)
        return True

    def add(self, stem: str, nbytes: int, used: int) -> None:
        """Count an entry that is about to be published. If this process dies first, the file it leaves tells
        the next one to check.
        """
        self._run(lambda db: _insert(db, Row(stem, nbytes, used)))

    def remove(self, stem: str) -> bool:
        """Delete an entry. False: it was not there."""
        withdrawn = self._folder.withdraw(stem)
        counted = self._run(lambda db: _delete(db, stem))
        self._folder.discard(withdrawn)
        if withdrawn is not None and not counted:  # a damaged page may only make SQLite miss it
            self._make_anew()
        return withdrawn is not None

    # What to evict.

    def _evict(self, room: int, most: int | None = None) -> None:
        if self.budget is None:
            return
        budget = self.budget

        def evict(db: sqlite3.Connection) -> list[str]:
            _, nbytes = _totals(db)
            # Writers with a larger budget may exceed ours: then all entries are evicted, and nothing else.
            victims, used_since = self._oldest(db, min(nbytes, nbytes + room - budget), most)
            for row in used_since:
                db.execute("UPDATE entries SET used = ? WHERE stem = ?", [row.used, row.stem])
            return self._withdraw(db, victims)

        stored = self.totals()[1]
        if stored > budget and most is None and not self._warned:  # an excess found at opening is expected
            self._warned = True
            log.warning(
                "FileStore: %s holds %d bytes, but the budget is %d: another store writes to it with a "
                "larger budget or none; set the same budget for all",
                self._folder.path, stored, budget,
            )  # fmt: skip
        if stored + room > budget:
            self._discard_evicted(self._run(evict))

    def _oldest(self, db: sqlite3.Connection, excess: int, most: int | None) -> tuple[list[Row], list[Row]]:
        """The entries to evict, and those that were checked and stay, with their times of use."""
        victims: list[Row] = []
        later: list[tuple[int, str, int]] = []  # a heap: when it was used, stem, bytes
        with contextlib.closing(db.cursor()) as cursor:
            rows = map(_row, cursor.execute("SELECT stem, nbytes, used FROM entries ORDER BY used, stem"))
            row = next(rows, None)
            while excess > 0 and (most is None or len(victims) < most) and (row or later):
                if later and (row is None or len(later) > LOOKED or later[0][0] <= row.used):
                    used, stem, nbytes = heapq.heappop(later)
                    victim = Row(stem, nbytes, used)
                else:
                    assert row is not None
                    victim, row = row, next(rows, None)
                    used = self._last_used(victim)
                    if used > victim.used:
                        heapq.heappush(later, (used, victim.stem, victim.nbytes))
                        continue
                victims.append(victim)
                excess -= victim.nbytes
        if excess > 0 and (most is None or len(victims) < most):
            raise IndexDamagedError(f"it has {len(victims)} entries, and they are too small")
        return victims, [Row(stem, nbytes, used) for used, stem, nbytes in later]

    def _last_used(self, row: Row) -> int:
        """The time of last use; 0 if the file is gone or not an entry."""
        now = self._look(row.stem)
        if now is not None and now.nbytes != row.nbytes:
            raise IndexDamagedError(f"it says that {row.stem} has {row.nbytes} bytes")
        return 0 if now is None else now.used

    def _look(self, stem: str) -> Row | None:
        """The row according to an entry's file; None if it is gone or not an entry."""
        try:
            return _entry(stem, self._folder.stat(stem))
        except FileNotFoundError:
            return None

    def _withdraw(self, db: sqlite3.Connection, rows: Sequence[Row]) -> list[str]:
        """Withdraw the entries' files; returns their names until the index has removed them."""
        withdrawn = [self._folder.withdraw(row.stem) for row in rows]
        for row in rows:
            if not _delete(db, row.stem):
                raise IndexDamagedError(f"it does not have the entry {row.stem}")
        return [name for name in withdrawn if name is not None]

    def _discard_evicted(self, withdrawn: Sequence[str]) -> None:
        for name in withdrawn:
            self._folder.discard(name)
        self.evicted += len(withdrawn)

    # Consistency with the files.

    def _usable(self, opening: bool) -> bool:
        """Whether there is a usable index; when the folder is being opened, one from the current boot."""
        try:
            db = self._connected()
            if not 0 <= _changes(db) - self._folder.lock.changes < UNTOLD:
                return False
            return not opening or db.execute("SELECT boot FROM totals").fetchone() == (boot_id(),)
        except (IndexDamagedError, sqlite3.Error, UnicodeDecodeError):
            return False

    def _settle(self) -> None:
        """Check the entries of writers that died before they updated the index."""
        dead = self._look_for_writers()
        if not dead:
            return

        def look_again(db: sqlite3.Connection) -> None:
            for stem in {*dead.values()}:
                row = self._look(stem)
                if row is None:
                    _delete(db, stem)
                else:
                    _insert(db, row)

        self._run(look_again)
        self.swept += sum(map(self._folder.discard, dead))

    def _look_for_writers(self) -> dict[str, str]:
        """Record what is being written; returns names and stems of files that dead writers left behind."""
        dead = {}
        self.pending = []
        for name, stem, nbytes in self._folder.changing():
            if nbytes is None:
                dead[name] = stem
            else:
                self.pending.append(nbytes)
        return dead

    def _make_anew(self) -> None:
        """Rebuild the index from the files; anything that is not an entry is removed."""
        self.close()
        folder = self._folder
        self.swept += sum(map(folder.discard, self._look_for_writers()))
        before = folder.changed
        rows = []
        for stem, status in folder.entries():
            row = _entry(stem, status)
            if row is not None:
                rows.append(row)
            else:
                self._clear(stem)
        rows.sort()
        folder.lock.used_until(max((row.used for row in rows), default=0))
        changes = secrets.randbits(62)
        self._db = self._made_anew(rows, changes)
        self._changes = changes
        # Changes by others in the meantime are unknown, and look the same as our own removals.
        self._all_known = folder.changed == before
        with contextlib.suppress(OSError):
            folder.lock.known = 0 if self._in_memory else before

    def _clear(self, stem: str) -> None:
        try:
            self._folder.discard(self._folder.withdraw(stem))
            self.dropped += 1
        except OSError as error:
            if not is_read_only(error):
                raise

    # The database.

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` in one transaction, and again on a rebuilt index if the index is inconsistent."""
        try:
            return self._transact(work)
        except IndexDamagedError:
            self._make_anew()
            return self._transact(work)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        db = self._db
        if db is None:
            raise IndexDamagedError("it was closed")
        try:
            db.execute("BEGIN")
            result = work(db)
            changes = _changes(db)
            db.execute("COMMIT")
        except BaseException as error:
            self.close()
            # An error that quotes a damaged, non-text name cannot be decoded by Python.
            if isinstance(error, (sqlite3.Error, UnicodeDecodeError)):
                raise IndexDamagedError(str(error)) from error
            raise
        self._changes = changes
        return result

    def _connected(self) -> sqlite3.Connection:
        """The connection; a new one in a forked child, and after another process has rebuilt the index."""
        file = self._identity()
        if self._db is None or file != self._file:
            self.close()
            path = self._folder.index_path(NAME)
            if path is None:
                raise IndexDamagedError("its folder is not this user's alone")
            self._db, self._file = _checked(_connect(path)), file
        return self._db

    def _identity(self) -> tuple[int, ...]:
        """What a connection is valid for: this process and this file."""
        try:
            status = self._folder.stat_index(NAME)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise IndexDamagedError("it is not there") from error
        if not stat.S_ISREG(status.st_mode):
            raise IndexDamagedError("it is no file")
        return os.getpid(), status.st_dev, status.st_ino

    def _made_anew(self, rows: Sequence[Row], changes: int) -> sqlite3.Connection:
        path = None if self._in_memory else self._folder.index_path(NAME)
        if path is not None:
            try:
                anew = path.with_suffix(".new")
                _remove(anew)
                os.close(os.open(anew, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                _made(os.fspath(anew), rows, changes).close()
                _remove(path)  # together with its journal, which a new database of the same name would use
                anew.rename(path)
                return self._connected()
            except (OSError, sqlite3.Error, IndexDamagedError):  # no room, no locks
                self.close()
        self._in_memory = True
        return _made(":memory:", rows, changes)


def _connect(path: str | Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("trusted_schema = OFF", "journal_mode = PERSIST", "synchronous = OFF"):
            db.execute(f"PRAGMA {pragma}")
    except BaseException:
        db.close()
        raise
    return db


def _checked(db: sqlite3.Connection) -> sqlite3.Connection:
    """``db``, if it is an index of this version."""
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        schema = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if version != VERSION or schema != set(_SCHEMA):
            raise IndexDamagedError(f"it is of version {version}, and this one is {VERSION}")
        _totals(db)
    except BaseException:
        db.close()
        raise
    return db


def _made(path: str, rows: Sequence[Row], changes: int) -> sqlite3.Connection:
    """A new database. If the process dies while making it, the remaining file is not mistaken for one."""
    db = _connect(path)
    try:
        if path != ":memory:":
            db.execute("PRAGMA journal_mode = OFF")
        db.execute("BEGIN")
        db.execute(f"PRAGMA user_version = {VERSION}")
        entries, totals, *rest = _SCHEMA
        db.execute(entries)
        db.execute(totals)
        db.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows)
        nbytes = sum(row.nbytes for row in rows)
        totals_row = len(rows), nbytes, -len(rows) - nbytes, changes, boot_id()
        db.execute("INSERT INTO totals VALUES (?, ?, ?, ?, ?)", totals_row)
        for sql in rest:
            db.execute(sql)
        db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _totals(db: sqlite3.Connection) -> tuple[int, int]:
    rows = db.execute("SELECT entries, nbytes, complement FROM totals").fetchall()
    if len(rows) != 1 or not all(type(number) is int for number in rows[0]) or sum(rows[0]):
        raise IndexDamagedError(f"its totals are {rows}")
    entries, nbytes, _ = rows[0]
    return entries, nbytes


def _changes(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT changes FROM totals").fetchone()
    if row is None or type(row[0]) is not int or row[0] < 0:
        raise IndexDamagedError(f"it has seen {row} changes")
    return int(row[0])


def _insert(db: sqlite3.Connection, row: Row) -> None:
    _delete(db, row.stem)  # a row without a file, which another program has removed
    db.execute("INSERT INTO entries VALUES (?, ?, ?)", row)


def _delete(db: sqlite3.Connection, stem: str) -> bool:
    return db.execute("DELETE FROM entries WHERE stem = ?", [stem]).rowcount == 1


def _row(columns: tuple[object, ...]) -> Row:
    """Parse a row of the table. Its stem must be valid, since it names a file that may be removed."""
    stem, nbytes, used = columns
    if type(nbytes) is int and type(used) is int and isinstance(stem, str) and is_stem(stem):
        return Row(stem, nbytes, used)
    raise IndexDamagedError(f"it has the entry {stem!r}, {nbytes!r}, {used!r}")


def _entry(stem: str, status: os.stat_result) -> Row | None:
    """The row for an entry's file; None if it is not an entry, or too small to be one."""
    nbytes = status.st_size - MANIFEST_BYTES
    return Row(stem, nbytes, _used(status)) if stat.S_ISREG(status.st_mode) and nbytes >= 0 else None


def _used(status: os.stat_result) -> int:
    """When the entry was last used; an entry with an implausible date counts as the oldest."""
    return status.st_mtime_ns if 0 <= status.st_mtime_ns < LAST_TIME else 0


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-journal")):
        name.unlink(missing_ok=True)


def boot_id() -> str:
    """Identifies the current boot of this machine: data that never reached the device is lost with it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{(time.time() - time.monotonic()) // 10:.0f}"
