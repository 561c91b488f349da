"""The specification of the recurrent cache as plain lists.

A sequence is the list of its tokens; its state is the list of tokens that the state has seen. The two differ
after a context shift, since the state still includes tokens that the attention layers dropped. The stored
numbers are computed from that list and small enough to be exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

import kvcache
import ml
from kvcache.testing.models import values
from kvcache.testing.models.declared import skip_undeclared
from ml import DType

CONV, DELTA = (2, 3), (2, 2, 2)
KINDS = {"conv": CONV, "recurrent": DELTA}
RECURRENT_LAYERS, ATTENTION_LAYER = (0, 2), 1
TWO: dict[int | None, dict[str, kvcache.StateSpec]] = {
    None: {"conv": kvcache.StateSpec(CONV), "recurrent": kvcache.StateSpec(DELTA, DType.F32)},
}
"""The states of RecurrentCache(CONV, DELTA)."""
MANY: dict[int | None, dict[str, kvcache.StateSpec]] = {
    0: {"conv": kvcache.StateSpec((2, 3)), "ssm": kvcache.StateSpec((2, 2, 2), DType.F32)},
    1: {"k": kvcache.StateSpec((3,)), "count": kvcache.StateSpec((1, 2), DType.I32)},
    2: {"conv": kvcache.StateSpec((5,), DType.F16)},
}
"""Different states in each layer, including the attention layer."""

Token = tuple[int, int]
"""(cell, id): a restored token is in a different cell from the original."""


@dataclass(frozen=True)
class StateSetup:
    max_sequences: int = 3
    capacity: int = 16
    checkpoints: int = 3
    interval: int = 4
    dtype: DType = DType.F32
    conv_dtype: DType | None = None
    can_shift: bool = True
    config: ml.CacheConfig = field(default_factory=ml.CacheConfig)
    states: str = "two"
    """``two``: TWO; ``declared`` or ``found``: MANY, declared in advance or set by the first pass."""
    delivers: bool = False

    def make(self, backend: ml.Backend) -> kvcache.RecurrentCache:
        skip_undeclared(backend, self.dtype, *(dtype for _, dtype in self.layout.values() if dtype.is_float))
        shift = values.shift_positions if self.can_shift else None
        declared = {"two": TWO, "declared": MANY}.get(self.states)
        states = kvcache.StateCache(
            declared, self.checkpoints, self.interval, self.conv_dtype, delivers=self.delivers
        )
        cache = kvcache.RecurrentCache.of(states, kvcache.CausalCache(shift))
        cache.set_config(self.config)
        cache.init(backend, self.dtype, self.max_sequences, self.capacity, 8)
        return cache

    @property
    def conv(self) -> DType:
        return self.conv_dtype or self.dtype

    @property
    def layout(self) -> dict[tuple[str, int], tuple[tuple[int, ...], DType]]:
        """Shape and dtype by (name, layer), layer by layer."""
        if self.states == "two":
            both = {"conv": (CONV, self.conv), "recurrent": (DELTA, DType.F32)}
            return {(name, layer): both[name] for layer in RECURRENT_LAYERS for name in both}
        return {
            (name, layer): (spec.shape, spec.dtype or self.conv)
            for layer, specs in MANY.items()
            if layer is not None
            for name, spec in specs.items()
        }


@dataclass
class ModelRow:
    tokens: list[Token] = field(default_factory=list)
    seen: tuple[int, ...] = ()
    points: dict[int, tuple[int, ...]] = field(default_factory=dict)
    inside: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By position, the tokens seen by the states delivered inside the last pass."""

    @property
    def kept(self) -> dict[int, tuple[int, ...]]:
        return self.points | self.inside

    def reach(self, position: int) -> int:
        """The position that is reached when going back to ``position``."""
        if len(self.tokens) <= position:
            return len(self.tokens)
        return max((point for point in self.kept if point <= position), default=0)

    def cut(self, position: int) -> ModelRow:
        end = self.reach(position)
        seen = self.seen if end == len(self.tokens) else self.kept.get(end, ())
        inside = {p: s for p, s in self.inside.items() if p < end}
        return ModelRow(self.tokens[:end], seen, {p: s for p, s in self.points.items() if p <= end}, inside)


@dataclass(frozen=True)
class Copy:
    """The content of a snapshot."""

    begin: int
    tokens: tuple[Token, ...]
    seen: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for _, token in self.tokens)

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)


