"""Drafts that are drawn: answers are distributed as if there had been none, and as many are right as can be.

The models are chains: a token's logits depend on the one before alone, so that every distribution is known.
All seeds are fixed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ml
from kvcache_engine.config import ModelConfig
from kvcache_engine.drafts import ModelDraft, Proposal
from kvcache_engine.engine import Engine
from kvcache_engine.errors import RequestError
from kvcache_engine.generate import Generator
from kvcache_engine.loading import bundled_model, load_config
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.requests import Finished, GenerationOptions
from kvcache_engine.sampling import Choice, Proposed, Sampler
from ml import nn

from ..rigs.each_backend import host_and_tensors, runnable
from .test_sampling import check_counts, shares

SIZE = 5
DRAWS, TEXTS = 20_000, 500
SETTINGS = {
    "whole": {"temperature": 0.9},
    "cut": {"temperature": 1.3, "top_k": 4, "top_p": 0.93},
    "peaked": {"temperature": 0.7, "min_p": 0.1},
}

Reject = Callable[[np.ndarray, nn.Draws, nn.Drafted], np.ndarray]


def by_tensors(backend: ml.Backend) -> Reject:
    def reject(logits: np.ndarray, draws: nn.Draws, drafted: nn.Drafted) -> np.ndarray:
        with backend.new_context() as ctx:
            sampler = nn.RejectionSampler(ctx, draws, drafted, logits.shape[1])
            return sampler(ctx, ctx.from_numpy(logits, ml.DType.F32)).to_numpy()

    return reject


reject = host_and_tensors(nn.reject_on_host, by_tensors)


def some_logits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.5, shape).astype(np.float32)


# One token.


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_token_is_distributed_as_the_target_and_accepted_as_often_as_both_agree(
    reject: Reject, settings: dict[str, Any]
) -> None:
    target, guess = some_logits(1, 12), some_logits(2, 12)
    p, q = shares(target, **settings), shares(guess, **settings)
    random = np.random.default_rng(3)
    tokens = random.choice(12, DRAWS, p=q)
    accepting, instead = 1 - random.random((2, DRAWS))
    row = (settings["temperature"], settings.get("top_k", 0), settings.get("top_p", 1.0))
    rows = [(*row, uniform, settings.get("min_p", 0.0)) for uniform in instead]
    drafted = nn.Drafted(tokens, np.repeat(q[None], DRAWS, 0), accepting)
    found = reject(np.repeat(target[None], DRAWS, 0), nn.Draws(*np.array(rows).T), drafted)
    check_counts(np.bincount(found, minlength=12), p)
    agree = np.minimum(p, q).sum()
    assert agree == pytest.approx(1 - np.abs(p - q).sum() / 2)
    assert abs((found == tokens).mean() - agree) < 4 * (agree * (1 - agree) / DRAWS) ** 0.5


def test_what_cannot_come_is_replaced_and_what_is_the_same_is_kept(reject: Reject) -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25, 0.0]] * 4, np.float32) + 1e-45)
    logits[:, 3] = -np.inf
    given = np.array([[0, 0, 0, 1], [0.5, 0.25, 0.25, 0], [1, 0, 0, 0], [0.25, 0.75, 0, 0]])
    tokens, uniform = np.array([3, 2, 0, 1]), np.array([2.0**-24, 0.999, 0.75, 0.5])
    draws = nn.Draws(np.ones(4), np.zeros(4), np.ones(4), np.array([0.6, 0.5, 0.6, 0.5]))
    # 3 cannot come; all of p is accepted; of 0 a half is, and 1 takes its place; of 1 a third is, and 0 does.
    assert reject(logits, draws, nn.Drafted(tokens, given, uniform)).tolist() == [1, 2, 2, 0]


def test_probabilities_of_another_size_are_refused() -> None:
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        draws = nn.Draws(np.ones(2), np.zeros(2), np.ones(2), np.ones(2))
        with pytest.raises(ml.ShapeError, match=r"reject.*\(2, 4\)"):
            nn.RejectionSampler(ctx, draws, nn.Drafted(np.zeros(2, int), np.ones((2, 3)), np.ones(2)), 4)


@pytest.mark.parametrize("name", runnable("numpy", "torch", "mlx"))
def test_probabilities_are_what_is_drawn_from(name: str) -> None:
    logits = some_logits(5, 6, 40)
    rows = [(0.0, 0, 1.0, 0.0), (0.8, 0, 1.0, 0.0), (1.5, 7, 1.0, 0.0), (1.0, 0, 0.7, 0.0),
            (1.0, 30, 0.9, 0.05), (0.0, 3, 0.5, 0.0)]  # fmt: skip
    draws = nn.Draws(*np.array([(t, k, p, 1.0, least) for t, k, p, least in rows]).T)
    expected = [
        shares(x, *row) if row[0] else np.eye(40)[x.argmax()] for x, row in zip(logits, rows, strict=True)
    ]
    np.testing.assert_allclose(nn.probabilities_on_host(logits, draws), expected, atol=1e-12)
    with ml.open_backend(name, device="cpu") as backend, backend.new_context() as ctx:
        found = nn.BatchSampler(ctx, draws, 40).probabilities(ctx, ctx.from_numpy(logits)).to_numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("device", ["cpu", "elsewhere"])
def test_rows_with_and_without_a_drawn_draft_go_together(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = some_logits(7, 4, SIZE)
    samplers = [Sampler(t, seed=3, stream=i) for i, t in enumerate((0.0, 1.0, 1.0, 0.5))]
    q = shares(some_logits(8, SIZE), 1.0)
    with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
        monkeypatch.setattr(type(backend), "devices", (ml.DeviceInfo(device, device, ""),))
        draws = [(sampler, 9) for sampler in samplers]
        plain = Choice(ctx, draws, SIZE)(ctx, ctx.from_numpy(logits))
        choice = Choice(ctx, draws, SIZE, [1] * 4, [Proposed(2, 1, q)])
        found = choice(ctx, ctx.from_numpy(logits))
        drafted = nn.Drafted(np.array([1]), q[None], np.array([samplers[2].accepting(9)]))
        row = nn.Draws(*np.array([samplers[2].settings(samplers[2].uniform(9))]).T)
        (expected,) = nn.reject_on_host(logits[2:3], row, drafted)
    assert [found.token(i) for i in (0, 1, 3)] == [plain.token(i) for i in (0, 1, 3)]
    assert found.token(2) == expected
    for i in range(4):
        logprobs = found.logprobs(i)
        assert logprobs is not None
        assert logprobs.token == pytest.approx(np.log(shares(logits[i], 1.0)[found.token(i)]), abs=1e-5)


def test_draws_for_drafting_accepting_and_choosing_are_their_own_and_repeat() -> None:
    first, again = (Sampler(1.0, seed=9, stream=4) for _ in range(2))
    uses = [[use(i) for i in range(200)] for use in (first.uniform, first.drafting, first.accepting)]
    assert len({*itertools.chain(*uses)}) > 595
    assert uses == [[use(i) for i in range(200)] for use in (again.uniform, again.drafting, again.accepting)]


# Answers.


class Chain:
    """A model whose logits are a table's row of the last token."""

    def __init__(self, backend: ml.Backend, table: np.ndarray) -> None:
        sizes = dict.fromkeys(
            ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"), 1
        )
        bundled: ModelConfig = load_config(bundled_model())
        self.config = replace(bundled, vocab_size=len(table), bos_id=None, eos_ids=(), **sizes)
        self.backend = backend
        self.table = table

    def forward(self, ctx: ml.Context, batch: Any, cache: Any) -> ml.Tensor:
        nothing = ctx.zeros((len(batch), 1, 1), ml.DType.F32)
        cache.set_layer(0)
        cache.put(ctx, nothing, nothing)
        logits = ctx.from_numpy(self.table).rows(ctx, batch.inputs)
        return logits if batch.outputs is None else logits.rows(ctx, batch.outputs)


