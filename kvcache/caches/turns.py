"""A lock for those who let several threads call them: one after another, in the order in which they came."""

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
    """A lock that a thread may take again while it holds it. Who waits longest is next.

    ``threading.RLock`` goes to any thread that asks: one that takes it in a loop keeps it from the others.
    ``begin`` is called when another thread than the last one has taken it.
    """

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._state = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        """One for each thread that waits, which is released to let it go on."""
        self._held = False
        self._last, self._depth = get_ident(), 0

    def __enter__(self) -> Self:
        me = get_ident()
        with self._state:
            if self._held and self._last == me and self._depth:
                self._depth += 1
                return self
            turn = None if not self._held else threading.Lock()
            self._held = True
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
        except BaseException:  # an interruption; the turn may have come meanwhile
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
                self._held = False

    def __exit__(self, *_: object) -> None:
        if self._depth > 1:
            self._depth -= 1
        else:
            self._next()


class _TakesTurns(Protocol):
    @property
    def lock(self) -> Turns:
        """Held by the thread whose call is made."""


S = TypeVar("S", bound=_TakesTurns)


def in_turn(call: Callable[Concatenate[S, A], R]) -> Callable[Concatenate[S, A], R]:
    """A method that waits for the calls of other threads on the same object, by its ``lock``."""

    def waiting(self: S, /, *args: A.args, **options: A.kwargs) -> R:
        with self.lock:
            return call(self, *args, **options)

    functools.update_wrapper(waiting, call)
    return waiting
