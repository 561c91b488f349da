"""Sending answers, complete or as streams of events, until they end or the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvcache.cache import CacheFullError
from kvcache_engine.engine import EngineEvent, Failed
from kvcache_engine.requests import Finished, Token
from kvcache_engine.serve.answers import DONE, Form, sse
from kvcache_engine.serve.asked import Asked
from kvcache_engine.serve.errors import ApiError
from kvcache_engine.serve.tracing import Trace
from kvcache_engine.serve.worker import Inbox, Stopped, Ticket

__all__ = ["EventStream", "api_error", "cancel", "collect", "stream", "too_late", "while_there"]

LAST_WORDS = 1.0
"""Seconds for a slow client to receive the timeout error."""


class EventStream(StreamingResponse):
    """A response of server-sent events. Its requests end with it, however it ends, even if no event was read.
    A client that has not read everything shortly after ``deadline`` is disconnected. ``trace`` ends with it,
    with the error ``late`` if the answer was not complete in time.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        events: AsyncIterator[bytes],
        deadline: float,
        late: ApiError,
        trace: Trace,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._tickets, self._deadline, self._late, self._trace = tickets, deadline, late, trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._deadline + LAST_WORDS):
                    await super().__call__(scope, receive, send)
        finally:
            why = why_over(self._deadline)
            late = why == "timeout" and any(ticket.outcome is None for ticket in self._tickets)
            cancel(self._tickets, why)
            self._trace.end(self._late if late else None)


async def stream(
    form: Form, asked: Asked, inbox: Inbox, count: int, deadline: float, late: ApiError
) -> AsyncIterator[bytes]:
    """The events of ``count`` answers as they arrive, then ``late`` if ``deadline`` passes."""
    try:
        async for part in _parts(form, asked, inbox, count, deadline):
            yield part
    except TimeoutError:
        yield sse(late.body())


async def _parts(form: Form, asked: Asked, inbox: Inbox, count: int, deadline: float) -> AsyncIterator[bytes]:
    for choice in range(count):
        if (first := form.first(choice)) is not None:
            yield first
    answers: dict[int, Finished] = {}
    likely = [form.logprobs(choice) for choice in range(count)]
    async for choice, event in _events(inbox, count, deadline):
        if isinstance(event, Token):
            part = likely[choice]
            if part is not None and event.token is not None and event.logprobs is not None:
                yield form.text(choice, event.text, part.record([event.token], [event.logprobs]))
            elif event.text:
                yield form.text(choice, event.text)
        elif isinstance(event, Finished):
            answers[choice] = event
            yield form.last(choice, event)
        elif isinstance(event, Failed):
            yield sse(api_error(event.error).body())
            return
    if asked.include_usage:
        yield form.total([answers[i] for i in range(count)])
    yield DONE


async def collect(inbox: Inbox, count: int) -> list[Finished]:
    """All answers, when complete. Raises ApiError if one failed."""
    answers: dict[int, Finished] = {}
    async for choice, event in _events(inbox, count):
        if isinstance(event, Failed):
            raise api_error(event.error)
        if isinstance(event, Finished):
            answers[choice] = event
    return [answers[i] for i in range(count)]


async def _events(
    inbox: Inbox, count: int, deadline: float | None = None
) -> AsyncIterator[tuple[int, EngineEvent]]:
    """Events until each of ``count`` answers has ended. Raises TimeoutError if the next event does not arrive
    in time.
    """
    while count:
        async with asyncio.timeout_at(deadline):
            choice, event = await inbox.get()
        count -= isinstance(event, (Finished, Failed))
        yield choice, event


async def while_there(request: Request, work: Any) -> Any:
    """The result of a coroutine; None if the client disconnects first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def cancel(tickets: Sequence[Ticket], why: str) -> None:
    for ticket in tickets:
        ticket.cancel(why)


def why_over(deadline: float) -> str:
    """Why an incompletely answered call ended: the client disconnected, unless ``deadline`` has passed."""
    return "timeout" if asyncio.get_running_loop().time() >= deadline else "cancelled"


def too_late(within: float) -> ApiError:
    """The timeout error, marked so that OpenAI's clients do not retry it automatically."""
    message = f"the request was not answered within {within:g} seconds"
    return ApiError(504, message, code="timeout", headers={"x-should-retry": "false"})


def api_error(error: Exception) -> ApiError:
    """The error of a failed request; 503 if a retry may succeed."""
    later = isinstance(error, (CacheFullError, Stopped))
    return ApiError(503 if later else 500, f"{type(error).__name__}: {error}")
