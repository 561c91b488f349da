"""The folder of a FileStore: its open directories, and the files in them by name.

::

    kvcache.lock     the lock between processes (see lockfile.py)
    pages/           <stem>.entry of each entry: its bytes, then its manifest
    changing/        <stem>.<random>.tmp: entries that are being written or removed
    index/           what all processes know of the entries together (see index.py); may be deleted

An entry is moved from ``changing`` to ``pages`` when it is written, and back when it is removed, each time by
one rename, so that it exists completely or not at all. If a file in ``changing`` is no longer locked by its
writer, the writer died before it updated the index: the next process with the lock then checks that entry.

Names are always relative to an open directory, and links are never followed, so that nothing placed in the
folder can lead out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from kvcache.stores.errors import is_read_only, translated
from kvcache.stores.lockfile import LOCK, SAFE, STORE_FORMAT, LockFile, fcntl
from kvcache.stores.manifest import ENTRY, MANIFEST_BYTES, TEMPORARY, is_stem

__all__ = ["CHANGING", "INDEX", "LOCK", "PAGES", "STORE_FORMAT", "Folder"]

PAGES, CHANGING, INDEX = "pages", "changing", "index"

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)


class Folder:
    """An open folder. ``writable`` is False if its files may only be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = self._entries = self._changing = -1
        with translated("FileStore", path, "choose a folder that this process may create and write to"):
            _make(path, 0o700)
            try:
                self._root = os.open(path, _DIRECTORY)
                self.lock = LockFile(self._root, path)
                self._entries = self._open_entries()
                self.writable = self.lock.writable and os.access(PAGES, os.W_OK, dir_fd=self._root)
                if self.writable:
                    self._open_changing()
            except BaseException:
                self.close()
                raise

    _close = staticmethod(os.close)
    """Of the class: when the interpreter ends, the module's own names are None already."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        fds = [getattr(self, name, -1) for name in ("_root", "_entries", "_changing")]
        self._root = self._entries = self._changing = -1
        for fd in fds:
            if fd >= 0:
                self._close(fd)
        if hasattr(self, "lock"):
            self.lock.close()

    @property
    def vanished(self) -> bool:
        """Whether the folder has been deleted while it was open."""
        return os.fstat(self._entries).st_nlink == 0 or os.fstat(self._root).st_nlink == 0

    # Entries.

    def open_entry(self, stem: str) -> int:
        """Open an entry for reading. Raises OSError if it does not exist, is a link, or is not a regular
        file.
        """
        return _open_regular(stem + ENTRY, self._entries)

    def stat(self, stem: str) -> os.stat_result:
        """The status of the name itself; links are not followed."""
        return os.stat(stem + ENTRY, dir_fd=self._entries, follow_symlinks=False)

    def touch(self, stem: str, nanoseconds: int) -> None:
        """Set the time of last use; no effect if the entry is gone or may not be changed."""
        times = (nanoseconds, nanoseconds)
        with contextlib.suppress(OSError):
            os.utime(stem + ENTRY, ns=times, dir_fd=self._entries, follow_symlinks=False)

    def publish(self, temporary: str, stem: str) -> None:
        """Turn the written file into the entry. A folder of the same name is moved aside."""
        try:
            os.rename(temporary, stem + ENTRY, src_dir_fd=self._changing, dst_dir_fd=self._entries)
        except OSError:
            if not self._is_folder(stem):
                raise
            self._move_aside(stem)
            os.rename(temporary, stem + ENTRY, src_dir_fd=self._changing, dst_dir_fd=self._entries)

    def withdraw(self, stem: str) -> str | None:
        """Remove an entry from ``pages``; returns its name until it is discarded, None if there was none.

        A link is removed itself; a folder is moved aside.
        """
        if self._is_folder(stem):
            self._move_aside(stem)
            return None
        name = _temporary(stem)
        try:
            os.rename(stem + ENTRY, name, src_dir_fd=self._entries, dst_dir_fd=self._changing)
        except FileNotFoundError:
            return None
        return name

    def sync(self) -> None:
        """Wait until the entries' names are on the device."""
        os.fsync(self._entries)

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """The stem of every entry, and the status of its file (links are not followed)."""
        with os.scandir(self._entries) as items:
            for item in items:
                stem = item.name.removesuffix(ENTRY)
                if stem + ENTRY == item.name and is_stem(stem):
                    with contextlib.suppress(FileNotFoundError):
                        yield stem, item.stat(follow_symlinks=False)

    @property
    def changed(self) -> int:
        """When an entry was last added or removed, by the system's clock, in nanoseconds."""
        return os.fstat(self._entries).st_mtime_ns

    def _is_folder(self, stem: str) -> bool:
        try:
            return stat.S_ISDIR(self.stat(stem).st_mode)
        except FileNotFoundError:
            return False

    def _move_aside(self, stem: str) -> None:
        aside = f"{stem}{ENTRY}.{secrets.token_hex(4)}.foreign"
        os.rename(stem + ENTRY, aside, src_dir_fd=self._entries, dst_dir_fd=self._entries)

    # Files being written or removed.

    def create(self, stem: str, nbytes: int) -> tuple[str, int]:
        """A locked file for an entry of ``nbytes`` bytes: as long as it is open, its writer is alive.

        It has its full size from the start, so that others count it. Call this with the folder's lock held.
        """
        name = _temporary(stem)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=self._changing)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.ftruncate(fd, nbytes + MANIFEST_BYTES)
        except BaseException:
            os.close(fd)
            self.discard(name)
            raise
        return name, fd

    def changing(self) -> Iterator[tuple[str, str, int | None]]:
        """The files being written or removed: name, stem, and bytes of an entry being written.

        Bytes None: the process that wrote or removed it has died. Call this with the folder's lock held.
        """
        for name in os.listdir(self._changing):  # noqa: PTH208
            stem, _, token = name.removesuffix(TEMPORARY).rpartition(".")
            if name != f"{stem}.{token}{TEMPORARY}" or not is_stem(stem):
                continue
            try:
                status = os.stat(name, dir_fd=self._changing, follow_symlinks=False)
                alive = stat.S_ISREG(status.st_mode) and self._is_locked(name)
            except FileNotFoundError:
                continue
            yield name, stem, max(0, status.st_size - MANIFEST_BYTES) if alive else None

    def discard(self, name: str | None) -> bool:
        """Delete a file that was not published, or was withdrawn. If the system refuses, others try again
        later.
        """
        if name is None:
            return False
        try:
            os.unlink(name, dir_fd=self._changing)
        except OSError:
            return False
        return True

    def _is_locked(self, name: str) -> bool:
        """True also if this process cannot tell, because the file belongs to another user."""
        try:
            fd = _open_regular(name, self._changing)
        except PermissionError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    # The index.

    def index_path(self, name: str) -> Path | None:
        """The path of the index; None if its folder is accessible to other users, or has been moved.

        SQLite opens this path and follows links, so nobody else may be able to place any.
        """
        path = self.path / INDEX
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(INDEX, 0o700, dir_fd=self._root)
            status = os.stat(INDEX, dir_fd=self._root, follow_symlinks=False)
            same = os.path.samestat(status, path.lstat())
        except OSError:
            return None
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        return path / name if same and mine else None

    def stat_index(self, name: str) -> os.stat_result:
        return os.stat(f"{INDEX}/{name}", dir_fd=self._root, follow_symlinks=False)

    # Opening.

    def _open_folder(self, name: str) -> int:
        if self.lock.writable:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
                os.fsync(self._root)
        return os.open(name, _DIRECTORY | SAFE, dir_fd=self._root)

    def _open_entries(self) -> int:
        """The folder of entries; if it does not exist and cannot be created, the store's own folder, without
        entries.
        """
        try:
            return self._open_folder(PAGES)
        except OSError as error:
            there = os.access(PAGES, os.F_OK, dir_fd=self._root)
            if there or (self.lock.writable and not is_read_only(error)):
                raise
            self.lock.writable = False
            return os.open(self.path, _DIRECTORY)

    def _open_changing(self) -> None:
        try:
            self._changing = self._open_folder(CHANGING)
        except OSError as error:
            if not is_read_only(error):
                raise
            self.writable = False


def _temporary(stem: str) -> str:
    return f"{stem}.{secrets.token_hex(16)}{TEMPORARY}"


def _open_regular(name: str, where: int) -> int:
    fd = os.open(name, os.O_RDONLY | SAFE, dir_fd=where)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ELOOP, "not a regular file", name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make(path: Path, mode: int = 0o777) -> None:
    """Create the folder and its missing parents, and sync their names to the device."""
    if path.is_dir():
        return
    if path.parent != path:
        _make(path.parent)
    # Another process may have created it; if it is a file, opening it will fail.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode)
        with contextlib.suppress(PermissionError):  # a folder that one may write to and not list
            parent = os.open(path.parent, _DIRECTORY)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)
