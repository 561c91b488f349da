"""Policies that choose which tokens a cache keeps, and their cost in perplexity.

    python examples/eviction.py [--backend numpy] [--model bundled] [--chunk 16]

A text is read in chunks. After each chunk, tokens are evicted down to a budget. A policy keeps the latest
tokens; the latest and the first four (attention sinks: Xiao et al., 2023); or the latest, up to half of the
budget, and of the others those that got the most attention, since they were put (heavy hitters, H2O: Zhang et
al., 2023) or from the last chunk (as in TOVA: Oren et al., 2024). No token moves, and no key is re-encoded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ml
from kvcache import Batch, CausalCache
from kvcache_engine import Llama, ModelError, Tokenizer, bundled_model, load_model


class Weighed:
    """A cache of one sequence that adds up the attention weight of each position, over layers and heads.

    The kernels of ``attend`` do not tell their weights, so these are computed once more, on the host. Each
    key is stored with its position as an extra, since ``get`` returns keys in any order.
    """

    def __init__(self, cache: CausalCache) -> None:
        self.cache, self.mass = cache, np.zeros(0)
        self.positions: np.ndarray = np.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def start_forward(self, ctx: ml.Context, batch: Batch) -> None:
        self.cache.start_forward(ctx, batch)
        self.positions = np.array(batch.positions)
        self.mass = np.append(self.mass, np.zeros(max(0, int(self.positions.max()) + 1 - self.mass.size)))

    def put(self, ctx: ml.Context, key: ml.Tensor, value: ml.Tensor) -> None:
        self.cache.put(ctx, key, value, extra={"position": ctx.from_numpy(self.positions, ml.DType.I32)})

    def attend(
        self, ctx: ml.Context, query: ml.Tensor, scale: float, sinks: ml.Tensor | None = None
    ) -> ml.Tensor:
        """query (tokens, heads, head_dim) -> (tokens, heads, v_dim), as of the cache."""
        keys, _, mask = self.cache.get(ctx)
        assert isinstance(mask, ml.Tensor), "CacheConfig() elides no mask"
        position = self.cache.get_extra(ctx, "position").to_numpy().reshape(-1)
        key, queries = keys.to_numpy().astype(np.float64), query.to_numpy().astype(np.float64)
        key = np.repeat(key, queries.shape[1] // key.shape[1], axis=1)
        shown = mask.to_numpy()[: len(queries), None].astype(np.float64)
        scores = np.einsum("qhd,khd->qhk", queries, key) * scale + shown
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        np.add.at(self.mass, position, weights.sum(axis=(0, 1)))
        return self.cache.attend(ctx, query, scale, sinks)


@dataclass
class Recent:
    """The first ``sinks`` tokens and the latest ones stay, ``budget`` in all."""

    budget: int
    sinks: int = 0
    forgets = needs_mass = False

    def evicted(self, positions: np.ndarray, mass: np.ndarray) -> np.ndarray:
        """Which of the stored ``positions`` go; ``mass``, F64, is what each position has had."""
        gone: np.ndarray = positions[self.sinks : max(self.sinks, positions.size - self.budget + self.sinks)]
        return gone


@dataclass
class HeavyHitters:
    """Half of ``budget`` for the latest tokens, half for those of the others that had the most attention."""

    budget: int
    forgets: bool = False
    """Whether only the attention of the last chunk counts."""
    needs_mass = True

    def evicted(self, positions: np.ndarray, mass: np.ndarray) -> np.ndarray:
        older = max(0, positions.size - self.budget // 2)
        count = max(0, positions.size - self.budget)
        lightest: np.ndarray = positions[np.argsort(mass[positions[:older]], kind="stable")[:count]]
        return lightest


def perplexity(
    model: Llama, pieces: list[list[int]], chunk: int, policy: Recent | HeavyHitters | None
) -> float:
    """exp of the mean loss per token, of pieces that are read ``chunk`` tokens at a time."""
    cache = CausalCache()
    cache.set_config(ml.CacheConfig())
    cache.init(model.backend, ml.DType.F32, 1, max(map(len, pieces)), chunk)
    nats, count = 0.0, 0
    for piece in pieces:
        weighed = Weighed(cache) if policy is not None and policy.needs_mass else None
        for begin in range(0, len(piece) - 1, chunk):
            inputs, targets = piece[begin : begin + chunk], piece[begin + 1 : begin + chunk + 1]
            inputs = inputs[: len(targets)]
            batch = Batch(range(begin, begin + len(inputs)), [0] * len(inputs), inputs=inputs)
            with model.backend.new_context() as ctx:
                (weighed or cache).start_forward(ctx, batch)
                logits = model.forward(ctx, batch, weighed or cache).to_numpy().astype(np.float64)
            nats += nats_of(logits, targets)
            count += len(targets)
            if policy is not None:
                mass = np.zeros(0) if weighed is None else weighed.mass
                cache.evict(0, policy.evicted(cache.positions(0), mass).tolist())
                if weighed is not None and policy.forgets:
                    weighed.mass = np.zeros(0)
        cache.remove(0, 0)
    return float(np.exp(nats / count))


def nats_of(logits: np.ndarray, targets: list[int]) -> float:
    """The loss of all targets: minus the logarithm of the likelihood of each."""
    peak = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
    return float((total - logits[np.arange(len(targets)), targets]).sum())


def pieces_of(model: Llama, tokenizer: Tokenizer, text: str) -> Iterator[list[int]]:
    """Every chapter in pieces of BOS and as many tokens as the model has positions for."""
    span = model.config.max_positions - 1
    for chapter in text.split("\n\n"):
        bos, *ids = tokenizer.encode(chapter)
        yield from ([bos, *ids[start : start + span]] for start in range(0, len(ids), span))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--model", type=Path, default=bundled_model(), help="a folder (the bundled model)")
    parser.add_argument("--text", type=Path, default=bundled_model() / "heldout.txt")
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 128, 64, 32])
    options = parser.parse_args()
    if options.chunk < 1:
        parser.error("--chunk must be at least 1")
    if min(options.budgets) < 5:
        parser.error("each of --budgets must be at least 5: four sinks and the latest token")
    try:
        text = options.text.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--text {options.text}: {error}")
    with ml.open_backend(options.backend) as backend:
        try:
            model, tokenizer = load_model(options.model, backend), Tokenizer.load(options.model)
        except ModelError as error:
            parser.error(f"--model {error}")
        assert isinstance(model, Llama), "a model that generates text"
        pieces = [piece for piece in pieces_of(model, tokenizer, text) if len(piece) > 300]
        if not pieces:
            parser.error(f"--text {options.text}: no piece has more than 300 tokens")
        scored = sum(len(piece) - 1 for piece in pieces)
        full = perplexity(model, pieces, options.chunk, None)
        print(f"{scored} tokens in {len(pieces)} pieces of more than 300; full cache: {full:.3f}")
        print("| tokens kept | the latest | the first 4 and the latest | heavy hitters | by the last chunk |")
        print("|---|---|---|---|---|")
        for budget in options.budgets:
            heavy = HeavyHitters(budget), HeavyHitters(budget, forgets=True)
            policies = Recent(budget), Recent(budget, sinks=4), *heavy
            found = (perplexity(model, pieces, options.chunk, policy) for policy in policies)
            print(f"| {budget} | {' | '.join(f'{value:.3f}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
