"""Multi-token prediction: an additional layer that predicts the token after the next one from hidden states.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024 (arXiv 2412.19437), section 2.2; vLLM's deepseek_mtp.py and
SGLang's deepseek_nextn.py. With h(p) the model's normed hidden state at position p::

    x(p)      = eh_proj([enorm(embed(t(p))), hnorm(h(p - 1))])
    h'(p)     = shared_head.norm(layer(x(p)))        attends to x(0) to x(p)
    t(p + 1) ~ head(h'(p))                           h'(p) replaces h(p) for the next guess

The layer follows the last one: its keys and values are stored in the cell of token p in the model's cache,
and are shared, snapshotted and restored with the others. x(0) is zeros, as there is no earlier token. If h(p
- 1) is unknown because a restored prefix ends at p, zeros replace it. Both reduce acceptance, but no answer
depends on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache.cache import Batch, Cache, CacheFullError
from kvcache_engine.errors import ModelError
from kvcache_engine.models.decoder import CausalModel
from kvcache_engine.models.step import Layer, Step
from kvcache_engine.weights import Linear, Loader, Shape

__all__ = ["MTP", "TAIL", "load_mtp", "mtp_shapes"]

TAIL = 32
"""The number of latest positions of a sequence whose hidden states are kept."""


@dataclass(frozen=True, slots=True)
class Block:
    """Layer ``number``, with its input and output projections."""

    number: int
    embed_norm: ml.Tensor
    hidden_norm: ml.Tensor
    project: Linear
    layer: Layer
    norm: ml.Tensor
    eps: float

    def mix(self, ctx: ml.Context, embedded: ml.Tensor, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        """embedded (of p) and hidden (of p - 1), both (tokens, hidden_size); K and V of p are stored."""
        embedded = embedded.rms_norm(ctx, self.embed_norm, self.eps)
        joined = embedded.concat(ctx, hidden.rms_norm(ctx, self.hidden_norm, self.eps), 1)
        step.cache.set_layer(self.number)
        return self.layer.mix(ctx, self.project(ctx, joined), step)

    def __call__(self, ctx: ml.Context, embedded: ml.Tensor, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        """The normed hidden states (tokens, hidden_size) at p."""
        mixed = self.mix(ctx, embedded, hidden, step)
        return self.layer.feed(ctx, mixed).rms_norm(ctx, self.norm, self.eps)


class MTP:
    """Multi-token prediction for a model, whose embedding and head it shares.

    ``head``: normed hidden states -> logits F32.
    """

    def __init__(self, model: CausalModel, block: Block, head: Linear) -> None:
        self._model, self._block, self._head = model, block, head
        self._known: weakref.WeakKeyDictionary[Cache, HiddenStates] = weakref.WeakKeyDictionary()

    def follow(self, ctx: ml.Context, batch: Batch, step: Step, hidden: ml.Tensor) -> None:
        before = self._states(step.cache).before(ctx, batch, hidden)
        embedded = self._model.embed(ctx, batch)
        first = np.asarray(batch.positions) == 0
        if first.any():
            known = ctx.from_numpy((~first).astype(np.float32).reshape(-1, 1), embedded.dtype)
            embedded = embedded.mul(ctx, known)
        self._block.mix(ctx, embedded, before, step)

    def forget(self, cache: Cache, seq: int) -> None:
        """Drop the hidden states of a sequence, which another conversation continues."""
        if cache in self._known:
            self._known[cache].forget(seq)

    def _states(self, cache: Any) -> HiddenStates:
        if cache not in self._known:
            model, sequences = self._model, cache.max_sequences
            self._known[cache] = HiddenStates(model.backend, sequences, model.config.hidden_size, model.dtype)
        return self._known[cache]

    def guess(
        self,
        ctx: ml.Context,
        cache: Cache,
        seq: int,
        tokens: Sequence[int],
        count: int,
        choose: Callable[[ml.Context, ml.Tensor], ml.Tensor],
    ) -> bool:
        """Guess ``count`` tokens after ``tokens``, all but the last of which are in the cache. ``choose(ctx,
        logits (1, vocab_size))`` returns each as I32 (1,). False if the hidden state is unknown, or if there
        is no room. Afterwards the cache also has the last of ``tokens`` and all guesses but one, which the
        caller removes.
        """
        here, at = ctx.input(), len(tokens) - 1
        hidden = self._states(cache).last(here, seq, at - 1)
        if hidden is None:
            return False
        inputs: ml.Indices = [tokens[-1]]
        for position in range(at, at + count):
            batch = Batch([position], [seq], inputs=inputs)
            try:
                cache.start_forward(ctx, batch)
            except CacheFullError:
                return False
            step = self._model.begin_pass(here, batch, cache)
            hidden = self._block(here, self._model.embed(here, batch), hidden, step)
            logits = self._head(here, hidden)
            inputs = choose(here, logits.cast(here, ml.DType.F32))
        return True


class HiddenStates:
    """The model's latest hidden states of each sequence of a cache, on the device: ring buffers of ``TAIL``
    rows. The first row is zeros.
    """

    def __init__(self, backend: ml.Backend, sequences: int, size: int, dtype: ml.DType) -> None:
        self._ctx = backend.new_context()
        self._rows = self._ctx.zeros((1 + sequences * TAIL, size), dtype)
        self._positions = np.full((sequences, TAIL), -1)

    def before(self, ctx: ml.Context, batch: Batch, hidden: ml.Tensor) -> ml.Tensor:
        """The states (tokens, hidden_size) of the position before each token of the batch; those of the batch
        are kept.
        """
        positions, sequences = (np.asarray(each, np.int64) for each in (batch.positions, batch.sequences))
        at = {pair: row for row, pair in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True))}
        rows = [at.get((seq, position - 1), -1) for seq, position in at]
        pairs = zip(at, rows, strict=True)
        kept = [0 if row >= 0 else self.slot(seq, position - 1) for (seq, position), row in pairs]
        before = self._rows.rows(ctx, kept)
        if max(rows) >= 0:
            count = len(rows)
            pick = [row if row >= 0 else count + i for i, row in enumerate(rows)]
            before = hidden.concat(ctx, before, 0).rows(ctx, pick)
        self.keep(ctx, sequences, positions, hidden)
        return before

    def last(self, ctx: ml.Context, seq: int, position: int) -> ml.Tensor | None:
        """The state (1, hidden_size) at a position; None if it is not kept."""
        slot = self.slot(seq, position)
        return self._rows.rows(ctx, [slot]) if slot else None

    def slot(self, seq: int, position: int) -> int:
        """The row of a state; 0, the row of zeros, if it is not kept."""
        known = position >= 0 and self._positions[seq, position % TAIL] == position
        return 1 + seq * TAIL + position % TAIL if known else 0

    def forget(self, seq: int) -> None:
        self._positions[seq] = -1

    def keep(self, ctx: ml.Context, sequences: np.ndarray, positions: np.ndarray, hidden: ml.Tensor) -> None:
        """Keep the latest states of a pass; states of later positions are dropped."""
        ends = {seq: int(positions[sequences == seq].max()) for seq in set(sequences.tolist())}
        rows = [i for i, seq in enumerate(sequences.tolist()) if positions[i] > ends[seq] - TAIL]
        for seq, end in ends.items():
            self._positions[seq][self._positions[seq] > end] = -1
        where = sequences[rows], positions[rows] % TAIL
        self._positions[where] = positions[rows]
        slots = 1 + where[0] * TAIL + where[1]
        ctx.forward(self._rows.set_rows(ctx, hidden.rows(ctx, rows), slots.tolist()))


def mtp_shapes(hidden: int) -> dict[str, Shape]:
    """The additional tensors of a layer for multi-token prediction."""
    norms = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {**norms, "eh_proj.weight": (hidden, 2 * hidden)}


def load_mtp(load: Loader, ctx: ml.Context, model: Any, layer: Layer, head: Linear) -> MTP:
    """Load the layer after the last one. Raises ModelError for a model on several devices."""
    if len(model.backend.devices) > 1:
        raise ModelError("multi-token prediction needs a model on one device")
    number, eps = model.config.layers, model.config.rms_norm_eps
    prefix = f"{model.names.layers}.{number}"
    norms = (load.norm(ctx, f"{prefix}.{name}") for name in ("enorm", "hnorm", "shared_head.norm"))
    embed_norm, hidden_norm, norm = norms
    project = load.linear(ctx, f"{prefix}.eh_proj")
    return MTP(model, Block(number, embed_norm, hidden_norm, project, layer, norm, eps), head)
