"""A picture of any cache, or of a PrefixCache: tree, tiers and sessions. No order of use changes."""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from collections.abc import Iterable
from typing import Any, TypeVar, overload

from kvcache import CausalCache, EncoderCache, PrefixCache, Session, StateCache, WrapperCache
from kvcache.cache import ClosedError, InvalidRangeError, NotSupportedError, OrderError
from kvcache.views import html
from kvcache.views.blocks import NodeView, TierView
from kvcache.views.caches import render_cache
from kvcache.views.pictures import CachePicture, PrefixPicture, SessionView
from kvcache.views.words import HEAD, Decode, preview, printable

NODES = 200
T = TypeVar("T")


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


def _prefix(prefix: PrefixCache, decode: Decode | None, nodes: int) -> PrefixPicture:
    if prefix.closed:
        raise ClosedError("render: the PrefixCache is closed")
    if nodes < 0:
        raise InvalidRangeError(f"render: nodes={nodes}; it must be >= 0")
    look = _Look(prefix, nodes)
    return PrefixPicture(
        nodes=tuple(look.views(decode)),
        total=look.sizes[id(look.root)] - 1,
        hidden=look.hidden(look.root.children.values()),
        tiers=tuple(_tiers(prefix)),
        sessions=tuple(_session(prefix, session, decode) for session in prefix.sessions),
        tokens=prefix.stats.tokens,
        reused=prefix.stats.reused,
        evicted=prefix.tree.evicted,
        cache=render_cache(prefix.cache),
    )


class _Look:
    """Which nodes of a tree are drawn: up to ``limit`` that were used last, each with all those above it."""

    def __init__(self, prefix: PrefixCache, limit: int) -> None:
        self.tree, self.root = prefix.tree, prefix.tree.radix_tree.root
        self.now, self.first = time.monotonic(), self.tree.device.peek()
        below = list(self.root.descendants())
        used = {id(node): node.data.used if node.data is not None else 0 for node in below}
        self.uses = sorted(set(used.values()))
        """At which times of use something was used last, ascending."""
        used[id(self.root)] = 0
        self.sizes = dict.fromkeys(used, 1)
        """By node, how many nodes its subtree has."""
        for node in reversed(below):
            above = id(node.parent)
            used[above] = max(used[above], used[id(node)])
            self.sizes[above] += self.sizes[id(node)]
        order = itertools.count()
        waiting = [(-used[id(node)], next(order), node) for node in self.root.children.values()]
        heapq.heapify(waiting)
        self.chosen: set[int] = set()
        while waiting and len(self.chosen) < limit:
            _, _, node = heapq.heappop(waiting)
            self.chosen.add(id(node))
            for child in node.children.values():
                heapq.heappush(waiting, (-used[id(child)], next(order), child))

    def hidden(self, children: Iterable[object]) -> int:
        """How many nodes the subtrees of those children have that are not drawn."""
        return sum(self.sizes[id(child)] for child in children if id(child) not in self.chosen)

    def views(self, decode: Decode | None) -> list[NodeView]:
        """Parents before children, siblings in the order in which they were made."""
        views: list[NodeView] = []
        top = self._drawn(self.root.children.values())
        places: dict[int, tuple[int | None, int]] = {id(node): (None, 0) for node in top}
        """By node, the index of its parent's view, and its depth."""
        waiting = top[::-1]
        while waiting:
            node = waiting.pop()
            parent, depth = places[id(node)]
            text = preview(self.tree.alphabet.decode(node.tokens[:HEAD]), decode)
            children, entry = self._drawn(node.children.values()), node.data
            hidden = self.hidden(node.children.values())
            places |= {id(child): (len(views), depth + 1) for child in children}
            waiting += children[::-1]
            if entry is None:
                views.append(NodeView(parent, depth, node.begin, node.end, text, (), 0, hidden=hidden))
                continue
            views.append(
                NodeView(
                    parent, depth, node.begin, node.end, text, entry.tiers, entry.nbytes,
                    age=max(0.0, self.now - entry.since),
                    idle=len(self.uses) - bisect.bisect_right(self.uses, entry.used),
                    next_out=node is self.first,
                    hidden=hidden,
                )
            )  # fmt: skip
        return views

    def _drawn(self, nodes: Iterable[T]) -> list[T]:
        return [node for node in nodes if id(node) in self.chosen]


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