@pytest.fixture(scope="module")
def chains() -> Iterator[tuple[Chain, Chain]]:
    """What is asked, and a draft that is right some of the time."""
    with ml.open_backend("numpy") as backend:
        yield Chain(backend, some_logits(11, SIZE, SIZE)), Chain(backend, some_logits(12, SIZE, SIZE))


def answers(
    chains: tuple[Chain, Chain], count: int, settings: dict[str, Any], tokens: int, **options: Any
) -> tuple[np.ndarray, Generator]:
    """(texts, length) of ``count`` texts that begin alike."""
    target, small = chains
    length = tokens + 2
    sizes = {"max_sequences": 64, "capacity": 16}
    asked = GenerationOptions(length, seed=1, **settings)
    with (
        ModelDraft(small, sequences=64, capacity=16) as draft,
        Generator(
            target, None, draft=draft, options=SpeculativeOptions(**sizes, tokens=tokens, **options)
        ) as generator,
    ):
        found = generator.complete([[0]] * count, asked)
    return np.array([answer.tokens for answer in found]), generator


def joint(table: np.ndarray, length: int, settings: dict[str, Any]) -> np.ndarray:
    """The probability of every text of ``length`` tokens behind token 0."""
    rows = np.array([shares(row, **settings) for row in table])
    found = rows[0]
    for _ in range(length - 1):
        found = found[..., None] * rows
    return found.ravel()


@pytest.fixture(scope="module")
def drafted(chains: tuple[Chain, Chain]) -> Callable[[str, int], tuple[np.ndarray, Generator]]:
    """``drafted(name, tokens)``: TEXTS by SETTINGS[name], with ``tokens`` drafted in each pass."""
    return functools.cache(lambda name, tokens: answers(chains, TEXTS, SETTINGS[name], tokens))


