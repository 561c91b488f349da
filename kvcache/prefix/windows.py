"""Windows that snapshots hold in the cells of a cache: copied out, the room beside the cells allowing.

A window has cells for open sessions alone, far fewer than a cache of all of the past, so that what is kept of
other conversations has to leave them long before those are full.
"""

from __future__ import annotations

import logging
from typing import Any

from kvcache.caches.wrapper import unwrapped
from kvcache.prefix.eviction import Priority, priority_of
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.tree_entry import TreeEntry, is_restored
from kvcache.snapshots.snapshot import Snapshot, unwrapped_snapshot

__all__ = ["WindowCells", "part_of"]

log = logging.getLogger("kvcache")


class WindowCells:
    """The nodes of a tree whose snapshots hold cells of windows, by the part of ``cache`` that is one."""

    def __init__(self, cache: Any) -> None:
        self.parts: dict[int, bool] = {}
        """By the place of each wrapped cache that asks for cells: whether what it keeps is a window."""
        for i, part in enumerate(unwrapped(cache)):
            if hasattr(part, "on_pressure"):
                self.parts[i] = not part.snapshot(0, 0, 0).divisible
        self._nodes: dict[int, dict[Node[TreeEntry], None]] = {
            i: {} for i, window in self.parts.items() if window
        }
        self._copied: dict[int, dict[Node[TreeEntry], int]] = {i: {} for i in self._nodes}
        self.copied = 0
        """Bytes of windows that lie beside the cells."""

    def note(self, node: Node[TreeEntry]) -> None:
        """A node's snapshot came, went, or was copied out."""
        for part, nodes in self._nodes.items():
            held = part_of(node, part)
            self.copied -= self._copied[part].pop(node, 0)
            if held is not None and held.holds_cells:
                nodes[node] = None
                continue
            nodes.pop(node, None)
            if held is not None:
                self._copied[part][node] = held.nbytes
                self.copied += held.nbytes

    def next(self, part: int) -> Node[TreeEntry] | None:
        """What leaves its cells first, of those that hold some and are not being restored.

        Those that alone hold one come before those that share all, with each other or with sequences.
        """

        def order(node: Node[TreeEntry]) -> tuple[bool, Priority]:
            held = part_of(node, part)
            return held is None or not held.frees_cells, priority_of(node)

        return min((node for node in self._nodes[part] if not is_restored(node)), key=order, default=None)

    def copy_out(self, node: Node[TreeEntry], part: int) -> bool:
        """Let a window leave its cells; False, and nothing changes, where the device has no memory for it."""
        held = part_of(node, part)
        assert held is not None
        try:
            held.detach()
        except Exception as error:  # also lost with its device, or not put whole: it goes in its turn
            log.info("a window could not be copied out of its cells: %s", error)
            return False
        self.note(node)
        return True


def part_of(node: Node[TreeEntry], part: int) -> Snapshot | None:
    """What a node has on the device of one of the caches of a wrapper, by its place."""
    if node.data is None or node.data.snapshot is None:
        return None
    return unwrapped_snapshot(node.data.snapshot)[part]
