"""Our server beside others: ``python -m benchmarks.servers``.

The others are ``transformers serve`` (``pip install 'transformers[serving]' accelerate``) and
``mlx_lm.server``. One small Llama with random weights in F32; chats that are streamed, greedy, of 32 tokens
each. Every server is a process on loopback with one thread for its arithmetic, and has answered before the
clock starts. They take turns round by round; so many clients ask each at once, what was not asked before. A
connection that a server resets is tried again, and its clock runs on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.models import transformers_llama
from kvcache.testing.bench.timing import machine
from kvcache.testing.servers import free_port
from kvcache_engine.loading import bundled_model

SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 2048, "max_position_embeddings": 1024,
}  # fmt: skip
NEW = 32
SYSTEM, QUESTION = 160, 40
"""Words of what all share, and of what each asks."""
WORDS = (
    "And", "God", "said", "unto", "Noah", "Moses", "Adam", "the", "earth", "was", "without", "form", "void",
    "darkness", "upon", "face", "of", "deep",
)  # fmt: skip
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
MOST = 32
MOST_RESETS = 1000
SERVERS = {
    "ours, PyTorch": "-m kvcache_engine serve --model {model} --name {model} --port {port} --backend torch"
    f" --max-sequences {MOST} --capacity 512",
    "ours, MLX": "-m kvcache_engine serve --model {model} --name {model} --port {port} --backend mlx"
    f" --max-sequences {MOST} --capacity 512",
    "transformers serve": "-m transformers.cli.transformers serve {model} --port {port} --host 127.0.0.1"
    " --device cpu --dtype float32 --log-level error",
    "transformers serve, continuous batching": "-m transformers.cli.transformers serve {model} --port {port}"
    " --host 127.0.0.1 --device cpu --dtype float32 --log-level error --continuous-batching"
    " --cb-num-blocks 1024 --cb-max-batch-tokens 512",
    "mlx_lm.server": "-m mlx_lm server --model {model} --port {port} --log-level ERROR"
    f" --decode-concurrency {MOST} --prompt-concurrency {MOST}",
}


@dataclass(frozen=True, slots=True)
class Round:
    """Of one server with so many clients."""

    tokens_per_second: float
    first: list[float]
    """Seconds to the first text of each answer."""
    resets: int
    """Connections that had to be tried again."""

    def quantile(self, q: float) -> float:
        """Milliseconds; the smallest that so many do not exceed."""
        return 1e3 * sorted(self.first)[math.ceil(q * len(self.first)) - 1]


class Server:
    """A process, and chats with it."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model = f"{url}/v1/chat/completions", model
        self._resets = 0

    async def ask(self, http: httpx.AsyncClient, messages: Sequence[dict[str, str]]) -> tuple[float, str]:
        """Seconds to the first text, and the text, of NEW tokens."""
        began = time.perf_counter()
        while True:
            tried = time.perf_counter()
            try:
                first, text = await self._ask(http, messages)
            except httpx.TransportError:  # a short queue of connections: mlx_lm.server's has 5 places
                self._resets += 1
                if self._resets > MOST_RESETS:
                    raise
                await asyncio.sleep(0.05)
                continue
            return tried - began + first, text

    async def _ask(self, http: httpx.AsyncClient, messages: Sequence[dict[str, str]]) -> tuple[float, str]:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": NEW,
            "temperature": 0,
            "stream": True,
        }
        began, first, text, reason = time.perf_counter(), None, "", None
        async with http.stream("POST", self._url, json=body) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"{self._url}: {(await reply.aread()).decode()[:500]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                    part = choice["delta"].get("content") or ""
                    first = time.perf_counter() - began if part and first is None else first
                    text, reason = text + part, choice.get("finish_reason") or reason
        if first is None or reason != "length":
            raise SystemExit(f"{self._url}: an answer ended by {reason!r}, of {len(text)} characters")
        return first, text

    def round(self, clients: int, questions: Sequence[Sequence[dict[str, str]]]) -> Round:
        return asyncio.run(self._round(clients, questions))

    async def _round(self, clients: int, questions: Sequence[Sequence[dict[str, str]]]) -> Round:
        waiting, first, self._resets = iter(questions), [], 0
        async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=clients)) as http:

            async def client() -> None:
                first.extend([(await self.ask(http, messages))[0] for messages in waiting])

            began = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(clients)))
            seconds = time.perf_counter() - began
        return Round(NEW * len(first) / seconds, first, self._resets)

    def says(self, messages: Sequence[dict[str, str]]) -> str:
        async def ask() -> str:
            async with httpx.AsyncClient(timeout=600) as http:
                return (await self.ask(http, messages))[1]

        return asyncio.run(ask())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.servers", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--shared", action="store_true", help="all questions follow one system prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        model = Path(temporary) / "model"
        make_model(model)
        servers = {name: stack.enter_context(started(name, model)) for name in options.servers}
        numbers = itertools.count()
        same = agreed(servers, chat(next(numbers), options.shared))
        rounds: dict[tuple[str, int], list[Round]] = {}
        for _ in range(options.rounds):
            for clients, (name, server) in itertools.product(options.clients, servers.items()):
                asked = [chat(next(numbers), options.shared) for _ in range(max(8, clients))]
                rounds.setdefault((name, clients), []).append(server.round(clients, asked))
                print(
                    f"{name}, {clients}: {rounds[name, clients][-1].tokens_per_second:.0f}/s", file=sys.stderr
                )
    show(rounds, options, same)


