"""A store's lock between processes, and what those who hold it tell the next one.

::

    kvcache.lock     16 bytes   "kvcache.store/1\\n"
                      8 bytes   how often the entries have changed
                      8 bytes   the latest time of use that was given out, in nanoseconds
                      8 bytes   the number of a change, and
                      4 bytes   how many bytes follow: the stems of the entries that it changes, a line each

Numbers are little-endian. The lock is ``flock``: the system lets go of it when a process dies.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from kvcache.stores.errors import StoreUnavailableError, is_read_only
from kvcache.stores.manifest import is_stem

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

__all__ = ["LAST_TIME", "LOCK", "SAFE", "STORE_FORMAT", "HeldLock", "LockFile"]

STORE_FORMAT: Final = b"kvcache.store/1\n"
LOCK: Final = "kvcache.lock"
SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags for every file that is opened: no link is followed, no pipe waited for."""

LAST_TIME: Final = 1 << 62
"""Nanoseconds; the year 2116. A later time is damage."""

_CHANGES: Final = len(STORE_FORMAT)
_LATEST: Final = _CHANGES + 8
_INTENT: Final = _LATEST + 8
_LONGEST = 1 << 26
"""Bytes of stems; a longer list is none of ours."""


class HeldLock:
    """The lock, held."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def changes(self) -> int:
        """How often the entries have changed."""
        return _number(self._fd, _CHANGES)

    def announce(self, stems: Iterable[str]) -> int:
        """To be called before files of these entries are changed, so that who dies on the way has said so.

        Returns the number of the change.
        """
        number = (self.changes + 1) % 2**64
        lines = "".join(f"{stem}\n" for stem in stems).encode("ascii")
        record = number.to_bytes(8, "little") + len(lines).to_bytes(4, "little") + lines
        # Only then the count: a record that was cut short is of a change that never began.
        try:
            _write(self._fd, record, _INTENT)
        except OSError:  # the disk is full: who comes next looks at all entries
            _write(self._fd, bytes(12), _INTENT)
        _write(self._fd, number.to_bytes(8, "little"), _CHANGES)
        return number

    def announced(self) -> list[str] | None:
        """What the latest change was of; None: whoever made it has not said so."""
        head = os.pread(self._fd, 12, _INTENT)
        length = int.from_bytes(head[8:], "little")
        if len(head) < 12 or int.from_bytes(head[:8], "little") != self.changes:
            return None
        if length > min(_LONGEST, os.fstat(self._fd).st_size):
            return None
        lines = os.pread(self._fd, length, _INTENT + 12)
        stems = lines.decode("ascii", "replace").splitlines()
        return stems if len(lines) == length and all(map(is_stem, stems)) else None


class LockFile:
    """The lock of the folder that is open as ``root``. ``writable`` is False where it may only be read.

    Raises StoreUnavailableError for a folder that holds something else or a store of another version.
    """

    def __init__(self, root: int, path: Path) -> None:
        if fcntl is None:
            raise StoreUnavailableError("FileStore: this system has no POSIX file locks (fcntl)")
        self._root, self._path = root, path
        self._mutex, self._timing = threading.Lock(), threading.Lock()
        self._latest = 0
        self.writable = True
        self._fd = self._claim()  # for times of use, which need no lock

    def close(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    @contextlib.contextmanager
    def held(self) -> Iterator[HeldLock]:
        """Keep all other processes and threads from changing entries. Not to be nested."""
        with self._mutex:
            # Opened anew each time: a lock belongs to the open file, which a fork would share.
            fd = os.open(LOCK, os.O_RDWR | SAFE, dir_fd=self._root)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                try:
                    yield HeldLock(fd)
                finally:
                    _unlock(fd)
            finally:
                with contextlib.suppress(OSError):  # as in _unlock
                    os.close(fd)

    def times(self, count: int = 1) -> range:
        """Times of use in nanoseconds, each later than all that any process was given.

        They go on from the latest one where a clock was set back, or is behind that of another host. Where
        the file may only be read, or cannot be, they are later than this object's own.
        """
        with self._timing:
            with contextlib.suppress(OSError):
                self._learn(_number(self._fd, _LATEST))
            first = max(time.time_ns(), self._latest + 1)
            self._note(first + count - 1)
        return range(first, first + count)

    def used_until(self, latest: int) -> None:
        """Entries were used until then, as their files say: what is used from now on was used later."""
        with self._timing:
            before = self._latest
            self._learn(latest)
            if self._latest > before:
                self._note(self._latest)

    def _learn(self, latest: int) -> None:
        if self._latest < latest < LAST_TIME:
            self._latest = latest

    def _note(self, latest: int) -> None:
        self._latest = latest
        with contextlib.suppress(OSError):
            _write(self._fd, latest.to_bytes(8, "little"), _LATEST)

    # Opening.

    def _claim(self) -> int:
        """Make an empty folder a store; refuse one that is in use for something else.

        -1 where the folder is empty and stays so, as nothing may be made in it.
        """
        try:
            fd = self._open_or_make()
        except OSError as error:
            if not is_read_only(error):
                raise
            self.writable = False
            try:
                fd = os.open(LOCK, os.O_RDONLY | SAFE, dir_fd=self._root)
            except FileNotFoundError:
                return -1
        try:
            self._check_format(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _open_or_make(self) -> int:
        try:
            return os.open(LOCK, os.O_RDWR | SAFE, dir_fd=self._root)
        except FileNotFoundError:
            self._refuse_foreign_files()
            return os.open(LOCK, os.O_RDWR | os.O_CREAT | SAFE, 0o600, dir_fd=self._root)

    def _refuse_foreign_files(self) -> None:
        names = [name for name in os.listdir(self._root) if name != LOCK]  # noqa: PTH208
        if names and not os.access(LOCK, os.F_OK, dir_fd=self._root):
            raise StoreUnavailableError(
                f"FileStore: {self._path} is not a store and contains {sorted(names)[:3]}; give an "
                "empty folder"
            )

    def _check_format(self, fd: int) -> None:
        if self.writable:
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            found = os.pread(fd, _LATEST, 0)
            if not found:
                if self.writable:
                    _write(fd, STORE_FORMAT + bytes(_INTENT - _CHANGES), 0)
            elif not found.startswith(STORE_FORMAT):
                raise StoreUnavailableError(
                    f"FileStore: {self._path}/{LOCK} begins with {found[:16]!r}, not with {STORE_FORMAT!r}: "
                    "the folder is not a store, or has another version"
                )
        finally:
            if self.writable:
                _unlock(fd)


def _unlock(fd: int) -> None:
    """Before the file is closed, which is not enough while a forked child has it open too.

    What was done with the lock held has happened: where this fails, closing lets go of it all the same.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def _number(fd: int, at: int) -> int:
    return int.from_bytes(os.pread(fd, 8, at), "little")


def _write(fd: int, data: bytes, at: int) -> None:
    while data:
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count
