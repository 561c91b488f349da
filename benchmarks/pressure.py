"""What a prompt takes where others have to be evicted for it: ``python -m benchmarks.pressure``."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

import kvcache
import ml
from benchmarks.pages import show
from benchmarks.timing import machine
from kvcache import Batch, PrefixCache
from kvcache.cache import SnapshotCache

SHORT = 16
"""Tokens of a short conversation."""


def seconds_of_a_prompt(conversations: int, tokens: int, rounds: int) -> tuple[list[float], list[float]]:
    """What a prompt of ``tokens`` takes of the processor in each round: in free cells, and in full ones.

    The conversations are of ``SHORT`` tokens each, and the prompt takes the place of the oldest.
    """
    cells = conversations * SHORT + tokens
    with ml.open_backend("numpy") as backend:
        cache = kvcache.CausalCache()
        cache.init(backend, ml.DType.F16, 1, cells, cells)
        with PrefixCache(cache) as prefix:
            for i in range(conversations):
                session = prefix.begin(np.arange(i, i + SHORT) * conversations)
                _evaluate(cache, session.seq, SHORT)
                session.close()
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


def _costs(conversations: Sequence[int], tokens: int, rounds: int) -> Iterator[tuple[str, ...]]:
    for count in conversations:
        free, full = (statistics.median(times) for times in seconds_of_a_prompt(count, tokens, rounds))
        each = (full - free) / (tokens / SHORT) * 1e6
        yield f"{count:,}", f"{free * 1e3:.1f}", f"{full * 1e3:.1f}", f"{each:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pressure", description=__doc__)
    parser.add_argument("--conversations", type=int, nargs="+", default=[8_000, 80_000])
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt that needs cells")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(f"## A prompt of {args.tokens:,} tokens among conversations of {SHORT} ({machine()})\n")
    costs = _costs(args.conversations, args.tokens, args.rounds)
    show(("conversations", "cells free, ms", "cells full, ms", "per eviction, us"), costs)


if __name__ == "__main__":
    main()
