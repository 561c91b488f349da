"""Engines and servers beside one another over one random Llama: docs/server.md.

    python -m benchmarks.engines {transformers,mlx-lm} [--clients 1 8 32] [--prompt 128] [--shared 112 0]
                                 [--rounds 3] [--only NAME ...] [--vllm PYTHON] [--out FOLDER] [--add]

Our engine over another library's model, over our own model of the same weights, and the library's own ways to
serve several at once. Each is a process of its own with one thread for its arithmetic, up and warm, and they
take turns: so many clients ask at once, greedily, what was not asked before.

Time is what the contender's own processes have computed, which other programs on the machine do not lengthen;
by the clock it is recorded too. MLX's wheel for CPUs multiplies matrices by the reference BLAS, in which all
else disappears: ``LD_PRELOAD=libopenblas.so.0`` has another do it. ``transformers serve`` needs
``pip install 'transformers[serving]'``, ``--vllm`` the Python of an environment that has vLLM. Needs Linux:
memory and time are read in /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import ml
from benchmarks.models import transformers_llama
from benchmarks.pages import DOCS, load, save, table
from benchmarks.timing import Foreign, machine
from kvcache_engine import Engine, EngineOptions, GenerationOptions, load_model
from kvcache_engine.requests import Token
from tests.rigs.servers import free_port

RECORD = "engines.json"
SEQUENCES, CAPACITY = 32, 512
"""Of every contender that is told."""
CHUNK = 2048
"""Prompt tokens of a pass beside mlx_lm.server, whose own default it is."""
MODEL: dict[str, Any] = {
    "vocab_size": 16000, "hidden_size": 640, "intermediate_size": 1792, "num_attention_heads": 10,
    "num_key_value_heads": 5, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""62 million parameters in 11 layers."""
MOST_RESETS = 1000

Prompts = Sequence[Sequence[int]]
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class Round:
    """What one contender has answered, and seconds: its processes' own, by the clock, and of its processes to
    the first token of each answer ([]: not told)."""

    own: float
    clock: float
    first: list[float]
    answers: Tokens


# In a process of its own.

Run = Callable[[Prompts, int], tuple[Tokens, list[float]]]
"""Answers of so many tokens, and when each had its first, by ``time.process_time``."""


def engine_over(model: Any, chunk: int = 512) -> Run:
    options = EngineOptions(max_sequences=SEQUENCES, capacity=CAPACITY, prefill_chunk=chunk)
    engine = Engine(model, None, options)

    def run(prompts: Prompts, new: int) -> tuple[Tokens, list[float]]:
        first: dict[int, float] = {}
        requests = [engine.submit(prompt, GenerationOptions(new, ignore_eos=True)) for prompt in prompts]
        while engine.busy:
            for event in engine.step():
                if isinstance(event, Token):
                    first.setdefault(event.request, time.process_time())
        found = [[*request.tokens[len(p) :]] for request, p in zip(requests, prompts, strict=True)]
        return found, [*first.values()]

    return run


def own_on_torch(folder: Path) -> Run:
    return engine_over(load_model(folder, ml.open_backend("torch"), ml.DType.F32))


def own_on_mlx(folder: Path) -> Run:
    return engine_over(load_model(folder, ml.open_backend("mlx"), ml.DType.F32), CHUNK)


def over_transformers(folder: Path) -> Run:
    from kvcache.integrations.transformers import TransformersModel

    return engine_over(TransformersModel.load(folder, ml.open_backend("torch"), ml.DType.F32))


def over_mlx_lm(folder: Path) -> Run:
    from kvcache.integrations.mlx_lm import MLXModel

    return engine_over(MLXModel.load(folder, ml.open_backend("mlx"), ml.DType.F32), CHUNK)


def generate_batch(folder: Path) -> Run:
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    paged = ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=1024)

    def run(prompts: Prompts, new: int) -> tuple[Tokens, list[float]]:
        settings = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
        found = model.generate_batch([[*p] for p in prompts], settings, paged, warmup=False)
        return [[*found[f"req_{i}"].generated_tokens] for i in range(len(prompts))], []

    return run


