"""What goes first when a tier is over its budget, or when the cache needs cells, and what of it.

The lowest priority goes first, then the least recently used, then the deepest: conversations go from their
ends, an edge no further than it has to. What goes moves to the next tier.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kvcache.cache import SequenceLostError
from kvcache.caches.wrapper import unwrapped
from kvcache.prefix.prefix_tree import Path, PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import DEFAULT, DEFAULT_PRIORITY, Grants, Retention, merged, rank_of
from kvcache.prefix.tree_entry import (
    Priority,
    TreeEntry,
    in_cells,
    is_folded,
    is_restored,
    priority_of,
    tenant_of,
)
from kvcache.snapshots.snapshot import Snapshot, SnapshotChain, unwrapped_snapshot

__all__ = ["Evictor"]

log = logging.getLogger("kvcache")

BLOCK = 16
"""Tokens: no fewer are evicted at a time of an edge that has more."""


class Evictor:
    """Offloads the least recently used snapshots of a tree, of an edge no more than has to go."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.retainer = Retainer(tree)
        self.windows = WindowCells(tree.cache)
        self.interior = InteriorSnapshots(tree.unfold)
        self.gap = 0.0
        """Since room was short: how many tokens may lie between snapshots inside conversations (``_gap``)."""
        tree.watchers.append(self.retainer.note)
        if any(self.windows.parts.values()):
            tree.watchers.append(self.windows.note)
        if not tree.divisible and tree.store is None:  # else nobody asks which are interior
            tree.watchers.append(self.interior.note)
        size = tree.keys.block_size
        self.grain = BLOCK if tree.host is None and tree.store is None else -(-BLOCK // size) * size
        """Edges are parted at multiples of so many tokens when their end is evicted."""

    @contextlib.contextmanager
    def within_budgets(self) -> Iterator[None]:
        """Whatever becomes of the block, every tier is within its budget after it."""
        try:
            yield
        finally:
            self.enforce()

    def enforce(self) -> None:
        self.retainer.expire()
        if self._tree.device.over() is not None or self._tree.device.excess:
            self._tree.unfold()
        while (over := self._tree.device.over()) is not None:
            self._tree.over_budget += 1
            if self._absorbed(over[0], tenant_of(over[0])) is None:
                self._tree.offload(self._end_of(over[0], _tokens(*over)))
        while (excess := self._tree.device.excess) and (node := self._tree.device.first()) is not None:
            if self._absorbed(node) is None:
                self._tree.offload(self._end_of(node, _tokens(node, excess)))
        self._tree.shrink_host()
        self._tree.tell()

    def evict(self, nbytes: int | None = None) -> int:
        """Offload the device's least recently used snapshots, ``nbytes`` of them or all; how many."""
        self.retainer.expire()
        self._tree.unfold()
        device, count = self._tree.device, 0
        goal = 0 if nbytes is None else max(0, device.nbytes - nbytes)
        while (device.nbytes > goal or nbytes is None) and (node := device.first()) is not None:
            if not goal or self._absorbed(node) is None:
                excess = device.nbytes - goal
                self._tree.offload(node if not goal else self._end_of(node, _tokens(node, excess)))
            count += 1
        if self._tree.worker is not None:
            self._tree.worker.drain()
        return count

    def relieve(self, missing: int, part: int = 0, window: bool = False) -> bool:
        """A cache needs cells: have snapshots let go of some, those first that were least recently used.

        ``part``: which of the caches of a wrapper. ``window``: its snapshots are windows. What is being
        restored stays: it would free cells of one wrapped cache to fill those of another.
        """
        self._tree.tick()
        self._tree.unfold()
        self.retainer.expire()
        try:
            return self._relieve_window(part) if window else self._relieve(missing, part)
        finally:
            self._tree.tell()  # the next call of a prefix cache may be a long answer away

    def _relieve_window(self, part: int) -> bool:
        """Copy a window out of its cells; where too much is kept for that, let one go for good."""
        tree = self._tree
        while (node := self.windows.next(part)) is not None:
            goes: Node[TreeEntry] | None = node
            window = part_of(node, part)
            if window is not None and self._has_room(window.nbytes):
                if self.windows.copy_out(node, part):
                    return True
            else:
                held_cells = self._absorbed(tree.device.first() or node, part=part)
                if held_cells:
                    return True
                if held_cells is not None:
                    continue
                goes = self._first(lambda each: each is node or not _holds_cells(each, part))
            assert goes is not None
            tree.offload(goes)
            if goes is node:
                return True
        return False

    def _has_room(self, nbytes: int) -> bool:
        """Whether a window of so many bytes may leave its cells, and stay beside them on the device."""
        if self._tree.device.budget is None:
            return self.windows.copied + nbytes <= self._tree.cache.nbytes
        return not self._tree.device.excess

    def _relieve(self, missing: int, part: int) -> bool:
        while (node := self._next_freeing(part)) is not None:
            end = self._end_of(node, missing)
            frees = _frees(end, part)
            self._tree.offload(end)
            if frees:
                return True
        shared = self._first(lambda node: _holds_cells(node, part))
        if shared is not None:  # with other snapshots: all of them have to go
            self._tree.offload(shared)
        return shared is not None

    def _first(self, wanted: Callable[[Node[TreeEntry]], bool]) -> Node[TreeEntry] | None:
        """What goes first of those that are ``wanted`` and not being restored."""
        with contextlib.closing(self._tree.device.in_order()) as nodes:
            return next((node for node in nodes if not is_restored(node) and wanted(node)), None)

    def _absorbed(self, first: Node[TreeEntry], tenant: str | None = None, part: int = 0) -> bool | None:
        """Let the next interior snapshot go, of a tenant or of all: whether it held cells of ``part``.

        None: there is none whose neighbours are close, the next tier has room for ``first``, which goes
        first, or its priority is low.
        """
        tree = self._tree
        room = tree.host is not None and not tree.host.is_full(_nbytes(first), first)
        if tree.divisible or tree.store is not None or room:
            return None
        gap = self._gap(first)
        if tenant is None:
            self.gap = gap
        if first.data and first.data.rank < DEFAULT_PRIORITY:
            return None
        while (node := self.interior.first(tenant, gap)) is not None:
            held_cells = _holds_cells(node, part)
            if tree.absorb(node):
                return held_cells
            self.interior.forget(node)
        return None

    def _gap(self, node: Node[TreeEntry]) -> float:
        """Between neighbours that are no further apart a snapshot is not worth its room; in tokens.

        A conversation that has to go goes from its end, snapshot by snapshot. Wide gaps waste room there,
        half a gap; narrow ones everywhere: of ``kept`` bytes every gap has a snapshot of ``whole`` bytes. The
        sum, gap / 2 + kept * whole / gap, in bytes, is least at the square root of 2 * kept * whole.
        """
        assert node.data is not None
        snapshot = node.data.snapshot
        if isinstance(snapshot, SnapshotChain):
            snapshot = snapshot.parts[-1]
        parts = () if snapshot is None else unwrapped_snapshot(snapshot)
        whole = sum(part.nbytes for part in parts if not part.divisible)
        of_tokens = sum(part.nbytes for part in parts if part.divisible)
        if not of_tokens or snapshot is None:  # a snapshot needs nothing of those before it
            return math.inf
        device, host = self._tree.device, self._tree.host
        kept = device.budget if device.budget is not None else device.nbytes
        kept += 0 if host is None else host.nbytes
        return math.sqrt(2 * kept * whole) * (snapshot.end - snapshot.begin) / of_tokens

    def _next_freeing(self, part: int) -> Node[TreeEntry] | None:
        """The least recently used snapshot that alone holds a cell of ``part``.

        Those before it that hold none alone are in use, by open sessions: they go later than all that are
        not. Those that were copied out of the cache go now: they are memory beside it, and as old.
        """
        passed: list[Node[TreeEntry]] = []
        freeing: Node[TreeEntry] | None = None
        with contextlib.closing(self._tree.device.in_order()) as nodes:
            for node in nodes:
                if is_restored(node):
                    continue
                if _frees(node, part):
                    freeing = node
                    break
                passed.append(node)
        for node in passed:
            if _holds_cells(node, part):
                self._tree.use(node)
            else:
                self._tree.offload(node)
        return freeing

    def _end_of(self, node: Node[TreeEntry], tokens: int) -> Node[TreeEntry]:
        """The last ``tokens`` of an edge, and up to ``grain`` more; all of it where that is no less work."""
        entry = node.data
        assert entry is not None
        at = node.end - tokens
        at -= at % self.grain
        kept_below = entry.serialized is not None or entry.leaving is not None
        if self._tree.divisible and node.begin < at and not kept_below and in_cells(entry):
            with contextlib.suppress(SequenceLostError):  # a device failure took it, and all of it goes
                self._tree.split(node, at)
        return node


# Priorities.


_NOTHING = Retention()


class Retainer:
    """Gives the nodes of a tree the priorities that requests ask for.

    What leads to a node is kept at least as well as the node: without it, the node is worth nothing. Where
    several requests share tokens, the highest priority counts that has not ended. A priority is an order and
    no more: when nothing else is left, what has the highest goes too, so that a full cache never waits.
    """

    def __init__(self, tree: PrefixTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree = tree
        self.clock = clock
        self._ends: list[tuple[float, int, weakref.ref[Node[TreeEntry]]]] = []
        """When to look at which nodes; of those that are gone, no more than there are others."""
        self._most = 64
        self._count = itertools.count()
        self._asked = False

    def retain(self, path: Path, known: int, retention: Retention | None) -> None:
        """Give what is kept of a path its priorities; the first ``known`` tokens were kept before.

        None: the default, as for all requests until one asks for more.
        """
        if retention is None and not self._asked:
            return
        if not self._tree.divisible:  # each of its snapshots has a priority
            self._tree.unfold()
            path.nodes = self._tree.walk(path.tokens).nodes
        self._asked = True
        asked, now = retention or _NOTHING, self.clock()
        self._cut(path, asked)
        below: Grants = ()
        for node in reversed(path.nodes):
            below = merged(below, asked.grants(node.begin, min(node.end, int(path.tokens.size)), now))
            if (entry := node.data) is not None:
                if not entry.grants:  # it may be newer than what it leads to
                    for child in node.children.values():
                        below = merged(below, _granted(child.data))
                self._set(node, below if node.begin >= known else merged(_granted(entry), below))

    def expire(self) -> None:
        """Take back the priorities whose time is over."""
        now = self.clock()
        while self._ends and self._ends[0][0] <= now:
            node = heapq.heappop(self._ends)[2]()
            if node is not None and node.data is not None and node.data.watched <= now:
                node.data.watched = math.inf
                self._set(node, node.data.grants)

    def _cut(self, path: Path, asked: Retention) -> None:
        """Part edges where a range begins or ends, if their content can be parted.

        Where there are stores, which have an entry for each part, around the block that it does so in.
        """
        size = 1 if self._tree.store is None else self._tree.keys.block_size
        cuts = {end for at in asked.cuts() for end in (at - at % size, at + -at % size) if end}
        for at in sorted(cuts) if self._tree.divisible else ():
            if at < path.length:
                with contextlib.suppress(SequenceLostError):  # a device failure took what is to be parted
                    self._tree.end_at(path, at)

    def _set(self, node: Node[TreeEntry], grants: Grants) -> None:
        now = self.clock()
        grants = tuple(grant for grant in grants if now < grant[1])
        self._tree.grant(node, grants, rank_of(grants, now))

    def note(self, node: Node[TreeEntry]) -> None:
        """A node changed, or is new: come back to it when the priority that counts for it ends."""
        entry = node.data
        if entry is None or not entry.grants or entry.grants[0][1] >= entry.watched:
            return
        entry.watched = entry.grants[0][1]
        heapq.heappush(self._ends, (entry.watched, next(self._count), weakref.ref(node)))
        if len(self._ends) > self._most:
            self._ends = [one for one in self._ends if (there := one[2]()) is not None and there.data]
            heapq.heapify(self._ends)
            self._most = max(64, 2 * len(self._ends))


# Inside conversations.


Heap = list[tuple[int, int, Node[TreeEntry]]]


class InteriorSnapshots:
    """The nodes of a tree whose snapshots on the device lie inside conversations.

    After the eviction of restore points in Ollama's x/mlxrunner. A window or a recurrent state is that of one
    position. One from which nothing but a later one of the same conversation goes on is of use to prompts
    that part in between, and to what is left of a conversation whose end has gone. Where it would be gone for
    good, it goes before the end of any if its neighbours are close (``Evictor._gap``)::

        512 -- 1024 -- 1536 -- 2000 -- 2001     512, 1024 and 1536 are inside; 2001 goes on, 2000 answers anew

    In the order of how many tokens lie between their neighbours, the fewest first: so that those that are
    left lie at even distances, and what is joined is joined in few steps. What changes is noted, and looked
    at when somebody asks which goes first.
    """

    def __init__(self, unfold: Callable[[], object] = lambda: None) -> None:
        """``unfold`` is called first: PrefixTree.unfold."""
        self._unfold = unfold
        self._heap: Heap = []
        self._of: dict[str, Heap] = {}
        """By tenant."""
        self._spans: dict[Node[TreeEntry], int] = {}
        """What each node in the heaps counts for; what else they have of it is out of date."""
        self._changed: dict[Node[TreeEntry], None] = {}
        """Those that changed since somebody asked, and those that were in use then."""
        self._count = itertools.count()
        self._pushed, self._most = 0, 64

    def note(self, node: Node[TreeEntry]) -> None:
        """A node changed."""
        if node.data is not None:
            self._changed[node] = None
        else:  # it may be gone from the tree: only what led to it may be interior now
            self._changed.pop(node, None)
            self._consider(node)
            if node.parent is not None and node.parent.data is not None:
                self._changed[node.parent] = None

    def _look(self) -> None:
        """Take note of which are interior by now: of those that changed, and of the two before each."""
        self._unfold()
        changed, self._changed = self._changed, {}
        for node in changed:
            one: Node[TreeEntry] | None = node
            for _ in range(3):
                if one is not None:
                    self._consider(one)
                    one = one.parent
        if self._pushed > self._most:  # some of them are gone by now
            known, self._heap, self._of, self._spans, self._pushed = [*self._spans], [], {}, {}, 0
            for one in known:
                self._consider(one)
            self._most = max(64, 2 * self._pushed)

    def _consider(self, node: Node[TreeEntry]) -> None:
        if node.data is not None and node.data.users:
            self._changed[node] = None
            return
        span = _span(node)
        if span is not None and self._spans.get(node) != span:
            self._push(node, span)
        elif span is None and self._spans.pop(node, None) is not None and not self._spans:
            for heap in (self._heap, *self._of.values()):
                heap.clear()
            self._pushed = 0

    def _push(self, node: Node[TreeEntry], span: int) -> None:
        self._spans[node] = span
        self._pushed += 1
        for heap in (self._heap, self._of.setdefault(tenant_of(node), [])):
            heapq.heappush(heap, (span, next(self._count), node))

    def first(self, tenant: str | None = None, gap: float = math.inf) -> Node[TreeEntry] | None:
        """The one that goes first, of a tenant or of all; None: none has neighbours within ``gap`` tokens."""
        self._look()
        heap = self._heap if tenant is None else self._of.get(tenant, [])
        while heap:
            span, _, node = heap[0]
            if self._spans.get(node) == span == _span(node):
                return node if span <= gap else None
            heapq.heappop(heap)
            if self._spans.get(node) == span:
                self.forget(node)
                self._consider(node)
        return None

    def forget(self, node: Node[TreeEntry]) -> None:
        """Let it not be the first before it changes."""
        self._spans.pop(node, None)


# Windows.


class WindowCells:
    """The nodes of a tree whose snapshots hold cells of windows, by the part of ``cache`` that is one."""

    def __init__(self, cache: Any) -> None:
        self.parts: dict[int, bool] = {}
        """By the place of each wrapped cache that asks for cells: whether what it keeps is a window."""
        for i, part in enumerate(unwrapped(cache)):
            if hasattr(part, "on_pressure"):
                self.parts[i] = not part.snapshot(0, 0, 0).divisible
        self._nodes: dict[int, dict[Node[TreeEntry], None]] = {
            i: {} for i, window in self.parts.items() if window
        }
        self._copied: dict[int, dict[Node[TreeEntry], int]] = {i: {} for i in self._nodes}
        self.copied = 0
        """Bytes of windows that lie beside the cells."""

    def note(self, node: Node[TreeEntry]) -> None:
        """A node's snapshot came, went, or was copied out."""
        for part, nodes in self._nodes.items():
            window = None if is_folded(node) else part_of(node, part)  # it comes again when it is unfolded
            self.copied -= self._copied[part].pop(node, 0)
            if window is not None and window.holds_cells:
                nodes[node] = None
                continue
            nodes.pop(node, None)
            if window is not None:
                self._copied[part][node] = window.nbytes
                self.copied += window.nbytes

    def next(self, part: int) -> Node[TreeEntry] | None:
        """What leaves its cells first, of those that hold some and are not being restored.

        Those that alone hold one come before those that share all, with each other or with sequences.
        """

        def order(node: Node[TreeEntry]) -> tuple[bool, Priority]:
            window = part_of(node, part)
            return window is None or not window.frees_cells, priority_of(node)

        return min((node for node in self._nodes[part] if not is_restored(node)), key=order, default=None)

    def copy_out(self, node: Node[TreeEntry], part: int) -> bool:
        """Let a window leave its cells; False, and nothing changes, where the device has no memory for it."""
        window = part_of(node, part)
        assert window is not None
        try:
            window.detach()
        except Exception as error:  # also lost with its device, or not put whole: it goes in its turn
            log.info("a window could not be copied out of its cells: %s", error)
            return False
        self.note(node)
        return True


# What a node has on the device.


def part_of(node: Node[TreeEntry], part: int) -> Snapshot | None:
    """What a node has on the device of one of the caches of a wrapper, by its place."""
    if node.data is None or node.data.snapshot is None:
        return None
    return unwrapped_snapshot(node.data.snapshot)[part]


def _holds_cells(node: Node[TreeEntry], part: int) -> bool:
    snapshot = part_of(node, part)
    return snapshot is not None and snapshot.holds_cells


def _frees(node: Node[TreeEntry], part: int) -> bool:
    snapshot = part_of(node, part)
    return snapshot is not None and snapshot.frees_cells


def _tokens(node: Node[TreeEntry], nbytes: int) -> int:
    """How many tokens of a node's snapshot take so many bytes, or more."""
    return -(-nbytes * (node.end - node.begin) // max(1, _nbytes(node)))


def _nbytes(node: Node[TreeEntry]) -> int:
    """Of what it has on the device."""
    entry = node.data
    return 0 if entry is None or entry.snapshot is None else entry.snapshot.nbytes


def _span(node: Node[TreeEntry]) -> int | None:
    """How many tokens lie between an interior node's neighbours; None for a node that is none."""
    entry = node.data
    if entry is None or node.parent is None or len(node.children) != 1:
        return None
    (child,) = node.children.values()
    below = child.data
    if below is None or not child.children:  # most that are asked of are the ends of what is being added
        return None
    if entry.users or entry.grants not in ((), DEFAULT) or entry.rank != DEFAULT_PRIORITY:
        return None  # somebody asks for it
    if entry.snapshot is None or below.snapshot is None or entry.tenant != below.tenant:
        return None
    if entry.host or entry.leaving or below.host or below.leaving:
        return None
    follows = below.begin == node.end or below.begin <= entry.begin
    return child.end - node.parent.end if follows else None


def _granted(entry: TreeEntry | None) -> Grants:
    return () if entry is None else entry.grants or DEFAULT
