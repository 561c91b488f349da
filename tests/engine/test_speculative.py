"""Speculative decoding says what plain decoding says, whatever the drafts, on every kind of cache.

The sliding, chunked and recurrent models are those of test_models, small and random; their windows
and chunks are of 8 tokens, and answers go on for several of them. Their tokens are transformers' own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
import ml
from kvcache.caches import branches
from kvcache.caches.wrapper import unwrapped
from kvcache_engine.drafts import Draft, ModelDraft, prompt_lookup
from kvcache_engine.errors import RequestError
from kvcache_engine.generate import Generator
from kvcache_engine.loading import bundled_model, load_model
from kvcache_engine.options import EngineOptions, SpeculativeOptions
from kvcache_engine.requests import Finished, GenerationOptions
from kvcache_engine.tokenizer import Tokenizer

COUNT = 20
PROMPT = 13
HYBRID = ("gemma3", "mixtral", "qwen3-next")


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest, open_any: Any) -> Iterator[ml.Backend]:
    with open_any(getattr(request, "param", "numpy")) as opened:
        yield opened


@pytest.fixture(scope="module")
def tiny(backend: ml.Backend) -> Any:
    return load_model(bundled_model(), backend)


@pytest.fixture(scope="module")
def hybrids(backend: ml.Backend, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``hybrids(name)``: a model of test_models."""
    pytest.importorskip("transformers")
    from .test_models import peer

    @functools.cache
    def load(name: str) -> Any:
        path = tmp_path_factory.mktemp("model")
        peer(name).save_pretrained(path)
        return load_model(path, backend)

    return load


def plain(model: Any, prompts: Sequence[Any], settings: GenerationOptions) -> list[tuple[int, ...]]:
    """Each prompt alone in a cache of its own, one token per pass."""
    return [_alone(model, tuple(prompt), settings) for prompt in prompts]


@functools.cache
def _alone(model: Any, prompt: tuple[int, ...], settings: GenerationOptions) -> tuple[int, ...]:
    with Generator(model, None, options=EngineOptions(max_sequences=1, capacity=96)) as generator:
        return generator.complete([prompt], settings)[0].tokens


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(3, vocabulary, PROMPT - i)] for i in range(count)]