def work(make: Callable[[Path], Run], folder: Path, pipe: Any) -> None:
    """Of the process: a :class:`Round` for each (prompts, new) that comes, until None does."""
    run = make(folder)
    while (asked := pipe.recv()) is not None:
        own, clock = time.process_time(), time.perf_counter()
        answers, first = run(*asked)
        spent = time.process_time() - own, time.perf_counter() - clock
        pipe.send(Round(*spent, [at - own for at in first], answers))


class Process:
    """A process that is asked in Python."""

    def __init__(self, pipe: Any, process: Any) -> None:
        self.pid: int = process.pid
        self._pipe = pipe

    def run(self, prompts: Prompts, new: int) -> Round:
        self._pipe.send((prompts, new))
        found: Round = self._pipe.recv()
        return found


@contextlib.contextmanager
def process(make: Callable[[Path], Run], folder: Path) -> Iterator[Process]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(make, folder, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield Process(ours, child)
    finally:
        child.terminate()
        child.join()


# Behind HTTP.

OURS = (
    "-m kvcache_engine serve --model {model} --name {model} --port {port} --runtime"
    f" {{}} --max-sequences {SEQUENCES} --capacity {CAPACITY}"
)
THEIRS = (
    "-m transformers.cli.transformers serve {model} --port {port} --host 127.0.0.1 --device cpu"
    " --dtype float32 --log-level error"
)
SERVERS = {
    "kvcache serve, transformers' model": OURS.replace("{}", "transformers"),
    "transformers serve": THEIRS,
    "transformers serve, continuous batching": THEIRS
    + " --continuous-batching --cb-num-blocks 1024 --cb-max-batch-tokens 1024",
    "vllm serve": "-m vllm.entrypoints.openai.api_server --model {model} --port {port} --host 127.0.0.1"
    # Blocks as small as its attention on CPUs takes: of 128, the default, clients would share none.
    f" --dtype float32 --max-model-len {CAPACITY} --max-num-seqs {SEQUENCES} --enforce-eager --block-size 32",
    "kvcache serve, mlx-lm's model": OURS.replace("{}", "mlx-lm") + f" --prefill-chunk {CHUNK}",
    "mlx_lm.server": "-m mlx_lm server --model {model} --port {port} --log-level ERROR"
    f" --decode-concurrency {SEQUENCES} --prompt-concurrency {SEQUENCES}",
}


class Server:
    """A server that is asked as OpenAI's are: completions of text, streamed."""

    def __init__(self, url: str, pid: int, model: Path) -> None:
        self._url, self.pid, self._model = f"{url}/v1/completions", pid, str(model)
        self._resets = 0

    def run(self, prompts: Prompts, new: int) -> Round:
        return asyncio.run(self._run(prompts, new))

    async def _run(self, prompts: Prompts, new: int) -> Round:
        self._resets = 0
        own, clock = processor_time(self.pid), time.perf_counter()
        limits = httpx.Limits(max_connections=len(prompts))
        async with httpx.AsyncClient(timeout=1800, limits=limits) as http:
            found = await asyncio.gather(*(self._ask(http, prompt, new) for prompt in prompts))
        spent = processor_time(self.pid) - own, time.perf_counter() - clock
        return Round(*spent, [first - own for first, _ in found], [answer for _, answer in found])

    async def _ask(self, http: httpx.AsyncClient, prompt: Sequence[int], new: int) -> tuple[float, list[int]]:
        """What the server had computed at the first token, and the tokens. A reset connection is tried again:
        mlx_lm.server's queue of new ones has 5 places."""
        while True:
            try:
                return await self._answer(http, prompt, new)
            except httpx.TransportError:
                self._resets += 1
                if self._resets > MOST_RESETS:
                    raise
                await asyncio.sleep(0.05)

    async def _answer(
        self, http: httpx.AsyncClient, prompt: Sequence[int], new: int
    ) -> tuple[float, list[int]]:
        body = {
            "model": self._model, "prompt": " ".join(f"w{token}" for token in prompt), "max_tokens": new,
            "temperature": 0, "stream": True,
        }  # fmt: skip
        first, text, reason = None, "", None
        async with http.stream("POST", self._url, json=body) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"{self._url}: {(await reply.aread()).decode()[:500]}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                        part = choice["text"] or ""
                        first = processor_time(self.pid) if part and first is None else first
                        text, reason = text + part, choice.get("finish_reason") or reason
        answer = [int(word[1:]) for word in text.split()]
        if first is None or reason != "length" or len(answer) != new:
            raise SystemExit(f"{self._url}: {len(answer)} of {new} tokens, then {reason!r}: {text[:200]!r}")
        return first, answer


@contextlib.contextmanager
def server(name: str, folder: Path, python: str) -> Iterator[Server]:
    with listening(name, SERVERS[name].replace("{model}", str(folder)), python) as (url, pid):
        yield Server(url, pid, folder)


@contextlib.contextmanager
def listening(name: str, words: str, python: str = sys.executable) -> Iterator[tuple[str, int]]:
    """Python with these words, once it listens on the ``{port}`` in them: its URL and process id."""
    port = free_port()
    command = [python, *(word.replace("{port}", str(port)) for word in words.split())]
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}  # GiB: twice what the rounds need
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 900
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
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def tree(pid: int) -> Iterator[Path]:
    """The folders in /proc of a process and of those that it has started."""
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        for children in folder.glob("task/*/children"):
            for child in children.read_text(encoding="ascii").split():
                yield from tree(int(child))
    yield folder


