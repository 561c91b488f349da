"""A picture of any cache, or of a PrefixCache: tree, tiers and sessions. No order of use changes."""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from typing import Any, overload

from kvcache import CausalCache, EncoderCache, PrefixCache, Session, StateCache, WrapperCache
from kvcache.cache import ClosedError, InvalidRangeError, NotSupportedError, OrderError
from kvcache.prefix.prefix_tree import PrefixTree
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.views import html
from kvcache.views.blocks import NodeView, TierView
from kvcache.views.caches import render_cache
from kvcache.views.pictures import CachePicture, PrefixPicture, SessionView
from kvcache.views.words import HEAD, Decode, preview, printable

NODES = 200


@overload
def render(cache: PrefixCache, decode: Decode | None = None, nodes: int = NODES) -> PrefixPicture: ...
@overload
def render(cache: Any) -> CachePicture: ...
def render(
    cache: Any, decode: Decode | None = None, nodes: int | None = None
) -> CachePicture | PrefixPicture:
    """A picture of what a cache holds: ``print`` it, or ``save`` it as .html, .svg or .json.

    The picture is plain data that later passes do not change; taking it has no side effects and copies no
    tensor. For a cache of another package it shows only its name and ``nbytes``.

    For a PrefixCache, it shows the radix tree, tiers, sessions and cache. ``decode`` (for example
    ``Tokenizer.decode``) returns the text of token ids; None shows the ids. Of a larger tree, the ``nodes``
    (200) most recently used nodes are drawn. Both raise NotSupportedError for other caches.

    Raises OrderError for a cache that is not bound to a backend, ClosedError for one that is closed,
    InvalidRangeError for nodes < 0.
    """
    if isinstance(cache, PrefixCache):
        return _prefix(cache, decode, NODES if nodes is None else nodes)
    if decode is not None or nodes is not None:
        raise NotSupportedError(
            f"render: {type(cache).__name__} has no prefix tree; decode and nodes are for a PrefixCache"
        )
    return render_cache(cache)


# A PrefixCache.

HeldNode = Node[TreeEntry]


def _prefix(prefix: PrefixCache, decode: Decode | None, nodes: int) -> PrefixPicture:
    if prefix.closed:
        raise ClosedError("render: the PrefixCache is closed")
    if nodes < 0:
        raise InvalidRangeError(f"render: nodes={nodes}; it must be >= 0")
    tree = prefix.tree
    chosen, sizes, uses = _choose(tree.radix_tree.root, nodes)
    return PrefixPicture(
        nodes=tuple(_Look(tree, chosen, sizes, uses, decode).views()),
        total=sizes[id(tree.radix_tree.root)] - 1,
        hidden=_hidden(tree.radix_tree.root, chosen, sizes),
        tiers=tuple(_tiers(prefix)),
        sessions=tuple(_session(prefix, session, decode) for session in prefix.sessions),
        tokens=prefix.stats.tokens,
        reused=prefix.stats.reused,
        evicted=tree.evicted,
        cache=render_cache(prefix.cache),
    )


def _choose(root: HeldNode, limit: int) -> tuple[set[int], dict[int, int], list[int]]:
    """Up to ``limit`` nodes that were used last, each with all those above it.

    Also how many nodes each subtree has, and at which times of use something was used last, ascending.
    """
    below = list(root.descendants())
    used = {id(node): node.data.used if node.data is not None else 0 for node in below}
    uses = sorted(set(used.values()))
    used[id(root)] = 0
    sizes = dict.fromkeys(used, 1)
    for node in reversed(below):
        above = id(node.parent)
        used[above] = max(used[above], used[id(node)])
        sizes[above] += sizes[id(node)]
    order = itertools.count()
    waiting = [(-used[id(node)], next(order), node) for node in root.children.values()]
    heapq.heapify(waiting)
    chosen: set[int] = set()
    while waiting and len(chosen) < limit:
        _, _, node = heapq.heappop(waiting)
        chosen.add(id(node))
        for child in node.children.values():
            heapq.heappush(waiting, (-used[id(child)], next(order), child))
    return chosen, sizes, uses


