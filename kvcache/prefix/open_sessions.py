"""The open sessions of a PrefixCache: which sequence each has, and what is kept of it for others."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np

from kvcache.cache import CacheFullError, SequenceLostError, computed
from kvcache.prefix.alphabet import EVERYONE, Tenant
from kvcache.prefix.evictor import Evictor
from kvcache.prefix.matcher import PrefixMatcher, Source
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.session import Lookup, PrefixStats, Session
from kvcache.prefix.snapshot_points import pieces_of, positions_due
from kvcache.prefix.store_lookup import StoreLookup
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.snapshots.snapshot import Snapshot

__all__ = ["OpenSessions"]

log = logging.getLogger("kvcache")


class OpenSessions:
    """Begins sessions in free sequences of the cache of ``tree``, rewinds and ends them.

    ``interval`` is how far apart snapshots of content that is whole are taken in a prompt.
    """

    def __init__(
        self, tree: PrefixTree, evictor: Evictor, lookup: StoreLookup, interval: int, stats: PrefixStats
    ) -> None:
        self.alphabet = tree.alphabet
        self.sessions: dict[int, Session] = {}
        """By sequence."""
        self.free = list(range(tree.cache.max_sequences))
        self.matcher = PrefixMatcher(tree, self.sessions, lookup)
        self._lookup = lookup
        self._cache, self._tree, self._evictor = tree.cache, tree, evictor
        self._interval, self._stats = interval, stats

    def begin(self, ids: np.ndarray, tenant: Tenant = EVERYONE) -> Session:
        """A session over ``ids`` in a free sequence, which holds the longest prefix that can be had."""
        seq = min(self.free)  # which depends on nothing but the ones that are in use
        began = time.monotonic()
        try:
            with self._evictor.within_budgets():
                cached = self._fill(seq, ids)
                matching, origins = self.matcher.matching.seconds, dict(self.matcher.origins)
                lookup = Lookup(began, matching, time.monotonic() - began - matching, origins)
                self._schedule(seq, ids, cached, self.matcher.above)
                self.rolled_back(seq)
        except BaseException:
            self._cache.cancel_snapshots(seq)
            self._cache.remove(seq, 0)
            raise
        self.free.remove(seq)
        session = self.sessions[seq] = Session(self, seq, ids, cached, tenant)
        session.spared, session.lookup = self.matcher.spared, lookup
        above = self.matcher.above
        self._follow(session, None if above is None or above.parent is None else above)
        self._stats.add(int(ids.size), {**origins, "spared": session.spared})
        return session

    def _fill(self, seq: int, ids: np.ndarray) -> int:
        """Have the sequence hold the longest prefix that can be had; returns its length.

        What is kept lacks a layer that was first put after that: all of it goes, as it does for a prefix
        whose first pass failed before its last layer.
        """
        cached = self.matcher.fill(seq, ids)
        if cached and self.computed(seq) < cached:
            log.warning("a layer was first put after tokens were kept that lack it; they are forgotten")
            self._tree.clear()
            cached = self.matcher.fill(seq, ids)
            if cached and self.computed(seq) < cached:
                self._cache.remove(seq, 0)
                cached = 0
        return cached

    def forget_items(self) -> None:
        """Let the alphabet forget what neither an open session nor the tree has."""
        if self.alphabet.crowded:
            nodes = (node.tokens for node in self._tree.radix_tree)
            self.alphabet.forget([*nodes, *(session.encoded() for session in self.sessions.values())])

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence are evaluated, in all layers."""
        return computed(self._cache, seq)

    def next_snapshot(self, seq: int) -> int | None:
        """Where a batch of the sequence should end, for the sake of a snapshot; None: anywhere."""
        return self._cache.next_snapshot(seq)

    def _schedule(self, seq: int, ids: np.ndarray, cached: int, above: Node[TreeEntry] | None = None) -> None:
        """Snapshots of whole content: where prompts part, at intervals, before the last token."""
        if self._tree.divisible:
            return
        others = (other.encoded() for other in self.sessions.values())
        parted = self._tree.radix_tree.match(ids, above).length
        positions = positions_due(ids, cached, self._interval, parted, others)
        if positions:
            self._cache.schedule_snapshots(seq, positions)

    def keep(self, session: Session) -> None:
        """Let others start from the snapshots that were taken of an open session."""
        seq, ids = session.seq, session.computed()
        if self._tree.divisible:
            return
        self._note_skipped(seq, int(ids.size))
        pieces = [part for part in self._cache.take_snapshots(seq) if part.end <= ids.size]
        if pieces:
            with self._evictor.within_budgets():
                self._insert(session, ids[: pieces[-1].end], pieces)
                above, session.kept = session.above(pieces[-1].end), pieces[-1].end
                self._follow(session, above)

    def _follow(self, session: Session, above: Node[TreeEntry] | None = None) -> None:
        """What the next snapshot of a session follows stays where it is, as long as the session does."""
        session.following.close()
        if session.kept and not self._tree.divisible:
            nodes = self._tree.radix_tree.match(session.encoded()[: session.kept], above).nodes
            session.point = nodes[-1] if nodes else above
            if session.point is not None and session.point.end == session.kept:
                session.following.enter_context(self._tree.interior.in_use([session.point]))

    def _insert(self, session: Session, ids: np.ndarray, pieces: Sequence[Snapshot]) -> None:
        """Keep what a session holds of ``ids``, for as long as it asks for."""
        above = session.above(int(ids.size))
        known = self._tree.radix_tree.match(ids, above).length
        self._tree.insert(session.seq, ids, pieces, above=above)
        self._evictor.retainer.retain(ids, known, session.retention)

    def _note_skipped(self, seq: int, size: int) -> None:
        """Count what could not be taken of the first ``size`` tokens, and say so the first time.

        Behind them the sequence was cut, as by a context shift, and nothing is kept.
        """
        skipped = [end for end in self._cache.skipped_snapshots(seq) if end <= size]
        if skipped and not self._stats.skipped:
            log.warning(
                "a batch of sequence %d passed %s, where snapshots were due: a recurrent state is that of a "
                "batch's end, unless the model delivers those inside. Prompts that part at these positions "
                "go on from earlier ones; end batches where session.chunks() and prefix.next_snapshot() say. "
                "prefix.stats.skipped counts all such snapshots",
                seq,
                skipped,
            )
        self._stats.skipped += len(skipped)

    def end(self, session: Session, keep: bool, upto: int | None) -> None:
        """Free the sequence; with ``keep`` what it holds of the first ``upto`` tokens stays for others."""
        seq = session.seq
        with self._evictor.within_budgets():
            try:
                if keep:
                    computed = session.computed()
                    self._note_skipped(seq, int(computed.size))
                    ids = computed[:upto]
                    pieces = pieces_of(self._tree, seq, ids, session.kept, session.above(int(ids.size)))
                    self._insert(session, ids, pieces)
            except SequenceLostError:
                pass  # there is nothing to keep
            finally:
                session.following.close()
                del self.sessions[seq]
                self.free.append(seq)  # emptied now, or when it is used next
                self._cache.cancel_snapshots(seq)
                self._cache.remove(seq, 0)
                if not self.sessions:
                    self._lookup.unlearn()
        self._tree.settle()

    def rewind(self, session: Session, ids: np.ndarray, trusted: int) -> int:
        """Make the sequence hold ``ids``, or what it can go on from; returns where.

        Up to ``trusted`` it holds them. A snapshot that reaches further than the cache itself is restored.
        """
        seq = session.seq
        point = self._cache.resume_point(seq, min(trusted, self.computed(seq)))
        if not self._tree.divisible and point < ids.size:
            self.keep(session)
            length, nodes = self._tree.along(ids)
            if length > point:
                try:
                    reached = self._restore_nearest(seq, ids, Source(length, nodes=nodes))
                except BaseException:  # it holds neither what it did nor what is asked for
                    session.replaced()
                    self._cache.remove(seq, 0)
                    raise
                session.kept = reached
                self._follow(session)
                self.rolled_back(seq)
                return reached
        self._cache.remove(seq, point)
        self.rolled_back(seq)
        return point

    def _restore_nearest(self, seq: int, ids: np.ndarray, source: Source) -> int:
        """Restore along nodes; where one fails, along those that are left. Returns how far that went."""
        self._cache.cancel_snapshots(seq)
        with self._evictor.within_budgets():
            try:
                while not self.matcher.from_source(seq, ids, source):
                    length, nodes = self._tree.along(ids)
                    source = Source(length, nodes=nodes)
            except CacheFullError:  # others hold the cells: there is nothing left to go on from
                self._cache.remove(seq, 0)
                source = Source()
            self._tree.touch(ids[: source.length])
            self._schedule(seq, ids, source.length)
        return source.length

    def rolled_back(self, seq: int) -> int | None:
        """The lowest position that was taken out of the cache since the last call."""
        return self._cache.rolled_back(seq)
