"""examples/server: OpenAI's own client over loopback, against the bundled model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx
import openai
import uvicorn

import ml
from kvcache.runner.engine import Engine, EngineOptions, Failed
from kvcache.runner.generate import Generator
from kvcache.runner.loading import bundled_model, load_model
from kvcache.runner.requests import GenerationOptions
from kvcache.runner.tokenizer import Tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAME, PROMPT = "tiny", "And God said unto Noah,"
LIMIT = 120


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """The package of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("server")
        for name in [name for name in sys.modules if name.split(".")[0] == "server"]:
            del sys.modules[name]


class Serving:
    """The server at work: its worker, a client of OpenAI's, and a way to make a forward pass fail."""

    def __init__(self, worker: Any, url: str, thread: threading.Thread) -> None:
        self.worker, self.url, self.thread = worker, url, thread
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, call: Callable[[Engine], Any]) -> Any:
        return self.worker.post(call).result(timeout=60)

    def post(self, body: Any, path: str = "completions") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{self.url}/v1/{path}", content=content, timeout=60)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=60).json()
        return found


@pytest.fixture(scope="module")
def running(server: Any) -> Iterator[Serving]:
    worker_of = importlib.import_module("server.worker").Worker
    app_of = importlib.import_module("server.app").make_app
    template_of = importlib.import_module("server.template").template_of
    tokenizer = Tokenizer.load(bundled_model())
    options = EngineOptions(max_sequences=4, capacity=LIMIT, prefill_chunk=64)

    class Opened:
        """Backend and engine, in the worker's thread."""

        def __enter__(self) -> Engine:
            self.backend = ml.open_backend("numpy")
            model = load_model(bundled_model(), self.backend)
            self.engine = Engine(model, tokenizer, options)
            return self.engine

        def __exit__(self, *_: object) -> None:
            self.engine.close()
            self.backend.close()

    with worker_of(Opened, waiting=6) as worker, socket.create_server(("127.0.0.1", 0)) as listening:
        app = app_of(worker, NAME, template_of(bundled_model()))
        http = uvicorn.Server(uvicorn.Config(app, ws="none", log_level="error", lifespan="off"))
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listening]})
        thread.start()
        yield Serving(worker, f"http://127.0.0.1:{listening.getsockname()[1]}", thread)
        http.should_exit = True
        thread.join(timeout=60)


@pytest.fixture
def serving(running: Serving) -> Iterator[Serving]:
    """Whatever a test does, no request and no sequence is left after it."""
    yield running
    assert running.worker.idle.wait(timeout=60)
    assert running.ask(lambda engine: (len(engine.prefix.sessions), engine.busy)) == (0, False)


@pytest.fixture(scope="module")
def greedy() -> Callable[[str, int], str]:
    """What the model says, greedy and alone."""
    backend = ml.open_backend("numpy")
    generator = Generator(load_model(bundled_model(), backend), Tokenizer.load(bundled_model()))

    def text(prompt: str, count: int) -> str:
        return generator.complete([prompt], GenerationOptions(count))[0].text

    return text


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
        self.until(lambda: self.left == 0)

    def open(self) -> None:
        self._open = True
        self._more.set()

    @staticmethod
    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "nothing happened for a minute"
            time.sleep(0.002)


@contextlib.contextmanager
def gated(serving: Serving) -> Iterator[Gate]:
    gate = serving.ask(Gate)
    serving.ask(lambda engine: setattr(engine, "step", gate.step))
    try:
        yield gate
    finally:
        gate.open()
        serving.ask(lambda engine: delattr(engine, "step"))


# Completions.


def test_a_completion_is_what_the_model_says(serving: Serving, greedy: Any) -> None:
    found = serving.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    assert found.choices[0].text == greedy(PROMPT, 12)
    assert (found.object, found.model) == ("text_completion", NAME)
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    count = len(Tokenizer.load(bundled_model()).encode(PROMPT))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (count, 12)
    assert found.usage.total_tokens == count + 12


