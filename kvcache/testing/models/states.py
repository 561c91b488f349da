"""The specification of the recurrent cache: the dictionary of the attention caches, projected onto states.

A state is the list of tokens that it has seen. The stored numbers are computed from that list and small
enough to be exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import kvcache
import ml
from kvcache.testing.models import attention, values
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


@dataclass(frozen=True)
class Fold:
    """What the state of a sequence has seen: now, at its checkpoints, and inside the last pass.

    ``seen`` differs from the sequence's tokens after a context shift, since a state still includes tokens
    that the attention layers dropped.
    """

    seen: tuple[int, ...] = ()
    points: dict[int, tuple[int, ...]] = field(default_factory=dict)
    inside: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By position, the tokens seen by the states delivered inside the last pass."""

    @property
    def kept(self) -> dict[int, tuple[int, ...]]:
        return self.points | self.inside


@dataclass(frozen=True)
class Copy:
    """The content of a snapshot: of the dictionary, and what its state has seen."""

    tokens: attention.Copy
    seen: tuple[int, ...]

    @property
    def begin(self) -> int:
        return self.tokens.begin

    @property
    def end(self) -> int:
        return self.tokens.end


class StateModel(attention.Model):
    """The dictionary of an attention cache, and its folds: a sequence goes where its state can go with it."""

    def __init__(self, states: StateSetup) -> None:
        super().__init__(
            attention.Setup(
                max_sequences=states.max_sequences, capacity=states.capacity, config=states.config,
                can_shift=states.can_shift,
            )
        )  # fmt: skip
        self.states = states
        self.folds = [Fold() for _ in range(states.max_sequences)]

    def length(self, seq: int) -> int:
        return len(self.tokens[seq])

    def reach(self, seq: int, position: int) -> int:
        """The position that is reached when going back to ``position``."""
        if self.length(seq) <= position:
            return self.length(seq)
        return max((point for point in self.folds[seq].kept if point <= position), default=0)

    def can_resume(self, seq: int, position: int) -> bool:
        return position == 0 or self.reach(seq, position) == position

    def keep(self, seq: int) -> None:
        """Take a checkpoint; drop the oldest if there are too many."""
        fold = self.folds[seq]
        points = fold.points | {self.length(seq): fold.seen}
        latest = sorted(points)[-self.states.checkpoints :] if self.states.checkpoints else []
        self.folds[seq] = replace(fold, points={point: points[point] for point in latest})

    def _cut(self, seq: int, position: int) -> tuple[int, Fold]:
        """The position reached when going back to ``position``, and the fold there."""
        fold, end = self.folds[seq], self.reach(seq, position)
        seen = fold.seen if end == self.length(seq) else fold.kept.get(end, ())
        points = {p: at for p, at in fold.points.items() if p <= end}
        return end, Fold(seen, points, {p: at for p, at in fold.inside.items() if p < end})

    def start(self, positions: Sequence[int], sequences: Sequence[int], tokens: Sequence[int]) -> None:
        before = [self.length(seq) for seq in range(self.states.max_sequences)]
        super().start(positions, sequences, tokens)
        for seq in dict.fromkeys(sequences):
            fold, mine = self.folds[seq], [t for t, s in zip(tokens, sequences, strict=True) if s == seq]
            points = fold.points
            if self.states.checkpoints and before[seq] - max(points, default=0) >= self.states.interval:
                points = points | {before[seq]: fold.seen}
                points = {point: points[point] for point in sorted(points)[-self.states.checkpoints :]}
            self.folds[seq] = Fold((*fold.seen, *mine), points)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        if src == dst or length < 0:
            raise kvcache.InvalidRangeError(f"{src} {dst} {length}")
        end, fold = self._cut(src, length)
        super().copy_prefix(src, dst, end)
        self.folds[dst] = fold

    def remove(self, seq: int, begin: int, end: int | None = None) -> None:
        if end is None or end >= self.length(seq):
            if begin < 0 or (end is not None and end < begin):
                raise kvcache.InvalidRangeError(f"[{begin}, {end})")
            stop, fold = self._cut(seq, begin)
            super().remove(seq, stop)
            self.folds[seq] = fold
            return
        super().remove(seq, begin, end)
        points, inside = (
            {p if p <= begin else p - end + begin: at for p, at in kept.items() if not begin < p <= end}
            for kept in (self.folds[seq].points, self.folds[seq].inside)
        )
        self.folds[seq] = replace(self.folds[seq], points=points, inside=inside)

    def snapshot_of(self, seq: int, begin: int, end: int) -> Copy:
        """The content of a snapshot, which ends where there is a state."""
        tokens = super().snapshot(seq, begin, end)
        if end not in {0, self.length(seq), *self.folds[seq].kept}:
            raise kvcache.NotSupportedError(f"{end}")
        return Copy(tokens, self._cut(seq, end)[1].seen)

    def restore_copy(self, seq: int, copy: Copy, target: int | None, shared: bool) -> bool:
        """As ``restore``; keys and values come first, and a state goes only to the end of its snapshot."""
        before = self.tokens[seq]
        if not super().restore(seq, copy.tokens, target, shared):
            return False
        if target not in (None, copy.end):
            self.tokens[seq] = before
            return False
        points = {point: seen for point, seen in self.folds[seq].points.items() if point <= copy.begin}
        self.folds[seq] = Fold(copy.seen, points)
        if copy.end > copy.begin:  # an empty snapshot brings no position that the sequence did not have
            self.keep(seq)
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
