"""Branches of a sequence: fork it, keep one branch, drop the others, take tokens back.

A branch is an ordinary sequence that shares its prefix with the sequence it was forked from: nothing is
copied. Speculation and tree search use it like this::

    fork(cache, 0, [1, 2, 3])               # three branches where sequence 0 stands
    ...                                     # evaluate tokens of 1, 2 and 3, in one pass
    rollback(cache, 2, position)            # only the tokens of branch 2 before ``position`` are right
    keep(cache, 2, 0, losers=[1, 3])        # sequence 0 is what branch 2 was; 1, 2 and 3 are empty

Each call does all or nothing, in all caches that a WrapperCache wraps. It is either exact or refused: the
sequence continues as if it had never had the removed tokens, with the same cells, checkpoints and slots.
Which positions can be exact depends on the cache::

    causal, chunked   any position right behind a stored token
    sliding window    ``memory - window`` tokens back (see window_memory), or what one pass has just added
    states            to a checkpoint, to the ``mark`` that was taken before, or to what ``want_states``
                      had the model deliver inside the last pass
    encoder           any position behind the token that its last item came with

Every call ends the current pass and invalidates the views that ``get`` returned, and a sequence that is
overwritten loses its scheduled snapshots: the work is done by ``copy_prefix`` and ``remove``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvcache.cache import (
    Cache,
    InvalidRangeError,
    NotSupportedError,
    SupportsRollback,
    check_whole,
)
from kvcache.caches.base import PreparedCalls
from kvcache.caches.one_thread import one_thread
from kvcache.caches.windows import SlidingWindowCache
from kvcache.caches.wrapper import unwrapped
from kvcache.snapshots.snapshot import Snapshot
from ml import nn

__all__ = [
    "Mark", "check_reach", "drop", "fork", "keep", "mark", "offset", "resume_point", "rollback",
    "want_states", "window_memory",
]  # fmt: skip

A = ParamSpec("A")
R = TypeVar("R")
Commit = Callable[[], None]
_ALL = sys.maxsize
"""A length beyond the end of any sequence."""


def _between_passes(call: Callable[Concatenate[Cache, A], R]) -> Callable[Concatenate[Cache, A], R]:
    """A call that is refused during another thread's call or pass, if the cache can tell."""
    checked: Any = one_thread(call)  # type: ignore[type-var]

    def guarded(cache: Cache, /, *args: A.args, **options: A.kwargs) -> R:
        result: R = (checked if isinstance(cache, PreparedCalls) else call)(cache, *args, **options)
        return result

    functools.update_wrapper(guarded, call)
    return guarded


