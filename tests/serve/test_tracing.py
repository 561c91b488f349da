"""Spans of requests: what stages they name, whose they are, and that there are none without OpenTelemetry."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from kvcache.prefix.tiers import HostTier
from kvcache.stores import MemoryStore
from kvcache_engine.engine import EngineOptions
from kvcache_engine.loading import bundled_model
from kvcache_engine.serve import ServeOptions, Worker
from kvcache_engine.tokenizer import Tokenizer

from .serve_rig import NAME, PROMPT, app_of, asked_in_process, gated, opened, served, until

OPTIONS = EngineOptions(max_sequences=2, capacity=64)
TOKENS = len(Tokenizer.load(bundled_model()).encode(PROMPT))
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["queue", "prefix match", "restore", "prefill", "decode"]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Hears of all spans; the provider that a process sets up once is set up for one test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(lambda: opened(OPTIONS)) as worker:
        yield worker


def ask(
    worker: Worker, path: str = "completions", headers: dict[str, str] | None = None, **fields: Any
) -> Any:
    prompt = {"prompt": PROMPT} if path == "completions" else {}
    body = {"max_tokens": 4, "temperature": 0, **prompt, **fields}
    return asked_in_process(app_of(worker), f"/v1/{path}", body, headers)


def only(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
    """The span of the one request that there was, and the stages below it by name."""
    found = exporter.get_finished_spans()
    exporter.clear()
    (request,) = (span for span in found if span.kind is trace.SpanKind.SERVER)
    stages = [span for span in found if span is not request]
    for stage in stages:
        assert stage.parent is not None
        assert stage.parent.span_id == request.context.span_id
    assert len({stage.name for stage in stages}) == len(stages)
    return request, {stage.name: stage for stage in stages}


def check_order(request: ReadableSpan, stages: Sequence[ReadableSpan]) -> None:
    """One stage after another, within the request."""
    ends = [request.start_time, *(moment for each in stages for moment in (each.start_time, each.end_time))]
    ends.append(request.end_time)
    assert ends == sorted(ends)


def test_a_request_is_a_span_with_its_stages_below_it_in_their_order(
    worker: Worker, exporter: InMemorySpanExporter
) -> None:
    for reused in (0, TOKENS - 1):
        assert ask(worker, seed=3, stop=["never said"]).status_code == 200
        request, stages = only(exporter)
        assert list(stages) == [name for name in STAGES if reused or name != "restore"]
        check_order(request, list(stages.values()))
        assert stages["prefix match"].attributes["kvcache.matched_tokens"] == reused
        if reused:
            assert stages["restore"].attributes["kvcache.restored_tokens.device"] == reused
    found = dict(request.attributes)
    latencies = [found.pop(f"gen_ai.latency.{n}") for n in ("time_in_queue", "time_to_first_token", "e2e")]
    assert latencies == sorted(latencies)
    assert latencies[0] >= 0
    assert request.name == f"text_completion {NAME}"
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvcache",
        "gen_ai.request.model": NAME,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": 1,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("never said",),
        "gen_ai.usage.input_tokens": TOKENS,
        "gen_ai.usage.cache_read.input_tokens": TOKENS - 1,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }


def test_what_was_restored_is_told_by_tier(exporter: InMemorySpanExporter) -> None:
    with MemoryStore() as store, Worker(lambda: opened(OPTIONS, [HostTier(), store])) as worker:
        text = ask(worker).json()["choices"][0]["text"]
        only(exporter)
        worker.post(lambda engine: (engine.prefix.flush(), engine.prefix.evict())).result()
        ask(worker)
        assert only(exporter)[1]["restore"].attributes["kvcache.restored_tokens.host"] == TOKENS - 1
        worker.post(lambda engine: (engine.prefix.flush(), engine.forget())).result()
        cached = ask(worker, prompt=PROMPT + text).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert only(exporter)[1]["restore"].attributes["kvcache.restored_tokens.store"] == cached > TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_belongs_to_the_trace_of_whoever_sent_it(
    worker: Worker, exporter: InMemorySpanExporter, stream: bool
) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    ask(worker, "chat/completions", {"traceparent": CALLER}, messages=messages, stream=stream)
    request, stages = only(exporter)
    assert request.name == f"chat {NAME}"
    for span in (request, *stages.values()):
        assert f"{span.context.trace_id:032x}" == CALLER.split("-")[1]
    assert f"{request.parent.span_id:016x}" == CALLER.split("-")[2]
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes.get("gen_ai.request.stream", False) is stream


@pytest.mark.parametrize("header", [{}, {"traceparent": "00-not-a-trace-01"}])
def test_without_a_trace_that_can_be_read_a_request_begins_its_own(
    worker: Worker, exporter: InMemorySpanExporter, header: dict[str, str]
) -> None:
    ask(worker, headers=header)
    assert only(exporter)[0].parent is None


def test_each_of_several_answers_has_its_stages(worker: Worker, exporter: InMemorySpanExporter) -> None:
    ask(worker, n=3)
    found = exporter.get_finished_spans()
    for name in ("queue", "prefix match", "prefill", "decode"):
        assert [span.attributes["kvcache.choice"] for span in found if span.name == name] == [0, 1, 2]
    assert found[-1].attributes["gen_ai.usage.input_tokens"] == TOKENS
    assert found[-1].attributes["gen_ai.usage.output_tokens"] == 12
    assert found[-1].attributes["gen_ai.request.choice.count"] == 3


def test_a_refused_request_says_why_and_is_no_error_of_the_server(
    worker: Worker, exporter: InMemorySpanExporter
) -> None:
    assert ask(worker, max_tokens=1000).status_code == 400
    request, stages = only(exporter)
    assert not stages
    assert request.attributes["error.type"] == "400"
    assert request.status.status_code is trace.StatusCode.UNSET


@pytest.mark.parametrize("stream", [False, True])
def test_a_pass_that_fails_is_an_error_of_the_span(
    worker: Worker, exporter: InMemorySpanExporter, stream: bool
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("the device failed")

    worker.post(lambda engine: setattr(engine.model, "forward", broken)).result()
    ask(worker, stream=stream)
    request, stages = only(exporter)
    assert request.attributes["error.type"] == ("RuntimeError" if stream else "500")
    assert request.status.status_code is trace.StatusCode.ERROR
    assert "the device failed" in request.status.description
    assert "decode" not in stages


def test_a_request_whose_client_leaves_while_it_waits_ends_in_the_queue(
    exporter: InMemorySpanExporter,
) -> None:
    with served(EngineOptions(max_sequences=1, capacity=64)) as serving, gated(serving) as gate:
        first = serving.complete(prompt=PROMPT, max_tokens=40, stream=True)
        gate.let(3)
        second = serving.complete(prompt=PROMPT, max_tokens=40, stream=True)
        second.close()
        until(lambda: len(exporter.get_finished_spans()) == 2)
        request, stages = only(exporter)
        first.close()
    assert request.attributes["error.type"] == "cancelled"
    assert list(stages) == ["queue"]
    check_order(request, list(stages.values()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_not_answered_in_time_is_an_error_of_the_server(
    exporter: InMemorySpanExporter, stream: bool
) -> None:
    with served(OPTIONS, ServeOptions(request_timeout=0.5)) as serving, gated(serving):
        serving.post({"prompt": PROMPT, "max_tokens": 4, "n": 2, "stream": stream})
        until(lambda: sum(serving.worker.dropped.values()) == 2)
        until(lambda: any(span.kind is trace.SpanKind.SERVER for span in exporter.get_finished_spans()))
    request = exporter.get_finished_spans()[-1]
    assert serving.worker.dropped["timeout"] == 2
    assert request.attributes["error.type"] == "504"
    assert request.status.status_code is trace.StatusCode.ERROR
    assert request.status.description == "the request was not answered within 0.5 seconds"


def test_a_trace_that_is_not_sampled_has_no_spans_and_the_answer_is_the_same(
    worker: Worker, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ask(worker).json()["choices"][0]["text"]
    only(exporter)
    provider = TracerProvider(ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    assert ask(worker).json()["choices"][0]["text"] == text
    assert not exporter.get_finished_spans()


def test_without_opentelemetry_the_server_answers_and_none_of_it_is_imported(
    worker: Worker, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert ask(worker).json()["usage"]["completion_tokens"] == 4
    assert not exporter.get_finished_spans()
    code = (
        "import sys, kvcache_engine.serve\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
