"""One pass, one thread: which thread's calls a cache accepts, and what it tells the others.

A pass belongs to the thread that began it. Calls in it from another thread raise OrderError, and so do
another thread's changes of sequences while layers are still to be put or read; once the last layer has been
read, the pass is over and any thread may continue. Any thread may call ``start_forward`` at any time: this
ends another thread's pass, which finds out at its next call. Calls that plan or change something run one at a
time: one that arrives while another thread is in one raises OrderError instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvcache.cache import OrderError

__all__ = ["PassOfThread", "alone", "busy", "elsewhere", "is_foreign", "joined", "one_call", "one_thread"]

R = TypeVar("R")
A = ParamSpec("A")


class PassOfThread(Protocol):
    """The part of a pass that concerns threads."""

    thread: int
    """``threading.get_ident()`` of the thread that the pass belongs to."""


class _Cache(Protocol):
    @property
    def _calls(self) -> Any:
        """A reentrant lock, held by the thread that is planning or making a change."""

    def foreign_pass(self) -> bool | None:
        """See PreparedCalls."""


C = TypeVar("C", bound=_Cache)


def is_foreign(current: PassOfThread | None) -> bool:
    """Whether a pass belongs to another thread that is still alive."""
    if current is None or current.thread == get_ident():
        return False
    return any(thread.ident == current.thread for thread in threading.enumerate())


def joined(foreign: Iterable[bool | None]) -> bool | None:
    """``foreign_pass`` of several caches that share one pass; caches that the pass leaves out do not
    count.
    """
    answers = set(foreign)
    if True in answers:
        return True
    return None if answers == {None} else False


def elsewhere(op: str) -> OrderError:
    """The error for a change of a sequence during another thread's pass."""
    return OrderError(
        f"{op}: a pass of another thread is under way, with layers still to be put and read; let it finish, "
        "or begin a pass in this thread with start_forward, which ends that one"
    )


def busy(op: str) -> OrderError:
    """The error for a call during another thread's call."""
    return OrderError(
        f"{op}: another thread is in a call of this cache; one thread at a time may use it: share a lock"
    )


@contextlib.contextmanager
def alone(op: str, caches: Iterable[Any]) -> Iterator[None]:
    """A context in which no other thread is in a call of these caches; OrderError if one is."""
    with contextlib.ExitStack() as held:
        for calls in (cache._calls for cache in caches if hasattr(cache, "_calls")):  # others see to it
            if not calls.acquire(False):
                raise busy(op)
            held.callback(calls.release)
        yield


def one_call(call: Callable[Concatenate[C, A], R]) -> Callable[Concatenate[C, A], R]:
    """Decorates a cache's call that plans or changes something: OrderError while another thread is in one."""
    op = call.__name__.strip("_")

    @functools.wraps(call)
    def one(self: C, /, *args: A.args, **options: A.kwargs) -> R:
        if not self._calls.acquire(False):
            raise busy(op)
        try:
            return call(self, *args, **options)
        finally:
            self._calls.release()

    return one


def one_thread(call: Callable[Concatenate[C, A], R]) -> Callable[Concatenate[C, A], R]:
    """Decorates a cache's call that changes sequences between passes.

    It raises OrderError while another thread is in such a call, or in the middle of a pass.
    """
    op = call.__name__.strip("_")

    @functools.wraps(call)
    def between_passes(self: C, /, *args: A.args, **options: A.kwargs) -> R:
        if self.foreign_pass() is not False:
            raise elsewhere(op)
        return call(self, *args, **options)

    return one_call(between_passes)