class Oracle:
    """Knows the answers: drafts them as they are, or spoilt in some way. Made for tests."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], size: int) -> None:
        self.texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        self.size = size
        self.rng = np.random.default_rng(11)

    def next(self, tokens: Sequence[int], count: int) -> list[int]:
        text = next(text for text in self.texts if text[: len(tokens)] == list(tokens))
        return text[len(tokens) : len(tokens) + count]

    def right(self, seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        return [self.next(tokens, count)]

    def wrong(self, seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        guess = self.next(tokens, count)
        return [[(token + 1 + i) % self.size for token in guess] for i in range(width)]

    def partly(self, seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        """Each branch goes wrong somewhere else, and some do not."""
        guesses = []
        for _ in range(width):
            guess, at = self.next(tokens, count), int(self.rng.integers(0, count + 2))
            guesses.append([*guess[:at], *((token + 1) % self.size for token in guess[at:])])
        return guesses

    def random(self, seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        lengths = self.rng.integers(0, count + 1, width)
        return [self.rng.integers(0, self.size, length).tolist() for length in lengths]


def leftover(generator: Generator) -> None:
    """No sequence holds more than its text has, and branches hold nothing."""
    held = dict.fromkeys(range(generator.cache.max_sequences), 0)
    for request in generator.engine.running:
        assert request.session is not None
        held[request.session.seq] = request.run.stored
    for seq, count in held.items():
        assert branches.offset(generator.cache, seq) == count
    full = [part for part in unwrapped(generator.cache) if type(part) is kvcache.CausalCache]
    for part in full:
        assert part.cells - part.free_cells <= sum(held.values())


def speculate(
    model: Any, prompts: Sequence[Any], draft: Draft, settings: GenerationOptions, **options: Any
) -> tuple[list[tuple[int, ...]], Generator]:
    options = {"max_sequences": 2, "capacity": 64, "prefill_chunk": 7, **options}
    found: dict[int, tuple[int, ...]] = {}
    with Generator(model, None, draft=draft, options=SpeculativeOptions(**options)) as generator:
        for event in generator.generate(prompts, settings):
            leftover(generator)
            if isinstance(event, Finished):
                found[event.request] = event.tokens
        for seq in range(generator.cache.max_sequences):
            assert branches.offset(generator.cache, seq) == 0
        for part in unwrapped(generator.cache):
            if not isinstance(part, kvcache.StateCache):  # which has no cells
                assert part.free_cells == part.cells
    return [found[i] for i in range(len(prompts))], generator


# The same answers.


@pytest.mark.parametrize(
    ("backend", "kind", "width"),
    [
        *(("numpy", kind, width) for kind, width in (("right", 1), ("partly", 1), ("partly", 3))),
        ("torch", "partly", 3),
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("name", HYBRID)
def test_the_tokens_are_those_of_transformers_past_the_wrap(
    hybrids: Any, name: str, kind: str, width: int
) -> None:
    from .test_models import expected_tokens

    model = hybrids(name)
    prompts = random_prompts(3, 97)  # more of them than sequences
    expected = [tuple(expected_tokens(name, prompt, COUNT)) for prompt in prompts]
    draft = getattr(Oracle(prompts, expected, 97), kind)
    found, generator = speculate(model, prompts, draft, GenerationOptions(COUNT), width=width)
    assert found == expected
    check_counts(generator, kind, len(prompts))


def check_counts(generator: Generator, kind: str, texts: int) -> None:
    """What drafts were worth is what their kind says."""
    counts, total = generator.speculation, texts * (COUNT - 1)
    assert generator.statistics.generated_tokens == texts * COUNT
    assert generator.statistics.decoded_tokens == counts.passes + counts.accepted == total
    if kind == "right":
        assert counts.acceptance == 1
        assert counts.passes == -(-(COUNT - 1) // 5) * texts  # four drafted tokens, and one more
    elif kind == "wrong":
        assert (counts.accepted, counts.passes) == (0, total)
        assert counts.drafts == total - texts  # the last token leaves room for none
    elif kind == "partly":
        assert 0 < counts.acceptance < 1
    assert counts.repeated == 0


@pytest.mark.parametrize(
    ("kind", "width"), [("right", 1), ("wrong", 1), ("wrong", 2), ("partly", 2), ("random", 2)]
)
def test_the_bundled_model_with_every_kind_of_draft(tiny: Any, kind: str, width: int) -> None:
    tokenizer = Tokenizer.load(bundled_model())
    prompts = [tokenizer.encode(text) for text in ("And God said", "In the beginning", "The king")]
    settings = GenerationOptions(COUNT, ignore_eos=True)
    expected = plain(tiny, prompts, settings)
    draft = getattr(Oracle(prompts, expected, tiny.config.vocab_size), kind)
    found, generator = speculate(tiny, prompts, draft, settings, width=width)
    assert found == expected
    check_counts(generator, kind, len(prompts))


@pytest.mark.parametrize(("draft", "count", "most"), [("lookup", 200, 377), ("branches of itself", 60, 26)])
def test_stories_says_what_its_authors_check(
    backend: ml.Backend, stories: Path, stories_text: str, draft: str, count: int, most: int
) -> None:
    """In at most so many passes for two texts."""
    model, tokenizer = load_model(stories, backend), Tokenizer.load(stories)
    options = SpeculativeOptions(max_sequences=2, capacity=256, width=3 if "branches" in draft else 1)
    with ModelDraft(model, sequences=2, width=3) as same:
        guess: Draft = prompt_lookup if "lookup" in draft else same
        with Generator(model, tokenizer, draft=guess, options=options) as generator:
            answers = generator.complete(["", "Tim had a big dog. The dog"], GenerationOptions(count))
            counts = generator.speculation
    assert len(answers[0].tokens) == count
    assert answers[0].text == stories_text if count == 200 else stories_text.startswith(answers[0].text)
    assert counts.passes + counts.accepted == 2 * (count - 1)
    assert counts.passes <= most


@pytest.mark.parametrize(("name", "width"), [("gemma3", 2), ("qwen3-next", 1)])
def test_a_model_drafts_for_another_of_the_same_vocabulary(hybrids: Any, name: str, width: int) -> None:
    """The draft has a window or a recurrence of its own, and is right some of the time."""
    from .test_models import expected_tokens

    target = "mixtral"
    prompts = random_prompts(2, 97)
    expected = [tuple(expected_tokens(target, prompt, COUNT)) for prompt in prompts]
    for drafter in (hybrids(name), hybrids(target)):
        with ModelDraft(drafter, sequences=2, width=width, capacity=64, max_batch=9) as draft:
            found, generator = speculate(
                hybrids(target), prompts, draft, GenerationOptions(COUNT), width=width
            )
            assert found == expected
            for spare in range(2, 2 + width):
                assert branches.offset(draft.cache, spare) == 0
        if drafter is hybrids(target):
            assert generator.speculation.acceptance == 1


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_sampled_answers_are_those_of_the_same_seed(hybrids: Any, name: str, width: int) -> None:
    model, prompts = hybrids(name), random_prompts(2, 97)
    settings = GenerationOptions(COUNT, temperature=0.9, top_k=20, seed=5)
    with Generator(model, None, options=EngineOptions(max_sequences=2, capacity=64)) as generator:
        expected = [answer.tokens for answer in generator.complete(prompts, settings)]
    draft = Oracle(prompts, expected, 97).partly
    found, generator = speculate(model, prompts, draft, settings, width=width)
    assert found == expected
    assert generator.speculation.accepted > 0


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_one_sequence_alone_and_the_bytes_that_its_cache_takes(hybrids: Any, name: str, width: int) -> None:
    """A window has no memory beyond itself then; ``cache_bytes`` is known before anything is allocated."""
    from .test_models import expected_tokens

    prompts = random_prompts(1, 97)
    expected = [tuple(expected_tokens(name, prompts[0], COUNT)) for _ in prompts]
    draft = Oracle(prompts, expected, 97).partly
    sizes = {"max_sequences": 1, "capacity": 40, "width": width}
    found, _ = speculate(hybrids(name), prompts, draft, GenerationOptions(COUNT), **sizes)
    assert found == expected
    options = SpeculativeOptions(prefill_chunk=7, **sizes)
    with Generator(hybrids(name), None, draft=draft, options=options) as generator:
        generator.complete(prompts, GenerationOptions(COUNT))
        cache: Any = generator.cache
        assert cache.nbytes == generator.cache_bytes


# Where answers end.


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_an_answer_ends_in_the_middle_of_a_draft_and_is_gone_on_from(
    hybrids: Any, name: str, width: int
) -> None:
    """What a text leaves in its sequence serves the next one that begins alike."""
    model, (prompt, _) = hybrids(name), random_prompts(2, 97)
    (whole,) = plain(model, [prompt], GenerationOptions(COUNT))
    turns = [prompt, [*prompt, *whole[:9]], [*prompt, *whole[:12]]]
    draft = Oracle([prompt], [whole], 97).right
    options = SpeculativeOptions(max_sequences=1, capacity=64, width=width)
    with Generator(model, None, draft=draft, options=options) as generator:
        for count in (1, 2, 7):
            answers = generator.complete(turns, GenerationOptions(count))
            assert [answer.tokens for answer in answers] == [
                whole[:count], whole[9 : 9 + count], whole[12 : 12 + count]
            ]  # fmt: skip


@pytest.mark.parametrize("capacity", [PROMPT, PROMPT + 1, PROMPT + 4, PROMPT + 7])
@pytest.mark.parametrize("width", [1, 2])
def test_a_full_sequence_ends_an_answer_where_plain_decoding_does(
    tiny: Any, capacity: int, width: int
) -> None:
    prompts = [[1, *range(20, 19 + PROMPT)]]
    settings = GenerationOptions(COUNT, ignore_eos=True)
    with Generator(tiny, None, options=EngineOptions(1, capacity)) as generator:
        (expected,) = generator.complete(prompts, settings)
    assert expected.reason == "capacity"
    draft = Oracle(prompts, plain(tiny, prompts, settings), tiny.config.vocab_size).right
    options = SpeculativeOptions(max_sequences=1, capacity=capacity, width=width)
    with Generator(tiny, None, draft=draft, options=options) as generator:
        assert generator.complete(prompts, settings) == [expected]


def test_stop_strings_and_end_tokens_inside_a_draft(stories: Path, backend: ml.Backend) -> None:
    model, tokenizer = load_model(stories, backend), Tokenizer.load(stories)
    settings = GenerationOptions(120, stop=("play",))
    with Generator(model, tokenizer) as generator:
        (expected,) = generator.complete([""], settings)
    assert expected.reason == "stop"
    draft = Oracle(
        [tokenizer.encode("")], plain(model, [[1]], GenerationOptions(120)), model.config.vocab_size
    )
    for width in (1, 2):
        options = SpeculativeOptions(width=width, tokens=7)
        with Generator(model, tokenizer, draft=draft.right, options=options) as generator:
            assert generator.complete([""], settings) == [expected]


def test_an_end_token_inside_a_draft_ends_the_answer(tiny: Any) -> None:
    """The greedy answer, with one of its own tokens declared to be the end."""
    prompts = [[1, 30, 31]]
    (whole,) = plain(tiny, prompts, GenerationOptions(COUNT, ignore_eos=True))
    end = next(token for i, token in enumerate(whole) if i > 3 and token not in whole[:i])
    config = tiny.config
    tiny.config = dataclasses.replace(config, eos_ids=(end,))
    try:
        draft = Oracle(prompts, [whole], config.vocab_size).right
        found, _ = speculate(tiny, prompts, draft, GenerationOptions(COUNT))
    finally:
        tiny.config = config
    assert found == [whole[: whole.index(end)]]


# Refusals and failures.


def test_drafts_of_another_vocabulary_are_refused_and_nothing_stays(tiny: Any) -> None:
    for token in (-1, tiny.config.vocab_size):
        options = SpeculativeOptions(max_sequences=1, capacity=32)

        def draft(seq: int, tokens: Sequence[int], count: int, width: int, t: int = token) -> list[list[int]]:
            return [[t]]

        with Generator(tiny, None, draft=draft, options=options) as generator:
            with pytest.raises(RequestError, match=f"draft: token {token}"):
                generator.complete([[1, 5]])
            cache: Any = generator.cache
            assert cache.free_cells == cache.cells


def fail_in_pass(number: int, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's pass of this number from now on, counted from 1, fails."""
    forward, numbers = model.forward, itertools.count(1)

    def failing(*args: Any) -> Any:
        if next(numbers) == number:
            raise MemoryError("the device is full")
        return forward(*args)

    monkeypatch.setattr(model, "forward", failing)


