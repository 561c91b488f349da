"""Entries of layers with states of fixed size."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from kvcache.cache import OrderError
from kvcache.integrations.mlx_lm.layer_cache import BatchState, LayerCache
from kvcache.integrations.mlx_lm.layers import OwnArraysCache, Recurrent
from kvcache.integrations.mlx_lm.locking import waiting
from kvcache.integrations.mlx_lm.passes import ForwardPass
from kvcache.integrations.mlx_lm.rows import BatchRows
from kvcache.integrations.mlx_lm.storage import padded

__all__ = ["ArraysCache", "CompressedCache"]


class ArraysCache(LayerCache, OwnArraysCache):  # type: ignore[misc]
    """The states of a recurrent layer."""

    left_padding = None

    def __init__(self, rows: BatchRows, layer: int, seen: int = 0) -> None:
        super().__init__(rows, layer, seen)
        self._set: tuple[ForwardPass | None, set[int]] = (None, set())
        self._advanced: ForwardPass | None = None

    @property
    def _spec(self) -> Recurrent:
        spec = self._storage.layers[self.layer]
        assert isinstance(spec, Recurrent)
        return spec

    def _join(self, rows: int) -> ForwardPass:
        one = self.rows.live()
        if one is not None and self._seen < self.rows.events - 1:
            self.rows.lengths_for(self._seen)  # says so
        if one is None:
            raise OrderError(
                f"state: layer {self.layer} is set before any entry made a mask, which gives the number of "
                "tokens; call the model that the pool was made for, whose calls announce it"
            )
        if not one.written:  # begun for a mask, before the number of rows was known
            one = self.rows.pass_for(self._seen, one.tokens, rows)
        self._seen = self.rows.events
        return one

    @waiting
    def __getitem__(self, idx: int) -> Any:
        """State ``idx`` of all rows, (rows, *shape); None while nothing is stored. Raises IndexError past the
        last state, which ends a loop over the states, as in mlx-lm.
        """
        count = len(self._spec.shapes)
        if not 0 <= idx < count:
            raise IndexError(f"state {idx} of layer {self.layer}, which has {count}")
        one = self.rows.live()
        if one is None:
            return self._kept(idx)
        known, changed = self._set
        is_set = known is one and idx in changed
        if not any(one.before) and not is_set:
            self._storage.asked_state(self.layer, idx)  # else the cache treats it as skipped in the pass
            return None
        return self._storage.state(self.layer, idx, one, is_set)

    @waiting
    def __setitem__(self, idx: int, value: Any) -> None:
        one = self._join(value.shape[0])
        self._storage.set_state(self.layer, idx, one, value)
        known, changed = self._set
        self._set = (one, {idx, *changed} if known is one else {idx})

    def _kept(self, idx: int) -> Any:
        """The state of every row outside of a pass; 0 for a row without tokens, or with fewer than
        another.
        """
        spec = self._spec
        states = [self._storage.kept_state(self.layer, idx, claim.seq) for claim in self.rows.claimed]
        sizes = [state.shape[1:] for state in states if state is not None]
        if not sizes:
            return None
        whole = tuple(map(max, *sizes)) if len(sizes) > 1 else sizes[0]
        none = mx.zeros((1, *whole), spec.dtypes[idx])
        return mx.concatenate([none if state is None else padded(state, whole) for state in states])

    def advance(self, N: int) -> None:  # noqa: N803
        """Advance the layer by ``N`` columns."""
        self._advanced = self.rows.live()

    @property
    @waiting
    def lengths(self) -> Any:
        """The remaining tokens of each row if right padding follows them; else None. In a pass, only those of
        the pass, since mlx-lm's Mamba 2 would treat more as existing columns.
        """
        one, left = self.rows.live(), self.rows.left
        if left is None:
            return None
        return mx.array(one.counts if one is not None and one is not self._advanced else left)

    @waiting
    def make_mask(self, N: int) -> Any:  # noqa: N803
        """BOOL (rows, N): which columns are tokens; None if all are."""
        return self.rows.pass_for(self._seen, N).valid()

    def is_trimmable(self) -> bool:
        """False, as in mlx-lm: a state cannot be shortened. ``rewind`` goes back to a kept state."""
        return False

    @property
    def batch_size(self) -> int:
        return len(self.rows.claimed)

    @property
    @waiting
    def cache(self) -> list[Any]:
        """All states."""
        self.rows.settle()
        return [self[i] for i in range(len(self._spec.shapes))]

    def saved(self) -> Any:
        """The state that mlx-lm's ArraysCache loads: the states, left padding and lengths."""
        return self.cache, None, None

    @property
    def nbytes(self) -> int:
        spec, rows = self._spec, self.rows
        states = zip(spec.shapes, spec.dtypes, strict=True)
        one = sum(int(np.prod(shape)) * int(dtype.size) for shape, dtype in states)
        return one * sum(claim.seq is not None for claim in rows.claimed)


def _named(name: str) -> Any:
    """A state by name; None if the layer does not have it, or if it is empty."""

    def get(self: CompressedCache) -> Any:
        names = self._spec.names
        state = self[names.index(name)] if name in names else None
        return state if state is None or state.shape[1] else None

    def put(self: CompressedCache, value: Any) -> None:
        self[self._spec.names.index(name)] = value

    return property(get, put)


class CompressedCache(ArraysCache):
    """The entry of a layer of DeepSeek-V4.1: a window of latents, those of closed groups, and an open group.

    It replaces ``LayerCache`` of mlx-lm's deepseek_v41, whose name it has in files. Each part is stored as
    one state.
    """

    window = _named("window")
    compress_kv = _named("compress_kv")
    index_k = _named("index_k")
    pending_kv = _named("pending_kv")
    pending_gate = _named("pending_gate")

    @property
    def window_size(self) -> int:
        return self._spec.shapes[0][0]

    def update_window(self, kv: Any) -> Any:
        """The window (rows, tokens, dim) followed by ``kv``, of which the last ``window_size`` are stored."""
        before = self.window
        window = kv if before is None else mx.concatenate([before, kv], axis=1)
        self.window = window[:, -self.window_size :]
        return window

    def saved(self) -> Any:
        """The state of mlx-lm's LayerCache for one row: five states (None if empty), and the offset."""
        if self.rows.batched:
            return (BatchState(),)
        states = self.window, self.compress_kv, self.index_k, self.pending_kv, self.pending_gate
        return *states, mx.array(self.offset)


CompressedCache.__name__ = "LayerCache"  # the name that save_prompt_cache writes
