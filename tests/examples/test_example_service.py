"""The service of FastAPI as a process, with real clients: many, one that leaves, kill -9 and a restart."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("xxhash")

import httpx
import torch
import transformers
from fastapi.testclient import TestClient

from kvcache_engine import Tokenizer, bundled_model

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "In the beginning God created the heaven and the earth. And the earth was without form. " * 8
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with its tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=Tokenizer.load(bundled_model()).vocab_size, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model() / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


class Service:
    """The process, and what clients ask of it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.last: dict[str, Any] = {}
        """What the last answer to ``ask`` ended with."""

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=60).json()
        return found

    def ask(self, content: str, **options: Any) -> str:
        """The whole text of an answer to the service's system prompt and a user's message."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 12, **options}
        with httpx.stream("POST", f"{self.url}/chat", json=body, timeout=120) as response:
            assert response.status_code == 200
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        *told, self.last = map(json.loads, lines[:-1])
        return "".join(event["text"] for event in told)


@contextlib.contextmanager
def serving(folder: Path, store: Path, runtime: str) -> Iterator[Service]:
    options = ["--store", store, "--budget=64MiB", "--port=0", "--runtime", runtime, "--system", SYSTEM]
    line = [sys.executable, "examples/service.py", folder, *options]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen([str(word) for word in line], **pipes) as process:
        try:
            found = (re.search(r"http://[\d.]+:\d+", text) for text in process.stderr)
            yield Service(process, next(url[0] for url in found if url))
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for two minutes"
        time.sleep(0.01)


@pytest.mark.parametrize("runtime", ["transformers", "mlx-lm"])
def test_users_share_a_restart_goes_on_and_who_leaves_is_cancelled(
    folder: Path, tmp_path: Path, runtime: str
) -> None:
    pytest.importorskip(runtime.replace("-", "_"))
    store, questions = tmp_path / "kept", ["And God said", "And God saw", "the sea", "Noah", "light"]
    with serving(folder, store, runtime) as service:
        first = service.ask(questions[0])
        with ThreadPoolExecutor(8) as users:
            answers = list(users.map(service.ask, questions * 2))
        assert answers[0] == answers[5] == first
        told = service.health()
        assert told["reused"] > told["computed"]
        assert httpx.post(f"{service.url}/chat", json={"prompt": "x " * 9000}, timeout=60).status_code == 400
        assert service.ask(questions[0], user="another") == first
        system = service.health()["reused"] - told["reused"]  # and nothing more of what the others computed
        assert service.ask(questions[0], user="third") == first
        assert service.health()["reused"] - told["reused"] == 2 * system > 0
        assert system % 128  # it does not end with a block
        body = {"messages": [{"role": "nobody", "content": "x"}]}
        assert httpx.post(f"{service.url}/chat", json=body, timeout=60).status_code == 400
        until(lambda: any((store / "pages").glob("*.entry")))
        service.process.send_signal(signal.SIGKILL)
    with serving(folder, store, runtime) as service:
        assert service.ask(questions[0], user="fourth") == first
        assert service.last == {"finish_reason": "length", "cached_tokens": system}
        assert service.health()["reused_from"] == {"live": 0, "device": 0, "host": 0, "store": system}
        assert service.ask(questions[0]) == first
        body = {"prompt": "x", "max_tokens": 1500}  # of a client that goes away
        with httpx.stream("POST", f"{service.url}/chat", json=body, timeout=120) as response:
            lines = response.iter_lines()  # which closes the connection when it goes
            next(lines)
            assert service.health()["running"] == 1
        until(lambda: service.health()["running"] == 0)
        assert service.ask(questions[1]) == answers[1]
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(60) in (0, -signal.SIGINT)


def test_what_is_wrong_gets_an_error_in_the_status_or_in_the_stream(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a status of 500, and never a stream that breaks off."""
    service = runpy.run_path(str(ROOT / "examples/service.py"), run_name="service")
    app = service["make_app"](str(folder), str(tmp_path / "kept"), "64MiB", "transformers", capacity=64)
    long, hello = "x " * 600, [{"role": "user", "content": "hello"}]
    refused: list[tuple[int, dict[str, Any]]] = [
        (400, {"prompt": long}), (400, {"messages": [{"role": "user", "content": long}]}),
        (400, {"prompt": "\ud800"}), (400, {"messages": [{"role": "user", "content": "\ud800"}]}),
        (400, {"prompt": "x", "user": "\ud800"}), (400, {"messages": [{"role": "nobody", "content": "x"}]}),
        (422, {}), (422, {"prompt": "x", "messages": hello}), (422, {"messages": []}),
        (422, {"messages": [{}]}), (422, {"messages": [{"role": "user"}]}),
        (422, {"prompt": "x", "max_token": 3}),
    ]  # fmt: skip
    with TestClient(app) as client:

        def lines(body: dict[str, Any]) -> list[str]:
            response = client.post("/chat", json=body)
            assert response.status_code == 200
            return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]

        for status, body in refused:
            said = client.post(
                "/chat", content=json.dumps(body), headers={"content-type": "application/json"}
            )
            assert (said.status_code, body) == (status, body)
        *_, last, done = lines({"messages": hello, "max_tokens": 200})
        assert (json.loads(last)["finish_reason"], done) == ("capacity", "[DONE]")

        def lost(*arguments: Any) -> Any:
            raise RuntimeError("lost")

        monkeypatch.setattr(app.state.engine.model, "forward", lost)
        assert lines({"prompt": "x"}) == ['{"error": "lost"}']
