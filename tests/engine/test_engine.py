"""The engine: requests that come and go, on models of every kind of cache; nothing is lost or leaked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ml
from kvcache import CacheFullError, ClosedError, HostTier, PrefixCache, Session
from kvcache.caches import branches
from kvcache.prefix.retention import Retention, TokenRange
from kvcache.stores import MemoryStore, files_digest, identity_of
from kvcache_engine.drafts import prompt_lookup
from kvcache_engine.engine import Engine, EngineOptions, Failed, Request
from kvcache_engine.errors import RequestError, RunnerError
from kvcache_engine.fingerprint import model_identity
from kvcache_engine.generate import Generator
from kvcache_engine.loading import load_model
from kvcache_engine.options import SpeculativeOptions
from kvcache_engine.request_state import RequestState
from kvcache_engine.requests import Finished, GenerationOptions, Prefilled, Started, Token
from kvcache_engine.sampling import Sampler
from kvcache_engine.scheduler import Part
from kvcache_engine.tokenizer import Tokenizer

from ..rigs.threads import switching_often

Make = Callable[..., Path]

COUNT = 8
GREEDY = GenerationOptions(COUNT, ignore_eos=True)


@contextlib.contextmanager
def engine_of(
    model: Any, tokenizer: Tokenizer | None = None, tiers: Any = (), **options: Any
) -> Iterator[Engine]:
    """An engine that must hold no sequence at the end, whatever happened in between."""
    options = {"capacity": 64, **options}
    with Engine(model, tokenizer, EngineOptions(**options), tiers) as engine:
        yield engine
        assert sessions(engine) == len(engine.running) == len(engine.waiting) == 0
        assert not engine.busy


def sessions(engine: Engine) -> int:
    return len(engine.prefix.sessions)


def check(engine: Engine, extra: int = 0) -> None:
    """One session for each running request (``extra`` are others'), which holds that one's tokens."""
    assert sessions(engine) == len(engine.running) + extra
    for request in engine.running:
        assert request.session is not None
        assert request.session.tokens == list(request.tokens)


def tokens_of(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, count)]


_KNOWN: dict[Any, tuple[int, ...]] = {}


def reference(model: Any, prompt: Sequence[int], count: int = COUNT) -> tuple[int, ...]:
    """Greedy, alone, in a cache of its own; every model of one architecture has the same weights here."""
    key = (model.config.architecture, model.config.head_dim, tuple(prompt), count)
    if key not in _KNOWN:
        _KNOWN[key] = _reference(model, prompt, count)
    return _KNOWN[key]


def _reference(model: Any, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    options = EngineOptions(max_sequences=1, capacity=64)
    with Generator(model, None, options=options) as generator:
        return generator.complete([prompt], GenerationOptions(count, ignore_eos=True))[0].tokens


def answers_are_right(model: Any, *requests: Request, count: int = COUNT) -> None:
    for request in requests:
        prompt, answer = np.split(request.tokens, [request.run.prompt_tokens])
        assert tuple(answer) == reference(model, prompt, count)


def branching() -> list[list[int]]:
    """Five prompts, of which some begin alike."""
    first = tokens_of(1, 30)
    return [
        first,
        [*first[:25], *tokens_of(2, 3)],
        tokens_of(3, 4),
        [*first[:25], *tokens_of(4, 4)],
        [*first[:18], *tokens_of(5, 14)],
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "room for all": {"max_sequences": 8},
    "fewer sequences than requests": {"max_sequences": 2},
    "small chunks": {"max_sequences": 3, "prefill_chunk": 3},
    "fewer cells than the requests need": {"max_sequences": 4, "capacity": 20, "context": 60},
    "hardly any cells": {"max_sequences": 3, "capacity": 16, "context": 45, "prefill_chunk": 5},
    "snapshots that do not fit": {"max_sequences": 3, "budget": 0},
}


@pytest.mark.parametrize(
    ("model", "case"),
    [
        *(("full", case) for case in OPTIONS),
        *(("sliding", case) for case in [*OPTIONS][2:5]),
        *(("recurrent", case) for case in [*OPTIONS][::2] + [*OPTIONS][-1:]),
    ],
    indirect=["model"],
)
def test_requests_together_say_what_each_says_alone(model: Any, case: str) -> None:
    prompts = branching()
    expected = [reference(model, prompt) for prompt in prompts]
    with engine_of(model, **OPTIONS[case]) as engine:
        for _ in range(2):  # the second time from what the first left
            answers = engine.complete(prompts, GREEDY)
            assert [answer.tokens for answer in answers] == expected
            assert {answer.reason for answer in answers} == {"length"}


def test_a_prefix_is_computed_once_though_all_come_at_the_same_time(model: Any) -> None:
    prompts = branching()
    with engine_of(model, max_sequences=8) as engine:
        answers = engine.complete(prompts, GREEDY)
    reused = [answer.reused for answer in answers]
    assert reused == [0, 25, 0, 25, 18]
    assert engine.statistics.computed_tokens == sum(map(len, prompts)) - sum(reused)


def test_a_prefix_is_shared_though_its_owner_is_far_past_it(model: Any) -> None:
    """On every kind of cache: the state where both part was kept when it went by."""
    first, second = branching()[:2]
    with engine_of(model, max_sequences=1) as engine:
        answers = engine.complete([first, second, second], GREEDY)
    assert [answer.reused for answer in answers] == [0, 25, 27]


def test_a_request_shares_with_one_that_is_running(model: Any) -> None:
    """What was kept of a prompt serves others before the first request has ended."""
    first = tokens_of(1, 30)
    with engine_of(model, max_sequences=2) as engine:
        engine.submit(first, GenerationOptions(30, ignore_eos=True))
        for _ in range(20):
            engine.step()
        second = engine.submit([*first, 7, 8], GREEDY)
        events = run(engine)
        assert Started(second.id, 32, 29 if second.run.reused == 29 else 30) in events
        answers_are_right(model, second)


def run(engine: Engine, extra: int = 0) -> list[Any]:
    """All events to the end; ``extra`` sessions are not the engine's own."""
    events: list[Any] = []
    while engine.busy:
        events += engine.step()
        check(engine, extra)
    return events


def test_what_a_request_asks_to_keep_outlives_what_came_after_it(small: Any) -> None:
    first, second = list(range(10, 40)), list(range(50, 80))
    for retention, left in ((None, [False, True]), (Retention([TokenRange(priority=90)]), [True, False])):
        with engine_of(small) as engine:
            for prompt, asked in ((first, retention), (second, None)):
                engine.submit(prompt, GREEDY, retention=asked)
                run(engine)
            engine.prefix.evict(engine.prefix.nbytes["device"] // 2)
            assert [engine.prefix.longest(prompt) == len(prompt) - 1 for prompt in (first, second)] == left


def test_a_conversation_goes_on_from_its_answer(model: Any) -> None:
    prompt = tokens_of(6, 12)
    with engine_of(model) as engine:
        (answer,) = engine.complete([prompt], GREEDY)
        turn = [*prompt, *answer.tokens, 9, 8]
        (second,) = engine.complete([turn], GREEDY)
    assert second.reused == len(prompt) + COUNT - 1  # the last token was never an input
    assert second.tokens == reference(model, turn)


def test_events_come_in_order(small: Any) -> None:
    with engine_of(small, prefill_chunk=2) as engine:
        request = engine.submit([1, 2, 3], GenerationOptions(2, ignore_eos=True))
        events = run(engine)
    assert [type(event) for event in events] == [Started, Prefilled, Prefilled, Token, Token, Finished]
    assert events[0] == Started(request.id, 3, 0)
    assert events[1:3] == [Prefilled(request.id, 2, 3), Prefilled(request.id, 3, 3)]
    assert request.tokens == (1, 2, 3, *events[-1].tokens)
    answer = events[-1]
    assert tuple(event.token for event in events if isinstance(event, Token)) == answer.tokens
    assert (answer.prompt_tokens, answer.reused, answer.computed) == (3, 0, 3)


def test_a_request_may_come_while_others_are_answered(model: Any) -> None:
    first, second = tokens_of(7, 20), tokens_of(8, 20)
    with engine_of(model, prefill_chunk=4) as engine:
        one = engine.submit(first, GREEDY)
        while not one.run.generated:
            engine.step()
        two = engine.submit(second, GREEDY)
        seen = [type(event).__name__ for event in run(engine)]
        answers_are_right(model, one, two)
    between = seen[seen.index("Started") : [i for i, name in enumerate(seen) if name == "Prefilled"][-1]]
    assert "Token" in between  # answers and prompts take turns


@pytest.mark.parametrize("options", [{}, {"drafts": True}], ids=["plain", "drafts"])
def test_prompts_are_computed_in_the_room_that_answers_leave(small: Any, options: dict[str, Any]) -> None:
    """Every pass gives each answer its next token, and none has more than the largest batch."""
    kinds = SpeculativeOptions if options else EngineOptions
    chosen = kinds(max_sequences=3, capacity=64, prefill_chunk=6)
    sizes: list[int] = []
    with Engine(small, None, chosen) as engine:
        engine.draft = prompt_lookup if options else None
        forward = small.forward

        def counted(ctx: Any, batch: Any, cache: Any) -> Any:
            sizes.append(len(batch.positions))
            return forward(ctx, batch, cache)

        small.forward = counted
        try:
            first = engine.submit(tokens_of(1, 4), GREEDY)
            engine.step()
            long, late = engine.submit(tokens_of(2, 13), GREEDY), engine.submit(tokens_of(3, 5), GREEDY)
            while long.run.prefilling:
                before, computed = first.run.generated, long.run.stored
                engine.step()
                assert first.run.generated > before
                assert long.run.stored > computed or not computed
            while engine.busy:
                engine.step()
        finally:
            small.forward = forward
        assert max(sizes) <= chosen.largest_batch
        assert options or sizes[:5] == [4, 6, 6, 6, 5]
        answers_are_right(small, first, long, late)


def test_texts_and_stop_strings_are_those_of_the_generator(
    make_model: Make, numpy_backend: ml.Backend
) -> None:
    folder = make_model()
    model, tokenizer = load_model(folder, numpy_backend), Tokenizer.load(folder)
    for settings in (
        GenerationOptions(20, temperature=0.8, seed=5, ignore_eos=True),
        GenerationOptions(20, seed=5, stop=("a", "e", "\x00"), ignore_eos=True),
        GenerationOptions(20, temperature=1.5, top_k=40, seed=3),
    ):
        with Generator(model, tokenizer) as generator:
            (expected,) = generator.complete(["abc"], settings)
        with engine_of(model, tokenizer) as engine:
            (answer,) = engine.complete(["abc"], settings)
            assert engine.complete(["abc"], settings)[0].text == expected.text
        assert answer == expected


# Cancelling, refusing, failing.


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_cancelled_request_leaves_its_sequence(model: Any, steps: int) -> None:
    first, second = branching()[:2]
    with engine_of(model, prefill_chunk=16) as engine:
        one, two = engine.submit(first, GREEDY), engine.submit(second, GREEDY)
        for _ in range(steps):
            engine.step()
        assert engine.cancel(one)
        assert not engine.cancel(one)
        check(engine)
        assert all(event.request == two.id for event in run(engine) if not isinstance(event, Failed))
        answers_are_right(model, two)


def test_an_answer_ends_where_the_request_has_no_more_room(small: Any) -> None:
    with engine_of(small, max_sequences=2, capacity=10) as engine:
        (answer,) = engine.complete([[1, 2, 3]], GenerationOptions(50, ignore_eos=True))
    assert (answer.reason, len(answer.tokens)) == ("capacity", 8)


class Breaking:
    """A model whose forward pass fails when ``fails`` says so, after it wrote keys and values."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.error: BaseException | None = None
        self.nan = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ctx: ml.Context, batch: Any, cache: Any) -> ml.Tensor:
        logits: ml.Tensor = self._model.forward(ctx, batch, cache)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return logits.scale(ctx, float("nan")) if self.nan else logits


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_after_a_failed_pass_all_requests_go_on(model: Any, steps: int) -> None:
    error = (RuntimeError("the device failed"), KeyboardInterrupt(), MemoryError())[steps % 3]
    prompts = branching()[:3]
    broken = Breaking(model)
    with engine_of(broken, prefill_chunk=16) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
        events = [event for _ in range(steps) for event in engine.step()]
        broken.error = error
        with pytest.raises(type(error)):
            engine.step()
        check(engine)
        events += run(engine)
        answers_are_right(model, *requests)
        for kind in (Started, Finished):
            assert sorted(event.request for event in events if isinstance(event, kind)) == [0, 1, 2]
        assert engine.complete(prompts[1:2], GREEDY)[0].tokens == reference(model, prompts[1])


def test_an_interruption_while_tokens_are_taken_in_loses_no_token(model: Any) -> None:
    prompts = branching()[:3]
    with engine_of(model, prefill_chunk=16) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
        advance = requests[0].run.advance
        for _ in range(3):
            requests[0].run.advance = _interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                while True:
                    engine.step()
            requests[0].run.advance = advance  # type: ignore[method-assign]
            check(engine)
            engine.step()
        run(engine)
        answers_are_right(model, *requests)


def _interrupted(*_: object) -> Any:
    raise KeyboardInterrupt


def _interrupted_at_times(run: RequestState) -> Any:
    """Before every fourth token."""
    calls, advance = itertools.count(1), run.advance

    def interrupted(*args: Any) -> Any:
        if next(calls) % 4 == 0:
            raise KeyboardInterrupt
        return advance(*args)

    return interrupted


@pytest.mark.parametrize(("owner", "name"), [(PrefixCache, "begin"), (Session, "keep")])
def test_a_request_that_fails_outside_of_passes_fails_alone(
    model: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [tokens_of(1, 10), tokens_of(2, 10), tokens_of(3, 10)]
    with engine_of(model) as engine:
        requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
        whole = getattr(owner, name)

        def failing(self: Any, *args: Any, **named: Any) -> Any:
            if self is requests[1].session or args[:1] == (prompts[1],):
                raise RuntimeError("the device failed")
            return whole(self, *args, **named)

        monkeypatch.setattr(owner, name, failing)
        (failed,) = [event for event in run(engine) if isinstance(event, Failed)]
        assert failed.request == requests[1].id
        assert requests[1].error is failed.error
        answers_are_right(model, requests[0], requests[2])


def test_a_request_whose_logits_cannot_be_sampled_fails_alone(model: Any) -> None:
    broken = Breaking(model)
    with engine_of(broken) as engine:
        first = engine.submit(tokens_of(1, 5), GREEDY)
        broken.nan = True
        (failed,) = [event for event in run(engine) if isinstance(event, Failed)]
        assert failed.request == first.id
        assert "overflowed" in str(failed.error)
        with pytest.raises(RunnerError, match="overflowed"):
            engine.complete([[1, 2]])
        broken.nan = False
        assert engine.complete([[1, 2]], GREEDY)[0].tokens == reference(model, [1, 2])


def test_where_the_cache_is_full_the_last_request_makes_room_and_loses_nothing(model: Any) -> None:
    prompts, settings = [tokens_of(seed, 12) for seed in range(4)], GenerationOptions(14, ignore_eos=True)
    with engine_of(model, tiers=[HostTier()], max_sequences=4, capacity=14, context=50) as engine:
        requests = [engine.submit(prompt, settings) for prompt in prompts]
        events = run(engine)
        assert engine.preemptions > 0
        assert not [event for event in events if isinstance(event, Failed)]
        answers_are_right(model, *requests, count=14)
        assert sum(isinstance(event, Token) for event in events) == 14 * len(requests)


@pytest.mark.parametrize(
    ("model", "name", "width"),
    [
        *[("full", "close", 0), ("sliding", "close", 3), ("recurrent", "close", 3), ("sliding", "extend", 1)],
        *[("full", "keep", 0), ("recurrent", "keep", 0), ("recurrent", "rewind", 0)],
        *[("sliding", "rewind", 3), ("recurrent", "rewind", 3)],
    ],
    indirect=["model"],
)
def test_an_interruption_of_a_session_loses_no_request(
    model: Any, name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after what it does, while passes fail and requests make room for others."""
    prompts, settings = [tokens_of(seed, 12) for seed in range(4)], GenerationOptions(14, ignore_eos=True)
    expected = [reference(model, prompt, 14) for prompt in prompts]
    broken, real, rng = Breaking(model), getattr(Session, name), np.random.default_rng(width)

    def interrupted(session: Session, *args: Any, **options: Any) -> Any:
        chance = 0.5 if options else rng.random()  # no second attempt at what was interrupted
        if chance < 0.1:
            raise KeyboardInterrupt
        found = real(session, *args, **options)
        if chance > 0.9:
            raise KeyboardInterrupt
        return found

    options: dict[str, Any] = {"max_sequences": 4, "capacity": 8 if width > 1 else 15, "context": 32}
    kind = SpeculativeOptions(**options, width=width) if width else EngineOptions(**options)
    events: list[Any] = []
    with Engine(broken, None, kind, [HostTier()]) as engine, monkeypatch.context() as patch:
        requests = [engine.submit(prompt, settings, prompt_lookup if width else None) for prompt in prompts]
        patch.setattr(Session, name, interrupted)
        while engine.busy or engine._events:  # told by the next step
            broken.error = [KeyboardInterrupt(), RuntimeError("failed"), *[None] * 8][rng.integers(10)]
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                events += engine.step()
            assert sessions(engine) == len(engine.running)
            assert {*engine.waiting, *engine.running} == {each for each in requests if not each.done}
        for request, answer in zip(requests, expected, strict=True):
            told = [event for event in events if event.request == request.id]
            assert [event.token for event in told if isinstance(event, Token)] == request.run.tokens[12:]
            assert request.tokens[12:] == told[-1].tokens == answer


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_change_no_answer_whatever_else_happens(model: Any, width: int) -> None:
    """Beside requests without one, where cells run out, passes fail, sampling is interrupted."""
    prompts, settings = [tokens_of(seed, 12) for seed in range(4)], GenerationOptions(20, ignore_eos=True)
    expected = [reference(model, prompt, 20) for prompt in prompts]
    rng = np.random.default_rng(7)

    def draft(seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        """The answer, of which each branch goes wrong somewhere."""
        at = next(i for i, prompt in enumerate(prompts) if list(tokens[:12]) == prompt)
        right = list(expected[at][len(tokens) - 12 :][:count])
        return [[*right[:good], *rng.integers(3, 250, count)] for good in rng.integers(0, count + 1, width)]

    broken = Breaking(model)
    options = SpeculativeOptions(max_sequences=4, capacity=8 if width > 1 else 15, context=32, width=width)
    with Engine(broken, None, options, [HostTier()]) as engine:
        requests = [engine.submit(prompt, settings, draft if i else None) for i, prompt in enumerate(prompts)]
        events: list[Any] = []
        requests[1].run.advance = _interrupted_at_times(requests[1].run)  # type: ignore[method-assign]
        for step in itertools.count():
            if not engine.busy:
                break
            broken.error = RuntimeError("the device failed") if step % 7 == 6 else None
            with contextlib.suppress(RuntimeError, KeyboardInterrupt):
                events += engine.step()
            assert sessions(engine) == len(engine.running)
        for request, answer in zip(requests, expected, strict=True):
            told = [event for event in events if isinstance(event, Token) and event.request == request.id]
            assert tuple(event.token for event in told) == request.tokens[12:] == answer
        assert engine.preemptions > 0
        assert engine.speculation.accepted > 0
        engine.forget()
        for seq in range(engine.cache.max_sequences):
            assert branches.offset(engine.cache, seq) == 0


def test_a_draft_that_fails_fails_its_request_alone(small: Any) -> None:
    def draft(*_: object) -> Any:
        raise RuntimeError("no idea")

    with Engine(small, None, SpeculativeOptions(capacity=64)) as engine:
        first, second = engine.submit([1, 2], GREEDY, draft), engine.submit([1, 3], GREEDY)
        (failed,) = [event for event in run(engine) if isinstance(event, Failed)]
        assert (failed.request, str(failed.error)) == (first.id, "no idea")
        answers_are_right(small, second)


def test_a_single_request_that_does_not_fit_ends_and_says_so(small: Any) -> None:
    """Beside a session that is no request of the engine: 26 of the 32 cells are its own."""
    with engine_of(small, max_sequences=2, capacity=16, context=32) as engine:
        foreign = Request(RequestState(-1, list(range(3, 29)), GenerationOptions(), Sampler()))
        foreign.session = engine.prefix.begin(foreign.tokens)
        engine.forward([Part(foreign, 26)])
        engine.submit([1, 2, 3], GenerationOptions(20, ignore_eos=True))
        answer = run(engine, extra=1)[-1]
        assert (answer.reason, len(answer.tokens)) == ("capacity", 4)
        request = engine.submit(list(range(100, 110)), GREEDY)
        failed = run(engine, extra=1)[-1]
        assert failed.request == request.id
        assert isinstance(failed.error, CacheFullError)
        foreign.session.close()


@given(st.data())
@hypothesis_settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_comes_goes_and_fails_every_answer_is_that_of_its_prompt_alone(
    model: Any, data: st.DataObject
) -> None:
    broken = Breaking(model)
    context = data.draw(st.sampled_from([24, 40]))
    chunk = data.draw(st.integers(1, 9))
    prompts = st.lists(st.integers(3, 4), min_size=1, max_size=18)
    left: list[Request] = []
    with engine_of(broken, max_sequences=3, capacity=16, context=context, prefill_chunk=chunk) as engine:
        for _ in range(data.draw(st.integers(1, 25))):
            action = data.draw(st.sampled_from(["submit", "step", "step", "step", "cancel", "fail"]))
            if action == "submit":
                left.append(engine.submit(data.draw(prompts), GenerationOptions(5, ignore_eos=True)))
            elif action == "cancel" and left:
                request = data.draw(st.sampled_from(left))
                if engine.cancel(request):
                    left.remove(request)
            elif action == "fail" and engine.busy:
                broken.error = RuntimeError("the device failed")
                with pytest.raises(RuntimeError, match="the device failed"):
                    engine.step()
            else:
                engine.step()
            check(engine)
        run(engine)
        answers_are_right(model, *left, count=5)


# Tiers, and what names a model.


def test_an_engine_finds_in_a_store_what_another_one_left(model: Any) -> None:
    prompt = tokens_of(9, 40)
    store = MemoryStore()
    with engine_of(model, tiers=[store]) as engine:
        turn = [*prompt, *engine.complete([prompt], GREEDY)[0].tokens, 5]
    with engine_of(model, tiers=[store]) as engine:
        (answer,) = engine.complete([turn], GREEDY)
        assert answer.reused == engine.prefix.stats.store == len(turn) - 2
    assert answer.tokens == reference(model, turn)


def test_the_identity_is_config_weights_and_dtype(make_model: Make, numpy_backend: ml.Backend) -> None:
    first, second = make_model(), make_model()
    (second / "README.md").write_text("not of the model")
    assert files_digest(first) == files_digest(second)
    assert model_identity(load_model(first, numpy_backend)) == {"files": files_digest(first), "dtype": "F32"}
    half = load_model(first, numpy_backend, ml.DType.F16)
    assert model_identity(half)["dtype"] == "F16"
    for dtype in (ml.DType.F16, "F16", "f16", "float16", np.float16, np.dtype("float16"), "torch.float16"):
        assert identity_of(first, dtype) == model_identity(half)
    for wrong in ("F64", np.int32, ml.DType.I32, None):
        with pytest.raises(ml.DTypeError, match="must be F32, F16 or BF16"):
            identity_of(first, wrong)
    assert files_digest(make_model(rope_theta=5000.0)) != files_digest(first)
    data = bytearray((second / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (second / "model.safetensors").write_bytes(data)
    assert files_digest(first) != files_digest(second)


def test_a_model_from_no_files_has_to_be_named(small: Any) -> None:
    small.origin = None
    with Engine(small, None, EngineOptions(capacity=16), [MemoryStore()], {"model": "mine"}) as engine:
        assert engine.identity == {"model": "mine"}


# Threads.


def test_threads_may_call_an_engine_at_the_same_time(model: Any) -> None:
    """Each completes prompts, or submits, steps and cancels: no answer and no event is another's or lost."""
    prompts = branching()
    told: dict[int, list[Any]] = {}
    requests: dict[int, tuple[Request, bool]] = {}

    def completes(engine: Engine, i: int) -> None:
        for prompt in prompts[i::2]:
            (answer,) = engine.complete([prompt], GREEDY)
            assert answer.tokens == reference(model, prompt)

    def steps(engine: Engine, i: int) -> None:
        for n, prompt in enumerate(prompts):
            request = engine.submit(prompt, GREEDY)
            requests[request.id] = request, bool(n % 3)
            if not n % 3:
                engine.cancel(request)
            while not request.done:
                for event in engine.step():
                    told.setdefault(event.request, []).append(event)

    with engine_of(model, max_sequences=3, prefill_chunk=16) as engine:
        with switching_often(), ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(work, engine, i) for work in (completes, steps) for i in range(2)]
            for call in calls:
                call.result(timeout=300)
        for event in engine.step():
            told.setdefault(event.request, []).append(event)
        assert told.keys() <= requests.keys()  # one that is cancelled may have begun
        for i, (request, wanted) in requests.items():
            if wanted:
                answers_are_right(model, request)
                tokens = [event.token for event in told[i] if isinstance(event, Token)]
                assert tuple(tokens) == request.answer.tokens == told[i][-1].tokens  # type: ignore[union-attr]


def test_what_one_thread_begins_another_may_end(model: Any) -> None:
    """In the middle of a prompt, where passes are left that did not do all that they might."""
    with engine_of(model, prefill_chunk=8) as engine, ThreadPoolExecutor(1) as pool:
        one, two = (engine.submit(prompt, GREEDY) for prompt in branching()[:2])
        pool.submit(engine.step).result()
        assert engine.cancel(one)
        pool.submit(run, engine).result()
        answers_are_right(model, two)
        engine.forget()


def test_answers_that_do_not_come_raise_what_became_of_them(small: Any) -> None:
    prompt = tokens_of(3, 12)

    def in_the_middle(call: Callable[[Engine], object]) -> type[BaseException] | None:
        with Engine(small, None, EngineOptions(capacity=64)) as engine, ThreadPoolExecutor(1) as pool:
            plan, done = engine._plan, []

            def then(*args: Any) -> Any:
                if engine.running and engine.running[0].run.generated and not done:
                    done.append(pool.submit(call, engine))  # which waits for this step
                return plan(*args)

            engine._plan = then  # type: ignore[method-assign]
            error = pool_error(lambda: engine.complete([prompt], GREEDY))
            done[0].result()
            return error

    assert in_the_middle(lambda engine: engine.cancel(engine.running[0])) is RequestError
    assert in_the_middle(lambda engine: engine.close()) is ClosedError


def pool_error(call: Callable[[], object]) -> type[BaseException] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


def test_generators_wait_for_complete_and_refuse_an_open_iterator(small: Any) -> None:
    prompts = [tokens_of(seed, 9) for seed in range(4)]
    with Generator(small, None, options=EngineOptions(capacity=64)) as generator:
        with switching_often(), ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda prompt: generator.complete([prompt], GREEDY)[0].tokens, prompts))
        assert answers == [reference(small, prompt) for prompt in prompts]
        events = generator.generate(prompts, GREEDY)
        next(events)
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(RunnerError, match="has not finished"):
                pool.submit(generator.complete, [prompts[0]], GREEDY).result()
            pool.submit(events.close).result()  # dropped half way, as by another thread's collector
        assert not sessions(generator.engine)
        assert generator.complete([prompts[0]], GREEDY)[0].tokens == answers[0]
