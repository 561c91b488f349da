"""Causal caches whose queries see part of the past: a sliding window, or the current chunk."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial

import numpy as np

from kvcache.attention.batch import SequenceTokens
from kvcache.attention.forward_pass import ForwardPass
from kvcache.attention.history import LowerBound
from kvcache.cache import CacheFullError, ExtraShiftFunction, ShiftFunction, check_whole
from kvcache.caches.causal import CausalCache
from kvcache.snapshots.attention import Window

log = logging.getLogger("kvcache")


class SlidingWindowCache(CausalCache):
    """A query sees itself and the ``window`` tokens before it; the last ``memory`` tokens stay stored.

    Positions below ``keep`` also stay stored and visible, permanently: attention sinks (Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", 2023). Positions are not renumbered within the
    window, and no key is re-encoded. mlx-lm's ``RotatingKVCache(max_size, keep)`` corresponds to
    ``window=max_size - keep - 1`` with the same ``keep``::

        keep 2, window 3     position  0 1 2 3 4 5 6 7 8
                             x x . . . x x x x            what the query at 8 sees

    A position below ``keep`` that was removed is not replaced by one that has already been evicted.

    A ``sliding_window`` of W in Hugging Face's configurations is a window of W - 1 here. ``memory`` (at least
    ``window``, its default) is how far back a sequence can be resumed. ``start_forward`` evicts older tokens:
    for sequences in the batch those below (lowest position) - memory, for others those below (last position +
    1) - memory.

    >>> import ml
    >>> from kvcache import Batch, SlidingWindowCache
    >>> cache = SlidingWindowCache(window=2)
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=1, capacity=16, max_batch=4)
    ...     for position in range(6):
    ...         cache.start_forward(ctx, Batch([position], [0]))
    ...         cache.put(ctx, ctx.zeros((1, 1, 4), ml.DType.F32), ctx.zeros((1, 1, 4), ml.DType.F32))
    ...     print(cache.positions(0).tolist())
    ...     cache.close()
    [3, 4, 5]
    """

    def __init__(
        self,
        window: int,
        memory: int | None = None,
        shift: ShiftFunction | None = None,
        *,
        shift_extra: ExtraShiftFunction | None = None,
        keep: int = 0,
    ) -> None:
        super().__init__(shift, shift_extra=shift_extra)
        op = "SlidingWindowCache"
        self.window = window = check_whole(op, "window", window)
        self.keep = keep = check_whole(op, "keep", keep)
        self.memory = check_whole(op, "memory", window if memory is None else memory, least=window)
        self._unlimited = self._warned = False
        self._kept = self.memory
        self._lower = LowerBound(partial(_behind, window), keep)

    def _cells(self) -> int:
        """``max_sequences * (keep + memory) + max_batch``, but no more than all tokens need."""
        # With several sequences, a stop token that the next turn does not repeat must not prevent a resume.
        several = self._max_sequences > 1
        self._kept = max(self.memory, self.window + 1) if several else self.memory
        self._unlimited = self.keep + self._kept >= self._capacity
        if self._unlimited:
            return self._max_sequences * self._capacity
        return self._max_sequences * (self.keep + self._kept) + self._max_batch

    def lower_bound(self) -> LowerBound:
        return self._lower

    def _evictions(self, groups: Iterable[SequenceTokens]) -> list[tuple[int, int, int]]:
        if self._unlimited:
            return []
        lowest = {group.seq: group.lowest for group in groups}
        evictions = []
        for seq, row in self._table.occupied():
            limit = lowest.get(seq, row.last + 1) - self._kept
            begin = row.index(self.keep) if self.keep else 0
            if begin < len(row) and row.positions[begin] < limit:
                evictions.append((seq, self.keep, limit))
        return evictions

    def _go_on_to(self, forward: ForwardPass) -> None:
        super()._go_on_to(forward)
        for group in () if forward.read_only else forward.groups:
            row = self._table.rows[group.seq]
            if row.cut_off and group.lowest and not self._warned:
                self._warned = True
                log.warning(
                    "start_forward: sequence %d continues at position %d, but tokens that its window sees "
                    "are no longer stored since it was cut at %d (can_resume returned False): results differ "
                    "from those of the whole text. Call remove(%d, 0) and compute it again, or set memory=",
                    group.seq, group.lowest, row.cut_off, group.seq,
                )  # fmt: skip
            row.cut_off = 0

    def _full(self, tokens: int) -> CacheFullError:
        if self._unlimited or tokens <= self._max_batch:
            return super()._full(tokens)
        table, limit = self._table, self._max_batch
        remedy = (
            f"evaluate at most max_batch={limit} tokens at a time over all sequences, or init with a larger "
            "max_batch"
        )
        return CacheFullError(tokens, table.unowned, table.held(), remedy=remedy)

    def can_resume(self, seq: int, position: int) -> bool:
        """Whether the whole window before ``position`` is stored, and at least one token."""
        return super().can_resume(seq, position) and self._window().reaches(
            self._table.rows[seq].positions, int(position)
        )

    @property
    def reach(self) -> int | None:
        """How many of a sequence's last tokens can be taken back, whatever passes came between; None: any
        number.
        """
        self._bound("reach")
        return None if self._unlimited else max(0, self._kept - max(self.window, 1))

    @property
    def kept(self) -> int | None:
        """How many of a sequence's last tokens stay stored, in addition to the first ``keep``; None: all."""
        self._bound("kept")
        return None if self._unlimited else self._kept

    def settings(self) -> dict[str, object]:
        sinks = {"keep": self.keep} if self.keep else {}
        return {**super().settings(), "window": self.window, **sinks}

    def _window(self) -> Window:
        return Window(self.window, self._kept, self.keep)


class ChunkedCache(CausalCache):
    """A query sees its own chunk of ``chunk`` positions, up to itself. Nothing is evicted.

    >>> import ml
    >>> from kvcache import Batch, ChunkedCache
    >>> cache = ChunkedCache(chunk=4)
    >>> with ml.open_backend("numpy") as backend, backend.new_context() as ctx:
    ...     cache.init(backend, ml.DType.F32, max_sequences=1, capacity=16, max_batch=8)
    ...     cache.start_forward(ctx, Batch(list(range(6)), [0] * 6))
    ...     cache.put(ctx, ctx.zeros((6, 1, 4), ml.DType.F32), ctx.zeros((6, 1, 4), ml.DType.F32))
    ...     print(cache.visible(0))                  # position 6 sees 4 and 5, and itself once stored
    ...     cache.close()
    2
    """

    def __init__(
        self,
        chunk: int,
        shift: ShiftFunction | None = None,
        *,
        shift_extra: ExtraShiftFunction | None = None,
    ) -> None:
        super().__init__(shift, shift_extra=shift_extra)
        self.chunk = check_whole("ChunkedCache", "chunk", chunk, least=1)
        self._lower = LowerBound(partial(_chunk_of, self.chunk))

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "chunk": self.chunk}

    def lower_bound(self) -> LowerBound:
        return self._lower


def _behind(window: int, positions: np.ndarray) -> np.ndarray:
    return positions - window


def _chunk_of(chunk: int, positions: np.ndarray) -> np.ndarray:
    begins: np.ndarray = positions - positions % chunk
    return begins
