"""Small caches with known contents, for the tests of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml
from kvcache import Batch
from kvcache.prefix.prefix_cache import PrefixCache, Session


def bound(
    cache: Any, backend: ml.Backend, sequences: int = 3, capacity: int = 16, batch: int = 16,
    stored: Mapping[int, int] | None = None,
) -> Any:  # fmt: skip
    """The cache at a backend, with so many first tokens of each sequence ``stored``."""
    cache.init(backend, ml.DType.F32, sequences, capacity, batch)
    for seq, tokens in (stored or {}).items():
        store(cache, backend, seq, range(tokens))
    return cache


def store(cache: Any, backend: ml.Backend, seq: int, positions: Sequence[int]) -> None:
    """One pass that stores zeros: K and V of one head of 4, 32 bytes a cell."""
    store_batch(cache, backend, [seq] * len(positions), positions)


def store_batch(cache: Any, backend: ml.Backend, sequences: Sequence[int], positions: Sequence[int]) -> None:
    with backend.new_context() as ctx:
        cache.start_forward(ctx, Batch(list(positions), list(sequences)))
        cache.set_layer(0)
        zeros = ctx.zeros((len(positions), 1, 4), ml.DType.F32)
        cache.put(ctx, zeros, zeros)


def talk(prefix: PrefixCache, backend: ml.Backend, tokens: Sequence[int | bytes]) -> Session:
    """A session whose prompt is evaluated."""
    session = prefix.begin(tokens)
    for chunk in session.chunks(1000):
        at = prefix.cache.offset(session.seq)
        store(prefix.cache, backend, session.seq, range(at, at + len(chunk)))
    return session
