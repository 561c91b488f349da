"""Conversations in a cache: their tokens, what is evaluated of them, and what is sure of that.

A session is one conversation; OpenSessions is what they have in common: which sequence each has, and what is
kept of it for others.
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
from kvcache.prefix.alphabet import EVERYONE, Tenant
from kvcache.prefix.eviction import Evictor
from kvcache.prefix.matcher import PrefixMatcher, Source, StoreLookup
from kvcache.prefix.prefix_tree import Path, PrefixTree
from kvcache.prefix.radix_tree import Node, common_length
from kvcache.prefix.retention import Retention
from kvcache.prefix.tree_entry import TreeEntry, content_of
from kvcache.snapshots.schedule import REPLACED
from kvcache.snapshots.serialize import deserialize
from kvcache.snapshots.snapshot import Snapshot, SnapshotChain, unwrapped_snapshot
from kvcache.stores import SerializedSnapshot

__all__ = [
    "Lookup", "OpenSessions", "PrefixStats", "Session", "SessionLimitError", "SessionReplacedError", "Tokens",
]  # fmt: skip

log = logging.getLogger("kvcache")

Tokens = Sequence[int | bytes] | np.ndarray


class SessionLimitError(KVCacheError):
    """As many sessions are open as the cache has sequences."""


class SessionReplacedError(KVCacheError):
    """``copy_prefix`` replaced what the sequence of an open session held, behind the session's back."""


@dataclass(slots=True, repr=False)
class PrefixStats:
    """What was asked for and where it came from, in tokens, since the start.

    Of what was found here, ranks may agree to reuse less: the engine's ``Statistics.reused_tokens``.
    """

    sessions: int = 0
    tokens: int = 0
    """Tokens of all prompts."""
    live: int = 0
    """Shared with a session that was open."""
    device: int = 0
    host: int = 0
    store: int = 0
    skipped: int = 0
    """Snapshots that were due inside a batch of a model with recurrent layers, which delivered no states."""
    spared: int = 0
    """Tokens that stores were not asked for, since computing them is faster (``BreakEven``)."""

    def __repr__(self) -> str:
        parts = {name: getattr(self, name) for name in ("live", "device", "host", "store")}
        sources = ", ".join(f"{name}: {count}" for name, count in parts.items() if count)
        rest = {name: getattr(self, name) for name in ("skipped", "spared")}
        more = "".join(f"; {name}: {count}" for name, count in rest.items() if count)
        reused = f"reused: {self.reused}{f' ({sources})' if sources else ''}"
        return f"<PrefixStats, sessions: {self.sessions}; tokens: {self.tokens}, {reused}{more}>"

    @property
    def reused(self) -> int:
        """Tokens of prompts that were not computed again."""
        return self.live + self.device + self.host + self.store

    def add(self, tokens: int, origins: Mapping[str, int]) -> None:
        """Count a session of ``tokens``, of which so many came from each of ``origins``."""
        self.sessions += 1
        self.tokens += tokens
        for origin, count in origins.items():
            setattr(self, origin, getattr(self, origin) + count)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile: of a session that no prompt asks for, as to save what is kept."""
        before = asdict(self)
        try:
            yield
        finally:
            for name, count in before.items():
                setattr(self, name, count)


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a session came by the beginning of its prompt; seconds of searching and restoring are summed."""

    began: float
    """By ``time.monotonic``."""
    match_seconds: float
    """To find the longest prefix: in the cache, in host memory, and by a question to the stores."""
    restore_seconds: float
    """To bring it into the sequence: shared, copied, or read from a store."""
    origins: Mapping[str, int]
    """Tokens by where they came from, as PrefixStats names them."""


