"""A model's decoding step by who attends: ``attn_implementation="kvcache"`` on HFCache, and SDPA.

    python -m benchmarks.transformers_attention

Batches of equal rows, of ragged ones (padded on the left), and of rows that share a prompt. A Llama of two
layers, one thread; the three ways take turns: the median of their steps, and its ratio to DynamicCache's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmarks.models import TWO_LAYERS, transformers_llama
from benchmarks.pages import show
from kvcache.integrations.transformers import HFCache

LAYERS, KV_HEADS, DIM = 2, 4, 64
"""Those of TWO_LAYERS."""


@functools.cache
def model(attention: str) -> Any:
    return transformers_llama(**TWO_LAYERS, attn_implementation=attention)


@dataclass(frozen=True)
class Case:
    """Rows of ``least`` to ``most`` tokens, of which the first ``shared`` are the same ones."""

    rows: int
    least: int
    most: int
    shared: int = 0

    def __str__(self) -> str:
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        if self.shared:
            return f"{rows} that share {self.shared:,}"
        least = "" if self.least == self.most else f"{self.least} to "
        return f"{rows} of {least}{self.most:,}"

    def fill(self, cache: Any) -> torch.Tensor:
        """Put random keys and values there; what is no padding (rows, tokens)."""
        random = torch.Generator().manual_seed(1)
        for rows, tokens in ((1, self.shared), (self.rows, self.most - self.shared)):
            for layer in range(LAYERS if tokens else 0):
                cache.update(*torch.randn(2, rows, KV_HEADS, tokens, DIM, generator=random), layer)
            if rows == 1 and tokens and self.shared:
                cache.batch_repeat_interleave(self.rows)
        lengths = torch.linspace(self.least, self.most, self.rows).long()
        lengths = lengths[torch.randperm(self.rows, generator=random)]
        return (torch.arange(self.most) >= self.most - lengths.unsqueeze(1)).long()


CASES = (
    Case(1, 500, 500), Case(4, 500, 500), Case(32, 500, 500), Case(32, 480, 500), Case(32, 10, 500),
    Case(8, 10, 4000), Case(32, 1020, 1020, shared=1000),
)  # fmt: skip
WAYS: dict[str, tuple[str, Callable[[Any, Case], Any]]] = {
    "DynamicCache, sdpa": ("sdpa", lambda config, case: transformers.DynamicCache(config=config)),
    "HFCache, sdpa": ("sdpa", lambda config, case: _ours(config, case)),
    "HFCache, kvcache": ("kvcache", lambda config, case: _ours(config, case)),
}


def _ours(config: Any, case: Case) -> HFCache:
    return HFCache(config, max_sequences=case.rows, capacity=case.most + 100)


def steps(case: Case, turns: int) -> dict[str, float]:
    """Milliseconds of a step in each of the ways."""
    caches = {name: make(model(attention).config, case) for name, (attention, make) in WAYS.items()}
    masks = {name: case.fill(cache) for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    token, one = torch.full((case.rows, 1), 5), torch.ones(case.rows, 1, dtype=torch.long)
    for _ in range(turns + 2):
        for name, cache in caches.items():
            masks[name] = torch.cat((masks[name], one), 1)
            start = time.perf_counter_ns()
            model(WAYS[name][0])(token, attention_mask=masks[name], cache=cache)
            times[name].append((time.perf_counter_ns() - start) / 1e6)
    return {name: statistics.median(taken[2:]) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20, help="steps of each")
    parser.add_argument("--case", default="", help="only the cases with this in their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = (row(case, options.turns) for case in CASES if options.case in str(case))
        show(("milliseconds (ratio to DynamicCache)", *WAYS), rows)


def row(case: Case, turns: int) -> list[str]:
    found = steps(case, turns)
    first = found["DynamicCache, sdpa"]
    return [str(case), *(f"{taken:.1f} ({taken / first:.2f})" for taken in found.values())]


if __name__ == "__main__":
    main()
