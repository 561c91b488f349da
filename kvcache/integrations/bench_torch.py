"""The contenders of `kvcache bench` on PyTorch: hand-written writes and views, and transformers' caches."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from kvcache.testing.bench import LAYERS, ROOM, Contender

__all__ = ["EAGER", "FLOORS", "LAYERS", "Contiguous", "Slices", "Strided", "fix_threads", "floors", "peers"]

EAGER = True
"""Whether a call has completed its work when it returns."""
FLOORS = ("floor (as_strided)", "floor (slices)")


def fix_threads(count: int) -> None:
    torch.set_num_threads(count)


class Slices:
    """In-place slice writes into preallocated head-major buffers, and two slices of them."""

    def __init__(
        self, history: int, new: int, heads: int, dim: int, dtype: str, grow: bool, window: int = 0
    ) -> None:
        """``window``: the number of last cells that the views show; 0: all. ``grow``: each step appends."""
        self.window, self.new, self.grow, self.at = window, new, grow, history
        self.heads, self.dim = heads, dim
        self.token = torch.randn(heads, new, dim).to(getattr(torch, dtype))
        self.resize(history + (ROOM if grow else new))

    def resize(self, cells: int) -> None:
        """Replace the buffers by new ones of ``cells`` cells."""
        self.cells, self.strides = cells, (cells * self.dim, self.dim, 1)
        shape, native = (self.heads, cells, self.dim), self.token.dtype
        self.layers = [[torch.zeros(shape, dtype=native) for _ in "kv"] for _ in range(LAYERS)]

    def prepare(self) -> None:
        if self.grow:
            self.at += self.new
        self.layer(*self.layers[0])

    def step(self) -> Any:
        return [self.layer(k, v) for k, v in self.layers[1:]]

    def layer(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        begin, token = self.at, self.token
        end = begin + self.new
        k[:, begin:end] = token
        v[:, begin:end] = token
        first = max(0, end - self.window) if self.window else 0
        return k[:, first:end], v[:, first:end]

    def contender(self) -> Contender:
        return Contender(self.step, self.prepare)


class Strided(Slices):
    """The same through ``as_strided``."""

    def layer(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        begin, strides, dim, token = self.at, self.strides, self.dim, self.token
        shape = (self.heads, self.new, dim)
        k.as_strided(shape, strides, begin * dim).copy_(token)
        v.as_strided(shape, strides, begin * dim).copy_(token)
        end = begin + self.new
        first = max(0, end - self.window) if self.window else 0
        shape = (self.heads, end - first, dim)
        return k.as_strided(shape, strides, first * dim), v.as_strided(shape, strides, first * dim)


class Contiguous:
    """Attention of one query over contiguous head-major K and V, as hand-written code would call it."""

    def __init__(self, history: int, heads: int, groups: int, dim: int, dtype: str) -> None:
        native = getattr(torch, dtype)
        self.query = torch.randn(1, heads, groups, dim).to(native)
        self.k, self.v = (torch.randn(1, heads, history, dim).to(native) for _ in "kv")

    def step(self, k: torch.Tensor | None = None, v: torch.Tensor | None = None) -> torch.Tensor:
        key, value = (self.k if k is None else k), (self.v if v is None else v)
        query = self.query
        if query.dtype is not torch.float32 and query.shape[2] == 1:
            query = query.expand(-1, -1, 2, -1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def floors(
    history: int, new: int, heads: int, dim: int, dtype: str, grow: bool = True, window: int = 0
) -> dict[str, Contender]:
    """The two hand-written floors; ``FLOORS`` names them.

    Each has its own buffers, like every contender: writing where another has just written hits the
    processor's caches, and appears a third faster.
    """
    kinds = (Strided, Slices)
    made = (kind(history, new, heads, dim, dtype, grow, window).contender() for kind in kinds)
    return dict(zip(FLOORS, made, strict=True))


def peers(
    history: int, new: int, heads: int, dim: int, dtype: str, grow: bool = True, window: int = 0
) -> dict[str, Contender]:
    """transformers' caches after ``history`` tokens; empty if it is not installed. Without ``grow`` they are
    reset after each step, untimed.
    """
    if importlib.util.find_spec("transformers") is None:
        return {}
    caches = {}
    for name, cache in _caches(history + (ROOM if grow else new), heads, dim, window):
        peer = _Peer(cache, history, new, heads, dim, dtype)
        caches[name] = Contender(peer.step, peer.prepare, (lambda: None) if grow else peer.undo)
    return caches


def _caches(capacity: int, heads: int, dim: int, window: int) -> Iterator[tuple[str, Any]]:
    from transformers import LlamaConfig, MistralConfig
    from transformers.cache_utils import DynamicCache, QuantizedCache, StaticCache

    sizes: dict[str, Any] = {
        "num_hidden_layers": LAYERS,
        "hidden_size": heads * dim,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    if window:
        sliding = MistralConfig(**sizes, sliding_window=window)
        yield "transformers StaticCache, sliding", StaticCache(config=sliding, max_cache_len=capacity)
        yield "transformers DynamicCache, sliding", DynamicCache(config=sliding)
        return
    config = LlamaConfig(**sizes)
    yield "transformers StaticCache", StaticCache(config=config, max_cache_len=capacity)
    yield "transformers DynamicCache", DynamicCache()
    yield "transformers QuantizedCache, fp8", QuantizedCache("fp8", config)
    if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto"):
        with contextlib.suppress(ImportError):
            yield "transformers QuantizedCache, quanto 4 bit", QuantizedCache("quanto", config)


class _Peer:
    def __init__(self, cache: Any, history: int, new: int, heads: int, dim: int, dtype: str) -> None:
        self.cache, self.new = cache, new
        native = getattr(torch, dtype)
        self.token = torch.randn(1, heads, new, dim).to(native)
        prompt = torch.randn(1, heads, history, dim).to(native)
        for layer in range(LAYERS):
            cache.update(prompt, prompt, layer)

    def prepare(self) -> None:
        self.cache.update(self.token, self.token, 0)

    def step(self) -> Any:
        return [self.cache.update(self.token, self.token, layer) for layer in range(1, LAYERS)]

    def undo(self) -> None:
        for layer in self.cache.layers:
            if isinstance(
                layer.cumulative_length if hasattr(layer, "cumulative_length") else 0, torch.Tensor
            ):
                layer.cumulative_length.sub_(self.new)
            elif not hasattr(layer, "residual_length") and not hasattr(layer, "_quantized_keys"):
                layer.crop(-self.new)
