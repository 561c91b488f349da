"""One layer's ``update`` of one token: HFCache beside transformers' own caches, microseconds.

    python benchmarks/transformers_update.py

8 KV heads of 128 in float32, one thread, the median of 200 steps after a history of that length. The
layers are those of a model with a sliding window of 1024 and of one without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from kvcache.integrations.transformers import HFCache, HFStaticCache

HEADS, DIM, WINDOW, STEPS = 8, 128, 1024, 200
CACHES: dict[str, Callable[[Any, int], Any]] = {
    "HFCache": lambda config, capacity: HFCache(config, capacity=capacity),
    "DynamicCache": lambda config, capacity: transformers.DynamicCache(config=config),
    "HFStaticCache": lambda config, capacity: HFStaticCache(config, capacity=capacity),
    "StaticCache": lambda config, capacity: transformers.StaticCache(config, max_cache_len=capacity),
}


def config(window: int | None) -> Any:
    kind = "full_attention" if window is None else "sliding_attention"
    return transformers.Gemma3TextConfig(
        num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM,
        sliding_window=window or WINDOW, layer_types=[kind],
    )  # fmt: skip


def median_step(cache: Any, rows: int, history: int) -> float:
    past = torch.zeros(rows, HEADS, history, DIM)
    token = torch.randn(rows, HEADS, 1, DIM)
    cache.update(past, past, 0)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        cache.update(token, token, 0)
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def table(rows: int, window: int | None, histories: Sequence[int]) -> None:
    shown = "full attention" if window is None else f"window {window}"
    print(f"| {shown}, {rows} rows | " + " | ".join(f"{n:,} tokens" for n in histories) + " |")
    print("|---" * (len(histories) + 1) + "|")
    for name, make in CACHES.items():
        with torch.no_grad():
            steps = [
                median_step(make(config(window), history + STEPS), rows, history) for history in histories
            ]
        print(f"| {name} | " + " | ".join(f"{step:,.0f}" for step in steps) + " |")
    print()


if __name__ == "__main__":
    torch.set_num_threads(1)
    table(1, None, (1024, 8192))
    table(4, None, (1024,))
    table(1, WINDOW, (1024, 8192))
