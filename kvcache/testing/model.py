"""The specification of the attention caches as a plain dict: (sequence, position) -> token.

Written from the contract, and sharing no code with the caches. One token is one cell, however many
sequences hold it; what is refused raises the error that the cache has to raise, changing nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import kvcache
import ml
from kvcache.testing.values import shift_positions
from ml import DType

__all__ = ["Model", "Setup"]

Held = list[dict[int, int]]


@dataclass(frozen=True)
class Setup:
    """How a cache is made. At most one of ``window`` and ``chunk`` is given."""

    window: int | None = None
    memory: int | None = None
    chunk: int | None = None
    max_sequences: int = 2
    capacity: int = 16
    max_batch: int = 8
    dtype: DType = DType.F32
    config: ml.CacheConfig = field(default_factory=ml.CacheConfig)
    layers: int = 1
    can_shift: bool = True

    def make(self, backend: ml.Backend) -> kvcache.CausalCache:
        """A cache like that, bound to ``backend``."""
        cache = self.unbound()
        cache.set_config(self.config)
        cache.init(backend, self.dtype, self.max_sequences, self.capacity, self.max_batch)
        return cache

    def unbound(self) -> kvcache.CausalCache:
        shift = shift_positions if self.can_shift else None
        if self.window is not None:
            return kvcache.SlidingWindowCache(self.window, self.memory, shift)
        if self.chunk is not None:
            return kvcache.ChunkedCache(self.chunk, shift)
        return kvcache.CausalCache(shift)

    @property
    def kept(self) -> int | None:
        """How many past positions stay stored; None: all of them."""
        if self.window is None:
            return None
        memory = self.window if self.memory is None else self.memory
        if self.max_sequences > 1:
            memory = max(memory, self.window + 1)
        return None if memory >= self.capacity else memory

    @property
    def cells(self) -> int:
        if self.kept is None:
            cells = self.max_sequences * self.capacity
        else:
            cells = self.max_sequences * self.kept + self.max_batch
        while cells % self.config.cache_padding:
            cells += 1
        return cells


class Model:
    """What a cache made by ``setup`` holds, answers and refuses."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.tokens: Held = [{} for _ in range(setup.max_sequences)]
        self.lost: set[int] = set()
        """Sequences that a device failure took; tests that make one say so."""

    # Figures.

    def held(self) -> dict[int, int]:
        return _held(self.tokens)

    def free(self) -> int:
        return self.setup.cells - len(_used(self.tokens))

    def last(self, seq: int) -> int:
        return max(self.tokens[seq], default=-1)

    def can_resume(self, seq: int, position: int) -> bool:
        return seq not in self.lost and self._resumes(self.tokens[seq], position)

    def _resumes(self, row: dict[int, int], position: int) -> bool:
        window = self.setup.window
        if window is None:
            return True
        return bool(row) and max(0, position - window) >= min(row) and position <= max(row) + 1

    def visible(self, seq: int, position: int, lifted: bool = False) -> dict[int, int]:
        """position -> token of what a query attends to."""
        lowest = 0
        if self.setup.window is not None:
            lowest = position - self.setup.window
        if self.setup.chunk is not None:
            lowest = position - position % self.setup.chunk
        row = self.tokens[seq]
        return {p: token for p, token in row.items() if p >= lowest and (p <= position or lifted)}

    # Changes.

    def start(self, positions: Sequence[int], sequences: Sequence[int], tokens: Sequence[int]) -> None:
        self._check(positions, sequences)
        kept = self._evicted(positions, sequences)
        free = self.setup.cells - len(_used(kept))
        if len(positions) > free:
            raise kvcache.CacheFullError(len(positions), free, _held(kept))
        self.tokens = kept
        for position, seq, token in zip(positions, sequences, tokens, strict=True):
            self.tokens[seq][position] = token

    def _check(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        pairs = list(zip(sequences, positions, strict=True))
        wrong = not pairs or len(set(pairs)) < len(pairs)
        for seq, position in pairs:
            wrong = wrong or position < 0 or not 0 <= seq < self.setup.max_sequences
            wrong = wrong or position in self.tokens[seq]
        if wrong:
            raise kvcache.InvalidBatchError(f"{pairs}")
        if self.lost.intersection(sequences):
            raise kvcache.SequenceLostError(f"{self.lost}")

    def _evicted(self, positions: Sequence[int], sequences: Sequence[int]) -> Held:
        if self.setup.kept is None:
            return [dict(row) for row in self.tokens]
        kept = []
        for seq, row in enumerate(self.tokens):
            mine = [p for p, s in zip(positions, sequences, strict=True) if s == seq]
            lowest = (min(mine) if mine else self.last(seq) + 1) - self.setup.kept
            kept.append({p: token for p, token in row.items() if p >= lowest})
        return kept

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        if src in self.lost:
            raise kvcache.SequenceLostError(f"{src}")
        self.lost.discard(dst)
        self.tokens[dst] = {p: token for p, token in self.tokens[src].items() if p < length}

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        if begin < 0 or (end is not None and end < begin):
            raise kvcache.InvalidRangeError(f"[{begin}, {end})")
        row = self.tokens[seq]
        distance = 0 if end is None else end - begin
        moving = [token for p, token in row.items() if end is not None and p >= end]
        left = {p: token for p, token in row.items() if p < begin}
        if end is not None:
            left |= {p - distance: token for p, token in row.items() if p >= end}
        if left and seq in self.lost:
            raise kvcache.SequenceLostError(f"{seq}")
        if moving and distance:
            self._check_move(seq, moving, left)
        self.lost.discard(seq)
        self.tokens[seq] = left

    def _check_move(self, seq: int, moving: Collection[int], left: dict[int, int]) -> None:
        others = {token for s, row in enumerate(self.tokens) if s != seq for token in row.values()}
        if not self.setup.can_shift or others.intersection(moving) or not self._resumes(left, max(left) + 1):
            raise kvcache.NotSupportedError(f"sequence {seq}: {len(moving)} tokens cannot move")


def _used(tokens: Held) -> set[int]:
    return {token for row in tokens for token in row.values()}


def _held(tokens: Held) -> dict[int, int]:
    return {seq: len(row) for seq, row in enumerate(tokens) if row}
