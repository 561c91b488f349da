"""An engine on several ranks that each keep what they computed, and do not keep the same.

The ranks are threads here; ``test_tensor_parallel.py`` has the same on processes of torch and MLX.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import ml
from kvcache.cache import CacheFullError, SequenceLostError
from kvcache.prefix.prefix_cache import PrefixCache
from kvcache.stores import FileStore
from kvcache_engine import Engine, EngineOptions, GenerationOptions, load_model
from kvcache_engine.errors import RunnerError
from kvcache_engine.options import SpeculativeOptions
from kvcache_engine.saved import ConversationError, adopt, capture, read, write

from ..backends import thread_ranks
from ..rigs import small_models
from ..rigs.model_passes import run

KINDS = {name: small_models.KINDS[name] for name in ("full", "sliding")}
SETTINGS = GenerationOptions(max_new_tokens=5, ignore_eos=True)
OPTIONS = EngineOptions(max_sequences=3, capacity=40, context=72, prefill_chunk=24, interval=8)
SEEDS = range(2)
ALONE: dict[tuple[str, str], list[tuple[int, ...]]] = {}
"""Answers of one rank by the config, which the weights are drawn for, and the prompts."""


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Path:
    return make_model(**KINDS[request.param], num_key_value_heads=2)


@pytest.fixture
def divided(make_model: Callable[..., Path]) -> Path:
    return make_model(**KINDS["full"], num_key_value_heads=2)


def prompts_of(seed: int, count: int = 7) -> list[list[int]]:
    """Prompts of 9 to 60 tokens that begin as others do."""
    draw = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        trunk = prompts[draw.integers(len(prompts))] if prompts and draw.random() < 0.8 else []
        kept = trunk[: draw.integers(len(trunk) + 1)]
        prompts.append([*kept, *draw.integers(3, 200, draw.integers(9, 30)).tolist()][:60])
    return prompts


def on_ranks(path: Path, work: Callable[[Any, Any], Any], size: int = 2) -> list[Any]:
    """``work(model, group)`` of each rank."""

    def run(group: Any) -> Any:
        with ml.open_backend("numpy") as backend:
            return work(load_model(path, backend, ml.DType.F32, None, group), group)

    return thread_ranks.run_ranks(size, run)


def alone(path: Path, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Greedy answers without an engine: every prompt in a sequence of its own, all in one batch."""
    known = (path / "config.json").read_text(encoding="utf-8"), str(prompts)
    if known not in ALONE:
        texts = [[*prompt] for prompt in prompts]
        with ml.open_backend("numpy") as backend:
            whole = load_model(path, backend)
            cache = whole.make_cache()
            cache.init(backend, ml.DType.F32, len(texts), 72, 512)
            for step in range(SETTINGS.max_new_tokens):
                spans = [range(step and len(text) - 1, len(text)) for text in texts]
                entries = [(seq, at) for seq, span in enumerate(spans) for at in span]
                last = np.cumsum([len(span) for span in spans]) - 1
                for text, row in zip(texts, run(whole, cache, entries, texts)[last], strict=True):
                    text.append(int(row.argmax()))
        ALONE[known] = [tuple(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)]
    return ALONE[known]


def all_answer_as_one(path: Path, prompts: Sequence[Sequence[int]], work: Callable[[Any, Any], Any]) -> None:
    """What ``work`` of each rank finds, as ``answered`` tells it, is alike, and right."""
    first, second = on_ranks(path, work)
    assert first == second
    assert first[0] == alone(path, prompts)