def test_a_stream_brings_the_same_text_in_parts(serving: Serving, greedy: Any) -> None:
    options: Any = {"include_usage": True}
    stream = serving.client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stream=True, stream_options=options
    )
    *chunks, total = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(PROMPT, 12)
    assert len(chunks) > 4
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert total.choices == []
    assert total.usage is not None
    assert total.usage.completion_tokens == 12


def test_the_same_prompt_again_is_not_computed_again(serving: Serving) -> None:
    for _ in range(2):
        found = serving.client.completions.create(model=NAME, prompt=f"{PROMPT} Behold", max_tokens=2)
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == found.usage.prompt_tokens - 1


def test_many_at_once_are_answered_as_each_alone(serving: Serving, greedy: Any) -> None:
    """More than there are sequences; they begin alike, and some are streamed."""
    names = ("Noah", "Moses", "Adam", "Jonah", "Abram", "Lot", "Aaron")
    prompts = [f"And God said unto {name}," for name in names]

    def ask(i: int) -> str:
        arguments: Any = {"model": NAME, "prompt": prompts[i], "max_tokens": 10, "temperature": 0}
        if i % 2:
            stream = serving.client.completions.create(**arguments, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)
        return str(serving.client.completions.create(**arguments).choices[0].text)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    assert answers == [greedy(prompt, 10) for prompt in prompts]


def test_several_prompts_and_choices(serving: Serving, greedy: Any) -> None:
    tokenizer = Tokenizer.load(bundled_model())
    prompts = [PROMPT, "In the beginning"]
    for asked in (prompts, [tokenizer.encode(prompt) for prompt in prompts]):
        found = serving.client.completions.create(model=NAME, prompt=asked, max_tokens=5, temperature=0, n=2)
        expected = [greedy(prompt, 5) for prompt in prompts for _ in range(2)]
        assert [choice.text for choice in found.choices] == expected
        assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)


def test_a_seed_fixes_the_text_and_each_choice_has_its_own(serving: Serving) -> None:
    sampled: Any = {"max_tokens": 12, "temperature": 1.2, "seed": 7, "n": 2}
    arguments = {"model": NAME, "prompt": PROMPT, **sampled}
    first, second = (serving.client.completions.create(**arguments) for _ in range(2))
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert first.choices[0].text != first.choices[1].text


def test_a_stop_string_ends_the_text(serving: Serving, greedy: Any) -> None:
    whole = greedy(PROMPT, 12)
    stop = whole.split()[3]
    found = serving.client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop]
    )
    assert found.choices[0].text == whole.split(stop)[0]
    assert found.choices[0].finish_reason == "stop"


# Chats.


def test_a_chat_goes_on_with_its_messages(serving: Serving, greedy: Any) -> None:
    """The bundled model has no chat template: it goes on with the texts."""
    found = serving.client.chat.completions.create(
        model=NAME,
        messages=[
            {"role": "system", "content": "In the beginning"},
            {"role": "user", "content": [{"type": "text", "text": text} for text in ("And God ", "said")]},
        ],
        max_completion_tokens=8,
        temperature=0,
    )
    message = found.choices[0].message
    assert (message.role, message.content) == ("assistant", greedy("In the beginning\nAnd God said", 8))
    assert found.object == "chat.completion"


def test_a_chat_is_streamed(serving: Serving, greedy: Any) -> None:
    stream = serving.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": PROMPT}], max_tokens=8, temperature=0, stream=True
    )
    first, *rest = list(stream)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == greedy(PROMPT, 8)
    assert rest[-1].choices[0].finish_reason == "length"


def test_without_a_limit_a_chat_ends_where_its_room_does(serving: Serving) -> None:
    found = serving.client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "And " * 30}], temperature=0
    )
    assert found.usage is not None
    assert found.usage.total_tokens <= LIMIT
    assert found.choices[0].finish_reason in ("length", "stop")


