"""What is evicted first when a tier is over its budget or the cache needs cells, and how much of it.

The lowest priority is evicted first, then the least recently used, then the deepest: conversations are
evicted from their ends, and an edge only as far as necessary. Evicted content moves to the next tier.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvcache.cache import SequenceLostError
from kvcache.caches.states import StateCache
from kvcache.caches.wrapper import unwrapped
from kvcache.prefix.prefix_tree import Path, PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import DEFAULT, DEFAULT_PRIORITY, LOWEST, Grants, Retention, merged, rank_of
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
"""The fewest tokens evicted at a time from an edge that has more."""


class Evictor:
    """Offloads the least recently used snapshots of a tree, and no more of an edge than necessary."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.retainer = Retainer(tree)
        self.copies = Copies(tree.cache)
        self.interior = InteriorSnapshots(tree.unfold)
        self.gap = 0.0
        """Once space is short: how many tokens may lie between snapshots inside conversations (``_gap``)."""
        tree.watchers.append(self.retainer.note)
        if not tree.divisible:
            tree.watchers.append(self.copies.note)
        if not tree.divisible and tree.store is None:  # otherwise nobody needs to know which are interior
            tree.watchers.append(self.interior.note)
        size = tree.keys.block_size
        self.grain = BLOCK if tree.host is None and tree.store is None else -(-BLOCK // size) * size
        """Edges are split at multiples of this many tokens when their end is evicted."""

    @contextlib.contextmanager
    def within_budgets(self) -> Iterator[None]:
        """After the block, every tier is within its budget, even if the block raises."""
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
        self._limit_copies()
        self._tree.shrink_host()
        self._tree.tell()

    def evict(self, nbytes: int | None = None) -> int:
        """Offload ``nbytes`` (None: all) of the device's least recently used snapshots; returns the number of
        bytes.
        """
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
        """Release cells that a cache needs, from the least recently used snapshots first.

        ``part``: the index of the cache in its wrapper. ``window``: its snapshots are windows. Snapshots
        being restored are kept: otherwise cells of one wrapped cache would be freed to fill those of another.
        """
        self._tree.tick()
        self._tree.unfold()
        self.retainer.expire()
        try:
            return self._relieve_window(part) if window else self._relieve(missing, part)
        finally:
            self._tree.tell()  # the next call of the prefix cache may come only after a long answer

    def _relieve_window(self, part: int) -> bool:
        """Copy a window out of its cells, or evict one if too much is kept for that."""
        tree = self._tree
        while (node := self.copies.next(part)) is not None:
            goes: Node[TreeEntry] | None = node
            window = part_of(node, part)
            if window is not None and self._has_room(window.nbytes):
                if self.copies.copy_out(node, part):
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
        """Whether a window of ``nbytes`` may leave its cells and stay elsewhere on the device."""
        if self._tree.device.budget is None:
            return self.copies.nbytes + nbytes <= self.copies.limit
        return not self._tree.device.excess

    def _limit_copies(self) -> None:
        """Without a budget: evict snapshots until the copies of windows and states are within their limit."""
        if self._tree.divisible or self._tree.device.budget is not None or not self.copies.excess:
            return
        self._tree.unfold()
        while self.copies.excess and (node := self._first(self.copies.has)) is not None:
            if self._absorbed(node) is None:
                self._tree.offload(node)

    def _relieve(self, missing: int, part: int) -> bool:
        while (node := self._next_freeing(part)) is not None:
            end = self._end_of(node, missing)
            frees = _frees(end, part)
            self._tree.offload(end)
            if frees:
                return True
        shared = self._first(lambda node: _holds_cells(node, part))
        if shared is not None:  # shared with other snapshots, all of which must go
            self._tree.offload(shared)
        return shared is not None

    def _first(self, wanted: Callable[[Node[TreeEntry]], bool]) -> Node[TreeEntry] | None:
        """The first of the ``wanted`` snapshots to be evicted, ignoring those being restored."""
        with contextlib.closing(self._tree.device.in_order()) as nodes:
            return next((node for node in nodes if not is_restored(node) and wanted(node)), None)

    def _absorbed(self, first: Node[TreeEntry], tenant: str | None = None, part: int = 0) -> bool | None:
        """Evict the next interior snapshot, of a tenant or of all; returns whether it held cells of ``part``.

        None if there is none whose neighbours are close, if the next tier has room for ``first``, which is
        evicted first, or if its priority is low.
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
        while (node := self.interior.first(tenant, gap * gap / 2)) is not None:
            held_cells = _holds_cells(node, part)
            if tree.absorb(node):
                return held_cells
            self.interior.forget(node)
        return None

    def _gap(self, node: Node[TreeEntry]) -> float:
        """The best number of tokens between snapshots.

        A conversation is evicted from its end, snapshot by snapshot. Wide gaps waste space there, half a gap
        on average; narrow gaps waste it everywhere, since every gap of the ``kept`` bytes has a snapshot of
        ``whole`` bytes. The sum, gap / 2 + kept * whole / gap in bytes, is smallest at the square root of 2 *
        kept * whole.

        By the same sum, a snapshot with gaps of a and b bytes around it saves a * b / kept: the gap where
        eviction ends is one of these with probability a / kept and b / kept, and would be both together. So
        it is worth its space if a * b is above kept * whole, half the square of the best gap.
        """
        assert node.data is not None
        snapshot = node.data.snapshot
        if isinstance(snapshot, SnapshotChain):
            snapshot = snapshot.parts[-1]
        parts = () if snapshot is None else unwrapped_snapshot(snapshot)
        whole = sum(part.nbytes for part in parts if not part.divisible)
        of_tokens = sum(part.nbytes for part in parts if part.divisible)
        if not of_tokens or snapshot is None:  # a snapshot does not depend on those before it
            return math.inf
        device, host = self._tree.device, self._tree.host
        kept = device.budget if device.budget is not None else device.nbytes
        kept += 0 if host is None else host.nbytes
        return math.sqrt(2 * kept * whole) * (snapshot.end - snapshot.begin) / of_tokens

    def _next_freeing(self, part: int) -> Node[TreeEntry] | None:
        """The least recently used snapshot that is the only holder of a cell of ``part``.

        Snapshots before it that are not the only holders are used by open sessions, and are evicted after all
        that are unused. Snapshots that were copied out of the cache are evicted now: they take additional
        memory, and are as old.
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
        """The last ``tokens`` of an edge, rounded up to ``grain``; the whole edge if splitting saves
        nothing.
        """
        entry = node.data
        assert entry is not None
        at = node.end - tokens
        at -= at % self.grain
        kept_below = entry.serialized is not None or entry.leaving is not None
        if self._tree.divisible and node.begin < at and not kept_below and in_cells(entry):
            with contextlib.suppress(SequenceLostError):  # lost in a device failure, so all of it goes
                self._tree.split(node, at)
        return node


# Priorities.


_NOTHING = Retention()


class Retainer:
    """Gives the nodes of a tree the priorities that requests specify.

    Nodes above a node have at least its priority, since it is useless without them. If several requests share
    tokens, the highest unexpired priority counts. Priorities only determine an order: if nothing else is
    left, the highest priority is evicted too, so that a full cache never blocks.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._ends: list[tuple[float, int, weakref.ref[Node[TreeEntry]]]] = []
        """When to check which nodes; entries of removed nodes never outnumber the others."""
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
        asked, now = retention or _NOTHING, self._tree.now()
        self._cut(path, asked)
        below: Grants = ()
        for node in reversed(path.nodes):
            below = merged(below, asked.grants(node.begin, min(node.end, int(path.tokens.size)), now))
            if (entry := node.data) is not None:
                if not entry.grants:  # it may be newer than what it leads to
                    for child in node.children.values():
                        below = merged(below, _granted(child.data))
                self._set(node, below if node.begin >= known else merged(_granted(entry), below))

    def regrant(self, nodes: Mapping[Node[TreeEntry], bool], asked: Retention) -> None:
        """Give nodes, the deepest first, other priorities: to those marked True in place of their present
        ones.

        Nodes above them are among them.
        """
        self._asked = True
        now, granted = self._tree.now(), dict[Node[TreeEntry], Grants]()
        for node, replaced in nodes.items():
            grants = asked.grants(node.begin, node.end, now)
            for child in node.children.values():
                grants = merged(grants, granted.get(child) or _granted(child.data))
            if not replaced:
                grants = merged(grants, _granted(node.data))
            granted[node] = grants
            if node.data is not None:
                self._set(node, grants)

    def revive(self, nodes: Iterable[Node[TreeEntry]]) -> None:
        """Give nodes that were to be evicted first the default priority, as they are used again."""
        for node in nodes:
            if node.data is not None and node.data.rank == LOWEST:
                self._set(node, ())

    def expire(self) -> None:
        """Remove expired priorities."""
        now = self._tree.now()
        while self._ends and self._ends[0][0] <= now:
            node = heapq.heappop(self._ends)[2]()
            if node is not None and node.data is not None and node.data.watched <= now:
                node.data.watched = math.inf
                self._set(node, node.data.grants)

    def _cut(self, path: Path, asked: Retention) -> None:
        """Split edges where a range begins or ends, if their content is divisible.

        With stores, which have an entry for each part, they are split around the block that contains the
        position.
        """
        size = 1 if self._tree.store is None else self._tree.keys.block_size
        cuts = {end for at in asked.cuts() for end in (at - at % size, at + -at % size) if end}
        for at in sorted(cuts) if self._tree.divisible else ():
            if at < path.length:
                with contextlib.suppress(
                    SequenceLostError
                ):  # the content to be split was lost in a device failure
                    self._tree.end_at(path, at)

    def _set(self, node: Node[TreeEntry], grants: Grants) -> None:
        now = self._tree.now()
        grants = tuple(grant for grant in grants if now < grant[1])
        self._tree.grant(node, grants, rank_of(grants, now))

    def note(self, node: Node[TreeEntry]) -> None:
        """A node is new or has changed: check it again when its current priority expires."""
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

    After the eviction of restore points in Ollama's x/mlxrunner. A window or a recurrent state belongs to one
    position. If only a later snapshot of the same conversation continues from it, it is useful only to
    prompts that diverge in between, and to the rest of a conversation whose end was evicted. If eviction
    means losing a snapshot, such an interior one with close neighbours is evicted before the end of any
    conversation (``Evictor._gap``)::

        512 -- 1024 -- 1536 -- 2000 -- 2001     512, 1024 and 1536 are inside; 2001 goes on, 2000 answers anew

    They are evicted in the order of what they save (``_saved``), the least first, so that the remaining ones
    are evenly spaced and are joined in few steps. Changes are recorded, and evaluated when the first one is
    requested.
    """

    def __init__(self, unfold: Callable[[], object] = lambda: None) -> None:
        """``unfold`` is called first: PrefixTree.unfold."""
        self._unfold = unfold
        self._heap: Heap = []
        self._of: dict[str, Heap] = {}
        """The interior snapshots of each tenant."""
        self._saved: dict[Node[TreeEntry], int] = {}
        """What each node in the heaps saves; other heap entries are outdated."""
        self._changed: dict[Node[TreeEntry], None] = {}
        """Nodes that changed since the last request, and those that were in use then."""
        self._count = itertools.count()
        self._pushed, self._most = 0, 64

    def note(self, node: Node[TreeEntry]) -> None:
        """A node changed."""
        if node.data is not None:
            self._changed[node] = None
        else:  # it may have been removed from the tree: only its parent may be interior now
            self._changed.pop(node, None)
            self._consider(node)
            if node.parent is not None and node.parent.data is not None:
                self._changed[node.parent] = None

    def _look(self) -> None:
        """Update which nodes are interior: the changed ones, and the two before each."""
        self._unfold()
        changed, self._changed = self._changed, {}
        for node in changed:
            one: Node[TreeEntry] | None = node
            for _ in range(3):
                if one is not None:
                    self._consider(one)
                    one = one.parent
        if self._pushed > self._most:  # some of them have been removed since
            known, self._heap, self._of, self._saved, self._pushed = [*self._saved], [], {}, {}, 0
            for one in known:
                self._consider(one)
            self._most = max(64, 2 * self._pushed)

    def _consider(self, node: Node[TreeEntry]) -> None:
        if node.data is not None and node.data.users:
            self._changed[node] = None
            return
        saved = _saved(node)
        if saved is not None and self._saved.get(node) != saved:
            self._push(node, saved)
        elif saved is None and self._saved.pop(node, None) is not None and not self._saved:
            for heap in (self._heap, *self._of.values()):
                heap.clear()
            self._pushed = 0

    def _push(self, node: Node[TreeEntry], saved: int) -> None:
        self._saved[node] = saved
        self._pushed += 1
        for heap in (self._heap, self._of.setdefault(tenant_of(node), [])):
            heapq.heappush(heap, (saved, next(self._count), node))

    def first(self, tenant: str | None = None, limit: float = math.inf) -> Node[TreeEntry] | None:
        """The first to be evicted, of a tenant or of all; None if all save more than ``limit``."""
        self._look()
        heap = self._heap if tenant is None else self._of.get(tenant, [])
        while heap:
            saved, _, node = heap[0]
            if self._saved.get(node) == saved == _saved(node):
                return node if saved <= limit else None
            heapq.heappop(heap)
            if self._saved.get(node) == saved:
                self.forget(node)
                self._consider(node)
        return None

    def forget(self, node: Node[TreeEntry]) -> None:
        """Exclude a node until it changes."""
        self._saved.pop(node, None)


# Copies.


STATES = 16
"""Without a budget: how many copies of its states a cache keeps for each sequence."""


class Copies:
    """What the snapshots of a tree keep outside the cells of ``cache``, and the windows still in them."""

    def __init__(self, cache: Any) -> None:
        self._cache, self._parts = cache, unwrapped(cache)
        self.parts: dict[int, bool] = {}
        """For the index of each wrapped cache that may need cells, whether its snapshots are windows."""
        self._states: list[int] = []
        for i, part in enumerate(self._parts):
            divisible = part.snapshot(0, 0, 0).divisible
            if hasattr(part, "on_pressure"):
                self.parts[i] = not divisible
            elif not divisible:
                self._states.append(i)
        self._nodes: dict[int, dict[Node[TreeEntry], None]] = {
            i: {} for i, window in self.parts.items() if window
        }
        self.alone = all(self.parts.values())
        """Whether no cache keeps all of its tokens."""
        self._sizes: dict[Node[TreeEntry], int] = {}
        self.nbytes = 0
        """Bytes of states, and of windows that were copied out of the cells."""

    @property
    def limit(self) -> int:
        """The most bytes of copies without a budget: those of the cache's K and V, and ``STATES`` times its
        states.

        Where there are windows alone, whose cells are few: the bytes of K and V without windows.
        """
        limit = 0
        for i, part in enumerate(self._parts):
            if i in self._states:
                limit += STATES * (
                    part.state_table.buffers.nbytes if isinstance(part, StateCache) else part.nbytes
                )
            elif self.alone and i in self._nodes:
                limit += getattr(part, "capacity_nbytes", part.nbytes)
            else:
                limit += part.nbytes
        return limit

    @property
    def excess(self) -> int:
        return max(0, self.nbytes - self.limit)

    def has(self, node: Node[TreeEntry]) -> bool:
        """Whether a node has copies."""
        return node in self._sizes

    def note(self, node: Node[TreeEntry]) -> None:
        """A node's snapshot was added, removed or copied out."""
        self.nbytes -= self._sizes.pop(node, 0)
        size = 0
        for part, nodes in self._nodes.items():
            window = None if is_folded(node) else part_of(node, part)  # it is added again when it is unfolded
            if window is not None and window.holds_cells:
                nodes[node] = None
                continue
            nodes.pop(node, None)
            size += 0 if window is None else window.nbytes
        for part in self._states:
            size += _states_nbytes(node, part)
        if size:
            self._sizes[node] = size
            self.nbytes += size

    def next(self, part: int) -> Node[TreeEntry] | None:
        """The next window to leave its cells, ignoring those being restored.

        Only holders of a cell come before windows that share all their cells with each other or with
        sequences.
        """

        def order(node: Node[TreeEntry]) -> tuple[bool, Priority]:
            window = part_of(node, part)
            return window is None or not window.frees_cells, priority_of(node)

        return min((node for node in self._nodes[part] if not is_restored(node)), key=order, default=None)

    def copy_out(self, node: Node[TreeEntry], part: int) -> bool:
        """Copy a window out of its cells; False, without a change, if the device has no memory for it."""
        window = part_of(node, part)
        assert window is not None
        try:
            window.detach()
        except (
            Exception
        ) as error:  # or lost with its device, or not completely put: it is evicted in its turn
            log.info("a window could not be copied out of its cells: %s", error)
            return False
        self.note(node)
        return True


# The content of a node on the device.


def part_of(node: Node[TreeEntry], part: int) -> Snapshot | None:
    """A node's snapshot on the device of one wrapped cache, by index."""
    if node.data is None or node.data.snapshot is None:
        return None
    return unwrapped_snapshot(node.data.snapshot)[part]


def _states_nbytes(node: Node[TreeEntry], part: int) -> int:
    """The bytes of a node's states on the device, which all take the same."""
    snapshot = None if node.data is None else node.data.snapshot
    if snapshot is None:
        return 0
    chain = snapshot.parts if isinstance(snapshot, SnapshotChain) else (snapshot,)
    return len(chain) * unwrapped_snapshot(chain[-1])[part].nbytes


def _holds_cells(node: Node[TreeEntry], part: int) -> bool:
    snapshot = part_of(node, part)
    return snapshot is not None and snapshot.holds_cells


def _frees(node: Node[TreeEntry], part: int) -> bool:
    snapshot = part_of(node, part)
    return snapshot is not None and snapshot.frees_cells


def _tokens(node: Node[TreeEntry], nbytes: int) -> int:
    """How many tokens of a node's snapshot take at least ``nbytes`` bytes."""
    return -(-nbytes * (node.end - node.begin) // max(1, _nbytes(node)))


def _nbytes(node: Node[TreeEntry]) -> int:
    """The bytes of a node on the device."""
    entry = node.data
    return 0 if entry is None or entry.snapshot is None else entry.snapshot.nbytes


def _saved(node: Node[TreeEntry]) -> int | None:
    """What an interior node saves: the tokens since the snapshot before it, times those up to the next one.
    None if the node is not interior.
    """
    entry = node.data
    if entry is None or node.parent is None or len(node.children) != 1:
        return None
    (child,) = node.children.values()
    below = child.data
    if below is None or not child.children:  # most queried nodes are the ends of what is being added
        return None
    if entry.users or entry.grants not in ((), DEFAULT) or entry.rank != DEFAULT_PRIORITY:
        return None  # it has a priority
    if entry.snapshot is None or below.snapshot is None or entry.tenant != below.tenant:
        return None
    if entry.host or entry.leaving or below.host or below.leaving:
        return None
    follows = below.begin == node.end or below.begin <= entry.begin
    return (node.end - node.parent.end) * (child.end - node.end) if follows else None


def _granted(entry: TreeEntry | None) -> Grants:
    return () if entry is None else entry.grants or DEFAULT
