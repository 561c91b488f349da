"""A server from its first connection to its last: it listens, ends in order, and keeps its stores."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import uvicorn

from kvcache.runner.engine import Engine
from kvcache.runner.errors import RequestError
from kvcache.serve.app import make_app
from kvcache.serve.asked import Template
from kvcache.serve.options import ServeOptions
from kvcache.serve.worker import Worker

__all__ = ["serve"]

log = logging.getLogger("kvcache.serve")

GRACE = 5.0
"""Seconds that running requests have when the server is told to end."""


def serve(
    make: Callable[[], AbstractContextManager[Engine]],
    name: str,
    template: Template,
    options: ServeOptions | None = None,
    told: Callable[[str], None] = log.info,
) -> None:
    """Serve the engine that ``make`` opens, under ``name``, until SIGINT, SIGTERM or SIGHUP comes.

    To be called from the main thread, which gets the signals. The address is taken before the engine is
    opened, and answers after that. At the end requests that are running may finish, and then what is kept
    goes to the engine's stores. ``told`` hears in a line each that it serves, and that it writes.

    Raises RequestError for an address that cannot be had, and what ``make`` raises.
    """
    options = options or ServeOptions()
    with (
        _bound(options.host, options.port) as listening,
        _ended_by_signals(),
        Worker(make, options) as worker,
    ):
        app = make_app(worker, name, template, options)
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_graceful_shutdown=int(GRACE),
        )  # fmt: skip
        try:
            with contextlib.suppress(KeyboardInterrupt):  # it has ended in order
                _Server(config, lambda: told(f"serving {name} on {_url(listening)}")).run([listening])
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one ends nothing half-written
            if worker.stores:
                told("writing what is kept to the stores; Ctrl-C leaves it undone")


class _Server(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has the address and does not listen yet: who connects is refused until it does."""
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
                f"serve: {host}:{port} cannot be had ({error.strerror}); choose another port (0: a free one)"
            ) from error
        yield listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Ended(BaseException):
    """A signal that ends the server, where uvicorn has not taken it."""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what is kept goes to the stores.

    uvicorn takes SIGTERM itself while it serves, and raises it anew when it has stopped.
    """

    def end(number: int, frame: object) -> None:
        raise _Ended

    def hang_up(number: int, frame: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    wanted = {"SIGTERM": end, "SIGHUP": hang_up}
    before: dict[int, Any] = {}
    for name, handler in wanted.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            before[number] = signal.signal(number, handler)
    try:
        with contextlib.suppress(_Ended):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
