"""What nodes of the radix tree hold, cut into a store's entries and handed to the thread that writes them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from kvcache.prefix.radix_tree import Node, RadixTree
from kvcache.prefix.tiers import StoreTier, StoreWrite
from kvcache.prefix.tree_entry import TreeEntry, span_of
from kvcache.snapshots.cut import cut_serialized
from kvcache.stores import Chain, SerializedSnapshot

__all__ = ["StoreWriter"]

log = logging.getLogger("kvcache")


class StoreWriter:
    """Content that is ``divisible`` has an entry for each block; what is whole has one of its own."""

    def __init__(
        self,
        store: StoreTier,
        block_size: int,
        chain: Callable[[np.ndarray], Chain],
        divisible: bool,
        serialized: Callable[[TreeEntry], SerializedSnapshot | None],
    ) -> None:
        """``chain``: the keys of some tokens. ``serialized``: what an entry has, None if it cannot be had."""
        self._store, self._size, self._keys_of, self._divisible = store, block_size, chain, divisible
        self._serialized = serialized
        self._round = 0
        """Counts the times that ``write_all`` has gone through all."""
        self.behind = False
        """Whether ``write_on`` left something."""
        self._lost = False
        """Whether the stores' last write failed."""
        self._patient = False
        """Whether the caller waits where more is to be written than may wait."""

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """In this block the caller waits for the stores, so that nothing is lost that has to leave."""
        before, self._patient = self._patient, True
        try:
            yield
        finally:
            self._patient = before

    def try_again(self) -> None:
        """Let ``write_all`` try again what could not be written."""
        self._round += 1

    def write(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        """Have a serialized snapshot written, unless the stores have it.

        Where the stores are so far behind that it would have to wait, it is not: no answer waits for a store.
        """
        assert node.data is not None
        if node.data.stored or node.data.store_write is not None:
            return
        if self._patient or self._store.writes.has_room(serialized.nbytes):
            self.submit(node, serialized)
        elif not self.behind:
            self.behind = True
            log.warning(
                "the stores take less than is to be written: %d bytes wait, of at most backlog=%d; what is "
                "evicted meanwhile is computed again",
                self._store.writes.waiting,
                self._store.writes.backlog,
            )

    def write_all(self, nodes: Iterable[Node[TreeEntry]], limit: float = math.inf) -> bool:
        """Hand what the stores lack to the thread that writes to them; True: some of it is left.

        About ``limit`` bytes, and unless it is ``patient`` no more than may wait to be written. What is
        handed over stays where it is. What could not be written is tried again when all else has been.
        """
        done, left = self._hand_over([*nodes], limit)
        self._round += done
        return left

    def write_on(self, path: Iterable[Node[TreeEntry]], nodes: Iterable[Node[TreeEntry]]) -> None:
        """As ``write_all``, of a path, and of all ``nodes`` where something was left before."""
        if self._store.away:
            self.behind = True
        elif self.behind:
            self.behind = self.write_all(nodes)
        else:
            _, self.behind = self._hand_over(path, math.inf)

    def _hand_over(self, nodes: Iterable[Node[TreeEntry]], limit: float) -> tuple[bool, bool]:
        """Whether all of these were looked at, and whether something of them is left to be written."""
        total, left = 0, False
        for node in nodes:
            kept = node.data
            if kept is None or kept.stored or kept.store_write is not None or kept.tried == self._round:
                continue
            source = kept.serialized or kept.snapshot
            room = self._patient or source is None or self._store.writes.has_room(source.nbytes)
            if total >= limit or not room:
                return False, True
            kept.tried = self._round
            serialized = self._serialized(kept)
            if serialized is not None:
                total += serialized.nbytes
                self.write(node, serialized)
            left |= kept.leaving is not None
        return True, left

    def submit(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        """Have a node's content written; it is under way then."""
        assert node.data is not None
        chain = self._chain(node)
        entries = ((chain.at(end), part) for end, part in self._cut(serialized))
        paths = [[chain.at(end) for end in ends] for ends in self._paths(node)]
        store_write = StoreWrite(entries, serialized, node, paths=paths)
        self._store.writes.submit(store_write)
        node.data.store_write, node.data.writing = store_write, serialized

    def finish(self, store_write: StoreWrite) -> Iterator[Node[TreeEntry]]:
        """The nodes whose content was written, or was not, with that noted.

        What was parted on the way has an entry only where it ends with a block.
        """
        if self._lost and not store_write.failed:  # they take something again: all is tried once more
            self.behind, self._round = True, self._round + 1
        self._lost = store_write.failed
        for node in (store_write.owner, *store_write.parted):
            assert isinstance(node, Node)
            kept: TreeEntry | None = node.data
            if kept is not None and kept.store_write is store_write:
                whole = node is store_write.owner or node.end % self._size == 0
                kept.stored = whole and not store_write.failed
                kept.store_write = kept.writing = None
                yield node

    def gone(self, tree: RadixTree[TreeEntry]) -> Iterator[Node[TreeEntry]]:
        """The nodes that were stored, and of which every store lacks an entry by now."""
        keys: dict[Node[TreeEntry], list[str]] = {}
        for leaf in [node for node in tree if not node.children]:
            chain = self._chain(leaf)
            for node in leaf.path():
                if node not in keys and node.data is not None and node.data.stored:
                    keys[node] = [chain.at(end) for end in self.ends(node)]
        lacking = iter(self._store.lacking([key for own in keys.values() for key in own]))
        for node, own in keys.items():
            if any([next(lacking) for _ in own]):  # noqa: C419 - each has to be taken
                yield node

    def _paths(self, node: Node[TreeEntry]) -> Iterator[list[int]]:
        """The ends of a node's entries; of the last one of a conversation, with all that lead to them."""
        own = self.ends(node)
        yield own
        if not node.children:
            before = [end for one in node.path()[:-1] if one.data is not None for end in self.ends(one)]
            if before:
                yield [*before, *own]

    def ends(self, node: Node[TreeEntry]) -> list[int]:
        size = self._size
        first = node.begin - node.begin % size + size
        return [*range(first, node.end, size), node.end] if self._divisible else [node.end]

    def _cut(self, serialized: SerializedSnapshot) -> Iterator[tuple[int, SerializedSnapshot]]:
        """(end, part) of the parts of a serialized snapshot; an empty end has no part of its own."""
        begin, end = span_of(serialized)
        size = self._size
        cuts = range(begin - begin % size + size, end, size)
        if not self._divisible or not cuts:
            yield end, serialized
            return
        for at in cuts:
            first, serialized = cut_serialized(serialized, at)
            yield at, first
        yield end, serialized

    def _chain(self, node: Node[TreeEntry]) -> Chain:
        return self._keys_of(node.prefix())
