"""Our prompt caches beside mlx-lm's own, inside mlx-lm: ``python -m benchmarks.mlx_lm_cache``.

The first table: greedy tokens and log-probabilities, float32, on small models of mlx-lm's classes with
seeded weights. The second: what one decoded token costs in the cache alone, per layer (8 KV heads of 128,
four layers), each step waited for, and with one step in flight while the next is built, as
``generate_step`` does it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache
from mlx_lm.models.cache import make_prompt_cache as own_prompt_cache

from kvcache.integrations.mlx_lm import Attention, CachePool, make_prompt_cache

__all__ = ["main"]

LAYERS, HEADS, DIM = 4, 8, 128
NAMES = {"llama": "Llama", "gemma": "Gemma 3, window 8", "qwen": "Qwen3-Next"}


def _models() -> Any:
    path = Path(__file__).resolve().parents[1] / "tests" / "mlx_lm_models.py"
    spec = importlib.util.spec_from_file_location("mlx_lm_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def differences(models: Any, count: int) -> None:
    heads = ("model", "generate", "batch of 5", "mlx-lm: batch, alone", "speculative: ours, mlx-lm's")
    print(f"| {' | '.join(heads)} |")
    print("|---|---|---|---|---|")
    for name, make in models.MODELS.items():
        model = make()
        cells = [_generate(models, model, count), *_batch(models, model, count)]
        cells.append("refused by mlx-lm" if name == "qwen" else _speculate(models, make, count))
        print(f"| {NAMES[name]} | {' | '.join(cells)} |")


def _generate(models: Any, model: Any, count: int) -> str:
    prompt = models.prompt_of(50)
    theirs, ours = (
        models.steps(model, prompt, count, cache)
        for cache in (own_prompt_cache(model), make_prompt_cache(model, capacity=256))
    )
    return _verdict(models, [theirs], [ours])


def _batch(models: Any, model: Any, count: int) -> tuple[str, str]:
    """Ours beside mlx-lm's; and mlx-lm's batch beside each prompt alone, as a measure of what order does."""
    prompts = [models.prompt_of(length, seed=length) for length in (5, 39, 12, 3, 21)]
    pool = CachePool(model, capacity=256, max_sequences=10)
    options = {"completion_batch_size": 4, "prefill_batch_size": 3, "prefill_step_size": 6}
    theirs, ours = (
        models.run_batch(model, prompts, caches, count, **options)
        for caches in (None, [pool.make_prompt_cache() for _ in prompts])
    )
    pairs = [[list(zip(tokens, logs, strict=True)) for tokens, logs, _ in x.values()] for x in (theirs, ours)]
    alone = [models.steps(model, prompt, count, own_prompt_cache(model)) for prompt in prompts]
    return _verdict(models, *pairs), _verdict(models, pairs[0], alone)


def _speculate(models: Any, make: Callable[..., Any], count: int) -> str:
    model, draft = make(), models.seeded(make(), 3, noise=0.3)
    prompt = models.prompt_of(12, seed=5)
    expected = models.greedy(model, prompt, count, own_prompt_cache(model))
    said = []
    for cache in (lambda m: make_prompt_cache(m, capacity=256), own_prompt_cache):
        loop = speculative_generate_step(
            mx.array(prompt), model, draft, max_tokens=count, prompt_cache=[*cache(model), *cache(draft)]
        )
        found = [token for token, _, _ in loop]
        at = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)
        said.append("greedy's tokens" if at is None else f"others from token {at} on")
    return ", ".join(said)


def _verdict(models: Any, theirs: list[Any], ours: list[Any]) -> str:
    same = all([t for t, _ in a] == [t for t, _ in b] for a, b in zip(theirs, ours, strict=True))
    largest = max(
        models.largest([x for _, x in a], [x for _, x in b]) for a, b in zip(theirs, ours, strict=True)
    )
    return f"{'same tokens' if same else 'OTHER TOKENS'}, {largest:.1e}"


def times(histories: list[int], count: int) -> None:
    print("\n| history | mlx-lm's, waited for | ours | mlx-lm's, one in flight | ours |")
    print("|---|---|---|---|---|")
    for history in histories:
        found = {}
        for name in ("theirs", "ours"):
            entries = _filled(name, history, 3 * count)
            for in_flight in (False, True):
                found[name, in_flight] = _steps(entries, count, in_flight)
            del entries
        row = [found[name, flight] for flight in (False, True) for name in ("theirs", "ours")]
        print(f"| {history} | {' | '.join(f'{x:,.0f} us' for x in row)} |")


def _filled(name: str, history: int, room: int) -> list[Any]:
    layers = [Attention(None, HEADS, DIM, DIM, mx.float32)] * LAYERS
    entries = [KVCache() for _ in layers]
    if name == "ours":
        entries = CachePool(layers, capacity=history + room).make_prompt_cache()
    x = mx.zeros((1, HEADS, history, DIM))
    for entry in entries:
        mx.eval(entry.update_and_fetch(x, x))
    return entries


def _steps(entries: list[Any], count: int, in_flight: bool) -> float:
    """The median over the steps, microseconds per layer."""
    taken, before, x = [], None, mx.ones((1, HEADS, 1, DIM))
    for _ in range(count):
        start = time.perf_counter()
        entries[0].make_mask(1, return_array=False, window_size=None)
        for entry in entries:
            keys, values = entry.update_and_fetch(x, x)
            x = keys[..., -1:, :] * 0.5 + values[..., :1, :]
            del keys, values
        if in_flight:
            mx.async_eval(x)
            if before is not None:
                mx.eval(before)
            before = x
        else:
            mx.eval(x)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[3:])) * 1e6 / len(entries)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mlx_lm_cache", description=__doc__)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--histories", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    differences(_models(), options.tokens)
    times(options.histories, options.steps)


if __name__ == "__main__":
    main()
