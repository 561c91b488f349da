"""kvcache_engine.serve: OpenAI's own client over loopback, against the bundled model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import html
import itertools
import json
import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import httpx
import openai

import ml
from kvcache_engine.engine import Engine, EngineOptions, Failed
from kvcache_engine.loading import bundled_model
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.serve import ServeOptions, Worker, make_app, template_of
from kvcache_engine.tokenizer import Tokenizer

from .serve_rig import HTTP, NAME, PROMPT, Serving, app_of, asked_in_process, gated, opened, served, until

LIMIT = 120
USER = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def running() -> Iterator[Serving]:
    options = EngineOptions(max_sequences=4, capacity=LIMIT, prefill_chunk=64)
    with served(options, ServeOptions(max_waiting=6)) as serving:
        yield serving


@pytest.fixture
def serving(running: Serving) -> Iterator[Serving]:
    """Whatever a test does, no request and no sequence is left after it."""
    yield running
    assert running.worker.idle.wait(timeout=60)
    assert running.ask(lambda engine: (len(engine.prefix.sessions), engine.busy)) == (0, False)


@pytest.fixture(scope="module")
def greedy() -> Iterator[Callable[[str, int], str]]:
    """What the model says, greedy and alone."""
    with opened(EngineOptions()) as engine:
        yield lambda prompt, count: engine.complete([prompt], GenerationOptions(count))[0].text


# Completions and chats.


def test_a_completion_is_what_the_model_says_and_is_computed_once(serving: Serving, greedy: Any) -> None:
    count = len(Tokenizer.load(bundled_model()).encode(PROMPT))
    for _ in range(2):
        found = serving.complete(prompt=PROMPT, max_tokens=12)
        assert found.choices[0].text == greedy(PROMPT, 12)
        kind = found.object, found.model, found.choices[0].finish_reason
        assert kind == ("text_completion", NAME, "length")
        usage = found.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (count, 12, count + 12)
    assert usage.prompt_tokens_details.cached_tokens == count - 1


def test_a_salt_keeps_what_was_computed_from_others(serving: Serving, greedy: Any) -> None:
    """As vLLM's cache_salt: the tokens are the same, and none are cached for a stranger."""
    prompt, cached = "And the salt of the covenant", []
    for salt in ("a", "a", "b", "c", "b"):
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "cache_salt": salt}
        reply = serving.post(body).json()
        assert reply["choices"][0]["text"] == greedy(prompt, 3)
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    count = reply["usage"]["prompt_tokens"]
    assert cached == [0, count - 1, 0, 0, count - 1]


def test_a_request_says_how_long_what_it_computes_is_kept(serving: Serving, greedy: Any) -> None:
    prompt = "And the ark rested in the seventh month"
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0}
    for good in ([], [{"begin": 0, "end": 4, "priority": 90, "duration": 60}, {"begin": 4, "priority": 20}]):
        reply = serving.post({**body, "cache_retention": good}).json()
        assert reply["choices"][0]["text"] == greedy(prompt, 3)
    for wrong in (
        {"priority": 90}, [7], [{"prio": 90}], [{"priority": 101}], [{"duration": "9"}], [{"begin": None}],
        [{"begin": 0}, {"begin": 4}],
    ):  # fmt: skip
        reply = serving.post({**body, "cache_retention": wrong})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "cache_retention"


def test_a_stream_brings_the_same_text_in_parts(serving: Serving, greedy: Any) -> None:
    options = {"include_usage": True}
    *chunks, total = serving.complete(prompt=PROMPT, max_tokens=12, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(PROMPT, 12)
    assert len(chunks) > 4
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert (total.choices, total.usage.completion_tokens) == ([], 12)


def test_many_at_once_are_answered_as_each_alone(serving: Serving, greedy: Any) -> None:
    """More than there are sequences; they begin alike, and some are streamed."""
    names = ("Noah", "Moses", "Adam", "Jonah", "Abram", "Lot")  # as many as may wait
    prompts = [f"And God said unto {name}," for name in names]

    def ask(i: int) -> str:
        found = serving.complete(prompt=prompts[i], max_tokens=10, stream=bool(i % 2))
        return "".join(chunk.choices[0].text for chunk in (found if i % 2 else [found]))

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, range(len(prompts)))) == [greedy(prompt, 10) for prompt in prompts]


