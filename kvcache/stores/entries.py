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
from kvcache.stores.manifest import DATA, MANIFEST, MAX_BYTES, Manifest, Naming
from kvcache.stores.protocol import Stat
from kvcache.stores.streams import read_digested

__all__ = ["BrokenEntryError", "Entries"]

_WRONG_FILE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK}
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux, which ``mmap`` has no name for."""
REMEMBERED = 1 << 16
"""Entries; then all are forgotten, and parsed again when they are next asked for."""


class BrokenEntryError(Exception):
    """What was read does not hold: damage, or a change on the way. Within the folder's lock: damage."""


class Entries:
    """The entries of a folder, of which other processes' user may have some to himself: those are misses.

    So is what claims more bytes than the ``budget``: whoever writes next evicts it.
    """

    def __init__(self, folder: Folder, naming: Naming, budget: int | None = None) -> None:
        self._folder = folder
        self._naming = naming
        self._budget = budget
        self._refused: dict[str, int] = {}  # stem -> inode of a manifest that could not be removed
        self._seen: dict[str, tuple[tuple[int, int], int]] = {}  # stem -> manifest's (inode, size), nbytes

    def stat(self, key: str) -> Stat | None:
        """None: not there. BrokenEntryError when manifest and data do not fit.

        A manifest that was parsed once, and fits the data's size, is not parsed again: one that somebody
        has changed in place is noticed by ``read``.
        """
        stem = self._naming.stem(key)
        try:
            status = self._folder.stat(stem + MANIFEST)
        except FileNotFoundError:
            return None
        if self._refused.get(stem) == status.st_ino:
            return None
        file = status.st_ino, status.st_size
        remembered = self._seen.get(stem)
        if remembered is None or remembered[0] != file or self._data_size(stem) != remembered[1]:
            manifest = self._load(stem)
            if manifest is None:
                return None
            size = self._data_size(stem)
            if size != manifest.nbytes:
                raise BrokenEntryError(f"{size} bytes are stored, {manifest.nbytes} were put")
            remembered = self._remember(stem, file, manifest.nbytes)
        return Stat(remembered[1], status.st_mtime)

    def read(self, key: str, view: memoryview) -> bool:
        """Fill ``view``. False: not there. BrokenEntryError when a size or the digest does not hold."""
        with self._opened(key) as found:
            if found is None:
                return False
            fd, manifest = found
            check_size("get_into", view, manifest.key, manifest.nbytes)
            self._read(fd, manifest, view)
            return True

    def map(self, key: str) -> memoryview | None:
        """The data as the system's page cache has it, its digest checked. None, or an error, as ``read``.

        Where the digest is keyed, a copy: what lies in the page cache may be written to after the check.
        """
        with self._opened(key) as found:
            if found is None:
                return None
            fd, manifest = found
            if self._naming.keyed or not manifest.nbytes:
                view = memoryview(bytearray(manifest.nbytes))
                self._read(fd, manifest, view)
                return view
            view = _mapped(fd, manifest.nbytes)
            digest = self._naming.start(key, manifest.nbytes)
            digest.update(view)
            _check_digest(manifest, len(view), digest.hexdigest())
            return view

    def open(self, key: str) -> tuple[int, Manifest] | None:
        """The data file, to be closed, and its manifest. None, or an error, as ``read``."""
        stem = self._naming.stem(key)
        manifest = self._load(stem)
        if manifest is None:
            return None
        try:
            fd = self._folder.open_file(stem + DATA)
        except PermissionError:
            return None
        except OSError as error:
            raise _broken(error) from error
        try:
            size = os.fstat(fd).st_size
            if size != manifest.nbytes:
                raise BrokenEntryError(f"{size} bytes are stored, {manifest.nbytes} were put")
        except BaseException:
            os.close(fd)
            raise
        return fd, manifest

    def refuse(self, key: str) -> None:
        """Act as if this entry were not there, where it may not be removed, until it is another one."""
        stem = self._naming.stem(key)
        with contextlib.suppress(FileNotFoundError):
            self._refused[stem] = self._folder.stat(stem + MANIFEST).st_ino

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, Manifest] | None]:
        """An entry's data file and manifest; None: not there."""
        found = self.open(key)
        try:
            yield found
        finally:
            if found is not None:
                os.close(found[0])

    def _read(self, fd: int, manifest: Manifest, view: memoryview) -> None:
        digest = self._naming.start(manifest.key, manifest.nbytes)
        count = read_digested(fd, view, digest)
        _check_digest(manifest, count, digest.hexdigest())

    def _load(self, stem: str) -> Manifest | None:
        try:
            if stem in self._refused and self._refused[stem] == self._folder.stat(stem + MANIFEST).st_ino:
                return None
            fd = self._folder.open_file(stem + MANIFEST)
        except (FileNotFoundError, PermissionError):
            return None
        except OSError as error:
            raise _broken(error) from error
        try:
            found = self._naming.parse(os.read(fd, MAX_BYTES), stem)
            return None if self._budget is not None and found.nbytes > self._budget else found
        except ValueError as error:
            raise BrokenEntryError(str(error)) from error
        finally:
            os.close(fd)

    def _data_size(self, stem: str) -> int:
        try:
            data = self._folder.stat(stem + DATA)
        except FileNotFoundError as error:
            raise _broken(error) from error
        if not S_ISREG(data.st_mode):
            raise BrokenEntryError("its data is not a regular file")
        return data.st_size

    def _remember(self, stem: str, file: tuple[int, int], nbytes: int) -> tuple[tuple[int, int], int]:
        if len(self._seen) >= REMEMBERED:
            self._seen.clear()
        self._seen[stem] = file, nbytes
        return file, nbytes


def _check_digest(manifest: Manifest, count: int, digest: str) -> None:
    if count != manifest.nbytes or digest != manifest.digest:
        raise BrokenEntryError(f"the digest of {count} bytes is {digest}, and was {manifest.digest}")


def _mapped(fd: int, size: int) -> memoryview:
    mapping = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    try:
        # Have all pages at hand: a device that fails says so here, and not by a signal later.
        mapping.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 5.14 there is no such advice
            raise
    return memoryview(mapping)


def _broken(error: OSError) -> BrokenEntryError:
    """Only what says that the file is the wrong one; a failing device or a permission is no damage."""
    if error.errno not in _WRONG_FILE:
        raise error
    return BrokenEntryError(error.strerror or str(error))
