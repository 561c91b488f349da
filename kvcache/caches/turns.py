"""A lock for objects that several threads call: it admits them in the order in which they arrived."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

__all__ = ["Turns", "in_turn"]

A = ParamSpec("A")
R = TypeVar("R")


class Turns:
    """A reentrant lock that admits waiting threads in the order in which they arrived.

    ``threading.RLock`` is not fair: a thread that takes it in a loop can starve the others. ``begin`` is
    called whenever a thread other than the last holder has acquired the lock.

    >>> from kvcache import Turns
    >>> turns = Turns()
    >>> with turns, turns:                           # reentrant, and first come first served
    ...     print("alone")
    alone
    """

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._state = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """One lock for each waiting thread; releasing it lets the thread continue."""
        self._locked = False
        self._last, self._depth = get_ident(), 0

    def __enter__(self) -> Self:
        me = get_ident()
        with self._state:
            if self._locked and self._last == me and self._depth:
                self._depth += 1
                return self
            turn = None if not self._locked else threading.Lock()
            self._locked = True
            if turn is not None:
                turn.acquire()
                self._waiting.append(turn)
        if turn is not None:
            self._wait(turn)
        try:
            if self._last != me:
                self._begin()
        except BaseException:
            self._next()
            raise
        self._last, self._depth = me, 1
        return self

    def _wait(self, turn: threading.Lock) -> None:
        try:
            turn.acquire()
        except BaseException:  # interrupted; the turn may have come in the meantime
            with self._state:
                waits = turn in self._waiting
                if waits:
                    self._waiting.remove(turn)
            if not waits:
                self._next()
            raise

    def _next(self) -> None:
        with self._state:
            self._depth = 0
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._locked = False

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
        else:
            self._next()


class _TakesTurns(Protocol):
    @property
    def lock(self) -> Turns:
        """Held by the thread whose call is running."""


S = TypeVar("S", bound=_TakesTurns)


def in_turn(call: Callable[Concatenate[S, A], R]) -> Callable[Concatenate[S, A], R]:
    """Decorates a method: it waits for other threads' calls on the same object, using the object's
    ``lock``.
    """

    def waiting(self: S, /, *args: A.args, **options: A.kwargs) -> R:
        with self.lock:
            return call(self, *args, **options)

    functools.update_wrapper(waiting, call)
    return waiting
