"""What nodes of the radix tree hold, cut into a store's entries and handed to the thread that writes them."""

from __future__ import annotations

from collections.abc import Iterator

from kvcache.offload.tiers import StoreTier, StoreWrite
from kvcache.prefix.alphabet import Alphabet
from kvcache.prefix.radix_tree import Node, RadixTree
from kvcache.prefix.tree_entry import TreeEntry, span_of
from kvcache.snapshots.cut import cut_serialized
from kvcache.stores import Chain, Keys, SerializedSnapshot

__all__ = ["StoreWriter"]


class StoreWriter:
    """Content that is ``divisible`` has an entry for each block; what is whole has one of its own."""

    def __init__(self, store: StoreTier, keys: Keys, alphabet: Alphabet, divisible: bool) -> None:
        self._store, self._keys, self._alphabet, self._divisible = store, keys, alphabet, divisible

    def submit(self, node: Node[TreeEntry], serialized: SerializedSnapshot) -> None:
        """Have a node's content written; it is under way then."""
        assert node.data is not None
        chain = self._chain(node)
        entries = ((chain.at(end), part) for end, part in self._cut(serialized))
        paths = [[chain.at(end) for end in ends] for ends in self._paths(node)]
        store_write = StoreWrite(entries, serialized, node, paths=paths)
        self._store.submit(store_write)
        node.data.store_write, node.data.writing = store_write, serialized

    def finish(self, store_write: StoreWrite) -> Iterator[Node[TreeEntry]]:
        """The nodes whose content was written, or was not, with that noted.

        What was parted on the way has an entry only where it ends with a block.
        """
        for node in (store_write.owner, *store_write.parted):
            assert isinstance(node, Node)
            held: TreeEntry | None = node.data
            if held is not None and held.store_write is store_write:
                whole = node is store_write.owner or node.end % self._keys.block_size == 0
                held.stored = whole and not store_write.failed
                held.store_write = held.writing = None
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
        size = self._keys.block_size
        first = node.begin - node.begin % size + size
        return [*range(first, node.end, size), node.end] if self._divisible else [node.end]

    def _cut(self, serialized: SerializedSnapshot) -> Iterator[tuple[int, SerializedSnapshot]]:
        """(end, part) of the parts of a serialized snapshot; an empty end has no part of its own."""
        begin, end = span_of(serialized)
        size = self._keys.block_size
        cuts = range(begin - begin % size + size, end, size)
        if not self._divisible or not cuts:
            yield end, serialized
            return
        for at in cuts:
            first, serialized = cut_serialized(serialized, at)
            yield at, first
        yield end, serialized

    def _chain(self, node: Node[TreeEntry]) -> Chain:
        return self._keys.chain(self._alphabet.named(node.prefix()))
