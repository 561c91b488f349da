"""A server under load while its store is killed again and again: ``python -m benchmarks.soak --minutes 20``.

With ``--runtime transformers`` or ``mlx-lm`` it is their model of the same weights that answers.

``kvcache serve`` runs the bundled model with little host memory and a Redis or Valkey server as its store.
Clients of three tenants ask prompts that begin alike, some leave in the middle of an answer, some read
slowly. The store is killed (SIGKILL) and started again, empty, all the time. Each answer is compared with
that of the model alone; memory and open files of the server are read from /proc.

Exits with 1 after a wrong answer, another status than 200 and 429, or growth of memory or open files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import ml
from benchmarks.engines import listening
from benchmarks.pages import show
from benchmarks.timing import machine
from kvcache.cache import Batch
from kvcache_engine.loading import bundled_model, load_model
from kvcache_engine.runtimes import Runtime, load_foreign
from kvcache_engine.tokenizer import Tokenizer
from tests.rigs.servers import ValkeyServer

NEW, CAPACITY, SEQUENCES = 24, 192, 6
TENANTS = ("", "a", "b")
WARM_UP = 0.25
"""Of the time, after which memory is not to grow any more."""
GROWTH = 1.05


@dataclass(slots=True)
class Watched:
    """What was seen."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    memory: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds, resident bytes, open files) of the server."""


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids: trees of prefixes, of 20 to 120 tokens."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, 500) for _ in range(draw.randrange(16, 64))] for _ in range(8)]
    found = []
    for _ in range(count):
        stem = draw.choice(stems)
        found.append(stem + [draw.randrange(3, 500) for _ in range(draw.randrange(4, 60))])
        if draw.random() < 0.3:
            stems[draw.randrange(len(stems))] = found[-1][:90]
    return found


def expected(asked: list[list[int]], runtime: Runtime) -> list[str]:
    """Greedy answers to each prompt alone: by our own model on a cache of its own, by another library's model
    in whole texts without a cache."""
    tokenizer = Tokenizer.load(bundled_model())
    with ml.open_backend(runtime.backend or "numpy") as backend:
        likeliest = own(backend) if runtime is Runtime.OWN else foreign(runtime, backend)
        answers = []
        for prompt in asked:
            tokens = [*prompt]
            while len(tokens) < len(prompt) + NEW:
                tokens.append(likeliest(tokens))
            answers.append(tokenizer.decode(tokens[len(prompt) :]))
        return answers


Likeliest = Callable[[list[int]], int]
"""The likeliest token behind a text."""


def own(backend: ml.Backend) -> Likeliest:
    model: Any = load_model(bundled_model(), backend)
    cache = model.make_cache()
    cache.init(backend, ml.DType.F32, 1, CAPACITY, CAPACITY)
    held: list[int] = []

    def likeliest(tokens: list[int]) -> int:
        nonlocal held
        if held != tokens[: len(held)]:  # another prompt
            cache.remove(0, 0)
            held = []
        places = range(len(held), len(tokens))
        batch = Batch(places, [0] * len(places), inputs=tokens[len(held) :], outputs=[len(places) - 1])
        with backend.new_context() as ctx:
            cache.start_forward(ctx, batch)
            held = [*tokens]
            return int(model.forward(ctx, batch, cache).to_numpy()[0].argmax())

    return likeliest


def foreign(runtime: Runtime, backend: ml.Backend) -> Likeliest:
    model: Any = load_foreign(runtime, bundled_model(), backend, ml.DType.F32)
    return lambda tokens: int(model.without(tokens)[-1].argmax())