class StateModel:
    def __init__(self, setup: StateSetup) -> None:
        self.setup = setup
        self.rows = [ModelRow() for _ in range(setup.max_sequences)]
        self.next_cell = 0

    def free(self) -> int:
        cells = self.setup.max_sequences * self.setup.capacity
        cells += -cells % self.setup.config.cache_padding
        return cells - len({token for row in self.rows for token in row.tokens})

    def fresh(self, ids: Sequence[int]) -> list[Token]:
        first, self.next_cell = self.next_cell, self.next_cell + len(ids)
        return [(first + i, token) for i, token in enumerate(ids)]

    def start(self, sequences: Sequence[int], ids: Sequence[int]) -> None:
        if len(ids) > self.free():
            raise kvcache.CacheFullError(len(ids), self.free(), {})
        for seq in dict.fromkeys(sequences):
            row, mine = self.rows[seq], [t for t, s in zip(ids, sequences, strict=True) if s == seq]
            count, last = self.setup.checkpoints, max(row.points, default=0)
            if count and len(row.tokens) - last >= self.setup.interval:
                self.keep(row)
            row.tokens = row.tokens + self.fresh(mine)
            row.seen, row.inside = (*row.seen, *mine), {}

    def keep(self, row: ModelRow) -> None:
        """Take a checkpoint; drop the oldest if there are too many."""
        row.points = {**row.points, len(row.tokens): row.seen}
        latest = sorted(row.points)[-self.setup.checkpoints :] if self.setup.checkpoints else []
        row.points = {point: row.points[point] for point in latest}

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        if src == dst or length < 0:
            raise kvcache.InvalidRangeError(f"{src} {dst} {length}")
        self.rows[dst] = self.rows[src].cut(length)

    def remove(self, seq: int, begin: int, end: int | None) -> None:
        row = self.rows[seq]
        if begin < 0 or (end is not None and end < begin):
            raise kvcache.InvalidRangeError(f"[{begin}, {end})")
        if end is None or end >= len(row.tokens):
            self.rows[seq] = row.cut(begin)
        elif end > begin:
            others = {token for s, other in enumerate(self.rows) if s != seq for token in other.tokens}
            if not self.setup.can_shift or others.intersection(row.tokens[end:]):
                raise kvcache.NotSupportedError(f"{seq}")
            points, inside = (
                {
                    p if p <= begin else p - end + begin: seen
                    for p, seen in kept.items()
                    if not begin < p <= end
                }
                for kept in (row.points, row.inside)
            )
            self.rows[seq] = ModelRow(row.tokens[:begin] + row.tokens[end:], row.seen, points, inside)

    def snapshot(self, seq: int, begin: int, end: int) -> Copy:
        row = self.rows[seq]
        if not 0 <= begin <= end <= len(row.tokens):
            raise kvcache.InvalidRangeError(f"[{begin}, {end})")
        if end not in {0, len(row.tokens), *row.kept}:
            raise kvcache.NotSupportedError(f"{end}")
        return Copy(begin, tuple(row.tokens[begin:end]), row.cut(end).seen)

    def restore(self, seq: int, copy: Copy, target: int | None, shared: bool) -> bool:
        """Restore a snapshot; returns whether it was possible. ``shared``: it is still in the cache, so its
        cells are reused.
        """
        row = self.rows[seq]
        if target not in (None, copy.end) or len(row.tokens) < copy.begin:
            return False
        before, self.rows[seq] = row, ModelRow(row.tokens[: copy.begin])
        if not shared and len(copy.ids) > self.free():
            self.rows[seq] = before
            raise kvcache.CacheFullError(len(copy.ids), 0, {})
        points = {point: seen for point, seen in before.points.items() if point <= copy.begin}
        tokens = list(copy.tokens) if shared else self.fresh(copy.ids)
        row = ModelRow(before.tokens[: copy.begin] + tokens, copy.seen, points)
        self.rows[seq] = row
        if copy.end > copy.begin:  # an empty snapshot brings no position that the sequence did not have
            self.keep(row)
        return True


def state_values(
    seen: Sequence[int], kind: str, layer: int, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """The state of a layer after these tokens: zero initially, then numbers below 128."""
    code, shape = 0, shape or KINDS[kind]
    for token in seen:
        code = (5 * code + token + 3 * layer + len(kind)) % 97 + 1
    size = int(np.prod(shape))
    return ((code + np.arange(size) % 7) * bool(seen)).reshape(shape).astype(np.float32)
