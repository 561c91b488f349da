"""One pass, one thread: whose calls a cache takes, and what it tells the others.

A pass belongs to the thread that began it. Another thread's call in it raises OrderError. So does another
thread's change of a sequence while layers are still to be put or read: behind that the pass is over, and any
thread may go on. ``start_forward`` may come from any thread at any time: it ends the pass of another one,
which notices at its next call. Calls that plan or change something are made one at a time: one that comes
while another thread is in one raises OrderError, and nobody waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvcache.cache import OrderError

__all__ = ["PassOfThread", "busy", "elsewhere", "is_foreign", "joined", "one_call", "one_thread"]

R = TypeVar("R")
A = ParamSpec("A")


class PassOfThread(Protocol):
    """A pass, as far as threads go."""

    thread: int
    """``threading.get_ident()`` of the thread whose calls it takes."""


class _Cache(Protocol):
    @property
    def _calls(self) -> Any:
        """A lock that a thread may take again: held by the thread that plans or changes something."""

    def foreign_pass(self) -> bool | None:
        """See PreparedCalls."""


C = TypeVar("C", bound=_Cache)


def is_foreign(current: PassOfThread | None) -> bool:
    """Whether a pass is another thread's, which has not ended."""
    if current is None or current.thread == get_ident():
        return False
    return any(thread.ident == current.thread for thread in threading.enumerate())


def joined(foreign: Iterable[bool | None]) -> bool | None:
    """``foreign_pass`` of several caches whose passes are one: those that it leaves out do not count."""
    answers = set(foreign)
    if True in answers:
        return True
    return None if answers == {None} else False


def elsewhere(op: str) -> OrderError:
    """What a change of a sequence says while another thread's pass is under way."""
    return OrderError(
        f"{op}: a pass of another thread is under way, with layers still to be put and read; let it finish, "
        "or begin a pass in this thread with start_forward, which ends that one"
    )


def busy(op: str) -> OrderError:
    """What a call says while another thread is in one."""
    return OrderError(
        f"{op}: another thread is in a call of this cache; one thread at a time may use it: share a lock"
    )


def one_call(call: Callable[Concatenate[C, A], R]) -> Callable[Concatenate[C, A], R]:
    """A call of a cache that plans or changes something; OrderError while another thread is in one."""
    op = call.__name__.strip("_")

    @functools.wraps(call)
    def alone(self: C, /, *args: A.args, **options: A.kwargs) -> R:
        if not self._calls.acquire(False):
            raise busy(op)
        try:
            return call(self, *args, **options)
        finally:
            self._calls.release()

    return alone


def one_thread(call: Callable[Concatenate[C, A], R]) -> Callable[Concatenate[C, A], R]:
    """A call of a cache that changes what sequences hold, between passes.

    OrderError while another thread is in such a call, or in the middle of a pass.
    """
    op = call.__name__.strip("_")

    @functools.wraps(call)
    def between_passes(self: C, /, *args: A.args, **options: A.kwargs) -> R:
        if self.foreign_pass() is not False:
            raise elsewhere(op)
        return call(self, *args, **options)

    return one_call(between_passes)
