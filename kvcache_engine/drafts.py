"""Drafts: guesses at the next tokens, for the engine to verify.

A draft is any callable like ``prompt_lookup``; a bad one costs time and never changes an answer. One that
draws its tokens and says what from (``SamplingDraft``) has more of them accepted where the request samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, runtime_checkable

import numpy as np

import ml
from kvcache import branches, common_length
from kvcache.cache import Batch, Cache, CacheDType
from kvcache.stores import Closing
from kvcache_engine.errors import RequestError
from kvcache_engine.language_model import LanguageModel, cache_for, start_pass
from kvcache_engine.sampling import Sampler
from ml import nn

__all__ = [
    "Draft", "DraftsInCache", "Draw", "GuessedDraft", "Guesser", "ModelDraft", "Proposal", "SamplingDraft",
    "prompt_lookup",
]  # fmt: skip

_LONGEST = 3
"""Tokens that ``prompt_lookup`` looks for."""


class Draft(Protocol):
    """Guesses what follows ``tokens``, the text so far of sequence ``seq``.

    Gives at most ``width`` continuations, best first, each of at most ``count`` tokens (what is more is
    ignored): none where it has no idea.
    """

    def __call__(
        self, seq: int, tokens: Sequence[int], count: int, width: int
    ) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """One continuation: ``tokens``, each drawn from its row of ``probabilities`` (tokens, vocabulary).

    These are on the host, each row >= 0 and summing to 1, given the tokens before.
    """

    tokens: Sequence[int]
    probabilities: np.ndarray


@runtime_checkable
class SamplingDraft(Protocol):
    """A Draft that can sample as a request does: its tokens are accepted by ``ml.nn.RejectionSampler``.

    A deterministic draft such as ``prompt_lookup`` does not need this: comparing its tokens with what the
    request samples accepts as many.
    """

    def __call__(
        self, seq: int, tokens: Sequence[int], count: int, width: int
    ) -> Sequence[Sequence[int]]: ...

    def sample(self, seq: int, tokens: Sequence[int], count: int, sampler: Sampler, index: int) -> Proposal:
        """Up to ``count`` tokens, drawn with ``sampler.drafting``: the first with draw ``index``.

        Any distribution gives right answers. The acceptance rate is highest if ``sampler`` makes it of a
        model's logits, as it does for the model that is drafted for.
        """


@runtime_checkable
class DraftsInCache(Protocol):
    """A Draft that works in the cache of the engine."""

    def bind(self, model: Any, cache: Any) -> None:
        """Called before a request is queued, with what the engine runs on."""


def prompt_lookup(seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
    """What followed when the last tokens came before, the latest time first: no model, no memory.

    It looks for the last 3 tokens, then 2, then 1. After prompt lookup decoding (Saxena, 2023); good
    where an answer repeats its prompt.
    """
    text = np.asarray(tokens, np.int64)
    found: dict[int, list[int]] = {}
    for size in range(min(_LONGEST, len(text) - 1), 0, -1):
        earlier = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        for start in np.flatnonzero((earlier == text[-size:]).all(axis=1))[::-1]:
            follows = [int(token) for token in text[start + size : start + size + count]]
            found.setdefault(follows[0], follows)
            if len(found) == width:
                return list(found.values())
    return list(found.values())


Draw = tuple[Sampler, int]
"""Whose draws, and the index of the first."""


class Guesser:
    """Tokens that follow one another, from the logits of each pass; they stay on the device until ``read``.

    Of the first logits (1, vocabulary) the ``width`` likeliest, then the likeliest of each row; or, ``by``
    draws, a drawn one. Made before the passes: it uploads what it needs.
    """

    def __init__(self, ctx: ml.Context, vocabulary: int, count: int, width: int, by: Draw | None) -> None:
        self._width = min(width, vocabulary)
        self._found: list[ml.Tensor] = []
        self._given: list[ml.Tensor] = []
        self._sampler: nn.BatchSampler | None = None
        if by is not None:
            sampler, index = by
            self._sampler = nn.BatchSampler(ctx, nn.Draws(*np.array([sampler.settings(1.0)]).T), vocabulary)
            draws = [sampler.drafting(index + i) for i in range(count)]
            self._draws = ctx.from_numpy(np.array(draws, np.float32).reshape(count, 1))

    def __call__(self, ctx: ml.Context, logits: ml.Tensor) -> ml.Tensor:
        """I32 (rows,): the inputs of the next pass."""
        at = len(self._found)
        if self._sampler is not None:
            shares = self._sampler.probabilities(ctx, logits)
            self._given.append(shares)
            last = nn.draw(ctx, shares, self._draws.slice(ctx, 0, at, at + 1))
        elif at:
            last = logits.argmax(ctx, 1)
        else:
            last = logits.top_k(ctx, self._width)[1].reshape(ctx, self._width)
        self._found.append(last)
        return last

    def read(self, ctx: ml.Context) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (rows, count), and what they were drawn from (count, vocabulary), or nothing."""
        columns = [found.reshape(ctx, found.shape[0], 1) for found in self._found]
        tokens = reduce(lambda a, b: a.concat(ctx, b, 1), columns).to_numpy()
        if not self._given:
            return tokens, np.zeros((0, 0), np.float32)
        return tokens, reduce(lambda a, b: a.concat(ctx, b, 0), self._given).to_numpy()


