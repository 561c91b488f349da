"""Who may ask the server, by which name and in which form; clients that keep connections and send nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcache_engine.engine import EngineOptions
from kvcache_engine.errors import RequestError
from kvcache_engine.serve import ServeOptions
from kvcache_engine.serve.connections import Shedding, descriptors

from .serve_rig import HTTP, PROMPT, Serving, asked_in_process, served, until

OPTIONS = EngineOptions(2, 128, 16)
KEY = "a key, long and random"
ASKED = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
BODY = json.dumps(ASKED).encode()


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    options = ServeOptions(api_key=KEY, client_timeout=0.3, allowed_hosts=("models.example",))
    with served(OPTIONS, options) as running:
        yield running


def raw(serving: Serving, *parts: bytes) -> bytes:
    """What the server says to these bytes, until it closes the connection."""
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        said = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
            while more := client.recv(1 << 16):
                said += more
        return said


def post(serving: Serving, **headers: str) -> httpx.Response:
    given = {"content_type": "application/json", "authorization": f"Bearer {KEY}", **headers}
    found = {name.replace("_", "-"): value for name, value in given.items() if value}
    return HTTP.post(f"{serving.url}/v1/completions", content=BODY, headers=found)


# Keys.


@pytest.mark.parametrize(
    ("path", "given"),
    [
        *((path, "") for path in ("/v1/completions", "/v1/models", "/metrics", "/", "/nothing")),
        *(("/v1/models", given) for given in ("Bearer", KEY, f"Basic {KEY}", "Bearer \xe9")),
        *(("/v1/completions", given) for given in (f"Bearer {KEY}x", f"Bearer {KEY[:-1]}")),
    ],
)
def test_without_the_key_there_is_nothing_to_be_had(serving: Serving, given: str, path: str) -> None:
    headers = {b"authorization": given.encode("latin-1")} if given else {}
    reply = HTTP.get(f"{serving.url}{path}", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


def test_two_keys_are_none(serving: Serving) -> None:
    line = f"Authorization: Bearer {KEY}\r\n".encode()
    assert (
        raw(serving, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n", line, line, b"\r\n")[9:12] == b"401"
    )


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_key_all_is_served(serving: Serving, scheme: str) -> None:
    assert post(serving, authorization=f"{scheme} {KEY}").status_code == 200
    for path in ("/v1/models", "/metrics", "/"):
        reply = HTTP.get(f"{serving.url}{path}", headers={"authorization": f"{scheme} {KEY}"})
        assert reply.status_code == 200


def test_health_tells_those_without_the_key_nothing_but_that(serving: Serving) -> None:
    assert HTTP.get(f"{serving.url}/health").json() == {"status": "ok"}
    known = HTTP.get(f"{serving.url}/health", headers={"authorization": f"Bearer {KEY}"}).json()
    assert known["running"] == 0


@pytest.mark.parametrize("key", ["", " ", "a ", "a\nb", "\x00", "clé"])
def test_a_key_that_no_header_can_have_is_refused(key: str) -> None:
    with pytest.raises(RequestError, match="API key"):
        ServeOptions(api_key=key)


def test_the_key_is_in_no_repr() -> None:
    assert KEY not in repr(ServeOptions(api_key=KEY))


# Hosts.


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "[::1]:9")),
        *((name, 200) for name in ("localhost.", "localhost.:8000", "[0:0:0:0:0:0:0:1]:8000")),
        *((name, 200) for name in ("models.example", "Models.Example:443", "models.example.:443")),
        *(
            (name, 403)
            for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1")
        ),
        *((name, 403) for name in ("xlocalhost", "models.example.evil", "localhost..", "*", "")),
        *((name, 403) for name in ("[::2]", "[::1", ":80")),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_only_names_of_the_server_are_answered(serving: Serving, host: str, status: int, path: str) -> None:
    """A page that was loaded from a name of somebody else's may not ask, with the key or without."""
    asked = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    assert int(raw(serving, asked.encode())[9:12]) == status


