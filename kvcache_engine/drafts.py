"""Draft tokens: guesses at the next tokens, which the engine verifies.

A draft is any callable like ``prompt_lookup``; a bad one costs time but never changes an answer. If a request
samples, a draft that samples its tokens and returns their distribution (``SamplingDraft``) has more of them
accepted.
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
"""The most tokens that ``prompt_lookup`` matches."""


class Draft(Protocol):
    """Guesses what follows ``tokens``, the text of sequence ``seq`` so far.

    Returns at most ``width`` continuations, best first, each of at most ``count`` tokens (any more are
    ignored), or none.
    """

    def __call__(
        self, seq: int, tokens: Sequence[int], count: int, width: int
    ) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """One continuation: ``tokens``, each drawn from its row of ``probabilities`` (tokens, vocabulary).

    The probabilities are on the host; each row is >= 0, sums to 1, and is conditioned on the tokens before.
    """

    tokens: Sequence[int]
    probabilities: np.ndarray


@runtime_checkable
class SamplingDraft(Protocol):
    """A Draft that can sample as a request does: its tokens are accepted by ``ml.nn.RejectionSampler``.

    A deterministic draft such as ``prompt_lookup`` does not need this: comparing its tokens with those that
    the request samples accepts just as many.
    """

    def __call__(
        self, seq: int, tokens: Sequence[int], count: int, width: int
    ) -> Sequence[Sequence[int]]: ...

    def sample(self, seq: int, tokens: Sequence[int], count: int, sampler: Sampler, index: int) -> Proposal:
        """Up to ``count`` tokens, drawn with ``sampler.drafting``, the first of them with draw ``index``.

        Any distribution gives correct answers. The acceptance rate is highest if ``sampler`` computes it from
        a model's logits, as it does for the target model.
        """


@runtime_checkable
class DraftsInCache(Protocol):
    """A Draft that works in the cache of the engine."""

    def bind(self, model: Any, cache: Any) -> None:
        """Called with the engine's model and cache before a request is queued."""


def prompt_lookup(seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
    """The tokens that followed earlier occurrences of the last tokens, latest first; needs no model and no
    memory.

    It searches for the last 3 tokens, then 2, then 1. After prompt lookup decoding (Saxena, 2023); useful if
    answers repeat parts of their prompts.
    """
    text = np.asarray(tokens, np.int64)
    continuations: dict[int, list[int]] = {}
    for size in range(min(_LONGEST, len(text) - 1), 0, -1):
        earlier = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        for start in np.flatnonzero((earlier == text[-size:]).all(axis=1))[::-1]:
            follows = [int(token) for token in text[start + size : start + size + count]]
            continuations.setdefault(follows[0], follows)
            if len(continuations) == width:
                return list(continuations.values())
    return list(continuations.values())


Draw = tuple[Sampler, int]
"""The sampler whose draws are used, and the index of the first draw."""


class Guesser:
    """Chooses consecutive tokens from the logits of each pass; they stay on the device until ``read``.

    From the first logits (1, vocabulary) it takes the ``width`` likeliest tokens, then the likeliest of each
    row; or, with draws ``by``, one drawn token. Create it before the passes, since it uploads its data.
    """

    def __init__(self, ctx: ml.Context, vocabulary: int, count: int, width: int, by: Draw | None) -> None:
        self._width = min(width, vocabulary)
        self._tokens: list[ml.Tensor] = []
        self._probabilities: list[ml.Tensor] = []
        self._sampler: nn.BatchSampler | None = None
        if by is not None:
            sampler, index = by
            self._sampler = nn.BatchSampler(ctx, nn.Draws(*np.array([sampler.settings(1.0)]).T), vocabulary)
            draws = [sampler.drafting(index + i) for i in range(count)]
            self._draws = ctx.from_numpy(np.array(draws, np.float32).reshape(count, 1))

    def __call__(self, ctx: ml.Context, logits: ml.Tensor) -> ml.Tensor:
        """I32 (rows,): the input tokens of the next pass."""
        at = len(self._tokens)
        if self._sampler is not None:
            shares = self._sampler.probabilities(ctx, logits)
            self._probabilities.append(shares)
            last = nn.draw(ctx, shares, self._draws.slice(ctx, 0, at, at + 1))
        elif at:
            last = logits.argmax(ctx, 1)
        else:
            last = logits.top_k(ctx, self._width)[1].reshape(ctx, self._width)
        self._tokens.append(last)
        return last

    def read(self, ctx: ml.Context) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (rows, count), and the probabilities they were drawn from (count, vocabulary), if
        any.
        """
        columns = [column.reshape(ctx, column.shape[0], 1) for column in self._tokens]
        tokens = reduce(lambda a, b: a.concat(ctx, b, 1), columns).to_numpy()
        if not self._probabilities:
            return tokens, np.zeros((0, 0), np.float32)
        return tokens, reduce(lambda a, b: a.concat(ctx, b, 0), self._probabilities).to_numpy()


class GuessedDraft:
    """A SamplingDraft that runs passes of a model and chooses with a ``Guesser``."""

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
        """Guesses (width, count) and, if they are drawn, their probabilities; None if there is no guess."""
        raise NotImplementedError


class ModelDraft(Closing, GuessedDraft):
    """A smaller model with the same vocabulary that drafts, greedily or by sampling. A context manager.

    It has a cache of its own, with a sequence for each of the engine's ``sequences`` and branches for its
    guesses. Branches are forked at the end of the text and dropped again, so that guesses leave nothing
    behind in any kind of cache, and accepted tokens are computed with the next call. ``capacity``: the tokens
    that a sequence holds (None: the model's ``max_positions``, at most 4096); it does not guess beyond it.

    A call raises RequestError for a sequence outside ``sequences``.
    """

    def __init__(
        self,
        model: LanguageModel,
        sequences: int = 4,
        width: int = 1,
        capacity: int | None = None,
        cache_dtype: CacheDType = ml.DType.F32,
        max_batch: int = 512,
    ) -> None:
        if sequences < 1 or width < 1:
            raise RequestError(f"ModelDraft: sequences={sequences}, width={width}; both must be at least 1")
        super().__init__(model.config.vocab_size)
        self.model = model
        self.capacity = min(capacity or 4096, model.config.max_positions)
        self.cache: Cache = cache_for(model)
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
        """Guesses go from one pass into the next on the device, and are read at the end."""
        with self.model.backend.new_context() as ctx:
            here = ctx.input()
            guesser = Guesser(here, self._vocabulary, count, len(spares), by)
            last = guesser(here, self._catch_up(ctx, seq, tokens))
            width = last.shape[0]
            if count > 1:
                branches.fork(self.cache, seq, spares[:width])
            for at in range(len(tokens), len(tokens) + count - 1):
                last = guesser(here, self._forward(ctx, Batch([at] * width, spares[:width], inputs=last)))
            guesses = guesser.read(here)
        if count > 1:
            branches.drop(self.cache, spares[:width])
        return guesses

    def _catch_up(self, ctx: ml.Context, seq: int, tokens: Sequence[int]) -> ml.Tensor:
        """Evaluate the tokens that this sequence does not hold yet; returns the logits (1, vocab) after the
        last token.
        """
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
        """Close the cache; the model belongs to the caller."""
        self.cache.close()
