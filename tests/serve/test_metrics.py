"""/metrics: what is counted and timed, against what was asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from kvcache.prefix.eviction_queue import TenantBudget
from kvcache.prefix.tiers import HostTier
from kvcache.stores import MemoryStore, StoreUnavailableError
from kvcache_engine.drafts import ModelDraft
from kvcache_engine.engine import Engine, EngineOptions
from kvcache_engine.loading import bundled_model
from kvcache_engine.options import SpeculativeOptions
from kvcache_engine.serve import ServeOptions, Worker
from kvcache_engine.tokenizer import Tokenizer

from .serve_rig import NAME, PROMPT, Serving, app_of, asked_in_process, gated, opened, served, until

OPTIONS = EngineOptions(max_sequences=2, capacity=64)
TOKENS = len(Tokenizer.load(bundled_model()).encode(PROMPT))


def samples(app: Any) -> dict[tuple[str, ...], float]:
    """By name and labels, but for the model's and the times at which counting began."""
    reply = asked_in_process(app, "/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == NAME
            found[sample.name.removeprefix("kvcache:"), *sample.labels.values()] = sample.value
    return found


def complete(app: Any, **asked: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **asked}
    reply = asked_in_process(app, "/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


class Failing(MemoryStore):
    """A store that is out of reach while it is told to be."""

    down = False

    def stat(self, keys: Any) -> Any:
        if self.down:
            raise StoreUnavailableError("nobody there")
        return super().stat(keys)


@pytest.fixture
def store() -> Iterator[Failing]:
    with Failing() as store:
        yield store


def test_tokens_are_counted_by_where_they_came_from(store: Failing) -> None:
    """The same prompt computed, found in the cache, in host memory, and in a store."""
    with Worker(lambda: opened(OPTIONS, [HostTier(), store])) as worker:
        app = app_of(worker)
        text = complete(app)["choices"][0]["text"]
        complete(app)
        worker.post(lambda engine: (engine.prefix.flush(), engine.prefix.evict())).result()
        complete(app)
        worker.post(lambda engine: (engine.prefix.flush(), engine.forget())).result()
        last = complete(app, prompt=PROMPT + text)["usage"]
        held, found = store.usage().nbytes, samples(app)
    total, stored = 3 * TOKENS + last["prompt_tokens"], last["prompt_tokens_details"]["cached_tokens"]
    assert stored > TOKENS
    assert found["prompt_tokens_total",] == total
    by_source = {key[1]: value for key, value in found.items() if key[0] == "prompt_tokens_by_source_total"}
    here = 2 * (TOKENS - 1)
    computed = {"local_compute": total - here - stored}
    assert by_source == {**computed, "local_cache_hit": here, "external_kv_transfer": stored}
    tiers = {key[1]: value for key, value in found.items() if key[0] == "prompt_tokens_reused_total"}
    assert tiers == {"live": 0, "device": TOKENS - 1, "host": TOKENS - 1, "store": stored}
    assert found["prompt_tokens_cached_total",] == here + stored
    assert found["prefix_cache_queries_total",] == total
    assert found["prefix_cache_hits_total",] == here
    asked = (TOKENS - 1) + (last["prompt_tokens"] - 1)  # twice memory had all that is looked up
    assert found["external_prefix_cache_queries_total",] == asked
    assert found["external_prefix_cache_hits_total",] == stored
    assert found["external_prefix_cache_spared_total",] == 0
    reasons = {key[1] for key in found if key[0] == "store_look_ups_total"}
    assert "unmeasured" in reasons, "what nobody knows yet is asked"
    assert reasons <= {"unmeasured", "fetching"}
    assert found["kept_bytes", "device"] > 0
    assert found["store_bytes", "0"] == held > 0
    assert {tier for name, *rest in found if name == "kept_bytes" for tier in rest} == {
        "device", "leaving", "host", "writing",
    }  # fmt: skip


def test_a_tenant_that_may_keep_little_is_counted_and_keeps_it() -> None:
    options = replace(OPTIONS, tenant_budget=TenantBudget(0, 0))
    with Worker(lambda: opened(options, [HostTier()])) as worker:
        app = app_of(worker)
        cached = [
            complete(app, **whose)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for whose in ({"cache_salt": "a"}, {"cache_salt": "a"}, {}, {})
        ]
        found = samples(app)
    assert cached == [0, 0, 0, TOKENS - 1]
    assert found["tenant_budget_evictions_total",] == 2


def test_drafts_of_all_requests_are_counted() -> None:
    @contextlib.contextmanager
    def drafting() -> Iterator[Engine]:
        options = SpeculativeOptions(max_sequences=2, capacity=64)
        with opened(options) as engine, ModelDraft(engine.model, 2, capacity=64) as draft:
            engine.draft = draft
            yield engine

    with Worker(drafting) as worker:
        app = app_of(worker)
        complete(app, max_tokens=11)
        complete(app, max_tokens=2)  # which leaves no room for a draft
        found = samples(app)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (found[f"spec_decode_num_{name}_total",] for name in names)
    assert drafted == accepted
    assert drafts + accepted == 10


def test_every_token_and_request_is_timed_once() -> None:
    with Worker(lambda: opened(OPTIONS)) as worker:
        app = app_of(worker)
        complete(app, n=3)
        complete(app, max_tokens=1)
        found = samples(app)
    counts = {name: value for (name, *_), value in found.items() if name.endswith("_count")}
    assert counts == {
        "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": 9,
        "request_time_per_output_token_seconds_count": 3,
        "request_queue_time_seconds_count": 4,
        "e2e_request_latency_seconds_count": 4,
    }
    assert found["request_success_total", "length"] == 4
    assert found["generation_tokens_total",] == 13
    assert 0 < found["time_to_first_token_seconds_sum",] <= found["e2e_request_latency_seconds_sum",]


def test_a_store_that_fails_is_counted_and_answers_go_on(store: Failing) -> None:
    with Worker(lambda: opened(OPTIONS, [store])) as worker:
        app = app_of(worker)
        text = complete(app)["choices"][0]["text"]
        worker.post(lambda engine: engine.prefix.flush()).result()
        store.down = True
        worker.post(lambda engine: engine.forget()).result()
        assert complete(app)["choices"][0]["text"] == text
        worker.post(lambda engine: engine.prefix.flush()).result()
        found = samples(app)
    assert found["store_errors_total", "read"] == 1
    assert found["store_errors_total", "write"] == 2, "behind the answer, and at the flush"
    assert (found["store_errors_total", "corrupt"], found["store_errors_total", "full"]) == (0, 0)
    assert found["offload_failures_total", "store"] == 2


def test_what_runs_waits_is_refused_fails_and_leaves_is_counted() -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("the device failed")

    with served(OPTIONS, ServeOptions(max_waiting=1)) as serving:
        app = app_of(serving.worker, max_waiting=1)
        with gated(serving) as gate:
            streams = [leave(serving) for _ in range(2)]
            gate.let(3)
            streams.append(leave(serving))
            until(lambda: samples(app)["num_requests_waiting",] == 1)
            assert samples(app)["num_requests_running",] == 2
            assert serving.post({"prompt": PROMPT}).status_code == 429
            for stream in streams:
                stream.close()
            until(lambda: samples(app)["requests_dropped_total", "cancelled"] == 3)
        serving.ask(lambda engine: setattr(engine.model, "forward", broken))
        assert serving.post({"prompt": PROMPT}).status_code == 500
        found = samples(app)
    assert found["requests_dropped_total", "refused"] == 1
    assert found["request_success_total", "error"] == 1
    assert (found["num_requests_running",], found["num_requests_waiting",]) == (0, 0)


def leave(serving: Serving) -> Any:
    return serving.complete(prompt=PROMPT, max_tokens=40, stream=True)


def test_who_asks_before_may_be_kept_secret_here_too() -> None:
    with Worker(lambda: opened(OPTIONS)) as worker:
        app = app_of(worker, show_cached=False)
        complete(app)
        names = {name for name, *_ in samples(app)}
    assert "prompt_tokens_total" in names
    assert not {name for name in names if "cache" in name or "source" in name or "reused" in name}


def test_nothing_of_it_is_global() -> None:
    before = set(REGISTRY._names_to_collectors)
    with Worker(lambda: opened(OPTIONS)) as worker:
        for _ in range(2):  # nor does a second app disturb the first
            complete(app_of(worker))
    assert set(REGISTRY._names_to_collectors) == before
