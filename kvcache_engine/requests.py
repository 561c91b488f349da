"""The options, events and statistics of generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache_engine.errors import RequestError, check_whole
from kvcache_engine.sampling import Logprobs, Sampler

__all__ = [
    "Event",
    "FinishReason",
    "Finished",
    "GenerationOptions",
    "Prefilled",
    "Started",
    "Statistics",
    "Token",
]

FinishReason = Literal["stop", "length", "capacity"]
"""A stop token or string; ``max_new_tokens`` reached; no room for another token in the cache."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate: at most ``max_new_tokens`` per request, sampled as ``Sampler`` describes.

    ``stop`` strings end a text and are not part of it. So do the model's end-of-sequence tokens, unless
    ``ignore_eos``. With ``logprobs``, each token comes with its log probability and those of that many of the
    likeliest tokens (0: only its own).

    Raises RequestError for an option of another type or outside its range.

    >>> from kvcache_engine import GenerationOptions
    >>> GenerationOptions(max_new_tokens=64, temperature=0.7, top_p=0.9, stop=["User:"]).max_new_tokens
    64
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        most = check_whole("GenerationOptions", "max_new_tokens", self.max_new_tokens, 1)
        object.__setattr__(self, "max_new_tokens", most)
        if self.logprobs is not None:
            count = check_whole("GenerationOptions", "logprobs", self.logprobs, 0, ", or None")
            object.__setattr__(self, "logprobs", count)
        if not _are_stops(self.stop):
            raise RequestError(
                f"GenerationOptions: stop={self.stop!r}; it must be a sequence of non-empty strings"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"GenerationOptions: ignore_eos={self.ignore_eos!r}; it must be True or False")
        self.sampler()  # refuses invalid sampling options

    def sampler(self, stream: int = 0) -> Sampler:
        """A sampler with these options."""
        return Sampler(self.temperature, self.top_k, self.top_p, self.seed, stream, self.min_p)


def _are_stops(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(each, str) and each for each in value)


@dataclass(frozen=True, slots=True)
class Started:
    """A request has started: ``reused`` of its prompt's tokens were already in the cache.

    For ``spared`` further tokens no store was asked, because computing them is faster.
    """

    request: int
    prompt_tokens: int
    reused: int
    spared: int = 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """``done`` of the prompt's ``total`` tokens are stored."""

    request: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token, and the text that it completes ("" while a character is unfinished).

    ``token`` is None for text that was held back until the end.
    """

    request: int
    token: int | None
    text: str
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole answer to one request; ``text`` without the prompt and the stop string.

    ``tokens`` are all generated tokens, including those of a stop string but not an end-of-sequence token;
    ``logprobs`` are theirs, if requested.
    """

    request: int
    reason: FinishReason
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    reused: int
    logprobs: tuple[Logprobs, ...] = ()

    @property
    def computed(self) -> int:
        """Tokens of the prompt that went through the model."""
        return self.prompt_tokens - self.reused


Event = Started | Prefilled | Token | Finished


@dataclass(slots=True)
class Statistics:
    """Sums over requests; times are in seconds.

    The first token of each request comes from its prefill; ``decoded_tokens`` counts the others. The time of
    a pass with prompts and answers is divided by their tokens.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.computed_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Decoded tokens per second of all sequences together."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0
