"""When the nodes of a tree were used, and what that makes them worth in each tier."""

from __future__ import annotations

from kvcache.prefix.eviction_policy import PrefixEvictionPolicy, Use
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import DEFAULT_PRIORITY
from kvcache.prefix.tenant_budget import TenantQueue
from kvcache.prefix.tree_entry import TreeEntry, higher

__all__ = ["Usage", "age"]

Queue = TenantQueue[Node[TreeEntry]]


class Usage:
    """The clock of a tree, and the order of what ``device`` and ``host`` hold by ``policy``.

    ``stores``: there are some below, from which what has gone can be had again.
    """

    def __init__(self, policy: PrefixEvictionPolicy, device: Queue, host: Queue | None, stores: bool) -> None:
        self.clock = 0
        self._policy, self._device, self._host, self._stores = policy, device, host, stores

    def tick(self) -> None:
        """What is used from here on was used later than all before."""
        self.clock += 1

    def use(self, last: Node[TreeEntry], whole: bool = True, counts: bool = True) -> None:
        """Note that a node, or the beginning of its edge, and those that lead to it are used now.

        What leads to a node that was used now was, too, and is worth at least as much. Without ``counts`` it
        is only not to go soon.
        """
        node: Node[TreeEntry] | None = last
        least = (0.0, 0.0)
        while node is not None:
            if (held := node.data) is not None:
                if held.used >= self.clock and held.scores[0] >= least[0] and held.scores[1] >= least[1]:
                    return
                held.uses += counts and held.used < self.clock
                held.used = self.clock
                own = (self._score(node, held, self._device), self._score(node, held, self._host))
                held.scores = least = higher(higher(held.scores, own), least)
                if whole:
                    held.end_used, held.end_uses, held.end_scores = held.used, held.uses, held.scores
            node, whole = node.parent, True

    def reorder(self, node: Node[TreeEntry]) -> None:
        self._device.touch(node)
        if self._host is not None:
            self._host.touch(node)

    def _score(self, node: Node[TreeEntry], held: TreeEntry, queue: Queue | None) -> float:
        if queue is None:
            return 0.0
        computed = not self._stores and (queue is self._host or self._host is None)
        return self._policy.score(
            Use(held.used, held.uses, node.begin, node.end, held.nbytes, queue.age, computed)
        )


def age(queue: Queue, held: TreeEntry, score: float) -> None:
    """What goes takes the tier's age to its score, unless it goes for another reason."""
    if not held.pins and held.rank == DEFAULT_PRIORITY:
        queue.age = max(queue.age, score)
