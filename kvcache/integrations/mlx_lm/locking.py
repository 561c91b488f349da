"""Threads that use one pool wait for each other: for a whole pass, or for a call between passes. A pass is
one call of the pool's model. Its lazy result is computed outside of the lock: the pool's own work runs on a
stream that any thread may use, and its inputs from the model's stream are scheduled when the call ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import Condition, RLock, get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["PoolLock", "waiting"]

P = ParamSpec("P")
R = TypeVar("R")


class PoolLock:
    """A reentrant lock; ``cache`` may be used by the thread that holds it."""

    def __init__(self, cache: Any) -> None:
        self.inner = RLock()
        self._freed = Condition(self.inner)
        self._cache, self._thread = cache, get_ident()

    def __enter__(self) -> None:
        self.inner.acquire()
        self._go_on_here()

    def __exit__(self, *error: object) -> None:
        self.inner.release()

    def wait(self, timeout: float) -> None:
        """Release the lock until another thread calls ``tell``, for at most ``seconds``."""
        self._freed.wait(timeout)
        self._go_on_here()

    def tell(self) -> None:
        """Wake all threads in ``wait``, once the lock is free."""
        self._freed.notify_all()

    def _go_on_here(self) -> None:
        if self._thread != get_ident():
            self._thread = get_ident()
            self._cache.take_over()


def waiting(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A decorator for methods of entries: the call holds the pool's lock."""

    @functools.wraps(method)
    def call(entry: Any, /, *arguments: P.args, **named: P.kwargs) -> R:
        with entry.rows.pool.lock:
            return method(entry, *arguments, **named)

    return call
