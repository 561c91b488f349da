"""Conversations in a cache: their tokens, and which of them have certainly been evaluated.

A Session is one conversation; OpenSessions manages all of them: the sequence of each, and what is kept of it
for others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

import numpy as np

from kvcache.cache import (
    CacheFullError,
    ClosedError,
    InvalidRangeError,
    KVCacheError,
    NotSupportedError,
    SequenceLostError,
    check_whole,
    computed,
)
from kvcache.caches.one_thread import one_thread
from kvcache.prefix.agent_sessions import Agent, AgentSessions
from kvcache.prefix.alphabet import EVERYONE, Tenant
from kvcache.prefix.eviction import Evictor
from kvcache.prefix.matcher import PrefixMatcher, Source, StoreLookup
from kvcache.prefix.options import PrefixOptions
from kvcache.prefix.prefix_tree import Path, PrefixTree
from kvcache.prefix.radix_tree import Node, common_length
from kvcache.prefix.retention import Retention
from kvcache.prefix.tree_entry import TreeEntry, content_of, is_present
from kvcache.snapshots.schedule import REPLACED, bytes_inside, thin_snapshots
from kvcache.snapshots.serialize import deserialize
from kvcache.snapshots.snapshot import Snapshot, SnapshotChain, unwrapped_snapshot
from kvcache.stores import SerializedSnapshot

__all__ = [
    "Lookup", "OpenSessions", "PrefixStats", "Session", "SessionLimitError", "SessionReplacedError", "Tokens",
]  # fmt: skip

log = logging.getLogger("kvcache")

Tokens = Sequence[int | bytes] | np.ndarray


class SessionLimitError(KVCacheError):
    """All sequences of the cache are used by open sessions."""


class SessionReplacedError(KVCacheError):
    """``copy_prefix`` was called on the cache directly and replaced the sequence of an open session."""


@dataclass(slots=True, repr=False)
class PrefixStats:
    """Prompt tokens since the start, and where they came from.

    Ranks may agree to reuse fewer tokens than counted here: see the engine's ``Statistics.reused_tokens``.
    """

    sessions: int = 0
    tokens: int = 0
    """The tokens of all prompts."""
    live: int = 0
    """Tokens shared with an open session."""
    device: int = 0
    host: int = 0
    store: int = 0
    skipped: int = 0
    """Snapshots that could not be taken because they were due inside a batch of a model with recurrent layers
    that does not deliver states.
    """
    spared: int = 0
    """Tokens for which stores were not asked, because computing them is faster (``BreakEven``)."""

    def __repr__(self) -> str:
        parts = {name: getattr(self, name) for name in ("live", "device", "host", "store")}
        sources = ", ".join(f"{name}: {count}" for name, count in parts.items() if count)
        rest = {name: getattr(self, name) for name in ("skipped", "spared")}
        more = "".join(f"; {name}: {count}" for name, count in rest.items() if count)
        reused = f"reused: {self.reused}{f' ({sources})' if sources else ''}"
        return f"<PrefixStats, sessions: {self.sessions}; tokens: {self.tokens}, {reused}{more}>"

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed again."""
        return self.live + self.device + self.host + self.store

    def add(self, tokens: int, origins: Mapping[str, int]) -> None:
        """Count a session of ``tokens`` tokens, with the number from each of ``origins``."""
        self.sessions += 1
        self.tokens += tokens
        for origin, count in origins.items():
            setattr(self, origin, getattr(self, origin) + count)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend counting, for sessions that do not serve a prompt, such as those that save a
        conversation.
        """
        before = asdict(self)
        try:
            yield
        finally:
            for name, count in before.items():
                setattr(self, name, count)


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a session got the prefix of its prompt; times of searching and restoring are sums."""

    began: float
    """The start time, from ``time.monotonic``."""
    match_seconds: float
    """The time to find the longest prefix in the cache, in host memory and in the stores."""
    restore_seconds: float
    """The time to bring it into the sequence, by sharing, copying or reading from a store."""
    origins: Mapping[str, int]
    """Tokens by origin, named as in PrefixStats."""


