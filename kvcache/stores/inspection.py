"""Inspecting the folder of a FileStore, and files of snapshots. Nothing is changed or marked as used.

A folder is read without its lock and without opening the store, which would remove broken entries: an entry
that another process is writing or evicting may therefore show as broken.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from kvcache.stores.errors import SnapshotCorruptError, StoreUnavailableError
from kvcache.stores.folder import CHANGING, LOCK, PAGES, STORE_FORMAT
from kvcache.stores.manifest import ENTRY, MANIFEST_BYTES, Manifest, is_stem, unkeyed_digest
from kvcache.stores.serialized_snapshot import SerializedSnapshot, unpack

__all__ = ["SnapshotFile", "StoreFolder"]

_BLOCK = 1 << 19
"""Bytes that are read and digested at a time."""


class StoreFolder:
    """The folder of a FileStore, for a look at what is in it.

    Raises StoreUnavailableError for a folder that is not a store, or cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.is_store(self.path):
            raise StoreUnavailableError(
                f"inspect: {path} is not a store: {LOCK} is missing or has another format"
            )

    @staticmethod
    def is_store(path: str | Path) -> bool:
        """Whether this is the folder of a FileStore."""
        try:
            return (Path(path) / LOCK).read_bytes()[: len(STORE_FORMAT)] == STORE_FORMAT
        except OSError:
            return False

    def files(self) -> list[SnapshotFile]:
        """The entries, in no order."""
        files = []
        with _reading(self.path), os.scandir(self.path / PAGES) as items:
            for item in items:
                stem, suffix = os.path.splitext(item.name)  # noqa: PTH122
                if suffix == ENTRY and is_stem(stem) and item.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                        files.append(SnapshotFile.of(item.path, item.stat(follow_symlinks=False)))
        return files

    def writing(self) -> int:
        """How many entries are being written or removed."""
        changing = self.path / CHANGING
        with _reading(self.path):
            return len(os.listdir(changing)) if changing.is_dir() else 0  # noqa: PTH208


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """A file with a serialized snapshot: an entry of a FileStore, or one of its own.

    ``nbytes``: bytes of the snapshot, without the manifest that an entry ends with. ``last_used``: Unix
    seconds. Raises StoreUnavailableError for a file that cannot be read.
    """

    path: Path
    nbytes: int
    last_used: float

    @classmethod
    def of(cls, path: str | Path, status: os.stat_result | None = None) -> Self:
        """The file at ``path``, whose ``status`` may be known."""
        path = Path(path)
        with _reading(path):
            status = status or path.stat()
        manifest = MANIFEST_BYTES if path.suffix == ENTRY else 0
        return cls(path, max(0, status.st_size - manifest), status.st_mtime)

    @property
    def is_entry(self) -> bool:
        """Whether its name is that of an entry of a FileStore, which has a manifest with a digest."""
        return self.path.suffix == ENTRY

    def open(self) -> SerializedSnapshot:
        """The snapshot, mapped: what nobody looks at is not read, and the arrays are not checked.

        Raises SnapshotCorruptError for a file of anything else.
        """
        if not self.nbytes:
            raise SnapshotCorruptError(f"inspect: {self.path}: an empty file")
        try:
            with _reading(self.path):
                return unpack(np.memmap(self.path, np.uint8, "r", shape=(self.nbytes,)))
        except SnapshotCorruptError as error:
            raise SnapshotCorruptError(
                f"inspect: {self.path}: damaged, or not a saved conversation ({error})"
            ) from error

    def check(self) -> bool:
        """Read an entry completely, and compare it with its manifest.

        False if only those with the store's secret can tell. Raises SnapshotCorruptError if the entry is not
        what was put.
        """
        # Not mapped: a device that fails is an error here, and no signal.
        with _reading(self.path), self.path.open("rb", buffering=0) as file:
            left = max(0, os.fstat(file.fileno()).st_size - MANIFEST_BYTES)
            file.seek(left)
            try:
                manifest = Manifest.parse(file.read(MANIFEST_BYTES), self.path.stem)
            except ValueError as error:
                raise SnapshotCorruptError(str(error)) from error
            if manifest.nbytes != left:
                raise SnapshotCorruptError(f"{manifest.nbytes} bytes were put, {left} are stored")
            digest, block = unkeyed_digest(self.path.stem, left), memoryview(bytearray(_BLOCK))
            if digest is None:
                return False
            file.seek(0)
            while left and (count := file.readinto(block[:left])):
                digest.update(block[:count])
                left -= count
        if digest.hexdigest() != manifest.digest:
            raise SnapshotCorruptError("its digest is wrong")
        return True


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailableError(f"inspect: {path}: {error.strerror or error}") from error
