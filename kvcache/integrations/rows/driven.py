"""A model of a foreign runtime under the engine: how its calls are cut from a pass, and how that is chosen.

The engine starts a pass over tokens of many sequences; the model is called with all of them, or with some at
a time, laid out in one of three ways (``Layout``)::

    PACKED   all tokens in one call        a a a b c c     attention tells the sequences apart
    ROWS     sequences of equal length     a a | b b       so do convolutions and recurrences
    ALONE    one sequence after another    a a a, b, c c   and whatever else a model does by itself
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import ml
from kvcache.cache import Batch, Cache, KVCacheError, NotSupportedError
from kvcache.storage.layer_shape import LayerShape

__all__ = ["LOOKBACK", "UNLIMITED", "DrivenModel", "Layout", "Sizes", "positions_in"]

LOOKBACK = 64
"""Tokens that windows keep beside what they show, so that as many drafted ones can be taken back."""
UNLIMITED = 1 << 24
_CHECKPOINTS, _INTERVAL = 24, 256
"""Of recurrent states: how many are kept of a sequence, and one every so many tokens."""
_TOLERANCES = {ml.DType.F32: 1e-3, ml.DType.F16: 0.03, ml.DType.BF16: 0.15}
"""How far logits may be from those of the model alone, relative to the largest: sums have other orders."""
_TEXTS = ((5, 9, 4, 12, 7, 3), (7, 3, 11, 6, 8))
_PASSES = (((0, 3), (0, 2)), ((3, 5), (2, 3)), ((5, 6), (3, 4)), ((6, 6), (4, 5)))
"""Of these two texts, begin and end in each pass."""


class Layout(enum.Enum):
    """How the tokens of a pass are laid out for the model: the value says what a call has."""

    PACKED = "all sequences of a pass in one row"
    ROWS = "sequences with as many tokens each as rows"
    ALONE = "one sequence"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the engine asks of a model's config: asked of the model's own, or found by trying."""

    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    cached_layers: Mapping[int, LayerShape]
    windows: Mapping[int, int]
    """By layer, how many tokens of a sequence a window keeps."""
    states: int
    """Bytes of the recurrent states of one sequence."""

    def cached_tokens(self, layer: int, max_sequences: int, capacity: int, max_batch: int) -> int:
        kept = self.windows.get(layer, capacity)
        return max_sequences * capacity if kept >= capacity else max_sequences * kept + max_batch

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        return max_sequences * (1 + min(_CHECKPOINTS, capacity // _INTERVAL)) * self.states


class DrivenModel(ABC):
    """A ``LanguageModel`` whose ``forward`` calls a foreign model, once or several times in a pass."""

    starts_passes: Literal[True] = True
    backend: ml.Backend
    dtype: ml.DType
    """What the model computes in."""
    layout = Layout.PACKED
    """How the tokens of a pass are given to the model."""
    parts_outputs = False
    """Whether tokens whose logits nobody asks for have calls of their own, which compute none."""

    @abstractmethod
    def make_cache(self) -> Any:
        """A cache for the model's layers, still to be bound by ``init``."""

    @abstractmethod
    def call(
        self, ctx: ml.Context, cache: Any, ids: Any, positions: np.ndarray, sequences: np.ndarray,
        outputs: np.ndarray,
    ) -> ml.Tensor:  # fmt: skip
        """Logits F32 (outputs, vocabulary) of one call of the model, which begins a pass of the cache.

        ``ids``: an array of the host, or a tensor I32, like ``positions`` and ``sequences`` of the tokens.
        """

    def forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        """Logits F32 (len(batch.outputs), vocab_size) of the rows in ``batch.outputs``; None: of all.

        ``batch.inputs`` are token ids. Each call of the model is a pass of the cache, which is begun here.
        """
        positions, sequences = np.asarray(batch.positions), np.asarray(batch.sequences)
        outputs = np.arange(len(positions)) if batch.outputs is None else np.asarray(batch.outputs, np.int64)
        inputs: Any = batch.inputs
        on_device = hasattr(inputs, "native")
        ids: Any = inputs if on_device else np.asarray(inputs, np.int64)
        found: list[ml.Tensor] = []
        places: list[np.ndarray] = []
        for chosen in self._calls(positions, sequences, outputs):
            there = np.flatnonzero(np.isin(outputs, chosen))
            order = np.argsort(chosen)
            wanted = order[np.searchsorted(chosen, outputs[there], sorter=order)]
            own = ids.rows(ctx, chosen.tolist()) if on_device else ids[chosen]
            logits = self.call(ctx, cache, own, positions[chosen], sequences[chosen], wanted)
            if len(there) == len(outputs):
                found, places = [logits], [there]
            elif len(there):
                found.append(logits)
                places.append(there)
        if len(found) == 1:
            return found[0]
        joined = functools.reduce(lambda before, more: before.concat(ctx, more, 0), found)
        return joined.rows(ctx, np.argsort(np.concatenate(places)).tolist())

    def _calls(self, positions: np.ndarray, sequences: np.ndarray, outputs: np.ndarray) -> list[np.ndarray]:
        """Which of a pass's tokens each call of the model has, in their order."""
        if self.layout is Layout.PACKED and not self.parts_outputs:
            return [np.arange(len(positions))]
        order, first = np.unique(sequences, return_index=True)
        asked = np.zeros(len(positions), bool)
        asked[outputs] = True
        calls: dict[tuple[int, object], list[np.ndarray]] = {}
        for row, seq in enumerate(order[np.argsort(first)]):
            run = np.flatnonzero(sequences == seq)
            for step, part in enumerate(self._steps(run, positions, asked[run])):
                alike: object = row
                if self.layout is not Layout.ALONE:
                    alike = () if self.layout is Layout.PACKED else (len(part), bool(positions[part[0]]))
                calls.setdefault((step, alike), []).append(part)
        return [np.concatenate(calls[key]) for key in sorted(calls, key=lambda key: key[0])]

    def _steps(self, run: np.ndarray, positions: np.ndarray, asked: np.ndarray) -> Iterable[np.ndarray]:
        """The tokens of one sequence, parted where the model takes them in calls that follow one another."""
        first = int(asked.argmax()) if asked.any() else len(run)
        return [run[:first], run[first:]] if self.parts_outputs and 0 < first < len(run) else [run]

    # How it is driven.

    @abstractmethod
    def without(self, text: Sequence[int]) -> np.ndarray:
        """Logits (tokens, vocabulary) of a text, computed in one pass and without any cache of ours."""

    @abstractmethod
    def sizes(self, cache: Any, vocabulary: int) -> Sizes:
        """The sizes of the model, whose cache has had a few tokens."""

    def settled(self, ways: Iterable[object], name: str, instead: str) -> Sizes:
        """Find a way in which the model ``name`` gives what it gives alone; its sizes.

        Drawing one of ``ways`` has the model driven so. Raises NotSupportedError where it is none of them,
        and says what to do ``instead``.
        """
        expected = [self.without(text) for text in _TEXTS]
        refusals: list[str] = []
        for _ in ways:
            try:
                return self._tried(expected)
            except Exception as error:
                refusals.append(f"{self.layout.value}: {_first_line(error)}")
        raise NotSupportedError(
            f"{type(self).__name__}: {name} cannot be driven with {'; nor with '.join(refusals)}; {instead}"
        )

    def _tried(self, expected: Sequence[np.ndarray]) -> Sizes:
        """Passes over two sequences; NotSupportedError where the logits are not those ``expected``."""
        cache = self.make_cache()
        cache.init(self.backend, ml.DType.F32, 2, 16, 16)
        worst = 0.0
        try:
            with self.backend.new_context() as ctx:
                for ends in _PASSES:
                    positions = [p for begin, end in ends for p in range(begin, end)]
                    sequences = [seq for seq, (begin, end) in enumerate(ends) for _ in range(begin, end)]
                    ids = [_TEXTS[seq][p] for seq, p in zip(sequences, positions, strict=True)]
                    outputs = range(len(ids)) if ends is _PASSES[0] else [len(ids) - 1]
                    batch = Batch(positions, sequences, inputs=ids, outputs=[*outputs])
                    logits = self.forward(ctx, batch, cache).to_numpy()
                    for i, row in zip(outputs, logits, strict=True):
                        right = expected[sequences[i]][positions[i]]
                        size = max(1e-6, float(np.abs(right).max()))
                        worst = max(worst, float(np.abs(row - right).max()) / size)
            if not worst <= _TOLERANCES[self.dtype]:
                raise NotSupportedError(
                    f"its logits are {worst:.2g} of the largest from those of the model alone"
                )
            return self.sizes(cache, expected[0].shape[-1])
        finally:
            cache.close()


def positions_in(config: Any) -> int:
    """How many positions a config says that there are; as good as unlimited where it says nothing."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        if isinstance(found := getattr(config, name, None), int) and found > 0:
            return found
    return UNLIMITED


def _first_line(error: Exception) -> str:
    told = (str(error).strip() or "it says nothing").splitlines()[0]
    return told if isinstance(error, KVCacheError | ml.MLError) else f"{type(error).__name__}: {told}"