def _hidden(node: HeldNode, chosen: set[int], sizes: dict[int, int]) -> int:
    return sum(sizes[id(child)] for child in node.children.values() if id(child) not in chosen)


class _Look:
    """What all nodes of one picture are drawn by."""

    def __init__(
        self,
        tree: PrefixTree,
        chosen: set[int],
        sizes: dict[int, int],
        uses: list[int],
        decode: Decode | None,
    ) -> None:
        self.tree, self.chosen, self.sizes, self.uses, self.decode = tree, chosen, sizes, uses, decode
        self.now = time.monotonic()
        self.first = tree.device.peek()

    def views(self) -> list[NodeView]:
        """Parents before children, siblings in the order in which they were made."""
        views: list[NodeView] = []
        waiting: list[tuple[HeldNode, int | None, int]] = [(self.tree.radix_tree.root, None, -1)]
        while waiting:
            node, parent, depth = waiting.pop()
            index = None
            if depth >= 0:
                index = len(views)
                views.append(self._view(node, parent, depth))
            children = [child for child in node.children.values() if id(child) in self.chosen]
            waiting += [(child, index, depth + 1) for child in reversed(children)]
        return views

    def _view(self, node: HeldNode, parent: int | None, depth: int) -> NodeView:
        hidden = _hidden(node, self.chosen, self.sizes)
        text = preview(self.tree.alphabet.decode(node.tokens[:HEAD]), self.decode)
        entry = node.data
        if entry is None:
            return NodeView(parent, depth, node.begin, node.end, text, (), 0, hidden=hidden)
        age = max(0.0, self.now - entry.since)
        later = len(self.uses) - bisect.bisect_right(self.uses, entry.used)
        tiers, nbytes, first = _tiers_of(entry), entry.nbytes, node is self.first
        return NodeView(parent, depth, node.begin, node.end, text, tiers, nbytes, age, later, first, hidden)


def _tiers_of(entry: TreeEntry) -> tuple[str, ...]:
    tiers = []
    if entry.snapshot is not None:
        tiers.append("cache" if entry.snapshot.in_cache else "device")
    elif entry.leaving is not None:
        tiers.append("device")
    if entry.serialized is not None:
        tiers.append("host")
    if entry.store_write is not None:
        tiers.append("writing")
    if entry.stored:
        tiers.append("store")
    return tuple(tiers)


def _tiers(prefix: PrefixCache) -> list[TierView]:
    tree = prefix.tree
    tiers = [TierView("device", tree.device.nbytes, tree.device.budget, len(tree.device))]
    if tree.host is not None:
        tiers.append(TierView("host", tree.host.nbytes, tree.host.budget, len(tree.host)))
    if tree.store is not None:
        tiers.append(TierView("writing", tree.store.writes.waiting, tree.store.writes.backlog, None))
        for store in tree.store.stores:
            where = getattr(store, "path", "")
            note = printable(f"{type(store).__name__} {where}".strip())
            tiers.append(TierView("store", None, getattr(store, "budget", None), None, note))
    return tiers


def _session(prefix: PrefixCache, session: Session, decode: Decode | None) -> SessionView:
    tokens, evaluated = session.tokens, prefix.cache.offset(session.seq)
    text = preview(tokens[:HEAD], decode)
    return SessionView(session.seq, len(tokens), session.cached, evaluated, text)


# Notebooks.

_SHOWN = (CausalCache, EncoderCache, StateCache, WrapperCache, PrefixCache)


def register(shell: Any) -> None:
    """Let an IPython shell show caches and prefix caches as HTML; their subclasses too."""
    for kind in _SHOWN:
        shell.display_formatter.formatters["text/html"].for_type(kind, _picture)


def unregister(shell: Any) -> None:
    for kind in _SHOWN:
        shell.display_formatter.formatters["text/html"].pop(kind, None)


def _picture(cache: Any) -> str | None:
    """None where there is nothing to draw (before ``init``, after ``close``): IPython shows the repr then."""
    try:
        picture = render(cache)
    except (OrderError, ClosedError):
        return None
    return html.fragment(list(picture.blocks()))