@pytest.mark.parametrize("width", [1, 2])
def test_a_pass_that_fails_leaves_the_cache_empty(
    tiny: Any, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 9, 8]]
    expected = plain(tiny, prompts, GenerationOptions(COUNT))
    draft = Oracle(prompts, expected, tiny.config.vocab_size).wrong  # as many branches as there may be
    options = SpeculativeOptions(max_sequences=1, capacity=64, width=width)
    with Generator(tiny, None, draft=draft, options=options) as generator:
        fail_in_pass(3, tiny, monkeypatch)
        with pytest.raises(MemoryError):
            generator.complete(prompts, GenerationOptions(COUNT))
        cache: Any = generator.cache
        assert cache.free_cells == cache.cells
        assert [generator.complete(prompts, GenerationOptions(COUNT))[0].tokens] == expected


def test_what_happened_before_a_pass_that_failed_is_not_told_to_the_next_generate(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 9, 8], [1, 7]]
    settings = GenerationOptions(COUNT, ignore_eos=True)
    expected = plain(tiny, prompts, settings)

    def draft(seq: int, *_: object) -> list[list[int]]:
        if broken and seq == 0:  # and so does the other one's pass, in the same step
            monkeypatch.setattr(generator.engine, "forward", failing)
            raise ValueError("no idea")
        return []

    def failing(*_: object) -> Any:
        raise MemoryError("the device is full")

    broken = True
    options = SpeculativeOptions(max_sequences=2, capacity=64)
    with Generator(tiny, None, draft=draft, options=options) as generator:
        with pytest.raises(MemoryError):
            generator.complete(prompts, settings)
        monkeypatch.undo()
        broken = False
        assert [answer.tokens for answer in generator.complete(prompts, settings)] == expected


