"""What all processes know of a folder's entries together: their sizes, and which was used least recently.

A table in SQLite, in the folder itself; each row is an entry's stem, its bytes, and when it was last known to
be used. Only the files say what is stored: the index can be made anew from them at any time, and is where
it does not agree with the lock file's count of changes, or is damaged, of another version, or not there.

It is only read and written with the folder's lock held. It has a rollback journal and not a write-ahead log,
which hosts that share a folder could not use together; and never waits for the device: after a crash of the
machine it is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kvcache.stores.folder import Folder
from kvcache.stores.manifest import is_stem

__all__ = ["Index", "IndexDamagedError", "Row", "State", "boot_id"]

VERSION: Final = 1
NAME: Final = "entries.sqlite"
_SCHEMA: Final = (
    "CREATE TABLE entries (stem TEXT PRIMARY KEY, nbytes INTEGER, used INTEGER, mark INTEGER) WITHOUT ROWID",
    "CREATE TABLE state (record TEXT, mark INTEGER)",
    "CREATE INDEX by_use ON entries (used, stem)",
)
_ERRNO: Final = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY,
    sqlite3.SQLITE_PROTOCOL: errno.ENOLCK,
    sqlite3.SQLITE_CANTOPEN: errno.EIO,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
    sqlite3.SQLITE_INTERRUPT: errno.EINTR,
}
"""SQLite's codes that say nothing of what the file holds."""


class IndexDamagedError(Exception):
    """The index is not there, not of this version, or does not hold together."""


class Row(NamedTuple):
    """One entry; ``used`` in nanoseconds."""

    stem: str
    nbytes: int
    used: int

    @classmethod
    def of(cls, found: tuple[object, ...]) -> Row:
        """Of a row of the table. Its stem names a file that is removed: it must be a valid one."""
        stem, nbytes, used, mark = found
        if type(nbytes) is int and type(used) is int and isinstance(stem, str) and is_stem(stem):
            row = cls(stem, nbytes, used)
            if row.marked == found:
                return row
        raise IndexDamagedError(f"it has the entry {stem!r}, {nbytes!r}, {used!r}, {mark!r}")

    @property
    def marked(self) -> tuple[object, ...]:
        """As a row of the table."""
        return *self, _mark(f"{self.stem} {self.nbytes} {self.used}")


@dataclass(frozen=True, slots=True)
class State:
    """What the index as a whole is of."""

    changes: int
    """The lock file's count, up to which it knows all changes."""
    boot: str
    """Since which start of which machine it has been written."""
    names: int
    """``Folder.changed``, when all changes of names were known: those of other programs are found by it."""
    entries: int
    nbytes: int

    @classmethod
    def of(cls, found: tuple[object, ...] | None) -> State:
        """Of the table's row."""
        record, mark = found or ("", None)
        if not isinstance(record, str) or mark != _mark(record):
            raise IndexDamagedError(f"its state is {found!r}")
        boot, *numbers = record.split()
        changes, names, entries, nbytes = map(int, numbers)
        return cls(changes, boot, names, entries, nbytes)

    @property
    def marked(self) -> tuple[object, ...]:
        """As the table's row."""
        record = f"{self.boot} {self.changes} {self.names} {self.entries} {self.nbytes}"
        return record, _mark(record)