def agreed(servers: dict[str, Server], messages: Sequence[dict[str, str]]) -> str:
    texts = {name: server.says(messages).strip() for name, server in servers.items()}
    others = [name for name, text in texts.items() if text != next(iter(texts.values()))]
    return f"others than {next(iter(texts))}: {', '.join(others)}" if others else "all the same"


def show(rounds: dict[tuple[str, int], list[Round]], options: argparse.Namespace, same: str) -> None:
    kind = "one system prompt" if options.shared else "nothing shared"
    model = f"a Llama of {SIZES['num_hidden_layers']} layers of {SIZES['hidden_size']}"
    print(f"\n{machine()}; {model}, {kind}, {options.rounds} rounds; answers: {same}\n")
    print("| server | clients | tokens/s | first token, p50 ms | p99 ms |\n|---|---|---|---|---|")
    for (name, clients), found in rounds.items():
        columns = (
            [each.tokens_per_second for each in found],
            [each.quantile(0.5) for each in found],
            [each.quantile(0.99) for each in found],
        )
        resets = sum(each.resets for each in found)
        note = f" ({resets} connections reset)" if resets else ""
        print(f"| {name}{note} | {clients} | {' | '.join(map(spread, columns))} |")


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} [{min(values):,.0f}, {max(values):,.0f}]"


def chat(number: int, shared: bool) -> list[dict[str, str]]:
    """Messages that were not asked before: a system prompt, of all or of this one, and a question."""
    system, user = random.Random(-1 if shared else number), random.Random(f"question {number}")
    contents = (system.choices(WORDS, k=SYSTEM), [str(number), *user.choices(WORDS, k=QUESTION)])
    if not shared:
        contents[0].insert(0, str(number))
    return [
        {"role": role, "content": " ".join(words)}
        for role, words in zip(("system", "user"), contents, strict=True)
    ]


def make_model(folder: Path) -> None:
    """Random weights, far from uniform, that never end a text; the bundled model's tokenizer."""
    from transformers import PreTrainedTokenizerFast

    model = transformers_llama(**SIZES, initializer_range=0.05, bos_token_id=1, eos_token_id=2)
    model.lm_head.weight.data[2] = 0
    model.save_pretrained(folder)
    file = str(bundled_model() / "tokenizer.json")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def started(name: str, model: Path) -> Iterator[Server]:
    """Up and warm: it has answered twice."""
    with listening(name, SERVERS[name].replace("{model}", str(model))) as (url, _):
        server = Server(url, str(model))
        for number in (-1, -2):
            server.says(chat(number, shared=False))
        yield server


@contextlib.contextmanager
def listening(name: str, words: str) -> Iterator[tuple[str, int]]:
    """Python with these words, once it listens on the ``{port}`` in them: its URL and process id."""
    port = free_port()
    command = [sys.executable, *(word.replace("{port}", str(port)) for word in words.split())]
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                except OSError:
                    time.sleep(0.2)
                    continue
                yield f"http://127.0.0.1:{port}", process.pid
                return
            log.seek(0)
            told = log.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"{name} did not start\n{told}")
        finally:
            process.kill()


if __name__ == "__main__":
    main()
