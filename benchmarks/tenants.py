"""Can a tenant tell by the clock what a stranger has asked? ``python -m benchmarks.tenants``.

``kvcache serve`` with host memory and a store, as a process on loopback. In each trial tenant ``a`` asks a
prompt that is new; then somebody asks a prompt as long and waits for the first token of the answer:

* ``stranger``: another tenant, the prompt that ``a`` has asked;
* ``nobody``: another tenant, a prompt that nobody has asked;
* ``own``: tenant ``a`` again, its own prompt: what a leak would look like.

The other tenant is a new one each time. The three take turns in an order drawn anew for each triple, so that
whatever else the machine does falls on all alike. ``stranger`` and ``own`` are compared with ``nobody``: by
the share of all pairs in which ``nobody`` took longer (0.5: a coin; it is the area under the curve of whoever
guesses by a threshold), and by a permutation test that changes the signs of the differences within triples.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import httpx
import numpy as np

from benchmarks.engines import listening
from benchmarks.timing import machine
from kvcache_engine.loading import bundled_model
from kvcache_engine.tokenizer import Tokenizer

KINDS = ("nobody", "stranger", "own")
PERMUTATIONS = 20_000
WARM = 10
"""Triples before those that count."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenants", description=__doc__)
    parser.add_argument("--triples", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=200, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    words = "-m kvcache_engine serve --port {port} --host-memory 64MiB --write-interval 0.5 --store "
    with (
        tempfile.TemporaryDirectory() as folder,
        listening("kvcache serve", f"{words}{folder}/store") as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        measure(http, rng, WARM, options.tokens)
        seconds, cached = measure(http, rng, options.triples, options.tokens)
    print(f"{machine()}; {options.triples} triples of prompts of {options.tokens} tokens\n")
    print(
        "| asked before by | first token, median ms [p10, p90] | pairs where nobody took longer [95 %] | p |"
    )
    print("|---|---|---|---|")
    for kind in KINDS:
        times = 1e3 * seconds[kind]
        low, middle, high = np.quantile(times, (0.1, 0.5, 0.9))
        told = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        if kind == "nobody":
            print(f"| nobody | {told} | | |")
            continue
        area, (least, most) = area_between(rng, seconds["nobody"], seconds[kind])
        chance = p_value(rng, seconds["nobody"] - seconds[kind])
        print(f"| {kind} | {told} | {area:.3f} [{least:.3f}, {most:.3f}] | {chance} |")
    print(f"\ncached_tokens told: { {kind: sorted(found) for kind, found in cached.items()} }")


def measure(
    http: httpx.Client, rng: np.random.Generator, triples: int, length: int
) -> tuple[dict[str, np.ndarray], dict[str, set[int]]]:
    """Seconds to the first token by kind, one of each triple, and all ``cached_tokens`` that were told."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    cached: dict[str, set[int]] = {kind: set() for kind in KINDS}
    words = Tokenizer.load(bundled_model()).vocab_size
    for _ in range(triples):
        for kind in rng.permutation(KINDS).tolist():
            theirs, others = rng.integers(3, words, (2, length)).tolist()
            ask(http, theirs, "a")
            salt = "a" if kind == "own" else f"b{rng.integers(1 << 62)}"
            took, found = ask(http, others if kind == "nobody" else theirs, salt)
            seconds[kind].append(took)
            cached[kind].add(found)
    return {kind: np.array(found) for kind, found in seconds.items()}, cached


def ask(http: httpx.Client, prompt: list[int], salt: str) -> tuple[float, int]:
    """Seconds until an answer of one token is there, and how many tokens the server says were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    began = time.perf_counter()
    reply = http.post("/v1/completions", json=body)
    took = time.perf_counter() - began
    found: Any = reply.raise_for_status().json()
    return took, found["usage"]["prompt_tokens_details"]["cached_tokens"]


def area_between(rng: np.random.Generator, slow: np.ndarray, fast: np.ndarray) -> tuple[float, np.ndarray]:
    """P(slow > fast), ties by halves, and its 95 % interval by the bootstrap over triples."""

    def area(rows: np.ndarray) -> float:
        return float(np.mean(np.sign(slow[rows][:, None] - fast[rows][None, :]) / 2 + 0.5))

    count = slow.size
    drawn = [area(rng.integers(0, count, count)) for _ in range(1000)]
    return area(np.arange(count)), np.quantile(drawn, (0.025, 0.975))


def p_value(rng: np.random.Generator, differences: np.ndarray) -> str:
    """Two-sided, that the ranks of the differences have no sign; each is as likely with the other one."""
    ranks = np.sign(differences) * (np.argsort(np.argsort(np.abs(differences))) + 1)
    signs = rng.choice((-1, 1), (PERMUTATIONS, differences.size))
    beyond = int(np.sum(np.abs(signs @ ranks) >= abs(ranks.sum())))
    return f"{(beyond + 1) / (PERMUTATIONS + 1):.3f}" if beyond else f"< {1 / PERMUTATIONS:g}"


if __name__ == "__main__":
    main()
