"""Refusals before any route: unknown hosts, wrong keys, and ambiguous bodies."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvcache_engine.serve.errors import ApiError

__all__ = ["HostGuard", "KeyGuard", "check_json", "has_key", "hosts_of", "is_loopback"]

OPEN = ("/health",)
"""Paths that need no key, for health probes."""


class KeyGuard:
    """An ASGI middleware: 401 without ``api_key`` (None: no key needed), 400 for a body with two lengths."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app, self._api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        await (self._app if error is None else _closing(error))(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers:
            if "content-length" in headers:
                return ApiError(
                    400, "the body has a Content-Length and a Transfer-Encoding; send only one of them"
                )
            if scope.get("http_version") == "1.0":
                return ApiError(400, "the body has a Transfer-Encoding, which HTTP/1.0 does not support")
        if scope["path"] in OPEN or has_key(headers, self._api_key):
            return None
        message = "this server requires an API key: send the header 'Authorization: Bearer KEY'"
        return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class HostGuard:
    """An ASGI middleware: 403 for a Host that is not among ``allowed``.

    A browser sends the host name that a page was loaded from, whatever address it resolves to now: without
    this check, a foreign page could call a server that only its reader can reach (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, {_name(host) for host in allowed}
        self._any_address = bool(self._allowed & {"0.0.0.0", "::"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._allows(host):  # HTTP/1.0, which browsers do not use, may have none
            await self._app(scope, receive, send)
            return
        message = f"the host {host[:200]!r} is not served; allow it with --allowed-host"
        await _closing(ApiError(403, message))(scope, receive, send)

    def _allows(self, host: str) -> bool:
        name = _name(host)
        return bool(self._allowed & {"*", name}) or (self._any_address and _address(name) is not None)


def hosts_of(host: str) -> list[str]:
    """The allowed Host names of a server that listens on ``host``: that name, and those of this machine. A
    server on all addresses allows any IP address: a page loaded from an IP address belongs to its owner.
    """
    address = _address(host)
    if address is None:
        return [host]
    local = ["localhost", "127.0.0.1", "::1"] if address.is_loopback or address.is_unspecified else []
    return [host, *local] if address.is_loopback else [host, *local, socket.gethostname()]


def is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def has_key(headers: Headers, api_key: str | None) -> bool:
    """Whether a request has the key, if one is required; compared in constant time."""
    if api_key is None:
        return True
    headers_sent = headers.getlist("authorization")
    scheme, _, key = headers_sent[0].partition(" ") if len(headers_sent) == 1 else ("", "", "")
    digests = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (key.strip(), api_key))
    return hmac.compare_digest(*digests) and scheme.lower() == "bearer"


def check_json(headers: Headers) -> None:
    """Refuse a body without a JSON content type, which a page of another site could send without
    permission.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content type is {kind[:200]!r}; it must be application/json")


def _closing(error: ApiError) -> JSONResponse:
    """A response that closes the connection, since the end of the body is uncertain or irrelevant."""
    return JSONResponse(error.body(), error.status, {**error.headers, "connection": "close"})


def _name(host: str) -> str:
    """A normalized host: without port and final dot, in lower case; addresses in Python's form."""
    name = host.lower()
    if _address(name) is None:
        name = name[1 : name.find("]")] if name.startswith("[") else name.rpartition(":")[0] or name
    name = name.removesuffix(".")
    return name if (address := _address(name)) is None else str(address)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None