class Session:
    """One conversation in the cache: ``seq`` is its sequence, ``cached`` the number of tokens it starts with.

    Evaluate ``remaining`` (the tokens of the prompt from position ``cached`` on), then every token that
    ``extend`` adds, in order. ``close`` keeps what was evaluated for later sessions.

    To remove tokens from the end, call ``rewind``. ``remaining`` then has the tokens to evaluate again, and
    ``extend`` continues from there. If tokens are removed from the cache directly
    (``cache.remove(session.seq, n)``), nothing from ``n`` on is kept or shared, unless ``extend`` has not
    been called for them yet (rejected drafts). If ``cache.copy_prefix`` replaces the sequence, or ``rewind``
    fails half way, every call except ``rewind`` and ``close`` raises SessionReplacedError, and nothing of
    the session is kept.
    """

    def __init__(
        self, owner: OpenSessions, seq: int, tokens: np.ndarray, cached: int, tenant: Tenant = EVERYONE
    ) -> None:
        """``owner``: the sessions that share the cache with it."""
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
        """Up to here others have it too: what was shared at first, and what ``keep`` left."""
        self.following = contextlib.ExitStack()
        """Keeps what its next snapshot follows where it is."""
        self.point: Node[TreeEntry] | None = None
        """The last node that what is kept of it leads through, or did."""
        self.complete: Callable[[], int] | None = None
        """Tells how many tokens all layers of a runtime have had: the cache knows of no layer that has stored
        nothing yet. None: as many as the cache says."""
        self._sure = cached
        self._certain: int | None = None
        self._replaced = False
        self.closed = False
        self.stale = False
        """Whether all that is kept was forgotten since it began: what it holds is of no use to others."""
        self.spared = 0
        """Tokens that stores were not asked for at its begin, since computing them is faster."""
        self.retention: Retention | None = None
        """How long what is kept of it stays; it counts when the session closes."""
        self.lookup: Lookup | None = None
        """How it came by its first ``cached`` tokens, and how long that took."""

    def __repr__(self) -> str:
        count = self._tokens.size + len(self._more)
        state = "closed" if self.closed else f"sequence {self.seq}"
        return f"<Session, {state}: {count} tokens, {self.cached} of them were cached>"

    @property
    def tokens(self) -> list[int | bytes]:
        """The prompt, and all that was added."""
        return [*self._alphabet.decode(self._tokens), *self._more]

    @property
    def remaining(self) -> list[int | bytes]:
        """The prompt's tokens that are still to be evaluated: those from position ``cached`` on."""
        return self._alphabet.decode(self._tokens[self.cached : self._prompt])

    def chunks(self, size: int) -> Iterator[list[int | bytes]]:
        """``remaining`` in parts of at most ``size``, which end where a snapshot is due.

        Only a model with recurrent layers that does not deliver the states inside a batch needs the parts to
        end there; without it, positions in the middle are resumed from an earlier one.
        """
        check_whole("chunks", "size", size, least=1)
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
        """Add tokens behind the prompt: those that were generated, or a further turn."""
        self._check("extend")
        more = self._alphabet.decode(self._alphabet.encode(tokens))
        self._evaluated()
        self._more += more

    @one_thread
    def rewind(self, length: int) -> int:
        """Forget the tokens from ``length`` on, and what the cache holds of them; returns ``cached``.

        ``cached`` is ``length`` then, or less where that is not evaluated or the cache cannot go on from
        there (a window or a recurrent state is that of one position): then it is the nearest position that
        the cache or a snapshot of this conversation has, and ``remaining`` has the tokens up to ``length``
        that are to be evaluated again. InvalidRangeError for a length that the session lacks.
        """
        self._check_open("rewind")
        tokens = self.encoded()
        check_whole("rewind", "length", length)
        if length > tokens.size:
            raise InvalidRangeError(f"rewind: to {length}; the session has {tokens.size} tokens")
        trusted = min(length, int(self.computed().size))
        self.cached = self._owner.rewind(self, tokens[:length], trusted)
        self._tokens, self._prompt, self._certain = tokens[:length], length, None
        self._sure, self.kept, self._replaced = self.cached, min(self.kept, self.cached), False
        return self.cached

    def above(self, size: int) -> Node[TreeEntry] | None:
        """A node that its first ``size`` tokens lead through, for short walks; None: the root."""
        point = self.point
        if point is None or point.parent is None or point.end > min(self.kept, size):
            return None
        return point

    @one_thread
    def keep(self) -> None:
        """Let others start from the snapshots that were taken so far; the session goes on.

        Divisible content needs none: other sessions share it with this one as it is.
        """
        self._check("keep")
        self._owner.keep(self)

    @one_thread
    def snapshots(self, inside: int | None = None) -> list[Snapshot]:
        """What it holds, to be saved and given to ``PrefixCache.adopt``: snapshots that follow one another.

        Of full attention, one. A window or a state is that of one position: the last snapshot has those of
        the end, and the ones before it those of positions at which other prompts may leave. ``inside`` limits
        the bytes of these windows and states (None: as many as all else has; 0: none). Those go first between
        whose neighbours the fewest tokens lie, and their tokens are in the next snapshot.
        """
        self._check("snapshots")
        if inside is not None:
            check_whole("snapshots", "inside", inside)
        return self._owner.snapshots(self, inside)

    def close(self, keep: bool = True) -> None:
        """End the session. What the cache holds of it is kept for others, unless ``keep`` is False.

        Tokens that were added and not evaluated are forgotten, and those of a pass that put only some
        layers, as one that failed. A second close does nothing. Left by an exception, as a context manager,
        it keeps what was evaluated before the last ``extend`` or part of ``chunks``.
        """
        self._close(keep)

    @one_thread
    def _close(self, keep: bool, upto: int | None = None) -> None:
        if not self.closed:
            self.closed = True
            self._owner.end(self, keep, upto)

    def _evaluated(self) -> None:
        """The caller goes on: what it evaluated is whole."""
        self._sure = self._held()

    def _held(self) -> int:
        """How many tokens are in the cache, in all layers."""
        evaluated = self._owner.computed(self.seq)
        return evaluated if self.complete is None else min(evaluated, self.complete())

    def undo(self, take_back: Callable[[], object]) -> None:
        """Have a runtime take back a pass that failed, whose tokens it may evaluate again and keep."""
        self._notice()
        take_back()
        self._owner.rolled_back(self.seq)
        evaluated = self._held()
        self._sure, self.kept = min(self._sure, evaluated), min(self.kept, evaluated)

    def replaced(self) -> None:
        """The sequence holds other tokens now than the session's, or none."""
        self._replaced, self._certain = True, 0

    def _notice(self) -> None:
        """Take note of what was removed from the cache since the last time."""
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
            raise ClosedError(f"{op}: the session is closed")

    def computed(self) -> np.ndarray:
        """The tokens that the cache holds K and V of, as far as that is certain."""
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
        """All tokens, as the radix tree has them."""
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

    ``interval`` is how far apart snapshots of content that is whole are taken in a prompt.
    ``write_through``: what a session leaves is handed to the stores when it ends.
    """

    def __init__(
        self,
        tree: PrefixTree,
        evictor: Evictor,
        lookup: StoreLookup,
        interval: int,
        stats: PrefixStats,
        write_through: bool = False,
        block: int = 1,
    ) -> None:
        """``block``: what is reused, and kept, are whole ones of so many tokens."""
        self.alphabet = tree.alphabet
        self.sessions: dict[int, Session] = {}
        """By sequence."""
        self.free = list(range(tree.cache.max_sequences))
        self.block = block
        self.matcher = PrefixMatcher(tree, self.sessions, lookup, block)
        self._lookup = lookup
        self._cache, self._tree, self._evictor = tree.cache, tree, evictor
        self._interval, self._stats, self._write_through = interval, stats, write_through
        self.calls = threading.RLock()
        """Held by the thread that is in a call of the PrefixCache, or of a session."""
        self.foreign_pass: Callable[[], bool | None] = getattr(tree.cache, "foreign_pass", lambda: False)
        """Whether another thread is in the middle of a pass of the cache, if that tells."""

    def begin(self, ids: np.ndarray, tenant: Tenant = EVERYONE) -> Session:
        """A session over ``ids`` in a free sequence, which holds the longest prefix that can be had."""
        seq = min(self.free)  # which depends on nothing but the ones that are in use
        began = time.monotonic()
        try:
            with self._evictor.within_budgets():
                cached = self._fill(seq, ids)
                matching, origins = self.matcher.matching.seconds, dict(self.matcher.origins)
                lookup = Lookup(began, matching, time.monotonic() - began - matching, origins)
                self._schedule(seq, ids, cached, self.matcher.path.length)
                self.rolled_back(seq)
        except BaseException:
            self._cache.cancel_snapshots(seq)
            self._cache.remove(seq, 0)
            raise
        self.free.remove(seq)
        session = self.sessions[seq] = Session(self, seq, ids, cached, tenant)
        session.spared, session.lookup = self.matcher.spared, lookup
        self._follow(session, self.matcher.path)
        self._stats.add(int(ids.size), {**origins, "spared": session.spared})
        return session

    def _fill(self, seq: int, ids: np.ndarray) -> int:
        """Have the sequence hold the longest prefix that can be had; returns its length.

        What is kept lacks a layer that was first put after that: all of it goes, as it does for a prefix
        whose first pass failed before its last layer.
        """
        cached = self.matcher.fill(seq, ids)
        if cached and self.computed(seq) < cached:
            log.warning("a layer was first put after tokens were kept that lack it; they are forgotten")
            self._tree.clear()
            cached = self.matcher.fill(seq, ids)
            if cached and self.computed(seq) < cached:
                self._cache.remove(seq, 0)
                cached = 0
        return cached

    def forget_items(self) -> None:
        """Let the alphabet forget what neither an open session nor the tree has."""
        if self.alphabet.crowded:
            nodes = (node.tokens for node in self._tree.radix_tree)
            self.alphabet.forget([*nodes, *(session.encoded() for session in self.sessions.values())])

    def computed(self, seq: int) -> int:
        """How many tokens of a sequence are evaluated, in all layers."""
        return computed(self._cache, seq)

    def next_snapshot(self, seq: int) -> int | None:
        """Where a batch of the sequence should end, for the sake of a snapshot; None: anywhere."""
        return self._cache.next_snapshot(seq)

    def _schedule(self, seq: int, ids: np.ndarray, cached: int, parted: int) -> None:
        """Snapshots of whole content; ``parted`` is where the prompt leaves what is kept."""
        if self._tree.divisible:
            return
        others = (other.encoded() for other in self.sessions.values())
        # Of those at intervals none that would go as soon as it is kept.
        interval = max(self._interval, int(min(self._evictor.gap / 2, ids.size)) + 1)
        due = positions_due(ids, cached, interval, parted, others)
        positions = sorted({whole for at in due if (whole := at - at % self.block) > cached})
        if positions:
            self._cache.schedule_snapshots(seq, positions)

    def keep(self, session: Session) -> None:
        """Let others start from the snapshots that were taken of an open session."""
        seq, ids = session.seq, session.shared()
        if self._tree.divisible or session.stale:
            return
        self._note_skipped(seq, int(ids.size))
        pieces = [part for part in self._cache.take_snapshots(seq) if part.end <= ids.size]
        if pieces:
            with self._evictor.within_budgets():
                path = self._tree.walk(ids[: pieces[-1].end], session.above(pieces[-1].end))
                self._insert(session, path, pieces)
                session.kept = pieces[-1].end
                self._follow(session, path)

    def snapshots(self, session: Session, inside: int | None) -> list[Snapshot]:
        """As ``Session.snapshots``."""
        seq, ids, cache = session.seq, session.computed(), self._cache
        size, pieces = int(ids.size), list[Snapshot]()
        if not self._tree.divisible:
            self.keep(session)
            for node in self._tree.along(self._tree.walk(ids))[1]:
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
        """What the next snapshot of a session follows stays where it is, as long as the session does."""
        session.following.close()
        before = (node for node in reversed(path.nodes) if node.end <= session.kept)
        session.point = next((node for node in before if node.parent is not None), None)
        if self._tree.divisible or session.point is None:
            return
        if session.point.end == session.kept:
            session.following.enter_context(self._tree.in_use([session.point]))

    def _insert(self, session: Session, path: Path, pieces: Sequence[Snapshot]) -> None:
        """Keep what a session holds of a path, for as long as it asks for."""
        known = path.length
        self._tree.insert(session.seq, path, pieces)
        self._evictor.retainer.retain(path, known, session.retention)

    def _pieces(self, session: Session, path: Path) -> list[Snapshot]:
        """Snapshots of what is whole, which follow one another from what is kept of the session on."""
        if self._tree.divisible:
            return []
        size, begin = int(path.tokens.size), session.kept
        taken = [piece for piece in self._cache.take_snapshots(session.seq) if piece.end <= size]
        if begin and self._tree.along(path)[0] < begin:  # what they would follow was evicted since
            taken, begin = [piece for piece in taken if not piece.begin], 0
        begin = taken[-1].end if taken else begin
        if begin < size:
            with contextlib.suppress(NotSupportedError):  # a window or a state that was rolled back is gone
                taken.append(self._cache.snapshot(session.seq, begin, size))
        return taken

    def _note_skipped(self, seq: int, size: int) -> None:
        """Count what could not be taken of the first ``size`` tokens, and say so the first time.

        Behind them the sequence was cut, as by a context shift, and nothing is kept.
        """
        skipped = [end for end in self._cache.skipped_snapshots(seq) if end <= size]
        if skipped and not self._stats.skipped:
            log.warning(
                "a batch of sequence %d passed %s, where snapshots were due: a recurrent state is that of a "
                "batch's end, unless the model delivers those inside. Prompts that part at these positions "
                "go on from earlier ones; end batches where session.chunks() and prefix.next_snapshot() say. "
                "prefix.stats.skipped counts all such snapshots",
                seq,
                skipped,
            )
        self._stats.skipped += len(skipped)

    def end(self, session: Session, keep: bool, upto: int | None) -> None:
        """Free the sequence; with ``keep`` what it holds of the first ``upto`` tokens stays for others."""
        seq, ids = session.seq, None
        with self._evictor.within_budgets():
            try:
                if keep and not session.stale:
                    evaluated = session.shared()
                    self._note_skipped(seq, int(evaluated.size))
                    ids = evaluated[:upto] if upto is None else evaluated[: upto - upto % self.block]
                    path = self._tree.walk(ids, session.above(int(ids.size)))
                    self._insert(session, path, self._pieces(session, path))
            except SequenceLostError:
                pass  # there is nothing to keep
            finally:
                session.following.close()
                del self.sessions[seq]
                self.free.append(seq)  # emptied now, or when it is used next
                self._cache.cancel_snapshots(seq)
                self._cache.remove(seq, 0)
                if not self.sessions:
                    self._lookup.unlearn()
        self._tree.settle()
        if self._write_through and ids is not None:
            self._tree.write_on(ids)

    def clear(self) -> None:
        """Forget all that is kept. What open sessions hold by now is theirs, and nobody else's any more."""
        self._tree.clear()
        self._evictor.gap = 0.0
        for session in self.sessions.values():
            session.stale = True

    def rewind(self, session: Session, ids: np.ndarray, trusted: int) -> int:
        """Make the sequence hold ``ids``, or what it can go on from; returns where.

        Up to ``trusted`` it holds them. A snapshot that reaches further than the cache itself is restored.
        """
        seq = session.seq
        point = self._cache.resume_point(seq, min(trusted, self.computed(seq)))
        if not self._tree.divisible and point < ids.size:
            self.keep(session)
            path = self._tree.walk(ids)
            length, nodes = self._tree.along(path)
            if length > point:
                try:
                    reached = self._restore_nearest(seq, path, Source(length, nodes=nodes))
                except BaseException:  # it holds neither what it did nor what is asked for
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

    def _restore_nearest(self, seq: int, path: Path, source: Source) -> int:
        """Restore along nodes; where one fails, along those that are left. Returns how far that went."""
        self._cache.cancel_snapshots(seq)
        with self._evictor.within_budgets():
            try:
                while not self.matcher.from_source(seq, path.tokens, source):
                    path = self._tree.walk(path.tokens)
                    length, nodes = self._tree.along(path)
                    source = Source(length, nodes=nodes)
            except CacheFullError:  # others hold the cells: there is nothing left to go on from
                self._cache.remove(seq, 0)
                source = Source()
            self._tree.touch(path, source.length)
            self._schedule(seq, path.tokens, source.length, path.length)
        return source.length

    def rolled_back(self, seq: int) -> int | None:
        """The lowest position that was taken out of the cache since the last call."""
        return self._cache.rolled_back(seq)


def thinned(pieces: Sequence[Snapshot], inside: int | None) -> list[list[Snapshot]]:
    """Snapshots that follow one another, by those that are to be joined, whose last one alone counts.

    The windows and states of all but the last one have at most ``inside`` bytes then.
    """
    whole = [sum(part.nbytes for part in unwrapped_snapshot(one) if not part.divisible) for one in pieces]
    limit = sum(piece.nbytes for piece in pieces) - sum(whole[:-1]) if inside is None else inside
    stay, nbytes = [*range(len(pieces))], sum(whole[:-1])
    while nbytes > limit:

        def between(place: int, stay: list[int] = stay) -> int:
            return pieces[stay[place + 1]].end - pieces[stay[place]].begin

        nbytes -= whole[stay.pop(min(range(len(stay) - 1), key=between))]
    starts = [0, *(i + 1 for i in stay[:-1])]
    return [[*pieces[start : i + 1]] for start, i in zip(starts, stay, strict=True)]


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
