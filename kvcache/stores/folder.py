"""The folder of a FileStore: its open directories, and the files in them by name.

::

    kvcache.lock     the lock between processes (see lockfile.py)
    pages/           <stem>.safetensors and <stem>.json of each entry
    writing/         <random>-data.tmp and <random>.tmp, entries being written
    index/           what all processes know of the entries together (see index.py); may be deleted

Names are always relative to an open directory and links are never followed, so that nothing placed in
the folder leads out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from kvcache.stores.errors import is_read_only, translated
from kvcache.stores.lockfile import LOCK, SAFE, STORE_FORMAT, HeldLock, LockFile, fcntl
from kvcache.stores.manifest import DATA, MANIFEST, TEMPORARY
from kvcache.stores.protocol import is_key

__all__ = ["INDEX", "LOCK", "PAGES", "STORE_FORMAT", "WRITING", "Folder"]

PAGES, WRITING, INDEX = "pages", "writing", "index"

_PENDING = "-data"
"""What the name of an entry's data ends in while they are written."""

_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)


class Folder:
    """An open folder. ``writable`` is False where its files may be read and not changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._root = self._entries = self._writing = -1
        with translated("FileStore", path):
            _make(path, 0o700)
            try:
                self._root = os.open(path, _DIRECTORY)
                self._lock = LockFile(self._root, path)
                self.times, self.used_until = self._lock.times, self._lock.used_until
                self._entries = self._open_entries()
                self.writable = self._lock.writable and os.access(PAGES, os.W_OK, dir_fd=self._root)
                if self.writable:
                    self._open_writing()
            except BaseException:
                self.close()
                raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        fds = [getattr(self, name, -1) for name in ("_root", "_entries", "_writing")]
        self._root = self._entries = self._writing = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        if hasattr(self, "_lock"):
            self._lock.close()

    @property
    def vanished(self) -> bool:
        """Whether the folder was deleted behind the open directory."""
        return os.fstat(self._entries).st_nlink == 0 or os.fstat(self._root).st_nlink == 0

    def locked(self) -> AbstractContextManager[HeldLock]:
        """Keep all other processes and threads from changing entries. Not to be nested."""
        return self._lock.held()

    # Files of entries, by name.

    def open_file(self, name: str) -> int:
        """To be read. OSError where it is not there, is a link, or is not a regular file."""
        return _open_regular(name, self._entries)

    def stat(self, name: str) -> os.stat_result:
        """Of the name itself, not of what a link points to."""
        return os.stat(name, dir_fd=self._entries, follow_symlinks=False)

    def touch(self, name: str, nanoseconds: int) -> None:
        """Set when it was last used; nothing where it is gone or may not be changed."""
        times = (nanoseconds, nanoseconds)
        with contextlib.suppress(OSError):
            os.utime(name, ns=times, dir_fd=self._entries, follow_symlinks=False)

    def remove(self, stem: str) -> bool:
        """Remove an entry's files, the manifest first. False: there was no manifest."""
        there = self._unlink(stem + MANIFEST)
        self._unlink(stem + DATA)
        return there

    def publish(self, temporary: str, name: str) -> None:
        """Make what was written a file of an entry. A folder of its name is moved aside."""
        try:
            os.rename(temporary, name, src_dir_fd=self._writing, dst_dir_fd=self._entries)
        except OSError:
            if not self._is_folder(name):
                raise
            self._move_aside(name)
            os.rename(temporary, name, src_dir_fd=self._writing, dst_dir_fd=self._entries)

    def sync(self) -> None:
        """Wait until the names of entries are on the device."""
        os.fsync(self._entries)

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Every name, and what it is (links not followed)."""
        with os.scandir(self._entries) as found:
            for item in found:
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield item.name, status

    @property
    def changed(self) -> int:
        """When the system last saw a name of an entry come or go, by its clock, in nanoseconds."""
        return os.fstat(self._entries).st_mtime_ns

    def _unlink(self, name: str) -> bool:
        """False: it was not there. A link is removed, not what it points to; a folder is moved aside."""
        try:
            os.unlink(name, dir_fd=self._entries)
        except FileNotFoundError:
            return False
        except OSError:
            if not self._is_folder(name):
                raise
            self._move_aside(name)
        return True

    def _move_aside(self, name: str) -> None:
        aside = f"{name}.{secrets.token_hex(4)}.foreign"
        os.rename(name, aside, src_dir_fd=self._entries, dst_dir_fd=self._entries)

    def _is_folder(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(self.stat(name).st_mode)
        except FileNotFoundError:
            return False

    # Files being written.

    def create_temporary(self, token: str, nbytes: int | None = None) -> tuple[str, int]:
        """A new file to write, locked: as long as it is open nobody sweeps it. Call it with the lock held.

        ``token``: 32 random hex digits, the same for both files of an entry. ``nbytes``: of its data, which
        have room from now on (``pending``); None: its manifest.
        """
        name = f"{token}{'' if nbytes is None else _PENDING}{TEMPORARY}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFE, 0o600, dir_fd=self._writing)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if nbytes:
                os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            self.discard(name)
            raise
        return name, fd

    def pending(self) -> dict[str, int]:
        """The bytes of entries that are being written, by their files. Call it with the lock held."""
        found = {}
        for name in os.listdir(self._writing):  # noqa: PTH208
            if name.endswith(_PENDING + TEMPORARY):
                with contextlib.suppress(OSError):
                    found[name] = os.stat(name, dir_fd=self._writing, follow_symlinks=False).st_size
        return found

    def wait_for(self, data: str) -> None:
        """Wait until whoever writes the data has ended; what the dead have left is removed.

        By the manifest: data that are evicted meanwhile would take their room as long as they are open here.
        """
        manifest = data.replace(_PENDING, "")
        try:
            fd = _open_regular(manifest, self._writing)
        except FileNotFoundError:  # published, or its writer has died before it was there
            self.discard(data)
        except OSError:
            return
        else:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            finally:
                os.close(fd)
            self.discard(manifest)
            self.discard(data)

    def discard(self, temporary: str) -> None:
        """Remove a file that was not published. What the system does not remove, the next to open sweeps."""
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=self._writing)

    def sweep(self) -> int:
        """Remove what writers that died have left; how many files. Call it with the lock held."""
        names = os.listdir(self._writing)  # noqa: PTH208
        return sum(self._sweep(name, self._writing) for name in names)

    def sweep_entry(self, name: str) -> bool:
        """The same for a file that an earlier version of this package wrote among the entries."""
        return self._sweep(name, self._entries)

    def _sweep(self, name: str, where: int) -> bool:
        stem, suffix = os.path.splitext(name)  # noqa: PTH122
        if suffix != TEMPORARY or not is_key(stem):
            return False
        try:
            fd = _open_regular(name, where)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=where)
        except BlockingIOError:  # somebody is writing it
            return False
        finally:
            os.close(fd)
        return True

    # The index.

    def index_path(self, name: str) -> Path | None:
        """Where the index may lie; None where its folder is not this user's alone, or has been moved.

        Whoever opens it goes by this path, and follows links: nobody else may place any.
        """
        path = self.path / INDEX
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(INDEX, 0o700, dir_fd=self._root)
            found = os.stat(INDEX, dir_fd=self._root, follow_symlinks=False)
            same = os.path.samestat(found, path.lstat())
        except OSError:
            return None
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
        return path / name if same and mine else None

    def stat_index(self, name: str) -> os.stat_result:
        return os.stat(f"{INDEX}/{name}", dir_fd=self._root, follow_symlinks=False)

    # Opening.

    def _open_folder(self, name: str) -> int:
        if self._lock.writable:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root)
                os.fsync(self._root)
        return os.open(name, _DIRECTORY | SAFE, dir_fd=self._root)

    def _open_entries(self) -> int:
        """The folder of entries; where there is none and none can be made, the store's own, without any."""
        try:
            return self._open_folder(PAGES)
        except OSError as error:
            there = os.access(PAGES, os.F_OK, dir_fd=self._root)
            if there or (self._lock.writable and not is_read_only(error)):
                raise
            self._lock.writable = False
            return os.open(self.path, _DIRECTORY)

    def _open_writing(self) -> None:
        try:
            self._writing = self._open_folder(WRITING)
        except OSError as error:
            if not is_read_only(error):
                raise
            self.writable = False


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
    """Make the folder and those above it that are not there, and have their names on the device."""
    if path.is_dir():
        return
    if path.parent != path:
        _make(path.parent)
    # It may be there by now, made by another; or be a file, which is refused when it is opened.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode)
        with contextlib.suppress(PermissionError):  # a folder that one may write to and not list
            parent = os.open(path.parent, _DIRECTORY)
            try:
                os.fsync(parent)
            finally:
                os.close(parent)
