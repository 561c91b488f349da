"""Entries as files of a folder. They are read without a lock, so that a result may be outdated."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

from kvcache.stores.folder import Folder
from kvcache.stores.manifest import MANIFEST_BYTES, Manifest, Naming
from kvcache.stores.protocol import Stat
from kvcache.stores.streams import BrokenEntryError, check_digest

__all__ = ["Entries"]

_WRONG_FILE = {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK}
_POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, which ``mmap`` does not define."""
REMEMBERED = 1 << 16
"""The number of remembered manifests; beyond it all are forgotten, and parsed again when needed."""


class Entries:
    """The entries of a folder. Entries that only another user may read count as misses.

    So do entries that claim more bytes than the ``budget``: the next writer evicts them.
    """

    def __init__(self, folder: Folder, naming: Naming, budget: int | None = None) -> None:
        self._folder = folder
        self._naming = naming
        self._budget = budget
        self._refused: dict[str, int] = {}  # stem -> inode of a file that could not be removed
        self._seen: dict[str, tuple[int, int]] = {}  # stem -> (inode, size) of a file whose manifest fits

    def stat(self, key: str) -> Stat | None:
        """None if there is no such entry. Raises BrokenEntryError if the manifest does not fit.

        A manifest is parsed only once: a file that was changed in place is detected when it is read.
        """
        stem = self._naming.stem(key)
        try:
            status = self._folder.stat(stem)
        except FileNotFoundError:
            return None
        if self._refused.get(stem) == status.st_ino:
            return None
        file = status.st_ino, status.st_size
        if self._seen.get(stem) != file:
            opened = self.open(key)
            if opened is None:
                return None
            os.close(opened[0])
            if len(self._seen) >= REMEMBERED:
                self._seen.clear()
            self._seen[stem] = file
        return Stat(status.st_size - MANIFEST_BYTES, status.st_mtime)

    def open(self, key: str) -> tuple[int, Manifest] | None:
        """The entry's file, which the caller must close, and its manifest. None and errors as for
        ``stat``.
        """
        stem = self._naming.stem(key)
        try:
            if stem in self._refused and self._refused[stem] == self._folder.stat(stem).st_ino:
                return None
            fd = self._folder.open_entry(stem)
        except (FileNotFoundError, PermissionError):
            return None
        except OSError as error:
            # Only errors that show that the file is wrong; a failing device is not damage.
            if error.errno not in _WRONG_FILE:
                raise
            raise BrokenEntryError(error.strerror or str(error)) from error
        manifest = None
        try:
            manifest = self._manifest(fd, os.fstat(fd).st_size, stem)
        finally:
            if manifest is None:
                os.close(fd)
        return None if manifest is None else (fd, manifest)

    def map(self, key: str) -> memoryview | None:
        """The verified data, mapped from the system's page cache. None and errors as for ``open``."""
        opened = self.open(key)
        if opened is None:
            return None
        fd, manifest = opened
        try:
            view = _mapped(fd, manifest.nbytes)
        finally:
            os.close(fd)
        digest = self._naming.start(key, manifest.nbytes)
        digest.update(view)
        check_digest(manifest, digest)
        return view

    def refuse(self, key: str) -> None:
        """Ignore this entry, which may not be removed, until it is replaced."""
        stem = self._naming.stem(key)
        with contextlib.suppress(FileNotFoundError):
            self._refused[stem] = self._folder.stat(stem).st_ino

    def _manifest(self, fd: int, size: int, stem: str) -> Manifest | None:
        """None for an entry larger than the budget."""
        nbytes = size - MANIFEST_BYTES
        try:
            manifest = self._naming.parse(os.pread(fd, MANIFEST_BYTES, max(0, nbytes)), stem)
        except ValueError as error:
            raise BrokenEntryError(str(error)) from error
        if manifest.nbytes != nbytes:
            raise BrokenEntryError(f"{nbytes} bytes are stored, {manifest.nbytes} were put")
        return None if self._budget is not None and nbytes > self._budget else manifest


def _mapped(fd: int, size: int) -> memoryview:
    if not size:
        return memoryview(bytearray())
    mapping = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    try:
        # Load all pages now, so that a failing device raises here and not by a signal later.
        mapping.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 5.14 there is no such advice
            raise
    return memoryview(mapping)
