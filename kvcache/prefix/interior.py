"""Snapshots inside conversations: what goes before the end of any, where it would be gone for good.

After the eviction of restore points in Ollama's x/mlxrunner. A window or a recurrent state is that of one
position. One from which nothing but a later one of the same conversation goes on is of use to prompts alone
that part in between::

    512 -- 1024 -- 1536 -- 2000 -- 2001       512, 1024 and 1536 are inside; 2001 goes on, 2000 answers anew
"""

from __future__ import annotations

import heapq
import itertools

from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import DEFAULT_PRIORITY
from kvcache.prefix.tree_entry import TreeEntry, tenant_of

__all__ = ["InteriorSnapshots"]


class InteriorSnapshots:
    """The nodes of a tree whose snapshots on the device lie inside conversations.

    In the order of how many tokens lie between their neighbours, the fewest first: so that those that are
    left lie at even distances, and what is joined is joined in few steps.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node[TreeEntry]]] = []
        self._spans: dict[Node[TreeEntry], int] = {}
        """What each node in the heap counts for; what else the heap has of it is out of date."""
        self._count = itertools.count()

    def note(self, node: Node[TreeEntry]) -> None:
        """A node has content now: that may make one of the two before it interior."""
        one: Node[TreeEntry] | None = node
        for _ in range(3):
            if one is None:
                return
            span = _span(one)
            if span is not None and self._spans.get(one) != span:
                self._spans[one] = span
                heapq.heappush(self._heap, (span, next(self._count), one))
            one = one.parent
        if len(self._heap) > 64 + 2 * len(self._spans):
            self._spans = {one: span for one in self._spans if (span := _span(one)) is not None}
            self._heap = [(span, next(self._count), one) for one, span in self._spans.items()]
            heapq.heapify(self._heap)

    def first(self, tenant: str | None = None) -> Node[TreeEntry] | None:
        """The one that goes first, of a tenant or of all; None: there is none."""
        if tenant is not None:
            own = [one for one in self._spans if tenant_of(one) == tenant and _span(one) is not None]
            return min(own, key=self._spans.__getitem__, default=None)
        while self._heap:
            span, _, node = self._heap[0]
            if self._spans.get(node) == span == _span(node):
                return node
            heapq.heappop(self._heap)
            if self._spans.get(node) == span:
                del self._spans[node]
                self.note(node)
        return None


def _span(node: Node[TreeEntry]) -> int | None:
    """How many tokens lie between an interior node's neighbours; None for a node that is none."""
    held = node.data
    if held is None or node.parent is None or len(node.children) != 1:
        return None
    (child,) = node.children.values()
    below = child.data
    if below is None or not child.children or held.pins or held.grants or held.rank != DEFAULT_PRIORITY:
        return None
    on_device = held.snapshot is not None and below.snapshot is not None
    elsewhere = held.host or held.leaving or below.host or below.leaving
    follows = below.begin == node.end or below.begin <= held.begin
    if not on_device or elsewhere or not follows or held.tenant != below.tenant:
        return None
    return child.end - node.parent.end
