"""What a server does not take on: bodies, queues, time; and clients that read slowly or leave."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("starlette")


from kvcache.stores import MemoryStore
from kvcache_engine.engine import EngineOptions
from kvcache_engine.options import SpeculativeOptions
from kvcache_engine.serve import ServeOptions, Worker
from kvcache_engine.serve.worker import Stopped

from .serve_rig import HTTP, PROMPT, Serving, app_of, asked_in_process, gated, opened, served, until

OPTIONS = EngineOptions(max_sequences=2, capacity=128)
ENDLESS = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def hurried() -> Iterator[Serving]:
    """A request has two tenths of a second."""
    with served(OPTIONS, ServeOptions(request_timeout=0.2, max_body=1000), keep_alive=1) as serving:
        yield serving
        assert serving.worker.idle.wait(timeout=60)
        assert serving.ask(lambda engine: (len(engine.prefix.sessions), engine.busy)) == (0, False)


def connected(serving: Serving, body: bytes, claimed: int | None = None) -> socket.socket:
    """A client that has asked, with a small buffer, and reads nothing by itself."""
    host, port = serving.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60)
    client.connect((host, int(port)))
    length = len(body) if claimed is None else claimed
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {length}\r\n\r\n".encode()
        + body
    )
    return client


def test_a_body_that_is_too_large_is_refused(hurried: Serving) -> None:
    reply = hurried.post({"prompt": "x" * 1000})
    assert (reply.status_code, reply.json()["error"]["message"]) == (413, "the body has more than 1000 bytes")


def test_a_body_that_does_not_come_is_not_waited_for(hurried: Serving) -> None:
    with connected(hurried, b"{", claimed=100) as client:
        head = client.recv(1 << 16)
    assert head.startswith(b"HTTP/1.1 408 ")


def test_a_request_that_takes_too_long_is_given_up_and_not_tried_again(hurried: Serving) -> None:
    with gated(hurried):
        before = hurried.worker.dropped["timeout"]
        reply = hurried.post(ENDLESS)
        until(lambda: hurried.worker.dropped["timeout"] == before + 1)
    assert (reply.status_code, reply.headers["x-should-retry"]) == (504, "false")
    error = reply.json()["error"]
    assert (error["code"], error["message"]) == ("timeout", "the request was not answered within 0.2 seconds")


@pytest.mark.parametrize("running", [1, 2])
def test_all_answers_of_a_request_that_is_refused_are_counted_as_refused(running: int) -> None:
    """Whether the first of them or the second finds no room."""
    with served(OPTIONS, ServeOptions(max_waiting=0)) as serving, gated(serving) as gate:
        ask = functools.partial(serving.complete, prompt=PROMPT, max_tokens=100, stream=True)
        streams = [ask() for _ in range(running)]
        reply = serving.post({**ENDLESS, "n": 2})
        assert reply.status_code == 429
        assert reply.json()["error"]["message"] == "no sequence is free; try again later"
        until(lambda: serving.worker.dropped["refused"] == 2)
        gate.open()
        for stream in streams:
            stream.close()
        until(lambda: serving.worker.dropped == {"refused": 2, "timeout": 0, "cancelled": running})


def test_all_answers_of_a_request_that_is_taken_too_late_are_counted_as_timeouts() -> None:
    """The engine is busy until nobody waits for it any more."""
    busy = threading.Event()
    with Worker(lambda: opened(OPTIONS)) as worker:
        held = worker.post(lambda engine: busy.wait(60))
        reply = asked_in_process(app_of(worker, request_timeout=0.1), "/v1/completions", {**ENDLESS, "n": 3})
        busy.set()
        assert held.result(60)
        until(lambda: worker.dropped == {"refused": 0, "timeout": 3, "cancelled": 0})
    assert reply.status_code == 504


def test_a_stream_that_takes_too_long_ends_with_the_error(hurried: Serving) -> None:
    with gated(hurried):
        before = hurried.worker.dropped["timeout"]
        reply = hurried.post({**ENDLESS, "stream": True})
        until(lambda: hurried.worker.dropped["timeout"] == before + 1)
    assert reply.status_code == 200
    assert json.loads(reply.text.removeprefix("data: "))["error"]["code"] == "timeout"


def test_who_does_not_read_is_cut_off_when_the_time_is_over(hurried: Serving) -> None:
    """Megabytes for a client that takes none of them: more than all buffers hold."""
    asked = {**ENDLESS, "stream": True, "n": 32, "max_tokens": 110, "logprobs": 20}
    with connected(hurried, json.dumps(asked).encode()):
        until(lambda: bool(hurried.worker._tickets))
        until(lambda: not hurried.http.server_state.connections)
    assert hurried.worker.idle.wait(timeout=60)


@pytest.fixture(scope="module")
def patient() -> Iterator[Serving]:
    with served(OPTIONS) as serving:
        yield serving


def test_who_does_not_read_holds_up_nobody(patient: Serving) -> None:
    """Its answer is computed to the end, its sequence is free, and others are answered; then it reads all."""
    asked = {**ENDLESS, "stream": True, "logprobs": 20}
    with connected(patient, json.dumps(asked).encode()) as client:
        for _ in range(3):
            assert patient.post({**ENDLESS, "max_tokens": 5}).status_code == 200
        assert patient.worker.idle.wait(timeout=60)
        assert patient.ask(lambda engine: len(engine.prefix.sessions)) == 0
        found = b""
        while b"data: [DONE]" not in found:
            found += client.recv(1 << 16)
    assert found.count(b'"text_completion"') == 101  # a token each, and why it ends


def test_a_client_that_leaves_while_it_sends_its_body_is_no_error(patient: Serving) -> None:
    app, sent = app_of(patient.worker), []

    async def left() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(app(scope, left, send))
    assert sent[0]["status"] == 499


@pytest.mark.parametrize("interval", [1e10, math.inf])
def test_stores_may_be_written_only_at_the_end(interval: float) -> None:
    made = functools.partial(opened, OPTIONS, [MemoryStore()])
    with Worker(made, ServeOptions(write_interval=interval)) as worker:
        for _ in range(2):
            worker.post(lambda engine: None).result(timeout=60)


def test_requests_wait_as_long_as_the_last_ones_took_to_end() -> None:
    with Worker(lambda: opened(OPTIONS)) as worker:
        ends: Any = worker._ends
        found = []
        for times in ([], [5.0], [5.0, 5.0], [5.0, 9.0, 12.0], [0.0, 1000.0]):
            ends.clear()
            ends.extend(times)
            found.append(worker._pause())
    assert found == [1, 1, 1, math.ceil(3.5), 60]


def test_what_failed_before_a_pass_that_fails_too_is_told_at_once() -> None:
    options = ServeOptions(request_timeout=20)
    with served(SpeculativeOptions(max_sequences=2, capacity=128), options) as serving:
        engine = serving.ask(lambda engine: engine)

        def draft(seq: int, *_: object) -> list[list[int]]:
            if seq == 0:
                engine.model.forward = broken
                raise ValueError("no idea")
            return []

        def broken(*_: object) -> Any:
            raise RuntimeError("the device failed")

        engine.draft = draft
        with gated(serving) as gate, ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(serving.post, ENDLESS) for _ in range(2)]
            until(lambda: serving.health()["waiting"] == 2)
            gate.open()
            found = sorted(each.result().json()["error"]["message"] for each in answers)
        assert found == ["RuntimeError: the device failed", "ValueError: no idea"]


def test_a_server_whose_engine_has_stopped_says_503() -> None:
    with Worker(lambda: opened(OPTIONS)) as worker:
        app = app_of(worker)
    for path, body in (("/health", None), ("/v1/completions", ENDLESS)):
        reply = asked_in_process(app, path, body)
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == "Stopped: the engine has stopped"


def test_a_server_that_ends_gives_up_what_is_left_and_takes_nothing() -> None:
    with served(OPTIONS) as serving, gated(serving) as gate:
        streams = [serving.complete(prompt=f"{i} {PROMPT}", max_tokens=40, stream=True) for i in range(3)]
        gate.let(3)
        serving.worker.end_requests()
        for stream in streams:
            with pytest.raises(Exception, match="Stopped: the server is shutting down"):
                list(stream)
        assert serving.ask(lambda engine: (len(engine.prefix.sessions), engine.busy)) == (0, False)
        reply = HTTP.post(f"{serving.url}/v1/completions", json=ENDLESS)
        assert (reply.status_code, Stopped.__name__ in reply.text) == (503, True)