class Session:
    """One conversation in the cache: ``seq`` is its sequence, ``cached`` the number of tokens it starts with.

    Evaluate ``remaining`` (the tokens of the prompt from position ``cached`` on), then every token that
    ``extend`` adds, in order. ``close`` keeps what was evaluated for later sessions.

    To remove tokens from the end, call ``rewind``. ``remaining`` then has the tokens to evaluate again, and
    ``extend`` continues from there. If tokens are removed from the cache directly
    (``cache.remove(session.seq, n)``), the next pass must begin at ``n`` or it raises InvalidBatchError, and
    nothing from ``n`` on is kept or shared, unless ``extend`` has not been called for them yet (rejected
    drafts). If ``cache.copy_prefix`` replaces the sequence, or ``rewind`` fails half way, every call except
    ``rewind`` and ``close`` raises SessionReplacedError, and nothing of the session is kept.
    """

    def __init__(
        self, owner: OpenSessions, seq: int, tokens: np.ndarray, cached: int, tenant: Tenant = EVERYONE
    ) -> None:
        """``owner``: the sessions of the same cache."""
        self._owner = owner
        self._calls = owner.calls
        self._alphabet = owner.alphabet
        self.tenant = tenant
        self.seq = seq
        self.cached = cached
        self._tokens = tokens
        self._more: list[int | bytes] = []
        self._prompt = int(tokens.size)
        self.reusable: int | None = int(tokens.size) if owner.block > 1 else None
        """With whole blocks, how many tokens the prompt has: what follows is not computed in blocks, and so
        not reused. None: all may be."""
        self.kept = cached
        """Up to here its content is available to others: the shared prefix, and what ``keep`` has added."""
        self.following = contextlib.ExitStack()
        """Keeps the predecessor of its next snapshot from being evicted."""
        self.point: Node[TreeEntry] | None = None
        """The last known node on the path of its kept content."""
        self.complete: Callable[[], int] | None = None
        """Returns how many tokens all layers of a runtime have seen, since the cache does not know layers
        that have stored nothing yet. None: use the cache's number.
        """
        self._sure = cached
        self._certain: int | None = None
        self._replaced = False
        self.closed = False
        self.agent: Agent | None = None
        """The salt and the ``session_id`` of the agent's session that it belongs to."""
        self.stale = False
        """Whether everything kept was discarded since it began, so that its content must not be shared."""
        self.spaced: list[int] = []
        """The positions of its snapshots that are scheduled only because of their distance."""
        self.reachable = False
        """Whether the tree has had the predecessor of its next snapshot; only an open session may have it."""
        self.spared = 0
        """Tokens for which stores were not asked at ``begin``, because computing them is faster."""
        self.retention: Retention | None = None
        """How long its kept content stays; it takes effect when the session closes."""
        self.lookup: Lookup | None = None
        """How it got its first ``cached`` tokens, and how long that took."""

    def __repr__(self) -> str:
        count = self._tokens.size + len(self._more)
        state = "closed" if self.closed else f"sequence {self.seq}"
        return f"<Session, {state}: {count} tokens, {self.cached} of them were cached>"

    @property
    def tokens(self) -> list[int | bytes]:
        """The prompt and all tokens that were added."""
        return [*self._alphabet.decode(self._tokens), *self._more]

    @property
    def remaining(self) -> list[int | bytes]:
        """The prompt's tokens that are still to be evaluated: those from position ``cached`` on."""
        return self._alphabet.decode(self._tokens[self.cached : self._prompt])

    def chunks(self, size: int) -> Iterator[list[int | bytes]]:
        """``remaining`` in parts of at most ``size`` tokens that end where snapshots are due.

        This matters only for models with recurrent layers that do not deliver states inside a batch: if a
        batch does not end there, prompts that diverge there resume from an earlier position.
        """
        size = check_whole("chunks", "size", size, least=1)
        at = self.cached
        while at < self._prompt:
            self._check("chunks")
            self._evaluated()
            cut = self.next_cut(at)
            stop = min(at + size, self._prompt) if cut is None else min(cut, self._prompt)
            due = self._owner.next_snapshot(self.seq)
            if due is not None and at < due < stop:
                stop = due
            yield self._alphabet.decode(self._tokens[at:stop])
            at = stop
        self._evaluated()

    def next_cut(self, at: int) -> int | None:
        """Where a pass over the prompt that begins at position ``at`` ends; None: anywhere.

        With whole blocks it ends where a block does, or the prompt.
        """
        if self.reusable is None or at >= self.reusable:
            return None
        block = self._owner.block
        return min(at - at % block + block, self.reusable)

    def foreign_pass(self) -> bool | None:
        """As PrefixCache.foreign_pass."""
        return self._owner.foreign_pass()

    @one_thread
    def extend(self, tokens: Tokens) -> None:
        """Add tokens after the prompt: generated ones, or a further turn."""
        self._check("extend")
        more = self._alphabet.checked(tokens, "extend")
        self._evaluated()
        self._more += more

    @one_thread
    def rewind(self, length: int) -> int:
        """Remove the tokens from ``length`` on, also from the cache; returns ``cached``.

        ``cached`` becomes ``length``, or less if that position has not been evaluated or the cache cannot
        continue from it (a window or a recurrent state belongs to one position). Then it is the nearest
        position that the cache or a snapshot of this conversation has, and ``remaining`` has the tokens up to
        ``length`` that must be evaluated again. Raises InvalidRangeError if ``length`` exceeds the session's
        tokens.
        """
        self._check_open("rewind")
        tokens = self.encoded()
        length = check_whole("rewind", "length", length)
        if length > tokens.size:
            raise InvalidRangeError(f"rewind: to {length}; the session has {tokens.size} tokens")
        trusted = min(length, int(self.computed().size))
        self.cached = self._owner.rewind(self, tokens[:length], trusted)
        self._tokens, self._prompt, self._certain = tokens[:length], length, None
        self._sure, self.kept, self._replaced = self.cached, min(self.kept, self.cached), False
        return self.cached

    def above(self, size: int) -> Node[TreeEntry] | None:
        """A node on the path of its first ``size`` tokens, to shorten walks; None: the root."""
        point = self.point
        if point is None or point.parent is None or point.end > min(self.kept, size):
            return None
        return point

    @one_thread
    def keep(self) -> None:
        """Make the snapshots taken so far available to other sessions; this session continues.

        Divisible content does not need this: other sessions can share it directly.
        """
        self._check("keep")
        self._owner.keep(self)

    @one_thread
    def snapshots(self, inside: int | None = None) -> list[Snapshot]:
        """Its content as consecutive snapshots, to be saved and passed to ``PrefixCache.adopt``.

        Full attention has one snapshot. A window or a state belongs to one position: the last snapshot has
        those of the end, and earlier snapshots those of positions at which other prompts may diverge.
        ``inside`` limits the bytes of these windows and states (None: as many as everything else has; of
        windows alone, as all tokens would take without windows; 0: none). Those with the closest neighbours
        are left out first, and their tokens become part of the next snapshot. Of one cache of windows, each
        snapshot is complete and begins at 0.
        """
        self._check("snapshots")
        if inside is not None:
            check_whole("snapshots", "inside", inside)
        return self._owner.snapshots(self, inside)

    def close(self, keep: bool = True) -> None:
        """End the session. Its content in the cache is kept for others unless ``keep`` is False.

        Tokens that were added but not evaluated are discarded, and so are those of an incomplete pass, such
        as one that failed. A second call has no effect. As a context manager, after an exception, it keeps
        what was evaluated before the last ``extend`` or part of ``chunks``.
        """
        self._close(keep)

    @one_thread
    def _close(self, keep: bool, upto: int | None = None) -> None:
        if not self.closed:
            self.closed = True
            try:
                self._owner.end(self, keep, upto)
            except ClosedError as error:
                raise ClosedError(
                    "close: the cache was closed before this session, of which nothing is kept; close the "
                    "PrefixCache first, then the cache, then the backend"
                ) from error

    def _evaluated(self) -> None:
        """The caller continues, so what it has evaluated is complete."""
        self._sure = self._held()

    def _held(self) -> int:
        """The number of tokens that all layers have in the cache."""
        evaluated = self._owner.computed(self.seq)
        return evaluated if self.complete is None else min(evaluated, self.complete())

    def undo(self, take_back: Callable[[], object]) -> None:
        """Let a runtime undo a failed pass, whose tokens may be evaluated again and kept."""
        self._notice()
        take_back()
        self._owner.rolled_back(self.seq)
        evaluated = self._held()
        self._sure, self.kept = min(self._sure, evaluated), min(self.kept, evaluated)

    def replaced(self) -> None:
        """Mark that the sequence no longer holds the session's tokens."""
        self._replaced, self._certain = True, 0

    def _notice(self) -> None:
        """Process what was removed from the cache since the last call."""
        low = self._owner.rolled_back(self.seq)
        self._replaced = self._replaced or low == REPLACED
        if low is not None and low < self._tokens.size + len(self._more):
            self._certain = max(0, low if self._certain is None else min(low, self._certain))

    def _check(self, op: str) -> None:
        self._check_open(op)
        self._notice()
        if self._replaced:
            raise SessionReplacedError(
                f"{op}: copy_prefix, or a rewind that failed, replaced what sequence {self.seq} of this "
                "session held, and the session no longer knows its tokens; rewind(n) and evaluate remaining "
                "again, or close it. To share tokens of another session, begin one with them"
            )

    def _check_open(self, op: str) -> None:
        if self.closed:
            also = ", as its PrefixCache is; make another one" if self._owner.closed else ""
            raise ClosedError(f"{op}: the session is closed{also}")

    def computed(self) -> np.ndarray:
        """The tokens whose K and V the cache certainly holds."""
        self._notice()
        tokens = self.encoded()
        size = min(int(tokens.size), self._held())
        return tokens[: size if self._certain is None else min(size, self._certain)]

    def shared(self) -> np.ndarray:
        """The tokens of ``computed`` that others may start from.

        With whole blocks none of that with the prompt's last token, which may have had a pass of its own.
        """
        ids = self.computed()
        if self.reusable is None:
            return ids
        size = min(int(ids.size), self.reusable - 1)
        return ids[: size - size % self._owner.block]

    def encoded(self) -> np.ndarray:
        """All tokens, encoded as in the radix tree."""
        if self._more:
            more = self._alphabet.encode(self._more, self.tenant, int(self._tokens.size))
            self._tokens, self._more = np.concatenate((self._tokens, more)), []
        return self._tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(True, None if kind is None else self._sure)


