"""Finding the longest available prefix of some tokens, and restoring it into a sequence.

It comes from another session, from the cache's own snapshots or from host memory, and the rest from stores
(StoreLookup). Damaged or lost content is dropped, and the search starts again. If the device fails,
everything stays where it is and nothing is restored.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import ml
from kvcache.cache import CacheFullError, InvalidRangeError
from kvcache.caches.wrapper import unwrapped
from kvcache.prefix.loading import load_back, restore, restore_serialized
from kvcache.prefix.prefetch import Prefetch, Prefetcher
from kvcache.prefix.prefix_tree import Path, PrefixTree
from kvcache.prefix.radix_tree import Node, common_length
from kvcache.prefix.tiers import LookUp, StoreTier
from kvcache.prefix.tree_entry import TreeEntry, is_folded, span_of
from kvcache.snapshots.attention import AttentionSnapshots
from kvcache.snapshots.check_serialized import check_serialized
from kvcache.snapshots.layer_shapes import Layers, check_layers, layers_of_cache, layers_of_serialized
from kvcache.stores import Chain, SerializedSnapshot
from kvcache.stores.errors import SnapshotCorruptError

__all__ = ["PrefixMatcher", "Source", "StoreLookup"]

log = logging.getLogger("kvcache")

Told = Callable[[int], None]
"""Receives the number of tokens of a prefix restored so far."""


class LiveSession(Protocol):
    """An open session whose content others may share."""

    seq: int
    stale: bool
    """Whether its content is useless to others."""

    def shared(self) -> np.ndarray:
        """The tokens that its sequence holds for others."""


@dataclass(slots=True)
class Source:
    """An available prefix: from a session, or along nodes of the radix tree."""

    length: int = 0
    session: LiveSession | None = None
    nodes: tuple[Node[TreeEntry], ...] = ()
    held: bool = False
    """Whether the sequence already has it."""


class Stopwatch:
    """A context manager; ``seconds`` is the total time of all its blocks."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began