def test_a_chat_template_of_the_model_is_used(server: Any, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    template_of = importlib.import_module("server.template").template_of
    error = importlib.import_module("server.errors").ApiError
    text = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    )
    config = {"bos_token": {"content": "<s>"}, "chat_template": text}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    render = template_of(tmp_path)
    text = render([{"role": "user", "content": "Hi"}])
    assert (text.text, text.bos) == ("<s><user>Hi\n", False)
    with pytest.raises(error, match="no tools"):
        render([{"role": "tool", "content": "x"}])


# Models, and what is refused.


def test_there_is_one_model(serving: Serving) -> None:
    assert [model.id for model in serving.client.models.list()] == [NAME]
    assert serving.client.models.retrieve(NAME).owned_by == "kvcache"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        serving.client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as caught:
        serving.client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"


def test_what_does_not_fit_is_refused_in_openais_words(serving: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 120 tokens") as caught:
        serving.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=LIMIT)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="Please reduce the length") as caught:
        serving.client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a " * 300}])
    assert caught.value.code == "context_length_exceeded"


BAD: list[tuple[Any, str | None, str]] = [
    (b"{", None, "no JSON"),
    (b"[1]", None, "no JSON object"),
    ({}, "prompt", "'prompt' is a string"),
    ({"prompt": []}, "prompt", "'prompt'"),
    ({"prompt": [[]]}, "prompt", "'prompt'"),
    ({"prompt": [5, "a"]}, "prompt", "'prompt'"),
    ({"prompt": [99999]}, "prompt", "token 99999"),
    ({"prompt": [-1]}, "prompt", "token -1"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "an integer >= 1"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "an integer >= 1"),
    ({"prompt": "x", "temperature": 3}, "temperature", r"a number in [0, 2]"),
    ({"prompt": "x", "top_p": 0}, "top_p", "a number in"),
    ({"prompt": "x", "n": 0}, "n", ">= 1 and <= 32"),
    ({"prompt": ["x"] * 20, "n": 2}, "n", "32 answers at most"),
    ({"prompt": "x", "seed": "s"}, "seed", "an integer"),
    ({"prompt": "x", "stop": ["a"] * 5}, "stop", "up to 4"),
    ({"prompt": "x", "stop": [""]}, "stop", "none empty"),
    ({"prompt": "x", "stop": ""}, "stop", "none empty"),
    ({"prompt": "x", "stop": False}, "stop", "is a string"),
    ({"prompt": "x", "stream": "yes"}, "stream", "true or false"),
    ({"prompt": "x", "ignore_eos": 1}, "ignore_eos", "true or false"),
    ({"prompt": "x", "stream_options": 5}, "stream_options", "include_usage"),
    ({"prompt": "x", "stream_options": {"continuous_usage_stats": True}}, "stream_options", "include_usage"),
    ({"prompt": "x", "temperature": "y" * 9000}, "temperature", "a number in"),
    (b'{"prompt": "\\ud800"}', "prompt", "U+D800, half of a surrogate pair"),
    (b'{"prompt": "\xed\xa0\x80"}', None, "no JSON"),
    (b'{"prompt": "x", "stop": ["\\udcff"]}', "stop", "half of a surrogate pair"),
    (b'{"prompt": "x", "\\ud800": 1}', None, "the name of a field is no Unicode"),
    (b'{"prompt": "x", "model": "\\ud800"}', "model", "half of a surrogate pair"),
]
NOT_SERVED: dict[str, Any] = {
    "logprobs": 0, "presence_penalty": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 3,
    "guided_json": {"type": "object"}, "guided_regex": "a+", "structured_outputs": {"choice": ["a"]},
    "best_of": 2, "echo": True, "suffix": "x", "messages": [], "max_completion_tokens": 5, "n_predict": 3,
}  # fmt: skip
NOT_SERVED_IN_CHATS: dict[str, Any] = {
    "logprobs": True, "top_logprobs": 2, "tool_choice": "required", "tools": [{"type": "function"}],
    "modalities": ["text", "audio"], "audio": {"voice": "alloy"}, "prediction": {"type": "content"},
    "response_format": {"type": "json_object"}, "prompt": "x", "reasoning_effort": "high", "store": True,
}  # fmt: skip
IDLE: dict[str, Any] = {
    "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0, "repetition_penalty": 1.0,
    "min_tokens": 0, "logit_bias": {}, "best_of": 1, "user": "me", "metadata": {"a": "b"},
    "guided_json": None, "stop": None, "model": None, "stream_options": {"include_usage": False},
}  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), BAD)
def test_bad_input_is_a_400_that_names_the_field(
    serving: Serving, body: Any, param: str | None, message: str
) -> None:
    reply = serving.post(body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", NOT_SERVED)
def test_what_would_change_an_answer_and_is_not_served_is_refused(serving: Serving, field: str) -> None:
    _check_refused(serving.post({"prompt": "x", "max_tokens": 1, field: NOT_SERVED[field]}), field)


@pytest.mark.parametrize("field", NOT_SERVED_IN_CHATS)
def test_in_chats_too(serving: Serving, field: str) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        field: NOT_SERVED_IN_CHATS[field],
    }
    _check_refused(serving.post(body, "chat/completions"), field)


