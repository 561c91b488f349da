"""An engine that serves several tenants: none gets, or can count, what another one has computed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvcache import HostTier
from kvcache_engine.engine import Engine
from kvcache_engine.requests import Finished, GenerationOptions

from ..kvcache.prefix.rigs.stores import FlakyStore
from .test_engine import GREEDY, engine_of, reference, run, tokens_of


def test_tenants_reuse_nothing_of_one_another_and_do_not_wait_for_it(model: Any) -> None:
    """All at once: those of one salt wait for its first prompt, and strangers compute theirs beside it."""
    prompt = tokens_of(6, 30)
    with engine_of(model, max_sequences=6, prefill_chunk=64) as engine:
        salts = ["a", "b", "", "a", "b"]
        requests = [engine.submit(prompt, GenerationOptions(4, ignore_eos=True), salt=s) for s in salts]
        engine.step()
        assert [request.started for request in requests] == [True, True, True, False, False]
        events = run(engine)
        reused = {event.request: event.reused for event in events if isinstance(event, Finished)}
        assert [reused[request.id] for request in requests] == [0, 0, 0, 29, 29]
        assert {request.tokens for request in requests} == {(*prompt, *reference(model, prompt, 4))}


def test_a_strangers_prompt_costs_what_a_new_one_does(model: Any) -> None:
    """Passes, tokens computed, calls of the store and bytes kept tell nothing; those of a tenant's own do."""
    told = {}
    for asked, salt in (("stranger's", "b"), ("nobody's", "b"), ("own", "a")):
        store = FlakyStore()
        with engine_of(model, tiers=[HostTier(1 << 20), store]) as engine:
            prompt = tokens_of(6, 30)
            engine.submit(tokens_of(7, 30) if asked == "nobody's" else prompt, GREEDY, salt="a")
            run(engine)
            engine.prefix.flush()
            before, calls = work_of(engine), store.calls
            request = engine.submit(prompt, GenerationOptions(1, ignore_eos=True), salt=salt)
            kinds = []
            while engine.busy:
                kinds.append([type(event) for event in engine.step()])
            assert request.tokens[30:] == tuple(reference(model, prompt, 1))
            engine.prefix.flush()  # a thread writes the answer
            work = {name: value - before[name] for name, value in work_of(engine).items()}
            told[asked] = (kinds, work, store.calls - calls, request.run.reused)
    assert told["stranger's"] == told["nobody's"]
    assert told["nobody's"][1]["computed_tokens"] == 30
    assert told["own"][1]["computed_tokens"] < 30


def test_what_is_shared_on_purpose_is_reused_by_all(small: Any) -> None:
    with engine_of(small) as engine:
        reused = []
        for salt in ("one", "two", "one"):
            request = engine.submit(tokens_of(6, 20), GREEDY, salt=salt, shared=5)
            run(engine)
            reused.append(request.run.reused)
    assert reused == [0, 5, 19]


def work_of(engine: Engine) -> dict[str, int]:
    """What an engine has counted, but for its times."""
    counted = {**asdict(engine.statistics), **asdict(engine.prefix.stats)}
    return {name: value for name, value in counted.items() if not name.endswith("seconds")}
