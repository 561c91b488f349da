"""The specification of the attention caches as a plain dict: (sequence, position) -> token.

Written from the contract; it shares no code with the caches. A token is one cell, however many sequences
share it; a token restored into other cells counts as a new one with the same content. A refused call raises
the error that the cache must raise, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import kvcache
import ml
from kvcache.storage.formats import CacheFormat
from kvcache.testing.models import values
from kvcache.testing.models.declared import skip_undeclared
from kvcache.testing.models.values import Encoding, shift_extras
from ml import DType

Held = list[dict[int, int]]
_AGAIN = 1 << 20
"""Added to a token's number for each further copy in other cells."""


@dataclass(frozen=True)
class Setup:
    """The parameters of a cache. At most one of ``window`` and ``chunk`` is given."""

    window: int | None = None
    memory: int | None = None
    chunk: int | None = None
    max_sequences: int = 2
    capacity: int = 16
    max_batch: int = 8
    dtype: kvcache.CacheDType = DType.F32
    activations: DType = DType.F32
    """The dtype of the tensors put, in which a quantized cache computes."""
    config: ml.CacheConfig = field(default_factory=ml.CacheConfig)
    layers: int = 1
    can_shift: bool = True
    latent: bool = False
    """Whether a layer's values are a part of its keys."""
    extra: bool = False
    """Whether layers store more than K and V."""
    keep: int = 0
    """The first positions that a window keeps."""

    def make(self, backend: ml.Backend) -> kvcache.CausalCache:
        """A cache with these parameters, bound to ``backend``."""
        skip_undeclared(backend, self.dtype)
        cache = self.unbound()
        cache.set_config(self.config)
        cache.init(backend, self.dtype, self.max_sequences, self.capacity, self.max_batch)
        return cache

    def unbound(self) -> kvcache.CausalCache:
        shift = self.encoding.shift_positions if self.can_shift else None
        more = shift_extras if self.can_shift and self.extra else None
        if self.window is not None:
            return kvcache.SlidingWindowCache(
                self.window, self.memory, shift, shift_extra=more, keep=self.keep
            )
        if self.chunk is not None:
            return kvcache.ChunkedCache(self.chunk, shift, shift_extra=more)
        return kvcache.CausalCache(shift, shift_extra=more)

    @property
    def encoding(self) -> Encoding:
        """An encoding of tokens that the cache's dtype represents exactly."""
        return values.encoding(self.dtype, self.latent)

    @property
    def computed(self) -> DType:
        """The dtype that ``get`` returns."""
        return CacheFormat.of(self.dtype).plain or self.activations

    @property
    def kept(self) -> int | None:
        """The number of past positions that stay stored; None: all."""
        return None if self.window is None or self.keep + self.reach >= self.capacity else self.reach

    @property
    def reach(self) -> int:
        """The number of past positions that a sequence with a window may need; 0 without a window."""
        if self.window is None:
            return 0
        memory = self.window if self.memory is None else self.memory
        return max(memory, self.window + 1) if self.max_sequences > 1 else memory

    @property
    def cells(self) -> int:
        if self.kept is None:
            cells = self.max_sequences * self.capacity
        else:
            cells = self.max_sequences * (self.keep + self.kept) + self.max_batch
        while cells % self.config.cache_padding:
            cells += 1
        return cells


@dataclass(frozen=True)
class Copy:
    """The content of a snapshot: position -> token within ``[begin, end)``."""

    begin: int
    end: int
    tokens: dict[int, int]
    of: tuple[int, int] | None = None
    """The window of its cache, and ``keep``; None without a window."""

    @property
    def whole(self) -> bool:
        return self.of is not None


