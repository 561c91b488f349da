"""What a server counts and times, for Prometheus; named kvcache:..., as vLLM has it where it has the same.

What the engine counts anyway is read when it is asked for, between two of its passes; only times are taken
as they come. The registry is the server's own: nothing is global.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvcache.stores import FileStore, MemoryStore, SnapshotStore, StoreError
from kvcache_engine.engine import Engine, EngineEvent, Failed
from kvcache_engine.requests import Finished, Started, Token
from kvcache_engine.serve.worker import Ticket, Worker, has_stores

__all__ = ["Metrics"]

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
          40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
          80.0)  # fmt: skip
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
            480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
"""Bounds of the buckets in seconds: vLLM's."""
Family = CounterMetricFamily | GaugeMetricFamily


class Metrics:
    """Times the requests of ``worker``, which it observes, and reads what its engine counts.

    Without ``show_cached``, whatever tells how much was reused is left out.
    """

    def __init__(self, worker: Worker, name: str, show_cached: bool = True) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(worker, name, show_cached))

        def histogram(what: str, told: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"kvcache:{what}", told, ["model_name"], registry=self._registry, buckets=buckets
            )
            return metric.labels(name)

        self._first = histogram("time_to_first_token_seconds", "From the queue to the first token.", _FIRST)
        self._token = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _TOKEN)
        self._mean = histogram(
            "request_time_per_output_token_seconds", "Mean of an answer behind its first token.", _TOKEN
        )
        self._queue = histogram("request_queue_time_seconds", "From the queue to a sequence.", _REQUEST)
        self._whole = histogram("e2e_request_latency_seconds", "From the queue to the last token.", _REQUEST)
        self._ended = Counter(
            "kvcache:request_success", "Requests that ended: stop, length, capacity (no room), error.",
            ["model_name", "finished_reason"], registry=self._registry,
        )  # fmt: skip
        self._name = name
        worker.observers.append(self.observe)

    def exposed(self) -> bytes:
        """In Prometheus's text form. Waits for the engine's next pause: not for the loop that serves."""
        return generate_latest(self._registry)

    def observe(self, ticket: Ticket, event: EngineEvent) -> None:
        """Called in the worker's thread, with what happens to each request."""
        now = time.monotonic()
        if isinstance(event, Started):
            assert ticket.lookup is not None
            self._queue.observe(ticket.lookup.began - ticket.asked)
        elif isinstance(event, Token) and event.token is not None:
            if ticket.first is None:
                ticket.first = now
                self._first.observe(now - ticket.asked)
            else:
                self._token.observe(now - ticket.last)
            ticket.last = now
        elif isinstance(event, Finished):
            self._ended.labels(self._name, event.reason).inc()
            self._whole.observe(now - ticket.asked)
            if ticket.first is not None and len(event.tokens) > 1:
                self._mean.observe((ticket.last - ticket.first) / (len(event.tokens) - 1))
        elif isinstance(event, Failed):
            self._ended.labels(self._name, "error").inc()


def _always(engine: Engine) -> Iterator[Family]:
    """Read in the worker's thread, as all that an engine counts."""
    statistics = engine.statistics
    yield _gauge("num_requests_running", "Requests that hold a sequence.", len(engine.running))
    yield _gauge("num_requests_waiting", "Requests that wait for a sequence.", len(engine.waiting))
    yield _counter("num_preemptions", "Times a request made room for others.", engine.preemptions)
    yield _counter("prompt_tokens", "Tokens of all prompts.", statistics.prompt_tokens)
    yield _counter("generation_tokens", "Tokens that were generated.", statistics.generated_tokens)
    if (drafts := engine.speculation).passes:
        yield _counter("spec_decode_num_drafts", "Passes of answers that had drafts.", drafts.drafts)
        yield _counter("spec_decode_num_draft_tokens", "Drafted tokens.", drafts.drafted)
        yield _counter("spec_decode_num_accepted_tokens", "Those that were accepted.", drafts.accepted)


