"""Where cells are short: what is found again, what an eviction costs: ``python -m benchmarks.pressure``."""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

import kvcache
import ml
from benchmarks.pages import show, table
from benchmarks.scale_simulation import Host, ideal
from benchmarks.scale_traffic import Request, Traffic, requests
from kvcache import Batch, PrefixCache
from kvcache.cache import SnapshotCache
from kvcache.prefix.tree_entry import TreeEntry
from kvcache.testing.bench.timing import machine

TRAFFIC = Traffic(count=1000, system=480, document=320, question=64, answer=192)
"""That of ``benchmarks.scale``, eight times as long."""
SHORT = 16
"""Tokens of a short conversation."""


def found_in_cells(stream: Sequence[Request], cells: int) -> int:
    """Tokens of all prompts that a PrefixCache over so many cells found; each request fits in these."""
    with ml.open_backend("numpy") as backend:
        host = Host(backend, None, cells)
        with host.prefix:
            return sum(host.serve(request.prompt, request.answer) for request in stream)


def found_by_blocks(stream: Sequence[Request], cells: int, size: int) -> int:
    """The same by a model of blocks of ``size`` tokens, as vLLM has them.

    A block is known by all tokens up to its end, and shared when it is full. The least recently used goes
    first, of one request the last. At least one token of a prompt is evaluated.
    """
    free: OrderedDict[object, None] = OrderedDict()  # the blocks that nobody uses, the next to go first
    found = 0
    for number, request in enumerate(stream):
        tokens = np.concatenate((request.prompt, request.answer))
        digest = hashlib.blake2b(digest_size=16)
        keys: list[object] = []
        for start in range(0, tokens.size - size + 1, size):
            digest.update(tokens[start : start + size].tobytes())
            keys.append(digest.digest())
        known = 0
        while known < (request.prompt.size - 1) // size and keys[known] in free:
            known += 1
        found += known * size
        for key in keys:
            free.pop(key, None)
        if tokens.size % size:
            keys.append(number)
        while free and len(free) + len(keys) > cells // size:
            free.popitem(last=False)
        free.update(dict.fromkeys(reversed(keys)))
    return found


def seconds_of_a_prompt(conversations: int, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """What a prompt of ``tokens`` takes of the processor in each round: in free cells, and in full ones.

    The conversations are of ``SHORT`` tokens each, and the prompt takes the place of the oldest.
    """
    cells = conversations * SHORT + tokens
    with ml.open_backend("numpy") as backend:
        cache = kvcache.CausalCache()
        cache.init(backend, ml.DType.F16, 1, cells, cells)
        with PrefixCache(cache) as prefix:
            _evaluate(cache, 0, conversations * SHORT)
            for i in range(conversations):
                node = prefix.tree.radix_tree.add(
                    prefix.tree.radix_tree.root, np.arange(i, i + SHORT) * conversations
                )
                snapshot = cache.snapshot(0, i * SHORT, (i + 1) * SHORT)
                node.data = TreeEntry(0, snapshot)
                prefix.tree.device.add(node, snapshot.nbytes)
            cache.remove(0, 0)
            free = [_seconds(prefix, tokens, keep=False) for _ in range(rounds)]
            _seconds(prefix, tokens, keep=True)
            return free, [_seconds(prefix, tokens, keep=True) for _ in range(rounds)]


def _seconds(prefix: PrefixCache, tokens: int, keep: bool) -> float:
    ids = np.random.default_rng(prefix.stats.sessions).integers(1 << 40, 1 << 41, tokens)
    start = time.process_time()
    session = prefix.begin(ids)
    _evaluate(prefix.cache, session.seq, tokens)
    spent = time.process_time() - start
    session.close(keep)
    return spent


def _evaluate(cache: SnapshotCache, seq: int, tokens: int) -> None:
    with cache.backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(range(tokens), [seq] * tokens))
        cache.set_layer(0)
        key = ctx.zeros((tokens, 1, 2), ml.DType.F16)
        cache.put(ctx, key, key)


def _reuse_table(traffic: Traffic, seeds: int, shares: Sequence[float]) -> str:
    rows: dict[float, list[tuple[float, ...]]] = {share: [] for share in shares}
    for seed in range(seeds):
        stream = list(requests(replace(traffic, seed=seed)))
        best, new = ideal(stream)
        for share in shares:
            cells = int(share * new)
            hits = found_in_cells(stream, cells), *(found_by_blocks(stream, cells, size) for size in (16, 1))
            rows[share].append(tuple(found / best for found in hits))
    lines = []
    for share, found in rows.items():
        means = (f"{statistics.mean(column):.1%}" for column in zip(*found, strict=True))
        lines.append((f"{share:.0%} of the tokens", *means))
    return table(("cells for", "PrefixCache", "blocks of 16", "blocks of 1"), lines)


def _costs(conversations: Sequence[int], tokens: int, rounds: int) -> Iterator[tuple[str, ...]]:
    for count in conversations:
        free, full = (statistics.median(times) for times in seconds_of_a_prompt(count, tokens, rounds))
        each = (full - free) / (tokens / SHORT) * 1e6
        yield f"{count:,}", f"{free * 1e3:.1f}", f"{full * 1e3:.1f}", f"{each:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=["reuse", "cost"], choices=["reuse", "cost"])
    parser.add_argument("--requests", type=int, default=TRAFFIC.count)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.03, 0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--conversations", type=int, nargs="+", default=[8_000, 80_000])
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt that needs cells")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if "reuse" in args.parts:
        print("## Found again, of what a cache without limit finds\n")
        print(_reuse_table(replace(TRAFFIC, count=args.requests), args.seeds, args.shares), end="\n\n")
    if "cost" in args.parts:
        print(f"## A prompt of {args.tokens:,} tokens among conversations of {SHORT} ({machine()})\n")
        costs = _costs(args.conversations, args.tokens, args.rounds)
        show(("conversations", "cells free, ms", "cells full, ms", "per eviction, us"), costs)


if __name__ == "__main__":
    main()
