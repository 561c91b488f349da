"""What all processes know of a folder's entries together: their sizes, and which was used least recently.

One table in SQLite, in the folder itself: the truth about what counts against the budget and what goes next.
Each row is an entry's stem, its bytes, and when it was last known to be used. The entries' files have what
is needed to make it anew (name, size, time of use), which is done where it is missing, damaged or of another
version, after a restart of the machine, and after other programs changed files; they also say by themselves
what they hold, so that whatever became of the index, nothing wrong is read.

It is only read and written with the folder's lock held. It has a rollback journal and not a write-ahead log,
which hosts that share a folder could not use together; and never waits for the device.

A file's modification time is when its entry was last used. A hit moves it without telling the index, but
only forward: the oldest entry that the index knows is looked at once more before it is evicted, and goes
back into the queue when it was used since.
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
"""Entries used since the index last saw them, which one eviction looks at in search of an older one."""
UNTOLD: Final = 1 << 32
"""Changes that one who died may have made without telling the lock file."""
AT_ONCE: Final = 512
"""Entries that are evicted with the lock held, where opening finds more than the budget allows."""

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
    """The index is not there, not of this version, does not hold together, or SQLite fails at it."""


class Row(NamedTuple):
    """One entry; ``used`` in nanoseconds."""

    stem: str
    nbytes: int
    used: int


class Index:
    """The index of a folder; in this process's memory where it cannot have a file there.

    All but ``locked`` and ``close`` is called within ``locked``.
    """

    def __init__(self, folder: Folder, budget: int | None) -> None:
        self.budget = budget
        self.evicted = self.dropped = self.swept = 0
        self._folder = folder
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, ...] = ()
        self._in_memory = self._all_known = self._warned = False
        self._changes: int | None = None
        """How many the index has seen, where the lock file has yet to know."""
        self.pending: list[int] = []
        """The bytes of each entry that somebody is writing."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        db, self._db = getattr(self, "_db", None), None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    @contextlib.contextmanager
    def locked(self, *, opening: bool = False) -> Iterator[None]:
        """The folder's lock, and the index in step with the files. Not to be nested."""
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
                # Names that other programs have changed stay unknown: who opens the folder looks at all.
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
        """Evict until there is room for ``nbytes`` beside all entries and those that are being written."""
        self._evict(nbytes + sum(self.pending))

    def trim(self) -> bool:
        """Evict what exceeds the budget, or part of it. False: that was all.

        First what is larger than the budget itself, which nobody reads: nothing else has to go for it.
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
        """Count an entry that is published next: who dies before leaves what tells the next one to look."""
        self._run(lambda db: _insert(db, Row(stem, nbytes, used)))

    def remove(self, stem: str) -> bool:
        """Delete an entry. False: it was not there."""
        withdrawn = self._folder.withdraw(stem)
        counted = self._run(lambda db: _delete(db, stem))
        self._folder.discard(withdrawn)
        if withdrawn is not None and not counted:  # of a damaged page SQLite may only not find it
            self._make_anew()
        return withdrawn is not None

    # What to evict.

    def _evict(self, room: int, most: int | None = None) -> None:
        if self.budget is None:
            return
        budget = self.budget

        def evict(db: sqlite3.Connection) -> list[str]:
            _, nbytes = _totals(db)
            # Others, whose budget is larger, may be writing more than ours: then all entries go, and no more.
            victims, used_since = self._oldest(db, min(nbytes, nbytes + room - budget), most)
            for row in used_since:
                db.execute("UPDATE entries SET used = ? WHERE stem = ?", [row.used, row.stem])
            return self._withdraw(db, victims)

        stored = self.totals()[1]
        if stored > budget and most is None and not self._warned:  # what opening finds is no surprise
            self._warned = True
            log.warning(
                "FileStore: %s holds %d bytes, and the budget is %d: another store writes to it with "
                "a larger budget, or without one; give all the same",
                self._folder.path, stored, budget,
            )  # fmt: skip
        if stored + room > budget:
            self._discard_evicted(self._run(evict))

    def _oldest(self, db: sqlite3.Connection, excess: int, most: int | None) -> tuple[list[Row], list[Row]]:
        """What to evict; and what was looked at and stays, with its time of use."""
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
        """0 where its file is gone, or is no entry's."""
        now = self._look(row.stem)
        if now is not None and now.nbytes != row.nbytes:
            raise IndexDamagedError(f"it says that {row.stem} has {row.nbytes} bytes")
        return 0 if now is None else now.used

    def _look(self, stem: str) -> Row | None:
        """What an entry's file says; None where it is gone, or is no entry's."""
        try:
            return _entry(stem, self._folder.stat(stem))
        except FileNotFoundError:
            return None

    def _withdraw(self, db: sqlite3.Connection, rows: Sequence[Row]) -> list[str]:
        """What the files are called until the index has forgotten them."""
        withdrawn = [self._folder.withdraw(row.stem) for row in rows]
        for row in rows:
            if not _delete(db, row.stem):
                raise IndexDamagedError(f"it does not have the entry {row.stem}")
        return [name for name in withdrawn if name is not None]

    def _discard_evicted(self, withdrawn: Sequence[str]) -> None:
        for name in withdrawn:
            self._folder.discard(name)
        self.evicted += len(withdrawn)

    # In step with the files.

    def _usable(self, opening: bool) -> bool:
        """Whether there is an index; of who opens the folder, one since this start of this machine."""
        try:
            db = self._connected()
            if not 0 <= _changes(db) - self._folder.lock.changes < UNTOLD:
                return False
            return not opening or db.execute("SELECT boot FROM totals").fetchone() == (boot_id(),)
        except (IndexDamagedError, sqlite3.Error, UnicodeDecodeError):
            return False

    def _settle(self) -> None:
        """Look again at the entries of those who died before the index was in order."""
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
        """Note what is being written; names and stems of what those who died left behind."""
        dead = {}
        self.pending = []
        for name, stem, nbytes in self._folder.changing():
            if nbytes is None:
                dead[name] = stem
            else:
                self.pending.append(nbytes)
        return dead

    def _make_anew(self) -> None:
        """The index, of what the files say; what is no entry is cleared away."""
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
        # What others changed meanwhile is not known, and what was cleared away looks the same.
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
        """``work`` in one transaction; once more on an index made anew where it does not hold together."""
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
            # A damaged name, which is no text, is quoted in an error: Python cannot decode that.
            if isinstance(error, (sqlite3.Error, UnicodeDecodeError)):
                raise IndexDamagedError(str(error)) from error
            raise
        self._changes = changes
        return result

    def _connected(self) -> sqlite3.Connection:
        """The connection; a new one in a forked child, and where another process has made the index anew."""
        file = self._identity()
        if self._db is None or file != self._file:
            self.close()
            path = self._folder.index_path(NAME)
            if path is None:
                raise IndexDamagedError("its folder is not this user's alone")
            self._db, self._file = _checked(_connect(path)), file
        return self._db

    def _identity(self) -> tuple[int, ...]:
        """What a connection is good for: this process, and this file."""
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
                _remove(path)  # with its journal, which a database of its name would take for its own
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
    """The same, if it is an index of this version."""
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
    """A new database. Who dies on the way leaves a file that nobody takes for one."""
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
    _delete(db, row.stem)  # a row without a file, where another program has removed that
    db.execute("INSERT INTO entries VALUES (?, ?, ?)", row)


