"""OpenTelemetry spans of requests to the server; disabled if opentelemetry-api is not installed. Attributes
are named by OpenTelemetry's semantic conventions for generative AI (gen_ai.*) and, for latencies, which these
lack, as in vLLM. Spans contain no text. They are made from the engine's times when a request has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcache_engine.engine import Failed
from kvcache_engine.requests import Finished
from kvcache_engine.serve.asked import Asked
from kvcache_engine.serve.errors import ApiError
from kvcache_engine.serve.worker import Ticket

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

__all__ = ["Begin", "Trace", "tracing"]

Stage = tuple[str, float, float, dict[str, Any]]
"""A child span of the request: its name, begin and end (``time.monotonic``), and attributes."""


class Trace:
    """The trace of one API call. This base class records nothing."""

    def asked(self, asked: Asked, tickets: Sequence[Ticket]) -> None:
        """Record the parsed request, and the tickets of its answers."""

    def end(self, error: BaseException | None = None) -> None:
        """End the trace, with ``error`` if the call was refused or cancelled. Called once."""


Begin = Callable[[Mapping[str, str], bool], Trace]
"""Begins the trace of a call, by its HTTP headers and whether it is a chat."""


def tracing(model: str) -> Begin:
    """Traces of calls to ``model``, for the tracer provider of the process."""
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        return lambda headers, chat: Trace()
    tracer = trace.get_tracer("kvcache_engine.serve")

    def begin(headers: Mapping[str, str], chat: bool) -> Trace:
        recorded = _Recorded(tracer, headers, "chat" if chat else "text_completion", model)
        return recorded if recorded.recording else Trace()

    return begin


class _Recorded(Trace):
    """The server span of a call; its stages become child spans at the end."""

    def __init__(self, tracer: Tracer, headers: Mapping[str, str], operation: str, model: str) -> None:
        from opentelemetry import propagate, trace

        outer = trace.get_current_span().get_span_context().is_valid  # the span of an enclosing application
        self._tracer, self._trace = tracer, trace
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._began = time.monotonic()
        self._choices = 1
        self._tickets: Sequence[Ticket] = ()
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvcache",
            "gen_ai.request.model": model,
        }
        self._span: Span = tracer.start_span(
            f"{operation} {model}",
            None if outer else propagate.extract(headers),
            trace.SpanKind.SERVER,
            attributes,
            start_time=self._at(self._began),
        )

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def asked(self, asked: Asked, tickets: Sequence[Ticket]) -> None:
        self._tickets, self._choices = tickets, asked.choices
        settings = asked.settings
        optional = {
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.seed": settings.seed,
            "gen_ai.request.stop_sequences": settings.stop or None,
            "gen_ai.request.choice.count": None if asked.choices == 1 else asked.choices,
            "gen_ai.request.stream": asked.stream or None,
        }
        self._span.set_attributes({name: value for name, value in optional.items() if value is not None})
        self._span.set_attribute("gen_ai.request.temperature", settings.temperature)
        self._span.set_attribute("gen_ai.request.top_p", settings.top_p)
        self._span.set_attribute("gen_ai.request.top_k", settings.top_k)

    def end(self, error: BaseException | None = None) -> None:
        now = time.monotonic()
        for choice, ticket in enumerate(self._tickets):
            for name, since, until, attributes in _stages(ticket, now):
                self._stage(name, since, until, {"kvcache.choice": choice, **attributes})
        self._span.set_attributes(_latencies(self._tickets, now) | self._usage())
        self._fail(error)
        self._span.end(self._at(now))

    def _stage(self, name: str, since: float, until: float, attributes: dict[str, Any]) -> None:
        below = self._trace.set_span_in_context(self._span)
        start = self._at(since)
        self._tracer.start_span(name, below, attributes=attributes, start_time=start).end(self._at(until))

    def _usage(self) -> dict[str, Any]:
        """The numbers of prompt and answer tokens, as in the response."""
        answers = [ticket.outcome for ticket in self._tickets]
        done = [answer for answer in answers if isinstance(answer, Finished)]
        prompts = [answer for answer in answers[:: self._choices] if isinstance(answer, Finished)]
        if not done:
            return {}
        return {
            "gen_ai.usage.input_tokens": sum(answer.prompt_tokens for answer in prompts),
            "gen_ai.usage.cache_read.input_tokens": sum(answer.reused for answer in prompts),
            "gen_ai.usage.output_tokens": sum(len(answer.tokens) for answer in done),
            "gen_ai.response.finish_reasons": [answer.reason for answer in done],
        }

    def _fail(self, error: BaseException | None) -> None:
        """Record an error; the status is ERROR only for server errors, as in the conventions for HTTP."""
        failed = [ticket.outcome.error for ticket in self._tickets if isinstance(ticket.outcome, Failed)]
        status = error.status if isinstance(error, ApiError) else None
        if error is None and failed:
            error = failed[0]
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__ if status is None else str(status))
            if status is None or status >= 500:
                self._span.set_status(self._trace.StatusCode.ERROR, str(error))
        elif any(ticket.outcome is None for ticket in self._tickets):
            self._span.set_attribute("error.type", "cancelled")

    def _at(self, moment: float) -> int:
        """A time in nanoseconds since 1970."""
        return self._epoch + int(moment * 1e9)


def _stages(ticket: Ticket, now: float) -> Iterator[Stage]:
    """The stages of an answer, as far as it got by ``now``."""
    lookup = ticket.lookup
    yield "queue", ticket.asked, now if lookup is None else lookup.began, {}
    if lookup is None:
        return
    matched = lookup.began + lookup.match_seconds
    tokens = sum(lookup.origins.values())
    yield "prefix match", lookup.began, matched, {"kvcache.matched_tokens": tokens}
    restored = matched + lookup.restore_seconds
    if tokens:
        origins = {f"kvcache.restored_tokens.{origin}": count for origin, count in lookup.origins.items()}
        yield "restore", matched, restored, origins
    yield "prefill", restored, ticket.first or now, {}
    if ticket.first is not None:
        yield "decode", ticket.first, now if ticket.outcome is None else ticket.last, {}


def _latencies(tickets: Sequence[Ticket], now: float) -> dict[str, float]:
    """Latencies in seconds from the queueing of the first answer."""
    if not tickets:
        return {}
    asked = min(ticket.asked for ticket in tickets)
    latencies = {"gen_ai.latency.e2e": now - asked}
    if began := [ticket.lookup.began for ticket in tickets if ticket.lookup is not None]:
        latencies["gen_ai.latency.time_in_queue"] = min(began) - asked
    if first := [ticket.first for ticket in tickets if ticket.first is not None]:
        latencies["gen_ai.latency.time_to_first_token"] = min(first) - asked
    return latencies