def test_several_prompts_and_choices(serving: Serving, greedy: Any) -> None:
    tokenizer = Tokenizer.load(bundled_model())
    prompts = [PROMPT, "In the beginning"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for asked in (prompts, ids):
        found = serving.complete(prompt=asked, max_tokens=5, n=2)
        assert [choice.text for choice in found.choices] == [greedy(p, 5) for p in prompts for _ in range(2)]
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.prompt_tokens == sum(map(len, ids))


def test_a_seed_fixes_the_text_and_each_choice_has_its_own(serving: Serving) -> None:
    sampled = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.2, "seed": 7, "n": 2}
    first, second = ([c.text for c in serving.complete(**sampled).choices] for _ in range(2))
    assert first == second
    assert first[0] != first[1]


def test_a_stop_string_ends_the_text(serving: Serving, greedy: Any) -> None:
    whole = greedy(PROMPT, 12)
    stop = whole.split()[3]
    (choice,) = serving.complete(prompt=PROMPT, max_tokens=12, stop=[stop]).choices
    assert (choice.text, choice.finish_reason) == (whole.split(stop)[0], "stop")


def test_a_chat_goes_on_with_its_messages(serving: Serving, greedy: Any) -> None:
    """The bundled model has no chat template: it goes on with the texts."""
    parts = [{"type": "text", "text": text} for text in ("And God ", "said")]
    messages = [{"role": "system", "content": "In the beginning"}, {"role": "user", "content": parts}]
    found = serving.chat(messages=messages, max_completion_tokens=8)
    message = found.choices[0].message
    assert (message.role, message.content) == ("assistant", greedy("In the beginning\nAnd God said", 8))
    assert found.object == "chat.completion"


def test_a_chat_is_streamed(serving: Serving, greedy: Any) -> None:
    first, *rest = serving.chat(messages=USER, max_tokens=8, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == greedy(PROMPT, 8)
    assert rest[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_tells_log_probabilities_of_its_tokens(serving: Serving, stream: bool) -> None:
    """Each token, its place in the text, and the likeliest; nothing for a request that does not ask."""
    asked = {"prompt": PROMPT, "max_tokens": 8, "n": 2}
    found = serving.complete(**asked, logprobs=3, stream=stream)
    choices = [one for part in (found if stream else [found]) for one in part.choices]
    for choice in range(2):
        mine = [one for one in choices if one.index == choice]
        parts = [one.logprobs for one in mine if one.logprobs]
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        tops = [top for part in parts for top in part.top_logprobs]
        assert "".join(tokens) == "".join(one.text for one in mine)
        offsets = [offset for part in parts for offset in part.text_offset]
        assert offsets == [len("".join(tokens[:i])) for i in range(8)]
        assert [len(top) for top in tops] == [3] * 8  # greedy: the token is the likeliest
        assert values == [max(top.values()) for top in tops]
        assert values == [top[token] for top, token in zip(tops, tokens, strict=True)]
        assert all(sum(map(math.exp, top.values())) <= 1 for top in tops)
    assert serving.complete(**asked).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokens_offset_is_its_place_in_the_text_that_is_shown(stream: bool) -> None:
    """As SentencePiece's decoder shows it: without special tokens, and a first word without its blank."""

    @contextlib.contextmanager
    def speaking() -> Iterator[Engine]:
        with opened(EngineOptions(max_sequences=4, capacity=LIMIT)) as engine:
            engine.tokenizer = sentencepiece(engine.model.config.vocab_size)
            yield engine

    asked = {"prompt": [[0], [0, 1]], "n": 2, "max_tokens": 16, "ignore_eos": True, "stream": stream}
    sampled = {"temperature": 2, "seed": 0, "logprobs": 0}
    with Worker(speaking) as worker:
        reply = asked_in_process(app_of(worker), "/v1/completions", {**asked, **sampled}).text
    events = [line.removeprefix("data: ") for line in reply.split("\n\n") if line not in ("", "data: [DONE]")]
    choices = [one for event in events for one in json.loads(event)["choices"]]
    for index in range(4):
        mine = [one for one in choices if one["index"] == index]
        text, parts = "".join(one["text"] for one in mine), [one["logprobs"] for one in mine]
        tokens, offsets = (
            [each for part in parts if part for each in part[name]] for name in ("tokens", "text_offset")
        )
        assert any(token.startswith("<") for token in tokens)
        shown = ["" if token.startswith("<") else token for token in tokens]
        if index < 2:  # behind nothing that is shown
            first = next(i for i, token in enumerate(shown) if token)
            shown[first] = shown[first].removeprefix(" ")
        assert [text[i:j] for i, j in itertools.pairwise([*offsets, len(text)])] == shown


def sentencepiece(size: int) -> Tokenizer:
    """A word for each id, a special token for each third."""
    tokenizers = pytest.importorskip("tokenizers")
    names = [f"<{i}>" if i % 3 == 0 else f"▁{i}" for i in range(size)]
    words = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0])
    backend = tokenizers.Tokenizer(words)
    backend.add_special_tokens(names[::3])
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tells_log_probabilities_with_bytes(serving: Serving, greedy: Any, stream: bool) -> None:
    found = serving.chat(messages=USER, max_tokens=8, logprobs=True, top_logprobs=2, stream=stream)
    choices = [one for part in (found if stream else [found]) for one in part.choices]
    content = [token for one in choices if one.logprobs for token in one.logprobs.content]
    assert bytes(byte for token in content for byte in token.bytes).decode() == greedy(PROMPT, 8)
    assert [len(token.top_logprobs) for token in content] == [2] * 8
    for token in content:
        first = token.top_logprobs[0]
        assert (first.token, first.logprob, first.bytes) == (token.token, token.logprob, token.bytes)


