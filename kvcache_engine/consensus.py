"""Agreement between ranks that share a model about what all of them can do.

Ranks may have kept different snapshots: a store lost an entry, a budget was used up a moment earlier, a
thread had not finished. Ranks therefore agree wherever this decides what is computed next: whether a request
waits for another, how much of a prompt is reused, and whether there is room for a pass. All ranks ask in the
same order, since everything else is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache import PrefixCache, Session
from kvcache.cache import CacheFullError, SequenceLostError
from kvcache_engine.parallel import FAILED, NO_ROOM, Share, failed_elsewhere, of_all

__all__ = ["Agreement"]


@dataclass(slots=True)
class Telling:
    """How the other ranks are notified of an error here; None: they are notified elsewhere."""

    how: Callable[[BaseException], None] | None


class Agreement:
    """Agreement between the ranks of ``model``; with a single rank, nothing is exchanged."""

    def __init__(self, model: Any) -> None:
        share: Share | None = getattr(model, "share", None)
        self._group = share.group if share is not None and share.group.size > 1 else None
        self._backend: ml.Backend = model.backend

    @property
    def alone(self) -> bool:
        return self._group is None

    def least(self, values: Sequence[int]) -> list[int]:
        """For each value, the minimum over all ranks."""
        if self._group is None or not values:
            return list(values)
        least_values: list[int] = np.reshape(self._of_all(*values), (-1, len(values))).min(0).tolist()
        return least_values

    def begin(self, prefix: PrefixCache, tokens: Sequence[int], **whose: Any) -> Session:
        """Begin a session at the same position on all ranks: tokens that one of them lacks are reused by
        none. ``whose``: the keyword arguments of ``PrefixCache.begin``.

        Raises what ``prefix.begin`` raised on this rank; if another rank failed, CacheFullError or
        GroupError. No session has begun on any rank then.
        """
        if self._group is None:
            return prefix.begin(tokens, **whose)
        session: Session | None = None
        error: Exception | None = None
        try:
            try:
                session = prefix.begin(tokens, **whose)
            except Exception as found:
                error = found
            while True:
                own = _outcome(session, error)
                cached = self._of_all(own)
                if min(cached) < 0:
                    if error is None or min(cached) < own:
                        raise failed_elsewhere("begin", cached) from error
                    raise error
                if min(cached) == max(cached):
                    assert session is not None
                    return session
                error = error or _shorten(session, tokens, min(cached))
        except BaseException:
            if session is not None:
                session.close(keep=False)
            raise

    def all_fail(self) -> bool:
        """Whether a failure here before a pass has occurred on all ranks.

        Otherwise the other ranks, which are about to check the pass, raise GroupError.
        """
        return self._group is None or set(self._of_all(FAILED)) == {FAILED}

    def refuse(self, error: BaseException) -> None:
        """Notify the other ranks, which are about to check the pass, that it is not computed here.

        Raises GroupError if it fails for another reason on another rank. An interruption ends the group
        without waiting, and so does a lost sequence, which the other ranks still have.
        """
        if self._group is None:
            return
        if not isinstance(error, Exception) or isinstance(error, SequenceLostError):
            self.abandon(error)
            return
        own = NO_ROOM if isinstance(error, CacheFullError) else FAILED
        if min(values := self._of_all(own)) < own:
            raise failed_elsewhere("forward", values) from error

    def abandon(self, error: BaseException) -> None:
        """End the group: the other ranks continue with the call that failed here."""
        if self._group is not None:
            self._group.abandon("step", error)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A step that all ranks make: an interruption in it (Ctrl-C) ends the group."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.abandon(error)
            raise

    @contextmanager
    def telling(self) -> Iterator[Telling]:
        """A context for a pass: on an error, the other ranks, which are about to check the pass, are notified
        by ``how``.
        """
        telling = Telling(self.refuse)
        try:
            yield telling
        except BaseException as error:
            if telling.how is not None:
                telling.how(error)
            raise

    def _of_all(self, *values: int) -> list[int]:
        """The values of all ranks, in rank order. If this fails here, the other ranks do not wait."""
        assert self._group is not None
        try:
            with self._backend.new_context() as ctx:
                return of_all(ctx, self._group, *values)
        except BaseException as error:
            self.abandon(error)
            raise


def _outcome(session: Session | None, error: Exception | None) -> int:
    if error is not None or session is None:
        return NO_ROOM if isinstance(error, CacheFullError) else FAILED
    return session.cached


def _shorten(session: Session | None, tokens: Sequence[int], length: int) -> Exception | None:
    """Make a session continue from ``length`` at most; returns the error if that is not possible."""
    assert session is not None
    if session.cached > length:
        try:
            session.rewind(length)
            session.extend(tokens[length:])
        except Exception as error:
            return error
    return None
