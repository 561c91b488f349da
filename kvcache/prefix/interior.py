"""Snapshots inside conversations: what goes before the end of any, where it would be gone for good.

After the eviction of restore points in Ollama's x/mlxrunner. A window or a recurrent state is that of one
position. One from which nothing but a later one of the same conversation goes on is of use to prompts alone
that part in between::

    512 -- 1024 -- 1536 -- 2000 -- 2001       512, 1024 and 1536 are inside; 2001 goes on, 2000 answers anew
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterable, Iterator

from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import DEFAULT, DEFAULT_PRIORITY
from kvcache.prefix.tree_entry import TreeEntry, tenant_of

__all__ = ["InteriorSnapshots"]

Heap = list[tuple[int, int, Node[TreeEntry]]]


class InteriorSnapshots:
    """The nodes of a tree whose snapshots on the device lie inside conversations.

    In the order of how many tokens lie between their neighbours, the fewest first: so that those that are
    left lie at even distances, and what is joined is joined in few steps. ``useful``: somebody asks for them.
    """

    def __init__(self, useful: bool) -> None:
        self._useful = useful
        self._heap: Heap = []
        self._of: dict[str, Heap] = {}
        """By tenant."""
        self._spans: dict[Node[TreeEntry], int] = {}
        """What each node in the heaps counts for; what else they have of it is out of date."""
        self._waiting: set[Node[TreeEntry]] = set()
        """Those that were asked about while they were in use."""
        self._count = itertools.count()
        self._pushed, self._most = 0, 64

    def note(self, node: Node[TreeEntry]) -> None:
        """A node changed: that may make it, or one of the two before it, interior."""
        one: Node[TreeEntry] | None = node
        for _ in range(3 if self._useful else 0):
            if one is None:
                break
            self._note(one)
            one = one.parent
        if self._pushed > self._most:  # some of them are gone by now
            known, self._heap, self._of, self._spans, self._pushed = [*self._spans], [], {}, {}, 0
            for one in known:
                self._note(one)
            self._most = max(64, 2 * self._pushed)

    def _note(self, node: Node[TreeEntry]) -> None:
        if node.data is not None and node.data.users:
            self._waiting.add(node)
            return
        span = _span(node)
        if span is not None and self._spans.get(node) != span:
            self._push(node, span)

    def _push(self, node: Node[TreeEntry], span: int) -> None:
        self._spans[node] = span
        self._pushed += 1
        for heap in (self._heap, self._of.setdefault(tenant_of(node), [])):
            heapq.heappush(heap, (span, next(self._count), node))

    def first(self, tenant: str | None = None) -> Node[TreeEntry] | None:
        """The one that goes first, of a tenant or of all; None: there is none."""
        heap = self._heap if tenant is None else self._of.get(tenant, [])
        while heap:
            span, _, node = heap[0]
            if self._spans.get(node) == span == _span(node):
                return node
            heapq.heappop(heap)
            if self._spans.get(node) == span:
                self.forget(node)
                self.note(node)
        return None

    def forget(self, node: Node[TreeEntry]) -> None:
        """Let it not be the first before it changes."""
        self._spans.pop(node, None)

    @contextlib.contextmanager
    def in_use(self, nodes: Iterable[Node[TreeEntry]], restoring: bool = False) -> Iterator[None]:
        """None of these goes meanwhile as interior; ``restoring``: nor as what was least recently used."""
        entries = [node.data for node in nodes if node.data is not None]
        for held in entries:
            held.users += 1
            held.restoring += restoring
        try:
            yield
        finally:
            for held in entries:
                held.users -= 1
                held.restoring -= restoring
            if self._waiting:
                waiting, self._waiting = self._waiting, set()
                for node in waiting:
                    self._note(node)


def _span(node: Node[TreeEntry]) -> int | None:
    """How many tokens lie between an interior node's neighbours; None for a node that is none."""
    held = node.data
    if held is None or node.parent is None or len(node.children) != 1:
        return None
    (child,) = node.children.values()
    below = child.data
    asked_for = held.users or held.grants not in ((), DEFAULT) or held.rank != DEFAULT_PRIORITY
    if below is None or not child.children or asked_for:
        return None
    on_device = held.snapshot is not None and below.snapshot is not None
    elsewhere = held.host or held.leaving or below.host or below.leaving
    follows = below.begin == node.end or below.begin <= held.begin
    if not on_device or elsewhere or not follows or held.tenant != below.tenant:
        return None
    return child.end - node.parent.end
