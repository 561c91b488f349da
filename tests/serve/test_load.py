"""32 clients at once, some of which read slowly or leave: every answer is right, and nothing is left."""

from __future__ import annotations

import asyncio
import collections
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvcache_engine.engine import EngineOptions
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.serve import ServeOptions

from .serve_rig import HTTP, Serving, opened, served, until

CLIENTS, TOKENS = 32, 8
OPTIONS = EngineOptions(max_sequences=8, capacity=128, prefill_chunk=64)
NAMES = ("Noah", "Moses", "Adam", "Jonah", "Abram", "Lot", "Aaron", "Esau")
HANDLES = Path("/proc/self/fd")


def prompt_of(client: int) -> str:
    """Eight beginnings, each with four ends."""
    return f"And God said unto {NAMES[client % 8]}, the {client // 8} time,"


@pytest.fixture
def expected() -> list[str]:
    """What the model says to each, alone."""
    with opened(OPTIONS) as engine:
        return [engine.complete([prompt_of(i)], GenerationOptions(TOKENS))[0].text for i in range(CLIENTS)]


@pytest.fixture
def serving() -> Iterator[Serving]:
    with served(OPTIONS, ServeOptions(max_waiting=CLIENTS)) as serving:
        yield serving


class Clients:
    """Those of one round; who reads slowly begins when all that read at once have their answers."""

    def __init__(self, serving: Serving, http: httpx.AsyncClient) -> None:
        self._url, self._http = f"{serving.url}/v1/completions", http
        self._quick = CLIENTS // 2
        self._read = asyncio.Event()

    async def run(self) -> list[str | None]:
        kinds = (self._whole, self._streaming, self._slow, self._leaving)
        return await asyncio.gather(*(kinds[i // 2 % 4](i) for i in range(CLIENTS)))

    def _body(self, client: int, **more: object) -> dict[str, object]:
        return {"prompt": prompt_of(client), "max_tokens": TOKENS, "temperature": 0, **more}

    def _has_read(self) -> None:
        self._quick -= 1
        if not self._quick:
            self._read.set()

    async def _whole(self, client: int) -> str:
        reply = await self._http.post(self._url, json=self._body(client))
        self._has_read()
        return reply.json()["choices"][0]["text"]

    async def _streaming(self, client: int, slowly: bool = False) -> str:
        text = ""
        async with self._http.stream("POST", self._url, json=self._body(client, stream=True)) as reply:
            if slowly:
                await self._read.wait()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        if not slowly:
            self._has_read()
        return text

    async def _slow(self, client: int) -> str:
        return await self._streaming(client, slowly=True)

    async def _leaving(self, client: int) -> None:
        """In the midst of a long stream."""
        body = self._body(client, stream=True, max_tokens=100, ignore_eos=True)
        async with self._http.stream("POST", self._url, json=body) as reply:
            async for _ in reply.aiter_lines():
                return


def one_round(serving: Serving) -> list[str | None]:
    async def run() -> list[str | None]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(limits=limits, timeout=60) as http:
            return await Clients(serving, http).run()

    return asyncio.run(run())


def ended(serving: Serving) -> dict[str, int]:
    """How many requests came to which end, as /metrics has it."""
    found: dict[str, int] = collections.Counter()
    for family in text_string_to_metric_families(HTTP.get(f"{serving.url}/metrics").text):
        for sample in family.samples:
            if sample.name in ("kvcache:request_success_total", "kvcache:requests_dropped_total"):
                labels = sample.labels
                found[labels.get("finished_reason") or labels["why"]] += int(sample.value)
    return found


def test_every_client_that_stays_has_its_answer_and_nothing_is_left(
    serving: Serving, expected: list[str]
) -> None:
    """And of the second round no prompt is computed but for its last token."""
    handles: list[int] = []
    for turn in (1, 2):
        before = serving.health()["statistics"]
        answers = one_round(serving)
        stayed = [i for i, text in enumerate(answers) if text is not None]
        assert len(stayed) == CLIENTS * 3 // 4
        assert [answers[i] for i in stayed] == [expected[i] for i in stayed]
        assert serving.worker.idle.wait(timeout=60)
        counts = ended(serving)
        assert sum(counts.values()) == turn * CLIENTS
        assert counts["cancelled"] == turn * CLIENTS // 4
        until(lambda: not serving.http.server_state.connections)
        assert serving.worker._tickets == {}
        assert serving.ask(lambda engine: (engine.prefix.sessions, engine.busy)) == ((), False)
        after = serving.health()["statistics"]
        tokens, computed = (after[name] - before[name] for name in ("prompt_tokens", "computed_tokens"))
        assert tokens > 10 * CLIENTS
        assert turn == 1 or computed <= CLIENTS + 8  # and where some were preempted, not their prompts either
        if not HANDLES.exists():
            continue
        if handles:
            until(lambda: open_handles() <= handles[0])  # the second round leaves no more than the first
        gc.collect()  # what others have left behind is not counted
        handles.append(open_handles())


def open_handles() -> int:
    return len(os.listdir(HANDLES))  # noqa: PTH208