def test_a_client_of_http_1_0_has_no_host(serving: Serving) -> None:
    assert raw(serving, b"GET /health HTTP/1.0\r\n\r\n")[9:12] == b"200"


@pytest.mark.parametrize(
    ("listening", "host", "served"),
    [
        ("0.0.0.0", "10.1.2.3:8000", True),
        ("0.0.0.0", "localhost", True),
        ("0.0.0.0", "[fe80::1]:80", True),
        ("0.0.0.0", "box:80", True),
        ("0.0.0.0", "evil.example", False),
        ("::", "10.1.2.3", True),
        ("::", "evil.example", False),
        ("10.1.2.3", "10.1.2.3:8000", True),
        ("10.1.2.3", "localhost", False),
        ("10.1.2.3", "10.1.2.4", False),
        ("localhost", "localhost", True),
    ],
)
def test_what_it_listens_on_says_which_names_it_has(
    monkeypatch: pytest.MonkeyPatch, listening: str, host: str, served: bool
) -> None:
    from kvcache_engine.serve.guard import HostGuard, hosts_of

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    reply = asked_in_process(HostGuard(app, hosts_of(listening)), "/", headers={"host": host})
    assert (reply.status_code == 200) == served
    for allowed in ("*", f"{host.upper()}."):
        assert asked_in_process(HostGuard(app, [allowed]), "/", headers={"host": host}).status_code == 200


