"""Snapshots of what is whole, a window or a recurrent state: where to take them, and what a sequence has."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcache.cache import NotSupportedError
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node, common_length
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.snapshots.snapshot import Snapshot

__all__ = ["pieces_of", "positions_due"]


def positions_due(
    ids: np.ndarray, cached: int, interval: int, parted: int, others: Iterable[np.ndarray]
) -> list[int]:
    """Where snapshots of a prompt are worth taking: where prompts part, at intervals, before the last token.

    ``parted`` is where it leaves what is kept, ``others`` are the tokens of open sessions; the first
    ``cached`` of ``ids`` are evaluated already.
    """
    last = int(ids.size) - 1
    first = cached - cached % interval + interval
    wanted = {last, parted, *range(first, last, interval)}
    wanted |= {common_length(other, ids) for other in others}
    return sorted(position for position in wanted if cached < position <= last)


def pieces_of(
    tree: PrefixTree, seq: int, ids: np.ndarray, begin: int, above: Node[TreeEntry] | None = None
) -> list[Snapshot]:
    """Snapshots of what is whole, which follow one another from ``begin`` on.

    ``above``: a node that ``ids`` are known to lead through.
    """
    size = int(ids.size)
    if tree.divisible:
        return []
    taken = [part for part in tree.cache.take_snapshots(seq) if part.end <= size]
    if begin and tree.along(ids, above)[0] < begin:  # what they would follow was evicted since
        taken, begin = [part for part in taken if not part.begin], 0
    begin = taken[-1].end if taken else begin
    if begin < size:
        try:
            taken.append(tree.cache.snapshot(seq, begin, size))
        except NotSupportedError:
            return taken  # a window or a state that was rolled back and is not there any more
    return taken
