"""Our prompt caches beside mlx-lm's own, inside mlx-lm: ``python -m benchmarks.mlx_lm_cache``.

Milliseconds of a decoded token of a random Llama (F32, small but for its attention): of one conversation by
``generate_step``, after 1,024 and 8,192 tokens, and of batches. Both caches take turns round by round;
ratios are to mlx-lm's.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.timing import machine
from kvcache.integrations.mlx_lm import CachePool
from kvcache.testing.bench import Contender, interleave

STEPS = 16
"""Tokens of a round."""


def model_of(layers: int, hidden: int = 512, heads: int = 16) -> Any:
    arguments = llama.ModelArgs(
        model_type="llama", hidden_size=hidden, num_hidden_layers=layers, intermediate_size=256,
        num_attention_heads=heads, num_key_value_heads=heads // 4, head_dim=64, rms_norm_eps=1e-5,
        vocab_size=512, max_position_embeddings=32768,
    )  # fmt: skip
    mx.random.seed(1)
    model = llama.Model(arguments)
    mx.eval(model.parameters())
    return model


def fill(cache: list[Any], tokens: int, kv_heads: int = 4) -> None:
    """Store random keys and values in place of a prompt's."""
    for entry in cache:
        entry.update_and_fetch(*mx.random.normal((2, 1, kv_heads, tokens, 64)))
        mx.eval(entry.state)


def conversation(model: Any, history: int, cache: list[Any]) -> Contender:
    """A round continues the conversation by ``STEPS`` tokens, and the next one takes them back."""
    fill(cache, history, model.args.num_key_value_heads)

    def step() -> None:
        for _ in generate_step(mx.array([1]), model, max_tokens=STEPS, prompt_cache=cache):
            pass

    def back() -> None:
        for entry in cache:
            entry.trim(entry.offset - history)

    return Contender(step, finish=back)


def batch(model: Any, own: Sequence[int], shared: int, pool: CachePool | None) -> Contender:
    """Rows of ``own`` tokens after ``shared`` that are the same in all."""
    first = make_prompt_cache(model) if pool is None else pool.make_prompt_cache()
    if shared:
        fill(first, shared)
    rows = [copy.deepcopy(first) for _ in own]
    for row, count in zip(rows, own, strict=True):
        fill(row, count)
    merged = [entries[0].merge(list(entries)) for entries in zip(*rows, strict=True)]

    def step() -> None:
        tokens = mx.zeros((len(own), 1), mx.int32)
        for _ in range(STEPS):
            tokens = model(tokens, cache=merged)[:, -1:].argmax(-1)
            mx.async_eval(tokens)
        mx.eval(tokens)

    def back() -> None:
        for entry in merged:
            entry.trim(STEPS)

    return Contender(step, finish=back)


def compare(name: str, make: Callable[[bool], Contender], rounds: int) -> None:
    trial = interleave({"mlx-lm": make(False), "ours": make(True)}, rounds, 1, ["mlx-lm"])
    times = {who: sample.median / STEPS / 1e3 for who, sample in trial.samples().items()}
    ratio = trial.samples()["ours"].ratio
    print(f"| {name} | {times['mlx-lm']:.1f} | {times['ours']:.1f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mlx_lm_cache", description=__doc__)
    parser.add_argument("--histories", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    model, rounds = model_of(options.layers), options.rounds
    print(f"{machine()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")
    print("| | mlx-lm, ms | ours, ms | ours / mlx-lm |\n|---|---|---|---|")

    def alone(history: int, model: Any) -> Callable[[bool], Contender]:
        capacity = history + 2 * STEPS
        pool = lambda: CachePool(model, capacity=capacity).make_prompt_cache()  # noqa: E731
        return lambda ours: conversation(model, history, pool() if ours else make_prompt_cache(model))

    compare("one conversation of 100 tokens, 32 layers of 64", alone(100, model_of(32, 64, 4)), rounds)
    for history in options.histories:
        compare(f"one conversation of {history:,} tokens", alone(history, model), rounds)
    lengths = np.random.default_rng(1).integers(100, 2001, 16).tolist()
    tails = np.random.default_rng(2).integers(20, 61, 16).tolist()
    cases = {
        "16 rows of 512": ([512] * 16, 0),
        "16 rows of 100 to 2,000": (lengths, 0),
        "16 rows that share 800, of 20 to 60 more": (tails, 800),
    }
    for name, (own, shared) in cases.items():

        def together(ours: bool, own: list[int] = own, shared: int = shared) -> Contender:
            most = shared + max(own) + 2 * STEPS
            pool = CachePool(model, capacity=most, max_sequences=2 * len(own) + 1) if ours else None
            return batch(model, own, shared, pool)

        compare(name, together, rounds)


if __name__ == "__main__":
    main()
