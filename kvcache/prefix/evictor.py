"""What leaves the device when a tier is over its budget, or when the cache needs cells."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from kvcache.cache import SequenceLostError
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retainer import Retainer
from kvcache.prefix.retention import DEFAULT_PRIORITY
from kvcache.prefix.tree_entry import TreeEntry, in_cells, is_restored, tenant_of
from kvcache.prefix.windows import part_of

__all__ = ["Evictor"]

BLOCK = 16
"""Tokens: no fewer are evicted at a time of an edge that has more."""


class Evictor:
    """Offloads the least recently used snapshots of a tree, of an edge no more than has to go."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.retainer = Retainer(tree)
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
        self._tree.usage.tick()
        self.retainer.expire()
        try:
            return self._relieve_window(part) if window else self._relieve(missing, part)
        finally:
            self._tree.tell()  # the next call of a prefix cache may be a long answer away

    def _relieve_window(self, part: int) -> bool:
        """Copy a window out of its cells; where too much is kept for that, let one go for good."""
        tree = self._tree
        while (node := tree.windows.next(part)) is not None:
            goes: Node[TreeEntry] | None = node
            window = part_of(node, part)
            if window is not None and tree.has_room(window.nbytes):
                if tree.windows.copy_out(node, part):
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
            return next((node for node in nodes if wanted(node) and not is_restored(node)), None)

    def _absorbed(self, first: Node[TreeEntry], tenant: str | None = None, part: int = 0) -> bool | None:
        """Let the next interior snapshot go, of a tenant or of all: whether it held cells of ``part``.

        None: there is none, the next tier has room for ``first``, which goes first, or its priority is low.
        """
        tree = self._tree
        room = tree.host is not None and not tree.host.is_full(_nbytes(first), first)
        if tree.store is not None or room or (first.data and first.data.rank < DEFAULT_PRIORITY):
            return None
        while (node := tree.interior.first(tenant)) is not None:
            held_cells = _holds_cells(node, part)
            if tree.absorb(node):
                return held_cells
            tree.interior.forget(node)
        return None

    def _next_freeing(self, part: int) -> Node[TreeEntry] | None:
        """The least recently used snapshot that alone holds a cell of ``part``.

        Those before it that hold none alone are in use, by open sessions: they go later than all that are
        not. Those that were copied out of the cache go now: they are memory beside it, and as old.
        """
        passed: list[Node[TreeEntry]] = []
        found: Node[TreeEntry] | None = None
        with contextlib.closing(self._tree.device.in_order()) as nodes:
            for node in nodes:
                if is_restored(node):
                    continue
                if _frees(node, part):
                    found = node
                    break
                passed.append(node)
        for node in passed:
            if _holds_cells(node, part):
                self._tree.usage.use(node)
            else:
                self._tree.offload(node)
        return found

    def _end_of(self, node: Node[TreeEntry], tokens: int) -> Node[TreeEntry]:
        """The last ``tokens`` of an edge, and up to ``grain`` more; all of it where that is no less work."""
        held = node.data
        assert held is not None
        at = node.end - tokens
        at -= at % self.grain
        kept_below = held.serialized is not None or held.leaving is not None
        if self._tree.divisible and node.begin < at and not kept_below and in_cells(held):
            with contextlib.suppress(SequenceLostError):  # a device failure took it, and all of it goes
                self._tree.split(node, at)
        return node


def _holds_cells(node: Node[TreeEntry], part: int) -> bool:
    held = part_of(node, part)
    return held is not None and held.holds_cells


def _frees(node: Node[TreeEntry], part: int) -> bool:
    held = part_of(node, part)
    return held is not None and held.frees_cells


def _tokens(node: Node[TreeEntry], nbytes: int) -> int:
    """How many tokens of a node's snapshot take so many bytes, or more."""
    return -(-nbytes * (node.end - node.begin) // max(1, _nbytes(node)))


def _nbytes(node: Node[TreeEntry]) -> int:
    """Of what it has on the device."""
    held = node.data
    return 0 if held is None or held.snapshot is None else held.snapshot.nbytes
