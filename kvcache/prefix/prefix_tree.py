"""Snapshots on a radix tree, in tiers: what is kept of conversations, where it lies, and what goes first.

A node of the radix tree may hold the snapshot of its edge on the device, mostly still in the
cache's own cells, or serialized in host memory. What is evicted goes from the device to host memory, from
there to the stores, and is found in them by key. Content that is divisible is parted with its edge; what
is whole (a window, a recurrent state) belongs to the end of its edge, and an edge that is parted above it
has nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcache.cache import SequenceLostError, SnapshotCache
from kvcache.offload.tiers import HostTier, StoreTier
from kvcache.offload.worker import OffloadWorker
from kvcache.prefix.alphabet import Alphabet
from kvcache.prefix.events import BlockEvents
from kvcache.prefix.eviction import TenantQueue, Usage, priority_of
from kvcache.prefix.interior import InteriorSnapshots
from kvcache.prefix.radix_tree import Node, RadixTree
from kvcache.prefix.store_writer import StoreWriter
from kvcache.prefix.tenant_budget import TenantBudget
from kvcache.prefix.tree_entry import (
    Chain,
    TreeEntry,
    chain_of,
    is_present,
    span_of,
    tenant_of,
)
from kvcache.prefix.windows import WindowCells
from kvcache.snapshots.cut import cut_serialized
from kvcache.snapshots.serialize import serialize
from kvcache.snapshots.snapshot import Snapshot
from kvcache.stores import Keys, SerializedSnapshot

__all__ = ["PrefixTree"]

log = logging.getLogger("kvcache")


class PrefixTree:
    """The radix tree of snapshots over one cache, with a budget for each tier."""

    def __init__(
        self,
        cache: SnapshotCache,
        budget: int | None,
        host: HostTier | None,
        store: StoreTier | None,
        keys: Keys,
        worker: OffloadWorker | None,
        limits: Callable[[str], TenantBudget | None] | None,
    ) -> None:
        """``worker``: copies what leaves the device; None: it is copied by who offloads it.

        ``limits`` gives a tenant's budget (None: no limit).
        """
        self.cache, self.store, self.keys, self.worker = cache, store, keys, worker
        self.radix_tree: RadixTree[TreeEntry] = RadixTree()
        self.alphabet = Alphabet()
        self._limits = limits
        self.device = self._queue(budget, lambda limit: limit.device)
        self.host = None if host is None else self._queue(host.budget, lambda limit: limit.host)
        self.usage = Usage(self.device, *([] if self.host is None else [self.host]))
        self.divisible = bool(cache.snapshot(0, 0, 0).divisible)
        self.interior = InteriorSnapshots(not self.divisible and store is None)
        self.windows = WindowCells(cache)
        self.writer = (
            None if store is None else StoreWriter(store, keys, self.alphabet, self.divisible, self._to_write)
        )
        self._backend = cache.backend
        self.evicted = 0
        """Snapshots that went from everywhere."""
        self.over_budget = 0
        """Times that a tenant had too much in a tier, and lost some of its own there."""
        self.failed = 0
        """Of those that went, those that the device did not give to host memory."""
        self.parted: list[Node[TreeEntry]] = []
        """New upper halves of nodes with priorities."""
        self._events: BlockEvents | None = None

    def _queue(
        self, budget: int | None, part: Callable[[TenantBudget], int | None]
    ) -> TenantQueue[Node[TreeEntry]]:
        limits = self._limits
        return TenantQueue(
            budget,
            priority_of,
            tenant_of,
            lambda tenant: None if limits is None else part(limits(tenant) or TenantBudget()),
        )

    def has_room(self, nbytes: int) -> bool:
        """Whether a window of so many bytes may leave its cells, and stay beside them on the device."""
        if self.device.budget is None:
            return self.windows.copied + nbytes <= self.cache.nbytes
        return not self.device.excess

    # Telling.

    @property
    def events(self) -> BlockEvents | None:
        """What hears of every change; it is told all that is kept when it is set."""
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
        if self._events is not None:
            for node in nodes:
                self._events.changed(node)

    # Finding.

    def along(
        self, ids: np.ndarray, above: Node[TreeEntry] | None = None
    ) -> tuple[int, tuple[Node[TreeEntry], ...]]:
        """The longest prefix of ``ids`` that is kept, and the nodes to restore it from, in order.

        ``above``: a node that ``ids`` are known to lead through.
        """
        match = self.radix_tree.match(ids, above)
        if above is not None:
            match.nodes = [*above.path(), *match.nodes]
        if not self.divisible:
            chain = chain_of([node for node in match.nodes if node.end <= match.length])
            return (chain[-1].end if chain else 0), chain
        usable: list[Node[TreeEntry]] = []
        for node in match.nodes:
            if node.data is None or not node.data.present:
                break
            usable.append(node)
        return (min(match.length, usable[-1].end) if usable else 0), tuple(usable)

    def beyond(self, ids: np.ndarray, reached: int) -> tuple[int, tuple[Node[TreeEntry], ...]]:
        """As ``along``, where a sequence has the first ``reached`` tokens of ``ids`` already."""
        match = self.radix_tree.match(ids)
        nodes = [node for node in match.nodes if node.end > reached < match.length]
        if not self.divisible:
            return match.length, chain_of([node for node in nodes if node.end <= match.length], reached)
        return match.length, tuple(itertools.takewhile(is_present, nodes))

    # Keeping.

    def insert(
        self,
        seq: int,
        ids: np.ndarray,
        pieces: Sequence[Snapshot],
        stored: bool = False,
        above: Node[TreeEntry] | None = None,
    ) -> None:
        """Keep what a sequence holds of ``ids``; ``stored``: the stores have it too.

        What is divisible is taken from the sequence as far as the radix tree has nothing of it; ``pieces``
        are of what is whole, each with its own end. ``above``: a node that ``ids`` lead through.
        """
        if self.divisible:
            salt, own = self.alphabet.tenant_of(ids)
            if self.radix_tree.match(ids).length < ids.size:
                if self._limits is not None and 0 < own < ids.size:
                    self.node_at(ids[:own])  # what is shared does not count for a tenant
                self.node_at(ids)
            self._refill(seq, ids, stored, salt, own)
        self._insert_whole(ids, pieces, stored, above)
        self.touch(ids, None if above is None or above.parent is None else above)

    def _insert_whole(
        self, ids: np.ndarray, pieces: Sequence[Snapshot], stored: bool, above: Node[TreeEntry] | None
    ) -> None:
        """Keep snapshots of what is whole, each at its end: one walk down the tree."""
        salt, own = self.alphabet.tenant_of(ids)
        chain, at = Chain(), above or self.radix_tree.root
        for each in at.path():
            chain.add(each)
        for piece in pieces:
            node = self.node_at(ids[: piece.end], at)
            path = node.path(at)
            if path and path[0].parent is not at:  # the tree changed meanwhile
                chain = Chain()
            for each in path[:-1]:
                chain.add(each)
            kept: dict[str, Any] = {}
            if (old := node.data) is not None and not chain.add(node):
                kept = {"rank": old.rank, "grants": old.grants}
                self.drop(node)  # what it follows is gone
                node = self.node_at(ids[: piece.end])
            is_new = node.data is None and node.parent is not None
            if is_new:
                tenant = salt if node.end > own else ""
                node.data = TreeEntry(piece.begin, stored=stored, tenant=tenant, **kept)
                self.parted += [node] if kept else []
            if node.data is not None and node.data.snapshot is None and node.data.begin == piece.begin:
                self.keep_on_device(node, piece)
            if is_new:
                chain.add(node)
            at = node

    def _refill(self, seq: int, ids: np.ndarray, stored: bool, salt: str, own: int) -> None:
        """Give the nodes on the way what the sequence has of it, where theirs is gone, or goes soon."""
        nodes = self.radix_tree.match(ids).nodes
        for node in nodes:
            if node.end <= ids.size and (node.data is None or node.data.tier in ("none", "writing")):
                try:
                    snapshot = self.cache.snapshot(seq, node.begin, node.end)
                except SequenceLostError:
                    self._prune(nodes[-1])
                    self._prune(node)
                    raise
                if node.data is None or not node.data.present:
                    node.data = TreeEntry(node.begin, stored=stored, tenant=salt if node.end > own else "")
                self.keep_on_device(node, snapshot)

    def node_at(self, ids: np.ndarray, above: Node[TreeEntry] | None = None) -> Node[TreeEntry]:
        """The node that ends exactly with ``ids``: found, parted from an edge, or added.

        ``above``: a node that ``ids`` are known to lead through.
        """
        match = self.radix_tree.match(ids, above)
        if match.inside and self._is_leaving(match.nodes[-1]):
            above = None
            match = self.radix_tree.match(ids)
        node = match.nodes[-1] if match.nodes else above or self.radix_tree.root
        if match.inside:
            node = self.split(node, match.length)
        if match.length < ids.size:
            node = self.radix_tree.add(node, ids[match.length :])
        return node

    def _is_leaving(self, node: Node[TreeEntry]) -> bool:
        """Whether a node was leaving the device; it has now, and the radix tree may have changed."""
        if node.data is None or node.data.leaving is None or self.worker is None:
            return False
        self.worker.drain()
        self._land()
        return True

    def split(self, node: Node[TreeEntry], at: int) -> Node[TreeEntry]:
        """Part an edge; content that is divisible is parted with it."""
        held = node.data
        if held is None or not self.divisible:
            upper = self.radix_tree.split(node, at)
            self._changed(upper, node)
            return upper
        snapshots = None if held.snapshot is None else self.cache.split(held.snapshot, at)
        halves = None if held.serialized is None else cut_serialized(held.serialized, at, own=True)
        writing = None if held.writing is None else cut_serialized(held.writing, at)
        upper = self.radix_tree.split(node, at)
        self._changed(upper, node)
        stored = held.stored and at % self.keys.block_size == 0
        upper.data = replace(held, stored=stored, watched=math.inf)  # what it holds is parted below
        upper.data.end_used = held.used
        self.parted += [upper] if held.grants else []
        held.begin, held.used = at, held.end_used
        if writing is not None and held.store_write is not None:
            upper.data.writing, held.writing = writing
            held.store_write.parted.append(upper)
        if snapshots is not None:
            self._off_device(node)
            self.keep_on_device(upper, snapshots[0])
            self.keep_on_device(node, snapshots[1])
        if halves is not None:
            self._keep_on_host(upper, halves[0])
            self._keep_on_host(node, halves[1])
        return upper

    def keep_on_device(self, node: Node[TreeEntry], snapshot: Snapshot) -> None:
        """Keep a snapshot of a node, which may begin before what the tiers below have of it."""
        assert node.data is not None
        node.data.snapshot, node.data.begin, node.data.nbytes = snapshot, snapshot.begin, snapshot.nbytes
        self.device.add(node, node.data.nbytes)
        self.windows.note(node)
        self.interior.note(node)
        self._changed(node)

    def _off_device(self, node: Node[TreeEntry]) -> None:
        """Let go of the cells now, whoever else refers to the snapshot."""
        self._changed(node)
        self.device.discard(node)
        if node.data is not None and node.data.snapshot is not None:
            node.data.snapshot.drop()
            node.data.snapshot = None
            if not self.divisible and (below := node.data.host) is not None:
                node.data.begin, _ = span_of(below)
        self.windows.note(node)

    def _keep_on_host(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        assert node.data is not None
        assert self.host is not None
        node.data.serialized, node.data.nbytes = serialized, serialized.nbytes
        self.host.add(node, serialized.nbytes)
        self._changed(node)

    def touch(self, ids: np.ndarray, above: Node[TreeEntry] | None = None) -> None:
        """A prefix, which leads through ``above``, was used: it goes later than all others."""
        self.usage.tick()
        match = self.radix_tree.match(ids, above)
        if match.nodes:
            self.usage.use(match.nodes[-1], whole=not match.inside)

    # From tier to tier.

    def offload(self, node: Node[TreeEntry]) -> None:
        """Move a snapshot from the device to the next tier, or drop it where there is none."""
        held = node.data
        assert held is not None
        if held.serialized is None and held.leaving is None and self._is_wanted(node, held):
            if held.writing is not None and held.store_write is not None and not held.store_write.parted:
                self._keep_on_host(node, held.writing)  # it is in host memory as it is
            elif self.worker is not None:
                self._send(self.worker, node, held)
            elif (serialized := self._copied_out(held)) is not None:
                if self.host is not None and self.host.fits(serialized.nbytes, node):
                    self._keep_on_host(node, serialized)
                else:
                    self._write(node, serialized)
        self._off_device(node)
        self._prune(node)
        self._land()
        self.shrink_host()

    def absorb(self, node: Node[TreeEntry]) -> bool:
        """Let an interior node's snapshot go: what follows needs of it the content of every position alone.

        False, and nothing changed, where that cannot be joined with what follows.
        """
        (child,) = node.children.values()
        held, below = node.data, child.data
        assert held is not None
        assert below is not None
        assert held.snapshot is not None
        assert below.snapshot is not None
        joined = None
        if below.begin > held.begin:
            try:
                joined = self.cache.join([held.snapshot, below.snapshot])
            except Exception:  # no memory for it, or lost with its device: it goes in its turn
                return False
        else:
            held.snapshot.drop()
        self.device.discard(node)
        self.evicted += 1
        node.data = None
        self.windows.note(node)
        self._changed(node)
        self.radix_tree.join(node)
        if joined is not None:
            self.keep_on_device(child, joined)
        return True

    def _is_wanted(self, node: Node[TreeEntry], held: TreeEntry) -> bool:
        """Whether there is a place below the device for what a node holds."""
        if self.store is not None and not held.stored and held.store_write is None:
            return True
        host, snapshot = self.host, held.snapshot
        return host is not None and snapshot is not None and host.fits(snapshot.nbytes, node)

    def _send(self, worker: OffloadWorker, node: Node[TreeEntry], held: TreeEntry) -> None:
        assert held.snapshot is not None
        with contextlib.suppress(SequenceLostError):  # a device failure took what it names
            held.leaving = worker.send(held.snapshot, node)
            if self.host is not None and self.host.fits(held.leaving.serialized_nbytes, node):
                # Counted at once: what goes first then depends on no thread.
                self.host.add(node, held.leaving.serialized_nbytes)
            elif self.store is None:
                held.leaving = None  # nobody has room for it; that it is still found depends on no thread

    def _write(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        """Have it written that host memory has no place for, where there are stores."""
        if self.writer is not None:
            self.writer.write(node, serialized)

    def patient(self) -> contextlib.AbstractContextManager[None]:
        """In this block the caller waits for the stores, so that nothing is lost that has to leave."""
        return contextlib.nullcontext() if self.writer is None else self.writer.patient()

    def _land(self) -> None:
        """Take note of what has left the device by now."""
        for transfer in () if self.worker is None else self.worker.finished():
            node = transfer.owner
            assert isinstance(node, Node)
            self.failed += transfer.error is not None
            held: TreeEntry | None = node.data
            if held is None or held.leaving is not transfer:
                continue  # forgotten meanwhile
            held.leaving = None
            self._changed(node)
            if transfer.serialized is not None:
                if self.host is not None and node in self.host:
                    held.serialized = transfer.serialized
                else:
                    self._write(node, transfer.serialized)
            elif self.host is not None:
                self.host.discard(node)
            self._prune(node)

    def shrink_host(self) -> None:
        """Bring host memory within its budget, and each tenant within its own."""
        if self.host is None:
            return
        while (found := self.host.over()) is not None:
            self.over_budget += 1
            self._leave_host(found[0])
        while self.host.excess and (other := self.host.first()) is not None:
            self._leave_host(other)

    def _copied_out(self, held: TreeEntry) -> SerializedSnapshot | None:
        """A snapshot, serialized; None where a device failure took what it names."""
        try:
            return None if held.snapshot is None else serialize(self._backend, held.snapshot)
        except SequenceLostError:
            return None

    def _leave_host(self, node: Node[TreeEntry]) -> None:
        held = node.data
        assert held is not None
        assert self.host is not None
        if held.serialized is not None:
            self._write(node, held.serialized)
        elif self.store is None or held.stored:
            held.leaving = None  # it goes on its way, and nobody waits for it
        self.host.discard(node)
        held.serialized = None
        self._changed(node)
        self.interior.note(node)
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
        """Take out nodes that hold nothing and lead nowhere."""
        while node is not None and node.parent is not None:
            if node.data is not None:
                if node.data.present:
                    self.interior.note(node)
                    return
                self.evicted += not node.data.stored
                node.data = None
                self._changed(node)
            if len(node.children) == 1 and not self.divisible:
                self.radix_tree.join(node)
                return
            if node.children:
                return
            parent = node.parent
            self._changed(node)
            self.radix_tree.remove(node)
            node = parent

    def clear(self) -> None:
        """Forget all that is kept on the device and in host memory, and what waits to be written."""
        gone = list(self.radix_tree)
        for node in gone:
            self._off_device(node)
            if self.host is not None:
                self.host.discard(node)
            node.data = None
        self.radix_tree = RadixTree()
        self.interior = InteriorSnapshots(not self.divisible and self.store is None)
        if self.worker is not None:
            self.worker.drain()
        if self.store is not None:
            self.store.cancel()
        self.settle()  # what was under way is nobody's
        if self.writer is not None:
            self.writer.behind = False
        if self._events is not None and self.store is None:
            self._events.cleared()
        self.tell()
        for node in gone:
            node.parent = None  # no session is to go on from it

    # Stores.

    def flush(self) -> None:
        """Write all that is kept to the stores, and wait until it is there; with no store, nothing.

        What they have evicted meanwhile is written again, and one that is in an outage is asked again.
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
        """As ``StoreWriter.write_all``, of all that is kept; False with no store."""
        return self.writer is not None and self.writer.write_all(self.radix_tree, limit)

    def write_on(self, ids: np.ndarray) -> None:
        """As ``StoreWriter.write_on``, of what is kept of ``ids``; with no store, nothing."""
        if self.writer is not None:
            self.writer.write_on(self.radix_tree.match(ids).nodes, self.radix_tree)

    def _to_write(self, held: TreeEntry) -> SerializedSnapshot | None:
        """What a node holds, serialized; None, which is told, where there is no memory for that."""
        try:
            return held.serialized or self._copied_out(held)
        except Exception:
            self.failed += 1
            log.exception("offload: %d bytes did not leave the device", held.nbytes)
            return None

    @property
    def unwritten(self) -> int:
        """Bytes that are kept and that no store has, where there are stores."""
        kept = (node.data for node in self.radix_tree) if self.store is not None else ()
        return sum(held.nbytes for held in kept if held and not held.stored and held.store_write is None)

    def drain(self) -> None:
        """Wait until nothing is under way, from the device or to the stores."""
        if self.worker is not None:
            self.worker.drain()
            with self.patient():
                self.settle()
        if self.store is not None:
            self.store.flush()
            self.settle()

    def settle(self) -> None:
        """Take note of what has left the device, and of what the stores have by now."""
        self._land()
        self.shrink_host()
        for store_write in () if self.store is None else self.store.finished():
            assert self.writer is not None
            for node in self.writer.finish(store_write):
                self._changed(node)
                self.tell()  # before the node goes, which only the stores have now
                self._prune(node)
        self.tell()
