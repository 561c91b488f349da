"""What each eviction policy finds again, within budgets, on synthetic traffic and on traces of real requests.

    python -m benchmarks.eviction_policies [--trace conversation_trace.jsonl ...] [--budgets 600 2000 6000]

Requests run through the shipped PrefixCache; only K and V are small. A trace is a file of the form that
Mooncake released (FAST25-release/traces of github.com/kvcache-ai/Mooncake): a JSON object per line whose
``hash_ids`` are the prompt's blocks of 512 tokens; a block is one token here. *found*: blocks of prompts
that were there. *work saved*: the same, each weighed by what its tokens take to compute, which doubles at
position 32,768. *furthest*: blocks go whose next use is furthest in the future (Belady), which no policy
can know.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import kvcache
import ml
from benchmarks.pages import show
from benchmarks.scale_simulation import Host
from benchmarks.scale_traffic import Traffic, requests
from kvcache.prefix.eviction_policy import GDSF, LRU, PrefixEvictionPolicy, Use
from kvcache.testing.bench.timing import machine

BLOCK = 512
_DOUBLED = 32768 // BLOCK
Prompts = Sequence[np.ndarray]


@dataclass(frozen=True, slots=True)
class LFU:
    """The least frequently used goes first, of equals the least recently used: a policy of one's own."""

    def score(self, use: Use) -> float:
        return use.count + use.time / (1 << 40)


POLICIES: dict[str, PrefixEvictionPolicy] = {"lru": LRU(), "lfu": LFU(), "gdsf": GDSF(_DOUBLED)}


@dataclass(slots=True)
class Found:
    """Blocks of prompts, how many of them were there, and the same by what they take to compute."""

    blocks: int = 0
    hits: int = 0
    work: float = 0.0
    saved: float = 0.0

    def add(self, size: int, hits: int) -> None:
        self.blocks += size
        self.hits += hits
        self.work += _work(size)
        self.saved += _work(hits)

    def shares(self) -> tuple[float, float]:
        return self.hits / max(1, self.blocks), self.saved / max(1e-9, self.work)


def _work(blocks: int) -> float:
    return blocks + blocks**2 / 2 / _DOUBLED


def trace(path: Path, count: int | None = None) -> list[np.ndarray]:
    """The prompts of a trace, in blocks."""
    with path.open(encoding="utf-8") as lines:
        found = [np.array(json.loads(line)["hash_ids"], dtype=np.int64) for line in lines]
    return [prompt for prompt in found if prompt.size][:count]


def synthetic(count: int = 4000, seed: int = 0) -> list[np.ndarray]:
    """Conversations of several turns with system prompts and documents; one request in four is alone."""
    rnd = np.random.default_rng(seed)
    traffic = Traffic(count, 40, 30, system=2, document=20, question=2, answer=1, turns=4.0, seed=seed)
    found: list[np.ndarray] = []
    for request in requests(traffic):
        found.append(request.prompt)
        if rnd.random() < 1 / 3:
            found.append(rnd.integers(1 << 30, 1 << 40, int(rnd.integers(4, 60))))
    return found


def run(prompts: Prompts, budget: int, policy: PrefixEvictionPolicy) -> Found:
    """Through a PrefixCache that keeps ``budget`` blocks."""
    found = Found()
    longest = max(prompt.size for prompt in prompts) + 1
    with ml.open_backend("numpy") as backend:
        host = Host(backend, budget, budget + 2 * longest, policy=policy)
        host.prefix.evictor.grain = 1
        with host.prefix:
            for prompt in prompts:
                found.add(prompt.size, host.serve(prompt, prompt[:0]))
    return found


def furthest(prompts: Prompts, budget: int) -> Found:
    """What could be found by who knew the future: an upper bound."""
    found = Found()
    keys = [list(_prefixes(prompt)) for prompt in prompts]
    uses: dict[int, list[int]] = {}
    for at, prompt in enumerate(keys):
        for key in prompt:
            uses.setdefault(key, []).append(at)
    for times in uses.values():
        times.reverse()
    kept: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    for prompt in keys:
        hits = next((i for i, key in enumerate(prompt) if key not in kept), len(prompt))
        found.add(len(prompt), min(hits, len(prompt) - 1))
        for depth, key in enumerate(prompt):
            uses[key].pop()
            kept[key] = uses[key][-1] if uses[key] else len(prompts)
            heapq.heappush(order, (-kept[key], -depth, key))
        while len(kept) > budget:
            when, _, key = heapq.heappop(order)
            if kept.get(key) == -when:
                del kept[key]
    return found


def _prefixes(prompt: np.ndarray) -> Iterator[int]:
    found = 0
    for block in prompt.tolist():
        found = hash((found, block))
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eviction_policies", description=__doc__)
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="files as Mooncake released them")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[600, 2000, 6000], help="blocks that are kept"
    )
    parser.add_argument("--count", type=int, help="the first requests only")
    options = parser.parse_args()
    streams = {path.stem: trace(path, options.count) for path in options.trace}
    streams["synthetic"] = synthetic(options.count or 4000)
    print(f"{machine()}, kvcache {kvcache.__version__}")
    for name, prompts in streams.items():
        blocks = sum(prompt.size for prompt in prompts)
        print(f"\n{name}: {len(prompts):,} requests, {blocks:,} blocks; found / work saved\n")
        show(("room (blocks)", *POLICIES, "furthest"), (row(prompts, budget) for budget in options.budgets))


def row(prompts: Prompts, budget: int) -> list[str]:
    ours = (run(prompts, budget, policy) for policy in POLICIES.values())
    told = (found.shares() for found in (*ours, furthest(prompts, budget)))
    return [f"{budget:,}", *(f"{hits:.1%} / {saved:.1%}" for hits, saved in told)]


if __name__ == "__main__":
    main()
