"""Running a server: it listens, shuts down in order, and writes its stores."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import uvicorn

from kvcache import bytes_text
from kvcache_engine.engine import Engine
from kvcache_engine.errors import RequestError
from kvcache_engine.serve.app import make_app
from kvcache_engine.serve.asked import Template
from kvcache_engine.serve.connections import GuardedProtocol, Shedding, descriptors
from kvcache_engine.serve.guard import HostGuard, hosts_of, is_loopback
from kvcache_engine.serve.options import ServeOptions
from kvcache_engine.serve.worker import Worker, has_stores

__all__ = ["Server", "serve"]

log = logging.getLogger("kvcache_engine.serve")

_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
BACKLOG = 2048
"""The most connections that the system queues until they are accepted."""
LAST_WORDS = 2.0
"""Seconds for clients to read that their requests were cancelled."""


def serve(
    make: Callable[[], AbstractContextManager[Engine]],
    name: str,
    template: Template,
    options: ServeOptions | None = None,
    told: Callable[[str], None] = log.info,
    watching: Callable[[Worker], AbstractContextManager[None]] | None = None,
) -> None:
    """Serve the engine that ``make`` opens, under ``name``, until SIGINT, SIGTERM or SIGHUP comes.

    Call it from the main thread, which receives the signals. The address is bound before the engine is
    opened, and accepts connections after that. At shutdown, running requests may finish, and then kept
    content is written to the engine's stores. ``told`` receives one line each about the memory limits, the
    address, and the final writes. ``watching`` is entered while requests are served.

    Raises RequestError for an unavailable address, and the errors of ``make``.
    """
    options = options or ServeOptions()
    with (
        _bound(options.host, options.port) as listening,
        _ended_by_signals(),
        Worker(make, options) as worker,
    ):
        app = make_app(worker, name, template, options)
        watched = contextlib.nullcontext() if watching is None else watching(worker)
        where = listening.getsockname()[0]
        if options.api_key is None and not is_loopback(where):
            log.warning("anyone who can reach %s can use the model; set a key with --api-key", where)
        config = configured(app, options, [where])
        told(memory_line(worker.engine))
        try:
            with contextlib.suppress(KeyboardInterrupt), watched:  # it has already shut down in order
                told_ready = functools.partial(told, f"serving {name} on {_url(listening)}")
                Server(config, worker, options.shutdown_timeout, told_ready).run([listening])
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt writing
            if has_stores(worker.engine):
                told("writing kept prefixes to the stores; Ctrl-C skips this")


def memory_line(engine: Engine) -> str:
    """The memory needed in addition to the weights, and its parts."""
    names = {
        "copies": "copies beside it",
        "leaving": "on the way from the device",
        "host": "host memory",
        "writing": "waiting for stores",
        "ahead": "read ahead",
    }
    limits = {"the cache": engine.cache_bytes}
    unlimited = []
    for name, limit in engine.prefix.limits.items():
        if limit is None:
            unlimited.append(names[name])
        else:
            limits[names[name]] = limit
    parts = ", ".join(f"{name} {bytes_text(limit)}" for name, limit in limits.items())
    more = "".join(f", {name} without a limit" for name in unlimited)
    return f"at most {bytes_text(sum(limits.values()))} of memory in addition to the weights: {parts}{more}"


def configured(app: Any, options: ServeOptions, where: Sequence[str]) -> uvicorn.Config:
    """The uvicorn config of ``app`` at the addresses ``where``, with the limits of ``options``."""
    hosts = [name for host in (options.host, *where) for name in hosts_of(host)]
    most, spare = descriptors()
    protocol: Any = functools.partial(
        GuardedProtocol, timeout=options.client_timeout, shedding=Shedding(most)
    )
    return uvicorn.Config(
        HostGuard(app, [*hosts, *options.allowed_hosts]), http=protocol, ws="none", lifespan="off",
        backlog=max(1, spare // 4),  # asyncio accepts this many before it passes on the first
        log_config=None, access_log=False,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout + LAST_WORDS),
    )  # fmt: skip


class Server(uvicorn.Server):
    """A uvicorn server that reports when it listens. At shutdown, requests still running after ``within``
    seconds are cancelled. Closed connections have a few seconds for remaining output, since asyncio would
    wait forever for a client that does not read.
    """

    def __init__(
        self, config: uvicorn.Config, worker: Worker, within: float, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._worker, self._within, self._ready = worker, within, ready
        self._closing: set[asyncio.Transport] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._failed)
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)
        self._ready()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio reports each connection that it has no descriptor for; it tries again a second later."""
        error, limits = context.get("exception"), getattr(self.config.http, "keywords", {}).get("shedding")
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS and limits is not None:
            connections = self.server_state.connections
            limits.make_room(connections, len(connections) // 2)
        else:
            loop.default_exception_handler(context)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # a second
            transports = (connection.transport for connection in self.server_state.connections)
            closing = {each for each in transports if each.is_closing()}
            for each in closing & self._closing:
                each.abort()
            self._closing = closing
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening; close connections without a request at once, the others when their request ends."""
        giving_up = asyncio.get_running_loop().call_later(self._within, self._worker.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket that does not listen yet, so that connections are refused until it does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"serve: {host}:{port}: no such address ({error})") from error
    with listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            raise RequestError(
                f"serve: {host}:{port} is not available ({error.strerror}); choose another port, or 0"
            ) from error
        yield listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Ended(BaseException):
    """A signal that ends the server while uvicorn does not handle it."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block like Ctrl-C, so that kept content is written to the stores.
    uvicorn handles SIGTERM itself while it serves, and raises it again when it has stopped.
    """

    def end(number: int, frame: object) -> None:
        raise _Ended

    def hang_up(number: int, frame: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    wanted = {"SIGTERM": end, "SIGHUP": hang_up}
    before: dict[int, Any] = {}
    for name, handler in wanted.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            before[number] = signal.signal(number, handler)
    try:
        with contextlib.suppress(_Ended):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
