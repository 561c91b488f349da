"""Priorities of what a tree keeps: given by requests, and taken back when their time is over."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import time
import weakref
from collections.abc import Callable

import numpy as np

from kvcache.cache import SequenceLostError
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import DEFAULT, Grants, Retention, merged, rank_of
from kvcache.prefix.tree_entry import TreeEntry

__all__ = ["Retainer"]

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

    def retain(self, ids: np.ndarray, known: int, retention: Retention | None) -> None:
        """Give what is kept of ``ids`` its priorities; the first ``known`` tokens were kept before.

        None: the default, as for all requests until one asks for more.
        """
        if retention is None and not self._asked:
            return
        self._asked = True
        asked, now = retention or _NOTHING, self.clock()
        self._cut(ids, asked)
        below: Grants = ()
        for node in reversed(self._tree.radix_tree.match(ids).nodes):
            below = merged(below, asked.grants(node.begin, min(node.end, int(ids.size)), now))
            if (held := node.data) is not None:
                if not held.grants:  # it may be newer than what it leads to
                    for child in node.children.values():
                        below = merged(below, _granted(child.data))
                self._set(node, below if node.begin >= known else merged(_granted(held), below))

    def expire(self) -> None:
        """Take back the priorities whose time is over."""
        while self._tree.parted:
            self._watch(self._tree.parted.pop())
        now = self.clock()
        while self._ends and self._ends[0][0] <= now:
            node = heapq.heappop(self._ends)[2]()
            if node is not None and node.data is not None and node.data.watched <= now:
                node.data.watched = math.inf
                self._set(node, node.data.grants)

    def _cut(self, ids: np.ndarray, asked: Retention) -> None:
        """Part edges where a range begins or ends, if their content can be parted.

        Where there are stores, which have an entry for each part, around the block that it does so in.
        """
        size = 1 if self._tree.store is None else self._tree.keys.block_size
        cuts = {end for at in asked.cuts() for end in (at - at % size, at + -at % size) if end}
        for at in sorted(cuts) if self._tree.divisible else ():
            match = self._tree.radix_tree.match(ids[:at])
            if match.length == at and match.inside:
                with contextlib.suppress(SequenceLostError):  # a device failure took what is to be parted
                    self._tree.node_at(ids[:at])

    def _set(self, node: Node[TreeEntry], grants: Grants) -> None:
        assert node.data is not None
        now = self.clock()
        node.data.grants = tuple(grant for grant in grants if now < grant[1])
        node.data.rank = rank_of(grants, now)
        self._tree.usage.reorder(node)
        self._tree.interior.note(node)
        self._watch(node)

    def _watch(self, node: Node[TreeEntry]) -> None:
        """Come back to a node when the priority that counts for it ends."""
        held = node.data
        if held is None or not held.grants or held.grants[0][1] >= held.watched:
            return
        held.watched = held.grants[0][1]
        heapq.heappush(self._ends, (held.watched, next(self._count), weakref.ref(node)))
        if len(self._ends) > self._most:
            self._ends = [one for one in self._ends if (there := one[2]()) is not None and there.data]
            heapq.heapify(self._ends)
            self._most = max(64, 2 * len(self._ends))


def _granted(held: TreeEntry | None) -> Grants:
    return () if held is None else held.grants or DEFAULT