def test_a_chat_without_likeliest_tokens_tells_of_its_own(serving: Serving) -> None:
    (choice,) = serving.chat(messages=USER, max_tokens=3, logprobs=True).choices
    assert [token.top_logprobs for token in choice.logprobs.content] == [[], [], []]


def test_without_a_limit_a_chat_ends_where_its_room_does(serving: Serving) -> None:
    found = serving.chat(messages=[{"role": "user", "content": "And " * 30}])
    assert found.usage.total_tokens <= LIMIT
    assert found.choices[0].finish_reason in ("length", "stop")


def test_what_the_guide_shows_can_be_asked(serving: Serving, capsys: Any) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(block.replace("http://127.0.0.1:8000", serving.url), {})
    assert capsys.readouterr().out.strip()
    asked = re.findall(r"^curl .*/v1/([\w/]+) .*\n  -d '(.*)'$", page, re.MULTILINE)
    assert [path for path, _ in asked] == ["completions", "chat/completions"]
    for path, body in asked:
        assert serving.post(json.loads(body), path).status_code == 200


# Models, and what is refused.


def test_there_is_one_model(serving: Serving) -> None:
    assert [model.id for model in serving.models.list()] == [NAME]
    assert serving.models.retrieve(NAME).owned_by == "kvcache"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        serving.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as caught:
        serving.complete(model="other", prompt="x")
    assert caught.value.code == "model_not_found"


