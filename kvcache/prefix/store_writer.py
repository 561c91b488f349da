"""Splits the content of radix tree nodes into store entries, and submits them to the writing thread."""

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
    """Writes nodes to stores: ``divisible`` content has an entry per block, indivisible content one entry."""

    def __init__(
        self,
        store: StoreTier,
        block_size: int,
        chain: Callable[[np.ndarray], Chain],
        divisible: bool,
        serialized: Callable[[TreeEntry], SerializedSnapshot | None],
    ) -> None:
        """``chain`` returns the keys of tokens, ``serialized`` the content of an entry, or None if it is
        unavailable.
        """
        self._store, self._size, self._keys_of, self._divisible = store, block_size, chain, divisible
        self._serialized = serialized
        self._round = 0
        """The number of complete rounds of ``write_all``."""
        self.behind = False
        """Whether ``write_on`` left something unwritten."""
        self._lost = False
        """Whether the stores' last write failed."""
        self._patient = False
        """Whether the caller waits when the backlog is full."""

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """In this block the caller waits for the stores, so that nothing is lost."""
        before, self._patient = self._patient, True
        try:
            yield
        finally:
            self._patient = before

    def try_again(self) -> None:
        """Let ``write_all`` try again to write what failed."""
        self._round += 1

    def write(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        """Submit a serialized snapshot for writing, unless the stores have it.

        If the backlog is full, it is not written, so that no answer waits for a store.
        """
        assert node.data is not None
        if node.data.stored or self.is_pending(node, node.data):
            return
        if self._patient or self._store.writes.has_room(serialized.nbytes):
            self.submit(node, serialized)
        elif not self.behind:
            self.behind = True
            log.warning(
                "the stores do not keep up: %d bytes wait to be written, of at most backlog=%d; content "
                "evicted until they do is computed again",
                self._store.writes.waiting,
                self._store.writes.backlog,
            )

    def write_all(self, nodes: Iterable[Node[TreeEntry]], limit: float = math.inf) -> bool:
        """Submit what the stores lack to the writing thread; returns True if some of it is left.

        Submits about ``limit`` bytes, and unless ``patient`` no more than fit in the backlog. Submitted
        content stays where it is. Failed writes are tried again after everything else.
        """
        done, left = self._hand_over([*nodes], limit)
        self._round += done
        return left

    def write_on(self, path: Iterable[Node[TreeEntry]], nodes: Iterable[Node[TreeEntry]]) -> None:
        """``write_all`` for a path, and for all ``nodes`` if something was left before."""
        if self._store.away:
            self.behind = True
        elif self.behind:
            self.behind = False
            self.behind = self.write_all(nodes) or self.behind  # ``finish`` may have set it meanwhile
        else:
            self.behind = self._hand_over(path, math.inf)[1] or self.behind

    def _hand_over(self, nodes: Iterable[Node[TreeEntry]], limit: float) -> tuple[bool, bool]:
        """Returns whether all nodes were visited, and whether something of them is left to be written."""
        total, left = 0, False
        for node in nodes:
            kept = node.data
            if kept is None or kept.stored or self.is_pending(node, kept) or kept.tried == self._round:
                continue
            if kept.snapshot is None and kept.serialized is None and kept.writing is not None:
                left = True  # parted while it was being written, and nowhere else
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

    def is_pending(self, node: Node[TreeEntry], entry: TreeEntry) -> bool:
        """Whether the write under way will store a node's content. Of a split edge it stores whole blocks."""
        write = entry.store_write
        return write is not None and (write.owner is node or node.end % self._size == 0)

    def submit(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        """Submit a node's content for writing."""
        assert node.data is not None
        chain = self._chain(node)
        entries = ((chain.at(end), part) for end, part in self._cut(serialized))
        paths = [[chain.at(end) for end in ends] for ends in self._paths(node)]
        store_write = StoreWrite(entries, serialized, node, paths=paths)
        self._store.writes.submit(store_write)
        node.data.store_write, node.data.writing = store_write, serialized

    def finish(self, store_write: StoreWrite) -> Iterator[Node[TreeEntry]]:
        """Record the result of a write; returns the affected nodes.

        A node that was split meanwhile has an entry only if it ends with a block.
        """
        if self._lost and not store_write.failed:  # they accept writes again: try everything once more
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
        """The nodes that were stored, but of which every store now lacks an entry."""
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
        """The ends of a node's entries; for the last node of a conversation, including all entries that lead
        to them.
        """
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
        """(end, part) for the parts of a serialized snapshot; an empty last part is omitted."""
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
