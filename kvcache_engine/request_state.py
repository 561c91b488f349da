"""The state of one request while it runs: its tokens, its text, and why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcache_engine.requests import Finished, FinishReason, GenerationOptions, Started, Token
from kvcache_engine.sampling import Logprobs, Sampler
from kvcache_engine.tokenizer import StreamDecoder

__all__ = ["RequestState", "StopStrings", "has_token"]


class StopStrings:
    """Passes text through up to the first stop string, holding back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._withheld = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string."""
        if self.found:
            return ""
        text = self._withheld + text
        at = min((i for stop in self._stops if (i := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.found, self._withheld = True, ""
            return text[:at]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._withheld = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """The held back text, at the end of a text without a stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld


class RequestState:
    """One request in a sequence: ``tokens`` (prompt, then generated); ``stored`` of them are in the cache."""

    def __init__(
        self, request: int, prompt: Sequence[int], settings: GenerationOptions, sampler: Sampler
    ) -> None:
        self.request = request
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.stored = 0
        self.reused = 0
        self.settings = settings
        self.sampler = sampler
        self.decoder: StreamDecoder | None = None
        self.stops = StopStrings(settings.stop)
        self.text = ""
        self.logprobs: list[Logprobs] = []
        """Of the generated tokens, if requested."""
        self.ended = False

    @property
    def prefilling(self) -> bool:
        return self.stored < self.prompt_tokens

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def start(self, reused: int, spared: int = 0) -> Started:
        self.stored = self.reused = reused
        return Started(self.request, self.prompt_tokens, reused, spared)

    def advance(
        self, token: int, eos: Sequence[int], limit: int, logprobs: Logprobs | None = None
    ) -> list[Token | Finished]:
        """Process a sampled token; returns its events, including the complete answer after the last one. An
        end-of-sequence token is not part of the answer.
        """
        event = None
        if token in eos and not self.settings.ignore_eos:
            self.ended = True
        else:
            self.tokens.append(token)
            text = self.stops.push(self.decoder.push(token)) if self.decoder else ""
            self.text += text
            if logprobs is not None:
                self.logprobs.append(logprobs)
            event = Token(self.request, token, text, logprobs)
        reason = self.finish_reason(limit)
        if reason is None:
            return [] if event is None else [event]
        return self.end(reason, event)

    def end(self, reason: FinishReason, last: Token | None = None) -> list[Token | Finished]:
        """The events that end a request: ``last``, with the text still held back, among them."""
        tail = "" if self.decoder is None else self.stops.push(self.decoder.flush())
        tail += self.stops.flush()
        self.text += tail
        generated = tuple(self.tokens[self.prompt_tokens :])
        counts = self.prompt_tokens, self.reused
        answer = Finished(self.request, reason, self.text, generated, *counts, tuple(self.logprobs))
        if last is None and not tail:
            return [answer]
        last = last or Token(self.request, None, "")
        return [replace(last, text=last.text + tail), answer]

    def finish_reason(self, limit: int) -> FinishReason | None:
        """Why the request ends; None if it continues. ``limit``: the most tokens of a sequence."""
        if self.ended or self.stops.found:
            return "stop"
        if self.generated >= self.settings.max_new_tokens:
            return "length"
        return "capacity" if self.stored >= limit else None


def has_token(event: Token | Finished) -> bool:
    """Whether the event has a token, not only held back text or an answer."""
    return isinstance(event, Token) and event.token is not None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
