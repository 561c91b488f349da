"""How many drafted tokens are accepted, and what a pass gives, by draft, temperature and way of accepting.

    python -m benchmarks.speculation [--model ../shared/models/stories260K] [--tokens 4]

The drafts are the model itself, the model without its last layer, and ``prompt_lookup``. "exact" accepts a
drafted token where it is what plain decoding draws by the same seed; "rejection" is Leviathan et al. (2023).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvcache
import ml
from benchmarks.pages import show
from benchmarks.timing import machine
from kvcache_engine.checkpoints.weights import open_weights
from kvcache_engine.drafts import Draft, ModelDraft, prompt_lookup
from kvcache_engine.generate import Generator
from kvcache_engine.loading import bundled_model, load_config, load_model
from kvcache_engine.models.llama import Llama
from kvcache_engine.options import Acceptance, SpeculativeOptions
from kvcache_engine.requests import GenerationOptions
from kvcache_engine.tokenizer import Tokenizer
from kvcache_engine.verification import Speculation

PROMPTS = ("", "Tim had a big dog.", "Once upon a time, there was a girl", "The sun was hot. Lily")


def shortened(path: Path, backend: ml.Backend) -> Any:
    """The model without its last layer: what a smaller model of the same vocabulary may say."""
    config: Any = load_config(path)
    weights: Any = open_weights(path)
    return Llama(backend, replace(config, layers=config.layers - 1), weights)


def measured(
    model: Any, tokenizer: Tokenizer, draft: Draft, temperature: float, acceptance: Acceptance, count: int,
    length: int = 120, seeds: Sequence[int] = range(4),
) -> Speculation:  # fmt: skip
    """Sums over all prompts and seeds."""
    options = SpeculativeOptions(max_sequences=4, capacity=256, tokens=count, acceptance=acceptance)
    total = Speculation()
    with Generator(model, tokenizer, draft=draft, options=options) as generator:
        for seed in seeds if temperature else seeds[:1]:
            generator.complete(PROMPTS, GenerationOptions(length, temperature=temperature, seed=seed))
            found = generator.speculation
            total = Speculation(
                total.passes + found.passes, total.drafted + found.drafted, total.accepted + found.accepted
            )
    return total


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, default=bundled_model(), help="a folder of the Llama family")
    parser.add_argument("--tokens", type=int, default=4, help="drafted tokens per pass")
    options = parser.parse_args()
    print(f"{machine()}, kvcache {kvcache.__version__}, NumPy, {options.tokens} drafted tokens per pass\n")
    head = ("draft", "temperature", "accepting", "accepted", "tokens per pass")
    with ml.open_backend("numpy") as backend:
        model, tokenizer = load_model(options.model, backend), Tokenizer.load(options.model)
        small = shortened(options.model, backend)
        with ModelDraft(small, 4, capacity=256) as less, ModelDraft(model, 4, capacity=256) as itself:
            drafts: dict[str, Draft] = {
                "the model itself": itself, "without its last layer": less, "prompt_lookup": prompt_lookup,
            }  # fmt: skip
            show(head, rows(model, tokenizer, drafts, options.tokens))


def rows(model: Any, tokenizer: Tokenizer, drafts: dict[str, Draft], count: int) -> Iterator[tuple[str, ...]]:
    for name, draft in drafts.items():
        for temperature in (0.0, 0.7, 1.0):
            both = temperature and draft is not prompt_lookup
            ways: tuple[Acceptance, ...] = ("rejection", "exact") if both else ("exact",)
            for way in ways:
                found = measured(model, tokenizer, draft, temperature, way, count)
                accepted, passes = f"{found.acceptance:.0%}", f"{found.tokens_per_pass:.2f}"
                yield name, f"{temperature}", way if both else "any", accepted, passes


if __name__ == "__main__":
    main()