def _of_reuse(engine: Engine) -> Iterator[Family]:
    """What a client could learn from what others have asked."""
    prefix = engine.prefix
    reused = prefix.stats
    local = reused.live + reused.device + reused.host
    sources = {
        "local_compute": engine.statistics.computed_tokens,
        "local_cache_hit": local,
        "external_kv_transfer": reused.store,
    }
    tiers = {tier: getattr(reused, tier) for tier in ("live", "device", "host", "store")}
    yield _counter(
        "prompt_tokens_by_source",
        "Tokens that were computed, in memory, or in stores.",
        sources,
        "source",
    )
    yield _counter("prompt_tokens_cached", "Tokens of prompts that were not computed.", reused.reused)
    yield _counter(
        "prompt_tokens_reused", "Those by the tier that had them; live: another request's.", tiers, "tier"
    )
    yield _counter("prefix_cache_queries", "Tokens that were looked up.", reused.tokens)
    yield _counter("prefix_cache_hits", "Tokens that were in the cache or in host memory.", local)
    if has_stores(engine):
        # The last token of a prompt is computed whatever there is.
        asked = reused.tokens - reused.sessions - local - reused.spared
        yield _counter("external_prefix_cache_queries", "Tokens that memory lacked, asked of stores.", asked)
        yield _counter("external_prefix_cache_hits", "Tokens that stores had.", reused.store)
        yield _counter(
            "external_prefix_cache_spared",
            "Tokens that stores were not asked for, or not read of, as computing is faster.",
            reused.spared,
        )
        yield _counter(
            "store_look_ups",
            "By why a store was asked, or (computing: it is faster) was not.",
            prefix.break_even.counts,
            "reason",
        )
    yield _gauge("kept_bytes", "Snapshots per tier; leaving, writing: on their way.", prefix.nbytes, "tier")
    yield _counter(
        "tenant_budget_evictions", "Times a tenant had more than it may keep.", prefix.over_tenant_budget
    )
    yield _counter("offload_failures", "Snapshots lost on their way to a tier.", prefix.failed, "tier")
    yield _counter("store_errors", "Calls of stores that failed, by kind.", prefix.store_errors, "kind")


class _EngineCollector(Collector):
    def __init__(self, worker: Worker, name: str, show_cached: bool) -> None:
        self._worker, self._name, self._show_cached = worker, name, show_cached

    def describe(self) -> Iterable[Family]:
        """Nothing: what there is depends on the engine, and registering does not ask it."""
        return ()

    def _read(self, engine: Engine) -> list[Family]:
        return [*_always(engine), *(_of_reuse(engine) if self._show_cached else ())]

    def collect(self) -> Iterator[Family]:
        families = self._worker.post(self._read).result()
        told = "Refused (429), not answered in time (504), or given up by the client."
        families.append(_counter("requests_dropped", told, self._worker.dropped, "why"))
        if self._show_cached and (kept := _bytes_in_stores(self._worker.engine.prefix.stores)):
            families.append(_gauge("store_bytes", "Entries that a store has, by its place.", kept, "store"))
        for family in families:
            for sample in family.samples:
                sample.labels["model_name"] = self._name
            yield family


def _bytes_in_stores(stores: Sequence[SnapshotStore]) -> dict[str, int]:
    """By the place of the store; of those that know without a question to another machine."""
    found = {}
    for i, store in enumerate(stores):
        if isinstance(store, (FileStore, MemoryStore)):
            with contextlib.suppress(StoreError, OSError):  # it failed, or is closed already
                found[str(i)] = store.usage().nbytes
    return found


def _counter(name: str, told: str, value: float | Mapping[str, int], label: str = "") -> Family:
    return _filled(CounterMetricFamily(f"kvcache:{name}", told, labels=[label] if label else []), value)


def _gauge(name: str, told: str, value: float | Mapping[str, int], label: str = "") -> Family:
    return _filled(GaugeMetricFamily(f"kvcache:{name}", told, labels=[label] if label else []), value)


def _filled(family: Family, value: float | Mapping[str, int]) -> Family:
    for label, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
        family.add_metric([] if label is None else [label], each)
    return family
