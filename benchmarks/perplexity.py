"""Perplexity of the bundled model on held-out text, with the cache stored in each format.

    python -m benchmarks.perplexity [--backend numpy]

The text is cut into windows of BOS and at most 511 tokens, each one pass: keys and values are put
first and read back by all queries, so that every one of them went through the format.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console

import ml
from kvcache import Batch, CausalCache
from kvcache.bench.timing import machine
from kvcache.runner import Llama, Tokenizer, bundled_model, load_model
from ml import DType

__all__ = ["perplexity", "windows"]

FORMATS = (DType.F32, DType.F16, DType.BF16, DType.Q8_0, DType.Q4_0)
console = Console(width=120)


def windows(model: Llama, tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Every chapter in pieces of BOS and at most ``max_positions - 1`` tokens."""
    span = model.config.max_positions - 1
    for chapter in text.split("\n\n"):
        bos, *ids = tokenizer.encode(chapter)
        for start in range(0, len(ids), span):
            yield [bos, *ids[start : start + span]]


def perplexity(model: Llama, pieces: list[list[int]], dtype: DType) -> tuple[float, float]:
    """exp of the mean loss per token, and the cache's bytes per token."""
    cache = CausalCache()
    length = max(map(len, pieces))
    cache.init(model.backend, dtype, 1, length, length)
    nats, count = 0.0, 0
    for piece in pieces:
        inputs, targets = piece[:-1], piece[1:]
        batch = Batch(range(len(inputs)), [0] * len(inputs), inputs=inputs)
        with model.backend.new_context() as ctx:
            cache.start_forward(ctx, batch)
            logits = model.forward(ctx, batch, cache).to_numpy().astype(np.float64)
        cache.remove(0, 0)
        peak = logits.max(axis=1, keepdims=True)
        total = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
        nats += float((total - logits[np.arange(len(targets)), targets]).sum())
        count += len(targets)
    return float(np.exp(nats / count)), cache.nbytes / cache.cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perplexity")
    parser.add_argument("--backend", default="numpy")
    name = parser.parse_args().backend
    with ml.open_backend(name) as backend:
        model = load_model(bundled_model(), backend)
        assert isinstance(model, Llama)
        tokenizer = Tokenizer.load(bundled_model())
        text = (bundled_model() / "heldout.txt").read_text(encoding="utf-8")
        pieces = list(windows(model, tokenizer, text))
        scored = sum(len(piece) - 1 for piece in pieces)
        console.print(f"{machine()}; {name}; {scored} tokens in {len(pieces)} windows")
        console.print("| cache | bytes per token | of F16 | perplexity | against F32 | seconds |")
        console.print("|---|---|---|---|---|---|")
        first = None
        half = None
        rows = []
        for dtype in FORMATS:
            began = time.perf_counter()
            value, size = perplexity(model, pieces, dtype)
            first = first or value
            half = size if dtype is DType.F16 else half
            rows.append((dtype, value, size, time.perf_counter() - began))
        for dtype, value, size, seconds in rows:
            console.print(
                f"| {dtype.name} | {size:.0f} | {size / (half or 1):.3f} | {value:.4f} | "
                f"{100 * (value / (first or 1) - 1):+.3f}% | {seconds:.0f} |"
            )


if __name__ == "__main__":
    main()
