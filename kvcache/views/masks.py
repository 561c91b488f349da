"""Looking at the mask of the pass under way: who sees what."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.read_plan import plan_read
from kvcache.cache import NotSupportedError, OrderError
from kvcache.caches.causal import CausalCache
from kvcache.caches.recurrent import RecurrentCache
from kvcache.caches.wrapper import WrapperCache
from kvcache.views.caches import check_bound
from kvcache.views.pictures import MaskPicture

__all__ = ["look_at_mask"]


def look_at_mask(cache: Any) -> MaskPicture:
    """The mask that ``get`` gives in the pass under way, read from the cell table: no tensor is made.

    Of a WrapperCache that of the layer type that is set, of a RecurrentCache that of its attention layers.
    Raises OrderError where no pass is under way, NotSupportedError for a cache with no cells.
    """
    cache = _with_cells(cache)
    check_bound(cache)
    forward = cache.pass_under_way()
    if not isinstance(forward, ForwardPass):
        raise OrderError("render: there is no current pass; call start_forward first")
    if forward.reserve:
        raise OrderError("render: the current pass reserves memory and stores nothing; it has no mask yet")
    reading = plan_read(forward.read_table, forward.read_groups, forward.config.cache_padding)
    mask = reading.mask(forward.tokens, forward.lower, forward.lifted, 1)
    queries: list[tuple[int, int]] = [(0, 0)] * forward.tokens
    for group in forward.groups:
        rows = np.arange(forward.tokens)[group.rows].tolist()
        for row, position in zip(rows, group.positions.tolist(), strict=True):
            queries[row] = group.seq, int(position)
    cells = (
        reading.index
        if reading.index is not None
        else np.arange(reading.start, reading.start + reading.length)
    )
    return MaskPicture(type(cache).__name__, mask == 0, tuple(queries), cells.copy())


def _with_cells(cache: Any) -> CausalCache:
    if isinstance(cache, WrapperCache):
        return _with_cells(cache.current)
    if isinstance(cache, RecurrentCache):
        return cache.attention
    if isinstance(cache, CausalCache):
        return cache
    raise NotSupportedError(f"render: {type(cache).__name__} has no mask over cells")
