"""Policies that choose which tokens a cache keeps, and what each costs in perplexity.

    python examples/eviction.py [--backend numpy] [--model bundled] [--chunk 16]

A text is read in chunks. After each the cache is compressed to a budget of tokens: the latest ones; these
and the first four (attention sinks: Xiao et al., 2023); or half of them and, of all others, those that had
the most attention: since they were put (heavy hitters, H2O: Zhang et al., 2023), or from the last chunk (as
in TOVA: Oren et al., 2024). No token moves, no key is re-encoded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ml
from kvcache import AttentionMass, Batch, CausalCache
from kvcache.runner import Llama, ModelError, Tokenizer, bundled_model, load_model


@dataclass
class Recent:
    """The first ``sinks`` tokens and the latest ones stay, ``budget`` in all."""

    budget: int
    sinks: int = 0
    forgets = needs_mass = False

    def evicted(self, positions: np.ndarray, mass: np.ndarray | None) -> np.ndarray:
        gone: np.ndarray = positions[self.sinks : max(self.sinks, positions.size - self.budget + self.sinks)]
        return gone


@dataclass
class HeavyHitters:
    """Half of ``budget`` for the latest tokens, half for those of the others that had the most attention."""

    budget: int
    forgets: bool = False
    """Whether only the attention of the last chunk counts."""
    needs_mass = True

    def evicted(self, positions: np.ndarray, mass: np.ndarray | None) -> np.ndarray:
        assert mass is not None
        older = max(0, positions.size - self.budget // 2)
        count = max(0, positions.size - self.budget)
        lightest: np.ndarray = positions[np.argsort(mass[:older], kind="stable")[:count]]
        return lightest


def perplexity(
    model: Llama, pieces: list[list[int]], chunk: int, policy: Recent | HeavyHitters | None
) -> float:
    """exp of the mean loss per token, of pieces that are read ``chunk`` tokens at a time."""
    cache = CausalCache()
    cache.init(model.backend, ml.DType.F32, 1, max(map(len, pieces)), chunk)
    nats, count = 0.0, 0
    for piece in pieces:
        cache.observer = AttentionMass() if policy is not None and policy.needs_mass else None
        for begin in range(0, len(piece) - 1, chunk):
            inputs, targets = piece[begin : begin + chunk], piece[begin + 1 : begin + chunk + 1]
            inputs = inputs[: len(targets)]
            batch = Batch(range(begin, begin + len(inputs)), [0] * len(inputs), inputs=inputs)
            with model.backend.new_context() as ctx:
                cache.start_forward(ctx, batch)
                logits = model.forward(ctx, batch, cache).to_numpy().astype(np.float64)
            nats += nats_of(logits, targets)
            count += len(targets)
            if policy is not None:
                cache.compress(0, policy)
                if isinstance(cache.observer, AttentionMass) and policy.forgets:
                    cache.observer.clear()
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