def answered(engine: Engine, prompts: Sequence[Sequence[int]], wave: int, between: Callable[[], None]) -> Any:
    """All prompts, ``wave`` of them at a time and three steps in between; (answers, reused, preemptions)."""
    requests, waiting = [], list(prompts)
    while waiting or engine.busy:
        requests += [engine.submit(prompt, SETTINGS) for prompt in waiting[:wave]]
        del waiting[:wave]
        for _ in range(3):
            engine.step()
            between()
    for request in requests:
        if request.error is not None:
            raise request.error
    answers = [request.tokens[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)]
    assert not engine.prefix.sessions
    return answers, engine.statistics.reused_tokens, engine.preemptions


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_that_keep_different_things_answer_as_one_that_keeps_nothing(
    model: Path, seed: int, tmp_path: Path
) -> None:
    """Each loses pages of its own store, has a budget of its own and evicts when it likes."""
    prompts, wave = prompts_of(seed), (3, 7)[seed % 2]

    def work(model: Any, group: Any) -> Any:
        draw = random.Random(seed * 100 + group.rank)
        folder = tmp_path / str(group.rank)
        with FileStore(folder) as store, Engine(model, None, OPTIONS, [store]) as engine:
            engine.complete(prompts[::2], SETTINGS)
        entries = sorted(folder.rglob("*.entry"))
        for entry in draw.sample(entries, len(entries) // 2):
            entry.unlink()
        own = replace(OPTIONS, budget=draw.choice([None, 0, 3000]))
        with FileStore(folder) as store, Engine(model, None, own, [store]) as engine:

            def between() -> None:
                if draw.random() < 0.2:
                    draw.choice([engine.prefix.evict, engine.prefix.clear])()

            return answered(engine, prompts, wave, between)

    all_answer_as_one(model, prompts, work)


def test_a_name_for_the_model_is_of_one_rank_alone(divided: Path, tmp_path: Path) -> None:
    """In one store, and in saved conversations: ranks have other heads under the same name."""
    prompts = prompts_of(12, 1)

    def work(model: Any, group: Any) -> Any:
        always = replace(OPTIONS, fetch="always", block_size=4)
        for _ in range(2):
            with (
                FileStore(tmp_path / "store") as store,
                Engine(model, None, always, [store], {"model": "a"}) as engine,
            ):
                (answer,) = engine.complete(prompts, SETTINGS)
                write(tmp_path / f"{group.rank}.kv", capture(engine, prompts[0]))
            group.barrier()
        with Engine(model, None, OPTIONS, identity={"model": "a"}) as engine:
            adopt(engine, read(tmp_path / f"{group.rank}.kv"))
            with pytest.raises(ConversationError, match=f"this is rank {group.rank}/2"):
                adopt(engine, read(tmp_path / f"{1 - group.rank}.kv"))
        assert answer.reused > 0
        return answer.tokens

    assert on_ranks(divided, work) == alone(divided, prompts) * 2


def failing_once(what: Any, name: str, error: Exception, patch: pytest.MonkeyPatch, after: int = 1) -> None:
    """``what.name`` raises ``error`` at its call number ``after``, counted from 0."""
    real, calls = getattr(what, name), iter(range(10_000))

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == after:
            raise error
        return real(*args, **options)

    patch.setattr(what, name, call)


def full() -> CacheFullError:
    return CacheFullError(8, 0, {0: 32}, "begin")


@pytest.mark.parametrize(
    ("place", "name", "after"),
    [("prefix", "begin", 1), ("cache", "start_forward", 1), ("prefix", "begin", 5)],
)
def test_where_one_rank_has_no_room_all_make_some(
    model: Path, place: str, name: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(7)

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            if group.rank == 1:
                failing_once(getattr(engine, place), name, full(), monkeypatch, after)
            return answered(engine, prompts, 7, lambda: None)

    all_answer_as_one(model, prompts, work)


@pytest.mark.parametrize(("fails", "after"), [(True, 2), (False, 5)])
def test_after_a_pass_without_room_all_go_on_from_where_each_of_them_can(
    model: Path, fails: bool, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank comes back to less than the others have, or loses a request altogether."""
    prompts = prompts_of(11)

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            real, left = engine.prefix._open.rewind, iter([True])

            def rewind(session: Any, ids: np.ndarray, trusted: int) -> int:
                if next(left, False) is False:
                    return real(session, ids, trusted)
                if fails:
                    raise OSError("a bad disk")
                return real(session, ids[: ids.size // 2], min(trusted, ids.size // 2))

            if group.rank == 1:
                failing_once(engine.cache, "start_forward", full(), monkeypatch, after)
                monkeypatch.setattr(engine.prefix._open, "rewind", rewind)
            found = answered(engine, prompts, 7, lambda: None)
            assert next(left, None) is None or group.rank == 0
            return found

    all_answer_as_one(model, prompts, work)


@pytest.mark.parametrize(("place", "name"), [("prefix", "begin"), ("cache", "start_forward")])
@pytest.mark.parametrize("no_room", [False, True])
def test_where_one_rank_fails_the_others_are_told_which_before_they_wait(
    divided: Path, place: str, name: str, no_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has no room itself."""
    prompts = prompts_of(8)

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            if group.rank == 1:
                failing_once(getattr(engine, place), name, OSError("a bad disk"), monkeypatch)
            elif no_room:
                failing_once(getattr(engine, place), name, full(), monkeypatch)
            try:
                answered(engine, prompts, 7, lambda: None)
            except (OSError, ml.GroupError) as error:
                assert len(engine.prefix.sessions) == len(engine.running)
                return f"{type(error).__name__}: {error}"

    first, second = on_ranks(divided, work)
    assert second == "OSError: a bad disk"
    assert first.startswith("GroupError: ")
    assert "rank 1 of 2" in first
    assert "look for its own error" in first


@pytest.mark.parametrize("place", ["new_context", "settings", "start_forward"])
def test_where_one_rank_fails_on_its_way_to_a_pass_the_next_step_computes_it_on_all(
    divided: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(8, 1)

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            request = engine.submit(prompts[0], SETTINGS)
            while request.prefilling:
                engine.step()
            owner = {"new_context": model.backend, "settings": request.run.sampler}.get(place, engine.cache)
            if group.rank == 1:
                failing_once(owner, place, MemoryError("no memory"), monkeypatch, 0)
            told = []
            while engine.busy:
                try:
                    engine.step()
                except (MemoryError, ml.GroupError) as error:
                    told.append(str(error))
            return told, [request.tokens[len(prompts[0]) :]]

    answer = alone(divided, prompts)
    elsewhere = "forward: rank 1 of 2 failed before this; look for its own error"
    assert on_ranks(divided, work) == [([elsewhere], answer), (["no memory"], answer)]


ENDING = {
    "the check of a pass": ("all_gather", MemoryError),
    "a layer": ("put", MemoryError),
    "a sequence that is lost": ("start_forward", SequenceLostError),
    "reading what was drawn": ("to_numpy", MemoryError),
    "closing the context": ("close", MemoryError),
    "taking in what was drawn": ("advance", MemoryError),
    "interrupted before a pass": ("settings", KeyboardInterrupt),
    "interrupted before its draft": ("part", KeyboardInterrupt),
    "interrupted after a pass": ("advance", KeyboardInterrupt),
}
"""Where a rank fails while the others go on: what raises, and with what."""


@pytest.mark.parametrize("place", ENDING)
def test_a_rank_that_fails_where_the_others_go_on_ends_the_group(
    model: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next exchange would be taken for one of those that the others are in, or they wait in vain."""
    name, kind = ENDING[place]
    error = kind("no memory")

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, SpeculativeOptions(capacity=40)) as engine:
            request = engine.submit([5, 6, 7], SETTINGS)
            owners = {"all_gather": group, "put": engine.cache, "part": engine._verifier}
            owners |= {"start_forward": engine.cache}
            owners |= {"settings": request.run.sampler, "advance": request.run}
            real = model.forward

            def forward(ctx: ml.Context, *given: Any) -> Any:
                logits = real(ctx, *given)
                if name == "close":
                    failing_once(ctx, name, error, monkeypatch, 0)
                return logits if name == "close" else Mock(to_numpy=Mock(side_effect=error))

            told: list[str] = []
            failing = iter([False, group.rank == 1])
            while len(told) < 2 and request.error is None:
                if next(failing, False):
                    if name in owners:
                        failing_once(owners[name], name, error, monkeypatch, 0)
                    else:
                        monkeypatch.setattr(model, "forward", forward)
                try:
                    engine.step()
                except (MemoryError, SequenceLostError, KeyboardInterrupt, ml.GroupError) as raised:
                    told.append(str(raised))
            return told if request.error is None else [str(request.error)]

    first, second = on_ranks(model, work)
    assert first == ["another rank has ended"] * 2
    assert second[0] == "no memory"
    assert second[1:] in ([], ["another rank has ended"])


def test_logits_that_hold_nothing_to_draw_end_their_request_on_all_ranks_and_the_others_go_on(
    divided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(8, 2)

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            first, second = [engine.submit(prompt, SETTINGS) for prompt in prompts]
            failing_once(first.run, "advance", RunnerError("sampling: nan"), monkeypatch)
            while engine.busy:
                engine.step()
            return str(first.error), second.tokens[len(prompts[1]) :]

    assert on_ranks(divided, work) == [("sampling: nan", alone(divided, prompts)[1])] * 2


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_draft_that_fails_ends_its_request_where_it_fails_on_all_ranks(
    divided: Path, everywhere: bool
) -> None:
    """Else it ends the pass, and the others are told."""

    def work(model: Any, group: Any) -> Any:
        def draft(seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
            if everywhere or group.rank == 1:
                raise OSError("a bad disk")
            return [[5]]

        with Engine(model, None, SpeculativeOptions(capacity=40)) as engine:
            request = engine.submit([5, 6, 7], SETTINGS, draft=draft)
            try:
                while engine.busy:
                    engine.step()
            except (OSError, ml.GroupError) as error:
                return str(error)
            return f"ended: {request.error}"

    first, second = on_ranks(divided, work)
    assert second == ("ended: a bad disk" if everywhere else "a bad disk")
    assert first == second if everywhere else first.startswith("forward: rank 1 of 2 failed before this")


def test_a_request_that_no_rank_has_room_for_fails_on_all(
    divided: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(9, 1)

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            if group.rank == 0:
                failing_once(engine.prefix, "begin", full(), monkeypatch, 0)
            request = engine.submit(prompts[0], SETTINGS)
            engine.step()
            assert request.done
            assert not engine.busy
            return type(request.error), str(request.error)

    first, second = on_ranks(divided, work)
    assert first[1] == str(full())
    assert second == (CacheFullError, "begin: rank 0 of 2 has no room for this; all ranks stop")


def test_a_rank_that_cannot_keep_what_it_computed_goes_on_with_the_others(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(10)

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            if group.rank == 1:
                failing_once(engine.prefix._open, "keep", OSError("a bad disk"), monkeypatch)
            return answered(engine, prompts, 3, lambda: None)

    all_answer_as_one(model, prompts, work)
    assert "what it computed could not be kept" in caplog.text


def test_deciding_together_costs_an_answer_no_exchange(divided: Path) -> None:
    """A pass of one token is the check, two sums for each layer, and the logits."""

    def work(model: Any, group: Any) -> Any:
        with Engine(model, None, OPTIONS) as engine:
            engine.submit([5, 6, 7], SETTINGS)
            engine.step()
            before = group.exchanges
            engine.step()
            return group.exchanges - before, model.config.layers

    for exchanges, layers in on_ranks(divided, work):
        assert exchanges == 1 + 2 * layers + 1


def test_an_engine_on_one_rank_asks_nobody(divided: Path) -> None:
    with ml.open_backend("numpy") as backend, Engine(load_model(divided, backend), None, OPTIONS) as engine:
        assert engine.ranks.alone
        assert engine.ranks.least([3, 5]) == [3, 5]
        assert isinstance(engine.prefix, PrefixCache)