class OpenSessions:
    """Begins sessions in free sequences of the cache of ``tree``, rewinds and ends them.

    ``options``: ``interval`` is the distance between snapshots of windows and states in a prompt; with
    ``write_through``, what a session leaves is submitted to the stores when it ends; with ``whole_blocks``,
    what is reused, and kept, are whole ones of ``block_size`` tokens.
    """

    def __init__(
        self,
        tree: PrefixTree,
        evictor: Evictor,
        lookup: StoreLookup,
        stats: PrefixStats,
        options: PrefixOptions,
        block_size: int,
    ) -> None:
        self.alphabet = tree.alphabet
        self.sessions: dict[int, Session] = {}
        """The open sessions by sequence."""
        self.free = list(range(tree.cache.max_sequences))
        self.closed = False
        """Whether its PrefixCache is."""
        self.used: set[int] = set()
        """Sequences of sessions, and those that could not be emptied after one. What others hold is not ours:
        branches of a caller, for example."""
        self.block = block_size if options.whole_blocks else 1
        self.matcher = PrefixMatcher(tree, self.sessions, lookup, self.block)
        self._lookup = lookup
        self._cache, self._tree, self._evictor = tree.cache, tree, evictor
        self._interval, self._stats = options.interval, stats
        self._write_through = bool(options.write_through)
        self.calls = threading.RLock()
        """Held by the thread that is in a call of the PrefixCache or of a session."""
        self.foreign_pass: Callable[[], bool | None] = getattr(tree.cache, "foreign_pass", lambda: False)
        """Whether another thread is in the middle of a pass of the cache, if the cache can tell."""
        self.agents = AgentSessions(tree, evictor.retainer, self.sessions, self.calls, self.foreign_pass)

    def begin(
        self,
        ids: np.ndarray,
        tenant: Tenant = EVERYONE,
        session_id: str = "",
        next_use: float | None = None,
    ) -> Session:
        """A session over ``ids`` in a free sequence, which holds the longest available prefix."""
        seq = self.next_free("begin")
        began = time.monotonic()
        self.used.add(seq)
        try:
            with self._evictor.within_budgets():
                cached = self._fill(seq, ids)
                matching, origins = self.matcher.matching.seconds, dict(self.matcher.origins)
                lookup = Lookup(began, matching, time.monotonic() - began - matching, origins)
                spaced = self._schedule(seq, ids, cached, self.matcher.path.length)
                self.rolled_back(seq)
        except BaseException:
            self._cache.cancel_snapshots(seq)
            self.empty(seq)
            raise
        self.free.remove(seq)
        session = self.sessions[seq] = Session(self, seq, ids, cached, tenant)
        session.spared, session.lookup, session.spaced = self.matcher.spared, lookup, spaced
        session.agent = (tenant.salt, session_id) if session_id else None
        stored, path = origins.get("store", 0), self.matcher.path.nodes
        self.agents.begin(session.agent, ids, cached, stored, path, next_use)
        self._follow(session, self.matcher.path)
        self._stats.add(int(ids.size), {**origins, "spared": session.spared})
        return session

    def next_free(self, op: str) -> int:
        """The sequence that the next session gets; SessionLimitError if there is none.

        One in which a caller has put something itself, such as a branch, is left alone.
        """
        free = sorted(self.free)  # deterministic, given the sequences in use
        for seq in free:
            if seq in self.used or not self._cache.offset(seq):
                return seq
        others = (
            f"; sequences {free} hold tokens of no session (branches.fork, copy_prefix or other passes): "
            "empty them with branches.drop. To branch from a session, begin one with its tokens"
        )
        raise SessionLimitError(
            f"{op}: {len(self.sessions)} sessions are open, one per sequence; close one of "
            "PrefixCache.sessions first, or initialize the cache with a larger max_sequences"
            f"{others if free else ''}"
        )

    def empty(self, seq: int) -> None:
        """Empty a sequence that no session uses any more."""
        self._cache.remove(seq, 0)
        self.used.discard(seq)

    def _fill(self, seq: int, ids: np.ndarray) -> int:
        """Make the sequence hold the longest available prefix; returns its length.

        If the kept content lacks a layer that was first put later, all of it is discarded; this happens if a
        first pass failed before its last layer.
        """
        cached = self.matcher.fill(seq, ids)
        if cached and self.computed(seq) < cached:
            log.warning("kept tokens lack a layer that was put only later; they are dropped")
            self._tree.clear()
            cached = self.matcher.fill(seq, ids)
            if cached and self.computed(seq) < cached:
                self._cache.remove(seq, 0)
                cached = 0
        return cached

    def forget_items(self) -> None:
        """Make the alphabet forget items that neither an open session nor the tree has."""
        if self.alphabet.crowded:
            nodes = (node.tokens for node in self._tree.radix_tree)
            sessions = (session.encoded() for session in self.sessions.values())
            self.alphabet.forget([*nodes, *sessions, *self.agents.tokens()])

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence have been evaluated in all layers."""
        return computed(self._cache, seq)

    def next_snapshot(self, seq: int) -> int | None:
        """Where a batch of the sequence should end for a snapshot; None: anywhere."""
        return self._cache.next_snapshot(seq)

    def _schedule(self, seq: int, ids: np.ndarray, cached: int, parted: int) -> list[int]:
        """Schedule snapshots of indivisible content; ``parted`` is where the prompt diverges from what is
        kept. Returns as ``Session.spaced``.
        """
        if self._tree.divisible:
            return []
        others = (other.encoded() for other in self.sessions.values())
        # At intervals, but none that would be evicted immediately.
        interval = max(self._interval, int(min(self._evictor.gap / 2, ids.size)) + 1)
        _, shared = self.alphabet.tenant_of(ids)  # where others will part from it
        positions = positions_due(ids, cached, interval, {parted, shared}, others)
        if self.block > 1:
            positions = sorted({whole for at in positions if (whole := at - at % self.block) > cached})
        if positions:
            self._cache.schedule_snapshots(seq, positions)
        return [at for at in positions[:-1] if at % interval == 0 and at not in (parted, shared)]

    def _respace(self, session: Session) -> None:
        """Cancel scheduled snapshots that would be evicted immediately, since space has become short."""
        spaced, gap = session.spaced, self._evictor.gap / 2
        if len(spaced) < 2 or gap < 2 * (spaced[1] - spaced[0]):
            return
        last, stay = session.kept, list[int]()
        for at in spaced:
            if at - last >= gap:
                stay.append(at)
                last = at
        session.spaced = stay
        self._cache.cancel_snapshots(session.seq, {*spaced} - {*stay})

    def keep(self, session: Session) -> None:
        """Make the snapshots taken of an open session available to others."""
        seq, ids = session.seq, session.shared()
        if self._tree.divisible or session.stale:
            return
        self._note_skipped(seq, int(ids.size))
        pieces = [part for part in self._cache.take_snapshots(seq) if part.end <= ids.size]
        if pieces:
            path = self._tree.walk(ids[: pieces[-1].end], session.above(pieces[-1].end))
            follows = pieces[0].begin <= self._tree.along(path)[0]
            if session.reachable and not follows and self._tree.store is None:
                # Their predecessor was evicted meanwhile: no prompt could begin with these, or later ones.
                self._cache.cancel_snapshots(seq, session.spaced)
                session.spaced = []
                return
            session.reachable |= follows
            with self._evictor.within_budgets():
                self._insert(session, path, pieces)
                session.kept = pieces[-1].end
                self._follow(session, path)
            self._respace(session)

    def snapshots(self, session: Session, inside: int | None) -> list[Snapshot]:
        """As ``Session.snapshots``."""
        seq, ids, cache = session.seq, session.computed(), self._cache
        size, pieces = int(ids.size), list[Snapshot]()
        if not self._tree.divisible:
            self.keep(session)
            path = self._tree.walk(ids)
            nodes = self._tree.along(path)[1]
            if nodes and self._evictor.copies.alone:  # those before are complete, too
                earlier = [node for node in path.nodes if node.end < nodes[0].end and is_present(node)]
                nodes = (*(node for node in earlier if node.data and not node.data.begin), *nodes)
            for node in nodes:
                assert node.data is not None
                content = content_of(node.data)
                if isinstance(content, SerializedSnapshot):
                    content = deserialize(cache.backend, content)
                pieces += content.parts if isinstance(content, SnapshotChain) else [content]
        reached = pieces[-1].end if pieces else 0
        if reached < size or not pieces:
            pieces.append(cache.snapshot(seq, reached, size))
        groups = thinned(pieces, inside)
        return [group[0] if len(group) == 1 else cache.join(group) for group in groups]

    def _follow(self, session: Session, path: Path) -> None:
        """Keep the predecessor of a session's next snapshot in place as long as the session is open."""
        session.following.close()
        # What it shares with an open session may reach further than its path, whose last edge may part.
        kept = min(session.kept, path.length)
        before = (node for node in reversed(path.nodes) if node.end <= kept)
        session.point = next((node for node in before if node.parent is not None), None)
        if self._tree.divisible or session.point is None:
            return
        if session.point.end == session.kept:
            session.following.enter_context(self._tree.in_use([session.point]))

    def _insert(self, session: Session, path: Path, pieces: Sequence[Snapshot]) -> None:
        """Keep what a session holds of a path, with the retention that it requests."""
        known = path.length
        self._tree.insert(session.seq, path, pieces)
        self._evictor.retainer.retain(path, known, session.retention)

    def _pieces(self, session: Session, path: Path) -> list[Snapshot]:
        """Consecutive snapshots of indivisible content, after what is already kept of the session."""
        if self._tree.divisible:
            return []
        size, begin = int(path.tokens.size), session.kept
        taken = [piece for piece in self._cache.take_snapshots(session.seq) if piece.end <= size]
        reached = self._tree.along(path)[0] if begin else 0
        if reached < begin:  # their predecessor was evicted meanwhile
            taken, begin = [piece for piece in taken if not piece.begin], reached
        begin = taken[-1].end if taken else begin
        if begin < size:
            with contextlib.suppress(
                NotSupportedError
            ):  # a window or a state that was rolled back no longer exists
                taken.append(self._cache.snapshot(session.seq, begin, size))
        return taken

    def _note_skipped(self, seq: int, size: int) -> None:
        """Count the snapshots of the first ``size`` tokens that could not be taken, and log the first time.

        After these tokens the sequence was cut, for example by a context shift, and nothing is kept.
        """
        skipped = [end for end in self._cache.skipped_snapshots(seq) if end <= size]
        if skipped and not self._stats.skipped:
            log.warning(
                "a batch of sequence %d passed %s, where snapshots were due, but a batch leaves a recurrent "
                "state only at its end, unless the model delivers others. Prompts that diverge at these "
                "positions resume from earlier ones; end batches where session.chunks() and "
                "prefix.next_snapshot() say. prefix.stats.skipped counts all such snapshots",
                seq,
                skipped,
            )
        self._stats.skipped += len(skipped)

    def end(self, session: Session, keep: bool, upto: int | None) -> None:
        """Free the sequence; with ``keep``, its content of the first ``upto`` tokens is kept for others."""
        seq, ids = session.seq, None
        with self._evictor.within_budgets():
            try:
                if keep and not session.stale:
                    evaluated = session.shared()
                    self._note_skipped(seq, int(evaluated.size))
                    ids = evaluated if upto is None else evaluated[: upto - upto % self.block]
                    path = self._tree.walk(ids, session.above(int(ids.size)))
                    self._insert(session, path, self._pieces(session, path))
                    self.agents.end(session.agent, ids)
            except SequenceLostError:
                pass  # there is nothing to keep
            finally:
                session.following.close()
                del self.sessions[seq]
                self.free.append(seq)  # emptied now or on its next use
                self._cache.cancel_snapshots(seq)
                self.empty(seq)
                if not self.sessions:
                    self._lookup.unlearn()
        self._tree.settle()
        if self._write_through and ids is not None:
            self._tree.write_on(ids)

    def clear(self) -> None:
        """Discard everything that is kept. The content of open sessions stays theirs and is no longer
        shared.
        """
        self._tree.clear()
        self._evictor.gap = 0.0
        for session in self.sessions.values():
            session.stale = True

    def rewind(self, session: Session, ids: np.ndarray, trusted: int) -> int:
        """Make the sequence hold ``ids``, or a prefix from which it can continue; returns the length.

        It is known to hold them up to ``trusted``. A snapshot that reaches further than the cache itself is
        restored.
        """
        seq = session.seq
        point = self._cache.resume_point(seq, min(trusted, self.computed(seq)))
        if not self._tree.divisible and point < ids.size:
            self.keep(session)
            path = self._tree.walk(ids)
            length, nodes = self._tree.along(path)
            if length > point:
                try:
                    reached = self._restore_nearest(session, path, Source(length, nodes=nodes))
                except BaseException:  # it holds neither the old nor the requested content
                    session.replaced()
                    self._cache.remove(seq, 0)
                    raise
                session.kept = reached
                self._follow(session, self._tree.walk(ids[:reached]))
                self.rolled_back(seq)
                return reached
        self._cache.remove(seq, point)
        self.rolled_back(seq)
        return point

    def _restore_nearest(self, session: Session, path: Path, source: Source) -> int:
        """Restore along nodes; if one fails, along those before it. Returns the length restored."""
        seq = session.seq
        self._cache.cancel_snapshots(seq)
        with self._evictor.within_budgets():
            try:
                while not self.matcher.from_source(seq, path.tokens, source):
                    path = self._tree.walk(path.tokens)
                    length, nodes = self._tree.along(path)
                    source = Source(length, nodes=nodes)
            except CacheFullError:  # others hold the cells, so there is nothing left to continue from
                self._cache.remove(seq, 0)
                source = Source()
            self._tree.touch(path, source.length)
            session.spaced = self._schedule(seq, path.tokens, source.length, path.length)
        return source.length

    def rolled_back(self, seq: int) -> int | None:
        """The lowest position removed from the cache since the last call."""
        return self._cache.rolled_back(seq)