class Model:
    """The content, results and refusals of a cache with these parameters."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.tokens: Held = [{} for _ in range(setup.max_sequences)]
        self.lost: set[int] = set()
        """Sequences lost by a device failure; tests that cause one set it."""
        self.again = 0

    # Queries.

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
        if not row or position > max(row) + 1:
            return False
        lowest, keep = max(0, position - window), self.setup.keep
        if not keep:
            return lowest >= min(row)
        slid = min((p for p in row if p >= keep), default=keep)
        return position <= keep or max(lowest, keep) >= slid

    def visible(self, seq: int, position: int, lifted: bool = False) -> dict[int, int]:
        """position -> token for everything that a query attends to."""
        lowest = 0
        if self.setup.window is not None:
            lowest = position - self.setup.window
        if self.setup.chunk is not None:
            lowest = position - position % self.setup.chunk
        row = self.tokens[seq]
        return {
            p: token % _AGAIN
            for p, token in row.items()
            if (p >= lowest or p < self.setup.keep) and (p <= position or lifted)
        }

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

    def read(self, positions: Sequence[int], sequences: Sequence[int]) -> None:
        """Check a read-only pass."""
        self._check(positions, sequences, read_only=True)

    def _check(self, positions: Sequence[int], sequences: Sequence[int], read_only: bool = False) -> None:
        pairs = list(zip(sequences, positions, strict=True))
        wrong = not pairs or len(set(pairs)) < len(pairs)
        for seq, position in pairs:
            wrong = wrong or position < 0 or not 0 <= seq < self.setup.max_sequences
            wrong = wrong or (not self.visible(seq, position) if read_only else position in self.tokens[seq])
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
            kept.append({p: token for p, token in row.items() if p >= lowest or p < self.setup.keep})
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

    def evict(self, seq: int, positions: Sequence[int]) -> None:
        if any(p < 0 or p >= self.last(seq) for p in positions):
            raise kvcache.InvalidRangeError(f"{positions} of {self.last(seq)}")
        if seq in self.lost:
            raise kvcache.SequenceLostError(f"{seq}")
        self.tokens[seq] = {p: token for p, token in self.tokens[seq].items() if p not in positions}

    def defrag(self, sequences: Sequence[int] | None) -> None:
        if self.lost.intersection(sequences or ()):
            raise kvcache.SequenceLostError(f"{self.lost}")

    def _check_move(self, seq: int, moving: Collection[int], left: dict[int, int]) -> None:
        others = {token for s, row in enumerate(self.tokens) if s != seq for token in row.values()}
        if not self.setup.can_shift or others.intersection(moving) or not self._resumes(left, max(left) + 1):
            raise kvcache.NotSupportedError(f"sequence {seq}: {len(moving)} tokens cannot move")

    # Snapshots.

    def snapshot(self, seq: int, begin: int, end: int | None) -> Copy:
        row, offset = self.tokens[seq], self.last(seq) + 1
        end = offset if end is None else end
        if not 0 <= begin <= end <= offset:
            raise kvcache.InvalidRangeError(f"[{begin}, {end}) of {offset}")
        if seq in self.lost:
            raise kvcache.SequenceLostError(f"{seq}")
        if self.setup.window is None:
            if end and end - 1 not in row:
                raise kvcache.NotSupportedError(f"{seq} at {end}, in a gap")
            return Copy(begin, end, {p: token for p, token in row.items() if begin <= p < end})
        before = {p: token for p, token in row.items() if p < end}
        if end and not self._resumes(before, end):
            raise kvcache.NotSupportedError(f"{seq} at {end}")
        kept = {p: token for p, token in before.items() if self._is_held(p, end)}
        return Copy(0, end, kept, (self.setup.window, self.setup.keep))

    def restore(self, seq: int, copy: Copy, target: int | None, shared: bool) -> bool:
        """Restore a snapshot; returns whether it was possible. ``shared``: it is still in the cache, so its
        cells are reused.
        """
        end = copy.end if target is None else target
        row = self.tokens[seq]
        content = {p: token for p, token in copy.tokens.items() if p < end}
        if not copy.begin <= end <= copy.end or (seq in self.lost and copy.begin):
            return False
        if end > copy.begin and end - 1 not in content:
            return False
        if any(p not in row for p in range(copy.begin)):
            return False
        if copy.whole and end and not self._finds(content, end, copy.of):
            return False
        if self.setup.window is not None:
            content = {p: token for p, token in content.items() if self._is_held(p, end)}
        left = {p: token for p, token in row.items() if p < copy.begin}
        if not shared:
            remaining = [*self.tokens[:seq], left, *self.tokens[seq + 1 :]]
            free = self.setup.cells - len(_used(remaining))
            if len(content) > free:
                raise kvcache.CacheFullError(len(content), free, _held(remaining))
            self.again += 1
            content = {p: token % _AGAIN + self.again * _AGAIN for p, token in content.items()}
        self.tokens[seq] = left | content
        self.lost.discard(seq)
        return True

    def _is_held(self, position: int, end: int) -> bool:
        """Whether a snapshot at ``end`` contains ``position``, if stored."""
        return position >= end - max(self.setup.reach, 1) or position < self.setup.keep

    def _finds(self, content: dict[int, int], end: int, of: tuple[int, int] | None) -> bool:
        """Whether everything that a token at ``end`` sees is stored, except what was evicted explicitly."""
        window, keep = self.setup.window, self.setup.keep
        assert window is not None
        if of == (window, keep):
            return self._resumes(content, end)
        return all(p in content for p in range(end) if p < keep or p >= end - window)

    def split(self, copy: Copy, at: int) -> tuple[Copy | None, Copy]:
        if not copy.begin <= at <= copy.end:
            raise kvcache.InvalidRangeError(f"{at} of [{copy.begin}, {copy.end})")
        if copy.whole or at == copy.begin:
            return None, copy
        first = {p: token for p, token in copy.tokens.items() if p < at}
        second = {p: token for p, token in copy.tokens.items() if p >= at}
        return Copy(copy.begin, at, first), Copy(at, copy.end, second)

    def merge(self, parent: Copy, child: Copy) -> Copy:
        if child.whole:
            return child
        if parent.end != child.begin:
            raise kvcache.InvalidRangeError(f"[{parent.begin}, {parent.end}) [{child.begin}, {child.end})")
        return Copy(parent.begin, child.end, parent.tokens | child.tokens)


def _used(tokens: Held) -> set[int]:
    return {token for row in tokens for token in row.values()}


def _held(tokens: Held) -> dict[int, int]:
    return {seq: len(row) for seq, row in enumerate(tokens) if row}