@pytest.mark.parametrize(("name", "tokens"), [("whole", 2), ("cut", 1), ("peaked", 1)], ids=SETTINGS)
def test_answers_are_distributed_as_those_without_a_draft(
    chains: tuple[Chain, Chain], drafted: Any, name: str, tokens: int
) -> None:
    """All tokens of a text jointly; all but the first and the last are drafted."""
    texts, generator = drafted(name, tokens)
    numbers = texts @ (SIZE ** np.arange(tokens + 2)[::-1])
    expected = joint(chains[0].table, tokens + 2, SETTINGS[name])
    check_counts(np.bincount(numbers, minlength=len(expected)), expected)
    assert 0.05 < generator.speculation.acceptance < 0.9


@pytest.mark.parametrize("name", SETTINGS)
def test_as_many_are_accepted_as_the_distributions_have_in_common(
    chains: tuple[Chain, Chain], drafted: Any, name: str
) -> None:
    """The second of three tokens is drafted; behind each first one, as often as 1 - TV(p, q) says."""
    _, generator = drafted(name, 1)
    p, q = (np.array([shares(row, **SETTINGS[name]) for row in chain.table]) for chain in chains)
    expected = p[0] @ np.minimum(p, q).sum(1)
    counts = generator.speculation
    assert counts.drafted == TEXTS
    assert abs(counts.acceptance - expected) < 4 * (expected * (1 - expected) / TEXTS) ** 0.5
    assert counts.tokens_per_pass == (counts.passes + counts.accepted) / counts.passes


def test_a_seed_repeats_and_exact_acceptance_gives_what_plain_decoding_draws(
    chains: tuple[Chain, Chain],
) -> None:
    settings = SETTINGS["whole"]
    first, _ = answers(chains, 40, settings, 3)
    again, _ = answers(chains, 40, settings, 3)
    exact, generator = answers(chains, 40, settings, 3, acceptance="exact")
    with Generator(chains[0], None, options=EngineOptions(64, 16)) as plain:
        found = plain.complete([[0]] * 40, GenerationOptions(5, seed=1, **settings))
    assert (first == again).all()
    assert (exact == np.array([answer.tokens for answer in found])).all()
    assert not (first == exact).all()
    assert 0 < generator.speculation.acceptance < 1


@pytest.mark.parametrize("width", [1, 2])
def test_greedy_requests_beside_sampled_ones_have_the_same_tokens(
    chains: tuple[Chain, Chain], width: int
) -> None:
    target, small = chains
    settings = [GenerationOptions(9, temperature=t, seed=2) for t in (0.0, 1.0)]
    with Generator(target, None, options=EngineOptions(2, 16)) as plain:
        (expected,) = plain.complete([[0]], settings[0])
    with (
        ModelDraft(small, sequences=2, width=width, capacity=16) as draft,
        Engine(target, None, SpeculativeOptions(2, 16, tokens=3, width=width)) as engine,
    ):
        requests = [engine.submit([0], each, draft) for each in settings]
        found = [event for _ in range(20) for event in engine.step() if isinstance(event, Finished)]
        assert engine.speculation.drafted > 0
        assert {answer.request for answer in found} == {request.id for request in requests}
    assert next(answer for answer in found if answer.request == 0).tokens == expected.tokens


@pytest.mark.parametrize(
    ("tokens", "given", "message"),
    [
        ([1], np.full((1, SIZE - 1), 1 / (SIZE - 1)), "1 tokens with probabilities"),
        ([1, 2], np.full((1, SIZE), 1 / SIZE), "2 tokens with probabilities"),
        ([1], np.full((1, SIZE), 0.5), "sum to 1"),
        ([1], np.eye(SIZE)[[2]], "above 0 for the token"),
        ([1], np.eye(SIZE)[[1]] * np.nan, "sum to 1"),
        ([1], np.array([[0.0, 2.0, -1.0, 0.0, 0.0]]), "at least 0"),
        ([SIZE], np.full((1, SIZE), 1 / SIZE), f"token {SIZE}"),
    ],
)
def test_what_a_draft_says_it_drew_from_is_checked(
    chains: tuple[Chain, Chain], tokens: list[int], given: np.ndarray, message: str
) -> None:
    class Wrong:
        def __call__(self, seq: int, text: Sequence[int], count: int, width: int) -> list[list[int]]:
            raise AssertionError("it is asked to draw")

        def sample(self, seq: int, text: Sequence[int], count: int, sampler: Sampler, index: int) -> Proposal:
            return Proposal(tokens, given)

    options = SpeculativeOptions(max_sequences=1, capacity=16)
    with Generator(chains[0], None, draft=Wrong(), options=options) as generator:
        with pytest.raises(RequestError, match=f"draft.*{message}"):
            generator.complete([[0]], GenerationOptions(8, temperature=1.0))
        cache: Any = generator.cache
        assert cache.free_cells == cache.cells
