"""A store's lock between processes, and three numbers that they share.

::

    kvcache.lock     16 bytes   "kvcache.store/2\\n"
                      8 bytes   the latest time of use that was given out, in nanoseconds
                      8 bytes   ``Folder.changed`` as the index knows it; 0: the index is to be made anew
                      8 bytes   how many changes the index has seen, counted from a random number

Numbers are little-endian. The lock is ``flock``, which the system releases when a process dies.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvcache.stores.errors import StoreUnavailableError, is_read_only

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

__all__ = ["LAST_TIME", "LOCK", "SAFE", "STORE_FORMAT", "LockFile"]

STORE_FORMAT: Final = b"kvcache.store/2\n"
LOCK: Final = "kvcache.lock"
SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags for every file that is opened: links are not followed, and pipes do not block."""

LAST_TIME: Final = 1 << 62
"""Nanoseconds; the year 2116. A later time is treated as damage."""

_LATEST: Final = len(STORE_FORMAT)
_KNOWN: Final = _LATEST + 8
_CHANGES: Final = _KNOWN + 8
_END: Final = _CHANGES + 8


class LockFile:
    """The lock of the folder that is open as ``root``. ``writable`` is False if it may only be read.

    Raises StoreUnavailableError for a folder that holds something else or a store of another version.
    """

    def __init__(self, root: int, path: Path) -> None:
        if fcntl is None:
            raise StoreUnavailableError("FileStore: this system has no POSIX file locks (fcntl)")
        self._root, self._path = root, path
        self._mutex, self._timing = threading.Lock(), threading.Lock()
        self._latest = 0
        self.writable = True
        self._fd = self._claim()  # for the numbers: those of times need no lock

    _close = staticmethod(os.close)  # as Folder's

    def close(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            self._close(fd)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep all other processes and threads from changing entries. Must not be nested."""
        with self._mutex:
            # Opened each time: a lock belongs to the open file, which a fork would share.
            fd = os.open(LOCK, os.O_RDWR | SAFE, dir_fd=self._root)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                try:
                    yield
                finally:
                    _unlock(fd)
            finally:
                with contextlib.suppress(OSError):  # as in _unlock
                    os.close(fd)

    @property
    def known(self) -> int:
        """To be asked and set with the lock held."""
        return self._number(_KNOWN)

    @known.setter
    def known(self, changed: int) -> None:
        self._write(changed, _KNOWN)

    @property
    def changes(self) -> int:
        """To be asked and set with the lock held."""
        return self._number(_CHANGES)

    @changes.setter
    def changes(self, count: int) -> None:
        self._write(count, _CHANGES)

    def times(self, count: int = 1) -> range:
        """Times of use in nanoseconds, each later than any time given to any process before.

        They continue from the latest one if a clock was set back, or is behind that of another host. If the
        file is read-only or unreadable, they are only later than this object's own.
        """
        with self._timing:
            with contextlib.suppress(OSError):
                self._learn(self._number(_LATEST))
            first = max(time.time_ns(), self._latest + 1)
            self._note(first + count - 1)
        return range(first, first + count)

    def used_until(self, latest: int) -> None:
        """Record the latest time of use found in entries' files, so that further times are later."""
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
            self._write(latest, _LATEST)

    def _number(self, at: int) -> int:
        return int.from_bytes(os.pread(self._fd, 8, at), "little")

    def _write(self, number: int, at: int) -> None:
        os.pwrite(self._fd, number.to_bytes(8, "little"), at)

    # Opening.

    def _claim(self) -> int:
        """Turn an empty folder into a store; refuse one that is used for something else.

        -1 if the folder is empty and nothing may be created in it.
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
            begins = os.pread(fd, _LATEST, 0)
            if not begins:
                if self.writable:
                    os.pwrite(fd, STORE_FORMAT + bytes(_END - _LATEST), 0)
            elif begins != STORE_FORMAT:
                raise StoreUnavailableError(
                    f"FileStore: {self._path}/{LOCK} begins with {begins!r}, not with {STORE_FORMAT!r}: the "
                    "folder is not a store, or of another version; delete it or give another folder"
                )
        finally:
            if self.writable:
                _unlock(fd)


def _unlock(fd: int) -> None:
    """Unlock before closing the file, since closing is not enough while a forked child also has it open.

    The work under the lock is done: if unlocking fails, closing releases the lock anyway.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
