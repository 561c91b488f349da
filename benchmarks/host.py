"""The host's share of a decoding step: small shapes, beside slices by hand and SDPA.

``python -m benchmarks.host`` prints, for 1, 8 and 64 sequences of equal length, the microseconds of a core
that a layer takes of a whole step (``start_forward``, then ``put`` and ``attend`` of each of 16 layers), what
the same step written by hand takes (one slice write each for K and V, and one attention call over two views),
the ratio of the two, measured in turn, and how many calls of Python functions a layer of ours makes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ml
from kvcache import Batch, CausalCache

LAYERS, KV_HEADS, DIM, PROMPT = 16, 3, 24, 256
SEQUENCES = (1, 8, 64)
ROUND = 10
"""Steps of one side before the other has its turn."""
PLACES = 5
"""Pairs of a cache and its counterpart by hand, each allocated anew."""


class Ours:
    """A cache that holds a prompt for each sequence, and decodes."""

    def __init__(self, backend: ml.Backend, sequences: int, capacity: int) -> None:
        self.ctx, self.cache, self.position = backend.new_context(), CausalCache(), PROMPT
        self.sequences = list(range(sequences))
        self.cache.init(backend, ml.DType.F32, sequences, capacity, PROMPT)
        prompt = self.ctx.zeros((PROMPT, KV_HEADS, DIM), ml.DType.F32)
        for seq in self.sequences:
            self.cache.start_forward(self.ctx, Batch(range(PROMPT), [seq] * PROMPT))
            for layer in range(LAYERS):
                self.cache.set_layer(layer)
                self.cache.put(self.ctx, prompt, prompt)
        self.new = self.ctx.zeros((sequences, KV_HEADS, DIM), ml.DType.F32)

    def step(self) -> None:
        ctx, cache, new = self.ctx, self.cache, self.new
        cache.start_forward(ctx, Batch([self.position] * len(self.sequences), self.sequences))
        for layer in range(LAYERS):
            cache.set_layer(layer)
            cache.put(ctx, new, new)
            cache.attend(ctx, new, DIM**-0.5)
        self.position += 1

    def calls(self) -> float:
        """Of Python functions, for each layer: a step's by that many layers, start_forward included."""
        count = 0

        def note(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        self.step()
        sys.setprofile(note)
        self.step()
        sys.setprofile(None)
        return count / LAYERS


def torch_by_hand(sequences: int, capacity: int) -> Callable[[], None]:
    import torch

    shape = LAYERS, sequences, KV_HEADS, capacity, DIM
    keys, values = torch.zeros(shape), torch.zeros(shape)
    new, position = torch.zeros((sequences, KV_HEADS, 1, DIM)), PROMPT
    attention = torch.nn.functional.scaled_dot_product_attention

    def step() -> None:
        nonlocal position
        end = position + 1
        for layer in range(LAYERS):
            key, value = keys[layer], values[layer]
            key[:, :, position:end] = new
            value[:, :, position:end] = new
            attention(new, key[:, :, :end], value[:, :, :end])
        position = end

    return step


def numpy_by_hand(sequences: int, capacity: int) -> Callable[[], None]:
    shape = LAYERS, sequences, KV_HEADS, capacity, DIM
    keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    new, position, scale = np.zeros((sequences, KV_HEADS, 1, DIM), np.float32), PROMPT, np.float32(DIM**-0.5)

    def step() -> None:
        nonlocal position
        end = position + 1
        for layer in range(LAYERS):
            key, value = keys[layer], values[layer]
            key[:, :, position:end] = new
            value[:, :, position:end] = new
            scores = (new * scale) @ key[:, :, :end].transpose(0, 1, 3, 2)
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            scores @ value[:, :, :end]
        position = end

    return step


BY_HAND = {"torch": torch_by_hand, "numpy": numpy_by_hand}


def measure(name: str, sequences: int, rounds: int) -> tuple[float, float, float]:
    """Microseconds per layer, ours and by hand, and calls of Python functions per layer. Medians over PLACES
    of the two in memory, which matters where the processor's caches are too small.
    """
    found: list[tuple[float, float]] = []
    capacity = PROMPT + ROUND * (rounds + 2) + 2
    with ml.open_backend(name, **({"device": "cpu"} if name == "torch" else {})) as backend:
        for _ in range(PLACES):
            ours, by_hand = Ours(backend, sequences, capacity), BY_HAND[name](sequences, capacity)
            times: dict[Callable[[], None], list[float]] = {ours.step: [], by_hand: []}
            for _ in range(rounds + 1):
                for step, taken in times.items():
                    for _ in range(ROUND):
                        start = time.process_time()
                        step()
                        taken.append((time.process_time() - start) / LAYERS * 1e6)
            mine, theirs = (statistics.median(taken[ROUND:]) for taken in times.values())
            found.append((mine, theirs))
        mine, theirs = (statistics.median(each) for each in zip(*found, strict=True))
        return mine, theirs, ours.calls()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="*", choices=BY_HAND, default=list(BY_HAND))
    parser.add_argument("--rounds", type=int, default=40, help=f"of {ROUND} steps each")
    options = parser.parse_args()
    if "torch" in options.backends:
        import torch

        torch.set_num_threads(1)
    print("| backend | sequences | ours, us a layer | by hand | ratio | Python calls a layer |")
    print("|---|---|---|---|---|---|")
    for name in options.backends:
        for sequences in SEQUENCES:
            ours, by_hand, calls = measure(name, sequences, options.rounds)
            ratio = ours / by_hand
            print(f"| {name} | {sequences} | {ours:.0f} | {by_hand:.0f} | {ratio:.2f} | {calls:.0f} |")


if __name__ == "__main__":
    main()
