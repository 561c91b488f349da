"""A runtime's models driven by our engine: requests of every kind at once, against the model alone."""

from __future__ import annotations

import functools
import itertools
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.census import engine as census
from kvcache_engine import Engine, EngineOptions, GenerationOptions, SpeculativeOptions
from kvcache_engine.drafts import ModelDraft, prompt_lookup

__all__ = ["MODES", "Case", "agree", "drafts", "is_right", "judge", "mixed"]

NEW = 6
PROMPTS = (27, 29, 9, 30, 12, 3)
"""Tokens of the prompts: the first two share 22, the third is cancelled, and all but the last take chunks."""
Found = list[list[int]]


class Case(ABC):
    """One model, and what it answers by itself."""

    def __init__(self, draw: Callable[[int, int], list[int]]) -> None:
        """``draw(count, seed)``: token ids."""
        shared = draw(22, 1)
        ends = [draw(count - 22, i + 2) for i, count in enumerate(PROMPTS[:2])]
        self.prompts = [shared + end for end in ends] + [draw(count, count) for count in PROMPTS[2:]]

    def alone(self, answers: Found) -> Found:
        """What the model says by itself behind each token of its answers."""
        return [
            self.likeliest([*prompt, *answer])[len(prompt) - 1 : -1]
            for prompt, answer in zip(self.prompts, answers, strict=True)
        ]

    @abstractmethod
    def likeliest(self, tokens: Sequence[int]) -> list[int]:
        """The likeliest token behind each of these, by the model in one pass and without our caches."""

    @property
    @abstractmethod
    def driven(self) -> Any:
        """The model as the engine drives it."""

    @property
    @abstractmethod
    def smaller(self) -> Any:
        """Nearly the same model: some of its drafts are right, some are not."""


SIZES: dict[str, Any] = {
    "max_sequences": 4, "capacity": 18, "context": 64, "prefill_chunk": 8, "block_size": 8, "interval": 8,
    "fetch": "always",
}  # fmt: skip
"""Of an engine in which four requests run at a time, and make room for one another."""


def run_all(engine: Engine, case: Case, drafts: Sequence[Any] = (None,)) -> Found:
    """The answers to all prompts at once, but for the third, which is cancelled on its way."""
    settings = GenerationOptions(NEW, ignore_eos=True)
    requests = [
        engine.submit(prompt, settings, draft)
        for prompt, draft in zip(case.prompts, itertools.cycle(drafts), strict=False)
    ]
    while engine.busy:
        engine.step()
        if len(requests[2].tokens) > PROMPTS[2] + 1:
            engine.cancel(requests[2])
    for request in requests:
        if request.error is not None:
            raise request.error
    return [[*request.tokens[len(prompt) :]] for request, prompt in zip(requests, case.prompts, strict=True)]


def mixed(case: Case) -> tuple[Found, Found]:
    """All prompts, twice: the second engine goes on from what the first has left in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        with Engine(case.driven, None, EngineOptions(**SIZES), [folder]) as engine:
            first = run_all(engine, case)
        with Engine(case.driven, None, EngineOptions(**SIZES), [folder]) as engine:
            second = run_all(engine, case)
            if engine.statistics.reused_tokens < 60:
                raise ValueError(f"only {engine.statistics.reused_tokens} tokens were not computed again")
    return first, second


def drafts(case: Case) -> tuple[Found]:
    """All prompts, with what a smaller model drafts and what is looked up in the text."""
    options = SpeculativeOptions(**SIZES)
    with Engine(case.driven, None, options) as engine, ModelDraft(case.smaller, 4, capacity=64) as draft:
        found = run_all(engine, case, [draft, prompt_lookup])
        if case.driven.config.cached_layers and not engine.preemptions:  # states alone take no cells
            raise ValueError("no request made room for another")
        return (found,)


def _mode(run: Callable[[Case], tuple[Found, ...]]) -> Callable[[Case, str], list[Found]]:
    """What the engine answers, or what the model says to that by itself: [] where there is no answer."""

    def found(case: Case, which: str) -> list[Found]:
        if which == "ours":
            return [*run(case)]
        try:
            return [case.alone(answers) for answers in run(case)]
        except Exception:
            return []

    return found


def _driven(case: Case, which: str) -> list[Found]:
    """Only that the model is not refused, and tokens of two sequences in four passes have its logits."""
    assert which != "ours" or case.driven
    return []


MODES: dict[str, Callable[[Case, str], list[Found]]] = {
    "driven": _driven,
    **{name: _mode(functools.cache(run)) for name, run in (("mixed", mixed), ("drafts", drafts))},
}


def judge(library: Any, case: Case, mode: str) -> tuple[str, str]:
    """As the census judges; of "driven" it is the layout that is told."""
    kind, told = census.judge(library, case, mode)
    return (case.driven.layout.name.lower(), "") if mode == "driven" and kind == "=" else (kind, told)


def agree(one: list[Found], other: list[Found]) -> bool:
    return one == other


def is_right(case: Case, mode: str, found: list[Found]) -> bool:
    return found == MODES[mode](case, "none")
