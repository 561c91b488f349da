"""Metrics for Prometheus; they are named kvcache:... and correspond to vLLM's where these exist.

The engine's own counts are read on request, between two passes; only times are recorded as they occur. The
registry belongs to the server: nothing is global.
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
    """Observes the requests of ``worker`` to record times, and reads the counts of its engine.

    Without ``show_cached``, metrics that reveal how much was reused are omitted.
    """

    def __init__(self, worker: Worker, name: str, show_cached: bool = True) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(worker, name, show_cached))

        def histogram(what: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(
                f"kvcache:{what}", help_text, ["model_name"], registry=self._registry, buckets=buckets
            )
            return metric.labels(name)

        self._first = histogram(
            "time_to_first_token_seconds", "Time from queueing to the first token.", _FIRST
        )
        self._token = histogram(
            "inter_token_latency_seconds", "Time between two tokens of an answer.", _TOKEN
        )
        self._mean = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of an answer after its first.",
            _TOKEN,
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Time from queueing to a free sequence.", _REQUEST
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "Time from queueing to the last token.", _REQUEST
        )
        self._ended = Counter(
            "kvcache:request_success", "Finished requests: stop, length, capacity (cache full), error.",
            ["model_name", "finished_reason"], registry=self._registry,
        )  # fmt: skip
        self._name = name
        worker.observers.append(self.observe)

    def exposed(self) -> bytes:
        """The metrics in Prometheus's text format. Waits until the engine is between passes, so do not call
        it in the event loop.
        """
        return generate_latest(self._registry)

    def observe(self, ticket: Ticket, event: EngineEvent) -> None:
        """Called in the worker's thread for each event of a request."""
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
    """Metrics read in the worker's thread, like all counts of the engine."""
    statistics = engine.statistics
    yield _gauge("num_requests_running", "Requests that are running.", len(engine.running))
    yield _gauge("num_requests_waiting", "Requests that are waiting.", len(engine.waiting))
    yield _counter("num_preemptions", "Preempted requests.", engine.preemptions)
    yield _counter("prompt_tokens", "Prompt tokens.", statistics.prompt_tokens)
    yield _counter("generation_tokens", "Generated tokens.", statistics.generated_tokens)
    if (drafts := engine.speculation).passes:
        yield _counter("spec_decode_num_drafts", "Passes with draft tokens.", drafts.drafts)
        yield _counter("spec_decode_num_draft_tokens", "Draft tokens.", drafts.drafted)
        yield _counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", drafts.accepted)


def _of_reuse(engine: Engine) -> Iterator[Family]:
    """Metrics from which a client could infer others' requests."""
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
        "Prompt tokens by source: computed, memory or stores.",
        sources,
        "source",
    )
    yield _counter("prompt_tokens_cached", "Prompt tokens that were not computed.", reused.reused)
    yield _counter(
        "prompt_tokens_reused", "Reused prompt tokens by tier; live: an open request.", tiers, "tier"
    )
    yield _counter("prefix_cache_queries", "Prompt tokens that were looked up.", reused.tokens)
    yield _counter("prefix_cache_hits", "Prompt tokens found in the cache or in host memory.", local)
    if has_stores(engine):
        # The last token of a prompt is always computed.
        asked = reused.tokens - reused.sessions - local - reused.spared
        yield _counter("external_prefix_cache_queries", "Prompt tokens looked up in stores.", asked)
        yield _counter("external_prefix_cache_hits", "Prompt tokens found in stores.", reused.store)
        yield _counter(
            "external_prefix_cache_spared",
            "Prompt tokens not read from stores because computing is faster.",
            reused.spared,
        )
        yield _counter(
            "store_look_ups",
            "Store decisions by reason; computing: not asked, as that is faster.",
            prefix.break_even.counts,
            "reason",
        )
    yield _gauge(
        "kept_bytes", "Bytes of snapshots per tier; leaving and writing: in transit.", prefix.nbytes, "tier"
    )
    yield _counter(
        "tenant_budget_evictions",
        "Evictions because a tenant exceeded its budget.",
        prefix.over_tenant_budget,
    )
    yield _counter("offload_failures", "Snapshots lost on the way to a tier.", prefix.failed, "tier")
    yield _counter("store_errors", "Failed store calls by kind.", prefix.store_errors, "kind")


class _EngineCollector(Collector):
    def __init__(self, worker: Worker, name: str, show_cached: bool) -> None:
        self._worker, self._name, self._show_cached = worker, name, show_cached

    def describe(self) -> Iterable[Family]:
        """Empty: the metrics depend on the engine, which registering must not query."""
        return ()

    def _read(self, engine: Engine) -> list[Family]:
        return [*_always(engine), *(_of_reuse(engine) if self._show_cached else ())]

    def collect(self) -> Iterator[Family]:
        families = self._worker.post(self._read).result()
        help_text = "Requests refused (429), timed out (504), or cancelled by the client."
        families.append(_counter("requests_dropped", help_text, self._worker.dropped, "why"))
        if self._show_cached and (kept := _bytes_in_stores(self._worker.engine.prefix.stores)):
            families.append(_gauge("store_bytes", "Bytes of entries by store.", kept, "store"))
        for family in families:
            for sample in family.samples:
                sample.labels["model_name"] = self._name
            yield family


def _bytes_in_stores(stores: Sequence[SnapshotStore]) -> dict[str, int]:
    """By location of the store, for stores that know their size without a network request."""
    sizes = {}
    for i, store in enumerate(stores):
        if isinstance(store, (FileStore, MemoryStore)):
            with contextlib.suppress(StoreError, OSError):  # it failed or is already closed
                sizes[str(i)] = store.usage().nbytes
    return sizes


def _counter(name: str, help_text: str, value: float | Mapping[str, int], label: str = "") -> Family:
    return _filled(CounterMetricFamily(f"kvcache:{name}", help_text, labels=[label] if label else []), value)


def _gauge(name: str, help_text: str, value: float | Mapping[str, int], label: str = "") -> Family:
    return _filled(GaugeMetricFamily(f"kvcache:{name}", help_text, labels=[label] if label else []), value)


def _filled(family: Family, value: float | Mapping[str, int]) -> Family:
    for label, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
        family.add_metric([] if label is None else [label], each)
    return family
