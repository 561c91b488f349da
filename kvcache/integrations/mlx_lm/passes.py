"""One pass of a model over the rows of a prompt cache: which tokens are stored, and where they belong.

mlx-lm feeds a rectangle (rows, tokens), with rows padded on the left or on the right. Padding is never
stored: a row's tokens are its columns ``[begin, begin + count)``::

    left padding 2, 0      right padding 1, 0
    . . a b                a b c .
    c d e f                d e f g
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kvcache import CausalCache, SlidingWindowCache
from kvcache.cache import Batch
from kvcache.integrations.rows.caches import batch_of_rows

__all__ = ["ForwardPass"]


@dataclass(slots=True, eq=False)
class ForwardPass:
    """A pass of ``tokens`` columns; row i has ``before[i]`` tokens and adds ``counts[i]``."""

    tokens: int
    before: list[int]
    begins: list[int]
    counts: list[int]
    sequences: list[int | None] = field(default_factory=list)
    """The sequence of each row; None for a row without one that adds nothing."""
    written: bool = False
    undone: bool = False
    by_position: bool = True
    """Whether the columns of the pass's masks are in the order of positions."""
    readings: dict[int, Any] = field(default_factory=dict)
    """By cache, how several rows are read; made on first use."""
    masks: list[tuple[Any, CausalCache, int | None]] = field(default_factory=list)
    """The masks made for the pass: mask, cache, and the number of tokens visible before a query."""
    attends: dict[int, bool] = field(default_factory=dict)
    """By cache, whether its ``attend`` reads less than the arrays of all rows."""
    _columns: Any = None

    @property
    def rows(self) -> int:
        return len(self.before)

    @property
    def is_full(self) -> bool:
        """Whether every column is a token, in every row."""
        return min(self.counts) == self.tokens

    @property
    def active(self) -> list[int]:
        """The rows that add tokens."""
        return [row for row, count in enumerate(self.counts) if count]

    @property
    def after(self) -> list[int]:
        return [length + count for length, count in zip(self.before, self.counts, strict=True)]

    def batch(self) -> Batch:
        """The tokens that are stored, row by row."""
        return batch_of_rows(self.sequences, self.before, self.counts)

    def stored(self, x: Any) -> Any:
        """The tokens to store from an array (rows, heads, tokens, dim), as (batch, heads, dim)."""
        rows, heads, tokens, dim = x.shape
        if tokens == 1 and self.is_full:
            return x.reshape(rows, heads, dim)
        flat = mx.transpose(x, (0, 2, 1, 3)).reshape(rows * tokens, heads, dim)
        if self.is_full:
            return flat
        if self._columns is None:
            chosen = [
                np.arange(begin, begin + count) + row * tokens
                for row, (begin, count) in enumerate(zip(self.begins, self.counts, strict=True))
            ]
            self._columns = mx.array(np.concatenate(chosen).astype(np.int32))
        return flat[self._columns]

    def given_back(self, x: Any) -> Any:
        """The inverse of ``stored``: (batch, heads, dim) as (rows, heads, tokens, dim), with 0 in padding."""
        heads, dim = x.shape[1:]
        if not self.is_full:
            whole = mx.zeros((self.rows * self.tokens, heads, dim), x.dtype)
            whole[self._columns] = x
            x = whole
        return mx.transpose(x.reshape(self.rows, self.tokens, heads, dim), (0, 2, 1, 3))

    def shows(self, mask: Any, cache: CausalCache) -> bool:
        """Whether a mask was made for ``cache``, and hides exactly what the cache hides itself."""
        own = cache.window if isinstance(cache, SlidingWindowCache) else None
        return any(
            (made is mask or (isinstance(mask, str) and made == mask))
            and of is cache
            and window in (None, own)
            for made, of, window in self.masks
        )

    def positions(self) -> np.ndarray:
        """(rows, tokens): the position of each column; for padding, that of the nearest token."""
        columns = np.arange(self.tokens)[None, :] - np.array(self.begins)[:, None]
        counts = np.array(self.counts)[:, None]
        nearest = np.where(counts > 0, np.clip(columns, 0, np.maximum(counts - 1, 0)), -1)
        return np.array(self.before)[:, None] + nearest

    def valid(self) -> Any:
        """BOOL (rows, tokens): which columns are tokens; None if all are."""
        if self.is_full:
            return None
        columns = np.arange(self.tokens)[None, :]
        begins, counts = np.array(self.begins)[:, None], np.array(self.counts)[:, None]
        return mx.array((columns >= begins) & (columns < begins + counts))