def processor_time(pid: int) -> float:
    """Seconds that a process and those that it has started have computed."""
    ticks = 0
    for folder in tree(pid):
        with contextlib.suppress(OSError):
            behind_name = (folder / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(behind_name[11]) + int(behind_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_memory(pid: int) -> float:
    """MiB that a process and those that it has started have held at most, each by itself."""
    found = 0
    for folder in tree(pid):
        with contextlib.suppress(OSError):
            lines = (folder / "status").read_text(encoding="utf-8").splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return found / 1024


# One run.

MAKERS: dict[str, Callable[[Path], Run]] = {
    "engine, own model": own_on_torch,
    "engine, transformers' model": over_transformers,
    "generate_batch": generate_batch,
    "engine, own model on MLX": own_on_mlx,
    "engine, mlx-lm's model": over_mlx_lm,
}
LIBRARIES: dict[str, tuple[str, ...]] = {
    "transformers": (
        "engine, own model", "engine, transformers' model", "kvcache serve, transformers' model",
        "generate_batch", "transformers serve", "transformers serve, continuous batching", "vllm serve",
    ),
    "mlx-lm": (
        "engine, own model on MLX", "engine, mlx-lm's model", "kvcache serve, mlx-lm's model",
        "mlx_lm.server",
    ),
}  # fmt: skip
"""By library the contenders; the first is what the others are compared with."""
SLOW = {"generate_batch", "transformers serve, continuous batching"}
"""One round of these takes minutes: they have no other."""
AIMS: tuple[tuple[str, str, float, bool], ...] = (
    ("engine, transformers' model", "engine, own model", 0.85, False),
    ("engine, transformers' model", "generate_batch", 4, True),
    ("kvcache serve, transformers' model", "transformers serve", 1, False),
    ("kvcache serve, transformers' model", "transformers serve, continuous batching", 1, False),
    ("engine, mlx-lm's model", "engine, own model on MLX", 0.85, False),
    ("kvcache serve, mlx-lm's model", "mlx_lm.server", 1, False),
)
"""How many times as fast as what ours is to be; and whether only with most clients and a shared prefix."""


def make_model(folder: Path, layers: int) -> None:
    """Random weights that never end a text; tokens are words: w3 to w15999."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = transformers_llama(**MODEL, num_hidden_layers=layers)
    model.model.embed_tokens.weight.data[:3] = 0
    model.save_pretrained(folder)
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>"])}
    words |= {f"w{i}": i for i in range(len(words), MODEL["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def prompts(clients: int, length: int, shared: int, seed: int) -> Tokens:
    """Of so many tokens each, the first ``shared`` of which are the same in all, whatever the ``seed``: a
    system prompt outlives its requests.
    """
    first = np.random.default_rng(shared).integers(3, MODEL["vocab_size"], shared).tolist()
    random = np.random.default_rng([clients, shared, seed])
    return [first + random.integers(3, MODEL["vocab_size"], length - shared).tolist() for _ in range(clients)]


@dataclass(slots=True)
class Found:
    """What is recorded of one contender."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    """By "clients/shared tokens", of each round: tokens/s by its own time and by the clock, and the median
    of the times of the first tokens (0: not told)."""
    answers: int = 0
    others: int = 0
    """How many of the answers were others than the first contender's."""
    peak: float = 0.0
    """MiB."""


def measured(options: argparse.Namespace) -> Iterator[dict[str, Found]]:
    """What has been found, after each turn of a contender."""
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary) / "model"
        make_model(folder, options.layers)
        contenders: dict[str, Process | Server] = {}
        for name in LIBRARIES[options.library]:
            if (options.only and name not in options.only) or (name == "vllm serve" and not options.vllm):
                continue
            maker = MAKERS.get(name)
            python = options.vllm if name == "vllm serve" else sys.executable
            if maker is not None:
                contenders[name] = stack.enter_context(process(maker, folder))
            else:
                contenders[name] = stack.enter_context(server(name, folder, python))
            found[name] = Found()
        for one in contenders.values():  # all of them start meanwhile
            one.run(prompts(2, 8, 0, 1 << 20), 2)
        sizes = itertools.product(range(options.rounds), options.shared, options.clients)
        for number, shared, clients in sizes:
            wanted, right = prompts(clients, options.prompt, shared, number), None
            for name, one in contenders.items():
                if number and name in SLOW:
                    continue
                seen, kept = one.run(wanted, options.new), found[name]
                tokens = clients * options.new
                first = statistics.median(seen.first) if seen.first else 0.0
                rates = [tokens / seen.own, tokens / seen.clock, first]
                kept.rounds.setdefault(f"{clients}/{shared}", []).append(rates)
                right = right or seen.answers
                kept.answers += clients
                kept.others += sum(a != b for a, b in zip(seen.answers, right, strict=True))
                kept.peak = max(kept.peak, peak_memory(one.pid))
                shown = ", ".join(f"{rate:.2f}" for rate in rates)
                print(f"{clients} clients, {shared} shared, {name}: {shown}", file=sys.stderr, flush=True)
                yield found


# What is shown of it.


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """By their marks."""
    return {
        library: f"{run['about']}, {rounds_of(run['found'])}.\n\n{shown(run['found'])}"
        for library, run in record.items()
    }


def median(rounds: Sequence[Sequence[float]], which: int) -> float:
    return statistics.median(one[which] for one in rounds)


def place(size: str) -> tuple[int, int]:
    """In which order sizes are shown: those that share most first, few clients before many."""
    clients, shared = map(int, size.split("/"))
    return -shared, clients


def rounds_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """How many rounds there were by the number of clients; then the contenders of which there were others."""

    def counts(one: Mapping[str, Any]) -> dict[int, int]:
        each = sorted((int(size.split("/")[0]), len(rounds)) for size, rounds in one["rounds"].items())
        return dict(each)

    by_name = {name: counts(one) for name, one in found.items()}
    usual = next(iter(by_name.values()))
    clients = ", ".join(map(str, usual))
    text = f"rounds: {', '.join(map(str, usual.values()))} with {clients} clients"
    for name, own in by_name.items():
        if any(usual.get(each) != count for each, count in own.items()):
            text += f"; {name}: {', '.join(map(str, own.values()))}"
    return text


def added(before: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """A record of two runs, which differ in their sizes."""
    if before.get("about", run["about"]) != run["about"]:
        raise SystemExit(f"--add: the record is of {before['about']}; this run is of {run['about']}")
    found = {**before.get("found", {})}
    for name, one in run["found"].items():
        other = found.get(name, asdict(Found()))
        found[name] = {
            "rounds": {**other["rounds"], **one["rounds"]},
            "answers": other["answers"] + one["answers"],
            "others": other["others"] + one["others"],
            "peak": max(other["peak"], one["peak"]),
        }
    return {**run, "foreign_cores": max(before.get("foreign_cores", 0), run["foreign_cores"]), "found": found}


def common(rounds: Iterable[Mapping[str, Any]]) -> list[str]:
    """The sizes that all have been measured with."""
    return sorted(set.intersection(*map(set, rounds)), key=place)


def shown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Tokens/s, and in brackets the times of the first contender's; the first token with most clients."""
    floor = next(iter(found.values()))["rounds"]
    sizes = common(one["rounds"] for one in found.values())
    largest = {size.split("/")[1]: size for size in sizes}.values()
    head = ["tokens/s (ratio), clients/tokens shared", *sizes]
    head += [f"first token, s: {size}" for size in largest]
    rows = []
    for name, one in found.items():
        rates = {size: median(one["rounds"][size], 0) for size in sizes}
        cells = [f"{rate:,.1f} ({rate / median(floor[size], 0):.2f})" for size, rate in rates.items()]
        firsts = [median(one["rounds"][size], 2) for size in largest]
        cells += [f"{first:,.2f}" if first else "not told" for first in firsts]
        same = f"{one['answers'] - one['others']}/{one['answers']}" if one["answers"] else "not compared"
        rows.append([name, *cells, f"{one['peak']:,.0f}", same])
    return table([*head, "peak memory, MiB", "same answers"], rows)


def aims(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The least ratio of what is aimed at, where both have been measured."""
    rows = []
    for ours, theirs, least, largest in AIMS:
        if ours not in found or theirs not in found:
            continue
        mine, other = found[ours]["rounds"], found[theirs]["rounds"]
        sizes = common((mine, other))
        sizes = [size for size in sizes if not size.endswith("/0")][-1:] if largest else sizes
        if sizes:
            ratio, where = min((median(mine[size], 0) / median(other[size], 0), size) for size in sizes)
            reached = "yes" if ratio >= least else "no"
            rows.append([ours, theirs, f"{least:g}", f"{ratio:.2f}", where, reached])
    return table(["", "beside", "at least", "least found", "clients/tokens shared", "reached"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--shared", type=int, nargs="+", default=[112, 0], help="of them the same in all")
    parser.add_argument("--new", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--only", nargs="+", help="these contenders")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--out", type=Path, default=DOCS / "benchmarks", help="where the record is")
    parser.add_argument("--add", action="store_true", help="keep what the record has of other sizes")
    options = parser.parse_args(arguments)
    os.environ |= {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "THP_MEM_ALLOC_ENABLE": "1",  # for all, since kvcache serve sets it
    }  # fmt: skip
    packages = ["torch", "transformers"] if options.library == "transformers" else ["mlx", "mlx-lm"]
    about = [machine(), *(f"{name} {version(name)}" for name in packages)]
    about += [f"{Path(name).name} preloaded" for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    about += [f"prompts of {options.prompt} tokens, answers of {options.new}"]
    others = Foreign()
    record = load(options.out / RECORD)
    before = record.get(options.library, {}) if options.add else {}
    for found in measured(options):
        run = {
            "about": ", ".join(about),
            "foreign_cores": others.cores(),
            "found": {name: asdict(one) for name, one in found.items()},
        }
        record[options.library] = added(before, run)
        save(options.out / RECORD, record)
    run = record[options.library]
    print(f"{tables({options.library: run})[options.library]}\n\n{aims(run['found'])}")


if __name__ == "__main__":
    main()
