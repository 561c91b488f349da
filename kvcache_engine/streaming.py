"""Answers token by token in asyncio: a thread steps the engine while any task waits for tokens.

Tasks of event loops in any thread submit and cancel requests; the thread executes these calls between two
passes, so that no loop waits for a pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from kvcache_engine.errors import RequestError
from kvcache_engine.requests import Event, Finished, Token
from kvcache_engine.scheduler import Failed, Request

__all__ = ["Listener", "Streams"]

Listener = Callable[[Event | Failed], None]
"""Receives the events of one request, in the thread that steps the engine; it must not raise."""


class Steps(Protocol):
    """The part of an engine that is used here."""

    @property
    def submit(self) -> Callable[..., Request]: ...
    def cancel(self, request: Request) -> bool: ...
    def advance(self) -> None: ...
    def take_events(self) -> Any: ...


class _Stream:
    """A streaming request: the events for its task, and the handle once it is submitted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.inbox: asyncio.Queue[Event | Failed] = asyncio.Queue()
        self.request: Request | None = None

    def tell(self, event: Event | Failed) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody is listening
            self._loop.call_soon_threadsafe(self.inbox.put_nowait, event)


class Streams:
    """The streams of one engine."""

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self._starting = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls to make between two passes."""
        self._running: set[_Stream] = set()
        self._thread: threading.Thread | None = None

    async def stream(
        self, prompt: Any, settings: Any, include_finished: bool, **named: Any
    ) -> AsyncGenerator[Token | Finished, None]:
        """The tokens of an answer, and its ``Finished`` if included; other arguments are those of ``submit``.

        The request ends with the generator.
        """
        one = _Stream()

        def begin() -> None:
            self._running.add(one)
            one.request = self._engine.submit(prompt, settings, listener=one.tell, **named)

        self._post(lambda: self._attempt(one, begin))
        try:
            while not isinstance(event := await one.inbox.get(), Finished):
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Token):
                    yield event
            if include_finished:
                yield event
        finally:
            self._post(lambda: self._end(one))

    # In the thread.

    def _post(self, call: Callable[[], None]) -> None:
        with self._starting:
            self._calls.put(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvcache-streams", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()()
            if not self._running:
                with self._starting:
                    if self._calls.empty():
                        self._thread = None
                        return
                continue
            try:
                self._engine.advance()
            except Exception as error:  # a pass failed, and would fail again and again
                with contextlib.suppress(Exception):
                    self._engine.take_events()  # earlier events
                for one in [*self._running]:
                    self._fail(one, error)
            for one in [*self._running]:
                request = one.request
                if request is not None and request.done and not (request.answer or request.error):
                    self._fail(one, RequestError("stream: the request was cancelled meanwhile"))

    def _attempt(self, one: _Stream, begin: Callable[[], None]) -> None:
        try:
            begin()
        except Exception as error:
            self._fail(one, error)

    def _fail(self, one: _Stream, error: Exception) -> None:
        number = -1 if one.request is None else one.request.id
        self._end(one)
        one.tell(Failed(number, error))

    def _end(self, one: _Stream) -> None:
        """End a stream; no effect if it has already ended."""
        self._running.discard(one)
        if one.request is not None:
            self._engine.cancel(one.request)
