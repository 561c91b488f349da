"""The interface that mlx-lm's loops require of every entry of a prompt cache: trimming, copying, batching.
The entries' classes have the same names as mlx-lm's: ``save_prompt_cache`` writes the name of a class with
its ``state``, so mlx-lm can load the file.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import numpy as np

from kvcache.cache import InvalidRangeError, NotSupportedError
from kvcache.integrations.mlx_lm.layers import OwnCacheList
from kvcache.integrations.mlx_lm.locking import waiting
from kvcache.integrations.mlx_lm.rows import BatchRows, left_behind
from kvcache.integrations.mlx_lm.storage import Storage

__all__ = ["BatchState", "CacheList", "LayerCache"]


def _not_made(cls: type, state: Any) -> Any:
    raise NotSupportedError(
        f"state: a {cls.__name__} of a CachePool is not made from one; adopt(prompt_cache, pool) converts a "
        "prompt cache of mlx-lm, load_prompt_cache(file, pool) loads a saved one"
    )


def _state(entry: Any) -> Any:
    with entry.rows.pool.lock:
        return entry.saved()


_STATE = property(
    _state,
    lambda entry, state: _not_made(type(entry), state),
    doc="The state that ``save_prompt_cache`` reads and mlx-lm's class of the same name loads; read-only.",
)


class LayerCache:
    """One layer of a prompt cache. All layers of a prompt cache share its ``BatchRows``."""

    state = _STATE
    from_state: Any = classmethod(_not_made)

    def __init__(self, rows: BatchRows, layer: int, seen: int = 0) -> None:
        self.rows = rows
        self.layer = layer
        self._seen = seen

    @waiting
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An independent prompt cache that shares the stored tokens until one of the two is written."""
        rows = copy.deepcopy(self.rows, memo)  # settles the current pass
        return type(self)(rows, self.layer, min(0, self._seen - self.rows.events))

    @property
    def _storage(self) -> Storage:
        return self.rows.pool.storage

    # Stored tokens.

    @property
    @waiting
    def offset(self) -> Any:
        """The number of stored tokens; an array with one number per row for a batch."""
        lengths = self.rows.lengths_for(self._seen)
        if not self.rows.batched or self._storage.one_length:
            return lengths[0]
        padding = self.rows.padding_for(self._seen)
        return mx.array([length - skip for length, skip in zip(lengths, padding, strict=True)])

    @waiting
    def size(self) -> int:
        """The tokens of the longest row."""
        return max(self.rows.lengths_for(self._seen))

    @property
    def size_seen(self) -> int:
        """The tokens of the longest row as this layer has seen it, if a pass failed midway."""
        rows = self.rows
        return max(rows.lengths if self._seen == rows.events else rows.before)

    @property
    def is_behind(self) -> bool:
        """Whether the other entries made a change that this one missed."""
        return self._seen != self.rows.events

    def catch_up(self) -> None:
        """Mark the other entries' changes as seen; the caller repairs the content."""
        self._seen = self.rows.events

    @waiting
    def check_whole(self, op: str) -> None:
        """Raise OrderError if this entry is behind, after settling the current pass."""
        self.rows.settle()
        if self.is_behind:
            raise left_behind(op)

    @waiting
    def empty(self) -> bool:
        return not any(self.rows.lengths_for(self._seen))

    def __repr__(self) -> str:
        tokens = ", ".join(map(str, self.rows.lengths)) or "0"
        return f"<{type(self).__name__} of ml-kvcache, layer {self.layer}, tokens of each row: {tokens}>"

    # Changing rows.

    @waiting
    def _do(self, name: str, *arguments: Any) -> Any:
        change = getattr(self.rows, name)
        result = self.rows.do(self._seen, (name, *arguments), lambda: change(*arguments))
        self._seen = self.rows.events
        return result

    def trim(self, n: int) -> int:
        """Remove the last ``n`` tokens; returns the number removed. Raises NotSupportedError if
        impossible.
        """
        count: int = self._do("trim", int(n))
        return count

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row. Raises NotSupportedError if impossible."""
        self._do("cut", (length,) * len(self.rows.claimed))

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows."""
        self._do("filter", _rows("filter", batch_indices))

    @waiting
    def extend(self, other: LayerCache) -> None:
        """Add the rows of ``other``, sharing their stored tokens."""
        rows = other.rows
        other.check_whole("extend")
        # By identity: an event that refers to the rows would keep their claims alive.
        self.rows.do(self._seen, ("extend", id(rows)), lambda: self.rows.extend(rows))
        self._seen = self.rows.events

    def prepare(self, lengths: Any = None, left_padding: Any = None, right_padding: Any = None) -> None:
        """Announce padding, which the model computes but which is never stored."""
        padded = right_padding is None or max(_integers(right_padding)) > 0
        kept = _integers(lengths) if lengths is not None and padded else None
        self._do("prepare", kept, None if left_padding is None else _integers(left_padding))

    def finalize(self) -> None:
        """End the padding of prompts."""
        self._do("finalize")

    @waiting
    def extract(self, idx: int) -> Self:
        """One row as an independent entry, sharing the stored tokens."""
        (idx,), rows = _rows("extract", [idx]), self.rows
        self.check_whole("extract")
        return type(self)(rows.derived("extract", (idx,), self.layer, lambda: rows.extract(idx)), self.layer)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """The rows of several entries as one batch; the entries are unchanged."""
        several = [entry.rows for entry in caches if isinstance(entry, LayerCache)]
        if len(several) != len(caches):
            raise InvalidRangeError(
                "merge: some prompt caches are mlx-lm's own; those in one batch must come from one CachePool"
            )
        first = several[0]
        with first.pool.lock:
            for entry in caches:
                entry.check_whole("merge")
            of = tuple((id(rows), rows.events) for rows in several)
            made = first.derived("merge", of, caches[0].layer, lambda: BatchRows.merge(several))
            return cls(made, caches[0].layer)


class CacheList(OwnCacheList):  # type: ignore[misc]
    """An entry of several entries, for layers with attention and states, or with attention twice."""

    state = _STATE
    from_state: Any = classmethod(_not_made)

    @property
    def rows(self) -> BatchRows:
        """The rows shared by all entries of the prompt cache."""
        rows: BatchRows = self.caches[0].rows
        return rows

    def saved(self) -> Any:
        return [(entry.state, type(entry).__name__) for entry in self.caches]

    def extract(self, idx: int) -> Self:
        """One row as an independent entry, sharing the stored tokens."""
        return type(self)(*(entry.extract(idx) for entry in self.caches))


class BatchState:
    """Marks the state of a batch; ``save_prompt_cache`` refuses it, naming this class."""

    def __repr__(self) -> str:
        return "a batch of rows, of which one is saved at a time: extract(row) gives its entries"


def _integers(values: Any) -> tuple[int, ...]:
    if isinstance(values, mx.array):
        values = values.tolist()
    return tuple([int(value) for value in values])


def _rows(op: str, rows: Any) -> tuple[int, ...]:
    """Row numbers; negative ones count from the end. A BOOL mask is refused, as by mlx-lm's own entries."""
    numbers: Any = rows.tolist() if isinstance(rows, mx.array) else list(rows)
    for row in numbers:
        if isinstance(row, bool | np.bool_):
            raise InvalidRangeError(f"{op}: {row!r:.20} for a row; give the numbers of the rows, not a mask")
    return _integers(numbers)
