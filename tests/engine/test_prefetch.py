"""The engine and stores that are far: pages are read for requests that wait, and only where that pays."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcache.prefix.break_even import BreakEven, Link
from kvcache.stores import MemoryStore
from kvcache_engine.engine import Engine
from kvcache_engine.errors import RequestError
from kvcache_engine.requests import Finished, GenerationOptions, Started

from ..kvcache.prefix.rigs.stores import GatedStore
from .test_engine import engine_of, reference, run, tokens_of

Make = Callable[..., Path]
COUNT = 6
GREEDY = GenerationOptions(COUNT, ignore_eos=True)
SIZES = {"block_size": 8, "interval": 8}
"""Of a prompt of 31 tokens 24 are to be had: its first 30 were stored with their answer behind them."""


def kept(model: Any, prompts: Sequence[Sequence[int]]) -> GatedStore:
    """A store that another engine left the prompts in."""
    store = MemoryStore()
    with engine_of(model, tiers=[store], **SIZES) as engine:
        engine.complete(prompts, GREEDY)
    return GatedStore(store)


def turns(count: int) -> list[list[int]]:
    """Prompts of 30 tokens and one."""
    return [[*tokens_of(20 + i, 30), 5] for i in range(count)]


def answers(events: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    return {event.request: event.tokens for event in events if isinstance(event, Finished)}


def ahead(engine: Engine) -> int:
    return engine.prefix.nbytes["ahead"]


def test_while_pages_are_read_for_one_request_another_one_is_answered(model: Any) -> None:
    first, second = turns(2)
    store = kept(model, [second[:-1]])
    with engine_of(model, tiers=[store], **SIZES) as engine:
        a = engine.submit(first, GREEDY)
        events = engine.step()
        store.gate.clear()
        store.threads.clear()
        b = engine.submit(second, GREEDY)
        assert store.entered.wait(60)
        while not a.done:
            events += engine.step()
        assert (a.done, b.started) == (True, False)
        store.gate.set()
        assert b.ahead is not None
        b.ahead.wait()
        events += run(engine)
        assert set(store.threads) == {"kvcache-prefetch"}, "what was left was to restore it"
        assert engine.prefix.stats.store == b.run.reused > 0
        assert ahead(engine) == 0
    assert answers(events) == {a.id: reference(model, first, COUNT), b.id: reference(model, second, COUNT)}


def test_requests_that_want_the_same_pages_have_them_read_once_and_placed_once(model: Any) -> None:
    first, second = turns(2)
    others = [[*second, token] for token in (7, 8, 9)]
    store = kept(model, [second])
    with engine_of(model, tiers=[store], max_sequences=4, **SIZES) as engine:
        a = engine.submit(first, GREEDY)
        engine.step()
        requests = [engine.submit(prompt, GREEDY) for prompt in others]
        for request in requests:
            assert request.ahead is not None
            request.ahead.wait()
        events = run(engine)
        assert len(store.read) == len(set(store.read))
        reused = [request.run.reused for request in requests]
        stats = engine.prefix.stats
        assert (stats.store, stats.reused) == (reused[0], sum(reused))
        assert min(reused) > 0
        assert ahead(engine) == 0
    found = answers(events)
    for request, prompt in zip([a, *requests], [first, *others], strict=True):
        assert found[request.id] == reference(model, prompt, COUNT)


def test_an_engine_with_nothing_else_to_do_reads_at_once(small: Any) -> None:
    (prompt,) = turns(1)
    store = kept(small, [prompt[:-1]])
    with engine_of(small, tiers=[store], **SIZES) as engine:
        request = engine.submit(prompt, GREEDY)
        assert request.ahead is None
        assert any(isinstance(event, Started) and event.reused == 24 for event in engine.step())
        run(engine)


def test_of_requests_that_wait_alone_the_first_begins_and_waits_for_its_pages(small: Any) -> None:
    first, second = turns(2)
    store = kept(small, [first[:-1], second[:-1]])
    store.gate.clear()
    with engine_of(small, tiers=[store], max_sequences=1, **SIZES) as engine:
        a, b = engine.submit(first, GREEDY), engine.submit(second, GREEDY)
        assert store.entered.wait(60)
        engine.cancel(a)
        opening = threading.Timer(0.05, store.gate.set)
        opening.start()
        events = run(engine)
        opening.join()
        assert b.run.reused == 24
        assert len(store.read) == len(set(store.read))
    assert answers(events) == {b.id: reference(small, second, COUNT)}


def test_what_was_read_for_a_request_that_is_cancelled_or_fails_is_let_go_of(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = turns(3)
    store = kept(small, [second[:-1], third[:-1]])
    with engine_of(small, tiers=[store], max_sequences=1, **SIZES) as engine:
        a, b, c = (engine.submit(prompt, GREEDY) for prompt in (first, second, third))
        for request in (b, c):
            assert request.ahead is not None
            request.ahead.wait()
        before = ahead(engine)
        assert engine.cancel(b)
        assert 0 < ahead(engine) < before
        run(engine)
        assert ahead(engine) == 0
        assert (a.done, c.run.reused) == (True, 24)
    with engine_of(small, tiers=[store], max_sequences=1, **SIZES) as engine:
        a, b = engine.submit(first, GREEDY), engine.submit(second, GREEDY)
        engine.step()
        assert b.ahead is not None
        b.ahead.wait()
        engine.close()
        assert b.done


def test_a_refused_request_reads_nothing(small: Any) -> None:
    store = kept(small, [turns(1)[0][:-1]])
    with engine_of(small, tiers=[store], **SIZES) as engine:
        engine.submit(turns(1)[0], GREEDY)
        store.threads.clear()
        with pytest.raises(RequestError):
            engine.submit([3] * 1000, GREEDY)
        with pytest.raises(RequestError, match="salt"):
            engine.submit(turns(2)[1], GREEDY, salt=7)  # type: ignore[arg-type]
        assert (store.threads, ahead(engine)) == ([], 0)
        run(engine)


def test_a_store_that_fails_costs_a_computation_and_no_answer(model: Any) -> None:
    first, second = turns(2)
    store = kept(model, [second[:-1]])
    store.broken = lambda key: True
    with engine_of(model, tiers=[store], **SIZES) as engine:
        a, b = engine.submit(first, GREEDY), engine.submit(second, GREEDY)
        events = run(engine)
        assert (b.run.reused, ahead(engine)) == (0, 0)
        assert engine.prefix.store_errors["read"] > 0
    assert answers(events) == {a.id: reference(model, first, COUNT), b.id: reference(model, second, COUNT)}


def test_pages_of_a_tenant_are_read_for_that_one_alone(small: Any) -> None:
    first, second = turns(2)
    store = MemoryStore()
    with engine_of(small, tiers=[store], **SIZES) as engine:
        engine.submit(second[:-1], GREEDY, salt="a")
        run(engine)
    far = GatedStore(store)
    with engine_of(small, tiers=[far], max_sequences=1, **SIZES) as engine:
        engine.submit(first, GREEDY)
        b, c = (engine.submit(second, GREEDY, salt=salt) for salt in ("a", "b"))
        for request in (b, c):
            assert request.ahead is not None
            request.ahead.wait()
        assert c.ahead is not None
        assert c.ahead.pages == []
        run(engine)
        assert (b.run.reused, c.run.reused) == (24, 0)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_and_goes_while_pages_are_read_every_answer_is_that_of_its_prompt(
    model: Any, seed: int
) -> None:
    rnd = random.Random(seed)
    prompts = turns(5)
    prompts += [[*prompt[: rnd.randrange(4, 30)], 6, 7] for prompt in prompts]
    store = kept(model, prompts[:3])
    room = rnd.choice([3000, 20000, 1 << 20])
    with engine_of(model, tiers=[store], max_sequences=2, read_ahead=room, backlog=room, **SIZES) as engine:
        assert engine.prefix.tree.store.writes.backlog == room
        waiting = rnd.sample(prompts, len(prompts))
        asked: dict[int, list[int]] = {}
        events: list[Any] = []
        while waiting or engine.busy:
            if waiting and rnd.random() < 0.6:
                prompt = waiting.pop()
                asked[engine.submit(prompt, GREEDY).id] = prompt
            if engine.waiting and rnd.random() < 0.1:
                request = rnd.choice(engine.waiting)
                engine.cancel(request)
                del asked[request.id]
            fails = rnd.random() < 0.1
            store.broken = lambda key, fails=fails: fails
            events += engine.step()
            assert ahead(engine) <= room
        assert ahead(engine) == 0
    assert answers(events) == {number: reference(model, prompt, COUNT) for number, prompt in asked.items()}


# Break-even.


@pytest.mark.parametrize(("fetch", "found"), [("measured", (0, 30)), ("always", (24, 0))])
def test_what_computing_is_faster_for_is_told_when_the_request_starts(
    small: Any, monkeypatch: pytest.MonkeyPatch, fetch: str, found: tuple[int, int]
) -> None:
    (prompt,) = turns(1)
    monkeypatch.setattr(BreakEven, "link", lambda self, store: Link(1.0))
    monkeypatch.setattr(BreakEven, "bytes_per_token", 1000)
    monkeypatch.setattr(BreakEven, "tokens_per_second", 1e6)
    store = kept(small, [prompt[:-1]])
    store.threads.clear()
    with engine_of(small, tiers=[store], fetch=fetch, **SIZES) as engine:
        request = engine.submit(prompt, GREEDY)
        assert Started(request.id, 31, *found) in engine.step()
        run(engine)
        assert (engine.prefix.stats.store, engine.prefix.stats.spared) == found
        assert bool(store.threads) == bool(found[0])


def test_an_engine_measures_how_fast_it_computes_prompts(small: Any) -> None:
    with engine_of(small) as engine:
        engine.complete([tokens_of(1, 40)], GREEDY)
        assert engine.prefix.break_even.tokens_per_second == pytest.approx(
            engine.statistics.prefill_tokens_per_second
        )
