"""How many bytes a folder holds, and which entry was used least recently: exact, whoever wrote them.

A manifest's modification time is when its entry was last used. Hits of other processes move it without
telling anyone, but only forward: the oldest entry known is looked at once more before it is evicted, and
goes back into the queue when it was used since.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcache.stores.folder import Folder, Held
from kvcache.stores.manifest import DATA, MANIFEST, TEMPORARY
from kvcache.stores.protocol import is_key

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Entry:
    nbytes: int
    used: int  # nanoseconds


@dataclass(slots=True)
class Ledger:
    """Every method is called with the folder's lock held."""

    folder: Folder
    budget: int | None
    nbytes: int = 0
    evicted: int = 0
    dropped: int = 0
    swept: int = 0
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _queue: list[tuple[int, str]] = field(default_factory=list)
    _changes: int = -1

    def __len__(self) -> int:
        return len(self._entries)

    def refresh(self, held: Held) -> None:
        """Read the folder anew, if another process has changed it since."""
        if held.changes != self._changes:
            changes, self._changes = held.changes, -1
            self._scan()
            self._changes = changes

    @contextlib.contextmanager
    def changing(self, held: Held) -> Iterator[None]:
        """Say, before it happens, that this process changes entries; when that fails, count anew."""
        self.refresh(held)
        try:
            self._changes = held.change()
            yield
        except BaseException:
            self._changes = -1
            raise

    def add(self, key: str, nbytes: int, used: int) -> None:
        self._forget(key)
        self._entries[key] = _Entry(nbytes, used)
        heapq.heappush(self._queue, (used, key))
        self.nbytes += nbytes

    def remove(self, key: str) -> bool:
        """Delete an entry's files, the manifest first. False: there was no manifest."""
        self._forget(key)
        there = self.folder.unlink(key + MANIFEST)
        self.folder.unlink(key + DATA)
        return there

    def make_room(self, nbytes: int) -> None:
        """Evict until ``nbytes`` more are within the budget, or nothing is left."""
        while self.budget is not None and self.nbytes + nbytes > self.budget and self._queue:
            used, key = heapq.heappop(self._queue)
            entry = self._entries.get(key)
            if entry is None or entry.used != used:
                continue
            entry.used = self._last_used(key)
            if entry.used > used:
                heapq.heappush(self._queue, (entry.used, key))
            else:
                self.evicted += self.remove(key)

    def _forget(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.nbytes

    def _last_used(self, key: str) -> int:
        try:
            return self.folder.stat(key + MANIFEST).st_mtime_ns
        except FileNotFoundError:
            return 0

    def _scan(self) -> None:
        """Count what is there, and clear away what writers that died have left."""
        data: dict[str, int] = {}
        manifests: dict[str, int] = {}
        for name, found in self.folder.entries():
            stem, suffix = os.path.splitext(name)  # noqa: PTH122
            regular = stat.S_ISREG(found.st_mode)
            if not is_key(stem):
                continue
            if suffix == TEMPORARY:
                self.swept += self.folder.sweep_temporary(name)
            elif suffix == DATA:
                data[stem] = found.st_size if regular else -1
            elif suffix == MANIFEST:
                manifests[stem] = found.st_mtime_ns if regular else -1
        whole = {key for key in data.keys() & manifests.keys() if data[key] >= 0 and manifests[key] >= 0}
        self.nbytes, self._entries, self._queue = 0, {}, []
        for key in whole:
            self.add(key, data[key], manifests[key])
        for key in data.keys() | manifests.keys():
            if key not in whole:
                self._clear(key, foreign=key in manifests)

    def _clear(self, key: str, foreign: bool) -> None:
        with contextlib.suppress(PermissionError):
            self.remove(key)
            if foreign:
                self.dropped += 1
            else:
                self.swept += 1