class GuessedDraft:
    """A SamplingDraft by the passes of a model that predicts with a ``Guesser``."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __call__(self, seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        """Greedy continuations of the ``width`` likeliest next tokens."""
        drawn = self._drafted(seq, tokens, count, width, None)
        return [] if drawn is None else [[int(token) for token in row] for row in drawn[0].tolist()]

    def sample(self, seq: int, tokens: Sequence[int], count: int, sampler: Sampler, index: int) -> Proposal:
        """One continuation, drawn as ``sampler`` draws."""
        drawn = self._drafted(seq, tokens, count, 1, (sampler, index))
        if drawn is None:
            return Proposal([], np.zeros((0, self._vocabulary), np.float32))
        guesses, probabilities = drawn
        return Proposal(guesses[0].tolist(), probabilities)

    def _drafted(
        self, seq: int, tokens: Sequence[int], count: int, width: int, by: Draw | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Guesses (width, count) and, where they are drawn, their probabilities; None: no idea."""
        raise NotImplementedError


class ModelDraft(Closing, GuessedDraft):
    """A smaller model of the same vocabulary, which guesses greedily or draws. A context manager.

    It has a cache of its own, with a sequence for each of the engine's ``sequences`` and branches for
    its guesses: these are forked where the text ends and dropped again, so that a guess leaves nothing
    behind on any kind of cache, and accepted ones are computed with the next call. ``capacity``: tokens
    that a sequence holds (None: the model's ``max_positions``, at most 4096); beyond, it has no idea.
    ``cache``: a fresh one (None: what ``model.make_cache()`` gives).

    A call raises RequestError for a sequence that it was not made for.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: int = 4,
        width: int = 1,
        capacity: int | None = None,
        cache: Cache | None = None,
        cache_dtype: CacheDType = ml.DType.F32,
        max_batch: int = 512,
    ) -> None:
        if sequences < 1 or width < 1:
            raise RequestError(f"ModelDraft: sequences={sequences}, width={width}; both must be at least 1")
        super().__init__(model.config.vocab_size)
        self.model = model
        self.capacity = min(capacity or 4096, model.config.max_positions)
        self.cache = cache_for(model) if cache is None else cache
        self._max_batch = max_batch
        self._spares = list(range(sequences, sequences + width))
        self._stored: list[list[int]] = [[] for _ in range(sequences)]
        self.cache.init(model.backend, cache_dtype, sequences + width, self.capacity, max(max_batch, width))

    def _drafted(
        self, seq: int, tokens: Sequence[int], count: int, width: int, by: Draw | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        if not 0 <= seq < len(self._stored):
            raise RequestError(f"ModelDraft: sequence {seq}; it was made for {len(self._stored)} of them")
        count = min(count, self.capacity + 1 - len(tokens))
        if count < 1 or not tokens:
            return None
        try:
            return self._guess(seq, tokens, count, self._spares[:width], by)
        except BaseException:
            self._stored[seq] = []
            branches.drop(self.cache, [seq, *self._spares])
            raise

    def _guess(
        self, seq: int, tokens: Sequence[int], count: int, spares: list[int], by: Draw | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The guesses go from one pass into the next on the device, and are read when all are there."""
        with self.model.backend.new_context() as ctx:
            here = ctx.input()
            guesser = Guesser(here, self._vocabulary, count, len(spares), by)
            last = guesser(here, self._catch_up(ctx, seq, tokens))
            width = last.shape[0]
            if count > 1:
                branches.fork(self.cache, seq, spares[:width])
            for at in range(len(tokens), len(tokens) + count - 1):
                last = guesser(here, self._forward(ctx, Batch([at] * width, spares[:width], inputs=last)))
            found = guesser.read(here)
        if count > 1:
            branches.drop(self.cache, spares[:width])
        return found

    def _catch_up(self, ctx: ml.Context, seq: int, tokens: Sequence[int]) -> ml.Tensor:
        """Evaluate what this sequence does not hold yet; the logits (1, vocab) behind the last token."""
        stored = self._stored[seq]
        same = common_length(np.array(stored, np.int64), np.array(tokens, np.int64))
        begin = branches.resume_point(self.cache, seq, min(same, len(tokens) - 1))
        branches.rollback(self.cache, seq, begin)
        self._stored[seq] = list(tokens)
        while True:
            end = min(begin + self._max_batch, len(tokens))
            positions = range(begin, end)
            batch = Batch(positions, [seq] * len(positions), (), tokens[begin:end], [len(positions) - 1])
            logits = self._forward(ctx, batch)
            if end == len(tokens):
                return logits
            begin = end

    def _forward(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        start_pass(self.model, ctx, batch, self.cache)
        return self.model.forward(ctx, batch, self.cache)

    def close(self) -> None:
        """Close the cache; the model is the caller's."""
        self.cache.close()
