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

pytest.importorskip("typer")
pytest.importorskip("openai")

import openai

from kvcache.stores import open_store
from kvcache_engine.engine import EngineOptions
from kvcache_engine.requests import GenerationOptions

from ..command.cli_held import KVCACHE, piped
from .serve_rig import PROMPT, opened, until

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send to one process")


@contextlib.contextmanager
def command(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """The server as a process, and a client."""
    with piped(*KVCACHE, "serve", "--port", 0, "--name", "it", "--capacity", 64, *arguments) as process:
        try:
            url = next(text for text in process.stderr if " on http" in text).split()[-1]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
                yield process, client
        finally:
            process.kill()


def test_the_start_says_what_memory_it_may_take(tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    arguments = (
        "--port",
        0,
        "--capacity",
        64,
        "--host-memory",
        "3GiB",
        "--store",
        (tmp_path / "kept").as_uri(),
    )
    with piped(*KVCACHE, "serve", *arguments) as process:
        try:
            line = next(text for text in process.stderr if "in addition to the weights" in text)
        finally:
            process.kill()
    assert line.startswith("kvcache: at most 3.")
    assert "GiB of memory in addition to the weights: the cache " in line
    assert ", host memory 3.0 GiB, waiting for stores 256.0 MiB" in line


@posix
def test_the_next_server_finds_what_one_kept_whatever_signal_ended_it(tmp_path: Path) -> None:
    """SIGTERM is below; after SIGKILL there is what was answered before."""
    pytest.importorskip("xxhash")
    store, said, known = tmp_path / "kept", PROMPT, 0
    for name in ("SIGKILL", "SIGINT", "SIGHUP"):
        killed = name == "SIGKILL"
        with command("--store", store.as_uri()) as (process, client):
            found = client.completions.create(model="it", prompt=said, max_tokens=3, temperature=0)
            assert found.usage is not None
            assert found.usage.prompt_tokens_details is not None
            assert killed or (found.usage.prompt_tokens_details.cached_tokens or 0) > known
            said, known = f"{said}{found.choices[0].text} and", found.usage.prompt_tokens
            if killed:
                until(lambda: any((store / "pages").glob("*.entry")))
            process.send_signal(getattr(signal, name))
            errors = process.stderr.read()
            assert process.wait(timeout=60) == (-signal.SIGKILL if killed else 0), errors
            assert "Traceback" not in errors
            assert ("kvcache: writing kept prefixes to the stores" in errors) is not killed
    with open_store(store.as_uri()) as kept, opened(EngineOptions(capacity=64), [kept]) as engine:
        assert engine.complete([said], GenerationOptions(1))[0].reused > known


@posix
def test_requests_that_are_running_finish_and_new_ones_are_not_taken() -> None:
    with command("--capacity", 256) as (process, client):
        stream = streamed(client, 200)
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        until(lambda: refused(client))
        chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason == "length"
        assert "the stores" not in process.stderr.read(), "it has none to write to"
        assert process.wait(timeout=60) == 0


@posix
def test_requests_that_take_too_long_at_the_end_are_told_so(tmp_path: Path) -> None:
    """And what was computed of them is kept."""
    pytest.importorskip("xxhash")
    store = tmp_path / "kept"
    with command("--capacity", 512, "--shutdown-timeout", 0, "--store", store) as (process, client):
        stream = streamed(client, 500)
        next(stream)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        assert process.wait(timeout=60) == 0
    assert any((store / "pages").glob("*.entry"))


def streamed(client: openai.OpenAI, count: int) -> Any:
    """An answer of so many tokens."""
    asked = {"model": "it", "prompt": PROMPT, "max_tokens": count, "temperature": 0}
    return client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})


def refused(client: openai.OpenAI) -> bool:
    """New connections, that is."""
    try:
        socket.create_connection((client.base_url.host, client.base_url.port)).close()
    except ConnectionRefusedError:
        return True
    return False


@posix
def test_a_router_hears_which_prefixes_are_kept() -> None:
    decode, zmq = pytest.importorskip("msgspec").msgpack.decode, pytest.importorskip("zmq")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        events, replay = (f"tcp://127.0.0.1:{taken.getsockname()[1]}" for taken in (one, other))
    # ZmqPublisher binds what has a "*".
    told = ("--kv-events", events.replace("127.0.0.1", "*"), "--kv-events-replay", replay)
    with command("--block-size", 4, *told) as (process, client), zmq.Context() as context:
        list(streamed(client, 3))
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


WITHOUT = """
import sys
from kvcache_engine.command.main import main
for missing in ("starlette", "uvicorn"):
    sys.modules[missing] = None
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 1
    del sys.modules[missing]
    for name in [name for name in sys.modules if name.startswith("kvcache_engine.serve")]:
        del sys.modules[name]
"""


def test_without_its_packages_it_says_what_to_install() -> None:
    line = [sys.executable, "-c", WITHOUT, "serve"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    said = "kvcache: serve needs {}: pip install 'ml-kvcache[server]'"
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [said.format(missing) for missing in ("starlette", "uvicorn")]
