"""Entries as files of a folder: looked at and read without a lock, so that what is found may not hold."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from stat import S_ISREG

from kvcache.stores.buffers import check_size
from kvcache.stores.folder import Folder
from kvcache.stores.manifest import DATA, MANIFEST, MAX_BYTES, Manifest
from kvcache.stores.protocol import Stat
from kvcache.stores.streams import digest_of, read_digested

__all__ = ["BrokenEntryError", "Entries"]

_WRONG_FILE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK}
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux, which ``mmap`` has no name for."""
REMEMBERED = 1 << 16
"""Entries; then all are forgotten, and parsed again when they are next asked for."""


class BrokenEntryError(Exception):
    """What was read does not hold: damage, or a change on the way. Within the folder's lock: damage."""


class Entries:
    """The entries of a folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._refused: dict[str, int] = {}  # key -> inode of a manifest that could not be removed
        self._seen: dict[str, tuple[tuple[int, int], int]] = {}  # key -> manifest's (inode, size), nbytes

    def stat(self, key: str) -> Stat | None:
        """None: not there. BrokenEntryError when manifest and data do not fit.

        A manifest that was parsed once, and fits the data's size, is not parsed again: one that somebody
        has changed in place is noticed by ``read``.
        """
        try:
            status = self._folder.stat(key + MANIFEST)
        except FileNotFoundError:
            return None
        file = status.st_ino, status.st_size
        remembered = self._seen.get(key)
        if remembered is None or remembered[0] != file or self._data_size(key) != remembered[1]:
            manifest = self._load(key)
            if manifest is None:
                return None
            size = self._data_size(key)
            if size != manifest.nbytes:
                raise BrokenEntryError(f"{size} bytes are there, {manifest.nbytes} were put")
            remembered = self._remember(key, file, manifest.nbytes)
        elif self._refused.get(key) == status.st_ino:
            return None
        return Stat(remembered[1], status.st_mtime)

    def read(self, key: str, view: memoryview) -> bool:
        """Fill ``view``. False: not there. BrokenEntryError when a size or the digest does not hold."""
        with self._opened(key) as found:
            if found is None:
                return False
            _read_data(*found, view)
            return True

    def map(self, key: str) -> memoryview | None:
        """The data as the system's page cache has it, its digest checked. None, or an error, as ``read``."""
        with self._opened(key) as found:
            return None if found is None else _mapped(*found)

    def open(self, key: str) -> tuple[int, Manifest] | None:
        """The data file, to be closed, and its manifest. None, or an error, as ``read``."""
        manifest = self._load(key)
        if manifest is None:
            return None
        try:
            fd = self._folder.open_file(key + DATA)
        except OSError as error:
            raise _broken(error) from error
        try:
            _check_size(fd, manifest)
        except BaseException:
            os.close(fd)
            raise
        return fd, manifest

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, Manifest] | None]:
        """An entry's data file and manifest; None: not there."""
        found = self.open(key)
        try:
            yield found
        finally:
            if found is not None:
                os.close(found[0])

    def refuse(self, key: str) -> None:
        """Act as if this entry were not there, where it may not be removed, until it is another one."""
        try:
            self._refused[key] = self._folder.stat(key + MANIFEST).st_ino
        except FileNotFoundError:
            return

    def _load(self, key: str) -> Manifest | None:
        try:
            fd = self._folder.open_file(key + MANIFEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _broken(error) from error
        try:
            if key in self._refused and self._refused[key] == os.fstat(fd).st_ino:
                return None
            return Manifest.parse(os.read(fd, MAX_BYTES), key)
        except ValueError as error:
            raise BrokenEntryError(str(error)) from error
        finally:
            os.close(fd)

    def _data_size(self, key: str) -> int:
        try:
            data = self._folder.stat(key + DATA)
        except FileNotFoundError as error:
            raise _broken(error) from error
        if not S_ISREG(data.st_mode):
            raise BrokenEntryError("its data are not a regular file")
        return data.st_size

    def _remember(self, key: str, file: tuple[int, int], nbytes: int) -> tuple[tuple[int, int], int]:
        if len(self._seen) >= REMEMBERED:
            self._seen.clear()
        self._seen[key] = file, nbytes
        return file, nbytes


def _check_size(fd: int, manifest: Manifest) -> None:
    size = os.fstat(fd).st_size
    if size != manifest.nbytes:
        raise BrokenEntryError(f"{size} bytes are there, {manifest.nbytes} were put")


def _check_digest(digest: str, manifest: Manifest) -> None:
    if digest != manifest.digest:
        raise BrokenEntryError(
            f"the digest of {manifest.nbytes} bytes is {digest}, and was {manifest.digest}"
        )


def _read_data(fd: int, manifest: Manifest, view: memoryview) -> None:
    size = manifest.nbytes
    check_size("get_into", view, manifest.key, size)
    count, digest = read_digested(fd, view)
    if count != size or digest != manifest.digest:
        raise BrokenEntryError(f"the digest of {count} bytes is {digest}, and was {manifest.digest}")


def _mapped(fd: int, manifest: Manifest) -> memoryview:
    size = manifest.nbytes
    if not size:
        return memoryview(b"")
    mapping = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    try:
        # Have all pages at hand: a device that fails says so here, and not by a signal later.
        mapping.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 5.14 there is no such advice
            raise
    view = memoryview(mapping)
    _check_digest(digest_of(view), manifest)
    return view


def _broken(error: OSError) -> BrokenEntryError:
    """Only what says that the file is the wrong one; a failing device or a permission is no damage."""
    if error.errno not in _WRONG_FILE:
        raise error
    return BrokenEntryError(error.strerror or str(error))
