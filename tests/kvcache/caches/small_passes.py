"""Small caches and passes over them, for tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import ml
from kvcache import Batch, StateSpec

C = TypeVar("C")
SUM = {None: {"sum": StateSpec((1,), ml.DType.F32)}}
"""The states of a cache whose layers have one number each."""


def bound(cache: C, backend: ml.Backend, sequences: int, capacity: int, max_batch: int) -> C:
    """The cache, after ``init`` for F32."""
    unbound: Any = cache
    unbound.init(backend, ml.DType.F32, sequences, capacity, max_batch)
    return cache


def evaluate(cache: Any, ctx: ml.Context, positions: Sequence[int], seq: int = 0, layers: int = 1) -> None:
    """A pass that puts ones of (1, 4) in the first layers."""
    cache.start_forward(ctx, Batch(positions, [seq] * len(positions)))
    new = ctx.full((len(positions), 1, 4), 1.0, ml.DType.F32)
    for layer in range(layers):
        cache.set_layer(layer)
        cache.put(ctx, new, new)
