"""A store in a folder on disk, which processes share safely and which is consistent after any crash.

``put`` works in three steps. With the folder's lock held, it evicts entries and creates a file of the entry's
size. It then writes the bytes and their manifest into that file. With the lock held again, it adds a row to
the index and renames the file, which makes the entry exist. Reading takes no lock, as an entry's file never
changes. If an entry fails verification, it is read once more with the lock held, so that an entry that has
just been replaced is not dropped.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvcache.stores.buffers import Buffer, WritableBuffer, as_parts, as_writable, check_size
from kvcache.stores.closing import Closing, InFlightCalls
from kvcache.stores.digests import XXH3, Digests, check_digest
from kvcache.stores.entries import Entries
from kvcache.stores.errors import (
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    is_read_only,
    translated,
)
from kvcache.stores.folder import Folder
from kvcache.stores.index import Index
from kvcache.stores.manifest import Naming
from kvcache.stores.protocol import Reader, Stat, Usage, check_budget, check_key, check_keys
from kvcache.stores.streams import BrokenEntryError, BytesReader, FileReader, write_all, write_digested

__all__ = ["FileStore"]

_PAUSE = 0.002
"""Seconds between two attempts to get room that other writers occupy. Writers do not wait for one another's
files, since a file that is evicted while it is open still takes up room.
"""

T = TypeVar("T")


class FileStore(Closing):
    """Entries as files in the folder ``path``, which is created if necessary, accessible to its user only.

    ``budget``, a number or a size such as ``"2GiB"``, limits the bytes of entries (``Stat.nbytes``; their
    manifests of 512 bytes each are not counted) that all processes together keep, including those being
    written. The least recently used entries are evicted first. None: no limit. Larger entries are neither
    written nor read. Give all stores of a folder the same budget: a store that finds more than its own evicts
    the excess, and logs this once.
    With ``durable``, ``put`` returns when its bytes are on the device; without it, a crash of the machine
    (not of the process) may damage entries, which are then detected and dropped.

    ``digest``: "xxh3_128" detects damage. If others may write to the folder, use "blake3" with a ``secret``
    that they do not know, so that they cannot forge entries. Stores with different digests or secrets do not
    see one another's entries, but share the budget.

    A read-only folder can be read: ``put`` and ``delete`` raise StoreReadOnlyError. After a fork the child
    may use the store; fork while no other thread is in a call. Needs the package ``xxhash`` or ``blake3``,
    and a POSIX system.

    Raises StoreValueError for an invalid budget, digest or secret; StoreUnavailableError for missing
    permissions, a folder with other content, or a missing package.

    >>> import tempfile
    >>> from kvcache.stores import FileStore
    >>> with tempfile.TemporaryDirectory() as folder, FileStore(folder, budget=1 << 30) as store:
    ...     store.put("a-key", [b"bytes"])
    ...     store.put("a-key", [b"others"])          # written once: nothing happens
    ...     store.stat(["a-key"])[0].nbytes
    True
    False
    5
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int | str | None = None,
        *,
        durable: bool = True,
        digest: str = XXH3,
        secret: str | None = None,
    ) -> None:
        self.budget = check_budget(budget)
        self.durable = durable
        self.path = Path(path).absolute()
        check_digest("FileStore", digest, secret)
        self._naming = Naming(Digests("FileStore", "disk", digest, secret))
        self._in_flight = InFlightCalls()
        self._folder = Folder(self.path)
        self._entries = Entries(self._folder, self._naming, self.budget)
        self._index = Index(self._folder, self.budget)
        if self._folder.writable:
            with translated("FileStore", self.path):
                self._tidy()

    def __repr__(self) -> str:
        limit = "" if self.budget is None else f", at most {self.budget:,} bytes"
        return f"<FileStore at {str(self.path)!r}{limit}>"

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        check_key(key)
        views, nbytes = as_parts(parts)
        with self._call("put"):
            if self._stat(key) is not None:
                return False
            self._check_writable("put")
            if self.budget is not None and nbytes > self.budget:
                raise StoreFullError(f"put: {nbytes} bytes; the budget of {self.path} is {self.budget}")
            with self._temporary(key, nbytes) as temporary:
                digest = self._naming.start(key, nbytes)
                write_digested(temporary.fd, views, digest)
                manifest = self._naming.manifest(key, nbytes, digest.hexdigest())
                write_all(temporary.fd, [memoryview(manifest.encoded())])
                if self.durable:
                    os.fsync(temporary.fd)
                return self._commit(key, nbytes, temporary)

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        check_keys(keys)
        with self._call("stat"):
            return [self._stat(key) for key in keys]

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        check_key(key)
        view = as_writable(buffer, "get_into")
        with self._call("get_into"):
            return self._attempt("get_into", key, lambda: self._read_into(key, view))

    def view(self, key: str) -> memoryview | None:
        """The entry's bytes mapped from the system's page cache, without a copy; None if there is no such
        entry.

        For readers that copy the bytes on at once, this saves one copy. The bytes are verified, and count as
        a hit, as in ``get_into``. The view stays valid after the entry is evicted, and writing to it does not
        affect the file. If another program truncates the file meanwhile, the process is killed by a signal; a
        FileStore never does this. With a ``secret`` the result is a copy.
        """
        check_key(key)
        with self._call("view"):
            if self._naming.keyed:
                return self._attempt("view", key, lambda: self._copied(key))
            view = self._attempt("view", key, lambda: self._entries.map(key))
            if view is not None:
                self._used([key])
            return view

    def reader(self, key: str) -> Reader | None:
        """See ``kvcache.stores.protocol.ReadingStore``.

        With a ``secret``, the whole entry is read into memory and verified before the first byte is returned.
        """
        check_key(key)
        with self._call("reader"):
            try:
                reader = self._reader(key)
            except BrokenEntryError:
                return None
        return _verified(reader) if reader is not None and self._naming.keyed else reader

    def advise(self, keys: Sequence[str]) -> None:
        """See ``kvcache.stores.protocol.AdvisedStore``: the system reads into its page cache."""
        check_keys(keys)
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        with self._call("advise"):
            for key in keys:
                with contextlib.suppress(BrokenEntryError):  # the reader will find out
                    if (entry := self._entries.open(key)) is not None:
                        with os.fdopen(entry[0], "rb") as data:
                            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def prefix(self, keys: Sequence[str]) -> int:
        check_keys(keys)
        with self._call("prefix"):
            count = next((i for i, key in enumerate(keys) if self._stat(key) is None), len(keys))
            self._used(keys[:count])
            return count

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._call("delete"):
            self._check_writable("delete")
            with self._index.locked():
                return self._index.remove(self._naming.stem(key))

    def usage(self) -> Usage:
        """What all processes store now; event counts are those of this object.

        In a read-only folder: the entries with this store's digest.
        """
        with self._call("usage"), self._settled() as locked:
            entries, nbytes = self._index.totals() if locked else self._counted()
            index = self._index
            return Usage(entries, nbytes, self.budget, index.evicted, index.dropped, index.swept)

    def close(self) -> None:
        if self._in_flight.close():
            self._index.close()
            self._folder.close()

    # Reading.

    def _used(self, keys: Sequence[str]) -> None:
        """Mark entries as the most recently used, the first one most of all."""
        if not keys:
            return
        for key, moment in zip(reversed(keys), self._folder.lock.times(len(keys)), strict=True):
            self._folder.touch(self._naming.stem(key), moment)

    def _stat(self, key: str) -> Stat | None:
        try:
            return self._attempt("stat", key, lambda: self._entries.stat(key))
        except BrokenEntryError:
            return None

    def _reader(self, key: str) -> FileReader | None:
        entry = self._entries.open(key)
        if entry is None:
            return None
        digest = self._naming.start(key, entry[1].nbytes)
        return FileReader(
            entry, digest, functools.partial(translated, path=self.path), lambda: self._used([key])
        )

    def _read_into(self, key: str, view: memoryview) -> bool:
        reader = self._reader(key)
        if reader is None:
            return False
        with contextlib.closing(reader):
            check_size("get_into", view, key, reader.left)
            reader.fill([view])
        return True

    def _copied(self, key: str) -> memoryview | None:
        reader = self._reader(key)
        return None if reader is None else _loaded(reader).data

    def _attempt(self, op: str, key: str, read: Callable[[], T]) -> T:
        """Read without the lock, and if that fails once more with it: an entry that is still invalid is
        dropped.
        """
        try:
            return read()
        except BrokenEntryError:
            pass
        with self._settled() as locked:
            try:
                return read()
            except BrokenEntryError as error:
                self._drop(key, locked)
                raise BrokenEntryError(f"{op}: {key} in {self.path}: {error}; it was dropped") from error

    def _drop(self, key: str, locked: bool) -> None:
        """Remove an invalid entry, or ignore it from now on if it may not be removed."""
        if locked:
            try:
                self._index.remove(self._naming.stem(key))
            except OSError as error:
                if not is_read_only(error):
                    raise
                locked = False
        if not locked:
            self._entries.refuse(key)
        self._index.dropped += 1

    # Writing.

    @contextlib.contextmanager
    def _temporary(self, key: str, nbytes: int) -> Iterator[_Temporary]:
        """A file for the entry, once there is room for it; removed at the end if it was not published."""
        stem, temporary = self._naming.stem(key), None
        while temporary is None:
            with self._index.locked():
                if self.budget is None or sum(self._index.pending) + nbytes <= self.budget:
                    self._index.make_room(nbytes)
                    temporary = _Temporary(*self._folder.create(stem, nbytes))
            if temporary is None:
                time.sleep(_PAUSE)
        try:
            yield temporary
        finally:
            temporary.close()
            if not temporary.left_to_others:
                self._folder.discard(temporary.name)

    def _commit(self, key: str, nbytes: int, temporary: _Temporary) -> bool:
        stem = self._naming.stem(key)
        with self._index.locked():
            try:
                if self._entries.stat(key) is not None:
                    return False
            except BrokenEntryError:
                self._drop(key, locked=True)
            self._index.make_room()
            (used,) = self._folder.lock.times()
            os.utime(temporary.fd, ns=(used, used))
            try:
                self._index.add(stem, nbytes, used)
                self._folder.publish(temporary.name, stem)
                temporary.close()  # with the lock held: an evicted entry still takes up room while open
                if self.durable:
                    self._folder.sync()
            except BaseException:
                temporary.left_to_others = True  # as long as it exists, the next process checks this entry
                with contextlib.suppress(OSError):
                    self._index.remove(stem)
                    temporary.left_to_others = False
                raise
            return True

    # Housekeeping.

    @contextlib.contextmanager
    def _call(self, op: str) -> Iterator[None]:
        with self._in_flight.running(op), translated(op, self.path):
            if self._folder.vanished:
                gone = StoreUnavailableError(
                    f"{op}: the folder {self.path} was deleted while it was open; restart the program, or "
                    "open the store again"
                )
                gone.lasting = True
                raise gone
            yield

    def _tidy(self) -> None:
        """Remove the files of dead writers and evict what exceeds the budget, letting others in between."""
        with self._index.locked(opening=True):
            pass
        more = True
        while more:
            with self._index.locked():
                more = self._index.trim()

    @contextlib.contextmanager
    def _settled(self) -> Iterator[bool]:
        """The folder's lock; False if this process may not take it, or no longer may."""
        with contextlib.ExitStack() as stack:
            locked = False
            if self._folder.writable:
                try:
                    stack.enter_context(self._index.locked())
                    locked = True
                except OSError as error:
                    if not is_read_only(error):
                        raise
            yield locked

    def _check_writable(self, op: str) -> None:
        if not self._folder.writable:
            raise StoreReadOnlyError(f"{op}: the folder {self.path} is read-only")

    def _counted(self) -> tuple[int, int]:
        """The number of entries and their bytes, counted one by one."""
        keys = [self._naming.key(stem) for stem, _ in self._folder.entries()]
        stats = [stat for key in keys if key is not None and (stat := self._stat(key)) is not None]
        return len(stats), sum(stat.nbytes for stat in stats)


@dataclass(slots=True)
class _Temporary:
    name: str
    fd: int
    left_to_others: bool = False
    """Whether the file stays after the put, because both the put and the repair of the index failed."""

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _loaded(reader: FileReader) -> np.ndarray:
    """All of it, verified."""
    data = np.empty(reader.left, np.uint8)
    with contextlib.closing(reader):
        reader.fill([data])
    return data


def _verified(reader: FileReader) -> Reader:
    """Its bytes, none of which are returned before all have been verified."""
    return BytesReader(reader.left, lambda: _loaded(reader))
