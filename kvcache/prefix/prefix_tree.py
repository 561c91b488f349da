"""Snapshots in a radix tree and in tiers: what is kept of conversations, and how it moves between tiers.

Each node may keep the content of its edge in several places at once. Every transition is a method of the
tree; sessions and eviction decide when::

    a sequence --insert--> the device --offload--> leaving it --land--> host memory --leave_host--+
                               ^                       |                                          v
                               |                       +---------- no room there ----------> being written
                               +-- restored, from host memory or a store                          |
                                                                         stored, and gone from here <--+

Divisible content is split with its edge. Indivisible content (a window, a recurrent state) belongs to the end
of its edge, and the upper part of a split edge has none. ``drop`` and ``clear`` discard content immediately.

A long prompt leaves hundreds of snapshots of windows or states. As long as none of them is needed
individually, they are ``folded``: one edge has a chain of them. A conversation that diverges there cuts the
chain in two. Before one of them leaves the device or is evicted, they become nodes of their own (``unfold``).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcache.cache import SequenceLostError, SnapshotCache
from kvcache.prefix.alphabet import Alphabet
from kvcache.prefix.events import BlockEvents
from kvcache.prefix.eviction_queue import TenantBudget, TenantQueue
from kvcache.prefix.radix_tree import Match, Node, RadixTree, common_length
from kvcache.prefix.retention import Grants
from kvcache.prefix.store_writer import StoreWriter
from kvcache.prefix.tiers import HostTier, StoreTier
from kvcache.prefix.tree_entry import (
    TreeEntry,
    Usable,
    chain_of,
    is_folded,
    is_present,
    priority_of,
    span_of,
    tenant_of,
)
from kvcache.prefix.worker import OffloadWorker, log_lost
from kvcache.snapshots.cut import cut_serialized
from kvcache.snapshots.serialize import serialize
from kvcache.snapshots.snapshot import Snapshot, SnapshotChain
from kvcache.stores import Chain, Keys, SerializedSnapshot

__all__ = ["Budgets", "Path", "PrefixTree"]


Path = Match[TreeEntry]
"""The path of some tokens through the tree: found by one walk, and extended as the tree grows."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets of the device (bytes; None: no limit), of host memory (None: nothing) and of each
    tenant.
    """

    device: int | None = None
    host: HostTier | None = None
    tenants: Callable[[str], TenantBudget | None] | None = None

    def limit(self, part: Callable[[TenantBudget], int | None]) -> Callable[[str], int | None]:
        """The budget of a tenant in one tier; None: no limit."""
        tenants = self.tenants
        return lambda tenant: None if tenants is None else part(tenants(tenant) or TenantBudget())


class PrefixTree:
    """The radix tree of snapshots over one cache, with a budget for each tier."""

    def __init__(
        self,
        cache: SnapshotCache,
        keys: Keys,
        budgets: Budgets,
        store: StoreTier | None,
        worker: OffloadWorker | None,
    ) -> None:
        """``worker`` copies what leaves the device; None: the caller of ``offload`` copies."""
        self.cache, self.store, self.keys, self.worker = cache, store, keys, worker
        self.radix_tree: RadixTree[TreeEntry] = RadixTree()
        self.alphabet = Alphabet()
        self._backend = cache.backend  # a cache that was closed has copied its snapshots there
        self.device: TenantQueue[Node[TreeEntry]] = TenantQueue(
            budgets.device, priority_of, tenant_of, budgets.limit(lambda tenant: tenant.device)
        )
        self.host: TenantQueue[Node[TreeEntry]] | None = None
        if budgets.host is not None:
            limit = budgets.limit(lambda tenant: tenant.host)
            self.host = TenantQueue(budgets.host.budget, priority_of, tenant_of, limit)
        self.divisible = bool(cache.snapshot(0, 0, 0).divisible)
        self.writer = (
            None
            if store is None
            else StoreWriter(store, keys.block_size, self.chain, self.divisible, self._to_write)
        )
        self._chains: list[tuple[np.ndarray, Chain]] = []
        """Tokens and keys of the most recent conversations, the longest of each."""
        self._most = max(8, cache.max_sequences)
        """The number of remembered conversations."""
        self.watchers: list[Callable[[Node[TreeEntry]], object]] = []
        """Called with each node whose content or children have changed."""
        self._folded: dict[Node[TreeEntry], None] = {}
        """The nodes that hold a SnapshotChain, and some that used to."""
        self.now: Callable[[], float] = time.monotonic
        self.clock = 0
        """The time of the last use, in microseconds of ``now``, and later than each one before: it orders the
        content of tiers.
        """
        self.evicted = 0
        """Snapshots that were evicted from all tiers."""
        self.over_budget = 0
        """How often a tenant exceeded its budget in a tier and something of it was evicted."""
        self.failed = 0
        """Those of the evicted snapshots that could not be copied from the device to host memory."""
        self._events: BlockEvents | None = None

    # Events.

    @property
    def events(self) -> BlockEvents | None:
        """The listener for every change; when it is set, it receives everything that is kept."""
        return self._events

    @events.setter
    def events(self, events: BlockEvents | None) -> None:
        self._events = events
        if self.store is not None:
            self.store.on_drop = None if events is None else events.dropped
        for node in self.radix_tree:
            self._changed(node)
        self.tell()

    def tell(self) -> None:
        if self._events is not None:
            self._events.tell(self.radix_tree.root)

    def _changed(self, *nodes: Node[TreeEntry]) -> None:
        for node in nodes:
            if self._events is not None:
                self._events.changed(node)
            for watch in self.watchers:
                watch(node)

    # Finding.

    def chain(self, ids: np.ndarray) -> Chain:
        """The keys of the prefixes of ``ids``. For a continued conversation, only new blocks are hashed."""
        like: tuple[np.ndarray, Chain] | None = None
        shared = 0
        for known in self._chains:
            length = common_length(known[0], ids)
            if length > shared:
                like, shared = known, length
        chain = self.keys.chain(
            self.alphabet.named(ids), like=None if like is None else like[1], shared=shared
        )
        newest = like if like is not None and shared == ids.size else (ids, chain)
        replaced = like if like is not None and shared in (ids.size, like[0].size) else None
        self._chains = [newest, *(known for known in self._chains if known is not replaced)][: self._most]
        return chain

    def walk(self, ids: np.ndarray, above: Node[TreeEntry] | None = None) -> Path:
        """The path of ``ids`` through the tree. ``above``: a node that is known to be on it."""
        path = self.radix_tree.match(ids, above)
        if path.inside and self._part_chain(path.nodes[-1], path.length):
            path = self.radix_tree.match(ids, above)
        if above is not None:
            path.nodes[:0] = above.path()
        return path

    def along(self, path: Path) -> tuple[int, tuple[Node[TreeEntry], ...]]:
        """The length of the longest kept prefix of a path, and the nodes to restore it from, in order."""
        if not self.divisible:
            chain = chain_of(path.nodes[:-1] if path.inside else path.nodes)
            return (chain[-1].end if chain else 0), chain
        usable = tuple(itertools.takewhile(is_present, path.nodes))
        return (min(path.length, usable[-1].end) if usable else 0), usable

    def beyond(self, ids: np.ndarray, reached: int) -> tuple[int, tuple[Node[TreeEntry], ...]]:
        """As ``along``, for a sequence that already has the first ``reached`` tokens of ``ids``."""
        path = self.walk(ids)
        nodes = [node for node in path.nodes if node.end > reached < path.length]
        if not self.divisible:
            return path.length, chain_of([node for node in nodes if node.end <= path.length], reached)
        return path.length, tuple(itertools.takewhile(is_present, nodes))

    # Using.

    def tick(self) -> None:
        """Advance the clock: further uses count as later than all before."""
        self.clock = max(self.clock + 1, int(self.now() * 1e6))

    def touch(self, path: Path, upto: int | None = None) -> None:
        """Mark the first ``upto`` tokens of a path (None: all) as the most recently used."""
        self.tick()
        stop = path.length if upto is None else min(upto, path.length)
        last = next((node for node in reversed(path.nodes) if node.begin < stop), None)
        if last is not None:
            self.use(last, whole=last.end <= stop)

    def use(self, last: Node[TreeEntry], whole: bool = True) -> None:
        """Mark a node, or the beginning of its edge, and all nodes above it as used now."""
        node: Node[TreeEntry] | None = last
        while node is not None:
            if (entry := node.data) is not None:
                if entry.used >= self.clock:
                    return
                entry.used = self.clock
                if whole:
                    entry.end_used = self.clock
            node, whole = node.parent, True

    def grant(self, node: Node[TreeEntry], grants: Grants, rank: int) -> None:
        """Give a node the priorities that requests specify, and the current one."""
        assert node.data is not None
        node.data.grants, node.data.rank = grants, rank
        self.reorder(node)
        self._changed(node)

    def reorder(self, node: Node[TreeEntry]) -> None:
        """Note that a node's position in the eviction order has changed."""
        for tier in (self.device, self.host):
            if tier is not None:
                tier.touch(node)

    @contextlib.contextmanager
    def in_use(self, nodes: Iterable[Node[TreeEntry]], restoring: bool = False) -> Iterator[None]:
        """During the block, none of these is evicted as interior; with ``restoring``, nor as least recently
        used.
        """
        entries = [node.data for node in nodes if node.data is not None]
        for entry in entries:
            entry.users += 1
            entry.restoring += restoring
        try:
            yield
        finally:
            for entry in entries:
                entry.users -= 1
                entry.restoring -= restoring

    # Keeping.

    def insert(self, seq: int, path: Path, pieces: Sequence[Snapshot] = (), stored: bool = False) -> None:
        """Keep what a sequence holds of a path's tokens; ``stored``: the stores have it too.

        Divisible content is taken from the sequence where the tree has none; ``pieces`` are snapshots of
        indivisible content, each with its own end. Afterwards the path leads to the end of its tokens.
        """
        salt, own = self.alphabet.tenant_of(path.tokens)
        if self.divisible:
            size = int(path.tokens.size)
            if path.length < size:
                if 0 < own < size:
                    self.end_at(path, own)  # an entry of its own for others, and no tenant pays for it
                self.end_at(path, size)
            self._refill(seq, path, stored, salt, own)
        else:
            self._insert_whole(path, pieces, stored, salt, own)
        self.touch(path)

    def _refill(self, seq: int, path: Path, stored: bool, salt: str, own: int) -> None:
        """Give the nodes of a path the sequence's content if theirs is gone, or about to go."""
        for node in path.nodes:
            if node.end <= path.length and (node.data is None or node.data.tier in ("none", "writing")):
                try:
                    snapshot = self.cache.snapshot(seq, node.begin, node.end)
                except SequenceLostError:
                    self._prune(path.nodes[-1])
                    self._prune(node)
                    raise
                if node.data is None or not node.data.present:
                    node.data = TreeEntry(node.begin, stored=stored, tenant=salt if node.end > own else "")
                self.keep_on_device(node, snapshot)

    def _insert_whole(
        self, path: Path, pieces: Sequence[Snapshot], stored: bool, salt: str, own: int
    ) -> None:
        """Keep snapshots of indivisible content, each at its end; those of a new edge are folded if
        possible.
        """
        new = [piece for piece in pieces if piece.end > path.length]
        if self._folds(new, path, own):
            pieces = [*pieces[: len(pieces) - len(new)], SnapshotChain(tuple(new))]
        usable, added, nodes = Usable(), 0, path.nodes
        for piece in pieces:
            node = self.end_at(path, piece.end)
            if path.nodes is not nodes:  # the tree has changed, so the path was walked again
                usable, added, nodes = Usable(), 0, path.nodes
            while nodes[added] is not node:
                usable.add(nodes[added])
                added += 1
            lost = None
            if node.data is not None and not usable.add(node):  # its predecessor is gone
                lost = node.data
                self.drop(node)
                self._walk_again(path)
                node, nodes = self.end_at(path, piece.end), path.nodes
                added = nodes.index(node)
            if added_here := node.data is None:
                node.data = TreeEntry(piece.begin, stored=stored, tenant=salt if node.end > own else "")
                if lost is not None:
                    node.data.rank, node.data.grants = lost.rank, lost.grants
            assert node.data is not None
            if node.data.snapshot is None and node.data.begin == piece.begin:
                self.keep_on_device(node, piece)
            if added_here:
                usable.add(node)
            added += 1

    def _folds(self, pieces: Sequence[Snapshot], path: Path, own: int) -> bool:
        """Whether these snapshots, all after a path, may form one chain: one tenant, and no store.

        They must be consecutive, which windows alone are not.
        """
        if len(pieces) < 2 or self.store is not None or pieces[0].begin != path.length:
            return False
        if pieces[0].end <= own < pieces[-1].end:
            return False
        return all([one.end == other.begin for one, other in itertools.pairwise(pieces)])  # noqa: C419

    def unfold(self, *nodes: Node[TreeEntry]) -> None:
        """Give each snapshot of ``nodes`` a node of its own; without arguments, of all nodes except those
        being restored.
        """
        for node in nodes or [*self._folded]:
            entry = node.data
            if entry is None or not isinstance(entry.snapshot, SnapshotChain):
                self._folded.pop(node, None)
            elif nodes or not entry.restoring:
                del self._folded[node]
                self._unfold(node, entry, entry.snapshot.parts)

    def _unfold(self, node: Node[TreeEntry], entry: TreeEntry, parts: Sequence[Snapshot]) -> None:
        uppers = self.radix_tree.part(node, [part.end for part in parts[:-1]])
        for upper, part in zip(uppers, parts, strict=False):
            upper.data = replace(entry, users=0, restoring=0, end_used=entry.used, watched=math.inf)
            self.keep_on_device(upper, part)
        self.keep_on_device(node, parts[-1])

    def _part_chain(self, node: Node[TreeEntry], at: int) -> bool:
        """Give the snapshots of a folded node that end at or before ``at`` a node of their own, still folded.

        False, without a change, if there are none.
        """
        entry = node.data
        if entry is None or not isinstance(entry.snapshot, SnapshotChain):
            return False
        parts = entry.snapshot.parts
        count = bisect.bisect_right(parts, at, key=lambda part: part.end)
        if not count:
            return False
        upper = self.radix_tree.split(node, parts[count - 1].end)
        upper.data = replace(entry, users=0, restoring=0, end_used=entry.used, watched=math.inf)
        for end, some in ((upper, parts[:count]), (node, parts[count:])):
            self.keep_on_device(end, some[0] if len(some) == 1 else SnapshotChain(some))
        return True

    def end_at(self, path: Path, at: int) -> Node[TreeEntry]:
        """The node of a path that ends at position ``at``: an existing one, one split from an edge, or a new
        one.
        """
        if at > path.length:
            if path.inside:
                self.end_at(path, path.length)
            above = path.nodes[-1] if path.nodes else self.radix_tree.root
            node = self.radix_tree.add(above, path.tokens[path.length : at])
            path.nodes.append(node)
            path.length = at
            return node
        nodes = path.nodes
        i = bisect.bisect_left(nodes, at, key=lambda node: node.end)
        if nodes[i].end == at:
            return nodes[i]
        if self._is_leaving(nodes[i]) or (at < path.length and self._was_folded(nodes[i])):
            self._walk_again(path)
            return self.end_at(path, at)
        nodes.insert(i, self.split(nodes[i], at))
        if at == path.length:
            del nodes[i + 1 :]  # the path ended inside that edge
        return nodes[i]

    def _walk_again(self, path: Path) -> None:
        again = self.walk(path.tokens)
        path.nodes, path.length = again.nodes, again.length

    def _is_leaving(self, node: Node[TreeEntry]) -> bool:
        """If a node is leaving the device, wait until it has left, and return True: the radix tree may have
        changed.
        """
        if node.data is None or node.data.leaving is None or self.worker is None:
            return False
        self.worker.drain()
        self._land()
        return True

    def _was_folded(self, node: Node[TreeEntry]) -> bool:
        """If a node is folded, unfold it, and return True: the tree has changed."""
        folded = is_folded(node)
        if folded:
            self.unfold(node)
        return folded

    def split(self, node: Node[TreeEntry], at: int) -> Node[TreeEntry]:
        """Split an edge, and with it its divisible content."""
        entry = node.data
        if entry is None or not self.divisible:
            upper = self.radix_tree.split(node, at)
            self._changed(upper, node)
            return upper
        snapshots = None if entry.snapshot is None else self.cache.split(entry.snapshot, at)
        halves = None if entry.serialized is None else cut_serialized(entry.serialized, at, own=True)
        writing = None if entry.writing is None else cut_serialized(entry.writing, at)
        upper = self.radix_tree.split(node, at)
        stored = entry.stored and at % self.keys.block_size == 0
        upper.data = replace(entry, stored=stored, tried=-1, watched=math.inf)  # its content is split below
        upper.data.end_used = entry.used
        entry.begin, entry.used = at, entry.end_used
        if writing is not None and entry.store_write is not None:
            upper.data.writing, entry.writing = writing
            entry.store_write.parted.append(upper)
        if snapshots is not None:
            self._off_device(node)
            self.keep_on_device(upper, snapshots[0])
            self.keep_on_device(node, snapshots[1])
        if halves is not None:
            self._keep_on_host(upper, halves[0])
            self._keep_on_host(node, halves[1])
        self._changed(upper, node)
        return upper

    def keep_on_device(self, node: Node[TreeEntry], snapshot: Snapshot) -> None:
        """Keep a snapshot of a node; it may begin before the content of the lower tiers."""
        entry = node.data
        assert entry is not None
        entry.snapshot, entry.begin = snapshot, snapshot.begin
        if isinstance(snapshot, SnapshotChain):
            self._folded[node] = None
        self.device.add(node, snapshot.nbytes)
        self._changed(node)

    def _off_device(self, node: Node[TreeEntry]) -> None:
        """Release the cells now, even if others still refer to the snapshot."""
        self.device.discard(node)
        if node.data is not None and node.data.snapshot is not None:
            node.data.snapshot.drop()
            node.data.snapshot = None
            if not self.divisible and (below := node.data.host) is not None:
                node.data.begin, _ = span_of(below)
        self._changed(node)

    def _keep_on_host(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        assert node.data is not None
        assert self.host is not None
        node.data.serialized = serialized
        self.host.add(node, serialized.nbytes)
        self._changed(node)

    # From tier to tier.

    def offload(self, node: Node[TreeEntry]) -> None:
        """Move a snapshot from the device to the next tier, or drop it if there is none."""
        if is_folded(node):
            self.unfold(node)
        entry = node.data
        assert entry is not None
        if entry.serialized is None and entry.leaving is None and self._is_wanted(node, entry):
            if entry.writing is not None and entry.store_write is not None and not entry.store_write.parted:
                self._keep_on_host(node, entry.writing)  # it is already in host memory
            elif self.worker is not None:
                self._send(self.worker, node, entry)
            elif (serialized := self._copied_out(entry)) is not None:
                if self.host is not None and self.host.fits(serialized.nbytes, node):
                    self._keep_on_host(node, serialized)
                else:
                    self._write(node, serialized)
        self._off_device(node)
        self._prune(node)
        self._land()
        self.shrink_host()

    def absorb(self, node: Node[TreeEntry]) -> bool:
        """Evict an interior node's snapshot; only its divisible content is joined to the next snapshot, which
        needs it.

        False, without a change, if that is not possible.
        """
        (child,) = node.children.values()
        entry, below = node.data, child.data
        assert entry is not None
        assert below is not None
        assert entry.snapshot is not None
        assert below.snapshot is not None
        joined = None
        if below.begin > entry.begin:
            try:
                joined = self.cache.join([entry.snapshot, below.snapshot])
            except Exception:  # no memory for it, or lost with its device: it is evicted in its turn
                return False
        else:
            entry.snapshot.drop()
        self.device.discard(node)
        self.evicted += 1
        node.data = None
        self.radix_tree.join(node)
        self._changed(node, child)
        if joined is not None:
            self.keep_on_device(child, joined)
        return True

    def _is_wanted(self, node: Node[TreeEntry], entry: TreeEntry) -> bool:
        """Whether a lower tier can take a node's content."""
        if self.writer is not None and not entry.stored and not self.writer.is_pending(node, entry):
            return True
        host, snapshot = self.host, entry.snapshot
        return host is not None and snapshot is not None and host.fits(snapshot.nbytes, node)

    def _send(self, worker: OffloadWorker, node: Node[TreeEntry], entry: TreeEntry) -> None:
        assert entry.snapshot is not None
        with contextlib.suppress(SequenceLostError):  # its content was lost in a device failure
            entry.leaving = worker.send(entry.snapshot, node)
            if self.host is not None and self.host.fits(entry.leaving.serialized_nbytes, node):
                # Counted immediately, so that eviction order does not depend on threads.
                self.host.add(node, entry.leaving.serialized_nbytes)
            elif self.store is None:
                entry.leaving = (
                    None  # no tier has room for it; dropped now, so that results do not depend on threads
                )

    def _write(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        """Write to the stores, if any, what host memory has no room for."""
        if self.writer is not None:
            self.writer.write(node, serialized)

    def patient(self) -> contextlib.AbstractContextManager[None]:
        """In this block the caller waits for the stores, so that nothing is lost."""
        return contextlib.nullcontext() if self.writer is None else self.writer.patient()

    def _land(self) -> None:
        """Process the snapshots that have left the device, and those that the stores now have."""
        self._finish_writes()
        for job in () if self.worker is None else self.worker.finished():
            node = job.owner
            assert isinstance(node, Node)
            self.failed += job.error is not None
            entry: TreeEntry | None = node.data
            if entry is None or entry.leaving is not job:
                continue  # discarded meanwhile
            entry.leaving = None
            if job.serialized is not None:
                if self.host is not None and node in self.host:
                    entry.serialized = job.serialized
                else:
                    self._write(node, job.serialized)
            elif self.host is not None:
                self.host.discard(node)
            self._changed(node)
            self._prune(node)

    def shrink_host(self) -> None:
        """Evict until host memory and each tenant are within their budgets."""
        if self.host is None:
            return
        while (oldest := self.host.over()) is not None:
            self.over_budget += 1
            self._leave_host(oldest[0])
        while self.host.excess and (other := self.host.first()) is not None:
            self._leave_host(other)

    def _copied_out(self, entry: TreeEntry) -> SerializedSnapshot | None:
        """The serialized snapshot; None if it was lost in a device failure."""
        try:
            return None if entry.snapshot is None else serialize(self._backend, entry.snapshot)
        except SequenceLostError:
            return None

    def _leave_host(self, node: Node[TreeEntry]) -> None:
        entry = node.data
        assert entry is not None
        assert self.host is not None
        if entry.serialized is not None:
            self._finish_writes()
            self._write(node, entry.serialized)
        elif self.store is None or entry.stored:
            entry.leaving = None  # it is sent without waiting
        self.host.discard(node)
        entry.serialized = None
        self._changed(node)
        self._prune(node)

    def drop(self, node: Node[TreeEntry]) -> None:
        self._off_device(node)
        if self.host is not None:
            self.host.discard(node)
        if node.data is not None:
            self.evicted += 1
            node.data = None
            self._changed(node)
        self._prune(node)

    def _prune(self, node: Node[TreeEntry] | None) -> None:
        """Remove nodes without content and children."""
        while node is not None and node.parent is not None:
            if node.data is not None:
                if node.data.present:
                    if not self.divisible:
                        self._changed(node)  # its children have changed, so it may be interior now
                    return
                self.evicted += not node.data.stored
                node.data = None
                self._changed(node)
            if len(node.children) == 1 and not self.divisible:
                self._changed(node, self.radix_tree.join(node))
                return
            if node.children:
                return
            parent = node.parent
            self._changed(node)
            self.radix_tree.remove(node)
            node = parent

    def clear(self) -> None:
        """Discard everything on the device and in host memory, and everything waiting to be written."""
        gone = list(self.radix_tree)
        for node in gone:
            self._off_device(node)
            if self.host is not None:
                self.host.discard(node)
            node.data = None
        self.radix_tree = RadixTree()
        self._folded.clear()
        if self.worker is not None:
            self.worker.drain()
        if self.store is not None:
            self.store.writes.cancel()
        self.settle()  # what was in transit belongs to nobody
        if self.writer is not None:
            self.writer.behind = False
        if self._events is not None and self.store is None:
            self._events.cleared()
        self.tell()
        for node in gone:
            node.parent = None  # no session may continue from it
            for watch in self.watchers:
                watch(node)

    # Stores.

    def flush(self) -> None:
        """Write everything that is kept to the stores and wait for it; no effect without stores.

        Entries that stores have evicted are written again, and a store in an outage is called again.
        """
        self.drain()
        if self.store is not None and self.writer is not None:
            self.store.outages.ask_again()
            for node in self.writer.gone(self.radix_tree):
                assert node.data is not None
                node.data.stored = False
                self._changed(node)
            self.writer.try_again()
        with self.patient():
            self.write_through()
        self.drain()

    def write_through(self, limit: float = math.inf) -> bool:
        """``StoreWriter.write_all`` for everything that is kept; False without stores."""
        return self.writer is not None and self.writer.write_all(self.radix_tree, limit)

    def write_on(self, ids: np.ndarray) -> None:
        """``StoreWriter.write_on`` for what is kept of ``ids``; no effect without stores."""
        if self.writer is not None:
            self.writer.write_on(self.walk(ids).nodes, self.radix_tree)

    def _to_write(self, entry: TreeEntry) -> SerializedSnapshot | None:
        """A node's content, serialized; None, which is logged, if there is no memory for it."""
        self._finish_writes()
        try:
            return entry.serialized or self._copied_out(entry)
        except Exception as error:
            self.failed += 1
            log_lost(error, entry.nbytes)
            return None

    @property
    def unwritten(self) -> int:
        """Bytes that are kept but that no store has, if there are stores."""
        kept = (node.data for node in self.radix_tree) if self.store is not None else ()
        return sum(entry.nbytes for entry in kept if entry and not entry.stored and entry.store_write is None)

    def drain(self) -> None:
        """Wait until all transfers from the device and to the stores have finished."""
        if self.worker is not None:
            self.worker.drain()
            with self.patient():
                self.settle()
        if self.store is not None:
            self.store.writes.flush()
            self.settle()

    def settle(self) -> None:
        """``_land``, and evict and tell what follows from it."""
        self._land()
        self.shrink_host()
        self.tell()

    def _finish_writes(self) -> None:
        """Process the snapshots that the stores now have: until then they are in memory, though no longer
        counted as waiting.
        """
        for store_write in () if self.store is None else self.store.writes.finished():
            assert self.writer is not None
            for node in self.writer.finish(store_write):
                self._changed(node)
                self.tell()  # before the node is removed, as only the stores have it now
                self._prune(node)
