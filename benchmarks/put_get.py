"""One layer, one decoded token: store K and V, and hand back the whole history (8 KV heads of 128)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import ml
from benchmarks.timing import Contender, Sample, interleave
from kvcache import Batch, CausalCache

__all__ = ["measure"]

HEADS, DIM = 8, 128
ROOM = 600
DTYPES = {"float32": ml.DType.F32, "bfloat16": ml.DType.BF16}


def measure(history: int, dtype: str, rounds: int = 300) -> dict[str, Sample]:
    """Floor by as_strided and by slicing, transformers' caches, and ours, on one thread.

    What is timed is what one layer pays in a pass; ``start_forward`` is timed on its own.
    """
    torch.set_num_threads(1)
    key = torch.randn(1, HEADS, 1, DIM).to(getattr(torch, dtype))
    contenders = {
        "floor (as_strided)": Strided(history, key).contender(),
        "floor (slices)": Sliced(history, key).contender(),
        "ours": Ours(history, key, DTYPES[dtype]).contender(),
    }
    contenders |= {
        name: Contender(lambda cache=cache: cache.update(key, key, 0)) for name, cache in _peers(history, key)
    }
    return interleave(contenders, rounds)


class Sliced:
    """In-place slice writes into preallocated buffers, and two slices of them."""

    def __init__(self, history: int, key: torch.Tensor) -> None:
        self.key, self.n = key, history
        self.k, self.v = (torch.zeros(1, HEADS, history + ROOM, DIM, dtype=key.dtype) for _ in range(2))

    def step(self) -> object:
        n = self.n
        self.k[:, :, n : n + 1] = self.key
        self.v[:, :, n : n + 1] = self.key
        self.n = n + 1
        return self.k[:, :, : n + 1], self.v[:, :, : n + 1]

    def contender(self) -> Contender:
        return Contender(self.step)


class Strided:
    """The same through ``torch.as_strided``."""

    def __init__(self, history: int, key: torch.Tensor) -> None:
        self.key, self.n, self.cells = key[0], history, history + ROOM
        self.k, self.v = (torch.zeros(HEADS, self.cells, DIM, dtype=key.dtype) for _ in range(2))

    def step(self) -> object:
        n, strides = self.n, (self.cells * DIM, DIM, 1)
        torch.as_strided(self.k, (HEADS, 1, DIM), strides, n * DIM).copy_(self.key)
        torch.as_strided(self.v, (HEADS, 1, DIM), strides, n * DIM).copy_(self.key)
        self.n = n + 1
        shape = (HEADS, n + 1, DIM)
        return torch.as_strided(self.k, shape, strides, 0), torch.as_strided(self.v, shape, strides, 0)

    def contender(self) -> Contender:
        return Contender(self.step)


class Ours:
    """``put`` and ``get`` of one layer of a pass that has begun."""

    def __init__(self, history: int, key: torch.Tensor, dtype: ml.DType) -> None:
        self.n = history
        self.ctx = ml.open_backend("torch").new_context()
        self.cache = CausalCache()
        self.cache.init(self.ctx.backend, dtype, 1, history + ROOM, history)
        self.token = self.ctx.from_native(key[0].transpose(0, 1))
        prompt = self.ctx.from_native(torch.zeros(history, HEADS, DIM, dtype=key.dtype))
        self.cache.start_forward(self.ctx, Batch(range(history), [0] * history))
        for layer in (0, 1):
            self.cache.set_layer(layer)
            self.cache.put(self.ctx, prompt, prompt)

    def prepare(self) -> None:
        """The pass's first layer works out what is read; the timed one is any other."""
        self.cache.start_forward(self.ctx, Batch([self.n], [0]))
        self.n += 1
        self.cache.set_layer(0)
        self.step()
        self.cache.set_layer(1)

    def step(self) -> object:
        self.cache.put(self.ctx, self.token, self.token)
        key, value, _ = self.cache.get(self.ctx)
        return key.native, value.native

    def contender(self) -> Contender:
        return Contender(self.step, self.prepare)


def _peers(history: int, key: torch.Tensor) -> Iterator[tuple[str, Any]]:
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache, StaticCache

    width = HEADS * DIM
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=width, num_attention_heads=HEADS, num_key_value_heads=HEADS
    )
    static = StaticCache(config=config, max_cache_len=history + ROOM)
    for name, cache in (("transformers StaticCache", static), ("transformers DynamicCache", DynamicCache())):
        prompt = torch.zeros(1, HEADS, history, DIM, dtype=key.dtype)
        cache.update(prompt, prompt, 0)
        yield name, cache
