"""``kvcache serve`` as a process: what it keeps of its store, whatever signal ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import openai

SERVE = (sys.executable, "-m", "kvcache", "serve")
PROMPT = "And God said unto Noah,"
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to one process")


@contextlib.contextmanager
def command(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """The server as a process, and a client."""
    line = [*SERVE, "--port", 0, "--name", "it", "--capacity", 64, *arguments]
    words = [*map(str, line)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(text for text in process.stderr if " on http" in text).split()[-1]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
                yield process, client
        finally:
            process.kill()


def answered(client: openai.OpenAI, prompt: str = PROMPT) -> tuple[str, int]:
    """Prompt and answer, and how much of the prompt was there."""
    found = client.completions.create(model="it", prompt=prompt, max_tokens=3, temperature=0)
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    return prompt + found.choices[0].text, found.usage.prompt_tokens_details.cached_tokens or 0


@posix
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_server_that_is_told_to_end_keeps_its_store(name: str, tmp_path: Path) -> None:
    """SIGTERM is what docker, systemd and Kubernetes send."""
    pytest.importorskip("xxhash")
    store = (tmp_path / "kept").as_uri()
    with command("--store", store) as (process, client):
        said, _ = answered(client)
        process.send_signal(getattr(signal, name))
        assert process.stderr is not None
        errors = process.stderr.read()
        assert process.wait(timeout=60) == 0, errors
        assert "Traceback" not in errors
        assert "kvcache: writing what is kept to the stores" in errors
    with command("--store", store) as (_, client):
        assert answered(client, f"{said} and")[1] > 9


@posix
def test_a_server_that_is_killed_loses_what_it_did_since_it_last_wrote(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    store = tmp_path / "kept"
    with command("--store", store.as_uri(), "--write-interval", 0.05) as (process, client):
        said, _ = answered(client)
        for _ in range(600):
            if any((store / "pages").glob("*.json")):
                break
            time.sleep(0.1)
        process.kill()
    with command("--store", store.as_uri()) as (_, client):
        assert answered(client, f"{said} and")[1] > 9


@posix
def test_requests_that_are_running_finish_and_new_ones_are_not_taken() -> None:
    with command("--capacity", 256) as (process, client):
        stream = client.completions.create(
            model="it",
            prompt=PROMPT,
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        until_refused(client)
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait(timeout=60) == 0


@posix
def test_requests_that_take_too_long_at_the_end_are_told_so(tmp_path: Path) -> None:
    """And what was computed of them is kept."""
    pytest.importorskip("xxhash")
    store = tmp_path / "kept"
    with command("--capacity", 512, "--shutdown-timeout", 0, "--store", store) as (process, client):
        stream = client.completions.create(
            model="it",
            prompt=PROMPT,
            max_tokens=500,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is ending"):
            list(stream)
        assert process.wait(timeout=60) == 0
    assert any((store / "pages").glob("*.json"))


def streamed(client: openai.OpenAI, count: int) -> Any:
    """An answer of so many tokens."""
    asked = {"model": "it", "prompt": PROMPT, "max_tokens": count, "temperature": 0}
    return client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})


def until_refused(client: openai.OpenAI) -> None:
    """New connections, that is."""
    for _ in range(600):
        try:
            socket.create_connection((client.base_url.host, client.base_url.port)).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.1)
    raise AssertionError("connections are still taken")


@posix
def test_a_server_without_a_store_has_nothing_to_keep() -> None:
    with command() as (process, client):
        answered(client)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "the stores" not in process.stderr.read()
        assert process.wait(timeout=60) == 0


@posix
def test_a_router_hears_which_prefixes_are_kept() -> None:
    decode, zmq = pytest.importorskip("msgspec").msgpack.decode, pytest.importorskip("zmq")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        events, replay = (f"tcp://127.0.0.1:{taken.getsockname()[1]}" for taken in (one, other))
    # ZmqPublisher binds what has a "*".
    told = ("--kv-events", events.replace("127.0.0.1", "*"), "--kv-events-replay", replay)
    with command("--block-size", 4, *told) as (process, client), zmq.Context() as context:
        answered(client)
        with context.socket(zmq.DEALER) as asking:
            asking.connect(replay)
            stored: list[Any] = []
            for _ in range(300):
                asking.send_multipart((b"", (0).to_bytes(8, "big")))
                while (payload := asking.recv_multipart()[2]) != b"":
                    stored += [each for each in decode(payload)[1] if each["type"] == "BlockStored"]
                if stored:
                    break
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert {event["medium"] for event in stored} == {"GPU"}
    assert {event["block_size"] for event in stored} == {4}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kv-events", "nowhere"], "serve: --kv-events: nowhere cannot be used"),
        (["--eviction-policy", "arc"], "eviction_policy='arc'; it must be 'lru', 'gdsf'"),
        (["--tenant-budget", "1MiB/much"], "TenantBudget: host='much'; it must be a number of bytes"),
        (["--model", "/no/such/folder"], "kvcache: /no/such/folder: "),
        (["--host", "no.such.host.invalid"], "kvcache: serve: no.such.host.invalid:8000: no such address"),
        (["--port", "taken"], "is not available (Address already in use); choose another port, or 0"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if word == "taken" else word for word in arguments]
        done = subprocess.run([*SERVE, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_without_its_packages_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from kvcache.command.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kvcache: serve needs {missing}: pip install 'ml-kvcache[server]'\n"
