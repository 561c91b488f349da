"""What nodes of a radix tree keep, put into a sequence, in as few steps as it may be.

What follows one another goes in one step, and of windows and states, which have no parts, the last one's
alone: from the cache's cells, which are shared, or from host memory. There it ends where conversations part,
so that what they have in common lies in the cache once::

    512 -- 1024 -- 1536 --+-- 2048 -- 2560         two steps, with the states of 1536 and 2560
                          +-- 1900
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvcache.cache import InvalidRangeError, SequenceLostError
from kvcache.offload.direct_load import restore_serialized
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.tree_entry import TreeEntry, content_of
from kvcache.stores import SerializedSnapshot
from kvcache.stores.errors import SnapshotCorruptError

__all__ = ["restore"]

log = logging.getLogger("kvcache")

Nodes = Sequence[Node[TreeEntry]]


def restore(tree: PrefixTree, seq: int, nodes: Nodes, target: int) -> tuple[int, str] | None:
    """Put what the first of ``nodes`` have up to ``target`` into a sequence: how many, and their tier.

    None where the first one's cannot be had.
    """
    count = _count(tree, nodes)
    for some in dict.fromkeys((count, min(count, 1))):  # one by one it turns out which of them is lost
        try:
            tier = _restore(tree, seq, nodes[:some], min(nodes[some - 1].end, target)) if some else None
        except (SnapshotCorruptError, SequenceLostError, InvalidRangeError) as error:
            tier = None
            if some == 1:
                log.warning("%s; the snapshot is dropped", error)
        if tier is not None:
            return some, tier
    return None


def _count(tree: PrefixTree, nodes: Nodes) -> int:
    """How many of the first go in one step; 0 where the first one has nothing."""
    count, on_host = 0, False
    for node in nodes:
        held = node.data
        if held is None or (held.snapshot is None and not held.present):
            break
        source = held.snapshot or content_of(held)
        serialized = isinstance(source, SerializedSnapshot)
        if count:
            before = nodes[count - 1]
            if serialized is not on_host or held.begin != before.end:
                break
            if on_host and (tree.divisible or len(before.children) > 1):
                break
        if not isinstance(source, SerializedSnapshot) and not source.joins_in_place:
            return count or 1
        count, on_host = count + 1, serialized
    return count


def _restore(tree: PrefixTree, seq: int, nodes: Nodes, target: int) -> str | None:
    cache, node = tree.cache, nodes[-1]
    entries = [each.data for each in nodes if each.data is not None]
    held, begin = entries[-1], entries[0].begin
    sources = [content_of(each) for each in entries]
    snapshots = [source for source in sources if not isinstance(source, SerializedSnapshot)]
    if snapshots:
        joined = snapshots[0] if len(snapshots) == 1 else cache.join(snapshots)
        restored = cache.restore(seq, joined, target if joined.divisible else None)
    else:
        serialized = [source for source in sources if isinstance(source, SerializedSnapshot)]
        restored = restore_serialized(cache, seq, serialized, target)
    if not restored:
        return None
    if held.snapshot is None and target == node.end and node.data is held:
        # It lies in the cache now: kept from there, the next one shares it, and all that it follows.
        tree.keep_on_device(node, cache.snapshot(seq, begin, node.end))
    return "device" if snapshots else "host"