def _check_refused(reply: httpx.Response, field: str) -> None:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_what_asks_for_nothing_is_no_mistake(serving: Serving) -> None:
    assert serving.post({"prompt": "x", "max_tokens": 1, **IDLE}).status_code == 200
    said = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "name": "Noah"}
    asked = {"messages": [said], "max_tokens": 1, "tool_choice": "auto", "modalities": ["text"]}
    assert serving.post(asked, "chat/completions").status_code == 200


def test_ignore_eos_goes_on_to_the_limit(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    every_token = tuple(range(serving.worker.engine.model.config.vocab_size))
    config = dataclasses.replace(serving.worker.engine.model.config, eos_ids=every_token)
    monkeypatch.setattr(serving.worker.engine.model, "config", config)
    counts = [
        serving.post({"prompt": "x", "max_tokens": 4, "ignore_eos": ignored}).json()["usage"][
            "completion_tokens"
        ]
        for ignored in (False, True)
    ]
    assert counts == [0, 4]


def test_a_prompt_far_too_long_keeps_nobody_waiting(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 7.8 MB the beginning is tokenized, in a thread."""
    tokenizer, looked_at = serving.worker.engine.tokenizer, []
    real = tokenizer._ids

    def ids(text: str) -> list[int]:
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


def test_who_asks_before_may_be_kept_secret(server: Any, running: Serving) -> None:
    """``usage`` and /health without what was found in the cache."""
    app_of = importlib.import_module("server.app").make_app
    template = importlib.import_module("server.template").template_of(bundled_model())
    app = app_of(running.worker, NAME, template, show_cached=False)

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            asked = {
                "prompt": PROMPT,
                "max_tokens": 2,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            stream = (await client.post("/v1/completions", json=asked)).text
            whole = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            return [stream, whole.text, (await client.get("/health")).text]

    stream, whole, health = asyncio.run(ask())
    for text in (stream, whole):
        assert '"completion_tokens":2' in text.replace(" ", "")
        assert "cached" not in text
    assert json.loads(health).keys() == {"status", "running", "waiting", "sequences", "limit"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"role": "user", "content": "a"}, {"content": "x"}], "messages[1]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0]"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_are_named(serving: Serving, messages: Any, param: str) -> None:
    reply = serving.post({"messages": messages}, "chat/completions")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_other_paths_methods_and_sizes(serving: Serving) -> None:
    for path, method, status in (("/nothing", "GET", 404), ("/v1/completions", "GET", 405)):
        reply = httpx.request(method, f"{serving.url}{path}")
        assert reply.status_code == status
        assert reply.json()["error"]["message"]
    assert serving.post(b"x" * (9 << 20)).status_code == 413


# What goes wrong while answering.


def test_a_client_that_leaves_a_stream_ends_its_request(serving: Serving) -> None:
    before, computed = serving.worker.cancelled, serving.health()["statistics"]["generated_tokens"]
    with gated(serving) as gate:
        stream = serving.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=100, stream=True)
        gate.let(5)
        assert next(iter(stream)).choices[0].text
        stream.close()
        gate.until(lambda: serving.worker.cancelled > before)
    assert serving.worker.cancelled == before + 1
    assert serving.worker.idle.wait(timeout=60)
    assert serving.health()["statistics"]["generated_tokens"] - computed < 100


def test_a_client_that_leaves_while_it_waits_ends_its_request(serving: Serving) -> None:
    before = serving.worker.cancelled
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = serving.url.removeprefix("http://").split(":")
    with gated(serving) as gate:
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head + body)
            gate.let(3)
        gate.until(lambda: serving.worker.cancelled > before)
    assert serving.worker.cancelled == before + 1


def test_more_than_may_wait_get_429(serving: Serving) -> None:
    """Four run, six wait; all of these are answered."""
    arguments: Any = {"model": NAME, "max_tokens": 30}

    def holds(running: int, waiting: int) -> bool:
        found = serving.health()
        return (found["running"], found["waiting"]) == (running, waiting)

    with gated(serving) as gate, ThreadPoolExecutor(10) as pool:
        ask = serving.client.completions.create
        asked = [pool.submit(ask, prompt=f"{i} {PROMPT}", **arguments) for i in range(4)]
        gate.until(lambda: holds(0, 4))
        gate.let(6)
        assert holds(4, 0)
        asked += [pool.submit(ask, prompt=f"{i} {PROMPT}", **arguments) for i in range(6)]
        gate.until(lambda: holds(4, 6))
        with pytest.raises(openai.RateLimitError, match="6 requests are waiting"):
            ask(prompt="one more", **arguments)
        gate.open()
        assert all(each.result().choices for each in asked)


def test_a_pass_that_fails_is_a_500_and_the_server_goes_on(serving: Serving, greedy: Any) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("the device failed")

    arguments: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    serving.ask(lambda engine: setattr(engine.model, "forward", broken))
    try:
        with pytest.raises(openai.InternalServerError, match="the device failed"):
            serving.client.completions.create(**arguments)
        with pytest.raises(openai.APIError, match="the device failed"):
            list(serving.client.completions.create(**arguments, stream=True))
    finally:
        serving.ask(lambda engine: delattr(engine.model, "forward"))
    assert serving.client.completions.create(**arguments).choices[0].text == greedy(PROMPT, 5)


def test_an_error_of_our_own_is_a_500_in_openais_words_too(running: Serving) -> None:
    app_of = importlib.import_module("server.app").make_app

    def broken(messages: Any) -> Any:
        raise RuntimeError("the template failed")

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(running.worker, NAME, broken), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = {"messages": [{"role": "user", "content": "x"}]}
            return await client.post("/v1/chat/completions", json=body)

    reply = asyncio.run(ask())
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


def test_a_worker_that_has_stopped_refuses_at_once(server: Any) -> None:
    worker_of = importlib.import_module("server.worker").Worker
    backend = ml.open_backend("numpy")
    model = load_model(bundled_model(), backend)
    options = EngineOptions(max_sequences=1, capacity=512)
    with worker_of(lambda: Engine(model, None, options)) as worker:
        inbox: Any = asyncio.Queue()

        async def ask() -> Any:
            await worker.submit([1, 2, 3], GenerationOptions(500, ignore_eos=True), inbox)
            await asyncio.to_thread(worker.__exit__)
            events = []
            while not events or not isinstance(events[-1], Failed):
                events.append((await asyncio.wait_for(inbox.get(), 60))[1])
            return events[-1].error

        assert "the engine has stopped" in str(asyncio.run(ask()))
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        worker.post(lambda engine: None).result(timeout=60)


def test_a_model_that_cannot_be_opened_is_told_to_whoever_starts_it(server: Any) -> None:
    worker_of = importlib.import_module("server.worker").Worker

    def broken() -> Any:
        raise ml.DeviceError("no such device")

    with pytest.raises(ml.DeviceError, match="no such device"), worker_of(broken):
        pass
