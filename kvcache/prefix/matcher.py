"""The longest prefix of some tokens that can be had, and a sequence made to hold it.

It comes from another session, from the cache's own snapshots, from host memory, and the rest from stores
(store_lookup.py). Where what one of them was to give is damaged or lost, it is dropped, and the search begins
again. Where the device fails, everything stays where it is, and nothing is restored.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.cache import CacheFullError
from kvcache.offload.prefetch import Prefetch
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node, common_length
from kvcache.prefix.restoring import restore
from kvcache.prefix.session import Session
from kvcache.prefix.snapshot_points import pieces_of
from kvcache.prefix.store_lookup import StoreLookup
from kvcache.prefix.tree_entry import TreeEntry, span_of

__all__ = ["PrefixMatcher", "Source"]

log = logging.getLogger("kvcache")


@dataclass(slots=True)
class Source:
    """A prefix that can be had: from a session, or along nodes of the radix tree."""

    length: int = 0
    session: Session | None = None
    nodes: tuple[Node[TreeEntry], ...] = ()
    held: bool = False
    """The sequence has it already."""

    @property
    def above(self) -> Node[TreeEntry] | None:
        """The node right above the last one: a walk that begins there is short."""
        return self.nodes[-1].parent if self.nodes else None


class Stopwatch:
    """A context manager; ``seconds`` are those of all its blocks."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._began


class PrefixMatcher:
    """Finds prefixes in ``sessions`` (by sequence), a tree and its stores, and restores them."""

    def __init__(self, tree: PrefixTree, sessions: Mapping[int, Session], lookup: StoreLookup) -> None:
        self._cache, self._tree, self._sessions, self._lookup = tree.cache, tree, sessions, lookup
        self.origins: Counter[str] = Counter()
        """How many tokens of the last ``fill`` came from where: "live", a tier, "store"."""
        self.spared = 0
        """Tokens of the last ``fill`` that stores were not asked for, since computing them is faster."""
        self.above: Node[TreeEntry] | None = None
        """A node that the prefix of the last ``fill`` leads through; None: the root."""
        self.matching = Stopwatch()
        """What the last ``fill`` took to find what it restored."""
        self.on_restore: Callable[[int, int], None] | None = None

    def fill(self, seq: int, ids: np.ndarray) -> int:
        """Make the sequence hold the longest prefix of ``ids`` that can be had; returns its length.

        0, and nothing is held, where that fails, as on a device without memory for it. Raises CacheFullError.
        """
        try:
            return self._find_and_restore(seq, ids)
        except CacheFullError:
            raise
        except Exception:
            log.warning("a prefix could not be restored; it is computed again", exc_info=True)
            self._cache.remove(seq, 0)
            self.origins.clear()
            self.spared = 0
            return 0

    def _find_and_restore(self, seq: int, ids: np.ndarray) -> int:
        limit = reach = int(ids.size) - 1
        self.above = None
        self.matching = Stopwatch()
        while True:
            self.origins.clear()
            with self.matching:
                source = self.best(ids, limit)
                self._tree.touch(ids[: source.length], source.above)
                stored, self.spared = self._lookup.longest(ids, source.length, reach)
            while stored > source.length:
                reached = self._from_store(seq, ids, source, stored)
                if reached is None:
                    reach = stored - 1  # what cannot be had was dropped, or the store fails: look below it
                    break
                reached = self._go_on(seq, ids[:limit], reached)
                progress = reached > source.length
                source, stored = Source(reached, held=True), reached
                if progress:
                    with self.matching:
                        stored, self.spared = self._lookup.longest(ids, reached, reach)
            else:
                if self.from_source(seq, ids, source):
                    self.above = source.above
                    return source.length

    def prefetch(self, ids: np.ndarray) -> Prefetch | None:
        """Read ahead what ``fill`` would have to ask stores for."""
        return self._lookup.prefetch(ids, self.best(ids, int(ids.size) - 1).length)

    def best(self, ids: np.ndarray, limit: int) -> Source:
        """The longest prefix of ``ids[:limit]`` that a session or the tree has; stores are not asked."""
        best = Source()
        for session in self._sessions.values():
            if session.stale:
                continue
            shared = min(common_length(session.computed(), ids), limit)
            if shared > best.length:
                length = self._cache.resume_point(session.seq, shared)
                if length > best.length:
                    best = Source(length, session)
        length, nodes = self._tree.along(ids[:limit])
        return Source(length, nodes=nodes) if length > best.length else best

    def from_source(self, seq: int, ids: np.ndarray, source: Source) -> bool:
        """Whether the sequence holds the prefix now; a node that fails is dropped, and nothing is held."""
        if source.held:
            return True
        if source.session is not None:
            self._cache.copy_prefix(source.session.seq, seq, source.length)
            self.origins["live"] += source.length
            if not self._tree.divisible:  # later snapshots build on this position
                self._tree.insert(seq, ids[: source.length], [self._cache.snapshot(seq, 0, source.length)])
            return True
        self._cache.remove(seq, 0)
        if self._restore_along(seq, source.nodes, source.length) == source.length:
            return True
        self._cache.remove(seq, 0)
        return False

    def _go_on(self, seq: int, ids: np.ndarray, reached: int) -> int:
        """Restore what follows the first ``reached`` tokens from nodes that what stores had leads to."""
        length, nodes = self._tree.beyond(ids, reached)
        return self._restore_along(seq, nodes, length, reached)

    def _restore_along(self, seq: int, nodes: Sequence[Node[TreeEntry]], length: int, at: int = 0) -> int:
        """Restore what nodes have behind the first ``at`` tokens; a node that fails is dropped, and ends it.

        Returns how many tokens the sequence has then.
        """
        with self._tree.interior.in_use(nodes, restoring=True):
            while nodes:
                restored = restore(self._tree, seq, nodes, length)
                if restored is None:
                    self._tree.drop(nodes[0])
                    break
                count, tier = restored
                reached = min(nodes[count - 1].end, length)
                self.origins[tier] += reached - at
                at, nodes = reached, nodes[count:]
                if tier == "host":
                    self._tell(length, at)
        return at

    def _from_store(self, seq: int, ids: np.ndarray, source: Source, stored: int) -> int | None:
        """Restore what ``source`` has, and then entries of ``[0, stored)``; the length that is held now.

        None, and nothing is held, where what is needed cannot be had.
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
            for serialized in entries:
                if not self._lookup.restore(seq, serialized):
                    self._cache.remove(seq, 0)
                    self._lookup.drop(ids, span_of(serialized)[1])
                    return None
                self._tell(stored, span_of(serialized)[1])
        if not first:
            self.origins.clear()
        self._lookup.touch(ids, [span_of(entry)[1] for entry in entries])
        self.origins["store"] += stored - sum(self.origins.values())
        self._tree.insert(seq, ids[:stored], pieces_of(self._tree, seq, ids[:stored], first), stored=True)
        return stored

    def _entry_by_entry(self, seq: int, ids: np.ndarray, source: Source) -> int | None:
        """Restore what ``source`` has, then entries, each when it is read; None where the source fails."""
        if not self.from_source(seq, ids, source):
            return None
        total, told = int(ids.size), source.length

        def tell(at: int) -> None:
            nonlocal told
            told = at
            self._tell(total, at)

        reached = self._lookup.fetch(seq, ids, source.length, tell)
        if reached > told:
            self._tell(total, reached)
        self.origins["store"] += reached - source.length
        self._tree.insert(seq, ids[:reached], (), stored=True)
        return reached

    def _tell(self, total: int, reached: int) -> None:
        if self.on_restore is not None:
            self.on_restore(reached, total)