async def kill_stores(store: ValkeyServer, until: float, seen: Watched, seed: int) -> None:
    """Start the store, kill it after 2 to 12 s, leave it dead for up to 4 s, and so on."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        store.start()
        await asyncio.sleep(min(draw.uniform(2, 12), max(0.0, until - time.monotonic())))
        store.kill()
        seen.kills += 1
        await asyncio.sleep(draw.uniform(0, 4))


async def watch(server: int, until: float, seen: Watched) -> None:
    begun, page = time.monotonic(), os.sysconf("SC_PAGE_SIZE")
    while time.monotonic() < until:
        resident = int(Path(f"/proc/{server}/statm").read_text().split()[1]) * page
        files = sum(1 for _ in Path(f"/proc/{server}/fd").iterdir())
        seen.memory.append((time.monotonic() - begun, resident, files))
        await asyncio.sleep(2)


async def ask_on(
    client: httpx.AsyncClient,
    asked: list[list[int]],
    answers: list[str],
    until: float,
    seen: Watched,
    seed: int,
) -> None:
    draw = random.Random(seed)
    while time.monotonic() < until:
        number = draw.randrange(len(asked))
        body = {
            "prompt": asked[number], "max_tokens": NEW, "temperature": 0, "stream": True, "ignore_eos": True,
            "logprobs": 0, "cache_salt": draw.choice(TENANTS) or None,
        }  # fmt: skip
        leaves = draw.random() < 0.1
        slow = draw.random() < 0.1
        got: list[str] = []
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                seen.answers[f"status {response.status_code}"] += 1
                await asyncio.sleep(0.2)
                continue
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    got.append(choice["text"])
                    if slow:
                        await asyncio.sleep(0.05)
                    if leaves and len(got) > 3:
                        break
        if leaves:
            seen.answers["left"] += 1
            continue
        seen.answers["slow" if slow else "whole"] += 1
        if "".join(got) != answers[number]:
            seen.wrong.append(f"prompt {number}: {''.join(got)!r}, not {answers[number]!r}")


async def run(minutes: float, clients: int, runtime: Runtime, count: int) -> Watched:
    asked = prompts(count)
    answers = expected(asked, runtime)
    seen = Watched()
    words = f"-m kvcache_engine serve --port {{port}} --max-sequences {SEQUENCES} --capacity {CAPACITY}"
    words += f" --runtime {runtime.value}"
    words += " --host-memory 2MiB --write-interval 1 --store "
    with (
        ValkeyServer("--maxmemory", "32mb") as store,
        listening("kvcache serve", f"{words}{store.url}?timeout=1") as (base, pid),
    ):
        async with httpx.AsyncClient(base_url=base, timeout=120) as client:
            store.kill()
            until = time.monotonic() + 60 * minutes
            await asyncio.gather(
                kill_stores(store, until, seen, 1),
                watch(pid, until, seen),
                *(ask_on(client, asked, answers, until, seen, 100 + i) for i in range(clients)),
            )
            metrics = (await client.get("/metrics")).text
    for line in metrics.splitlines():
        if line.startswith(("kvcache:prompt_tokens_reused_total", "kvcache:store_errors_total")):
            print(line)
    return seen


def grew(values: list[int]) -> bool:
    """Whether the last quarter lies above what came after the warm-up."""
    start = int(len(values) * WARM_UP)
    early, late = values[start : start + len(values) // 4], values[-(len(values) // 4) :]
    return statistics.median(late) > GROWTH * statistics.median(early)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=200, help="from which clients draw")
    parser.add_argument("--runtime", type=Runtime, choices=[*Runtime], default=Runtime.OWN)
    options = parser.parse_args()
    seen = asyncio.run(run(options.minutes, options.clients, options.runtime, options.prompts))
    resident, files = [one[1] for one in seen.memory], [one[2] for one in seen.memory]
    quarter = max(1, len(resident) // 4)
    report: dict[str, Any] = {
        "machine": machine(),
        "runtime": options.runtime.value,
        "minutes": options.minutes,
        "clients": options.clients,
        **{f"answers: {name}": count for name, count in seen.answers.items()},
        "wrong": len(seen.wrong),
        "kills": seen.kills,
        "resident MiB by quarter": [
            round(statistics.median(resident[i : i + quarter]) / 2**20, 1)
            for i in range(0, len(resident), quarter)
        ][:4],
        "open files by quarter": [
            statistics.median(files[i : i + quarter]) for i in range(0, len(files), quarter)
        ][:4],
    }
    show(("", ""), ((name, str(value)) for name, value in report.items()))
    for wrong in seen.wrong[:5]:
        print(wrong, file=sys.stderr)
    failed = [name for name in seen.answers if name.startswith("status") and name != "status 429"]
    sys.exit(bool(seen.wrong or failed or grew(resident) or grew(files)))


if __name__ == "__main__":
    main()