def test_a_draft_makes_the_options_for_it(tiny: Any) -> None:
    with Generator(tiny, None, draft=prompt_lookup) as generator:
        assert isinstance(generator.options, SpeculativeOptions)


def test_a_model_drafts_for_the_sequences_that_it_was_made_for(tiny: Any) -> None:
    with ModelDraft(tiny, sequences=1, capacity=6) as draft:
        with pytest.raises(RequestError, match="sequence 1; it was made for 1"):
            draft(1, [1, 2], 3, 1)
        expected = plain(tiny, [[1, 2]], GenerationOptions(5, ignore_eos=True))[0]
        assert draft(0, [1, 2], 5, 1) == [list(expected)]
        assert draft(0, [1, 2], 9, 1) == [list(expected)]  # the last one need not be stored
        assert draft(0, [1, 2, 3, 4, 5, 6], 9, 1)[0][1:] == []
        assert draft(0, [1] * 7, 9, 1) == draft(0, [], 9, 1) == []


def test_a_model_whose_draft_fails_begins_anew(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelDraft(tiny, sequences=1, width=2) as draft:
        expected = draft(0, [1, 2, 3], 4, 2)
        fail_in_pass(2, tiny, monkeypatch)
        with pytest.raises(MemoryError):
            draft(0, [1, 2, 3, 4], 4, 2)
        cache: Any = draft.cache
        assert cache.free_cells == cache.cells
        assert draft(0, [1, 2, 3], 4, 2) == expected


# Looking a prompt up.


def test_prompt_lookup_prefers_longer_and_later_matches() -> None:
    text = [5, 6, 7, 1, 2, 6, 7, 3, 4, 9, 6, 7]
    assert prompt_lookup(0, text, 3, 1) == [[3, 4, 9]]
    assert prompt_lookup(0, [*text[:10], 5, 6, 7], 2, 2) == [[1, 2], [3, 4]]
    assert prompt_lookup(0, text, 9, 5) == [[3, 4, 9, 6, 7], [1, 2, 6, 7, 3, 4, 9, 6, 7]]
    assert prompt_lookup(0, [1, 2, 3], 4, 1) == []
    assert prompt_lookup(0, [1], 4, 1) == prompt_lookup(0, [], 4, 1) == []
    assert prompt_lookup(0, [8, 8, 8], 4, 2) == [[8]]
