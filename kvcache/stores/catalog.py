"""The entries of a folder, counted and in order of use: the index, kept in step with the files.

A manifest's modification time is when its entry was last used. A hit moves it without telling the index, but
only forward: the oldest entry that the index knows is looked at once more before it is evicted, and goes
back into the queue when it was used since.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from kvcache.stores.errors import is_read_only
from kvcache.stores.folder import Folder
from kvcache.stores.index import Index, IndexDamagedError, Row, State, boot_id
from kvcache.stores.lockfile import LAST_TIME, HeldLock
from kvcache.stores.manifest import DATA, MANIFEST, TEMPORARY, is_stem

__all__ = ["Catalog"]

LOOKED: Final = 1024
"""Entries used since the index last saw them, which one eviction looks at in search of an older one."""
AT_ONCE: Final = 512
"""Entries that are evicted with the lock held, where opening finds more than the budget allows."""


class Catalog:
    """What a folder holds. Every method is called with its lock held."""

    def __init__(self, folder: Folder, budget: int | None) -> None:
        self.budget = budget
        self.evicted = self.dropped = self.swept = 0
        self._folder = folder
        self._index = Index(folder)
        self._gone: dict[str, bool] = {}
        self._there: list[Row] = []

    def close(self) -> None:
        self._index.close()

    def refresh(self, held: HeldLock, *, opening: bool = False) -> State:
        """What there is now. What others have changed without telling the index is looked at first."""
        state = self._known(held)
        if state is None or (opening and (state.boot, state.names) != (boot_id(), self._folder.changed)):
            return self._scan(held)
        behind = (held.changes - state.changes) % 2**64
        if behind:
            stems = held.announced() if behind == 1 else None
            return self._scan(held) if stems is None else self._look_again(held, state, stems)
        return state

    def make_room(self, held: HeldLock, nbytes: int) -> None:
        """Evict until there is room for ``nbytes`` beside all entries."""
        if self.budget is not None and self.refresh(held).nbytes + nbytes > self.budget:
            with self.changing(held, [], room=nbytes):
                pass

    def trim(self, held: HeldLock) -> bool:
        """Evict what exceeds the budget, or part of it. False: that was all.

        First what is larger than the budget itself, which nobody reads: nothing else has to go for it.
        """
        state = self.refresh(held)
        if self.budget is None or state.nbytes <= self.budget:
            return False
        try:
            large = self._index.larger(self.budget)[:AT_ONCE]
        except IndexDamagedError:
            self._scan(held)
            return True
        with self.changing(held, large, most=0 if large else AT_ONCE):
            for stem in large:
                self.evicted += self.remove(stem)
        return True

    @contextlib.contextmanager
    def changing(
        self, held: HeldLock, stems: Sequence[str], room: int = 0, most: int | None = None
    ) -> Iterator[None]:
        """Evict for ``room`` bytes, ``most`` entries; then the block changes the files of ``stems``.

        The block says what it has done by ``add`` and ``remove``. It is announced before anything is
        changed: when it does not come to its end, whoever comes next looks at these entries again.
        """
        state = self.refresh(held)
        try:
            victims, requeued = self._oldest(state, room, most)
        except IndexDamagedError:
            state = self._scan(held)
            victims, requeued = self._oldest(state, room, most)
        known = state.names == self._folder.changed  # else others have changed names: who opens looks at all
        number = held.announce([*stems, *victims])
        self._gone, self._there = {}, requeued
        for stem in victims:
            self.evicted += self.remove(stem)
        yield
        # What the index cannot take is not lost: whoever comes next finds it behind and looks at the files.
        with contextlib.suppress(OSError):
            try:
                names = self._folder.changed if known else state.names
                self._index.write(state, number, names, self._gone, self._there)
            except IndexDamagedError:
                self._scan(held)

    def add(self, stem: str, nbytes: int, used: int) -> None:
        self._there.append(Row(stem, nbytes, used))

    def remove(self, stem: str) -> bool:
        """Delete an entry's files. False: it was not there."""
        self._gone[stem] = False
        self._gone[stem] = self._folder.remove(stem)
        return self._gone[stem]

    def sweep(self) -> None:
        """Clear away what writers that died were writing."""
        self.swept += self._folder.sweep()

    # What to evict.

    def _oldest(self, state: State, room: int, most: int | None) -> tuple[list[str], list[Row]]:
        """What to evict for ``room`` bytes; and what was looked at and stays, with its time of use."""
        excess = 0 if self.budget is None else state.nbytes + room - self.budget
        found: list[str] = []
        later: list[tuple[int, str, int]] = []  # a heap: when it was used, stem, bytes
        if excess <= 0:
            return found, []
        with contextlib.closing(self._index.by_use()) as rows:
            row = next(rows, None)
            while excess > 0 and (most is None or len(found) < most) and (row or later):
                if later and (row is None or len(later) > LOOKED or later[0][0] <= row.used):
                    _, stem, nbytes = heapq.heappop(later)
                else:
                    assert row is not None
                    (stem, nbytes, known), row = row, next(rows, None)
                    used = self._last_used(stem)
                    if used > known:
                        heapq.heappush(later, (used, stem, nbytes))
                        continue
                found.append(stem)
                excess -= nbytes
        if excess > 0 and (most is None or len(found) < most):
            raise IndexDamagedError(f"it has {len(found)} of {state.entries} entries")
        return found, [Row(stem, nbytes, used) for used, stem, nbytes in later]

    def _last_used(self, stem: str) -> int:
        try:
            return _used(self._folder.stat(stem + MANIFEST))
        except FileNotFoundError:
            return 0

    # What the files say.

    def _known(self, held: HeldLock) -> State | None:
        try:
            return self._index.state(held.changes)
        except IndexDamagedError:
            return None

    def _look_again(self, held: HeldLock, state: State, stems: Sequence[str]) -> State:
        """Of entries that somebody was changing who has not come to the end of it.

        Names that he has changed cannot be told from those that other programs have: who opens looks at all.
        """
        there, known = [], state.names == self._folder.changed
        for stem in stems:
            data, manifest = (self._regular(stem + suffix) for suffix in (DATA, MANIFEST))
            if data and manifest:
                there.append(Row(stem, data.st_size, _used(manifest)))
            else:
                self._clear(stem, foreign=manifest is not None)
        try:
            names = self._folder.changed if known else state.names
            return self._index.write(state, held.changes, names, dict.fromkeys(stems, False), there)
        except (IndexDamagedError, OSError):
            return self._scan(held)

    def _regular(self, name: str) -> os.stat_result | None:
        """None: it is not there, or no file."""
        try:
            found = self._folder.stat(name)
        except FileNotFoundError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def _scan(self, held: HeldLock) -> State:
        """Count what is there, and clear away halves of entries."""
        names = self._folder.changed  # before: what others change meanwhile is not known
        data: dict[str, int | None] = {}
        manifests: dict[str, int | None] = {}
        for name, found in self._folder.entries():
            regular = stat.S_ISREG(found.st_mode)
            if name.endswith(DATA):
                data[name[: -len(DATA)]] = found.st_size if regular else None
            elif name.endswith(MANIFEST):
                manifests[name[: -len(MANIFEST)]] = _used(found) if regular else None
            elif name.endswith(TEMPORARY):
                self.swept += self._folder.sweep_entry(name)
        rows = []
        for stem, used in manifests.items():
            nbytes = data.pop(stem, None)
            if not is_stem(stem):
                continue
            if nbytes is None or used is None:
                self._clear(stem, foreign=True)
            else:
                rows.append(Row(stem, nbytes, used))
        for stem in filter(is_stem, data):
            self._clear(stem, foreign=False)
        self._folder.used_until(max((row.used for row in rows), default=0))
        return self._index.replace(held.changes, names, rows)

    def _clear(self, stem: str, foreign: bool) -> None:
        try:
            self._folder.remove(stem)
        except OSError as error:
            if not is_read_only(error):
                raise
            return
        if foreign:
            self.dropped += 1
        else:
            self.swept += 1


def _used(manifest: os.stat_result) -> int:
    """When the entry was last used; of a date that no use has given it nothing is known: it is the oldest."""
    return manifest.st_mtime_ns if 0 <= manifest.st_mtime_ns < LAST_TIME else 0