@dataclass(frozen=True, slots=True)
class Mark:
    """The position of sequence ``seq``, and what it takes to return there: a snapshot of each recurrent
    state.

    Valid as long as the sequence begins with the same ``position`` tokens. ``states`` has an element for each
    cache of a wrapper, None for a cache that needs no copy.
    """

    seq: int
    position: int
    states: tuple[Snapshot | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the copied states, which ``cache.nbytes`` does not count."""
        return sum(state.nbytes for state in self.states if state is not None)


@_between_passes
def fork(cache: Cache, seq: int, into: Sequence[int], position: int | None = None) -> None:
    """Make every sequence of ``into`` a branch of ``seq`` at ``position``; None: at its end.

    Their previous content is removed; ``seq`` is unchanged. They share its cells, and no data is copied.

    Raises NotSupportedError if a branch could not continue exactly at ``position``, InvalidRangeError for a
    position past the end, or if ``into`` contains ``seq`` or a sequence twice.
    """
    into = _listed("fork", "into", into)
    if seq in into or len(set(into)) < len(into):
        raise InvalidRangeError(
            f"fork: sequence {seq} into {into}; the targets must be distinct and differ from the source"
        )
    end = _end("fork", cache, seq) if position is None else position
    end = check_whole("fork", "position", end)
    commits = [_prepare(cache, "copy_prefix", seq, branch, end) for branch in into]
    if position is not None or end != _ALL:
        _check_exact("fork", cache, seq, end)
    _commit(commits)


@_between_passes
def keep(cache: Cache, winner: int, seq: int, losers: Iterable[int] = ()) -> None:
    """Move the content of ``winner`` to ``seq``, and empty ``winner`` and ``losers``.

    ``losers`` may also contain ``seq`` and ``winner``, so that all branches can be listed. If ``winner`` is
    ``seq``, the others are emptied. No data is copied.
    """
    cache.can_resume(seq, 0)  # refuses an unknown sequence
    commits = []
    if winner != seq:
        commits.append(_prepare(cache, "copy_prefix", winner, seq, _ALL))
        _check_exact("keep", cache, winner, offset(cache, winner))
    others = dict.fromkeys((winner, *_listed("keep", "losers", losers)))
    commits += [_prepare(cache, "remove", other, 0) for other in others if other != seq]
    _commit(commits)


@_between_passes
def drop(cache: Cache, branches: Iterable[int]) -> None:
    """Empty all of ``branches``; other sequences keep the cells that they share with them."""
    dropped = dict.fromkeys(_listed("drop", "branches", branches))
    _commit([_prepare(cache, "remove", branch, 0) for branch in dropped])


@_between_passes
def mark(cache: Cache, seq: int) -> Mark:
    """Record the position of a sequence before adding tokens that may be taken back.

    Costs a copy of the state in a recurrent cache, and nothing in other caches. It is not a checkpoint: the
    copy belongs to the caller, and lives as long as the mark.
    """
    parts = unwrapped(cache)
    position = _end("mark", cache, seq)
    _prepare(cache, "remove", seq, position)  # refuses a sequence that a device failure took
    _check_exact("mark", cache, seq, position)
    states = [p.snapshot(seq, position, position) if _has_states(p) else None for p in parts]
    for state in states:
        if state is not None:
            state.detach()
    return Mark(seq, position, tuple(states))


def want_states(cache: Cache, seq: int, positions: Sequence[int]) -> bool:
    """Make the next pass of ``seq`` keep its states at ``positions`` inside the pass, for ``rollback``.

    Returns whether all caches can go back to these positions without a ``mark``: caches without states can,
    and recurrent caches whose models deliver states (``StateCache(delivers=True)``).
    """
    caches = [part for part in unwrapped(cache) if _has_states(part)]
    for states in caches:
        states.want_states(seq, positions)
    return all(states.delivers for states in caches)


@_between_passes
def rollback(cache: Cache, seq: int, position: int, to: Mark | None = None) -> None:
    """Take back the tokens of ``seq`` from ``position`` on, so that it continues exactly there.

    A recurrent cache needs a checkpoint at ``position``, or ``to``, a mark of this sequence at ``position``;
    ``resume_point`` returns the nearest position that is possible. Raises NotSupportedError if the result
    would not be exact, InvalidRangeError for a position past the end; nothing is changed then.
    """
    _check_mark("rollback", cache, seq, to)
    position = check_whole("rollback", "position", position)
    marked = to if to is not None and to.position == position else None
    if marked is None:
        commits = [_prepare(cache, "remove", seq, position)]
    else:  # whatever may still refuse goes first
        parts = sorted(enumerate(unwrapped(cache)), key=lambda pair: nn.offers(pair[1], SupportsRollback))
        commits = [_return(part, marked, i) for i, part in parts]
    _check_exact("rollback", cache, seq, position, marked)
    _commit(commits)


def resume_point(cache: Cache, seq: int, position: int, to: Mark | None = None) -> int:
    """The last position up to ``position`` that ``rollback`` with ``to`` can go to; 0: only to the empty
    sequence.
    """
    _check_mark("resume_point", cache, seq, to)
    position = check_whole("resume_point", "position", position)
    parts = unwrapped(cache)
    while position > 0:
        lower = min(_reached(part, seq, position, to, i) for i, part in enumerate(parts))
        if lower == position:
            break
        position = lower
    return max(0, position)


def offset(cache: Cache, seq: int) -> int:
    """The position of the next token of a sequence, according to the caches that know; 0 if none does."""
    return max(_offsets(cache, seq), default=0)


def window_memory(window: int, tokens: int) -> int:
    """The ``memory`` that a SlidingWindowCache needs so that its last ``tokens`` tokens can be taken back.

    This holds whatever passes came between, whether they added those tokens one by one or belong to other
    sequences. Tokens that the last pass added can be taken back with ``memory=window``. A window of 0 needs
    the memory of a window of 1: one token must remain to mark the sequence's position.
    """
    if window < 0 or tokens < 0:
        raise InvalidRangeError(f"window_memory: window={window}, tokens={tokens}; both must be at least 0")
    return max(window, 1) + tokens


def check_reach(cache: Cache, tokens: int) -> None:
    """Refuse, before anything is stored, a cache that could not take back ``tokens`` tokens.

    Raises NotSupportedError, which names the memory that a window needs. Call it after ``init``.
    """
    for part in unwrapped(cache):
        reach = part.reach if isinstance(part, SlidingWindowCache) else None
        if reach is not None and reach < tokens:
            raise NotSupportedError(
                f"check_reach: {_name(part)} can take back {reach} tokens, and {tokens} are asked for; "
                f"make it with memory={window_memory(part.window, tokens)} or more (window_memory)"
            )


# Parts.


def _listed(op: str, name: str, sequences: Iterable[int]) -> list[int]:
    if not isinstance(sequences, Iterable):
        raise InvalidRangeError(
            f"{op}: {name}={sequences!r:.60}; it must be a list of sequences, such as [1]"
        )
    return [*sequences]


def _has_states(part: Any) -> bool:
    """Whether a cache keeps recurrent states, as a StateCache does."""
    return hasattr(part, "want_states")


def _offsets(cache: Cache, seq: int) -> list[int]:
    """The position of the next token of a sequence, according to each cache that knows."""
    return [part.offset(seq) for part in unwrapped(cache) if hasattr(part, "offset")]


def _end(op: str, cache: Cache, seq: int) -> int:
    """The end of a sequence, or a length beyond any end if no cache knows it."""
    cache.can_resume(seq, 0)  # refuses an unknown sequence
    if known := _offsets(cache, seq):
        return max(known)
    if op == "fork":
        return _ALL
    raise NotSupportedError(f"{op}: {_name(cache)} has no offset")


def _reached(part: Any, seq: int, position: int, to: Mark | None, i: int) -> int:
    """The last position up to ``position`` from which one cache can continue exactly."""
    if hasattr(part, "resume_point"):
        reached: int = part.resume_point(seq, position)
    else:
        reached = position if part.can_resume(seq, position) else 0
    if to is not None and to.states[i] is not None and to.position <= position:
        return max(reached, to.position)
    return reached


def _check_exact(op: str, cache: Cache, seq: int, position: int, to: Mark | None = None) -> None:
    if position == 0:
        cache.can_resume(seq, 0)  # refuses an unknown sequence
        return
    known = _offsets(cache, seq)
    if known and position > max(known):
        raise InvalidRangeError(f"{op}: position {position} of sequence {seq}, which is at {max(known)}")
    for i, part in enumerate(unwrapped(cache)):
        reached = _reached(part, seq, position, to, i)
        if reached != position:
            raise NotSupportedError(
                f"{op}: sequence {seq} cannot continue exactly at {position}, as {_name(part)} can at "
                f"{reached} "
                f"and not between; {_remedy(part)}"
            )


def _remedy(part: Any) -> str:
    if isinstance(part, SlidingWindowCache):
        return "keep more of the past with memory= (window_memory says how much)"
    if _has_states(part):
        return "take a mark (or a checkpoint) there before continuing, or evaluate the tokens between again"
    return "remove the sequence and evaluate it again"


def _name(part: Any) -> str:
    if isinstance(part, SlidingWindowCache):
        return f"{type(part).__name__}(window={part.window}, memory={part.memory})"
    return type(part).__name__


def _check_mark(op: str, cache: Cache, seq: int, to: Mark | None) -> None:
    if to is not None and (to.seq != seq or len(to.states) != len(unwrapped(cache))):
        raise InvalidRangeError(
            f"{op}: a mark of sequence {to.seq} in {len(to.states)} caches, for sequence {seq} in "
            f"{len(unwrapped(cache))}"
        )


# Doing all or nothing.


def _prepare(cache: Cache, op: str, *arguments: int) -> Commit:
    """Check in advance if the cache supports it; otherwise the check is made with the call."""
    if nn.offers(cache, SupportsRollback):
        commit: Commit = getattr(cache, f"prepare_{op}")(*arguments)
        return commit
    return functools.partial(getattr(cache, op), *arguments)


def _return(part: Any, to: Mark, i: int) -> Commit:
    state = to.states[i]
    if state is None:
        return _prepare(part, "remove", to.seq, to.position)
    commit: Commit | None = part.prepare_restore_snapshot(to.seq, state)
    if commit is None:
        raise InvalidRangeError(
            f"rollback: a mark at {to.position} of sequence {to.seq}, which is at {part.offset(to.seq)}"
        )
    return commit


def _commit(commits: Iterable[Commit]) -> None:
    for commit in commits:
        commit()
