"""The folder of a FileStore: two open directories, a lock between processes, and a counter of changes.

::

    kvcache.lock     "kvcache.store/1\\n" and 8 bytes: how often the entries have changed
    pages/           <key>.safetensors, <key>.json; <random>.tmp while being written

Names are always relative to an open directory and links are never followed, so that nothing placed in
the folder leads out of it. Locks are ``flock``: the system lets go of them when a process dies.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcache.stores.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from kvcache.stores.manifest import TEMPORARY

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

__all__ = ["STORE_FORMAT", "Folder", "Held", "translated"]

STORE_FORMAT = b"kvcache.store/1\n"
LOCK, PAGES = "kvcache.lock", "pages"

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


@contextlib.contextmanager
def translated(op: str, path: Path) -> Iterator[None]:
    """The system's errors as a store's: StoreFull, StoreReadOnly, or StoreUnavailable for all others."""
    try:
        yield
    except OSError as error:
        kind: type[StoreError] = StoreFull if error.errno in _NO_ROOM else StoreUnavailable
        if error.errno == errno.EROFS:
            kind = StoreReadOnly
        raise kind(f"{op}: {path}: {error.strerror or error}") from error


class Held:
    """The folder's lock, held: the counter of changes may be read and raised."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def changes(self) -> int:
        return int.from_bytes(os.pread(self._fd, 8, len(STORE_FORMAT)), "little")

    def change(self) -> int:
        """To be called before entries are changed, so that whoever dies on the way has said so."""
        count = (self.changes + 1) % 2**64
        os.pwrite(self._fd, count.to_bytes(8, "little"), len(STORE_FORMAT))
        return count


class Folder:
    """An open folder. ``writable`` is False where its files may be read and not changed."""

    def __init__(self, path: Path) -> None:
        if fcntl is None:
            raise StoreUnavailable("FileStore: this system has no POSIX file locks (fcntl)")
        self.path = path
        self.writable = True
        self._mutex = threading.Lock()
        self._root = self._pages = -1
        with translated("FileStore", path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._root = os.open(path, _DIRECTORY)
                self._claim()
                self._pages = self._open_pages()
            except BaseException:
                self.close()
                raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        root, pages = getattr(self, "_root", -1), getattr(self, "_pages", -1)
        self._root = self._pages = -1
        for fd in (root, pages):
            if fd >= 0:
                os.close(fd)

    @property
    def vanished(self) -> bool:
        """Whether the folder was deleted behind the open directory."""
        return os.fstat(self._pages).st_nlink == 0 or os.fstat(self._root).st_nlink == 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[Held]:
        """Keep all other processes and threads from changing entries. Not to be nested."""
        with self._mutex:
            # Opened anew each time: a lock belongs to the open file, which a fork would share.
            fd = os.open(LOCK, os.O_RDWR | _SAFE, dir_fd=self._root)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                try:
                    yield Held(fd)
                finally:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough while a forked child has it open
            finally:
                os.close(fd)

    # Files of the folder, by name.

    def open_file(self, name: str) -> int:
        """To be read. OSError where it is not there, is a link, or is not a regular file."""
        fd = os.open(name, os.O_RDONLY | _SAFE, dir_fd=self._pages)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.ELOOP, "not a regular file", name)
        return fd

    def stat(self, name: str) -> os.stat_result:
        """Of the name itself, not of what a link points to."""
        return os.stat(name, dir_fd=self._pages, follow_symlinks=False)

    def touch(self, name: str, nanoseconds: int) -> None:
        """Set when it was last used; nothing where it is gone or may not be changed."""
        times = (nanoseconds, nanoseconds)
        with contextlib.suppress(OSError):
            os.utime(name, ns=times, dir_fd=self._pages, follow_symlinks=False)

    def unlink(self, name: str) -> bool:
        """False: it was not there. A link is removed, not what it points to."""
        try:
            os.unlink(name, dir_fd=self._pages)
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self._pages, dst_dir_fd=self._pages)

    def sync(self) -> None:
        """Wait until the names are on the device."""
        os.fsync(self._pages)

    def entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """Every name, and what it is (links not followed)."""
        with os.scandir(self._pages) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):
                    yield item.name, item.stat(follow_symlinks=False)

    def create_temporary(self) -> tuple[str, int]:
        """A new file to write, locked: as long as it is open nobody sweeps it. Call it with the lock held."""
        name = f"{secrets.token_hex(16)}{TEMPORARY}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o666, dir_fd=self._pages)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            self.unlink(name)
            raise
        return name, fd

    def sweep_temporary(self, name: str) -> bool:
        """Remove a file that nobody is writing any more; False: somebody is."""
        try:
            fd = self.open_file(name)
        except OSError:
            return self.unlink(name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self.unlink(name)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    # Opening.

    def _claim(self) -> None:
        """Make an empty folder a store; refuse one that is in use for something else."""
        try:
            fd = os.open(LOCK, os.O_RDWR | _SAFE, dir_fd=self._root)
        except FileNotFoundError:
            self._refuse_strangers()
            fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | _SAFE, 0o666, dir_fd=self._root)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self.writable = False
            fd = os.open(LOCK, os.O_RDONLY | _SAFE, dir_fd=self._root)
        try:
            self._check_format(fd)
        finally:
            os.close(fd)

    def _refuse_strangers(self) -> None:
        names = [name for name in os.listdir(self._root) if name != LOCK]  # noqa: PTH208
        if names and not os.access(LOCK, os.F_OK, dir_fd=self._root):
            raise StoreUnavailable(
                f"FileStore: {self.path} is no store and holds {sorted(names)[:3]}; give an empty folder"
            )

    def _check_format(self, fd: int) -> None:
        if self.writable:
            fcntl.flock(fd, fcntl.LOCK_EX)  # until it is closed
        found = os.pread(fd, len(STORE_FORMAT) + 8, 0)
        if not found and self.writable:
            os.pwrite(fd, STORE_FORMAT + bytes(8), 0)
        elif not found.startswith(STORE_FORMAT):
            raise StoreUnavailable(
                f"FileStore: {self.path}/{LOCK} begins with {found[:16]!r}, not with {STORE_FORMAT!r}: "
                "the folder is of another version or no store"
            )

    def _open_pages(self) -> int:
        if self.writable:
            with contextlib.suppress(FileExistsError):
                os.mkdir(PAGES, dir_fd=self._root)
                os.fsync(self._root)
        pages = os.open(PAGES, _DIRECTORY | _SAFE, dir_fd=self._root)
        if self.writable and not os.access(PAGES, os.W_OK, dir_fd=self._root):
            self.writable = False
        return pages