def test_what_does_not_fit_is_refused_in_openais_words(serving: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 120 tokens") as caught:
        serving.complete(prompt=PROMPT, max_tokens=LIMIT)
    error = caught.value
    assert (error.code, error.param, error.type) == (
        "context_length_exceeded", "max_tokens", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="Please reduce the length") as caught:
        serving.chat(messages=[{"role": "user", "content": "a " * 300}])
    assert caught.value.code == "context_length_exceeded"


FIELDS: list[tuple[str, Any, str]] = [
    ("prompt", [], "'prompt'"), ("prompt", [[]], "'prompt'"), ("prompt", [5, "a"], "'prompt'"),
    ("prompt", [99999], "token 99999"), ("prompt", [-1], "token -1"), ("max_tokens", 0, "an integer >= 1"),
    ("max_tokens", 10**4300 - 1, "and <= 9223372036854775807"), ("top_k", 10**400, "<= 2147483647"),
    *(("cache_salt", salt, "a string of 1 to 256 characters") for salt in ("", 7, "x" * 257)),
    ("cache_retention", [{"duration": 10**400}], "a number above 9223372036854775807"),
    ("n", 11, "11 answers (n=11); at most 10 can run and wait"),
    ("max_tokens", "5", "an integer >= 1"), ("temperature", 3, "a number in [0, 2]"),
    ("temperature", "y" * 9000, "a number in"), ("top_p", 0, "a number in"),
    ("min_p", 2, "a number in"), ("n", 0, ">= 1 and <= 32"),
    ("seed", "s", "an integer"), ("stop", ["a"] * 5, "up to 4"), ("stop", [""], "non-empty"),
    ("stop", "", "non-empty"), ("stop", False, "must be a non-empty string"),
    ("stream", "yes", "true or false"),
    ("ignore_eos", 1, "true or false"), ("stream_options", 5, "include_usage"),
    ("stream_options", {"continuous_usage_stats": True}, "include_usage"),
    ("logprobs", 21, ">= 0 and <= 20"), ("logprobs", True, "an integer"),
]  # fmt: skip
BAD: list[tuple[Any, str | None, str]] = [
    *(({"prompt": "x", field: value}, field, message) for field, value, message in FIELDS),
    (b"{", None, "not valid JSON"),
    (b"[1]", None, "must be a JSON object"),
    ({}, "prompt", "'prompt' must be a non-empty string"),
    ({"prompt": ["x"] * 20, "n": 2}, "n", "at most 32 answers"),
    (b'{"prompt": "\\ud800"}', "prompt", "U+D800, half of a surrogate pair"),
    (b'{"prompt": "\xed\xa0\x80"}', None, "not valid JSON"),
    (b'{"prompt": "x", "stop": ["\\udcff"]}', "stop", "half of a surrogate pair"),
    (b'{"prompt": "x", "\\ud800": 1}', None, "the name of a field is not valid Unicode"),
    (b'{"prompt": "x", "model": "\\ud800"}', "model", "half of a surrogate pair"),
]
NOT_SERVED: dict[str, dict[str, Any]] = {
    "completions": {
        "top_logprobs": 1, "presence_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 3,
        "guided_json": {"type": "object"}, "guided_regex": "a+", "structured_outputs": {"choice": ["a"]},
        "best_of": 2, "echo": True, "suffix": "x", "messages": [], "max_completion_tokens": 5, "n_predict": 3,
    },
    "chat/completions": {
        "tool_choice": "required", "tools": [{"type": "function"}],
        "modalities": ["text", "audio"], "audio": {"voice": "alloy"}, "prediction": {"type": "content"},
        "response_format": {"type": "json_object"}, "prompt": "x", "reasoning_effort": "high", "store": True,
    },
}  # fmt: skip
IDLE: dict[str, Any] = {
    "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "repetition_penalty": 1.0,
    "min_tokens": 0, "logit_bias": {}, "best_of": 1, "user": "me", "metadata": {"a": "b"},
    "guided_json": None, "stop": None, "model": None, "stream_options": {"include_usage": False},
}  # fmt: skip
IDLE_MESSAGE: dict[str, Any] = {
    "role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "name": "Noah"
}  # fmt: skip
BAD_MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    (["x"], "messages[0]"),
    ([{"role": "user", "content": "a"}, {"content": "x"}], "messages[1]"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0]"),
    ([{"role": "user"}], "messages[0]"),
    ([{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        *(("completions", *row) for row in BAD),
        *(("chat/completions", {"messages": value}, param, "") for value, param in BAD_MESSAGES),
        ("chat/completions", {"messages": USER, "logprobs": 1}, "logprobs", "true or false"),
        ("chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs", "requires 'logprobs'"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(
    serving: Serving, path: str, body: Any, param: str | None, message: str
) -> None:
    reply = serving.post(body, path)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize("path", NOT_SERVED)
def test_what_would_change_an_answer_and_is_not_served_is_refused(serving: Serving, path: str) -> None:
    for field, value in NOT_SERVED[path].items():
        text = {"messages": USER} if "chat" in path else {"prompt": "x"}
        reply = serving.post({**text, "max_tokens": 1, field: value}, path)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_what_asks_for_nothing_is_no_mistake(serving: Serving) -> None:
    assert serving.post({"prompt": "x", "max_tokens": 1, **IDLE}).status_code == 200
    asked = {"messages": [IDLE_MESSAGE], "max_tokens": 1, "tool_choice": "auto", "modalities": ["text"]}
    assert serving.post(asked, "chat/completions").status_code == 200


def test_ignore_eos_goes_on_to_the_limit(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    model = serving.worker.engine.model
    every_token = tuple(range(model.config.vocab_size))
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, eos_ids=every_token))
    replies = [
        serving.post({"prompt": "x", "max_tokens": 4, "ignore_eos": ignored}) for ignored in (False, True)
    ]
    assert [reply.json()["usage"]["completion_tokens"] for reply in replies] == [0, 4]


def test_a_prompt_far_too_long_keeps_nobody_waiting(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7.8 MB the beginning is tokenized, in a thread."""
    tokenizer: Any = serving.worker.engine.tokenizer
    looked_at: list[tuple[int, bool]] = []
    real = tokenizer._ids

    def ids(text: str) -> Any:
        looked_at.append((len(text), threading.current_thread() is asyncio_thread))
        return real(text)

    asyncio_thread = serving.thread
    monkeypatch.setattr(tokenizer, "_ids", ids)
    text = "And God said unto Noah, " * 325_000
    for body, path in (
        ({"prompt": text}, "completions"),
        ({"messages": [{"role": "user", "content": text}]}, "chat/completions"),
    ):
        reply = serving.post(body, path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "you requested at least " in reply.text
    assert sum(size for size, _ in looked_at) < 200_000
    assert not any(in_loop for _, in_loop in looked_at)


def test_who_asks_before_may_be_kept_secret(serving: Serving) -> None:
    """``usage`` and /health without what was found in the cache."""
    app = app_of(serving.worker, show_cached=False)
    asked = {"prompt": PROMPT, "max_tokens": 2}
    for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        text = asked_in_process(app, "/v1/completions", {**asked, **extra}).text
        assert '"completion_tokens":2' in text.replace(" ", "")
        assert "cached" not in text
    health = asked_in_process(app, "/health").json()
    assert health.keys() == {"status", "running", "waiting", "sequences", "limit"}


def test_the_index_says_what_it_is_and_where_to_ask(serving: Serving) -> None:
    reply = HTTP.get(f"{serving.url}/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert f"{LIMIT} tokens at most" in reply.text
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health"):
        assert f"<code>{path}</code>" in reply.text
    line = html.unescape(reply.text.split("<pre>")[1].split("</pre>")[0])
    assert f"{serving.url}/v1/completions" in line
    assert "data: [DONE]" in serving.post(json.loads(line.split("-d '")[1].rstrip("'"))).text


def test_a_name_cannot_write_the_index(running: Serving) -> None:
    app = make_app(running.worker, "<script>'", template_of(bundled_model()))
    page = asked_in_process(app, "/").text
    assert "<script>" not in page
    assert page.split("-d '")[1].split("</pre>")[0].count("'") == 1


def test_other_paths_methods_and_sizes(serving: Serving) -> None:
    served = "/v1/responses is not served; this server has /v1/chat/completions, /v1/completions,"
    for path, method, status, told in (
        ("/v1/responses", "POST", 404, served),
        ("/v1/completions", "GET", 405, ""),
    ):
        reply = httpx.request(method, f"{serving.url}{path}")
        assert reply.status_code == status
        assert reply.json()["error"]["message"].startswith(told)
        assert reply.headers.get("allow") == ("POST" if status == 405 else None)
    assert serving.post(b"x" * (9 << 20)).status_code == 413


# What goes wrong while answering.


def test_a_client_that_leaves_a_stream_ends_its_request(serving: Serving) -> None:
    before, computed = serving.worker.dropped["cancelled"], serving.health()["statistics"]["generated_tokens"]
    with gated(serving) as gate:
        stream = serving.complete(prompt=PROMPT, max_tokens=100, stream=True)
        gate.let(5)
        assert next(iter(stream)).choices[0].text
        stream.close()
        until(lambda: serving.worker.dropped["cancelled"] > before)
    assert serving.worker.dropped["cancelled"] == before + 1
    assert serving.worker.idle.wait(timeout=60)
    assert serving.health()["statistics"]["generated_tokens"] - computed < 100


def test_a_client_that_leaves_while_it_waits_ends_its_request(serving: Serving) -> None:
    before = serving.worker.dropped["cancelled"]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100}).encode()
    lines = "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", "", ""
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *lines)).encode()
    address = serving.url.removeprefix("http://").split(":")
    with gated(serving) as gate:
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head + body)
            gate.let(3)
        until(lambda: serving.worker.dropped["cancelled"] > before)
    assert serving.worker.dropped["cancelled"] == before + 1


def test_more_than_may_wait_get_429(serving: Serving) -> None:
    """Four run, six wait; all of these are answered."""

    def holds(running: int, waiting: int) -> bool:
        found = serving.health()
        return (found["running"], found["waiting"]) == (running, waiting)

    with gated(serving) as gate, ThreadPoolExecutor(10) as pool:

        def asked(count: int) -> list[Any]:
            return [
                pool.submit(serving.complete, prompt=f"{i} {PROMPT}", max_tokens=30) for i in range(count)
            ]

        answers = asked(4)
        until(lambda: holds(0, 4))
        gate.let(6)
        assert holds(4, 0)
        answers += asked(6)
        until(lambda: holds(4, 6))
        with pytest.raises(openai.RateLimitError, match="6 requests are waiting") as caught:
            serving.complete(prompt="one more", max_tokens=30)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        gate.open()
        assert all(each.result().choices for each in answers)


def test_a_pass_that_fails_is_a_500_and_the_server_goes_on(serving: Serving, greedy: Any) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("the device failed")

    asked = {"prompt": PROMPT, "max_tokens": 5}
    serving.ask(lambda engine: setattr(engine.model, "forward", broken))
    try:
        with pytest.raises(openai.InternalServerError, match="the device failed"):
            serving.complete(**asked)
        with pytest.raises(openai.APIError, match="the device failed"):
            list(serving.complete(**asked, stream=True))
    finally:
        serving.ask(lambda engine: delattr(engine.model, "forward"))
    assert serving.complete(**asked).choices[0].text == greedy(PROMPT, 5)


def test_an_error_of_our_own_is_a_500_in_openais_words_too(running: Serving) -> None:
    def broken(messages: Any) -> Any:
        raise RuntimeError("the template failed")

    app = make_app(running.worker, NAME, broken)
    reply = asked_in_process(app, "/v1/chat/completions", {"messages": USER})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "the template failed" in reply.text


def test_a_call_that_nobody_waits_for_any_more_is_not_made(serving: Serving) -> None:
    made: list[str] = []
    held = threading.Event()
    serving.worker.post(lambda engine: held.wait(60))
    given_up = serving.worker.post(lambda engine: made.append("given up"))
    wanted = serving.worker.post(lambda engine: made.append("wanted"))
    assert given_up.cancel()
    held.set()
    wanted.result(timeout=60)
    assert made == ["wanted"]


def test_a_worker_that_has_stopped_refuses_at_once() -> None:
    with Worker(lambda: opened(EngineOptions(max_sequences=1, capacity=512))) as worker:
        inbox: Any = asyncio.Queue()

        async def ask() -> Any:
            await worker.submit([1, 2, 3], GenerationOptions(500, ignore_eos=True), inbox)
            await asyncio.to_thread(worker.__exit__)
            while not isinstance(event := (await asyncio.wait_for(inbox.get(), 60))[1], Failed):
                pass
            return event.error

        assert "the engine has stopped" in str(asyncio.run(ask()))
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        worker.post(lambda engine: None).result(timeout=60)


def test_a_model_that_cannot_be_opened_is_told_to_whoever_starts_it() -> None:
    def broken() -> Any:
        raise ml.DeviceError("no such device")

    with pytest.raises(ml.DeviceError, match="no such device"), Worker(broken):
        pass
