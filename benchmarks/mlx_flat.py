"""Is one token's put + get on MLX flat in the length of the history? ``python benchmarks/mlx_flat.py``

Head-major buffers, 8 KV heads of 128. A step writes one token's K and V into the preallocated
buffers of every layer, takes the views of the history, computes, and reads the token's K of the
last layer back to the host. Times are per layer. Three ways:

- floor: MLX by hand, donation respected (the views are dropped before the next write);
- ours: protocol Tensors on the mlx backend, *the previous step's views still held*;
- held: as the floor, but with the previous step's views held, as one would naively do.

The steps of floor and ours alternate, so that both see the same machine. A second table chains
the steps of floor and ours with no evaluation in between: time, and memory taken beyond the buffers.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np

import ml
from ml import DType

HEADS, DIM = 8, 128
NATIVE = {DType.F32: mx.float32, DType.BF16: mx.bfloat16}


class ByHand:
    """What one writes without a library."""

    def __init__(self, layers: int, capacity: int, dtype: DType) -> None:
        shape = (1, HEADS, capacity, DIM)
        self.dtype = dtype
        self.layers = [tuple(mx.zeros(shape, NATIVE[dtype]) for _ in range(2)) for _ in range(layers)]
        self.token = mx.ones((1, HEADS, 1, DIM), NATIVE[dtype])
        mx.eval(self.layers, self.token)

    def step(self, position: int) -> Any:
        views = []
        for keys, values in self.layers:
            keys[..., position : position + 1, :] = self.token
            values[..., position : position + 1, :] = self.token
            views.append((keys[..., : position + 1, :], values[..., : position + 1, :]))
        return views

    def wait(self, views: Any) -> None:
        row = views[-1][0][..., -1:, :]
        if self.dtype is DType.BF16:
            row = row.view(mx.uint16)
        mx.eval(row, self.layers)
        np.array(row)


class Ours:
    """The same on protocol Tensors."""

    def __init__(self, ctx: Any, layers: int, capacity: int, dtype: DType) -> None:
        shape = (HEADS, capacity, DIM)
        self.ctx = ctx
        self.layers = [tuple(ctx.zeros(shape, dtype) for _ in range(2)) for _ in range(layers)]
        self.token = ctx.full((1, HEADS, DIM), 1, dtype)
        self.strides = (DIM, capacity * DIM, 1)  # seen as (tokens, heads, dim)
        ctx.compute(self.token)

    def step(self, position: int) -> Any:
        ctx, token, strides = self.ctx, self.token, self.strides
        shape = (position + 1, HEADS, DIM)
        views = []
        for keys, values in self.layers:
            token.copy(ctx, keys.view(ctx, position * DIM, token.shape, strides))
            token.copy(ctx, values.view(ctx, position * DIM, token.shape, strides))
            views.append((keys.view(ctx, 0, shape, strides), values.view(ctx, 0, shape, strides)))
        return views

    def wait(self, views: Any) -> None:
        last = views[-1][0].shape[0] - 1
        views[-1][0].slice(self.ctx, 0, last, last + 1).to_numpy()


def measure(
    ctx: Any, layers: int, history: int, dtype: DType, steps: int, held_steps: int
) -> list[np.ndarray]:
    """Seconds per layer of each step: floor, ours, held."""
    capacity = history + steps + 16
    by_hand, ours = ByHand(layers, capacity, dtype), Ours(ctx, layers, capacity, dtype)
    times: list[list[float]] = [[], [], []]
    held: Any = None
    for position in range(history, history + steps):
        start = time.perf_counter()
        views = by_hand.step(position)
        by_hand.wait(views)
        del views
        middle = time.perf_counter()
        views = ours.step(position)
        ours.wait(views)
        held = views
        del views
        times[0].append(middle - start)
        times[1].append(time.perf_counter() - middle)
    del held
    for position in range(history, history + held_steps):
        start = time.perf_counter()
        views = by_hand.step(position)
        mx.eval(views)
        by_hand.wait(views)
        held = views
        del views
        times[2].append(time.perf_counter() - start)
    del held
    return [np.array(column[len(column) // 10 :]) / layers for column in times]


def chained(way: ByHand | Ours, layers: int, history: int, steps: int) -> tuple[float, float]:
    """Seconds per layer and step, MB beyond the buffers: ``steps`` steps, one evaluation at their end."""
    for position in (history, history + 1):
        way.wait(way.step(position))
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    views: Any = None
    held = []
    for position in range(history, history + steps):
        views = way.step(position)
        if isinstance(way, Ours):
            held.append(views)
    way.wait(views)
    return (time.perf_counter() - start) / steps / layers, max(0, mx.get_peak_memory() - before) / 1e6


def row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--held-steps", type=int, default=6)
    parser.add_argument("--histories", type=int, nargs="+", default=[128, 1024, 8192, 32768])
    options = parser.parse_args()
    layers, steps = options.layers, options.steps
    print(f"mlx {version('mlx')}, {mx.default_device()}, {layers} layers; microseconds per layer\n")
    heads = ["floor median", "floor p99", "ours median", "ours p99", "ours / floor", "held median"]
    print(row("dtype, history", heads), row("---", ["---"] * len(heads)), sep="\n")
    heads = ["floor us", "ours us", "floor MB beyond", "ours MB beyond"]
    chains = [row("dtype, history", heads), row("---", ["---"] * len(heads))]
    with ml.open_backend("mlx") as backend, backend.new_context() as ctx:
        for dtype in NATIVE:
            for history in options.histories:
                name = f"{dtype.name} {history}"
                columns = measure(ctx, layers, history, dtype, steps, options.held_steps)
                gc.collect()
                floor, mine, held = (np.percentile(column, [50, 99]) * 1e6 for column in columns)
                cells = [f"{value:.0f}" for value in (*floor, *mine)]
                print(row(name, [*cells, f"{mine[0] / floor[0]:.2f}", f"{held[0]:.0f}"]), flush=True)
                capacity = history + steps + 16
                hand = chained(ByHand(layers, capacity, dtype), layers, history, steps)
                own = chained(Ours(ctx, layers, capacity, dtype), layers, history, steps)
                cells = [f"{us * 1e6:.0f}" for us, _ in (hand, own)] + [f"{mb:.2f}" for _, mb in (hand, own)]
                chains.append(row(name, cells))
    print(f"\n{steps} steps chained (ours: every view held), one evaluation at the end\n")
    print("\n".join(chains))


if __name__ == "__main__":
    main()
