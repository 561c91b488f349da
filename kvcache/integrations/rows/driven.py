"""A foreign runtime's model under the engine: how a pass is divided into calls, and how the layout is chosen.
The engine starts a pass over tokens of many sequences; the model is called with all of them, or with some at
a time, in one of three layouts (``Layout``)::

    PACKED   all tokens in one call        a a a b c c     attention separates the sequences
    ROWS     sequences of equal length     a a | b b       so do convolutions and recurrences
    ALONE    one sequence after another    a a a, b, c c   as does everything else in the model
"""

from __future__ import annotations

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache import LayerShape
from kvcache.cache import Batch, Cache, KVCacheError, NotSupportedError

__all__ = ["LOOKBACK", "UNLIMITED", "DrivenModel", "Layout", "Sizes", "positions_in"]

LOOKBACK = 64
"""Tokens that windows keep beyond what they show, so that many drafted ones can be removed."""
UNLIMITED = 1 << 24
_CHECKPOINTS, _INTERVAL = 24, 256
"""For recurrent states: the number of checkpoints of a sequence, and the tokens between them."""
_TOLERANCES = {ml.DType.F32: 1e-3, ml.DType.F16: 0.03, ml.DType.BF16: 0.15}
"""The allowed error of logits relative to the largest, compared with the model alone: the order of sums
differs.
"""
_TEXTS = ((5, 9, 4, 12, 7, 3), (7, 3, 11, 6, 8))
_PASSES = (((0, 3), (0, 2)), ((3, 5), (2, 3)), ((5, 6), (3, 4)), ((6, 6), (4, 5)))
"""Begin and end of each of two texts in each pass."""


class Layout(enum.Enum):
    """The layout of a pass's tokens for the model; the value describes a call."""

    PACKED = "all sequences of a pass in one row"
    ROWS = "sequences with as many tokens each as rows"
    ALONE = "one sequence"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the engine needs from a model's config: read from the config, or determined by running the
    model.
    """

    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    cached_layers: Mapping[int, LayerShape]
    windows: Mapping[int, int]
    """By layer, the number of tokens of a sequence that a window keeps."""
    states: int
    """Bytes of the recurrent states of one sequence."""

    def cached_tokens(self, layer: int, max_sequences: int, capacity: int, max_batch: int) -> int:
        kept = self.windows.get(layer, capacity)
        return max_sequences * capacity if kept >= capacity else max_sequences * kept + max_batch

    def state_bytes(self, max_sequences: int, capacity: int) -> int:
        return max_sequences * (1 + min(_CHECKPOINTS, capacity // _INTERVAL)) * self.states


class DrivenModel(ABC):
    """A ``LanguageModel`` whose ``forward`` calls a foreign model, once or several times in a pass."""

    starts_passes = True
    backend: ml.Backend
    dtype: ml.DType
    """The dtype in which the model computes."""
    layout = Layout.PACKED
    """The layout of a pass's tokens for the model."""

    @abstractmethod
    def make_cache(self) -> Any:
        """A cache for the model's layers, not yet bound by ``init``."""

    @abstractmethod
    def call(
        self, ctx: ml.Context, cache: Any, ids: Any, positions: np.ndarray, sequences: np.ndarray,
        outputs: np.ndarray,
    ) -> ml.Tensor:  # fmt: skip
        """Logits F32 (outputs, vocabulary) of one call of the model, which begins a pass of the cache.
        ``ids``: a host array or an I32 tensor, like the tokens' ``positions`` and ``sequences``.
        """

    def forward(self, ctx: ml.Context, batch: Batch, cache: Cache) -> ml.Tensor:
        """Logits F32 (len(batch.outputs), vocab_size) of the rows in ``batch.outputs``; None: of all.

        ``batch.inputs`` are token ids. Each call of the model is a pass of the cache, begun here.
        """
        positions, sequences = np.asarray(batch.positions), np.asarray(batch.sequences)
        outputs = np.arange(len(positions)) if batch.outputs is None else np.asarray(batch.outputs, np.int64)
        inputs: Any = batch.inputs
        on_device = hasattr(inputs, "native")
        ids: Any = inputs if on_device else np.asarray(inputs, np.int64)
        if self.layout is Layout.PACKED:
            return self.call(ctx, cache, ids, positions, sequences, outputs)
        logits_of_calls: list[ml.Tensor] = []
        places: list[np.ndarray] = []
        for chosen in self._calls(positions, sequences):
            there = np.flatnonzero(np.isin(outputs, chosen))
            order = np.argsort(chosen)
            wanted = order[np.searchsorted(chosen, outputs[there], sorter=order)]
            own = ids.rows(ctx, chosen.tolist()) if on_device else ids[chosen]
            logits = self.call(ctx, cache, own, positions[chosen], sequences[chosen], wanted)
            if len(there) == len(outputs):
                logits_of_calls, places = [logits], [there]
            elif len(there):
                logits_of_calls.append(logits)
                places.append(there)
        if len(logits_of_calls) == 1:
            return logits_of_calls[0]
        joined = functools.reduce(lambda before, more: before.concat(ctx, more, 0), logits_of_calls)
        return joined.rows(ctx, np.argsort(np.concatenate(places)).tolist())

    def _calls(self, positions: np.ndarray, sequences: np.ndarray) -> list[np.ndarray]:
        """The indices of a pass's tokens in each call of the model, in order."""
        order, first = np.unique(sequences, return_index=True)
        calls: dict[tuple[int, object], list[np.ndarray]] = {}
        for row, seq in enumerate(order[np.argsort(first)]):
            run = np.flatnonzero(sequences == seq)
            for step, part in enumerate(self._steps(run, positions)):
                alike: object = row
                if self.layout is Layout.ROWS:
                    alike = (len(part), bool(positions[part[0]]))
                calls.setdefault((step, alike), []).append(part)
        return [np.concatenate(calls[key]) for key in sorted(calls, key=lambda key: key[0])]

    def _steps(self, run: np.ndarray, positions: np.ndarray) -> Iterable[np.ndarray]:
        """The tokens of one sequence, divided if the model needs them in successive calls."""
        return [run]

    # Choosing a layout.

    @abstractmethod
    def without(self, text: Sequence[int]) -> np.ndarray:
        """Logits (tokens, vocabulary) of a text, computed in one pass without our caches."""

    @abstractmethod
    def sizes(self, cache: Any, vocabulary: int) -> Sizes:
        """The sizes of the model, determined after a few tokens in its cache."""

    def settled(self, ways: Iterable[object], name: str, instead: str) -> Sizes:
        """Find a way to run the model ``name`` with the same results as alone; returns its sizes. Each item
        drawn from ``ways`` configures the model. Raises NotSupportedError, with the advice ``instead``, if
        none of them works.
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
    """The number of positions in a config; practically unlimited if it has none."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        if isinstance(positions := getattr(config, name, None), int) and positions > 0:
            return positions
    return UNLIMITED


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or "it says nothing").splitlines()[0]
    return text if isinstance(error, KVCacheError | ml.MLError) else f"{type(error).__name__}: {text}"
