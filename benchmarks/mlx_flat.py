"""Is one token's put + get on MLX flat in the length of the history? ``python benchmarks/mlx_flat.py``

One layer, 8 KV heads of 128, head-major buffers. A step writes one token's K and V into the
preallocated buffers, takes the two views of the history and waits until the token's K is on the
host. Three ways:

- floor: MLX by hand, donation respected (the views are dropped before the next write);
- ours: protocol Tensors on the mlx backend, *the previous step's views still held*;
- held: as the floor, but with the previous step's views held, as one would naively do.

The steps of floor and ours alternate, so that both see the same machine. A second table chains
steps with no evaluation in between: time per step, and memory taken beyond the buffers.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

import ml
from ml import DType

HEADS, DIM = 8, 128
NATIVE = {DType.F32: mx.float32, DType.BF16: mx.bfloat16}
Step = Callable[[int], Any]


def by_hand(capacity: int, dtype: DType) -> tuple[Step, Callable[[Any], None]]:
    """(step, wait): step(position) returns the views, wait(views) reads the last token's K."""
    keys, values = (mx.zeros((1, HEADS, capacity, DIM), NATIVE[dtype]) for _ in range(2))
    token = mx.ones((1, HEADS, 1, DIM), NATIVE[dtype])
    mx.eval(keys, values, token)

    def step(position: int) -> Any:
        keys[..., position : position + 1, :] = token
        values[..., position : position + 1, :] = token
        return keys[..., : position + 1, :], values[..., : position + 1, :]

    def wait(views: Any) -> None:
        row = views[0][..., -1:, :]
        mx.eval(row, keys, values)
        np.array(row.view(mx.uint16) if dtype is DType.BF16 else row)

    return step, wait


def ours(ctx: Any, capacity: int, dtype: DType) -> tuple[Step, Callable[[Any], None]]:
    keys, values = (ctx.zeros((HEADS, capacity, DIM), dtype).permute(ctx, 1, 0, 2) for _ in range(2))
    token = ctx.full((1, HEADS, DIM), 1, dtype)
    ctx.compute(keys, values, token)

    def step(position: int) -> Any:
        token.copy(ctx, keys.slice(ctx, 0, position, position + 1))
        token.copy(ctx, values.slice(ctx, 0, position, position + 1))
        return keys.slice(ctx, 0, 0, position + 1), values.slice(ctx, 0, 0, position + 1)

    def wait(views: Any) -> None:
        last = views[0].shape[0] - 1
        views[0].slice(ctx, 0, last, last + 1).to_numpy()

    return step, wait


def measure(ctx: Any, history: int, dtype: DType, steps: int, held_steps: int) -> list[np.ndarray]:
    """Seconds of each step: floor, ours, held."""
    capacity = history + steps + 16
    floor_step, floor_wait = by_hand(capacity, dtype)
    our_step, our_wait = ours(ctx, capacity, dtype)
    times: list[list[float]] = [[], [], []]
    held: Any = None
    for position in range(history, history + steps):
        start = time.perf_counter()
        views = floor_step(position)
        floor_wait(views)
        del views
        times[0].append(time.perf_counter() - start)
        start = time.perf_counter()
        views = our_step(position)
        our_wait(views)
        held = views
        times[1].append(time.perf_counter() - start)
        del views
    for position in range(history, history + held_steps):
        start = time.perf_counter()
        views = floor_step(position)
        floor_wait(views)
        mx.eval(*views)
        held = views
        times[2].append(time.perf_counter() - start)
        del views
    del held
    return [np.array(column[len(column) // 10 :]) for column in times]


def chained(ctx: Any, history: int, dtype: DType, steps: int) -> tuple[float, float]:
    """Seconds per step and MB beyond the buffers, for ``steps`` steps and one evaluation at their end."""
    step, wait = ours(ctx, history + steps + 16, dtype)
    wait(step(history))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    views = [step(position) for position in range(history, history + steps)]
    wait(views[-1])
    return (time.perf_counter() - start) / steps, (mx.get_peak_memory() - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--held-steps", type=int, default=12)
    parser.add_argument("--histories", type=int, nargs="+", default=[128, 1024, 8192, 32768])
    options = parser.parse_args()
    print(f"mlx {mx.__version__}, {mx.default_device()}; microseconds per step\n")
    print(
        "| dtype, history | floor median | floor p99 | ours median | ours p99 | ours / floor | held median |"
    )
    print("|---|---|---|---|---|---|---|")
    chains = ["| dtype, history | us per step | MB beyond the buffers |", "|---|---|---|"]
    with ml.open_backend("mlx") as backend, backend.new_context() as ctx:
        for dtype in NATIVE:
            for history in options.histories:
                columns = measure(ctx, history, dtype, options.steps, options.held_steps)
                floor, mine, held = (np.percentile(column, [50, 99]) * 1e6 for column in columns)
                print(
                    f"| {dtype.name} {history} | {floor[0]:.0f} | {floor[1]:.0f} | {mine[0]:.0f} | {mine[1]:.0f} "
                    f"| {mine[0] / floor[0]:.2f} | {held[0]:.0f} |",
                    flush=True,
                )
                seconds, megabytes = chained(ctx, history, dtype, options.steps)
                chains.append(f"| {dtype.name} {history} | {seconds * 1e6:.0f} | {megabytes:.2f} |")
                gc.collect()
    print(f"\n{options.steps} steps chained, every view held, one evaluation at the end\n")
    print("\n".join(chains))


if __name__ == "__main__":
    main()