# Forms of bodies.


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonx", 415),
        ("", 415),
    ],
)
def test_a_body_has_to_say_that_it_is_json(serving: Serving, kind: str, status: int) -> None:
    """A page of another site can send all but this without asking the server first."""
    assert post(serving, content_type=kind).status_code == status


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
HEAD = (
    b"POST /v1/completions HTTP/1.%d\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer " + KEY.encode() + b"\r\n%b\r\n"
)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
AMBIGUOUS: dict[str, tuple[int, bytes, bytes]] = {
    "both lengths": (1, LENGTH + b"Transfer-Encoding: chunked\r\n", CHUNKED),
    "both, the other way round": (1, b"Transfer-Encoding: chunked\r\n" + LENGTH, CHUNKED),
    "two lengths": (1, LENGTH + b"Content-Length: 1\r\n", BODY),
    "a length that is none": (1, b"Content-Length: +5\r\n", BODY),
    "chunks of HTTP/1.0": (0, b"Transfer-Encoding: chunked\r\n", CHUNKED),
    "an unknown encoding": (1, b"Transfer-Encoding: identity\r\n", BODY),
    "chunked twice": (1, b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", CHUNKED),
    "a space before the colon": (1, b"Content-Length : %d\r\n" % len(BODY), BODY),
}


@pytest.mark.parametrize(("minor", "lengths", "body"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_body_whose_end_is_not_certain_is_refused_and_the_connection_closed(
    serving: Serving, minor: int, lengths: bytes, body: bytes
) -> None:
    """What follows would be another request to one of two servers, and a part of the body to the other."""
    following = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    said = raw(serving, HEAD % (minor, lengths) + body + following)  # at once: what is unread resets
    assert said.count(b"HTTP/1.1 ") == 1
    assert said[9:12] in (b"400", b"501")


def test_a_body_in_chunks_is_read(serving: Serving) -> None:
    closing = b"Transfer-Encoding: chunked\r\nConnection: close\r\n"
    assert raw(serving, HEAD % (1, closing), CHUNKED)[9:12] == b"200"


# Clients that send nothing more.


@pytest.mark.parametrize(
    "begun", [b"", b"GET", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "]
)
def test_who_does_not_send_a_whole_head_is_cut_off(serving: Serving, begun: bytes) -> None:
    assert raw(serving, begun) == b""


def test_a_head_that_comes_byte_by_byte_is_cut_off_all_the_same(serving: Serving) -> None:
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(6000):
                client.sendall(b"X")
                time.sleep(0.01)


def test_the_second_head_of_a_connection_has_no_longer(serving: Serving) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert raw(serving, first, b"GET /hea").count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("lengths", [LENGTH, b"Transfer-Encoding: chunked\r\n"])
def test_a_body_that_stops_on_its_way_is_refused_and_the_connection_closed(
    serving: Serving, lengths: bytes
) -> None:
    said = raw(serving, HEAD % (1, lengths), b"1\r\n{\r\n" if b"chunked" in lengths else b"{")
    assert said.startswith(b"HTTP/1.1 408 ")
    until(lambda: not serving.http.server_state.connections)


# Descriptors that run out.


class _Waiting:
    def __init__(self, since: float, awaited: bool = True) -> None:
        self.since, self.awaited, self.transport = since, awaited, self
        self.closed = False

    def abort(self) -> None:
        self.closed = True


def test_those_that_wait_for_their_client_longest_go_first_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shedding = Shedding(3)
    oldest, asking, old, new = _Waiting(1), _Waiting(0, awaited=False), _Waiting(2), _Waiting(3)
    connections: set[Any] = {oldest, asking, old}
    with caplog.at_level(logging.WARNING):
        shedding.make_room(connections)
        assert not caplog.records
        connections.add(new)
        shedding.make_room(connections)
        assert connections == {asking, old, new}
        assert oldest.closed
        shedding.make_room(connections, 1)
        assert connections == {asking}
        shedding.make_room(connections, 0)
        assert connections == {asking}, "requests under way stay"
    assert len(caplog.records) == 1


def test_connections_leave_descriptors_for_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, least in ((64, 4), (1024, 700), (1 << 20, 1 << 19)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        most, spare = descriptors()
        assert least <= most <= max(limit - spare, 4)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert descriptors()[0] >= 1 << 20


CROWDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from kvcache_engine.command.main import main
main()
"""


@contextlib.contextmanager
def command(log: Path, *options: str, **environment: str) -> Iterator[str]:
    """``kvcache serve`` with 64 descriptors; its URL. What it says is in ``log``."""
    line = [sys.executable, "-c", CROWDED, "serve", "--backend", "numpy", "--port", "0", *options]
    with (
        log.open("wb") as errors,
        subprocess.Popen(line, stderr=errors, env={**os.environ, **environment}) as process,
    ):
        try:
            until(lambda: b"http://" in log.read_bytes() or process.poll() is not None)
            found = re.search(r"on http://.*:(\d+)", log.read_text())
            assert found, log.read_text()
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            process.terminate()
            process.wait(timeout=60)


posix = pytest.mark.skipif(os.name != "posix", reason="limits of open files are POSIX")


@posix
def test_health_answers_when_descriptors_run_out_and_the_log_has_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with command(log, KVCACHE_API_KEY=KEY) as url, contextlib.ExitStack() as stack:
        address = "127.0.0.1", int(url.rpartition(":")[2])
        for _ in range(150):
            client = stack.enter_context(socket.create_connection(address, timeout=60))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        for _ in range(3):
            assert HTTP.get(f"{url}/health").json() == {"status": "ok"}
        assert HTTP.get(f"{url}/v1/models").status_code == 401, "the environment has a key"
    said = log.read_text()
    assert said.count("limit of open files") == 1
    assert "Traceback" not in said
    assert "--api-key" not in said
    assert KEY not in said
    assert len(said.splitlines()) < 10


@posix
def test_a_server_that_others_reach_without_a_key_says_so(tmp_path: Path) -> None:
    log, host = tmp_path / "log", "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    with command(log, "--host", host) as url:
        assert HTTP.get(f"{url}/v1/models").status_code == 200
    assert (
        log.read_text().count(f"anyone who can reach {host} can use the model; set a key with --api-key") == 1
    )
