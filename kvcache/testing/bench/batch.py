"""``kvcache bench`` for batches: one pass for many sequences compared with one pass for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.attention.step_reads import StepReads
from kvcache.cache import Batch, CacheDType
from kvcache.caches.causal import CausalCache
from kvcache.testing.bench.timing import Contender

HEADS, KV_HEADS, DIM = 8, 4, 64
LAYERS = 2
_STEPS = 8
"""The number of steps after which every sequence is cut back to its initial length."""


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences that share their first ``shared`` tokens, and the number of its own tokens for each."""

    name: str
    shared: int
    own: tuple[int, ...]


def _ragged(sequences: int, longest: int) -> tuple[int, ...]:
    return tuple(10 + (longest - 10) * i // (sequences - 1) for i in range(sequences))


CASES = (
    Case("attend of 32 after 1024 shared", 1024, (20,) * 32),
    Case("attend of 32 after 10 to 400", 0, _ragged(32, 400)),
)


def fill(
    cache: CausalCache, ctx: ml.Context, prompt: ml.Tensor, layers: int, begin: int, end: int, seq: int = 0
) -> None:
    """Positions ``[begin, end)`` of a sequence, in chunks of the rows of ``prompt``."""
    for at in range(begin, end, prompt.shape[0]):
        count = min(prompt.shape[0], end - at)
        part = prompt.slice(ctx, 0, 0, count)
        cache.start_forward(ctx, Batch(range(at, at + count), [seq] * count))
        for layer in range(layers):
            cache.set_layer(layer)
            cache.put(ctx, part, part)
        ctx.compute()


class BatchDecoding:
    """Sequences of one cache, each of which decodes a token in a step: put and attend of every layer.

    The tensors of a step are (sequences, heads, head_dim); K and V are put as ``dtype``, and stored as
    ``stored`` (None: as ``dtype``).
    """

    def __init__(
        self, backend: ml.Backend, case: Case, dtype: ml.DType, stored: CacheDType | None = None
    ) -> None:
        self._ctx = backend.new_context()
        self._begin = [case.shared + own for own in case.own]
        self._step = 0
        count = len(case.own)
        self._cache = CausalCache()
        capacity = case.shared + max(case.own) + _STEPS
        self._cache.init(backend, stored or dtype, count, capacity, max(512, count))
        self._query = self._ctx.full((count, HEADS, DIM), 1, dtype)
        self._token = self._ctx.full((count, KV_HEADS, DIM), 1, dtype)
        prompt = self._ctx.full((512, KV_HEADS, DIM), 0.5, dtype)
        fill(self._cache, self._ctx, prompt, LAYERS, 0, case.shared)
        for seq in range(1, count):
            self._cache.copy_prefix(0, seq, case.shared)
        for seq, end in enumerate(self._begin):
            fill(self._cache, self._ctx, prompt, LAYERS, case.shared, end, seq)

    @property
    def reads(self) -> StepReads:
        """What a step reads in each layer."""
        reads = self._cache.step_reads()
        assert reads is not None
        return reads

    def together(self) -> Contender:
        """All sequences in one pass."""
        return Contender(lambda: self._pass(range(len(self._begin))), lambda: None, self._finish)

    def one_by_one(self) -> Contender:
        """A pass for each sequence."""
        return Contender(
            lambda: [self._pass([seq]) for seq in range(len(self._begin))][-1], lambda: None, self._finish
        )

    def _pass(self, sequences: Sequence[int]) -> np.ndarray:
        ctx, cache, first = self._ctx, self._cache, sequences[0]
        positions = [self._begin[seq] + self._step for seq in sequences]
        query = self._query.slice(ctx, 0, first, first + len(sequences))
        token = self._token.slice(ctx, 0, first, first + len(sequences))
        cache.start_forward(ctx, Batch(positions, list(sequences)))
        for layer in range(LAYERS):
            cache.set_layer(layer)
            cache.put(ctx, token, token)
            out = cache.attend(ctx, query, DIM**-0.5)
        return out.to_numpy()

    def _finish(self) -> None:
        self._step += 1
        if self._step == _STEPS:
            self._step = 0
            for seq, end in enumerate(self._begin):
                self._cache.remove(seq, end)
