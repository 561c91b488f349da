"""The contenders of `kvcache bench` on MLX: hand-written slice writes, and mlx-lm's caches."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import mlx.core as mx

from kvcache.testing.bench import ROOM, Contender

__all__ = ["EAGER", "FLOORS", "LAYERS", "Slices", "floors", "peers"]

EAGER = False
"""Whether a call has completed its work when it returns."""
FLOORS = ("floor (slices)",)
LAYERS = 8
"""A step covers all layers and ends with one evaluation."""


class Slices:
    """Slice assignments into preallocated head-major buffers; the views are dropped before the next write."""

    def __init__(
        self,
        history: int,
        new: int,
        heads: int,
        dim: int,
        dtype: str,
        grow: bool,
        window: int = 0,
        layers: int = LAYERS,
    ) -> None:
        self.count = layers
        self.new, self.at, self.grow, self.window = new, history, grow, window
        self.token = mx.ones((1, heads, new, dim), getattr(mx, dtype))
        self.resize(history + (ROOM if grow else new))

    def resize(self, cells: int) -> None:
        """Replace the buffers by new ones of ``cells`` cells."""
        _, heads, _, dim = self.token.shape
        shape = (1, heads, cells, dim)
        self.layers = [[mx.zeros(shape, self.token.dtype) for _ in "kv"] for _ in range(self.count)]
        mx.eval(self.layers, self.token)

    def step(self) -> None:
        """Run all layers and one evaluation, like a decoding step."""
        begin, token, views = self.at, self.token, []
        end = begin + self.new
        first = max(0, end - self.window) if self.window else 0
        for k, v in self.layers:
            k[..., begin:end, :] = token
            v[..., begin:end, :] = token
            views.append((k[..., first:end, :], v[..., first:end, :]))
        mx.eval([pair for layer in self.layers for pair in layer])

    def finish(self) -> None:
        if self.grow:
            self.at += self.new

    def contender(self) -> Contender:
        return Contender(self.step, finish=self.finish)


def floors(
    history: int, new: int, heads: int, dim: int, dtype: str, grow: bool = True, window: int = 0
) -> dict[str, Contender]:
    return {FLOORS[0]: Slices(history, new, heads, dim, dtype, grow, window).contender()}


def peers(
    history: int, new: int, heads: int, dim: int, dtype: str, grow: bool = True, window: int = 0
) -> dict[str, Contender]:
    """mlx-lm's caches after ``history`` tokens; empty if it is not installed."""
    if importlib.util.find_spec("mlx_lm") is None:
        return {}
    module: Any = importlib.import_module("mlx_lm.models.cache")  # untyped
    if window:
        return {
            "mlx-lm RotatingKVCache": _peer(
                lambda: module.RotatingKVCache(window), history, new, heads, dim, dtype
            )
        }
    kinds = {"mlx-lm KVCache": module.KVCache, "mlx-lm QuantizedKVCache": module.QuantizedKVCache}
    return {name: _peer(kind, history, new, heads, dim, dtype, grow) for name, kind in kinds.items()}


def _peer(
    make: Any, history: int, new: int, heads: int, dim: int, dtype: str, grow: bool = True
) -> Contender:
    native = getattr(mx, dtype)
    token = mx.ones((1, heads, new, dim), native)
    caches = [make() for _ in range(LAYERS)]
    prompt = mx.ones((1, heads, history, dim), native)
    for cache in caches:
        mx.eval(cache.update_and_fetch(prompt, prompt))

    def step() -> None:
        for cache in caches:
            cache.update_and_fetch(token, token)
        mx.eval([cache.state for cache in caches])

    def undo() -> None:
        if not grow:
            for cache in caches:
                cache.trim(new)

    return Contender(step, finish=undo)
