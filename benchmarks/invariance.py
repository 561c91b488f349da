"""How often a cached prefix changes an answer, and what ``batch_invariant`` costs.

    python -m benchmarks.invariance [--prompts 200] [--backends torch mlx numpy] [--rounds 3] [--show]

The bundled model. Prompts go on from somewhere in those before them, as conversations do; every answer is
compared with that of an empty cache, with the option and without. Then all prompts are served, four at a
time, by an engine with the option and one without in turn: tokens of prompts and answers per second. Writes
docs/benchmarks/invariance.json and the table of docs/prefix-cache.md.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import ml
from benchmarks.pages import DOCS, fill, load, save, table
from benchmarks.timing import machine
from kvcache_engine.engine import Engine
from kvcache_engine.loading import bundled_model, load_model
from kvcache_engine.options import EngineOptions
from kvcache_engine.requests import GenerationOptions

RECORD = DOCS / "benchmarks" / "invariance.json"
PAGE = DOCS / "prefix-cache.md"
BLOCK, ANSWER, LONGEST = 32, 16, 160
WAYS = "without", "with"


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    draw, known = random.Random(seed), [[1]]
    for _ in range(count):
        before = draw.choice(known)
        prompt = before[: draw.randint(1, len(before))]
        known.append([*prompt, *(draw.randrange(3, 500) for _ in range(draw.randint(1, 80)))][:LONGEST])
    return known[1:]


def engine(model: Any, invariant: bool) -> Engine:
    options = EngineOptions(
        capacity=256, block_size=BLOCK, cache_dtype=model.dtype, batch_invariant=invariant
    )
    return Engine(model, None, options)


def answers(one: Engine, prompts: Sequence[list[int]]) -> list[Any]:
    return one.complete(prompts, GenerationOptions(ANSWER, ignore_eos=True))


def changed(model: Any, prompts: Sequence[list[int]], invariant: bool) -> tuple[int, int]:
    """Of how many prompts with a hit the answer differs from that of an empty cache; and of how many."""
    differ = hits = 0
    with engine(model, invariant) as warm:
        for prompt in prompts:
            (found,) = answers(warm, [prompt])
            if found.reused:
                with engine(model, invariant) as cold:
                    (right,) = answers(cold, [prompt])
                hits += 1
                differ += found.tokens != right.tokens
    return differ, hits


def speed(model: Any, prompts: Sequence[list[int]], invariant: bool) -> float:
    """Tokens of prompts and answers per second, of an engine that begins empty."""
    with engine(model, invariant) as one:
        began = time.perf_counter()
        found = answers(one, prompts)
        seconds = time.perf_counter() - began
    return (
        sum(len(prompt) + len(answer.tokens) for prompt, answer in zip(prompts, found, strict=True)) / seconds
    )


def measured(backend: ml.Backend, dtype: ml.DType, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    model = load_model(bundled_model(), backend, dtype=dtype)
    ways = (False, True)
    counts = {way: changed(model, prompts, way) for way in ways}
    speeds: dict[bool, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            speeds[way].append(speed(model, prompts[:40], way))
    return {
        ("with" if way else "without"): {
            "changed": counts[way][0], "hits": counts[way][1],
            "tokens_per_second": float(np.median(speeds[way])),
        }
        for way in ways
    }  # fmt: skip


def rows(record: dict[str, Any]) -> Iterator[list[str]]:
    by_backend: dict[str, list[dict[str, Any]]] = {}
    for name, found in record["measured"].items():
        by_backend.setdefault(name.partition(",")[0], []).append(found)
    for name, dtypes in by_backend.items():
        changed = {way: [f"{one[way]['changed']} of {one[way]['hits']}" for one in dtypes] for way in WAYS}
        speeds = [
            f"{one['with']['tokens_per_second'] / one['without']['tokens_per_second']:.2f}" for one in dtypes
        ]
        yield [name, *(", ".join(dict.fromkeys(each)) for each in (*changed.values(), speeds))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.invariance", description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--backends", nargs="+", default=["torch", "mlx", "numpy"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="only write the table of what was recorded")
    options = parser.parse_args()
    record = load(RECORD)
    for name in () if options.show else options.backends:
        with ml.open_backend(name) as backend:
            for dtype in (ml.DType.F32, ml.DType.BF16):
                found = measured(backend, dtype, prompts_of(options.prompts), options.rounds)
                record.setdefault("measured", {})[f"{name}, {dtype.name}"] = found
                record["machine"] = machine()
                save(RECORD, record)
    head = ["F32, BF16", "answers that a hit changed", "with `batch_invariant`", "tokens/s with it"]
    fill(PAGE, {"invariance": f"{table(head, rows(record))}\n\n{record['machine']}."})


if __name__ == "__main__":
    main()
