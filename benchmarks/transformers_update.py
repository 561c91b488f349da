"""One layer's ``update`` of one token, and a model's whole step: HFCache beside transformers' own caches.

    python benchmarks/transformers_update.py

Updates in microseconds: 8 KV heads of 128 in float32, one thread, the median of 200 steps after a history of
that length. Steps in milliseconds: one row of a Llama of two layers, 16 heads of 64 over 4 KV heads, the
median of 20. Turns in milliseconds of the processor: ``generate`` of 96 tokens behind a prompt of 64, a
Llama of 12 layers of 256, the median of five rounds in which the caches take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from benchmarks.models import TWO_LAYERS, transformers_llama
from benchmarks.pages import table
from kvcache.integrations.transformers import HFCache, HFStaticCache

HEADS, DIM, STEPS, TURNS = 8, 128, 200, 20
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class InPlaceLayer(transformers.cache_utils.DynamicLayer):  # type: ignore[misc]
    """What a cache in place costs by hand: two copies and two views."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.stored = capacity, 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        rows, heads, new, dim = key_states.shape
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = torch.zeros(2, rows, heads, self.capacity, dim)
        begin, self.stored = self.stored, self.stored + new
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, begin : self.stored].copy_(states)
        self.keys, self.values = (buffer[:, :, : self.stored] for buffer in self.buffers)
        return self.keys, self.values


def in_place(config: Any, capacity: int) -> transformers.Cache:
    return transformers.Cache(layers=[InPlaceLayer(capacity) for _ in range(config.num_hidden_layers)])


CACHES: dict[str, Callable[[Any, int], Any]] = {
    "HFCache": lambda config, capacity: HFCache(config, capacity=capacity),
    "DynamicCache": lambda config, capacity: transformers.DynamicCache(config=config),
    "HFStaticCache": lambda config, capacity: HFStaticCache(config, capacity=capacity),
    "StaticCache": lambda config, capacity: transformers.StaticCache(config, max_cache_len=capacity),
}


CONFIG = transformers.Gemma3TextConfig(
    num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM,
    layer_types=["full_attention"],
)  # fmt: skip


def median_step(cache: Any, history: int) -> float:
    past = torch.zeros(1, HEADS, history, DIM)
    token = torch.randn(1, HEADS, 1, DIM)
    cache.update(past, past, 0)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        cache.update(token, token, 0)
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def update_table(histories: Sequence[int]) -> None:
    found = []
    for name, make in CACHES.items():
        with torch.no_grad():
            steps = [median_step(make(CONFIG, history + STEPS), history) for history in histories]
        found.append((name, *(f"{step:,.0f}" for step in steps)))
    print(table(("full attention", *(f"{n:,} tokens" for n in histories)), found), end="\n\n")


def step_table(histories: Sequence[int]) -> None:
    found = {
        f"{name}, {n:,} tokens": median_steps(dtype, n) for name, dtype in DTYPES.items() for n in histories
    }
    rows = ((name, *(f"{steps[name]:,.1f}" for steps in found.values())) for name in CACHES)
    print(table(("one row", *found), rows), end="\n\n")


def median_steps(dtype: torch.dtype, history: int) -> dict[str, float]:
    """Milliseconds of a step with each of the caches, which take turns."""
    model = transformers_llama(**TWO_LAYERS).to(dtype)
    caches = {name: make(model.config, history + TURNS) for name, make in CACHES.items()}
    prompt, token = torch.randint(512, (1, history)), torch.tensor([[5]])
    times: dict[str, list[float]] = {name: [] for name in CACHES}
    with torch.no_grad():
        for cache in caches.values():
            model(prompt, cache=cache, logits_to_keep=1)
        for _ in range(TURNS):
            for name, cache in caches.items():
                start = time.perf_counter_ns()
                model(token, cache=cache)
                times[name].append((time.perf_counter_ns() - start) / 1e6)
    return {name: statistics.median(taken) for name, taken in times.items()}


def turn_table(rounds: int = 5) -> None:
    """Short answers of a small model, where what a cache does in Python weighs most."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=12,
            num_attention_heads=8, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    prompt = torch.randint(512, (1, 64))
    contenders = {name: CACHES[name] for name in ("HFCache", "DynamicCache")}
    contenders["in place, by hand"] = in_place
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, taken in times.items():
            cache, start = contenders[name](model.config, 512), time.process_time()
            model.generate(prompt, cache=cache, max_new_tokens=96, do_sample=False)
            taken.append((time.process_time() - start) * 1e3)
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    rows = ((name, f"{median:,.0f}") for name, median in medians.items())
    print(table(("a turn of 64 and 96 tokens", "ms of the processor"), rows), end="\n\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    update_table((1024, 8192))
    step_table((4000,))
    turn_table()
