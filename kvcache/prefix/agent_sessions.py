"""Sessions of agents: which requests belong together, and what only they use.

After the session radix cache of SGLang: a ``session_id`` is a tag on the requests of one agent, which spans
many Sessions of the PrefixCache, and keeps nothing alive. A second radix tree, without content, has the
tokens that the requests of tagged sessions used, and which sessions these are.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvcache.cache import InvalidRangeError, SequenceLostError
from kvcache.caches.one_thread import one_thread
from kvcache.prefix.eviction import Retainer
from kvcache.prefix.prefetch import Prefetcher
from kvcache.prefix.prefix_tree import Path, PrefixTree
from kvcache.prefix.radix_tree import Node, RadixTree
from kvcache.prefix.retention import LOWEST, Retention, TokenRange, check_retention
from kvcache.prefix.tree_entry import TreeEntry, is_folded
from kvcache.snapshots.snapshot import SnapshotChain

__all__ = ["Agent", "AgentSession", "AgentSessions", "check_next_use"]

log = logging.getLogger("kvcache")

MOST_SESSIONS = 4096
"""How many sessions are known; beyond that, the least recently used is forgotten."""
MOST_TOKENS = 1 << 24
"""Likewise, how many distinct tokens they may have used: 8 bytes each."""


@dataclass(frozen=True, slots=True)
class AgentSession:
    """What is known of the requests with one ``session_id``.

    ``own_tokens`` and ``own_nbytes`` are what no other session, and no request without a ``session_id``, has
    used. Bytes are by tier, "device" and "host"; what stores have is not looked up.
    """

    session_id: str
    requests: int
    """Requests that began; one that an engine preempts begins again."""
    running: int
    """Requests that have not ended."""
    closed: bool
    """Whether ``close`` was called and no request began since."""
    idle: float
    """Seconds since a request last began or ended."""
    tokens: int
    """The distinct tokens that its requests used."""
    own_tokens: int
    nbytes: Mapping[str, int]
    own_nbytes: Mapping[str, int]


@dataclass(eq=False, slots=True)
class _Record:
    """A session; ``last`` is where its last request ends in the index."""

    salt: str
    session_id: str
    requests: int = 0
    closed: bool = False
    seen: float = 0.0
    used: int = 0
    """Its last use, on the clock of the tree."""
    next_use: float | None = None
    """How many seconds after the end of its last request the next one will come, if that is known."""
    last: _Node | None = None


_User = _Record | None
"""None: requests without a ``session_id``."""
_Node = Node[set[_User]]


Agent = tuple[str, str]
"""The salt of a session, and its id."""


class _Request(Protocol):
    """An open session of the PrefixCache."""

    agent: Agent | None
    stale: bool


class AgentSessions:
    """The sessions of agents that have requests in a PrefixCache, by ``session_id`` and ``salt``.

    A request uses its prompt from its beginning, and when it ends, what was computed of the prompt and the
    answer. All requests without a ``session_id`` count as one further user. The registry is in this process's
    memory, for at most 4,096 sessions and 16 Mi distinct tokens; the least recently used sessions are
    forgotten first. It is empty after a restart, and what a request then restores from a store counts as its
    session's own.

    Each method takes the ``salt`` with which the requests began, and returns False (``inspect``: None) for an
    unknown session. As with all calls of a PrefixCache, only one thread at a time may call them.
    """

    def __init__(
        self,
        tree: PrefixTree,
        retainer: Retainer,
        running: Mapping[int, _Request],
        calls: Any,
        foreign_pass: Callable[[], bool | None],
    ) -> None:
        """``running`` are the open sessions of the PrefixCache; ``calls`` and ``foreign_pass`` as in
        OpenSessions.
        """
        self._tree, self._retainer, self._running = tree, retainer, running
        self._calls, self.foreign_pass = calls, foreign_pass
        self._index: RadixTree[set[_User]] = RadixTree()
        self._tokens = 0
        """The distinct tokens in the index."""
        self._records: OrderedDict[Agent, _Record] = OrderedDict()
        """The least recently used first."""
        self.prefetcher: Prefetcher | None = None
        """Holds entries of stores that were read ahead."""

    # For everyone.

    @one_thread
    def list(self, salt: str = "") -> tuple[AgentSession, ...]:
        """The sessions of a salt, the least recently used first."""
        return tuple(self._inspected(record) for record in self._records.values() if record.salt == salt)

    @one_thread
    def inspect(self, session_id: str, salt: str = "") -> AgentSession | None:
        record = self._records.get((salt, session_id))
        return None if record is None else self._inspected(record)

    @one_thread
    def close(self, session_id: str, salt: str = "") -> bool:
        """End a session: what only closed sessions used is evicted first, from every tier; the rest stays as
        it was.

        Priorities that its requests set no longer count. Running requests continue; once they end, what they
        used is evicted first, too. A further request, or ``retain``, reopens the session. Nothing is evicted
        before its space is needed.
        """
        record = self._records.get((salt, session_id))
        if record is None:
            return False
        record.closed = True
        self._records.move_to_end((salt, session_id), last=False)
        nodes = self._nodes(record, ended=True)
        self._use_at(0, (node for node, own in nodes.items() if own))
        self._retainer.regrant(nodes, Retention([TokenRange(priority=LOWEST)]))
        self._tree.tell()
        return True

    @one_thread
    def delete(self, session_id: str, salt: str = "") -> bool:
        """Discard what only this session used, on the device, in host memory and in the stores, and forget
        it.

        Nothing of its running requests is kept when they end. Waits for pending writes to stores. The memory
        of other processes that share a store is unchanged, and so is what they wrote of longer prompts.
        Returns False if a store did not delete its entries; the session then remains, and the call can be
        repeated.
        """
        record = self._records.get((salt, session_id))
        if record is None:
            return False
        for session in self._running.values():
            if session.agent == (salt, session_id):
                session.stale = True
        for node, own in self._nodes(record).items():
            if own and node.data is not None:
                self._tree.drop(node)
        deleted = self._delete_stored(record)
        self._tree.settle()
        if deleted:
            self._forget(record)
        return deleted

    @one_thread
    def retain(self, session_id: str, retention: Retention, salt: str = "") -> bool:
        """Change the priorities of what the session has used so far (``Retention()``: to the default).

        For what only this session used, they replace those that its requests set; for the rest, the highest
        priority counts. To pin a session, set the priority 100, if need be with a ``duration``.
        """
        check_retention(retention)
        record = self._records.get((salt, session_id))
        if record is None:
            return False
        record.closed = False
        self._retainer.regrant(self._nodes(record, retention.cuts()), retention)
        self._tree.tell()
        return True

    @one_thread
    def expect(self, session_id: str, seconds: float, salt: str = "") -> bool:
        """Expect the session's next request ``seconds`` after the end of its last one.

        This is ``next_use`` of ``PrefixCache.begin`` for the last request, even if that is still running.
        Among equal priorities, what only this session used for it is evicted as if it had already been idle
        for that long, and so before that of sessions whose next request comes sooner. The next request ends
        this. Returns False also for a closed session.
        """
        check_next_use("expect: seconds", seconds)
        record = self._records.get((salt, session_id))
        if record is None or record.closed:
            return False
        record.next_use = seconds
        if not self._count_running(record):
            self._expect(record)
        return True

    # For the PrefixCache.

    def begin(
        self,
        agent: Agent | None,
        ids: np.ndarray,
        cached: int,
        stored: int,
        path: Iterable[Node[TreeEntry]],
        next_use: float | None = None,
    ) -> None:
        """A request of an agent begins with ``cached`` of the tokens ``ids``, the last ``stored`` of these
        from stores; None: one without a ``session_id``. ``path`` are its nodes in the tree.

        What was in memory, and no session is known to have used, is of requests without a ``session_id``.
        """
        if self._records:
            self._retainer.revive(path)
        if agent is not None:
            kept = cached - stored if stored else max(cached, self._tree.radix_tree.match(ids).length)
            if kept > self._index.match(ids).length:
                self._mark(None, ids[:kept])
            record = self._records.setdefault(agent, _Record(*agent))
            record.requests, record.closed, record.next_use = record.requests + 1, False, next_use
        self._use(agent, ids)

    def end(self, agent: Agent | None, ids: np.ndarray) -> None:
        """A request ends, of which the tokens ``ids`` are kept."""
        record = self._use(agent, ids)
        if record is not None and record.closed:
            self.close(record.session_id, record.salt)
        elif record is not None:
            self._expect(record)

    def use(self, ids: np.ndarray) -> None:
        """Something that is no request of a session uses ``ids``."""
        self._use(None, ids)

    def _use(self, agent: Agent | None, ids: np.ndarray) -> _Record | None:
        if agent is None:
            if self._records:
                self._mark(None, ids, grow=False)
            return None
        record = self._records.setdefault(agent, _Record(*agent))
        self._records.move_to_end(agent)
        record.last = self._mark(record, ids) or record.last
        record.seen, record.used = self._tree.now(), self._tree.clock
        while (len(self._records) > MOST_SESSIONS or self._tokens > MOST_TOKENS) and len(self._records) > 1:
            self._forget(next(iter(self._records.values())))
        return record

    def _expect(self, record: _Record) -> None:
        """Give the content of a session's last request the place that its next use deserves."""
        if record.next_use is None or record.last is None:
            return
        own = next((node.begin for node in record.last.path() if node.data == {record}), record.last.end)
        path = self._tree.walk(record.last.prefix())
        self._cut(path, (own,))
        due = record.used - int(record.next_use * 1e6)
        self._use_at(due, (node for node in reversed(path.nodes) if self._begins(node) >= own))

    def _count_running(self, record: _Record) -> int:
        return sum(each.agent == (record.salt, record.session_id) for each in self._running.values())

    def tokens(self) -> Iterator[np.ndarray]:
        """The tokens of all sessions, in parts."""
        return (node.tokens for node in self._index)

    def clear(self) -> None:
        """Forget all sessions."""
        self._index, self._tokens = RadixTree(), 0
        self._records.clear()

    # The index. Whoever uses a node uses those above it, too.

    def _mark(self, user: _User, ids: np.ndarray, grow: bool = True) -> _Node | None:
        """Note that a user uses ``ids``, as far as the index has them unless it may ``grow``; returns the
        node where they end.
        """
        match = self._index.match(ids)
        nodes = match.nodes
        if match.inside and (grow or user not in (nodes[-1].data or ())):
            lower = nodes[-1]
            nodes[-1] = self._index.split(lower, match.length)
            nodes[-1].data = {*(lower.data or ())}
        if grow and match.length < ids.size:
            above = nodes[-1] if nodes else self._index.root
            more = self._index.add(above, ids[match.length :], set())
            if above.data == {user} and len(above.children) == 1:  # a turn more of the only conversation
                self._index.join(nodes.pop())
            nodes.append(more)
            self._tokens += int(ids.size) - match.length
        for node in nodes:
            assert node.data is not None
            node.data.add(user)
        return nodes[-1] if nodes else None

    def _forget(self, record: _Record) -> None:
        """Forget a session, and the tokens that only it used."""
        del self._records[record.salt, record.session_id]
        waiting, passed = [self._index.root], list[_Node]()
        while waiting:
            node = waiting.pop()
            below = [child for child in node.children.values() if child.data and record in child.data]
            waiting += below
            passed += below
        for node in passed:
            users = node.data or set()
            users.discard(record)
            if users <= {None}:
                self._tokens -= int(node.tokens.size)
                self._index.remove(node)

    def _paths(self, record: _Record, ended: bool = False) -> Iterator[tuple[_Node, int]]:
        """Where the longest paths of a session end, depth first, and where its own part of each begins.

        ``ended``: where that of closed sessions does.
        """

        def is_own(users: set[_User]) -> bool:
            return all(user is record or (ended and user is not None and user.closed) for user in users)

        waiting: list[tuple[_Node, int | None]] = [(self._index.root, None)]
        while waiting:
            node, own = waiting.pop()
            below = [child for child in node.children.values() if child.data and record in child.data]
            if not below and node.parent is not None:
                yield node, node.end if own is None else own
            for child in below:
                starts = child.begin if own is None and is_own(child.data or set()) else own
                waiting.append((child, starts))

    # What is kept of a session.

    def _use_at(self, when: int, nodes: Iterable[Node[TreeEntry]]) -> None:
        """Treat nodes, the deepest first, as last used at a time, or when those below them were."""
        for node in nodes:
            if node.data is not None:
                below = [child.data.used for child in node.children.values() if child.data is not None]
                node.data.used = node.data.end_used = max([when, *below])
                self._tree.reorder(node)

    def _nodes(
        self, record: _Record, cuts: Iterable[int] = (), ended: bool = False
    ) -> dict[Node[TreeEntry], bool]:
        """The nodes of the tree that a session uses, deepest first, and whether only it uses them.

        Edges are split where its own part begins, and at ``cuts``. ``ended``: whether only closed sessions
        do.
        """
        tree = self._tree
        paths = [(leaf.prefix(), own) for leaf, own in self._paths(record, ended)]
        for tokens, own in paths:
            path = tree.walk(tokens)
            if folded := [node for node in path.nodes if is_folded(node)]:
                tree.unfold(*folded)
            self._cut(path, {own, *cuts})
        nodes: dict[Node[TreeEntry], bool] = {}
        for tokens, own in paths:
            path = tree.walk(tokens)
            nodes |= {node: self._begins(node) >= own for node in path.nodes if node.end <= path.length}
        deepest = sorted(nodes, key=lambda node: -node.end)
        for node in deepest:  # what something unknown continues from is not its own
            for child in node.children.values():
                goes = ended and child.data is not None and child.data.rank == LOWEST
                nodes[node] &= nodes.get(child, goes)
        return {node: nodes[node] for node in deepest}

    def _cut(self, path: Path, positions: Iterable[int]) -> None:
        """Split edges of a path at positions, if their content is divisible."""
        for at in positions if self._tree.divisible else ():
            if 0 < at < path.length:
                with contextlib.suppress(SequenceLostError):  # the content was lost in a device failure
                    self._tree.end_at(path, at)

    def _begins(self, node: Node[TreeEntry]) -> int:
        """Who uses the token at this position uses a node: indivisible content belongs to its end."""
        return node.begin if self._tree.divisible else node.end - 1

    def _delete_stored(self, record: _Record) -> bool:
        """Delete the session's own entries from the stores; returns whether all stores have done so."""
        store, deleted = self._tree.store, True
        if store is None:
            return True
        if self.prefetcher is not None:
            self.prefetcher.clear()
        store.writes.flush()
        done: set[_Node] = set()
        for leaf, own in self._paths(record):
            chain = self._tree.chain(leaf.prefix())
            for node in leaf.path():
                if node.begin >= own and node not in done:  # entries may end anywhere
                    done.add(node)
                    keys = [chain.at(end) for end in range(node.begin + 1, node.end + 1)]
                    deleted &= store.delete(keys)
        return deleted

    def _inspected(self, record: _Record) -> AgentSession:
        tokens, seen = [0, 0], set[_Node]()
        nbytes = {"device": [0, 0]} | ({} if self._tree.host is None else {"host": [0, 0]})
        for leaf, own in self._paths(record):
            path = leaf.path()
            fresh = [node for node in path if node not in seen]
            seen.update(fresh)
            for node in fresh:
                tokens[node.begin >= own] += node.end - node.begin
            match = self._tree.radix_tree.match(leaf.prefix())
            for tier, begin, end, size in (each for node in match.nodes for each in _contents(node)):
                if not self._tree.divisible:  # it belongs to its end
                    begin, size = end - 1, size * (end <= match.length)
                parts = (fresh[0].begin, min(own, match.length)), (max(fresh[0].begin, own), match.length)
                for i, (low, high) in enumerate(parts):
                    overlap = max(0, min(end, high) - max(begin, low))
                    nbytes[tier][i] += size * overlap // max(1, end - begin)
        return AgentSession(
            record.session_id,
            record.requests,
            self._count_running(record),
            record.closed,
            self._tree.now() - record.seen,
            sum(tokens),
            tokens[1],
            {tier: sum(parts) for tier, parts in nbytes.items()},
            {tier: parts[1] for tier, parts in nbytes.items()},
        )


def _contents(node: Node[TreeEntry]) -> Iterator[tuple[str, int, int, int]]:
    """(tier, begin, end, bytes) of each copy of a node's content in memory."""
    entry = node.data
    if entry is None:
        return
    if entry.snapshot is not None:
        parts = entry.snapshot.parts if isinstance(entry.snapshot, SnapshotChain) else [entry.snapshot]
        for part in parts:
            yield "device", part.begin, part.end, part.nbytes
    if (below := entry.serialized or entry.leaving) is not None:
        yield "host", entry.begin, node.end, below.nbytes


def check_next_use(what: str, seconds: object) -> None:
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:  # type: ignore[operator]
        raise InvalidRangeError(f"{what}={seconds!r:.60}; it must be a number of seconds of at least 0")
