"""Sessions of agents over HTTP: named in requests of completions and chats, managed below /v1/sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import httpx

from kvcache_engine.engine import EngineOptions
from kvcache_engine.serve import ServeOptions

from .serve_rig import HTTP, PROMPT, Serving, gated, opened, served, until

MORE = PROMPT + " Make thee an ark of gopher wood."
JSON = {"content-type": "application/json"}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    options = EngineOptions(max_sequences=2, capacity=160, block_size=16)
    with served(options, opened=lambda engine: opened(engine, [tmp_path])) as serving:
        yield serving


def call(serving: Serving, method: str, path: str = "", body: Any = None, **headers: str) -> httpx.Response:
    content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"{serving.url}/v1/sessions{path}"
    return HTTP.request(method, url, content=content, headers=({} if body is None else JSON) | named)


def ask(serving: Serving, prompt: str = PROMPT, **body: Any) -> int:
    """How many of the prompt's tokens were cached."""
    found = serving.complete(prompt=prompt, max_tokens=4, extra_body=body)
    return int(found.usage.prompt_tokens_details.cached_tokens)


def test_sessions_are_listed_inspected_and_closed(serving: Serving) -> None:
    assert call(serving, "GET").json() == {"object": "list", "data": []}
    ask(serving, MORE, session_id="agent/7")
    ask(serving, prompt_cache_key="by OpenAI's name")
    user = [{"role": "user", "content": PROMPT}]
    serving.chat(messages=user, max_tokens=2, extra_body={"session_id": "agent/7", "prompt_cache_key": "x"})
    listed = call(serving, "GET").json()["data"]
    assert [each["id"] for each in listed] == ["by OpenAI's name", "agent/7"]
    found = call(serving, "GET", "/agent%2F7").json()
    assert (found["object"], found["requests"], found["running"], found["closed"]) == ("session", 2, 0, False)
    assert found["tokens"] > found["own_tokens"] > 0
    assert found["nbytes"]["device"] > found["own_nbytes"]["device"] > 0
    closed = call(serving, "POST", "/agent/7/close", {})
    assert (closed.status_code, closed.json()["closed"]) == (200, True)
    ranks = serving.ask(lambda engine: {n.data.rank for n in engine.prefix.tree.radix_tree if n.data})
    assert ranks == {0, 35}
    ask(serving, session_id="agent/7")
    assert call(serving, "GET", "/agent/7").json()["closed"] is False


def test_a_deleted_session_is_gone_from_the_folder_too(serving: Serving) -> None:
    ask(serving, session_id="one")
    ask(serving, MORE, session_id="two")
    serving.ask(lambda engine: engine.prefix.flush())
    assert call(serving, "DELETE", "/two").json() == {
        "id": "two",
        "object": "session.deleted",
        "deleted": True,
    }
    serving.ask(lambda engine: (engine.prefix.flush(), engine.prefix.evict()))
    whole = serving.ask(lambda engine: len(engine.tokenizer.encode(PROMPT)))
    assert 0 < ask(serving, MORE) <= whole, "of the first one's prompt"
    assert call(serving, "DELETE", "/two").status_code == 404


def test_a_session_is_retained_and_its_next_use_expected(serving: Serving) -> None:
    ask(serving, session_id="one")
    body = {"cache_retention": [{"priority": 100, "duration": 60}], "next_use": 30}
    assert call(serving, "POST", "/one", body).status_code == 200

    def kept(engine: Any) -> set[tuple[int, int]]:
        now = engine.prefix.tree.clock
        entries = [node.data for node in engine.prefix.tree.radix_tree if node.data]
        return {(entry.rank, round((now - entry.used) / 1e6)) for entry in entries}

    assert serving.ask(kept) == {(100, 30)}
    ask(serving, MORE, session_id="one", next_use=90, cache_retention=[{"priority": 100}])
    assert (100, 90) in serving.ask(kept)
    for wrong, param in (
        ({"next_use": -1}, "next_use"),
        ({"next_use": True}, "next_use"),
        ({"cache_retention": 7}, "cache_retention"),
        ({"priority": 7}, "priority"),
    ):
        found = call(serving, "POST", "/one", wrong)
        assert (found.status_code, found.json()["error"]["param"]) == (400, param)
    assert call(serving, "POST", "/one", b"[]").status_code == 400
    assert serving.post({"prompt": PROMPT, "next_use": "soon"}).json()["error"]["param"] == "next_use"
    assert (100, 90) in serving.ask(kept)


def test_tenants_see_only_their_own_sessions(serving: Serving) -> None:
    ask(serving, session_id="one", cache_salt="a&b")
    ask(serving, session_id="one")
    mine = {"x_cache_salt": "a%26b"}
    assert [each["requests"] for each in call(serving, "GET", **mine).json()["data"]] == [1]
    for method, path, body in (
        ("GET", "/one", None),
        ("POST", "/one", {}),
        ("POST", "/one/close", {}),
        ("DELETE", "/one", None),
    ):
        assert call(serving, method, path, body, x_cache_salt="another").status_code == 404
    assert call(serving, "GET", x_cache_salt="another").json()["data"] == []
    assert call(serving, "DELETE", "/one", **mine).status_code == 200
    assert call(serving, "GET", "/one").status_code == 200
    assert ask(serving, cache_salt="a&b") == 0
    assert ask(serving) > 0
    assert call(serving, "GET", x_cache_salt="x" * 300).status_code == 400


@pytest.mark.parametrize("path", ["/one", "/one/close"])
def test_a_page_of_another_site_changes_nothing(serving: Serving, path: str) -> None:
    ask(serving, session_id="one")
    assert call(serving, "POST", path, {}, content_type="text/plain").status_code == 415
    assert call(serving, "POST", path).status_code == 415
    assert call(serving, "GET", "/one").json()["closed"] is False
    assert call(serving, "PUT", path, {}).status_code == 405


def test_a_running_request_is_seen_and_its_session_may_be_deleted(serving: Serving) -> None:
    with gated(serving) as gate:
        stream = serving.complete(prompt=PROMPT, max_tokens=40, stream=True, extra_body={"session_id": "one"})
        gate.let(3)
        until(lambda: call(serving, "GET", "/one").status_code == 200)
        assert call(serving, "GET", "/one").json()["running"] == 1
        assert call(serving, "DELETE", "/one").status_code == 200
    assert sum(1 for _ in stream) > 1
    assert call(serving, "GET").json()["data"] == []
    assert ask(serving) == 0


def test_where_cached_tokens_are_hidden_sessions_do_not_tell_either() -> None:
    with served(EngineOptions(max_sequences=2, capacity=160), ServeOptions(show_cached=False)) as serving:
        serving.complete(prompt=PROMPT, max_tokens=4, extra_body={"session_id": "one"})
        found = call(serving, "GET", "/one").json()
        assert {*found} == {"id", "object", "requests", "running", "closed", "idle"}


@pytest.mark.parametrize("name", ["session_id", "prompt_cache_key"])
@pytest.mark.parametrize("value", ["", "x" * 257, 7])
def test_what_is_no_name_of_a_session_is_refused(serving: Serving, name: str, value: Any) -> None:
    found = serving.post({"prompt": PROMPT, name: value})
    assert (found.status_code, found.json()["error"]["param"]) == (400, name)
