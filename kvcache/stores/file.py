"""A store in a folder on disk, shared safely by processes, whole after any crash.

``put`` goes: with the folder's lock held, eviction; data and manifest into temporary files; then, with the
lock held again: rename of the data, rename of the manifest. The manifest is what makes the entry exist.
``get_into`` takes no lock: when what it read does not hold, it reads once more with the lock held, so that an
eviction or another process's put on the way is never taken for damage.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvcache.stores.buffers import Buffer, WritableBuffer, as_parts, as_writable
from kvcache.stores.catalog import Catalog
from kvcache.stores.closing import Closing, InFlightCalls
from kvcache.stores.digests import XXH3, Digests, check_digest
from kvcache.stores.entries import BrokenEntryError, Entries
from kvcache.stores.errors import (
    SnapshotCorruptError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    is_read_only,
    translated,
)
from kvcache.stores.folder import Folder
from kvcache.stores.lockfile import HeldLock
from kvcache.stores.manifest import DATA, MANIFEST, Naming
from kvcache.stores.protocol import Reader, Stat, Usage, check_budget, check_key, check_keys
from kvcache.stores.streams import FileReader, VerifiedReader, write_all, write_digested

__all__ = ["FileStore"]


T = TypeVar("T")


class FileStore(Closing):
    """Entries as files of the folder ``path``, which is made where it is not there, for its user alone.

    ``budget``: bytes of entries (``Stat.nbytes``; a manifest of some 150 bytes each is not counted) that
    all processes together keep, those that are being written included; the least recently used go first.
    None: no limit. An entry that is larger is refused, and not read where one is there. With ``durable`` a
    put returns when its bytes are on the device; without, a crash of the machine (not of the process) may
    cost entries, which are then found corrupt and dropped.

    ``digest``: "xxh3_128" finds damage. Where others may write to the folder, "blake3" with a ``secret``
    that they do not know: they can forge no entry. Stores that digest otherwise, or with another secret, do
    not see one another's entries, and share the budget.

    A folder that is read-only is served as it is: ``put`` and ``delete`` raise StoreReadOnlyError.
    After a fork the child may go on with the store; fork while no other thread is in a call. Needs the
    package ``xxhash`` or ``blake3``, and a POSIX system.

    Raises StoreValueError for a budget, digest or secret that makes no sense; StoreUnavailableError: no
    permission, a folder that holds something else, a missing package.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        budget: int | None = None,
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
        self._catalog = Catalog(self._folder, self.budget)
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
            with self._temporaries(nbytes) as (data, manifest):
                digest = self._naming.start(key, nbytes)
                write_digested(data.fd, views, digest)
                encoded = self._naming.manifest(key, nbytes, digest.hexdigest()).encoded()
                write_all(manifest.fd, [memoryview(encoded)])
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
                self._used([key])
            return found

    def view(self, key: str) -> memoryview | None:
        """The entry's bytes where they lie in the system's page cache, not copied; None: not there.

        For a reader that copies them on at once: what it saves is one copy. Verified as in ``get_into``,
        and a hit as there. The view is good after the entry is evicted, and may be written to without
        effect on the file. Whoever truncates the file meanwhile ends this process by a signal: nobody who
        uses a FileStore does. With a ``secret`` it is a copy.
        """
        check_key(key)
        with self._call("view"):
            found = self._attempt("view", key, lambda: self._entries.map(key))
            if found is not None:
                self._used([key])
            return found

    def reader(self, key: str) -> Reader | None:
        """See :class:`kvcache.stores.protocol.ReadingStore`.

        With a ``secret`` all is read into memory, and verified, before the first byte is handed out.
        """
        check_key(key)
        with self._call("reader"):
            try:
                found = self._entries.open(key)
            except BrokenEntryError:
                return None
        if found is None:
            return None
        guard = functools.partial(translated, path=self.path)
        digest = self._naming.start(key, found[1].nbytes)
        reader = FileReader(*found, digest, guard, lambda: self._used([key]))
        return VerifiedReader(reader) if self._naming.keyed else reader

    def advise(self, keys: Sequence[str]) -> None:
        """See :class:`kvcache.stores.protocol.AdvisedStore`: the system reads into its page cache."""
        check_keys(keys)
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        with self._call("advise"):
            for key in keys:
                with contextlib.suppress(BrokenEntryError):  # who reads it finds out
                    if (found := self._entries.open(key)) is not None:
                        with os.fdopen(found[0], "rb") as data:
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
            stem = self._naming.stem(key)
            with self._folder.locked() as held, self._catalog.changing(held, [stem]):
                return self._catalog.remove(stem)

    def usage(self) -> Usage:
        """What is there now, of all processes; the counts of events are those of this object.

        In a folder that is read-only: the entries of this store's digest.
        """
        with self._call("usage"), self._settled() as held:
            if held is None:
                entries, nbytes = self._counted()
            else:
                state = self._catalog.refresh(held)
                entries, nbytes = state.entries, state.nbytes
            catalog = self._catalog
            return Usage(entries, nbytes, self.budget, catalog.evicted, catalog.dropped, catalog.swept)

    def close(self) -> None:
        if self._in_flight.close():
            self._catalog.close()
            self._folder.close()

    # Reading.

    def _used(self, keys: Sequence[str]) -> None:
        """They become the most recently used, the first most of all."""
        if not keys:
            return
        for key, time in zip(reversed(keys), self._folder.times(len(keys)), strict=True):
            self._folder.touch(self._naming.stem(key) + MANIFEST, time)

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
                raise SnapshotCorruptError(f"{op}: {key} in {self.path}: {error}; it was dropped") from error

    def _drop(self, key: str, held: HeldLock | None) -> None:
        """Remove what does not hold, or go by it no more where nothing may be removed."""
        stem = self._naming.stem(key)
        try:
            if held is not None:
                with self._catalog.changing(held, [stem]):
                    self._catalog.remove(stem)
        except OSError as error:
            if not is_read_only(error):
                raise
            held = None
        if held is None:
            self._entries.refuse(key)
        self._catalog.dropped += 1

    # Writing.

    @contextlib.contextmanager
    def _temporaries(self, nbytes: int) -> Iterator[tuple[_Temporary, _Temporary]]:
        """Files for data and manifest; what has not been published at the end is removed."""
        found: list[_Temporary] = []
        try:
            while not found:
                with self._folder.locked() as held:
                    others = self._folder.pending() if self.budget is not None else {}
                    if self.budget is None or sum(others.values()) + nbytes <= self.budget:
                        self._catalog.make_room(held, sum(others.values()) + nbytes)
                        token = secrets.token_hex(16)
                        for size in (nbytes, None):
                            created = self._folder.create_temporary(token, size)
                            found.append(_Temporary(*created))
                if not found:
                    self._folder.wait_for(next(iter(others)))
            yield found[0], found[1]
        finally:
            with contextlib.ExitStack() as closing:
                for temporary in found:
                    closing.callback(temporary.close)
                for temporary in found:
                    if not temporary.published:
                        self._folder.discard(temporary.name)

    def _commit(self, key: str, nbytes: int, data: _Temporary, manifest: _Temporary) -> bool:
        stem = self._naming.stem(key)
        with self._folder.locked() as held:
            try:
                if self._entries.stat(key) is not None:
                    return False
            except BrokenEntryError:
                self._drop(key, held)
            room = nbytes if self.budget is None else sum(self._folder.pending().values())
            with self._catalog.changing(held, [stem], room=room):
                (used,) = self._folder.times()
                os.utime(manifest.fd, ns=(used, used))
                try:
                    self._publish(data, stem + DATA)
                    self._publish(manifest, stem + MANIFEST)
                except BaseException:
                    with contextlib.suppress(OSError):  # who comes next looks at it again
                        self._catalog.remove(stem)
                    raise
                self._catalog.add(stem, nbytes, used)
            return True

    def _publish(self, temporary: _Temporary, name: str) -> None:
        self._folder.publish(temporary.name, name)
        temporary.published = True
        temporary.close()  # with the lock held: what is evicted while it is open takes its room
        if self.durable:
            self._folder.sync()

    # The rest.

    @contextlib.contextmanager
    def _call(self, op: str) -> Iterator[None]:
        with self._in_flight.running(op), translated(op, self.path):
            if self._folder.vanished:
                raise StoreUnavailableError(f"{op}: the folder {self.path} was deleted; open the store again")
            yield

    def _tidy(self) -> None:
        """Clear away what the dead have left, and evict what exceeds the budget, in turn with others."""
        with self._folder.locked() as held:
            self._catalog.refresh(held, opening=True)
            self._catalog.sweep()
        more = True
        while more:
            with self._folder.locked() as held:
                more = self._catalog.trim(held)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[HeldLock | None]:
        """The folder's lock; None where this process may not take it, or not any more."""
        with contextlib.ExitStack() as stack:
            held = None
            if self._folder.writable:
                try:
                    held = stack.enter_context(self._folder.locked())
                except OSError as error:
                    if not is_read_only(error):
                        raise
            yield held

    def _check_writable(self, op: str) -> None:
        if not self._folder.writable:
            raise StoreReadOnlyError(f"{op}: the folder {self.path} is read-only")

    def _counted(self) -> tuple[int, int]:
        """How many entries there are, and their bytes, one by one."""
        names = [name for name, _ in self._folder.entries() if name.endswith(MANIFEST)]
        keys = [self._naming.key(name.removesuffix(MANIFEST)) for name in names]
        found = [stat for key in keys if key is not None and (stat := self._stat(key)) is not None]
        return len(found), sum(stat.nbytes for stat in found)


@dataclass(slots=True)
class _Temporary:
    name: str
    fd: int
    published: bool = False

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
