"""The routes: what is asked is checked, given to the worker, and answered whole or as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvcache.cache import CacheFullError
from kvcache.runner.engine import Engine, EngineEvent, Failed
from kvcache.runner.errors import RequestError
from kvcache.runner.requests import Finished, Settings, Token

from .answers import DONE, Form, sse
from .asked import Asked, Fields, Template, parse_chat, parse_completion
from .errors import ApiError
from .worker import Inbox, Overloaded, Ticket, Worker

__all__ = ["make_app"]

MAX_BODY = 8 << 20
GONE = 499
"""What nobody reads: the client has left."""


def make_app(worker: Worker, name: str, template: Template) -> Starlette:
    """The model that ``worker`` runs, served under ``name``; ``template`` makes prompts of messages."""
    service = _Service(worker, name, template)
    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        Route("/health", service.health),
    ]
    return Starlette(routes=routes, exception_handlers={ApiError: _refused, HTTPException: _refused})


class _Service:
    def __init__(self, worker: Worker, name: str, template: Template) -> None:
        self._worker, self._name, self._template = worker, name, template
        self._record = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "kvcache"}

    async def completions(self, request: Request) -> Response:
        asked = parse_completion(Fields(await _body(request)), self._name)
        return await self._answer(request, asked, chat=False)

    async def chat(self, request: Request) -> Response:
        asked = parse_chat(Fields(await _body(request)), self._name, self._template)
        return await self._answer(request, asked, chat=True)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._record]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            message = f"The model '{name}' does not exist; there is {self._name}"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(self._record)

    async def health(self, _: Request) -> Response:
        return JSONResponse(await asyncio.wrap_future(self._worker.post(_health)))

    async def _answer(self, request: Request, asked: Asked, chat: bool) -> Response:
        calls = await asyncio.to_thread(self._calls, asked)
        inbox: Inbox = asyncio.Queue()
        form = Form(self._name, chat, asked.choices)
        tickets = await self._submit(calls, inbox)
        if asked.stream:
            return _EventStream(tickets, _stream(form, asked, inbox, len(tickets)))
        try:
            answers = await _while_there(request, _collect(inbox, len(tickets)))
        finally:
            _cancel(tickets)
        return Response(status_code=GONE) if answers is None else JSONResponse(form.whole(answers))

    def _calls(self, asked: Asked) -> list[tuple[list[int], Settings]]:
        """Tokens and settings of every answer, checked before any is begun."""
        calls = []
        for prompt in asked.prompts:
            tokens, count = self._fitting(prompt, asked.max_tokens)
            calls += [(tokens, asked.settings_for(i, count)) for i in range(asked.choices)]
        return calls

    def _fitting(self, prompt: str | list[int], wanted: int | None) -> tuple[list[int], int]:
        """The tokens, and how many may be generated."""
        engine = self._worker.engine
        assert engine.tokenizer is not None
        tokens = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        count = max(1, engine.limit - len(tokens)) if wanted is None else wanted
        if len(tokens) + count > engine.limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {engine.limit} tokens. However, you requested "
                f"{len(tokens) + count} tokens ({len(tokens)} in the prompt, {count} for the completion). "
                "Please reduce the length of either one.",
                "messages" if wanted is None else "max_tokens",
                "context_length_exceeded",
            )
        try:
            return engine.encode(tokens), count
        except RequestError as error:
            raise ApiError(400, str(error), "prompt") from None

    async def _submit(self, calls: Sequence[tuple[list[int], Settings]], inbox: Inbox) -> list[Ticket]:
        tickets: list[Ticket] = []
        try:
            for tokens, settings in calls:
                tickets.append(await self._worker.submit(tokens, settings, inbox, len(tickets)))
        except BaseException as error:
            _cancel(tickets)
            if isinstance(error, RequestError):
                raise ApiError(400, str(error)) from None
            if isinstance(error, Overloaded):
                raise ApiError(429, str(error), code="overloaded") from None
            raise
        return tickets


class _EventStream(StreamingResponse):
    """Server-sent events; however it ends, and if nobody has read the first, its requests are over."""

    def __init__(self, tickets: Sequence[Ticket], events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._tickets)


async def _stream(form: Form, asked: Asked, inbox: Inbox, count: int) -> AsyncIterator[bytes]:
    for choice in range(count):
        if (first := form.first(choice)) is not None:
            yield first
    answers: dict[int, Finished] = {}
    async for choice, event in _events(inbox, count):
        if isinstance(event, Token) and event.text:
            yield form.text(choice, event.text)
        elif isinstance(event, Finished):
            answers[choice] = event
            yield form.last(choice, event)
        elif isinstance(event, Failed):
            yield sse(_failure(event).body())
            return
    if asked.include_usage:
        yield form.total([answers[i] for i in range(count)])
    yield DONE


async def _collect(inbox: Inbox, count: int) -> list[Finished]:
    answers: dict[int, Finished] = {}
    async for choice, event in _events(inbox, count):
        if isinstance(event, Failed):
            raise _failure(event)
        if isinstance(event, Finished):
            answers[choice] = event
    return [answers[i] for i in range(count)]


async def _events(inbox: Inbox, count: int) -> AsyncIterator[tuple[int, EngineEvent]]:
    """Until each of ``count`` answers is over."""
    while count:
        choice, event = await inbox.get()
        count -= isinstance(event, (Finished, Failed))
        yield choice, event


async def _while_there(request: Request, work: Any) -> Any:
    """The result of a coroutine; None where the client leaves before."""
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


def _cancel(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


def _failure(event: Failed) -> ApiError:
    full = isinstance(event.error, CacheFullError)
    return ApiError(503 if full else 500, f"{type(event.error).__name__}: {event.error}")


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise ApiError(413, f"the body has more than {MAX_BODY} bytes")
    return bytes(body)


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status)


def _health(engine: Engine) -> dict[str, Any]:
    return {
        "status": "ok",
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "sequences": len(engine.prefix.sessions),
        "limit": engine.limit,
        "statistics": asdict(engine.statistics),
        "reused": asdict(engine.prefix.stats),
        "kept_bytes": engine.prefix.nbytes,
    }
