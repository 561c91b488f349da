"""A store in a folder on disk, shared safely by processes, whole after any crash.

``put`` goes: data and manifest into temporary files; then, with the folder's lock held: eviction, rename of
the data, rename of the manifest. The manifest is what makes the entry exist. ``get_into`` takes no lock:
when what it read does not hold, it reads once more with the lock held, so that an eviction or another
process's put on the way is never taken for damage.
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

from kvcache.closing import Closing
from kvcache.stores.buffers import Buffer, WritableBuffer, as_parts, as_writable
from kvcache.stores.calls import Calls
from kvcache.stores.entries import BrokenEntryError, Entries
from kvcache.stores.errors import SnapshotCorrupt, StoreFull, StoreReadOnly, StoreUnavailable
from kvcache.stores.folder import Folder, Held, translated
from kvcache.stores.ledger import Ledger
from kvcache.stores.manifest import DATA, MANIFEST, Manifest
from kvcache.stores.protocol import Reader, Stat, Usage, check_budget, check_key, check_keys
from kvcache.stores.reading import FileReader
from kvcache.stores.streams import load_xxhash, write_digested

__all__ = ["FileStore"]


T = TypeVar("T")


class FileStore(Closing):
    """Entries as files of the folder ``path``, which is made where it is not there.

    ``budget``: bytes of entries (``Stat.nbytes``; a manifest of some 150 bytes each is not counted) that
    all processes together keep; the least recently used go first. None: no limit. While an entry is
    written it takes room beyond the budget. With ``durable`` a put returns when its bytes are on
    the device; without, a crash of the machine (not of the process) may cost entries, which are then
    found corrupt and dropped.

    A folder that may only be read is served as it is: ``put`` and ``delete`` raise StoreReadOnly.
    After a fork, open it anew in the child. Needs the package ``xxhash`` and a POSIX system.

    Raises StoreUnavailable: no permission, a folder that holds something else, no xxhash.
    """

    def __init__(
        self, path: str | os.PathLike[str], budget: int | None = None, *, durable: bool = True
    ) -> None:
        self.budget = check_budget(budget)
        self.durable = durable
        self.path = Path(path).absolute()
        load_xxhash()
        self._calls = Calls()
        self._folder = Folder(self.path)
        self._entries = Entries(self._folder)
        self._ledger = Ledger(self._folder, self.budget)
        self._clock = 0
        if self._folder.writable:
            with translated("FileStore", self.path), self._changing():
                self._ledger.make_room(0)

    def put(self, key: str, parts: Sequence[Buffer]) -> bool:
        check_key(key)
        views, nbytes = as_parts(parts)
        with self._call("put"):
            if self._stat(key) is not None:
                return False
            self._check_writable("put")
            if self.budget is not None and nbytes > self.budget:
                raise StoreFull(f"put: {nbytes} bytes; the budget of {self.path} is {self.budget}")
            with self._temporaries() as (data, manifest):
                digest = write_digested(data.fd, views)
                write_digested(manifest.fd, [memoryview(Manifest(key, nbytes, digest).encoded())])
                if self.durable:
                    os.fsync(data.fd)
                    os.fsync(manifest.fd)
                return self._commit(key, nbytes, data, manifest)

    def stat(self, keys: Sequence[str]) -> list[Stat | None]:
        check_keys(keys)
        with self._call("stat"):
            return [self._stat(key) for key in keys]

    def get_into(self, key: str, buffer: WritableBuffer) -> bool:
        check_key(key)
        view = as_writable(buffer, "get_into")
        with self._call("get_into"):
            found = self._attempt("get_into", key, lambda: self._entries.read(key, view))
            if found:
                self._folder.touch(key + MANIFEST, self._now())
            return found

    def view(self, key: str) -> memoryview | None:
        """The entry's bytes where they lie in the system's page cache, not copied; None: not there.

        For a reader that copies them on at once: what it saves is one copy. Verified as in ``get_into``,
        and a hit as there. The view is good after the entry is evicted, and may be written to without
        effect on the file. Whoever truncates the file meanwhile ends this process by a signal: nobody who
        uses a FileStore does.
        """
        check_key(key)
        with self._call("view"):
            found = self._attempt("view", key, lambda: self._entries.map(key))
            if found is not None:
                self._folder.touch(key + MANIFEST, self._now())
            return found

    def reader(self, key: str) -> Reader | None:
        """See :class:`kvcache.stores.protocol.ReadingStore`."""
        check_key(key)
        with self._call("reader"):
            try:
                found = self._entries.open(key)
            except BrokenEntryError:
                return None
        if found is None:
            return None
        guard = functools.partial(translated, path=self.path)
        return FileReader(*found, guard, lambda: self._folder.touch(key + MANIFEST, self._now()))

    def prefix(self, keys: Sequence[str]) -> int:
        check_keys(keys)
        with self._call("prefix"):
            count = next((i for i, key in enumerate(keys) if self._stat(key) is None), len(keys))
            for key in reversed(keys[:count]):
                self._folder.touch(key + MANIFEST, self._now())
            return count

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._call("delete"):
            self._check_writable("delete")
            with self._changing():
                return self._ledger.remove(key)

    def usage(self) -> Usage:
        """What is there now, of all processes; the counts of events are those of this object."""
        with self._call("usage"):
            if not self._folder.writable:
                return self._usage_read_only()
            with self._folder.locked() as held:
                self._ledger.refresh(held)
                return self._usage()

    def close(self) -> None:
        if self._calls.close():
            self._folder.close()

    # Reading.

    def _stat(self, key: str) -> Stat | None:
        try:
            return self._entries.stat(key)
        except BrokenEntryError:
            pass
        with self._settled() as held:
            try:
                return self._entries.stat(key)
            except BrokenEntryError:
                self._drop(key, held)
                return None

    def _attempt(self, op: str, key: str, read: Callable[[], T]) -> T:
        """Read, and once more with the lock: nobody changes anything then, what does not hold is damaged."""
        try:
            return read()
        except BrokenEntryError:
            pass
        with self._settled() as held:
            try:
                return read()
            except BrokenEntryError as error:
                self._drop(key, held)
                raise SnapshotCorrupt(f"{op}: {key} in {self.path}: {error}; it was dropped") from error

    def _drop(self, key: str, held: Held | None) -> None:
        if held is not None:
            with self._ledger.changing(held):
                self._ledger.remove(key)
        else:
            self._entries.refuse(key)
        self._ledger.dropped += 1

    # Writing.

    @contextlib.contextmanager
    def _temporaries(self) -> Iterator[tuple[_Temporary, _Temporary]]:
        """Files for data and manifest; what has not been renamed at the end is removed."""
        found: list[_Temporary] = []
        try:
            with self._folder.locked():
                for _ in range(2):
                    found.append(_Temporary(*self._folder.create_temporary()))  # noqa: PERF401
            yield found[0], found[1]
        finally:
            for temporary in found:
                if not temporary.renamed:
                    self._folder.unlink(temporary.name)
                os.close(temporary.fd)

    def _commit(self, key: str, nbytes: int, data: _Temporary, manifest: _Temporary) -> bool:
        with self._folder.locked() as held:
            try:
                if self._entries.stat(key) is not None:
                    return False
            except BrokenEntryError:
                self._drop(key, held)
            with self._ledger.changing(held):
                self._ledger.make_room(nbytes)
                used = self._now()
                os.utime(manifest.fd, ns=(used, used))
                try:
                    self._rename(data, key + DATA)
                    self._rename(manifest, key + MANIFEST)
                except BaseException:
                    self._ledger.remove(key)
                    raise
                self._ledger.add(key, nbytes, used)
                return True

    def _rename(self, temporary: _Temporary, name: str) -> None:
        self._folder.rename(temporary.name, name)
        temporary.renamed = True
        if self.durable:
            self._folder.sync()

    # The rest.

    @contextlib.contextmanager
    def _call(self, op: str) -> Iterator[None]:
        with self._calls.running(op), translated(op, self.path):
            if self._folder.vanished:
                raise StoreUnavailable(f"{op}: the folder {self.path} was deleted; open the store anew")
            yield

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._folder.locked() as held, self._ledger.changing(held):
            yield

    @contextlib.contextmanager
    def _settled(self) -> Iterator[Held | None]:
        """The folder's lock, where this process may take it."""
        if not self._folder.writable:
            yield None
            return
        with self._folder.locked() as held:
            yield held

    def _check_writable(self, op: str) -> None:
        if not self._folder.writable:
            raise StoreReadOnly(f"{op}: the folder {self.path} may only be read")

    def _now(self) -> int:
        """Nanoseconds, no two alike in this object: they order what was used."""
        self._clock = max(time.time_ns(), self._clock + 1)
        return self._clock

    def _usage(self) -> Usage:
        ledger = self._ledger
        counts = ledger.evicted, ledger.dropped, ledger.swept
        return Usage(len(ledger), ledger.nbytes, self.budget, *counts)

    def _usage_read_only(self) -> Usage:
        names = [name for name, _ in self._folder.entries()]
        keys = [name.removesuffix(MANIFEST) for name in names if name.endswith(MANIFEST)]
        found = [stat for stat in map(self._stat, keys) if stat is not None]
        return Usage(len(found), sum(stat.nbytes for stat in found), self.budget, 0, self._ledger.dropped)


@dataclass(slots=True)
class _Temporary:
    name: str
    fd: int
    renamed: bool = False
