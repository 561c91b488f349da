"""The server at work over loopback, its engine held and let go, and an app that no socket leads to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import httpx
import openai

import ml
from kvcache_engine.engine import Engine, EngineOptions, Tier
from kvcache_engine.loading import bundled_model, load_model
from kvcache_engine.serve import ServeOptions, Worker, make_app, template_of
from kvcache_engine.serve.running import Server, configured
from kvcache_engine.tokenizer import Tokenizer

__all__ = ["HTTP", "NAME", "PROMPT", "Gate", "Opened", "Serving", "app_of", "asked_in_process", "gated",
           "opened", "served", "until"]  # fmt: skip

NAME, PROMPT = "tiny", "And God said unto Noah,"
HTTP = httpx.Client(timeout=60, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""A connection for each request; without certificates, which take longer to load than a reply."""


@contextlib.contextmanager
def opened(options: EngineOptions, tiers: Sequence[Tier] = ()) -> Iterator[Engine]:
    """The bundled model at work, in the thread that enters."""
    with ml.open_backend("numpy") as backend, contextlib.ExitStack() as stack:
        model, tokenizer = load_model(bundled_model(), backend), Tokenizer.load(bundled_model())
        yield stack.enter_context(Engine(model, tokenizer, options, tiers))


Opened = Callable[[EngineOptions], contextlib.AbstractContextManager[Engine]]


def app_of(worker: Worker, **options: Any) -> Any:
    return make_app(worker, NAME, template_of(bundled_model()), ServeOptions(**options))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.002)


class Serving:
    """The server at work: its worker, and a client of OpenAI's."""

    def __init__(self, worker: Worker, url: str, thread: threading.Thread, http: Server) -> None:
        self.worker, self.url, self.thread, self.http = worker, url, thread, http
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=HTTP)
        self.models = client.models
        self.complete: Any = functools.partial(client.completions.create, model=NAME, temperature=0)
        self.chat: Any = functools.partial(client.chat.completions.create, model=NAME, temperature=0)

    def ask(self, call: Callable[[Engine], Any]) -> Any:
        return self.worker.post(call).result(timeout=60)

    def post(self, body: Any, path: str = "completions") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return HTTP.post(f"{self.url}/v1/{path}", content=content, headers=headers)

    def health(self) -> dict[str, Any]:
        return HTTP.get(f"{self.url}/health").json()


@contextlib.contextmanager
def served(
    engine: EngineOptions, options: ServeOptions | None = None, keep_alive: int = 5, opened: Opened = opened
) -> Iterator[Serving]:
    """The bundled model over loopback; connections that ask nothing are closed after so many seconds."""
    options = options or ServeOptions()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # who does not read is noticed soon
    with Worker(lambda: opened(engine), options) as worker, listening:
        app = make_app(worker, NAME, template_of(bundled_model()), options)
        config = configured(app, options, ["127.0.0.1"])
        config.timeout_keep_alive = keep_alive
        http = Server(config, worker, options.shutdown_timeout, lambda: None)
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield Serving(worker, f"http://127.0.0.1:{listening.getsockname()[1]}", thread, http)
        finally:
            http.should_exit = True
            thread.join(timeout=60)


class Gate:
    """Steps of the engine happen when they are let; until then the worker takes calls and waits."""

    def __init__(self, engine: Engine) -> None:
        self._step = engine.step
        self._more = threading.Event()
        self._open = False
        self.left = 0

    def step(self) -> list[Any]:
        if not self._open and self.left == 0:
            self._more.wait(0.005)
            return []
        self.left = max(0, self.left - 1)
        return self._step()

    def let(self, count: int) -> None:
        """So many steps, and wait until they have been made."""
        self.left = count
        until(lambda: self.left == 0)

    def open(self) -> None:
        self._open = True
        self._more.set()


@contextlib.contextmanager
def gated(serving: Serving) -> Iterator[Gate]:
    gate = serving.ask(Gate)
    serving.ask(lambda engine: setattr(engine, "step", gate.step))
    try:
        yield gate
    finally:
        gate.open()
        serving.ask(lambda engine: delattr(engine, "step"))


def asked_in_process(
    app: Any, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """The reply of an app that no socket leads to."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request("GET" if body is None else "POST", path, json=body, headers=headers)

    return asyncio.run(ask())
