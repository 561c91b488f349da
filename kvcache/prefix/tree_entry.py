"""The content of a radix tree node: its snapshot in one or more tiers, and its time of use."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcache.prefix.events import DEVICE, HOST, STORAGE
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import DEFAULT_PRIORITY, Grants
from kvcache.prefix.tiers import StoreWrite
from kvcache.prefix.worker import OffloadJob
from kvcache.snapshots.snapshot import Snapshot, SnapshotChain
from kvcache.stores import SerializedSnapshot
from kvcache.stores.errors import SnapshotCorruptError

__all__ = [
    "Priority",
    "TreeEntry",
    "Usable",
    "chain_of",
    "content_of",
    "in_cells",
    "is_folded",
    "is_present",
    "is_restored",
    "priority_of",
    "span_of",
    "tenant_of",
]


@dataclass(eq=False, slots=True)
class TreeEntry:
    """The content of a radix tree node: its snapshot on the device, serialized in host memory, or both."""

    begin: int
    """Where its nearest content begins: with the node's edge, or before it if the content is indivisible."""
    snapshot: Snapshot | None = None
    serialized: SerializedSnapshot | None = None
    leaving: OffloadJob | None = None
    """Its content in transit from the device to host memory."""
    store_write: StoreWrite | None = None
    """Its serialized snapshots being written to the stores."""
    writing: SerializedSnapshot | None = None
    """The serialized snapshot that is being written."""
    stored: bool = False
    tried: int = -1
    """The last round of ``StoreWriter.write_all`` that tried to write it."""
    users: int = 0
    """The number of sessions that continue from its end, plus restorations of it in progress."""
    restoring: int = 0
    """Restorations of it in progress, during which it stays on the device even if the cache needs cells."""
    rank: int = DEFAULT_PRIORITY
    grants: Grants = ()
    watched: float = math.inf
    """When the retainer next checks its grants."""
    tenant: str = ""
    """The salt of its tenant; "": shared by everyone."""
    used: int = 0
    """The time of its last use, on the tree's clock."""
    end_used: int = 0
    """The time of last use of the end of its edge: later prompts may have diverged earlier."""
    since: float = field(default_factory=time.monotonic)

    @property
    def present(self) -> bool:
        return (
            self.snapshot is not None
            or self.serialized is not None
            or self.writing is not None
            or self.leaving is not None
        )

    @property
    def host(self) -> SerializedSnapshot | None:
        """Its serialized snapshot in host memory, also while it is being written."""
        return self.serialized or self.writing

    @property
    def nbytes(self) -> int:
        """The bytes of its nearest content; 0 if there is none."""
        if self.snapshot is not None:
            return self.snapshot.nbytes
        if self.leaving is not None:
            return self.leaving.nbytes
        return 0 if self.host is None else self.host.nbytes

    @property
    def media(self) -> frozenset[str]:
        """Where it is, as named in events; content in transit from the device counts as in host memory.

        A copy that exists only to be written to the stores is not reported.
        """
        below = self.serialized is not None or self.leaving is not None
        below |= self.store_write is not None and self.snapshot is None
        places = ((DEVICE, self.snapshot is not None), (HOST, below), (STORAGE, self.stored))
        return frozenset(medium for medium, there in places if there)

    @property
    def tier(self) -> str:
        """ "cache" (in its cells), "device" (copied out), "leaving" the device, "host", "writing", or
        "none".
        """
        if self.snapshot is not None:
            return "cache" if self.snapshot.in_cache else "device"
        if self.serialized is not None:
            return "host"
        if self.leaving is not None:
            return "leaving"
        return "none" if self.store_write is None else "writing"

    @property
    def tiers(self) -> tuple[str, ...]:
        """All places that have it, from the nearest: "cache" or "device", "host", "writing", "store"."""
        tiers = []
        if self.snapshot is not None:
            tiers.append("cache" if self.snapshot.in_cache else "device")
        elif self.leaving is not None:
            tiers.append("device")
        if self.serialized is not None:
            tiers.append("host")
        if self.store_write is not None:
            tiers.append("writing")
        if self.stored:
            tiers.append("store")
        return tuple(tiers)


Priority = tuple[int, int, int]
"""(rank, time of last use, minus depth): the smallest is evicted first."""


def priority_of(node: Node[TreeEntry]) -> Priority:
    """A node's position in the eviction order of every tier: the lowest rank first, then the least recently
    used, then the deepest, since the nodes above a node are used whenever it is.
    """
    entry = node.data
    return (0, 0, 0) if entry is None else (entry.rank, entry.used, -node.end)


def span_of(serialized: SerializedSnapshot) -> tuple[int, int]:
    """[begin, end) of a serialized snapshot. Raises SnapshotCorruptError if they are invalid."""
    meta = serialized.meta.get("snapshot")
    begin, end = (meta.get("begin"), meta.get("end")) if isinstance(meta, Mapping) else (None, None)
    if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end:
        raise SnapshotCorruptError(f"serialized snapshot: a snapshot of [{begin}, {end})")
    return begin, end


def tenant_of(node: Node[TreeEntry]) -> str:
    return "" if node.data is None else node.data.tenant


def content_of(entry: TreeEntry) -> Snapshot | SerializedSnapshot:
    """A node's nearest content."""
    if entry.snapshot is not None:
        return entry.snapshot
    if entry.leaving is not None:
        return entry.leaving.content()
    host = entry.host
    assert host is not None
    return host


def in_cells(entry: TreeEntry) -> bool:
    return entry.snapshot is not None and entry.snapshot.holds_cells


def is_restored(node: Node[TreeEntry]) -> bool:
    return node.data is not None and node.data.restoring > 0


def is_folded(node: Node[TreeEntry]) -> bool:
    """Whether several snapshots share a node: see PrefixTree.unfold."""
    return node.data is not None and isinstance(node.data.snapshot, SnapshotChain)


def is_present(node: Node[TreeEntry]) -> bool:
    return node.data is not None and node.data.present


def chain_of(nodes: Sequence[Node[TreeEntry]], start: int = 0) -> tuple[Node[TreeEntry], ...]:
    """The nodes of a path whose snapshots are consecutive from ``start``, as far as possible."""
    end = start
    for node in nodes:
        entry = node.data
        if entry is None or entry.begin != end or not entry.present:
            break
        end = node.end
    else:
        return tuple(nodes)
    usable = Usable(start)
    for node in nodes:
        usable.add(node)
    return usable.nodes()


class Usable:
    """The nodes of a path, added from the top down, whose snapshots are usable because they are
    consecutive.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._nodes: list[Node[TreeEntry]] = []
        """The nodes whose snapshots are usable."""
        self._ends: list[int] = []
        """The end of each of them."""
        self._before: list[int] = []
        """The index of the predecessor of each, -1 for none."""

    def add(self, node: Node[TreeEntry]) -> bool:
        """Add a node; returns whether its snapshot is usable."""
        entry, ends, before = node.data, self._ends, -1
        if entry is None or (entry.snapshot is None and not entry.present):
            return False
        begin = entry.begin
        if begin > self._start:
            if not ends or ends[-1] < begin:
                return False
            before = len(ends) - 1 if ends[-1] == begin else bisect.bisect_left(ends, begin)
        self._nodes.append(node)
        ends.append(node.end)
        self._before.append(before)
        return True

    def nodes(self) -> tuple[Node[TreeEntry], ...]:
        """The last usable node and its predecessors."""
        nodes: list[Node[TreeEntry]] = []
        at = len(self._nodes) - 1
        while at >= 0:
            nodes.append(self._nodes[at])
            at = self._before[at]
        return tuple(nodes[::-1])
