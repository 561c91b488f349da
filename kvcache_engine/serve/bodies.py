"""Reading the bodies of requests: within a time and a size, and only JSON."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from kvcache_engine.serve.errors import ApiError
from kvcache_engine.serve.guard import check_json
from kvcache_engine.serve.options import ServeOptions

__all__ = ["json_body"]


async def json_body(request: Request, options: ServeOptions, deadline: float) -> bytes:
    """The body of a request. Raises ApiError if it is too large, does not come until ``deadline`` (on the
    loop's clock), or is not said to be JSON; ClientDisconnect if the client leaves.
    """
    within, pause = options.request_timeout, options.client_timeout
    try:
        async with asyncio.timeout_at(deadline):
            body = await _body(request, options.max_body, pause)
    except TimeoutError:
        message = f"the body did not arrive within {within:g} seconds, or paused for {pause:g} seconds"
        raise ApiError(408, message, code="timeout", headers={"connection": "close"}) from None
    check_json(request.headers)
    return body


async def _body(request: Request, most: int, pause: float) -> bytes:
    """Read the body. Raises TimeoutError if nothing arrives for ``pause`` seconds."""
    body, parts = bytearray(), request.stream()
    while True:
        try:
            async with asyncio.timeout(pause):
                body += await anext(parts)
        except StopAsyncIteration:
            return bytes(body)
        if len(body) > most:
            raise ApiError(413, f"the body has more than {most} bytes")