class PrefixMatcher:
    """Finds prefixes in ``sessions`` (by sequence), a tree and its stores, and restores them."""

    def __init__(
        self, tree: PrefixTree, sessions: Mapping[int, LiveSession], lookup: StoreLookup, block: int = 1
    ) -> None:
        """``block``: only whole ones of so many tokens are found."""
        self._block = block
        self._cache, self._tree, self._sessions, self._lookup = tree.cache, tree, sessions, lookup
        self.origins: Counter[str] = Counter()
        """The number of tokens of the last ``fill`` by origin: "live", a tier, or "store"."""
        self.spared = 0
        """Tokens of the last ``fill`` for which stores were not asked, because computing them is faster."""
        self.path = tree.walk(np.zeros(0, np.int64))
        """The path of the last ``fill``'s tokens through the tree."""
        self.matching = Stopwatch()
        """The time that the last ``fill`` took to find what it restored."""
        self.on_restore: Callable[[int, int], None] | None = None

    def fill(self, seq: int, ids: np.ndarray) -> int:
        """Make the sequence hold the longest available prefix of ``ids``; returns its length.

        If that fails, for example for lack of device memory, returns 0 and the sequence is empty. Raises
        CacheFullError.
        """
        try:
            return self._find_and_restore(seq, ids)
        except CacheFullError as error:
            remedy = "close one of PrefixCache.sessions and begin again, or use a larger capacity"
            raise CacheFullError(error.asked, error.free, error.held, "begin", remedy) from error
        except Exception:
            log.warning("a prefix could not be restored; it is computed again", exc_info=True)
            self._cache.remove(seq, 0)
            self.origins.clear()
            self.spared = 0
            return 0

    def _find_and_restore(self, seq: int, ids: np.ndarray) -> int:
        limit, reach = self._limit(ids), self._reach(ids)
        self.matching = Stopwatch()
        while True:
            self.origins.clear()
            with self.matching:
                self.path = self._tree.walk(ids[:limit])
                source = self._best(ids, self.path)
                self._tree.touch(self.path, source.length)
                stored = self._stored(ids, source.length, reach)
            while stored > source.length:
                reached = self._from_store(seq, ids, source, stored)
                if reached is None:
                    reach = (
                        stored - 1
                    )  # unavailable content was dropped, or the store fails: look for a shorter prefix
                    break
                if reached > limit:
                    self._cache.remove(seq, limit)
                    self.origins["store"] -= reached - limit
                    reached = limit
                else:
                    reached = self._go_on(seq, ids[:limit], reached)
                progress = reached > source.length
                source, stored = Source(reached, held=True), reached
                if progress:
                    with self.matching:
                        stored = self._stored(ids, reached, reach)
            else:
                if self.from_source(seq, ids, source):
                    if source.session is not None or source.held:
                        self.path = self._tree.walk(ids[:limit])  # newly kept content
                    return source.length

    def _limit(self, ids: np.ndarray) -> int:
        """The most tokens that are found: the model must compute the last one."""
        limit = int(ids.size) - 1
        return limit - limit % self._block

    def _reach(self, ids: np.ndarray) -> int:
        """How far stores are asked. An entry that ends with the last token is of use if it can be cut."""
        return int(ids.size) if self._block == 1 and self._tree.divisible else self._limit(ids)

    def _stored(self, ids: np.ndarray, length: int, reach: int) -> int:
        """How many of the first ``reach`` tokens stores have, at least ``length``; sets ``spared``."""
        limit, self.spared = self._limit(ids), 0
        if length < limit:
            length, spared = self._lookup.longest(ids, length, reach)
            self.spared = min(spared, max(0, limit - length))
        return length

    def prefetch(self, ids: np.ndarray) -> Prefetch | None:
        """Read ahead what ``fill`` would request from stores."""
        length = self.longest(ids)
        return None if length >= self._limit(ids) else self._lookup.prefetch(ids, length, self._reach(ids))

    def longest(self, ids: np.ndarray) -> int:
        """How many of ``ids`` are available now without asking stores."""
        return self._best(ids, self._tree.walk(ids[:-1])).length

    def _best(self, ids: np.ndarray, path: Path) -> Source:
        """The longest prefix of ``ids`` along a path that a session or the tree has."""
        best = Source()
        for session in self._sessions.values():
            if session.stale:
                continue
            shared = min(common_length(session.shared(), ids), int(path.tokens.size))
            shared -= shared % self._block
            if shared > best.length:
                length = self._cache.resume_point(session.seq, shared)
                if length > best.length and not length % self._block:
                    best = Source(length, session)
        length, nodes = self._tree.along(path)
        if length % self._block:  # a prompt that leaves what is kept inside a block
            length, nodes = self._tree.along(self._tree.walk(path.tokens[: length - length % self._block]))
        return Source(length, nodes=nodes) if length > best.length else best

    def from_source(self, seq: int, ids: np.ndarray, source: Source) -> bool:
        """Restore a source; returns whether the sequence holds the prefix. A node that fails is dropped, and
        the sequence is empty.
        """
        if source.held:
            return True
        if source.session is not None:
            self._cache.copy_prefix(source.session.seq, seq, source.length)
            self.origins["live"] += source.length
            if not self._tree.divisible:  # later snapshots depend on this position
                path = self._tree.walk(ids[: source.length])
                self._tree.insert(seq, path, [self._cache.snapshot(seq, 0, source.length)])
            return True
        if apart := [node for node in source.nodes if is_folded(node) and not _joins_in_place(node)]:
            self._tree.unfold(*apart)  # they are restored one after another
            return False
        self._cache.remove(seq, 0)
        if self._restore_along(seq, source.nodes, source.length) == source.length:
            return True
        self._cache.remove(seq, 0)
        return False

    def _go_on(self, seq: int, ids: np.ndarray, reached: int) -> int:
        """Restore what follows the first ``reached`` tokens from nodes reachable after reading from
        stores.
        """
        length, nodes = self._tree.beyond(ids, reached)
        if length % self._block:
            length, nodes = self._tree.beyond(ids[: length - length % self._block], reached)
        return self._restore_along(seq, nodes, length, reached)

    def _restore_along(self, seq: int, nodes: Sequence[Node[TreeEntry]], length: int, at: int = 0) -> int:
        """Restore nodes after the first ``at`` tokens; stops at a node that fails, which is dropped.

        Returns the resulting number of tokens of the sequence.
        """
        failed: Node[TreeEntry] | None = None
        with self._tree.in_use(nodes, restoring=True):
            while nodes:
                restored = restore(self._tree, seq, nodes, length)
                if restored is None:
                    failed = nodes[0]
                    break
                count, tier = restored
                reached = min(nodes[count - 1].end, length)
                self.origins[tier] += reached - at
                at, nodes = reached, nodes[count:]
                if tier == "host":
                    self._tell(length, at)
        if failed is not None and is_folded(failed):
            self._tree.unfold(failed)  # the next search finds out which of them failed
        elif failed is not None:
            self._tree.drop(failed)
        return at

    def _from_store(self, seq: int, ids: np.ndarray, source: Source, stored: int) -> int | None:
        """Restore ``source`` and then entries of ``[0, stored)``; returns the length restored.

        None, with an empty sequence, if required content is unavailable.
        """
        if self._tree.divisible:
            return self._entry_by_entry(seq, ids[:stored], source)
        with contextlib.ExitStack() as lent:
            entries = self._lookup.read_back(ids[:stored], source.length, lent)
            if not entries:
                return None
            first, _ = span_of(entries[0])
            if first and not self.from_source(seq, ids, source):
                return None
            steps = [entries] if self._lookup.restore(seq, entries) else [[entry] for entry in entries]
            for step in steps:  # one by one, to find out which of them does not match its key
                end = span_of(step[-1])[1]
                if step is not entries and not self._lookup.restore(seq, step):
                    self._cache.remove(seq, 0)
                    self._lookup.drop(ids, end)
                    return None
                self._tell(stored, end)
        if not first:
            self.origins.clear()
        self._lookup.touch(ids, [span_of(entry)[1] for entry in entries])
        self.origins["store"] += stored - sum(self.origins.values())
        path = self._tree.walk(ids[:stored])
        if self._tree.along(path)[0] < first:  # their predecessor was not kept
            first = 0
        self._tree.insert(seq, path, [self._cache.snapshot(seq, first, stored)], stored=True)
        return stored

    def _entry_by_entry(self, seq: int, ids: np.ndarray, source: Source) -> int | None:
        """Restore ``source``, then entries one by one as they are read; None if the source fails."""
        if not self.from_source(seq, ids, source):
            return None
        total, reported = int(ids.size), source.length

        def tell(at: int) -> None:
            nonlocal reported
            reported = at
            self._tell(total, at)

        reached = self._lookup.fetch(seq, ids, source.length, tell)
        if reached > reported:
            self._tell(total, reached)
        self.origins["store"] += reached - source.length
        self._tree.insert(seq, self._tree.walk(ids[:reached]), stored=True)
        return reached

    def _tell(self, total: int, reached: int) -> None:
        if self.on_restore is not None:
            self.on_restore(reached, total)


