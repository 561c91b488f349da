"""Perplexity of the bundled model on held-out text, with the cache stored in each format.

    python -m benchmarks.perplexity [--backend numpy] [--outliers 8]

The text is cut into windows of BOS and at most 511 tokens, each one pass: keys and values are put
first and read back by all queries, so that every one of them went through the format. *agree* is how often
the likeliest token is that of F32. ``--outliers N``: the same model with N times larger keys in one pair of
channels of each head, and queries as much smaller there, which changes nothing where keys are not rounded.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import ml
from benchmarks.pages import show
from benchmarks.timing import machine
from examples.eviction import nats_of, pieces_of
from kvcache import Batch, CausalCache
from kvcache_engine import Llama, Tokenizer, bundled_model, load_model
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.loading import load_config

FORMATS = (
    "F32", "F16", "BF16", "Q8_0", "ROTATED_Q8_0", "AFFINE8_32", "F8_E4M3", "Q8_0/Q4_0", "Q8_0/AFFINE4_32",
    "Q4_0/Q8_0", "AFFINE4_32", "ROTATED_AFFINE4_32", "Q4_0", "ROTATED_Q4_0",
)  # fmt: skip
"""Of keys and values; the bundled model has heads of 32, which only groups of 32 divide."""


def with_outliers(folder: Path, factor: float, channel: int = 3) -> Path:
    """The bundled model in ``folder``, with channels of its keys that are ``factor`` times as large.

    The pair that rotates together is made larger, and the same of the queries smaller: no score changes.
    """
    shutil.copytree(bundled_model(), folder, dirs_exist_ok=True)
    config = load_config(folder)
    tensors = {name: array.astype(np.float32) for name, array in open_weights(folder).items()}
    pair = [channel, channel + config.head_dim // 2]
    for name, array in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = array.reshape(-1, config.head_dim, array.shape[1])
            heads[:, pair] *= factor if name.endswith("k_proj.weight") else 1 / factor
    save_file(tensors, folder / "model.safetensors")
    return folder


def perplexity(model: Llama, pieces: list[list[int]], dtype: str) -> tuple[float, float, np.ndarray]:
    """exp of the mean loss per token, the cache's bytes per token, and the likeliest tokens."""
    cache = CausalCache()
    length = max(map(len, pieces))
    cache.init(model.backend, dtype, 1, length, length)
    nats, count, likeliest = 0.0, 0, []
    for piece in pieces:
        inputs, targets = piece[:-1], piece[1:]
        batch = Batch(range(len(inputs)), [0] * len(inputs), inputs=inputs)
        with model.backend.new_context() as ctx:
            cache.start_forward(ctx, batch)
            logits = model.forward(ctx, batch, cache).to_numpy().astype(np.float64)
        cache.remove(0, 0)
        nats += nats_of(logits, targets)
        count += len(targets)
        likeliest.append(logits.argmax(axis=1))
    return float(np.exp(nats / count)), cache.nbytes / cache.cells, np.concatenate(likeliest)


def rows(model: Llama, pieces: list[list[int]]) -> Iterator[tuple[str, ...]]:
    found = {name: perplexity(model, pieces, name) for name in FORMATS}
    first, half = found["F32"], found["F16"][1]
    for name, (value, size, likeliest) in found.items():
        against, agree = 100 * (value / first[0] - 1), 100 * float((likeliest == first[2]).mean())
        figures = f"{size:.0f}", f"{size / half:.3f}", f"{value:.4f}", f"{against:+.3f}%", f"{agree:.1f}%"
        yield name.replace("/", ", "), *figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.perplexity")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--outliers", type=float, default=0.0)
    options = parser.parse_args()
    with ml.open_backend(options.backend) as backend, tempfile.TemporaryDirectory() as folder:
        path = with_outliers(Path(folder), options.outliers) if options.outliers else bundled_model()
        model = load_model(path, backend)
        assert isinstance(model, Llama)
        tokenizer = Tokenizer.load(bundled_model())
        text = (bundled_model() / "heldout.txt").read_text(encoding="utf-8")
        pieces = list(pieces_of(model, tokenizer, text))
        scored = sum(len(piece) - 1 for piece in pieces)
        print(f"{machine()}; {options.backend}; {scored} tokens in {len(pieces)} windows")
        head = ("keys and values", "bytes per token", "of F16", "perplexity", "against F32", "agree")
        show(head, rows(model, pieces))


if __name__ == "__main__":
    main()
