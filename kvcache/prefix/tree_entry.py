"""What a node of the radix tree keeps: its snapshot in one tier or several, and when it was used."""

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
    """What a node of the radix tree keeps: its snapshot on the device, serialized in host memory, or both."""

    begin: int
    """Where its content begins that is had soonest: with the node's edge, or before it where it is whole."""
    snapshot: Snapshot | None = None
    serialized: SerializedSnapshot | None = None
    leaving: OffloadJob | None = None
    """Its content on the way from the device to host memory."""
    store_write: StoreWrite | None = None
    """Its serialized snapshots on their way to the stores."""
    writing: SerializedSnapshot | None = None
    """What these are of it."""
    stored: bool = False
    tried: int = -1
    """The last round of ``StoreWriter.write_all`` that was to write it."""
    users: int = 0
    """Sessions that go on from its end, and restorations of it under way."""
    restoring: int = 0
    """Restorations of it under way: it stays on the device even where the cache needs cells."""
    rank: int = DEFAULT_PRIORITY
    grants: Grants = ()
    watched: float = math.inf
    """When the retainer looks at its grants next."""
    tenant: str = ""
    """The salt of whose it is; "": everyone's."""
    used: int = 0
    """The time of its last use, on the tree's clock."""
    end_used: int = 0
    """That of the end of its edge: later prompts may have parted from it before."""
    since: float = field(default_factory=time.monotonic)

    @property
    def present(self) -> bool:
        below = self.serialized is not None or self.writing is not None or self.leaving is not None
        return self.snapshot is not None or below

    @property
    def host(self) -> SerializedSnapshot | None:
        """Its serialized snapshot, also while it is being written."""
        return self.serialized or self.writing

    @property
    def nbytes(self) -> int:
        """Of its content, where that is to be had soonest; 0 for none."""
        if self.snapshot is not None:
            return self.snapshot.nbytes
        if self.leaving is not None:
            return self.leaving.nbytes
        return 0 if self.host is None else self.host.nbytes

    @property
    def media(self) -> frozenset[str]:
        """Where it is, as events name it; what is on its way from the device is in host memory.

        A copy that is only made to be written to the stores is not told: it is there for a moment.
        """
        below = self.serialized is not None or self.leaving is not None
        below |= self.store_write is not None and self.snapshot is None
        places = ((DEVICE, self.snapshot is not None), (HOST, below), (STORAGE, self.stored))
        return frozenset(medium for medium, there in places if there)

    @property
    def tier(self) -> str:
        """ "cache" (in its cells), "device" (copied out), "leaving" it, "host", "writing", or "none"."""
        if self.snapshot is not None:
            return "cache" if self.snapshot.in_cache else "device"
        if self.serialized is not None:
            return "host"
        if self.leaving is not None:
            return "leaving"
        return "none" if self.store_write is None else "writing"


Priority = tuple[int, int, int]
"""(rank, time of the last use, minus depth): the smallest goes first."""


def priority_of(node: Node[TreeEntry]) -> Priority:
    """Where a node stands in the order of every tier: the lowest rank goes first, then the least recently
    used, then the deepest, as what leads to a node was used whenever the node was."""
    entry = node.data
    return (0, 0, 0) if entry is None else (entry.rank, entry.used, -node.end)


def span_of(serialized: SerializedSnapshot) -> tuple[int, int]:
    """[begin, end) of a serialized snapshot; raises SnapshotCorruptError where it has none."""
    meta = serialized.meta.get("snapshot")
    begin, end = (meta.get("begin"), meta.get("end")) if isinstance(meta, Mapping) else (None, None)
    if not isinstance(begin, int) or not isinstance(end, int) or not 0 <= begin <= end:
        raise SnapshotCorruptError(f"serialized snapshot: a snapshot of [{begin}, {end})")
    return begin, end


def tenant_of(node: Node[TreeEntry]) -> str:
    return "" if node.data is None else node.data.tenant


def content_of(entry: TreeEntry) -> Snapshot | SerializedSnapshot:
    """Where a node's content is to be had soonest."""
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
    """Whether several snapshots share a node: PrefixTree.unfold."""
    return node.data is not None and isinstance(node.data.snapshot, SnapshotChain)


def is_present(node: Node[TreeEntry]) -> bool:
    return node.data is not None and node.data.present


def chain_of(nodes: Sequence[Node[TreeEntry]], start: int = 0) -> tuple[Node[TreeEntry], ...]:
    """Of the nodes of a path those whose snapshots follow one another from ``start``, as far as any do."""
    usable = Usable(start)
    for node in nodes:
        usable.add(node)
    return usable.nodes()


class Usable:
    """The nodes of a path, added from the top down, whose snapshots can be had: they follow one another."""

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._nodes: list[Node[TreeEntry]] = []
        """Those whose snapshots can be had."""
        self._ends: list[int] = []
        """Where each of them ends."""
        self._before: list[int] = []
        """The place of the one that each follows, -1 for none."""

    def add(self, node: Node[TreeEntry]) -> bool:
        """Whether the node's snapshot can be had."""
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
        """Those that lead to the last one that can be had, and it."""
        nodes: list[Node[TreeEntry]] = []
        at = len(self._nodes) - 1
        while at >= 0:
            nodes.append(self._nodes[at])
            at = self._before[at]
        return tuple(nodes[::-1])
