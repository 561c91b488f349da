"""Snapshots in one SQLite file."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from kvcache.stores import (
    Buffer,
    SnapshotCorruptError,
    Stat,
    StoreClosedError,
    StoreFullError,
    StoreSpec,
    StoreUnavailableError,
    StoreValueError,
    WritableBuffer,
    as_bytes,
    as_writable,
    check_budget,
    check_key,
    hookimpl,
)
from ml import Availability

TABLE = """create table if not exists entries
    (key text primary key, nbytes int, used real, digest blob, data blob)"""


class SqliteStore:
    def __init__(self, path: str, budget: int | str | None = None) -> None:
        self.budget = check_budget(budget)
        self._lock = threading.Lock()
        self._clock = 0.0
        self._open = True
        try:
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("pragma journal_mode = wal")  # a put is not waited for on the device
            self._db.execute("pragma synchronous = normal")
            self._db.execute(TABLE)
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"SqliteStore: {path}: {error}") from error
        with self._call("SqliteStore") as db:
            self._make_room(db, 0)

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        check_key(key)
        data = b"".join(as_bytes(part) for part in parts)
        with self._call("put") as db:
            if db.execute("select 1 from entries where key = ?", [key]).fetchone():
                return False
            if self.budget is not None and len(data) > self.budget:
                raise StoreFullError(f"put: {len(data)} bytes; the budget is {self.budget}")
            self._make_room(db, len(data))
            row = [key, len(data), self._now(), hashlib.blake2b(data).digest(), data]
            db.execute("insert into entries values (?, ?, ?, ?, ?)", row)
            return True

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        found = [check_key(key) for key in keys]
        with self._call("stat") as db:
            query = "select nbytes, used from entries where key = ?"
            rows = [db.execute(query, [key]).fetchone() for key in found]
        return [None if row is None else Stat(*row) for row in rows]

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        check_key(key)
        view = as_writable(buffer, "get_into")
        with self._call("get_into") as db:
            row = db.execute("select digest, data from entries where key = ?", [key]).fetchone()
            if row is None:
                return False
            digest, data = row
            sound = hashlib.blake2b(data).digest() == digest
            if sound and len(view) != len(data):
                raise StoreValueError(f"get_into: a buffer of {len(view)} bytes; {key} has {len(data)}")
            if sound:
                view[:] = data
                self._touch(db, key)
            else:
                db.execute("delete from entries where key = ?", [key])
        if not sound:  # said after the transaction, so that the entry is gone
            raise SnapshotCorruptError(f"get_into: the digest of {key} does not hold; it was dropped")
        return True

    def prefix(self, keys: Sequence[str]) -> int:
        found = self.stat(keys)
        count = found.index(None) if None in found else len(found)
        with self._call("prefix") as db:
            for key in reversed(keys[:count]):
                self._touch(db, key)
        return count

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._call("delete") as db:
            return db.execute("delete from entries where key = ?", [key]).rowcount > 0

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._db.close()

    @contextlib.contextmanager
    def _call(self, op: str) -> Iterator[sqlite3.Connection]:
        """One transaction: all of a call happens, or nothing of it."""
        with self._lock:
            if not self._open:
                raise StoreClosedError(f"{op}: this store is closed")
            try:
                with self._db:
                    yield self._db
            except sqlite3.Error as error:
                raise StoreUnavailableError(f"{op}: {error}") from error

    def _now(self) -> float:
        self._clock = max(time.time(), self._clock + 1e-6)
        return self._clock

    def _touch(self, db: sqlite3.Connection, key: str) -> None:
        db.execute("update entries set used = ? where key = ?", [self._now(), key])

    def _make_room(self, db: sqlite3.Connection, nbytes: int) -> None:
        if self.budget is None:
            return
        (total,) = db.execute("select coalesce(sum(nbytes), 0) from entries").fetchone()
        for key, size in db.execute("select key, nbytes from entries order by used").fetchall():
            if total + nbytes <= self.budget:
                return
            db.execute("delete from entries where key = ?", [key])
            total -= size


def open_sqlite(url: str | None = None, *, path: str | None = None, budget: Any = None) -> SqliteStore:
    where = path if url is None else unquote(urlsplit(url).path)
    if not where:
        raise StoreValueError("open_store: give sqlite:///absolute/file or path=")
    return SqliteStore(where, budget)


@hookimpl
def kvcache_store() -> StoreSpec:
    return StoreSpec(
        name="sqlite",
        install_hint="pip install kvcache-store-sqlite",
        probe=lambda: Availability(True, version=sqlite3.sqlite_version),
        open=open_sqlite,
    )
