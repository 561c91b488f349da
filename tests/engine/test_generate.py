"""The generation loop: the known answer, sharing, stopping, and a cache that is always left empty."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import kvcache
import ml
from kvcache import Session
from kvcache.storage.sizes import bytes_text
from kvcache_engine.errors import CapacityError, ModelError, RequestError, RunnerError, TextTooLongError
from kvcache_engine.generate import Generator
from kvcache_engine.loading import load_model
from kvcache_engine.memory import cache_bytes, check_memory
from kvcache_engine.options import EngineOptions
from kvcache_engine.request_state import StopStrings
from kvcache_engine.requests import Finished, GenerationOptions, Prefilled, Token
from kvcache_engine.tokenizer import Tokenizer

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def stories_model(stories: Path, runner_backend: ml.Backend) -> Any:
    return load_model(stories, runner_backend)


@pytest.fixture(scope="module")
def stories_tokenizer(stories: Path) -> Tokenizer:
    return Tokenizer.load(stories)


@contextlib.contextmanager
def generator_of(model: Any, tokenizer: Tokenizer | None = None, **options: Any) -> Iterator[Generator]:
    """A generator whose cache must be empty at the end, whatever happened in between."""
    with Generator(model, tokenizer, options=EngineOptions(**options)) as generator:
        yield generator
        assert generator.cache.free_cells == generator.cache.cells


def reference(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """Greedy without any reuse: one request, a cache of its own, one token per pass."""
    with generator_of(model, max_sequences=1, prefill_chunk=1) as generator:
        return generator.complete([prompt], GenerationOptions(count, ignore_eos=True))[0].tokens


# The known answer.


def test_stories_says_what_its_authors_check(
    stories_model: Any, stories_tokenizer: Tokenizer, stories_text: str
) -> None:
    """Token by token too, where text that a stop string holds back is let go at the end."""
    with generator_of(stories_model, stories_tokenizer) as generator:
        *events, answer = generator.generate([""], GenerationOptions(200, stop=["mom, so she said"]))
    assert isinstance(answer, Finished)
    assert (answer.text, answer.reason, len(answer.tokens)) == (stories_text, "length", 200)
    assert "".join(event.text for event in events if isinstance(event, Token)) == stories_text


@pytest.mark.parametrize(
    ("runner_backend", "chunk"),
    [("numpy", 1), ("numpy", 7), ("numpy", 64), ("torch", 7), ("mlx", 7)],
    indirect=["runner_backend"],
)
def test_stories_with_its_beginning_prefilled_in_chunks(
    stories_model: Any, stories_tokenizer: Tokenizer, stories_text: str, chunk: int
) -> None:
    """Its beginning as the prompt, computed in chunks between two others: the rest comes out the same."""
    beginning, others = (
        stories_tokenizer.encode(stories_text)[:60],
        ["Tim had a big dog.", "Once upon a time, in a"],
    )
    settings, expected = GenerationOptions(25), stories_tokenizer.stream(beginning)
    with generator_of(stories_model, stories_tokenizer, prefill_chunk=chunk) as generator:
        events = list(generator.generate([others[0], beginning, others[1]], settings))
        answers = {event.request: event for event in events if isinstance(event, Finished)}
        said = "".join(map(expected.push, stories_tokenizer.encode(stories_text)[60:85]))
        assert answers[1].text == said
        assert [e.done for e in events if isinstance(e, Prefilled) and e.request == 1][-1] == 60
        for i in (0, 2):
            assert generator.complete([others[i // 2]], settings)[0].tokens == answers[i].tokens


# Sharing prefixes.


def test_a_common_prefix_is_computed_once(small: Any) -> None:
    shared = list(range(10, 50))
    prompts = [[1, *shared, 60], [1, *shared, 70, 71], [1, *shared, 80], [1, 200]]
    with generator_of(small, max_sequences=4) as generator:
        answers = generator.complete(prompts, GenerationOptions(8, ignore_eos=True))
        counts = generator.statistics
    assert [answer.reused for answer in answers] == [0, 41, 41, 1]
    assert (counts.prompt_tokens, counts.reused_tokens, counts.computed_tokens) == (129, 83, 46)
    assert counts.generated_tokens == 32
    assert counts.decoded_tokens == 28
    assert counts.prefill_tokens_per_second > 0
    assert counts.decode_tokens_per_second > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == reference(small, prompt, 8)


def test_of_a_request_that_is_prefilled_again_all_but_the_first_token_are_decoded(small: Any) -> None:
    prompts = [[1, *range(seed, seed + 11)] for seed in (10, 30, 50, 70)]
    with generator_of(small, budget=0, max_sequences=4, capacity=14, context=50) as generator:
        generator.complete(prompts, GenerationOptions(14, ignore_eos=True))
        assert generator.engine.preemptions > 0
        counts = generator.statistics
    assert (counts.generated_tokens, counts.decoded_tokens) == (14 * 4, 13 * 4)


# Events, sampling and stopping.


def test_no_prompts_no_events(small: Any) -> None:
    with generator_of(small) as generator:
        assert list(generator.generate([])) == []


def test_samples_do_not_depend_on_what_else_is_in_the_batch(small: Any) -> None:
    settings = GenerationOptions(12, temperature=1.5, top_k=50, top_p=0.95, seed=4, ignore_eos=True)
    with generator_of(small) as generator:
        (alone,) = generator.complete([[1, 7]], settings)
        together = generator.complete([[1, 7], [1, 8], [1, 7]], settings)
    assert together[0].tokens == alone.tokens
    assert together[2].tokens != alone.tokens  # the same prompt draws anew in another place
    other = replace(settings, seed=5)
    with generator_of(small) as generator:
        assert generator.complete([[1, 7]], other)[0].tokens != alone.tokens


def test_stop_strings_end_the_text_before_them(stories_model: Any, stories_tokenizer: Tokenizer) -> None:
    with generator_of(stories_model, stories_tokenizer) as generator:
        events = list(
            generator.generate([""], GenerationOptions(200, stop=["zebra", "loved to pl", " Lily. She l"]))
        )
    answer = events[-1]
    assert isinstance(answer, Finished)
    assert answer.text == "Once upon a time, there was a little girl named"
    assert answer.reason == "stop"
    assert "".join(event.text for event in events if isinstance(event, Token)) == answer.text


def test_an_eos_token_ends_the_text_and_is_no_part_of_it(make_model: Make, numpy_backend: ml.Backend) -> None:
    model = load_model(make_model(), numpy_backend)
    tokens = reference(model, [1, 9], 6)
    model.config = replace(model.config, eos_ids=(tokens[3],))
    with generator_of(model) as generator:
        stopped = generator.complete([[1, 9]], GenerationOptions(6))[0]
        counted = generator.statistics
        whole = generator.complete([[1, 9]], GenerationOptions(6, ignore_eos=True))[0]
    first = tokens.index(tokens[3])
    assert (stopped.tokens, stopped.reason) == (tokens[:first], "stop")
    assert (counted.generated_tokens, counted.decoded_tokens) == (first, max(first - 1, 0))
    assert (whole.tokens, whole.reason) == (tokens, "length")


def test_positions_end_where_the_models_do(small: Any) -> None:
    with generator_of(small, capacity=1000, max_sequences=1) as generator:
        assert generator.limit == 256
        (answer,) = generator.complete([[1] * 255], GenerationOptions(50, ignore_eos=True))
    assert (answer.reason, len(answer.tokens)) == ("capacity", 2)


# Refusals, failures, and being left in the middle.


def test_sizes_may_be_texts() -> None:
    options = EngineOptions(budget="1KiB", read_ahead="1.5MB", backlog=3)
    assert (options.budget, options.read_ahead, options.backlog) == (1024, 1_500_000, 3)


def test_no_option_however_large_stops_a_pass(small: Any) -> None:
    extremes = [{"top_k": 10**400}, {"logprobs": 10**400}, {"seed": 10**400}, {"temperature": 1e308}]
    extremes += [{"temperature": 5e-324, "top_p": 5e-324, "min_p": 1}, {"max_new_tokens": 10**400}]
    with generator_of(small, capacity=32) as generator:
        for extreme in extremes:
            settings = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True} | extreme
            (answer,) = generator.complete([[1, 2]], GenerationOptions(**settings))
            assert len(answer.tokens) == (31 if "max_new_tokens" in extreme else 3)


def test_an_iterator_that_is_closed_or_dropped_frees_its_sequences(small: Any) -> None:
    with generator_of(small) as generator:
        running = generator.generate([[1, 2], [1, 3]], GenerationOptions(50, ignore_eos=True))
        for event in running:
            if isinstance(event, Token):
                break
        with pytest.raises(RunnerError, match="another call of generate has not finished"):
            generator.generate([[1]])
        assert generator.cache.free_cells < generator.cache.cells
        running.close()
        assert generator.complete([[1, 9]], GenerationOptions(6, ignore_eos=True))[0].tokens == reference(
            small, [1, 9], 6
        )


def test_an_interruption_while_it_ends_leaves_the_cache_empty(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with generator_of(small, capacity=32) as generator, monkeypatch.context() as patch:
        events = generator.generate([[1, 2], [3, 4]])
        next(events)
        closings, close = iter([KeyboardInterrupt()]), Session.close

        def interrupted(session: Session, keep: bool = True) -> None:
            for error in closings:
                raise error
            close(session, keep)

        patch.setattr(Session, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            events.close()
        assert not generator.engine.busy


def test_a_generator_may_be_closed_before_its_iterator(small: Any) -> None:
    with Generator(small, None) as generator:
        running = generator.generate([[1, 2]], GenerationOptions(50, ignore_eos=True))
        next(running)
    with pytest.raises(ml.ClosedError):
        next(running)
    with Generator(small, None) as generator:
        running = generator.generate([[1, 2]], GenerationOptions(50, ignore_eos=True))
        next(running)
    running.close()


# Memory.


class Crowded:
    """A backend with little memory left."""

    def __init__(self, backend: ml.Backend, free: int | None) -> None:
        self.backend, self.free = backend, free

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def memory(self) -> ml.BackendMemory:
        return ml.BackendMemory((ml.DeviceMemory("cpu", 0, self.free, self.free),))


def test_cache_bytes_are_what_the_cache_allocates(small: Any) -> None:
    for dtype in (ml.DType.F32, ml.DType.F16):
        with generator_of(small, capacity=40, max_sequences=3, cache_dtype=dtype) as generator:
            generator.complete([[1]], GenerationOptions(1))
            assert generator.cache.nbytes == generator.cache_bytes
    wide = replace(small.config, head_dim=32)
    assert cache_bytes(wide, ml.DType.Q8_0, 1, 32) == 2 * 32 * 2 * 2 * 34
    assert cache_bytes(wide, (ml.DType.Q8_0, "Q4_0"), 1, 32) == 2 * 32 * 2 * (34 + 18)
    refused = r"cache_dtype=Q8_0: head_dim 8 .* choose a format without blocks \("
    with pytest.raises(kvcache.InvalidRangeError, match=refused):
        cache_bytes(small.config, ml.DType.Q8_0, 1, 32)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_made(small: Any) -> None:
    needed = cache_bytes(small.config, ml.DType.F32, 2, 100)
    small.backend = Crowded(small.backend, needed)
    options = EngineOptions(max_sequences=2, capacity=100)
    Generator(small, None, options=options).close()
    cache = kvcache.CausalCache()
    with pytest.raises(CapacityError) as caught:
        Generator(small, None, cache, replace(options, capacity=101))
    assert "a cache of 2 x 101 tokens in F32 needs 50.5 KiB, but only 50.0 KiB is free on cpu" in str(
        caught.value
    )
    assert "a capacity of at most 100 fits" in str(caught.value)
    with pytest.raises(kvcache.OrderError):  # it was never bound
        _ = cache.cells
    small.backend.free = None  # unknown: nothing to compare with
    Generator(small, None, options=replace(options, capacity=10**6)).close()


def test_weights_count_too(make_model: Make, numpy_backend: ml.Backend, small: Any) -> None:
    crowded: Any = Crowded(numpy_backend, 1000)
    with pytest.raises(CapacityError, match=r"the weights need .* 1000 B is free"):
        load_model(make_model(), crowded)
    with pytest.raises(CapacityError, match="beside 900 B of weights"):
        check_memory(small.config, crowded, ml.DType.F32, 1, 10, 900)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5120.0 TiB")],
)
def test_bytes_text(count: int, text: str) -> None:
    assert bytes_text(count) == text


# Text.


@given(st.text(max_size=30), st.integers(0, 90))
@example("\ufffd" * 7 + "🦊 ok", 0)
@example("Once upon a time", 2)
@hypothesis_settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_streams_never_break_a_character(
    stories_tokenizer: Tokenizer, byte_tokenizer: Tokenizer, text: str, cut: int
) -> None:
    """Tokens of single bytes, in the byte-level and the byte-fallback form, behind a prompt cut anywhere."""
    for tokenizer in (stories_tokenizer, byte_tokenizer):
        ids = tokenizer.encode(text)
        prompt = ids[: 0 if "\ufffd" in text else cut]
        stream = tokenizer.stream(prompt)
        pieces = [stream.push(token) for token in ids[len(prompt) :]]
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(pieces)
        whole, parts = tokenizer.decode(ids), (prompt[:n] for n in range(len(prompt), -1, -1))
        known = next(filter(whole.startswith, map(tokenizer.decode, parts)))
        assert "".join(pieces) + stream.flush() == whole[len(known) :]


def test_a_character_that_the_prompt_begins_is_part_of_the_answer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    ((word, _),) = level.pre_tokenize_str("b日c")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word[:2]: 0, word[2:]: 1, "x": 2}, "x"))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend, [])
    for answer, text in (([1, 0, 1], "日cb日c"), ([2], "x"), ([], "")):
        stream = tokenizer.stream([2, 0])
        assert "".join(map(stream.push, answer)) + stream.flush() == text


@pytest.fixture
def byte_tokenizer(make_model: Make) -> Tokenizer:
    return Tokenizer.load(make_model())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab\udcff", "after 'ab' it has the byte 0xFF, which is not UTF-8"),
        ("\ud800", r"it has U\+D800, half of"),
    ],
)
def test_a_text_that_is_no_unicode_is_refused(byte_tokenizer: Tokenizer, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        byte_tokenizer.encode(text)


@pytest.mark.parametrize("word", ["And God said, ", "x", "é\n"], ids=["words", "one word", "lines"])
def test_of_a_text_far_too_long_the_beginning_is_tokenized(
    stories_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    text = word * (80_000 // len(word))
    whole = len(stories_tokenizer.encode(text))
    looked_at: list[int] = []
    real = stories_tokenizer._ids
    monkeypatch.setattr(stories_tokenizer, "_ids", lambda part: looked_at.append(len(part)) or real(part))
    with pytest.raises(TextTooLongError, match="shorten it") as caught:
        stories_tokenizer.encode(text, most=2000)
    assert 2000 < caught.value.count <= whole
    assert sum(looked_at) < 40_000
    for most in (whole, whole - 1):  # what is about as long as it may be is counted exactly
        assert len(stories_tokenizer.encode(text, bos=False, most=most)) in (whole, whole - 1)


def test_other_threads_run_while_a_text_is_tokenized(stories_tokenizer: Tokenizer) -> None:
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.is_set():
            time.sleep(0.0005)
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = turns
        stories_tokenizer.encode("And God said unto Noah, " * 20_000)
        assert turns - before > 20
    finally:
        done.set()
        thread.join()


def test_bytes_that_are_no_character_are_not_held_back_for_ever(byte_tokenizer: Tokenizer) -> None:
    (half,) = byte_tokenizer.encode("é", bos=False)[:1]
    stream = byte_tokenizer.stream()
    shown = "".join(stream.push(half) for _ in range(20))
    assert shown.startswith("\ufffd")
    assert stream.push(byte_tokenizer.encode("x", bos=False)[0]).endswith("x")
    assert stream.push(half) == ""
    assert stream.flush() == "\ufffd"


def test_tokenizers_add_what_the_model_expects_first(make_model: Make) -> None:
    folder = make_model()
    assert Tokenizer.load(folder).encode("a")[0] == 1
    assert 1 not in Tokenizer.load(folder).encode("a", bos=False)
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["post_processor"] = None
    file.write_text(json.dumps(raw), encoding="utf-8")
    assert 1 not in Tokenizer.load(folder).encode("a")  # as Qwen's
    config = {"add_bos_token": True, "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Tokenizer.load(folder).encode("a")[0] == 1


def test_tokenizer_files_that_are_missing_or_broken(make_model: Make) -> None:
    folder = make_model()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"not a tokenizer\.json"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(folder)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_cut_where_the_first_begins(text: str, stops: list[str], data: st.DataObject) -> None:
    """However the text is cut into pieces; what has passed before is what comes before the stop."""
    watch, shown, at = StopStrings(stops), "", 0
    while at < len(text) and not watch.found:
        size = data.draw(st.integers(1, 5))
        shown += watch.push(text[at : at + size])
        at += size
    seen = text[:at]
    ends = [seen.find(stop) for stop in stops if stop in seen]
    assert watch.found == bool(ends)
    assert shown + watch.flush() == (seen[: min(ends)] if ends else seen)
