"""Masks over the K and V that an entry returns. One row is returned in the order of its cells, with a mask;
several rows are returned in the order of positions, where each query sees a range of columns.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

import ml
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.history import History, LowerBound, kept_entries
from kvcache.cache import Mask, NotSupportedError, OrderError, check_thread
from kvcache.integrations.rows.dense_batch import DenseBatch

__all__ = ["read_positions", "seen_beside_kept", "visible_columns", "visible_mask"]


class CellCache(Protocol):
    """A cache with cells that exposes its current pass and how far back its queries see."""

    def lower_bound(self) -> LowerBound | None:
        """The lowest visible position as a function of the query's position; None: 0."""

    def pass_under_way(self) -> ForwardPass | None:
        """The pass begun by the last ``start_forward``; None if it has ended."""


def visible_columns(
    cache: CellCache, reading: DenseBatch, positions: np.ndarray, window: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The half-open range of columns that each query at ``positions`` (sequences, tokens) sees. The cache's
    own window or chunk applies; ``window`` limits it to that many tokens before the query. Raises
    NotSupportedError if ``keep`` makes it two ranges.
    """
    lower = _narrowed(cache.lower_bound(), window)
    stop = np.empty_like(positions)
    first = np.zeros_like(positions)
    for i, row in enumerate(reading.rows):
        stored = row.positions
        stop[i] = np.searchsorted(stored, positions[i], side="right")
        if lower is not None:
            first[i] = np.searchsorted(stored, lower(positions[i]))
            first[i][first[i] <= kept_entries(row, lower)] = 0
    if lower is not None and lower.keep and first.any():
        raise NotSupportedError(
            f"make_mask: a query sees its window and the first {lower.keep} tokens, which is not one range "
            "of columns; use attend or get, or a cache without keep"
        )
    return first, stop


def visible_mask(cache: CellCache, ctx: ml.Context, window: int | None = None) -> Mask | np.ndarray:
    """The mask of the current pass over the rows of ``get``; available before ``put``. None if everything is
    visible, ``ml.CAUSAL`` if equivalent, else BOOL (tokens, history) on the host. ``window`` limits it to
    that many tokens before each query.
    """
    forward, reading = _shared("visible_mask", cache, ctx)
    lower, lifted = _narrowed(forward.reading.lower, window), forward.reading.lifted
    elided = reading.elided(lower, lifted)
    if not isinstance(elided, bool):
        return elided
    seen: np.ndarray = reading.mask(forward.tokens, lower, lifted, 1) == 0
    return seen


def read_positions(cache: CellCache, ctx: ml.Context) -> np.ndarray:
    """The positions (history,) of the rows that ``get`` returns in the current pass, for one sequence; -1 for
    other sequences' cells. Available before ``put``. Raises OrderError without a pass.
    """
    _, reading = _shared("read_positions", cache, ctx)
    positions = np.full(reading.length, -1)
    for row, columns in zip(reading.rows, reading.columns, strict=True):
        positions[np.arange(columns, columns + len(row)) if isinstance(columns, int) else columns] = (
            row.positions
        )
    return positions


def _shared(op: str, cache: CellCache, ctx: ml.Context) -> tuple[ForwardPass, History]:
    """The current pass, and what ``get`` reads in it."""
    forward = cache.pass_under_way()
    if forward is None:
        raise OrderError(f"{op}: there is no current pass; call start_forward first")
    check_thread(op, forward.thread)
    forward.fill(ctx)
    return forward, forward.reading.shared(ctx)[0]


def _narrowed(lower: LowerBound | None, window: int | None) -> LowerBound | None:
    if window is None:
        return lower
    if lower is None:
        return LowerBound(lambda positions: positions - window)
    return LowerBound(lambda positions: np.maximum(lower(positions), positions - window), lower.keep)


def seen_beside_kept(
    read: np.ndarray, queries: np.ndarray, before: int, max_size: int, keep: int
) -> np.ndarray:
    """BOOL (queries, read): which of the positions ``read`` (-1: no token) queries at ``queries`` see. The
    first tokens stay visible as in mlx-lm's RotatingKVCache(max_size, keep). ``before`` is the number of
    tokens before the pass. The positions may be in any order, and include more than mlx-lm's cache stores.

    In mlx-lm, a pass of several tokens reads the first ``keep`` tokens, the last ``max_size - 1 - keep``
    before it and its own, in this order, and a query sees the last ``max_size`` of these columns up to
    itself. So later queries of a pass do not see the first tokens, but the next pass does; the last token of
    a prompt, which ``generate`` evaluates separately, sees them. ``max_size`` 7, ``keep`` 2, the tokens at 20
    to 23::

        column    0  1  2  3  4  5  6  7  8  9
        position  0  1 16 17 18 19 20 21 22 23
        at 20     x  x  x  x  x  x  x                 as a pass of one token
        at 21     .  x  x  x  x  x  x  x
        at 23     .  .  .  x  x  x  x  x  x  x

    Source: mlx_lm/models/cache.py (``_update_concat``, ``make_mask``) of mlx-lm 0.32.2.
    """
    lowest = max(keep, before - (max_size - 1 - keep))
    there = (read >= lowest) | ((read >= 0) & (read < keep))
    columns, own = (np.where(x < keep, x, x - lowest + keep) for x in (read, queries[:, None]))
    seen: np.ndarray = there & (columns <= own) & (columns > own - max_size)
    return seen