def _joins_in_place(node: Node[TreeEntry]) -> bool:
    return node.data is not None and node.data.snapshot is not None and node.data.snapshot.joins_in_place


class StoreLookup:
    """Reads entries from the stores of a tree. Entries that do not match their keys are dropped and not used.

    ``layers`` are the layers that serialized snapshots must have; {}: those of the cache. Entries that
    ``ahead`` has already read are not requested again.
    """

    def __init__(self, tree: PrefixTree, layers: Layers, ahead: Prefetcher | None = None) -> None:
        self._cache, self._tree, self._layers = tree.cache, tree, layers
        self._prefetcher = ahead
        self._known = bool(layers)
        """Whether the layers are known. In a cache from which nothing has been kept, a first pass may have
        failed before its last layer.
        """
        self._learned = False
        """Whether some layers are known only from entries, because the model has not put them yet."""
        self._doubtful = False
        """Whether entries were wrong about the layers: none is used until something that the model put has
        been kept.
        """

    def prefetch(self, ids: np.ndarray, length: int, limit: int) -> Prefetch | None:
        """Read ahead what stores have of ``[length, limit)``; None if there is nothing to read."""
        if self._prefetcher is None or length >= limit or self._waits_for_model:
            return None
        return self._prefetcher.start(self._chain(ids[:limit]), length, limit, self._tree.divisible)

    def longest(self, ids: np.ndarray, length: int, limit: int) -> LookUp:
        """How many tokens of ``ids[:limit]`` the stores claim to have; at least ``length``.

        Tokens that are faster to compute are not included.
        """
        if self._tree.store is None or length >= limit or self._waits_for_model:
            return LookUp(length)
        chain = self._chain(ids[:limit])
        known = None if self._prefetcher is None else self._prefetcher.look_up(chain, length, limit)
        if known is not None:
            return known
        return self._store.look_up(chain, length, limit, self._tree.divisible)

    def fetch(self, seq: int, ids: np.ndarray, reached: int, told: Told) -> int:
        """Restore entries after the first ``reached`` tokens, which the sequence has; returns the length
        reached.

        For divisible content. Entries are restored in order, each when it is read, as long as they are
        consecutive. ``told``, which must not raise, receives progress from time to time.
        """
        start, size, chain = reached, self._tree.keys.block_size, self._chain(ids)
        blocks = (*range(reached - reached % size + size, int(ids.size), size), int(ids.size))
        ends, used = deque(blocks), [*blocks]
        # The first entry, which is read whole, checks the layers of the cache.
        straight = self._store.reads_straight
        stuck = 0
        with contextlib.closing(self._whole_entries(chain, ends)) as entries:
            while ends:
                if straight and stuck < 2 and (not self._layers or layers_of_cache(self._cache)):
                    before = reached
                    reached = load_back(self._cache, seq, self._store, chain, reached, ends, told, used)
                    # The first may begin before the tokens already held, if the cache supports that.
                    stuck = stuck + 1 if reached == before else 0
                    while ends and ends[0] <= reached:
                        ends.popleft()
                if ends:
                    if not self._next(seq, ids, next(entries), reached, ends[0], used):
                        break
                    reached = ends.popleft()
                    told(reached)
        if reached > start:
            self._touch(chain, ids, sorted({end for end in used if end <= reached}))
        return reached

    def _whole_entries(
        self, chain: Chain, ends: deque[int]
    ) -> Generator[SerializedSnapshot | None, None, None]:
        """The entries that end at ``ends``, one by one; each is valid until the next is requested.

        Unless the stores provide bytes in place, an entry has been read ahead, or is read while the one
        before is used.
        """
        while self._store.reads_straight:
            with self._store.serialized(chain.at(ends[0])) as entry:
                yield entry
        keys = deque(map(chain.at, ends))
        while keys and (page := self._read_ahead(keys[0])) is not None:
            keys.popleft()
            yield page
        yield from self._store.entries([*keys])

    def read_back(
        self, ids: np.ndarray, floor: int, lent: contextlib.ExitStack
    ) -> list[SerializedSnapshot] | None:
        """Consecutive entries up to the end of ``ids``, from ``floor`` or before.

        They are valid until ``lent`` is closed. [] if no store has one of them: the entries after it, which
        are then useless, are dropped, so that their recomputed content is written again. None if one cannot
        be read at present.
        """
        chain = self._chain(ids)
        entries: list[SerializedSnapshot] = []
        at = int(ids.size)
        while at > floor or not entries:
            serialized = self._checked(ids, lent.enter_context(self._read(chain.at(at))), at)
            if serialized is None:
                if not self._store.lacking([chain.at(at)])[0]:
                    return None
                for part in entries:
                    self.drop(ids, span_of(part)[1])
                return []
            entries.append(serialized)
            at, _ = span_of(serialized)
        return entries[::-1]

    def restore(self, seq: int, parts: Sequence[SerializedSnapshot]) -> bool:
        """Restore checked, consecutive entries into the sequence in one step; returns whether that succeeded.

        Entries of another kind of cache are refused.
        """
        expected = self._layers or layers_of_cache(self._cache)
        self._known = self._known or bool(self._tree.radix_tree.root.children)
        learned = {} if self._known else layers_of_serialized(parts[-1])
        new = learned.keys() - expected.keys()
        try:
            for part in parts:
                check_layers(part, {**learned, **expected})
            restored = restore_serialized(self._cache, seq, parts, lent=True) is not None
            self._known = self._known or restored
            self._learned = self._learned or (restored and bool(new))
            return restored
        except (SnapshotCorruptError, InvalidRangeError) as error:
            if len(parts) == 1:
                log.warning("load back: %s; its content is computed again", error)
            return False
        except (ml.DeviceError, MemoryError) as error:
            if not new:
                raise
            log.warning("load back: %s; stores are not asked until the model has put its own layers", error)
            self._doubtful = True
            return False

    def unlearn(self) -> None:
        """Forget layers known only from entries if the model puts others. No session may be open.

        That is the case if its first ``put`` of a layer was refused, or it has put some of the layers and not
        all.
        """
        if not self._learned:
            return
        taken = [getattr(part, "snapshots", None) for part in unwrapped(self._cache)]
        storages = [each.storage.buffers for each in taken if isinstance(each, AttentionSnapshots)]
        layers = [layer_buffers for buffers in storages for layer_buffers in buffers.values()]
        self._learned = not all(layer_buffers.stamp for layer_buffers in layers)
        if not self._learned or not any(
            layer_buffers.stamp or layer_buffers.doubted for layer_buffers in layers
        ):
            return
        log.warning(
            "load back: stores have entries under the model's identity whose layers differ from its own; "
            "none is used until it has put its layers. PrefixCache(layers=) tells them apart from the start"
        )
        self._tree.clear()
        for buffers in storages:
            for layer in [layer for layer, layer_buffers in buffers.items() if not layer_buffers.stamp]:
                del buffers[layer]
        self._learned, self._known, self._doubtful = False, False, True

    @property
    def _waits_for_model(self) -> bool:
        self._doubtful = self._doubtful and not self._tree.radix_tree.root.children
        return self._doubtful

    def drop(self, ids: np.ndarray, end: int) -> None:
        """Delete the entry of the first ``end`` tokens from the stores because it does not match its key.

        It is kept as long as that is uncertain.
        """
        if self._waits_for_model:
            return
        self._store.drop(self._chain(ids[:end]).at(end))

    def touch(self, ids: np.ndarray, ends: Sequence[int]) -> None:
        """Mark the entries that end there as used; each depends on those before it."""
        self._touch(self._chain(ids), ids, ends)

    def _touch(self, chain: Chain, ids: np.ndarray, ends: Sequence[int]) -> None:
        writer = self._tree.writer
        assert writer is not None
        self._store.writes.touch([chain.at(end) for end in ends])
        nodes = self._tree.radix_tree.match(ids[: ends[0]]).nodes
        before = [end for node in nodes if node.data is not None for end in writer.ends(node)]
        if before := [end for end in before if end < ends[0]]:
            self._store.writes.touch([chain.at(end) for end in (*before, *ends)])

    def _read(self, key: str) -> contextlib.AbstractContextManager[SerializedSnapshot | None]:
        page = self._read_ahead(key)
        return self._store.read(key) if page is None else contextlib.nullcontext(page)

    def _read_ahead(self, key: str) -> SerializedSnapshot | None:
        return None if self._prefetcher is None else self._prefetcher.page(key)

    def _next(
        self,
        seq: int,
        ids: np.ndarray,
        entry: SerializedSnapshot | None,
        reached: int,
        end: int,
        used: list[int],
    ) -> bool:
        """Restore an entry that ends at ``end`` after the first ``reached`` tokens; returns whether that
        succeeded.

        ``used`` receives the ends of the entries inside the block that lead to it.
        """
        serialized = self._checked(ids, entry, end)
        if serialized is None:
            return False
        begin, _ = span_of(serialized)
        with contextlib.ExitStack() as lent:
            before = self.read_back(ids[:begin], reached, lent) if begin > reached else []
            if (
                begin > reached and not before
            ):  # conversations diverge there, and the entry that ends there is gone
                if before is not None:
                    self.drop(ids, end)
                return False
            used += [span_of(part)[1] for part in before or ()]
            for part in (*(before or ()), serialized):
                if not self.restore(seq, [part]):
                    self.drop(ids, span_of(part)[1])
                    self._cache.remove(seq, reached)
                    return False
        return True

    def _checked(
        self, ids: np.ndarray, serialized: SerializedSnapshot | None, end: int
    ) -> SerializedSnapshot | None:
        """``serialized``, if it is an entry that ends at ``end``; any other entry under its key is
        dropped.
        """
        if serialized is None:
            return None
        try:
            begin, last = check_serialized("load back", serialized, complete=True)
            if begin < last == end:
                self._store.break_even.sized(serialized.nbytes, end - begin)
                return serialized
            raise SnapshotCorruptError(
                f"load back: a serialized snapshot of [{begin}, {last}) under the key of {end} tokens"
            )
        except SnapshotCorruptError as error:
            log.warning("%s; its content is computed again", error)
        self.drop(ids, end)
        return None

    @property
    def _store(self) -> StoreTier:
        assert self._tree.store is not None
        return self._tree.store

    def _chain(self, ids: np.ndarray) -> Chain:
        return self._tree.chain(ids)
