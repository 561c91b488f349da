"""One conversation in a cache: its tokens, what is evaluated of them, and what is sure of that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvcache.cache import ClosedError, InvalidRangeError, KVCacheError, check_whole
from kvcache.caches.one_thread import one_thread
from kvcache.prefix.alphabet import EVERYONE, Alphabet, Tenant
from kvcache.prefix.radix_tree import Node
from kvcache.prefix.retention import Retention
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.snapshots.schedule import REPLACED

__all__ = ["Lookup", "PrefixStats", "Session", "SessionLimitError", "SessionReplacedError", "Tokens"]

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
        told = ", ".join(f"{name}: {count}" for name, count in parts.items() if count)
        rest = {name: getattr(self, name) for name in ("skipped", "spared")}
        more = "".join(f"; {name}: {count}" for name, count in rest.items() if count)
        reused = f"reused: {self.reused}{f' ({told})' if told else ''}"
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
        self, owner: Any, seq: int, tokens: np.ndarray, cached: int, tenant: Tenant = EVERYONE
    ) -> None:
        """``owner``: the OpenSessions that share the cache with it."""
        self._owner = owner
        self._calls = owner.calls
        self._alphabet: Alphabet = owner.alphabet
        self.tenant = tenant
        self.seq = seq
        self.cached = cached
        self._tokens = tokens
        self._more: list[int | bytes] = []
        self._prompt = int(tokens.size)
        self.kept = cached
        """Up to here others have it too: what was shared at first, and what ``keep`` left."""
        self.following = contextlib.ExitStack()
        """Keeps what its next snapshot follows where it is."""
        self.point: Node[TreeEntry] | None = None
        """The node of what its next snapshot follows."""
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
            stop = min(at + size, self._prompt)
            due = self._owner.next_snapshot(self.seq)
            if due is not None and at < due < stop:
                stop = due
            yield self._alphabet.decode(self._tokens[at:stop])
            at = stop
        self._evaluated()

    def foreign_pass(self) -> bool | None:
        """As PrefixCache.foreign_pass."""
        found: bool | None = self._owner.foreign_pass()
        return found

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
        held: int = self._owner.computed(self.seq)
        return held if self.complete is None else min(held, self.complete())

    def undo(self, take_back: Callable[[], object]) -> None:
        """Have a runtime take back a pass that failed, whose tokens it may evaluate again and keep."""
        self._notice()
        take_back()
        self._owner.rolled_back(self.seq)
        held = self._held()
        self._sure, self.kept = min(self._sure, held), min(self.kept, held)

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