def thinned(pieces: Sequence[Snapshot], inside: int | None) -> list[list[Snapshot]]:
    """Consecutive snapshots in groups to be joined, of which only the last window or state is kept.

    The windows and states of all but the last one have at most ``inside`` bytes then.
    """
    before = pieces[:-1]
    whole = [sum(part.nbytes for part in unwrapped_snapshot(one) if not part.divisible) for one in before]
    if inside is None:
        inside = bytes_inside(pieces[-1]) + sum(piece.nbytes for piece in before) - sum(whole)
    stay = [*thin_snapshots([piece.end for piece in pieces], whole, inside), len(before)]
    starts = [0, *(i + 1 for i in stay[:-1])]
    return [[*pieces[start : i + 1]] for start, i in zip(starts, stay, strict=True)]


def positions_due(
    ids: np.ndarray, cached: int, interval: int, parted: Iterable[int], others: Iterable[np.ndarray]
) -> list[int]:
    """Where snapshots of a prompt are worth taking: where prompts part, at intervals, before the last token.

    ``parted`` is where it leaves what is kept, and where others will leave it; ``others`` are the tokens of
    open sessions; the first ``cached`` of ``ids`` are evaluated already.
    """
    last = int(ids.size) - 1
    first = cached - cached % interval + interval
    wanted = {last, *parted, *range(first, last, interval)}
    wanted |= {common_length(other, ids) for other in others}
    return sorted(position for position in wanted if cached < position <= last)
