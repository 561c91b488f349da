"""Hybrid models give their states inside a pass: drafted tokens, scheduled snapshots, prompts that part.

The models are those of test_models, small and random; their logits and tokens are transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache import Batch
from kvcache.caches import branches
from kvcache_engine.engine import Engine
from kvcache_engine.generate import Generator
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.requests import GenerationOptions

from ..rigs.model_passes import close, prompt, run
from .test_models import (
    backend,
    expected_logits,
    expected_tokens,
    folders,
    models,
    new_cache,
    whole_on_numpy,
)
from .test_speculative import Oracle, random_prompts

pytest.importorskip("transformers")
__all__ = ["backend", "folders", "models"]
HYBRIDS = ("qwen3-next", "qwen3.5")

pytestmark = whole_on_numpy(HYBRIDS, ["qwen3-next"])


@pytest.fixture
def model(models: Any, name: str) -> Any:
    return models(name)


def test_drafts_are_taken_back_to_any_token(model: Any, name: str) -> None:
    """Two sequences with drafts of different lengths, shuffled into one pass."""
    tokens = (prompt(40, seed=1), prompt(40, seed=2))
    expected = [expected_logits(name, each) for each in tokens]
    for right in range(1, 5):
        cache = new_cache(model, sequences=2)
        run(model, cache, [(seq, at) for at in range(9) for seq in range(2)], tokens)
        branches.want_states(cache, 0, range(10, 14))
        branches.want_states(cache, 1, [10])
        wrong = [[*tokens[0][: 9 + right], *prompt(20, seed=7)], [*tokens[1][:10], *prompt(20, seed=8)]]
        drafted = [(0, 9), (1, 9), (0, 10), (0, 11), (1, 10), (0, 12), (0, 13)]
        run(model, cache, drafted, wrong)
        branches.rollback(cache, 0, 9 + right)
        branches.rollback(cache, 1, 10)
        for _ in range(2):
            entries = [(seq, cache.offset(seq)) for seq in (1, 0)]
            got = run(model, cache, entries, tokens)
            close(got, np.stack([expected[seq][at] for seq, at in entries]))


def test_a_state_inside_is_that_of_a_pass_that_ends_there(model: Any) -> None:
    """Within rounding: products over more rows add up in another order."""
    tokens = prompt(30, seed=5)

    def states(cache: Any, end: int) -> Mapping[tuple[str, int], np.ndarray]:
        return {key: state.to_numpy() for key, state in cache.states.snapshot(0, 0, end).states.items()}

    whole = new_cache(model)
    whole.schedule_snapshots(0, [1, 9, 20])
    run(model, whole, [(0, at) for at in range(30)], [tokens])
    assert [taken.end for taken in whole.snapshots_taken(0)] == [1, 9, 20]
    assert whole.skipped_snapshots(0) == []
    for end in (1, 9, 20):
        cut = new_cache(model)
        run(model, cut, [(0, at) for at in range(end)], [tokens])
        found, expected = states(whole, end), states(cut, end)
        assert found.keys() == expected.keys()
        for key, state in expected.items():
            np.testing.assert_allclose(found[key], state, rtol=0, atol=2e-5 * max(1.0, np.abs(state).max()))


def test_prompts_part_inside_one_pass(model: Any, name: str) -> None:
    """A PrefixCache has a hybrid's branching points of one pass over the whole prompt."""
    common, ends = prompt(21, seed=3), (prompt(12, seed=4), prompt(9, seed=6))
    one, two = ([*common, *end] for end in ends)
    passes: list[int] = []
    with Engine(model, None, EngineOptions(max_sequences=2, capacity=64, interval=8)) as engine:
        forward = model.forward

        def counted(ctx: ml.Context, batch: Batch, cache: Any) -> Any:
            passes.append(len(batch))
            return forward(ctx, batch, cache)

        model.forward = counted
        try:
            requests = [engine.submit(text, GenerationOptions(6)) for text in (one, two)]
            while engine.busy:
                engine.step()
        finally:
            del model.forward
        for text, request in zip((one, two), requests, strict=True):
            assert list(request.tokens[len(text) :]) == expected_tokens(name, text, 6)
        # The second from where they part, beside a token of the first's answer.
        assert [n for n in passes if n > 2] == [len(one), len(ends[1]) + 1]
        assert engine.prefix.stats.skipped == 0
        assert engine.statistics.reused_tokens == len(common)


@pytest.mark.parametrize("declared", [False, True])
def test_a_model_that_delivers_nothing_evaluates_accepted_tokens_again(
    model: Any, name: str, declared: bool
) -> None:
    class Silent(kvcache.RecurrentCache):
        def wanted_states(self) -> Mapping[int, tuple[int, ...]]:
            return {}

    prompts = random_prompts(1, 97)
    expected = [tuple(expected_tokens(name, prompts[0], 12))]
    cache = Silent.of(kvcache.StateCache({None: model.config.states}, delivers=declared))
    options = SpeculativeOptions(max_sequences=1, capacity=64)
    draft = Oracle(prompts, expected, 97).partly
    with Generator(model, None, cache, options, draft) as generator:
        (answer,) = generator.complete(prompts, GenerationOptions(12))
        assert answer.tokens == expected[0]
        assert generator.speculation.repeated > 0
