"""A compressed radix tree over token ids: which conversations share a prefix, and where they diverge.

After the prefix trees of RadixAttention (SGLang) and of Ollama's x/mlxrunner. An edge holds a run of tokens,
so that a walk compares arrays instead of taking a step per token::

    root -- "You are a helpful assistant. " --+-- "Tell me of Noah."
                                              +-- "Tell me of Moses." -- " And then?"
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

__all__ = ["Match", "Node", "RadixTree", "common_length"]

Tokens = np.ndarray
"""int64, one entry per position."""
D = TypeVar("D")


class Node(Generic[D]):
    """An edge and its end point: ``tokens`` from the parent's ``end`` up to this ``end``."""

    __slots__ = ("__weakref__", "children", "data", "end", "parent", "tokens")

    def __init__(self, parent: Node[D] | None, tokens: Tokens, data: D | None = None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.end: int = (parent.end if parent is not None else 0) + int(tokens.size)
        self.children: dict[int, Node[D]] = {}
        self.data = data

    @property
    def begin(self) -> int:
        return self.end - int(self.tokens.size)

    def path(self, above: Node[D] | None = None) -> list[Node[D]]:
        """The nodes from below ``above`` (None: the root) down to this one."""
        nodes: list[Node[D]] = []
        node: Node[D] | None = self
        while node is not None and node is not above and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def prefix(self) -> Tokens:
        """All tokens from the root to here."""
        parts = [node.tokens for node in self.path()]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def descendants(self) -> Iterator[Node[D]]:
        """All nodes below, parents before children."""
        waiting = [*self.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class Match(Generic[D]):
    """How far a run of ``tokens`` matches the radix tree.

    ``nodes`` are the matched nodes, the last one possibly only in part; ``length`` tokens match.
    """

    __slots__ = ("length", "nodes", "tokens")

    def __init__(self, tokens: Tokens, nodes: list[Node[D]], length: int) -> None:
        self.tokens, self.nodes, self.length = tokens, nodes, length

    @property
    def inside(self) -> bool:
        """Whether the walk ended in the middle of the last node's edge."""
        return bool(self.nodes) and self.length < self.nodes[-1].end


class RadixTree(Generic[D]):
    """Nodes by their tokens. ``data`` belongs to the owner; the radix tree never inspects it."""

    def __init__(self) -> None:
        self.root: Node[D] = Node(None, np.zeros(0, dtype=np.int64))

    def __iter__(self) -> Iterator[Node[D]]:
        return self.root.descendants()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def match(self, tokens: Tokens, above: Node[D] | None = None) -> Match[D]:
        """The longest prefix of ``tokens`` in the radix tree, and the matched nodes.

        ``above``: a node whose tokens are known to be a prefix of ``tokens``; only nodes below it are
        returned.
        """
        nodes: list[Node[D]] = []
        node = self.root if above is None else above
        start, size, item = node.end, int(tokens.size), tokens.item
        # Follow edges by their first tokens only, then compare all their tokens at once.
        while node.end < size and (child := node.children.get(item(node.end))) is not None:
            nodes.append(child)
            node = child
        edges = [node.tokens for node in nodes]
        if edges:
            edges[-1] = edges[-1][: size - node.begin]
        led = edges[0] if len(edges) == 1 else np.concatenate([tokens[:0], *edges])
        length = start + common_length(led, tokens[start:])
        there = bisect.bisect_left(nodes, length, key=lambda node: node.end) + 1
        return Match(tokens, nodes[:there], length)

    def add(self, parent: Node[D], tokens: Tokens, data: D | None = None) -> Node[D]:
        """A new child of ``parent``; its first token differs from those of the others."""
        if not tokens.size or int(tokens[0]) in parent.children:
            raise ValueError(f"add: an edge of {tokens.size} tokens that begins as another one does")
        child = Node(parent, tokens.copy(), data)
        parent.children[int(tokens[0])] = child
        return child

    def split(self, node: Node[D], at: int) -> Node[D]:
        """Split an edge at position ``at``, strictly inside it; the new upper node has no data yet."""
        return self.part(node, [at])[0]

    def part(self, node: Node[D], ends: Sequence[int]) -> list[Node[D]]:
        """``split`` at several positions, ascending; returns the new nodes that end there."""
        above, begin, tokens = node.parent, node.begin, node.tokens
        for before, at in itertools.pairwise([begin, *ends]):
            if above is None or not before < at < node.end:
                raise ValueError(f"split: at {at}; the edge is [{before}, {node.end})")
        assert above is not None
        uppers: list[Node[D]] = []
        for at in ends:
            upper = Node(above, tokens[above.end - begin : at - begin].copy())
            above.children[int(upper.tokens[0])] = upper
            uppers.append(upper)
            above = upper
        node.tokens, node.parent = tokens[above.end - begin :].copy(), above
        above.children[int(node.tokens[0])] = node
        return uppers

    def remove(self, node: Node[D]) -> None:
        """Remove a node and everything below it."""
        if node.parent is None:
            raise ValueError("remove: the root stays")
        del node.parent.children[int(node.tokens[0])]
        node.parent = None

    def join(self, node: Node[D]) -> Node[D]:
        """Join a node with its only child, which replaces both; returns the child."""
        (child,) = node.children.values()
        if node.parent is None:
            raise ValueError("join: the root stays")
        child.tokens = np.concatenate((node.tokens, child.tokens))
        child.parent = node.parent
        node.parent.children[int(child.tokens[0])] = child
        node.parent = None
        return child


def common_length(one: Tokens, other: Tokens) -> int:
    """The number of equal tokens at the beginning."""
    size = min(one.size, other.size)
    differ = one[:size] != other[:size]
    at = int(differ.argmax()) if size else 0
    return at if size and differ[at] else size
