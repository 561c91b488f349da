"""A decoding step over quantized storage beside one over floats: ``python -m benchmarks.quantized``.

One layer, one query, 32 heads over 8 of 128. Beside them, on MLX, mlx-lm's QuantizedKVCache (affine, groups
of 32) with its own attention, and on PyTorch a layer of transformers' QuantizedCache (quanto, 4 bits, groups
of 64, the last 128 tokens as they are) with torch's; both with their ``put``. Contenders take turns round by
round, on one thread; ratios are to F32. What ``put`` gives MLX to do is done in the next ``attend``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import Any

import numpy as np

import ml
from benchmarks.pages import show
from benchmarks.timing import machine
from kvcache import Batch, CausalCache
from kvcache.testing.bench import Contender, interleave

HEADS, KV_HEADS, DIM, PART = 32, 8, 128, 512
DTYPES = ("F32", "BF16", "Q8_0", "Q4_0", "ROTATED_Q4_0", "AFFINE8_32", "AFFINE4_32")


class Ours:
    """A layer of ``history`` tokens, and steps of one token after them."""

    def __init__(self, backend: ml.Backend, history: int, dtype: str, host: np.ndarray) -> None:
        self.ctx, self.cache, self.position = backend.new_context(), CausalCache(), history
        self.cache.init(backend, dtype, 1, history + PART, PART)
        for start in range(0, history, PART):
            found = self.ctx.from_numpy(host[start : start + PART])
            self._start(range(start, start + PART))
            self.cache.put(self.ctx, found, found)
        self.token = self.ctx.from_numpy(host[:1])
        self.query = self.ctx.from_numpy(np.repeat(host[:1], HEADS // KV_HEADS, 1))

    def _start(self, positions: Any) -> None:
        self.cache.start_forward(self.ctx, Batch(positions, [0] * len(positions)))

    def start(self) -> None:
        self._start([self.position])
        self.position += 1

    def put(self) -> None:
        self.cache.put(self.ctx, self.token, self.token)

    def attend(self) -> None:
        self.cache.attend(self.ctx, self.query, DIM**-0.5).to_numpy()


def mlx_lm(history: int, host: np.ndarray, bits: int) -> Contender:
    """mlx-lm's quantized cache and attention."""
    import mlx.core as mx
    from mlx_lm.models.base import scaled_dot_product_attention
    from mlx_lm.models.cache import QuantizedKVCache

    cache = QuantizedKVCache(group_size=32, bits=bits)
    whole = mx.array(host).transpose(1, 0, 2)[None]
    cache.update_and_fetch(whole[:, :, :history], whole[:, :, :history])
    query = mx.repeat(whole[:, :, :1], HEADS // KV_HEADS, 1)

    def step() -> None:
        keys, values = cache.update_and_fetch(whole[:, :, :1], whole[:, :, :1])
        mx.eval(scaled_dot_product_attention(query, keys, values, cache, scale=DIM**-0.5, mask=None))

    return Contender(step)


def quanto(history: int, host: np.ndarray) -> Contender:
    """The layer that transformers' QuantizedCache is made of, and torch's attention."""
    import torch
    from transformers.cache_utils import QuantoQuantizedLayer

    layer = QuantoQuantizedLayer(nbits=4)
    whole = torch.from_numpy(host).transpose(0, 1)[None]
    layer.update(whole, whole)
    one = whole[:, :, :1]
    query = one.repeat_interleave(HEADS // KV_HEADS, 1)

    def step() -> None:
        keys, values = layer.update(one, one)
        torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return Contender(step)


def measure(backend: ml.Backend, history: int, rounds: int) -> dict[str, list[str]]:
    """By contender: the milliseconds of ``put`` and of ``attend``, and their ratios to F32's."""
    host = np.random.default_rng(0).standard_normal((history, KV_HEADS, DIM)).astype(np.float32)
    layers = {name: Ours(backend, history, name, host) for name in DTYPES}
    puts = {name: Contender(on.put, on.start, on.attend) for name, on in layers.items()}
    found = {f"put, {name}": x for name, x in interleave(puts, rounds).samples().items()}
    steps: dict[str, Contender] = {}
    for name, on in layers.items():
        steps[name] = Contender(on.attend, lambda on=on: (on.start(), on.put()))  # type: ignore[misc]
    if backend.name == "mlx":
        steps |= {f"mlx-lm, {bits} bits": mlx_lm(history, host, bits) for bits in (8, 4)}
    found |= {f"attend, {name}": x for name, x in interleave(steps, rounds).samples().items()}
    if backend.name == "torch" and importlib.util.find_spec("optimum"):  # apart, for what it does to caches
        name = "transformers, 4 bits"
        beside = {"F32": steps["F32"], name: quanto(history, host)}
        found[f"attend, {name}"] = interleave(beside, rounds).samples()[name]
    return {name: [f"{x.median / 1e3:.2f}", f"{x.ratio:.2f}"] for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--history", type=int, nargs="*", default=[4096, 32768])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.backend == "torch":
        import torch

        torch.set_num_threads(1)
    print(machine())
    with ml.open_backend(options.backend) as backend:
        tables = [measure(backend, history, options.rounds) for history in options.history]
    heads = [head for n in options.history for head in (f"{n:,} tokens, ms", "of F32")]
    rows = ([name, *(cell for table in tables for cell in table[name])] for name in tables[0])
    show([options.backend, *heads], rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
