"""The routes: requests are checked, passed to the worker, and answered completely or as a stream."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvcache_engine.engine import Engine
from kvcache_engine.errors import RequestError, TextTooLongError
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.serve.answers import Form
from kvcache_engine.serve.asked import Asked, Fields, Prompt, Template, Text, parse_chat, parse_completion
from kvcache_engine.serve.bodies import json_body
from kvcache_engine.serve.errors import ApiError
from kvcache_engine.serve.guard import KeyGuard, has_key
from kvcache_engine.serve.index import index_page
from kvcache_engine.serve.metrics import Metrics
from kvcache_engine.serve.options import ServeOptions
from kvcache_engine.serve.sessions import session_routes
from kvcache_engine.serve.streams import (
    EventStream,
    api_error,
    cancel,
    collect,
    stream,
    too_late,
    while_there,
    why_over,
)
from kvcache_engine.serve.tracing import Trace, tracing
from kvcache_engine.serve.worker import Inbox, Overloaded, Stopped, Ticket, Worker

__all__ = ["make_app"]

Parse = Callable[[Fields], Asked]
GONE = 499
"""The status of a response that nobody reads because the client has disconnected."""


PATHS = {
    "/v1/chat/completions": "chat completions, whole or streamed",
    "/v1/completions": "completions of texts or token ids, whole or streamed",
    "/v1/models": "the model that is served",
    "/v1/sessions": "sessions of agents: list and inspect, close and delete, retain",
    "/health": "what is running and waiting",
    "/metrics": "counters and times, for Prometheus",
}


def make_app(worker: Worker, name: str, template: Template, options: ServeOptions | None = None) -> Starlette:
    """An application that serves the model of ``worker`` under ``name``; ``template`` turns messages into
    prompts.
    """
    options = options or ServeOptions()
    service = _Service(worker, name, template, options)
    routes = [
        Route("/", service.index),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.model),
        *session_routes(worker, options),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    handlers: Any = dict.fromkeys((ApiError, HTTPException, Stopped, Exception), _failed)
    guard = Middleware(KeyGuard, options.api_key)
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[guard])


class _Service:
    def __init__(self, worker: Worker, name: str, template: Template, options: ServeOptions) -> None:
        self._worker, self._name, self._template, self._options = worker, name, template, options
        self._metrics = Metrics(worker, name, options.show_cached)
        self._begin_trace = tracing(name)
        self._record = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "kvcache",
            "max_model_len": worker.engine.limit,
        }

    async def index(self, request: Request) -> Response:
        limit = self._worker.engine.limit
        page = index_page(self._name, version("ml-kvcache"), limit, str(request.base_url), PATHS)
        return HTMLResponse(page)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, lambda fields: parse_completion(fields, self._name), chat=False)

    async def chat(self, request: Request) -> Response:
        parse = functools.partial(parse_chat, served=self._name, template=self._template)
        return await self._answer(request, parse, chat=True)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._record]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            message = f"The model '{name}' does not exist; this server has '{self._name}'"
            raise ApiError(404, message, "model", "model_not_found")
        return JSONResponse(self._record)

    async def health(self, request: Request) -> Response:
        if not has_key(request.headers, self._options.api_key):
            await asyncio.wrap_future(self._worker.post(lambda engine: None))
            return JSONResponse({"status": "ok"})
        health = functools.partial(_health, show_cached=self._options.show_cached)
        return JSONResponse(await asyncio.wrap_future(self._worker.post(health)))

    async def metrics(self, _: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.exposed), media_type=CONTENT_TYPE_LATEST)

    async def _answer(self, request: Request, parse: Parse, chat: bool) -> Response:
        trace = self._begin_trace(request.headers, chat)
        try:
            response = await self._in_time(request, parse, chat, trace)
        except BaseException as error:
            trace.end(error)
            raise
        if not isinstance(response, EventStream):  # which ends the trace itself
            trace.end()
        return response

    async def _in_time(self, request: Request, parse: Parse, chat: bool, trace: Trace) -> Response:
        within = self._options.request_timeout
        deadline = asyncio.get_running_loop().time() + within
        try:
            body = await json_body(request, self._options, deadline)
        except ClientDisconnect:
            return Response(status_code=GONE)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._answered(request, body, parse, chat, deadline, trace)
        except TimeoutError:
            raise too_late(within) from None

    async def _answered(
        self, request: Request, body: bytes, parse: Parse, chat: bool, deadline: float, trace: Trace
    ) -> Response:
        # In a thread: parsing, rendering and tokenizing eight megabytes would block all other requests.
        asked, calls = await asyncio.to_thread(self._prepared, body, parse)
        inbox: Inbox = asyncio.Queue()
        tokenizer = None if asked.settings.logprobs is None else self._worker.engine.tokenizer
        prompts = [tokens for tokens, _ in calls]
        form = Form(self._name, chat, asked.choices, self._options.show_cached, tokenizer, prompts)
        tickets = await self._submit(calls, inbox, asked)
        trace.asked(asked, tickets)
        if asked.stream:
            late = too_late(self._options.request_timeout)
            events = stream(form, asked, inbox, len(tickets), deadline, late)
            return EventStream(tickets, events, deadline, late, trace)
        try:
            answers = await while_there(request, collect(inbox, len(tickets)))
        finally:
            cancel(tickets, why_over(deadline))
        return Response(status_code=GONE) if answers is None else JSONResponse(form.whole(answers))

    def _prepared(self, body: bytes, parse: Parse) -> tuple[Asked, list[tuple[list[int], GenerationOptions]]]:
        """The parsed request, and tokens and settings of every answer, checked before any is started."""
        asked, calls = parse(Fields(body, self._options.sampling)), []
        count, room = len(asked.prompts) * asked.choices, self._worker.room
        if count > room:
            message = f"{count} answers (n={asked.choices}); at most {room} can run and wait at the same time"
            raise ApiError(400, message, "n")
        for prompt in asked.prompts:
            tokens, count = self._fitting(prompt, asked.max_tokens)
            calls += [(tokens, asked.settings_for(i, count)) for i in range(asked.choices)]
        return asked, calls

    def _fitting(self, prompt: Prompt, wanted: int | None) -> tuple[list[int], int]:
        """The tokens, and how many tokens may be generated."""
        engine = self._worker.engine
        assert engine.tokenizer is not None
        try:
            if isinstance(prompt, Text):
                tokens = engine.tokenizer.encode(prompt.text, prompt.bos, most=engine.limit)
            else:
                tokens = prompt
            count = max(1, engine.limit - len(tokens)) if wanted is None else wanted
            if len(tokens) + count > engine.limit:
                raise _too_long(engine.limit, len(tokens), count, wanted)
            return engine.encode(tokens), count
        except TextTooLongError as error:
            raise _too_long(engine.limit, error.count, wanted or 1, wanted, "at least ") from None
        except RequestError as error:
            raise ApiError(400, str(error), "prompt") from None

    async def _submit(
        self, calls: Sequence[tuple[list[int], GenerationOptions]], inbox: Inbox, asked: Asked
    ) -> list[Ticket]:
        tickets: list[Ticket] = []
        try:
            for at, (tokens, settings) in enumerate(calls):
                left = len(calls) - at
                whose = asked.salt, asked.retention, left, asked.session_id, asked.next_use
                tickets.append(await self._worker.submit(tokens, settings, inbox, at, *whose))
        except BaseException as error:
            cancel(tickets, "timeout" if isinstance(error, asyncio.CancelledError) else "refused")
            if isinstance(error, RequestError):
                raise ApiError(400, str(error)) from None
            if isinstance(error, Overloaded):
                after = {"retry-after": str(error.seconds)}
                raise ApiError(429, str(error), code="overloaded", headers=after) from None
            raise
        return tickets


def _too_long(limit: int, prompt: int, count: int, wanted: int | None, least: str = "") -> ApiError:
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested {least}"
        f"{prompt + count} tokens ({prompt} in the prompt, {count} for the completion). "
        "Please reduce the length of either one.",
        "messages" if wanted is None else "max_tokens",
        "context_length_exceeded",
    )


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = ApiError(404, f"{request.url.path} is not served; this server has {', '.join(PATHS)}")
    elif isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    elif not isinstance(error, ApiError):
        error = api_error(error)
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def _health(engine: Engine, show_cached: bool) -> dict[str, Any]:
    health = {
        "status": "ok",
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "sequences": len(engine.prefix.sessions),
        "limit": engine.limit,
    }
    if not show_cached:  # all of these reveal how much of a prompt was cached
        return health
    reused = {"reused": asdict(engine.prefix.stats), "kept_bytes": engine.prefix.nbytes}
    return {**health, "statistics": asdict(engine.statistics), **reused}