def _delete(db: sqlite3.Connection, stem: str) -> bool:
    return db.execute("DELETE FROM entries WHERE stem = ?", [stem]).rowcount == 1


def _row(columns: tuple[object, ...]) -> Row:
    """Of a row of the table. Its stem names a file that is removed: it must be a valid one."""
    stem, nbytes, used = columns
    if type(nbytes) is int and type(used) is int and isinstance(stem, str) and is_stem(stem):
        return Row(stem, nbytes, used)
    raise IndexDamagedError(f"it has the entry {stem!r}, {nbytes!r}, {used!r}")


def _entry(stem: str, status: os.stat_result) -> Row | None:
    """Of an entry's file; None where it is none, or has not even the size of one."""
    nbytes = status.st_size - MANIFEST_BYTES
    return Row(stem, nbytes, _used(status)) if stat.S_ISREG(status.st_mode) and nbytes >= 0 else None


def _used(status: os.stat_result) -> int:
    """When the entry was last used; of a date that no use has given it nothing is known: it is the oldest."""
    return status.st_mtime_ns if 0 <= status.st_mtime_ns < LAST_TIME else 0


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-journal")):
        name.unlink(missing_ok=True)


def boot_id() -> str:
    """Which start of which machine this is: files that were not written to the device are of the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{(time.time() - time.monotonic()) // 10:.0f}"
