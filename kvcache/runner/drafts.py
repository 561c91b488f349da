"""Drafts: guesses at the next tokens, for the engine to verify.

A draft is any callable like ``prompt_lookup``; a bad one costs time and never changes an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

import ml
from kvcache.cache import Batch, Cache, CacheDType
from kvcache.caches import branches
from kvcache.prefix.radix_tree import common_length
from kvcache.runner.errors import RequestError
from kvcache.runner.language_model import LanguageModel, cache_for
from kvcache.stores.closing import Closing

__all__ = ["Draft", "ModelDraft", "prompt_lookup"]

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


class ModelDraft(Closing):
    """A smaller model of the same vocabulary, which guesses greedily. A context manager.

    It has a cache of its own, with a sequence for each of the engine's ``sequences`` and branches for
    its guesses: these are forked where the text ends and dropped again, so that a guess leaves nothing
    behind on any kind of cache, and accepted ones are computed with the next call. ``capacity``: tokens
    that a sequence holds (None: the model's ``max_positions``, at most 4096); beyond, it has no idea.
    ``cache``: a fresh one (None: what ``model.make_cache()`` gives).
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
        self.model = model
        self.capacity = min(capacity or 4096, model.config.max_positions)
        self.cache = cache_for(model) if cache is None else cache
        self._max_batch = max_batch
        self._spares = list(range(sequences, sequences + width))
        self._stored: list[list[int]] = [[] for _ in range(sequences)]
        self.cache.init(model.backend, cache_dtype, sequences + width, self.capacity, max(max_batch, width))

    def __call__(self, seq: int, tokens: Sequence[int], count: int, width: int) -> list[list[int]]:
        """Greedy continuations of the ``width`` likeliest next tokens.

        Raises RequestError for a sequence that it was not made for.
        """
        if not 0 <= seq < len(self._stored):
            raise RequestError(f"ModelDraft: sequence {seq}; it was made for {len(self._stored)} of them")
        count = min(count, self.capacity + 1 - len(tokens))
        if count < 1 or not tokens:
            return []
        try:
            return self._guess(seq, tokens, count, self._spares[:width])
        except BaseException:
            self._stored[seq] = []
            branches.drop(self.cache, [seq, *self._spares])
            raise

    def _guess(self, seq: int, tokens: Sequence[int], count: int, spares: list[int]) -> list[list[int]]:
        """The guesses go from one pass into the next on the device, and are read when all are there."""
        with self.model.backend.new_context() as ctx:
            here = ctx.input()
            logits = self._catch_up(ctx, seq, tokens)
            width = min(len(spares), logits.shape[1])
            last = logits.top_k(here, width)[1].reshape(here, width)
            guesses = last.reshape(here, width, 1)
            if count > 1:
                branches.fork(self.cache, seq, spares[:width])
            for at in range(len(tokens), len(tokens) + count - 1):
                batch = Batch([at] * width, spares[:width], inputs=last)
                last = self._forward(ctx, batch).argmax(here, 1)
                guesses = guesses.concat(here, last.reshape(here, width, 1), 1)
            found: list[list[int]] = guesses.to_numpy().tolist()
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
        self.cache.start_forward(ctx, batch)
        return self.model.forward(ctx, batch, self.cache)

    def close(self) -> None:
        """Close the cache; the model is the caller's."""
        self.cache.close()
