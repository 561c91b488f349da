"""The routes of agents' sessions: list, inspect, close, delete, and how long what they used is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvcache import AgentSession, AgentSessions
from kvcache_engine.serve.asked import MAX_SALT, Fields, parse_next_use, parse_retention
from kvcache_engine.serve.bodies import json_body
from kvcache_engine.serve.errors import ApiError
from kvcache_engine.serve.options import ServeOptions
from kvcache_engine.serve.worker import Worker

__all__ = ["session_routes"]

SALT = "x-cache-salt"
"""The header that has the ``cache_salt`` of a session's requests; a URL would be logged."""
CACHED = "tokens", "own_tokens", "nbytes", "own_nbytes"
"""What reveals how much of a prompt was cached, and whether others had the same."""
R = TypeVar("R")


def session_routes(worker: Worker, options: ServeOptions) -> list[Route]:
    """``/v1/sessions`` and what lies below."""
    routes = _Sessions(worker, options)
    one = "/v1/sessions/{session_id:path}"
    return [
        Route("/v1/sessions", routes.list),
        Route(one + "/close", routes.close, methods=["POST"]),
        Route(one, routes.inspect, methods=["GET"]),
        Route(one, routes.modify, methods=["POST"]),
        Route(one, routes.delete, methods=["DELETE"]),
    ]


class _Sessions:
    def __init__(self, worker: Worker, options: ServeOptions) -> None:
        self._worker, self._options = worker, options

    async def list(self, request: Request) -> Response:
        salt = _salt(request)
        sessions = await self._call(lambda sessions: sessions.list(salt))
        return JSONResponse({"object": "list", "data": [self._record(each) for each in sessions]})

    async def inspect(self, request: Request) -> Response:
        return await self._answer(request)

    async def close(self, request: Request) -> Response:
        await self._fields(request)
        return await self._answer(request, lambda sessions, whose: sessions.close(*whose))

    async def modify(self, request: Request) -> Response:
        """``cache_retention``, as in requests, and ``next_use``: seconds from the end of the last request."""
        fields = await self._fields(request, "cache_retention", "next_use")
        retention = parse_retention(fields.raw("cache_retention"))
        seconds = parse_next_use(fields)

        def call(sessions: AgentSessions, whose: tuple[str, str]) -> None:
            session_id, salt = whose
            if retention is not None:
                sessions.retain(session_id, retention, salt)
            if seconds is not None:
                sessions.expect(session_id, seconds, salt)

        return await self._answer(request, call)

    async def delete(self, request: Request) -> Response:
        session_id, salt = _whose(request)

        def call(sessions: AgentSessions) -> bool:
            _check(sessions.inspect(session_id, salt), session_id)
            return sessions.delete(session_id, salt)

        if not await self._call(call):
            raise ApiError(503, "a store could not delete its part of this session; try again later")
        return JSONResponse({"id": session_id, "object": "session.deleted", "deleted": True})

    async def _answer(
        self,
        request: Request,
        change: Callable[[AgentSessions, tuple[str, str]], object] = lambda sessions, whose: None,
    ) -> Response:
        """The session after a change; 404 if it is not known."""
        whose = _whose(request)

        def call(sessions: AgentSessions) -> AgentSession:
            change(sessions, whose)
            return _check(sessions.inspect(*whose), whose[0])

        return JSONResponse(self._record(await self._call(call)))

    async def _call(self, call: Callable[[AgentSessions], R]) -> R:
        """Between two passes, in the engine's thread."""
        posted = self._worker.post(lambda engine: call(engine.prefix.agent_sessions))
        return await asyncio.wrap_future(posted)

    async def _fields(self, request: Request, *served: str) -> Fields:
        deadline = asyncio.get_running_loop().time() + self._options.request_timeout
        try:
            body = await json_body(request, self._options, deadline)
        except ClientDisconnect:
            raise ApiError(400, "the client has disconnected") from None
        fields = Fields(body or b"{}")
        fields.refuse(served)
        return fields

    def _record(self, session: AgentSession) -> dict[str, Any]:
        found = asdict(session)
        shown = {name: found[name] for name in found if self._options.show_cached or name not in CACHED}
        return {"id": shown.pop("session_id"), "object": "session", **shown}


def _salt(request: Request) -> str:
    salt = unquote(request.headers.get(SALT, ""))
    if len(salt) > MAX_SALT:
        raise ApiError(400, f"the header {SALT} has more than {MAX_SALT} characters")
    return salt


def _whose(request: Request) -> tuple[str, str]:
    return request.path_params["session_id"], _salt(request)


def _check(session: AgentSession | None, session_id: str) -> AgentSession:
    if session is None:
        raise ApiError(404, f"no request with the session_id {session_id[:200]!r} is known", "session_id")
    return session
