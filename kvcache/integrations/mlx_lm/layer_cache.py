"""What mlx-lm's loops ask of every entry of a prompt cache: rows that are trimmed, copied, batched.

The classes of entries carry the names of mlx-lm's own, whose place they take: ``save_prompt_cache``
writes the name of a class beside its ``state``, so that mlx-lm can load what is saved here.
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
        f"state: a {cls.__name__} of a CachePool is not made from one; adopt(prompt_cache, pool) takes over "
        "a prompt cache of mlx-lm's, load_prompt_cache(file, pool) one that was saved"
    )


def _state(entry: Any) -> Any:
    with entry.rows.pool.lock:
        return entry.saved()


_STATE = property(
    _state,
    lambda entry, state: _not_made(type(entry), state),
    doc="What ``save_prompt_cache`` reads, and mlx-lm's class of the same name loads; nobody sets it.",
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
        """A prompt cache of its own that shares what is stored, until one of the two goes on."""
        rows = copy.deepcopy(self.rows, memo)  # which settles what is under way
        return type(self)(rows, self.layer, min(0, self._seen - self.rows.events))

    @property
    def _storage(self) -> Storage:
        return self.rows.pool.storage

    # What is stored.

    @property
    @waiting
    def offset(self) -> Any:
        """How many tokens are stored: a number, or an array of one for each row of a batch."""
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
        """The tokens of the longest row in which this layer has part, after a pass that failed half way."""
        rows = self.rows
        return max(rows.lengths if self._seen == rows.events else rows.before)

    @property
    def is_behind(self) -> bool:
        """Whether the other entries did something that this one had no part in."""
        return self._seen != self.rows.events

    def catch_up(self) -> None:
        """Take what the other entries did as done here too; for whoever then makes it good."""
        self._seen = self.rows.events

    @waiting
    def check_whole(self, op: str) -> None:
        """Raise OrderError for an entry that is behind, once what is under way is settled."""
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
        """Forget the last ``n`` tokens; returns how many went. NotSupportedError where it cannot be done."""
        count: int = self._do("trim", int(n))
        return count

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row; NotSupportedError where it cannot be done."""
        self._do("cut", (length,) * len(self.rows.claimed))

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows."""
        self._do("filter", _rows("filter", batch_indices))

    @waiting
    def extend(self, other: LayerCache) -> None:
        """Add the rows of ``other``, sharing what is stored."""
        rows = other.rows
        other.check_whole("extend")
        # By identity: an event that held the rows themselves would keep their claims alive.
        self.rows.do(self._seen, ("extend", id(rows)), lambda: self.rows.extend(rows))
        self._seen = self.rows.events

    def prepare(self, lengths: Any = None, left_padding: Any = None, right_padding: Any = None) -> None:
        """Announce that rows are padded: the padding is computed, and never stored."""
        padded = right_padding is None or max(_integers(right_padding)) > 0
        kept = _integers(lengths) if lengths is not None and padded else None
        self._do("prepare", kept, None if left_padding is None else _integers(left_padding))

    def finalize(self) -> None:
        """The padded prompts are done."""
        self._do("finalize")

    @waiting
    def extract(self, idx: int) -> Self:
        """One row as an entry of its own, sharing what is stored."""
        (idx,), rows = _rows("extract", [idx]), self.rows
        self.check_whole("extract")
        return type(self)(rows.derived("extract", (idx,), self.layer, lambda: rows.extract(idx)), self.layer)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """The rows of several as one batch; they stay as they are."""
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
    """An entry of several of ours, for layers that have attention beside states, or twice."""

    state = _STATE
    from_state: Any = classmethod(_not_made)

    @property
    def rows(self) -> BatchRows:
        """Those of all entries of the prompt cache."""
        rows: BatchRows = self.caches[0].rows
        return rows

    def saved(self) -> Any:
        return [(entry.state, type(entry).__name__) for entry in self.caches]

    def extract(self, idx: int) -> Self:
        """One row as an entry of its own, sharing what is stored."""
        return type(self)(*(entry.extract(idx) for entry in self.caches))


class BatchState:
    """Stands in the state of a batch; ``save_prompt_cache`` refuses it by name."""

    def __repr__(self) -> str:
        return "a batch of rows, of which one is saved at a time: extract(row) gives its entries"


def _integers(values: Any) -> tuple[int, ...]:
    if isinstance(values, mx.array):
        values = values.tolist()
    return tuple([int(value) for value in values])


def _rows(op: str, rows: Any) -> tuple[int, ...]:
    """Numbers of rows, those below 0 from the end. A mask of BOOL is refused, as mlx-lm's own entries do."""
    found: Any = rows.tolist() if isinstance(rows, mx.array) else list(rows)
    for row in found:
        if isinstance(row, bool | np.bool_):
            raise InvalidRangeError(f"{op}: {row!r:.20} for a row; give the numbers of the rows, not a mask")
    return _integers(found)
