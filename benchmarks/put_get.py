"""One layer, one decoded token: store K and V, and hand back the whole history (8 KV heads of 128)."""

from __future__ import annotations

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

    What is timed is what the second of two layers pays in a pass: the first has warmed the code, and has
    worked out what is read. ``start_forward`` is timed on its own.
    """
    torch.set_num_threads(1)
    key = torch.randn(1, HEADS, 1, DIM).to(getattr(torch, dtype))
    contenders = {
        "floor (as_strided)": Strided(history, key).contender(),
        "floor (slices)": Sliced(history, key).contender(),
        "ours": Ours(history, key, DTYPES[dtype]).contender(),
    }
    static, dynamic = _peers(history, key)
    found = interleave(contenders | {"transformers StaticCache": static}, rounds)
    # By itself: it copies the history at each step, and who runs next finds the processor's caches empty.
    apart = {"floor": contenders["floor (as_strided)"], "transformers DynamicCache": dynamic}
    return found | {k: v for k, v in interleave(apart, rounds // 4).items() if k != "floor"}


class Sliced:
    """In-place slice writes into preallocated buffers, and two slices of them."""

    def __init__(self, history: int, key: torch.Tensor) -> None:
        self.key, self.n, self.cells = key, history, history + ROOM
        shape = (2, 2, 1, HEADS, self.cells, DIM)
        self.layers = [(k, v) for k, v in torch.zeros(shape, dtype=key.dtype)]
        self.k, self.v = self.layers[1]

    def prepare(self) -> None:
        self.n += 1
        self.k, self.v = self.layers[0]
        self.step()
        self.k, self.v = self.layers[1]

    def step(self) -> object:
        n = self.n
        self.k[:, :, n : n + 1] = self.key
        self.v[:, :, n : n + 1] = self.key
        return self.k[:, :, : n + 1], self.v[:, :, : n + 1]

    def contender(self) -> Contender:
        return Contender(self.step, self.prepare)


class Strided(Sliced):
    """The same through ``torch.as_strided``."""

    def step(self) -> object:
        n, strides, k, v = self.n, (self.cells * DIM, DIM, 1), self.k, self.v
        first = k.storage_offset(), v.storage_offset()
        torch.as_strided(k, (HEADS, 1, DIM), strides, first[0] + n * DIM).copy_(self.key[0])
        torch.as_strided(v, (HEADS, 1, DIM), strides, first[1] + n * DIM).copy_(self.key[0])
        shape = (HEADS, n + 1, DIM)
        return torch.as_strided(k, shape, strides, first[0]), torch.as_strided(v, shape, strides, first[1])


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


def _peers(history: int, key: torch.Tensor) -> list[Contender]:
    """transformers' StaticCache and DynamicCache, of two layers."""
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache, StaticCache

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS
    )
    static = StaticCache(config=config, max_cache_len=history + ROOM)
    return [_peer(cache, history, key) for cache in (static, DynamicCache())]


def _peer(cache: Any, history: int, key: torch.Tensor) -> Contender:
    prompt = torch.zeros(1, HEADS, history, DIM, dtype=key.dtype)
    for layer in (0, 1):
        cache.update(prompt, prompt, layer)
    return Contender(lambda: cache.update(key, key, 1), lambda: cache.update(key, key, 0))
