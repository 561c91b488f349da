"""The caches of one model's layers, for any runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from kvcache import (
    Batch,
    Cache,
    CausalCache,
    ChunkedCache,
    CompressedCache,
    EncoderCache,
    ShiftFunction,
    SlidingWindowCache,
    StateCache,
    WrapperCache,
)

__all__ = ["CHUNKED", "COMPRESSED", "FULL", "SLIDING", "Kind", "ModelCaches", "Top", "batch_of_rows"]

FULL, SLIDING, CHUNKED, COMPRESSED = "full", "sliding", "chunked", "compressed"
Top = CausalCache | StateCache | EncoderCache | CompressedCache


class Kind(NamedTuple):
    """What a layer keeps. ``size`` is the most tokens that a query sees, including its own; 0: all. A window
    always includes the first ``keep`` tokens. For compressed layers, ``size`` is the number of tokens per
    entry. A tuple, since every layer uses it as a key at every token, and a dataclass computes its hash in
    Python.
    """

    name: str
    size: int = 0
    keep: int = 0

    @property
    def window(self) -> int:
        """The number of tokens directly before a query that it sees."""
        return self.size - self.keep - 1

    @property
    def attends(self) -> bool:
        """Whether the layer has K and V of earlier tokens."""
        return self.name in (FULL, SLIDING, CHUNKED)


ROOM = 64
"""The free cells that sequences get behind the next pass when they are moved together."""


class ModelCaches:
    """One cache for each kind of attention, for states and for an encoder's output; ``all`` combines them.
    Windows keep ``lookback`` more tokens than they show, so that many can be removed again.
    """

    _resting: dict[int, int]
    """How many of the next calls of ``line_up`` for rows that begin with a sequence do nothing."""

    def __init__(
        self,
        kinds: Iterable[Kind],
        states: StateCache | None = None,
        *,
        lookback: int = 0,
        shift: ShiftFunction | None = None,
        encoder: bool = False,
    ) -> None:
        self.states, self._resting = states, {}
        self.encoder = EncoderCache() if encoder else None
        self.caches: dict[Kind, CausalCache] = {}
        tops: list[Top] = []
        for kind in dict.fromkeys(kinds):
            if kind.name == COMPRESSED:
                tops.append(compressed := CompressedCache(kind.size))
                self.caches[kind] = compressed.entries
                continue
            self.caches[kind] = cache = _attention(kind, lookback, shift)
            tops.append(cache)
        if states is not None:
            tops.append(states)
        if self.encoder is not None:
            tops.append(self.encoder)
        self.tops: Sequence[Top] = tops
        self.all: Top | WrapperCache = tops[0] if len(tops) == 1 else WrapperCache(*cast("list[Cache]", tops))

    def line_up(self, caches: Iterable[CausalCache], sequences: Sequence[int], tokens: int) -> None:
        """Before a pass of ``tokens`` of each of these sequences, move them into evenly spaced runs in
        ``caches``, where reading them gathers, as happens in a cache full of other conversations. If that is
        not possible, it is tried again some passes later.
        """
        first = sequences[0]
        for cache in caches:
            if self._resting.get(first):
                self._resting[first] -= 1
            elif cache.foreign_pass() is False and not cache.defrag(sequences, tokens + ROOM):
                self._resting[first] = ROOM

    @classmethod
    def over(cls, kinds: Iterable[Kind], cache: Any) -> ModelCaches:
        """The caches combined in ``cache``: for these kinds of attention, and for states if it has more."""
        family = cls.__new__(cls)
        family._resting = {}
        family.all, family.encoder = cache, None
        parts: Any = cache.caches if isinstance(cache, WrapperCache) else [cache]
        family.tops, family.caches = parts, dict(zip(dict.fromkeys(kinds), parts, strict=False))
        family.states = next(iter(parts[len(family.caches) :]), None)
        return family

    @property
    def cross(self) -> EncoderCache:
        assert self.encoder is not None
        return self.encoder

    @property
    def whole(self) -> list[CausalCache]:
        """The caches that keep every token."""
        return [cache for cache in self.tops if isinstance(cache, CausalCache) and _reach(cache) is None]

    @property
    def indivisible(self) -> list[int]:
        """The numbers in ``tops`` of windows and states, whose content cannot be cut at any position."""
        kinds = (SlidingWindowCache, StateCache, CompressedCache)
        return [n for n, cache in enumerate(self.tops) if isinstance(cache, kinds)]

    @property
    def forgets(self) -> bool:
        """Whether one of the caches has room only for a window and a pass."""
        return any(_reach(cache) is not None for cache in self.tops)

    def kept(self, kind: Kind) -> int | None:
        """The number of tokens of a sequence that a kind's cache keeps; None: all."""
        reach = _reach(self.caches[kind])
        return None if reach is None else reach + max(1, kind.window)


def _reach(cache: object) -> int | None:
    """How far back a cache with automatic eviction reaches."""
    return cache.reach if isinstance(cache, SlidingWindowCache) else None


def _attention(kind: Kind, lookback: int, shift: ShiftFunction | None) -> CausalCache:
    if kind.name == SLIDING:
        return SlidingWindowCache(kind.window, kind.window + lookback, shift, keep=kind.keep)
    return ChunkedCache(kind.size, shift) if kind.name == CHUNKED else CausalCache(shift)


def batch_of_rows(sequences: Sequence[int | None], begins: Sequence[int], counts: Sequence[int]) -> Batch:
    """A batch of the tokens at ``[begins[i], begins[i] + counts[i])`` of each row i; a row may have none."""
    count = counts[0]
    if all(other == count for other in counts):
        if count == 1:
            return Batch(begins, sequences)  # type: ignore[arg-type]
        return Batch(np.add.outer(begins, np.arange(count)).ravel(), np.repeat(sequences, count))  # type: ignore[arg-type]
    starts, many = np.array(begins), np.array(counts)
    ends = np.cumsum(many)
    steps = np.arange(ends[-1]) - np.repeat(ends - many, many)
    ids = np.array([-1 if seq is None else seq for seq in sequences])
    return Batch(np.repeat(starts, many) + steps, np.repeat(ids, many))  # type: ignore[arg-type]
