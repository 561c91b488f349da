"""What agents' requests find again, within budgets: ``python -m benchmarks.agents --trace agents.jsonl.xz``.

A trace is a file with a JSON object per line (.xz is read too), whose ``hash_ids`` name the prompt's blocks,
such as those of github.com/callanjfox/kv-cache-tester. The requests run through the shipped PrefixCache, in
which one token stands for a block; only K and V are small. Beside it stand two models: *blocks by LRU*, which
share whole blocks as vLLM's do, and *Belady*, which evicts what is used again last, and knows the future. A
prompt's last block is always evaluated.
"""

from __future__ import annotations

import argparse
import heapq
import json
import lzma
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import kvcache
import ml
from benchmarks.pages import show
from kvcache import Batch, PrefixCache
from kvcache.testing.bench.timing import machine

BYTES = 16
"""Of a token: K and V of one layer, one head of two numbers, F32."""
Prompts = Sequence[np.ndarray]
"""The blocks of each."""


def read_trace(path: Path, count: int | None = None) -> list[np.ndarray]:
    """The prompts of a trace, in blocks, in the order of their time; ``count``: the first ones only."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        rows = sorted(map(json.loads, lines), key=lambda row: row["timestamp"])
    return [np.array(row["hash_ids"], dtype=np.int64) for row in rows if row["hash_ids"]][:count]


def found_by_prefix_cache(prompts: Prompts, budget: int) -> int:
    """Blocks of prompts that a PrefixCache found that keeps ``budget`` of them."""
    longest = max(prompt.size for prompt in prompts) + 1
    found = 0
    with ml.open_backend("numpy") as backend:
        cache = kvcache.CausalCache()
        cache.init(backend, ml.DType.F32, max_sequences=1, capacity=budget + 2 * longest, max_batch=longest)
        with PrefixCache(cache, budget=budget * BYTES) as prefix:
            for prompt in prompts:
                with prefix.begin(prompt) as session, backend.new_context() as ctx:
                    found += session.cached
                    tokens = range(session.cached, prompt.size)
                    cache.start_forward(ctx, Batch(tokens, [session.seq] * len(tokens)))
                    cache.set_layer(0)
                    key = ctx.zeros((len(tokens), 1, 2), ml.DType.F32)
                    cache.put(ctx, key, key)
    return found


def found_by_blocks(prompts: Prompts, budget: int) -> int:
    """The same by a model of blocks: the least recently used goes first, of one prompt the last.

    A block is known by all that leads up to it.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    found = 0
    for prompt in prompts:
        keys = list(_prefixes(prompt))
        found += min(_leading(keys, kept), len(keys) - 1)
        for key in reversed(keys):
            kept.pop(key, None)
            kept[key] = None
        while len(kept) > budget:
            kept.popitem(last=False)
    return found


def found_by_belady(prompts: Prompts, budget: int) -> int:
    """The same by one who knows the future: an upper bound."""
    listed = [list(_prefixes(prompt)) for prompt in prompts]
    uses: dict[int, list[int]] = {}
    for at, keys in reversed([*enumerate(listed)]):
        for key in keys:
            uses.setdefault(key, []).append(at)
    kept: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []
    found = 0
    for keys in listed:
        found += min(_leading(keys, kept), len(keys) - 1)
        for depth, key in enumerate(keys):
            uses[key].pop()
            kept[key] = uses[key][-1] if uses[key] else len(listed)
            heapq.heappush(order, (-kept[key], -depth, key))
        while len(kept) > budget:
            when, _, key = heapq.heappop(order)
            if kept.get(key) == -when:
                del kept[key]
    return found


def _leading(keys: Sequence[int], kept: OrderedDict[int, None] | dict[int, int]) -> int:
    return next((i for i, key in enumerate(keys) if key not in kept), len(keys))


def _prefixes(prompt: np.ndarray) -> Iterator[int]:
    found = 0
    for block in prompt.tolist():
        found = hash((found, block))
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--budgets", type=int, nargs="+", default=[14_000, 22_000, 44_000], help="in blocks")
    parser.add_argument("--count", type=int, help="the first requests only")
    options = parser.parse_args()
    prompts = read_trace(options.trace, options.count)
    blocks = sum(prompt.size for prompt in prompts)
    distinct = len({key for prompt in prompts for key in _prefixes(prompt)})
    print(f"{machine()}, kvcache {kvcache.__version__}")
    print(f"\n{len(prompts):,} requests, {blocks:,} blocks, {distinct:,} of them distinct; found:\n")
    models = found_by_prefix_cache, found_by_blocks, found_by_belady
    show(
        ("room, blocks", "PrefixCache", "blocks by LRU", "Belady"),
        (
            (f"{budget:,}", *(f"{model(prompts, budget) / blocks:.1%}" for model in models))
            for budget in options.budgets
        ),
    )
    print(f"\nWith room for all: {found_by_blocks(prompts, distinct) / blocks:.1%}")


if __name__ == "__main__":
    main()
