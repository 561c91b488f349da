"""Runs the engine in a thread, and passes its events to asyncio.

Everything that uses the model and the cache happens in that thread. Coroutines submit calls through a queue,
which the thread executes between two steps. Events are returned through the caller's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar

from kvcache import Lookup, Retention
from kvcache_engine.engine import Engine, EngineEvent, Failed, Request
from kvcache_engine.requests import Finished, GenerationOptions
from kvcache_engine.serve.options import ServeOptions

__all__ = ["Inbox", "Overloaded", "Stopped", "Ticket", "Worker", "has_stores"]

log = logging.getLogger("kvcache_engine.serve")

PART = 64 << 20
"""About how many bytes are submitted to the stores between two passes."""
BETWEEN_PARTS = 0.05
"""The fewest seconds until the next ones."""


class Overloaded(Exception):  # noqa: N818
    """The queue is full; there may be room in ``seconds``."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds


class Stopped(RuntimeError):  # noqa: N818
    """The engine has stopped, or is about to."""


Inbox = asyncio.Queue[tuple[int, EngineEvent]]
"""The events of the answers to one call, each with its number."""
R = TypeVar("R")
_Call = tuple[Callable[[Engine], Any], Future[Any]]


class Ticket:
    """One answer of a call: its events go to the call's inbox; ``cancel`` ends it."""

    def __init__(self, worker: Worker, inbox: Inbox, choice: int) -> None:
        self._worker, self._inbox, self._choice = worker, inbox, choice
        self.asked = self.last = time.monotonic()
        """The times of its submission and of its last token."""
        self.first: float | None = None
        """The time of its first token."""
        self._loop = asyncio.get_running_loop()
        self.request: Request | None = None
        self.outcome: Finished | Failed | None = None
        """How it ended; None while it runs, and if it was cancelled."""

    @property
    def lookup(self) -> Lookup | None:
        """The lookup of its request's prefix; None while it waits."""
        return None if self.request is None else self.request.lookup

    def cancel(self, why: str) -> None:
        """Cancel the answer and its events; no effect after its end. ``why``: the reason under which it is
        counted.
        """
        self._worker.post(lambda engine: self._worker.forget(self, why))

    def deliver(self, event: EngineEvent) -> None:
        """Called in the worker's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, (self._choice, event))


class _Keeper:
    """Offers the stores, every ``interval`` seconds, what they did not accept earlier. It submits a part at a
    time between two passes, without waiting for a store. A store that accepts nothing is tried less and less
    often.
    """

    def __init__(self, engine: Engine, interval: float) -> None:
        self._prefix = engine.prefix
        self._stored = has_stores(engine)
        self._interval = self._pause = interval
        self._due = time.monotonic() + interval
        self._failed = 0

    @property
    def wait(self) -> float | None:
        """Seconds until the next offer; None without stores."""
        left = max(0.0, self._due - time.monotonic())
        return min(threading.TIMEOUT_MAX, left) if self._stored else None

    def keep(self) -> None:
        if not self._stored or time.monotonic() < self._due:
            return
        failed = sum(self._prefix.failed.values())
        try:
            more = self._prefix.write_through(PART)
        except Exception as error:
            log.exception("kept content was not submitted to the stores: %s", error)
            more = False
        if more:
            self._due = time.monotonic() + BETWEEN_PARTS
            return
        self._pause = self._interval if failed == self._failed else min(2 * self._pause, 16 * self._interval)
        self._failed = failed
        self._due = time.monotonic() + self._pause


def has_stores(engine: Engine) -> bool:
    """Whether the engine has stores."""
    return "writing" in engine.prefix.nbytes


class Worker:
    """Runs the engine that ``make`` opens in a thread, within the limits of ``options``. A context manager.

    Content that the engine's stores did not accept when an answer ended is offered again from time to time,
    and at the end.
    """

    def __init__(
        self, make: Callable[[], AbstractContextManager[Engine]], options: ServeOptions | None = None
    ) -> None:
        self._make = make
        self._options = options or ServeOptions()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """Calls to execute in the thread, with their futures; None at the end."""
        self._tickets: dict[int, Ticket] = {}
        self._ends: deque[float] = deque(maxlen=16)
        """The end times of the latest requests."""
        self._ending = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._ready: Future[Engine] = Future()
        self._engine: Engine | None = None
        self._stopped = threading.Event()
        self.idle = threading.Event()
        """Set while no request is running or waiting."""
        self.dropped = {"refused": 0, "timeout": 0, "cancelled": 0}
        """The numbers of requests that were not started or not finished, by reason."""
        self.observers: list[Callable[[Ticket, EngineEvent], None]] = []
        """Called in the worker's thread for each event of a request; they must not raise."""

    def __enter__(self) -> Self:
        """Returns when the model is loaded; raises errors of loading it."""
        self._thread.start()
        self._ready.result()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel running requests, and close the engine."""
        self._calls.put(None)
        self._thread.join()

    @property
    def engine(self) -> Engine:
        """The engine, for constant properties: its limit and tokenizer. Everything else goes through
        ``post``.
        """
        assert self._engine is not None
        return self._engine

    @property
    def room(self) -> int:
        """The most answers that may run and wait at the same time."""
        return self._options.max_waiting + self.engine.options.max_sequences

    def post(self, call: Callable[[Engine], R]) -> Future[R]:
        """Execute a call between two steps; raises Stopped once the engine has stopped."""
        done: Future[R] = Future()
        self._calls.put((call, done))
        if self._stopped.is_set():
            self._refuse_calls()
        return done

    async def submit(
        self,
        tokens: Sequence[int],
        settings: GenerationOptions,
        inbox: Inbox,
        choice: int = 0,
        salt: str = "",
        retention: Retention | None = None,
        answers: int = 1,
        session_id: str = "",
        next_use: float | None = None,
    ) -> Ticket:
        """Submit an answer. Raises RequestError if it cannot be served, Overloaded if it must be retried
        later.

        ``answers``: the number of answers that the request still has to submit, including this one. They are
        dropped with it.
        """
        ticket = Ticket(self, inbox, choice)

        def call(engine: Engine) -> None:
            if self._ending:
                raise Stopped("the server is shutting down")
            if len(engine.waiting) + len(engine.running) >= self.room:
                self.dropped["refused"] += answers
                waiting = self._options.max_waiting
                reason = f"{waiting} requests are waiting" if waiting else "no sequence is free"
                raise Overloaded(f"{reason}; try again later", self._pause())
            ticket.request = engine.submit(
                tokens,
                settings,
                salt=salt,
                retention=retention,
                session_id=session_id,
                next_use=next_use,
            )
            self._tickets[ticket.request.id] = ticket

        pending = asyncio.wrap_future(self.post(call))
        try:
            await asyncio.shield(pending)
        except asyncio.CancelledError:
            # The call is still executed, then undone.
            self.post(lambda engine: self.forget(ticket, "timeout", answers))
            raise
        return ticket

    def end_requests(self) -> None:
        """Cancel running and waiting requests, and accept no more."""

        def call(engine: Engine) -> None:
            self._ending = True
            for event in self._fail(
                engine, (*engine.running, *engine.waiting), Stopped("the server is shutting down")
            ):
                self._dispatch(event)

        self.post(call)

    def forget(self, ticket: Ticket, why: str, answers: int = 1) -> None:
        """End a request and add it to a count; called in the worker's thread."""
        request = ticket.request
        if request is not None and self._tickets.pop(request.id, None) is not None:
            self.dropped[why] += answers * self.engine.cancel(request)

    # The thread.

    def _work(self) -> None:
        try:
            with self._make() as engine:
                self._engine = engine
                self.idle.set()
                self._ready.set_result(engine)
                self._serve(engine)
        except BaseException as error:
            if self._ready.done():
                log.exception("the engine's thread has ended: %s: %s", type(error).__name__, error)
            else:
                self._ready.set_exception(error)
        finally:
            self._stopped.set()
            self._refuse_calls()
            for number in list(self._tickets):
                self._dispatch(Failed(number, Stopped("the engine has stopped")))

    def _refuse_calls(self) -> None:
        """Fail the remaining calls, so that no caller waits for them."""
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None and call[1].set_running_or_notify_cancel():
                    call[1].set_exception(Stopped("the engine has stopped"))

    def _serve(self, engine: Engine) -> None:
        keeper = _Keeper(engine, self._options.write_interval)
        while self._take_calls(engine, keeper.wait):
            keeper.keep()
            try:
                events = engine.step()
            except Exception as error:
                log.exception(
                    "a forward pass failed, and its requests are cancelled: %s: %s",
                    type(error).__name__,
                    error,
                )
                # A model that failed once would fail them again.
                before = engine.take_events()
                events = before + self._fail(engine, engine.running or engine.waiting, error)
            for event in events:
                self._dispatch(event)

    def _take_calls(self, engine: Engine, longest: float | None) -> bool:
        """Execute the queued calls; returns False at the end. If there is nothing else to do, waits for one,
        at most ``longest`` seconds.
        """
        while True:
            if engine.busy:
                self.idle.clear()
            else:
                self.idle.set()
            try:
                queued = self._calls.get(block=not engine.busy, timeout=longest)
            except queue.Empty:
                return True
            if queued is None:
                return False
            self.idle.clear()
            call, done = queued
            if not done.set_running_or_notify_cancel():
                continue  # cancelled by its caller
            try:
                done.set_result(call(engine))
            except BaseException as error:
                done.set_exception(error)

    @staticmethod
    def _fail(engine: Engine, requests: Sequence[Request], error: Exception) -> list[EngineEvent]:
        for request in requests:
            engine.cancel(request)
        return [Failed(request.id, error) for request in requests]

    def _pause(self) -> int:
        """The estimated seconds until a place is free, from the intervals between recent ends: 1 to 60."""
        if len(self._ends) < 2:
            return 1
        return min(60, math.ceil((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)) or 1)

    def _dispatch(self, event: EngineEvent) -> None:
        if isinstance(event, (Finished, Failed)):
            ticket = self._tickets.pop(event.request, None)
            self._ends.append(time.monotonic())
            if ticket is not None:
                ticket.outcome = event
        else:
            ticket = self._tickets.get(event.request)
        if ticket is not None:
            for observe in tuple(self.observers):
                observe(ticket, event)
            ticket.deliver(event)