class Index:
    """The index of a folder; in this process's memory where it cannot have a file there.

    Raises IndexDamagedError where it is to be made anew by ``replace``, OSError where the system fails.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._db: sqlite3.Connection | None = None
        self._of: tuple[int, ...] = ()
        self._last: State | None = None
        self._in_memory = False

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        db, self._db, self._last = getattr(self, "_db", None), None, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):
                db.close()

    def state(self, changes: int) -> State:
        """As it is now, whoever has written it; ``changes``: the lock file's count.

        To be asked first, each time that the lock is taken.
        """
        with _translated():
            db = self._connected()
            if self._last is None or self._last.changes != changes:
                self._last = State.of(db.execute("SELECT * FROM state").fetchone())
        return self._last

    def by_use(self) -> Generator[Row]:
        """All entries, the least recently used first. To be closed before anything is written."""
        with _translated(), contextlib.closing(self._open_db().cursor()) as cursor:
            yield from map(Row.of, cursor.execute("SELECT * FROM entries ORDER BY used, stem"))

    def larger(self, nbytes: int) -> list[str]:
        """The stems of entries of more bytes."""
        with _translated():
            found = self._open_db().execute(
                "SELECT * FROM entries WHERE nbytes > ?", [min(nbytes, 2**63 - 1)]
            )
            return [Row.of(row).stem for row in found]

    def write(
        self, before: State, changes: int, names: int, gone: Mapping[str, bool], there: Sequence[Row]
    ) -> State:
        """All of it, or nothing: these entries are gone and those are there, as of this count of changes.

        ``names`` as State has it. ``gone`` says of each whether it was there, and so must have a row: where
        a page of the index is damaged SQLite may only not find it.
        """
        with _translated(), self._transaction() as db:
            entries, nbytes = before.entries, before.nbytes
            for stem in {*gone, *(row.stem for row in there)}:
                if (found := _taken(db, stem)) is not None:
                    entries, nbytes = entries - 1, nbytes - found.nbytes
                elif gone.get(stem):
                    raise IndexDamagedError(f"it does not have the entry {stem}")
            for row in there:
                db.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", row.marked)
                entries, nbytes = entries + 1, nbytes + row.nbytes
            state = State(changes, before.boot, names, entries, nbytes)
            db.execute("UPDATE state SET record = ?, mark = ?", state.marked)
        self._last = state
        return state

    def replace(self, changes: int, names: int, rows: list[Row]) -> State:
        """Make it anew, of these entries, which are sorted on the way."""
        rows.sort()
        state = State(changes, boot_id(), names, len(rows), sum(row.nbytes for row in rows))
        self.close()
        path = self._path()
        if path is not None:
            try:
                with _translated():
                    self._replace_file(path, state, rows)
                    self._connected()
                return state
            except (OSError, IndexDamagedError):  # no room, no locks: what is in memory is as right
                self.close()
        self._in_memory = True
        self._db, self._of = _made(":memory:", state, rows), self._now_of()
        return state

    # The database.

    def _connected(self) -> sqlite3.Connection:
        """The connection; a new one in a forked child, and where another process has made the index anew."""
        of = self._now_of()
        if self._db is None or of != self._of:
            self.close()
            path = self._path()
            if path is None:
                raise IndexDamagedError("it was in the memory of another process")
            self._db, self._of = self._opened(path), of
        return self._db

    def _open_db(self) -> sqlite3.Connection:
        if self._db is None:
            raise IndexDamagedError("it was closed")
        return self._db

    def _now_of(self) -> tuple[int, ...]:
        """What a connection is good for: this process, and this file."""
        if self._in_memory:
            return (os.getpid(),)
        try:
            found = self._folder.stat_index(NAME)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise IndexDamagedError("it is not there") from error
        if not stat.S_ISREG(found.st_mode):
            raise IndexDamagedError("it is no file")
        return os.getpid(), found.st_dev, found.st_ino

    def _path(self) -> Path | None:
        return None if self._in_memory else self._folder.index_path(NAME)

    def _opened(self, path: Path) -> sqlite3.Connection:
        try:
            with _translated():
                return _checked(_connect(path))
        except OSError as error:  # the system has no locks for it, say: it is not asked again
            self._in_memory = True
            raise IndexDamagedError(str(error)) from error

    def _replace_file(self, path: Path, state: State, rows: Sequence[Row]) -> None:
        anew = path.with_suffix(".new")
        _remove(anew)
        os.close(os.open(anew, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _made(os.fspath(anew), state, rows).close()
        _remove(path)  # with its journal, which a database of its name would take for its own
        anew.rename(path)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._open_db()
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except BaseException:
            self.close()
            raise


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """SQLite's errors as the system's, or as damage."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # A damaged name, which is no text, is quoted in an error: Python cannot decode that.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # Python's own have none
        number = None if code == sqlite3.SQLITE_IOERR_SHORT_READ else _ERRNO.get(code & 0xFF)
        if number is None:
            raise IndexDamagedError(str(error)) from error
        raise OSError(number, f"its index: {error}") from error


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
    except BaseException:
        db.close()
        raise
    return db


def _taken(db: sqlite3.Connection, stem: str) -> Row | None:
    """Remove an entry's row; what it was, None where there was none."""
    found = db.execute("SELECT * FROM entries WHERE stem = ?", [stem]).fetchone()
    if found is None:
        return None
    db.execute("DELETE FROM entries WHERE stem = ?", [stem])
    return Row.of(found)


def _made(path: str, state: State, rows: Sequence[Row]) -> sqlite3.Connection:
    """A new database. Who dies on the way leaves a file that nobody takes for one."""
    db = _connect(path)
    try:
        if path != ":memory:":
            db.execute("PRAGMA journal_mode = OFF")
        db.execute("BEGIN")
        db.execute(f"PRAGMA user_version = {VERSION}")
        entries, table, order = _SCHEMA
        db.execute(entries)
        db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", (row.marked for row in rows))
        db.execute(order)
        db.execute(table)
        db.execute("INSERT INTO state VALUES (?, ?)", state.marked)
        db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-journal")):
        name.unlink(missing_ok=True)


def _mark(text: str) -> int:
    """What is stored beside a row: SQLite itself does not notice a flipped bit."""
    return zlib.crc32(text.encode("utf-8", "replace"))


def boot_id() -> str:
    """Which start of which machine this is: files that were not written to the device are of the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{(time.time() - time.monotonic()) // 10:.0f}"
