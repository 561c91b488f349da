"""Drafts from the model's own layer for multi-token prediction (``kvcache_engine.models.mtp``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcache import branches
from kvcache_engine.drafts import Draw, GuessedDraft, Guesser
from kvcache_engine.errors import RequestError
from kvcache_engine.models.mtp import MTP, TAIL

__all__ = ["MTPDraft"]


class MTPDraft(GuessedDraft):
    """Drafts greedily or by sampling, in the cache of its engine.

    ``model`` is the engine's model, loaded with ``mtp=True``. It guesses one continuation of at most 31
    tokens; a layer trained for one token is less accurate for further ones. Its cells for guesses are removed
    before the engine's pass.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(getattr(model, "mtp", None), MTP):
            raise RequestError("MTPDraft: the model has no layer for it; load_model(..., mtp=True) loads it")
        super().__init__(model.config.vocab_size)
        self._model = model
        self._mtp: MTP = model.mtp
        self._cache: Any = None

    def bind(self, model: Any, cache: Any) -> None:
        """Draft in ``cache``; called by the engine. Raises RequestError for an engine with another model."""
        if model is not self._model:
            raise RequestError("MTPDraft: it drafts only for the model that it was created with")
        self._cache = cache

    def _drafted(
        self, seq: int, tokens: Sequence[int], count: int, width: int, by: Draw | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        cache, stored = self._cache, len(tokens) - 1
        count = min(count, TAIL - 1, self._model.config.max_positions - stored)
        if cache is None or count < 1 or cache.offset(seq) != stored:
            return None
        with self._model.backend.new_context() as ctx:
            guesser = Guesser(ctx.input(), self._vocabulary, count, 1, by)
            try:
                guessed = self._mtp.guess(ctx, cache, seq, tokens, count, guesser)
                return guesser.read(ctx.input()) if guessed else None
            finally:
                branches.rollback(cache, seq, stored)
                cache.rolled_back(seq)  # the session is unaffected: it still has all of its tokens
