"""Shared by layers with states: runs of sequences, the causal convolution, heads. The states in a
RecurrentCache are the convolution's last inputs, and a matrix per head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import ml
from kvcache import RecurrentCache
from kvcache_engine.models.recurrences import chunk_masks, chunk_size, scan
from kvcache_engine.models.step import Step
from ml import DType, nn

__all__ = ["MASKS", "Runs", "begin_runs", "by_runs", "convolve", "recur", "repeat_heads", "split_heads"]

MASKS = "chunk masks"
"""The name of ``chunk_masks`` among a step's tensors."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Sequences with the same number of tokens in a batch, which are computed together. ``states[i]`` is the
    index of the i-th among the states of the pass; ``rows`` are the tokens of the first, then of the second,
    ...; None if these are all tokens of the batch in order. The cache wants the states of some of
    ``sequences`` after each of ``cuts`` tokens.
    """

    states: np.ndarray
    length: int
    rows: np.ndarray | None
    sequences: tuple[int, ...]
    cuts: tuple[int, ...] = ()

    def deliver(
        self, ctx: ml.Context, cache: RecurrentCache, name: str, layer: int, states: Sequence[ml.Tensor]
    ) -> None:
        """Deliver the states (sequences, *shape) after each of ``cuts`` to the cache."""
        for count, state in zip(self.cuts, states, strict=True):
            cache.deliver_states(ctx, name, state, [(seq, count) for seq in self.sequences], layer)

    def gather(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """(tokens, size) -> (sequences, length, size)."""
        if self.rows is not None:
            x = x.rows(ctx, self.rows)
        elif x.shape[1] != x.strides[0] and x.shape[0] > 1:
            x = x.contiguous(ctx)
        return x.reshape(ctx, len(self.states), self.length, x.shape[1])


def begin_runs(ctx: ml.Context, step: Step) -> Step:
    """Add to a step what all layers with states share in a pass."""
    sequences = np.asarray(step.batch.sequences)
    step.plans["runs"] = runs = _runs(sequences, step.cache.wanted_states())
    longest = max(run.length for run in runs)
    step.tensors[MASKS] = chunk_masks(ctx, chunk_size(longest))
    return step


def _runs(sequences: np.ndarray, wanted: Mapping[int, tuple[int, ...]]) -> list[Runs]:
    order = tuple(dict.fromkeys(sequences.tolist()))
    by_length: dict[int, list[tuple[int, np.ndarray]]] = {}
    for place, seq in enumerate(order):
        rows = np.flatnonzero(sequences == seq)
        by_length.setdefault(rows.size, []).append((place, rows))
    runs = []
    for length, members in by_length.items():
        rows = np.concatenate([rows for _, rows in members])
        everything = np.array_equal(rows, np.arange(sequences.size))
        states = np.array([place for place, _ in members])
        own = tuple(order[place] for place, _ in members)
        cuts = {count for seq in own for count in wanted.get(seq, ())}
        runs.append(Runs(states, length, None if everything else rows, own, tuple(sorted(cuts))))
    return runs


def convolve(
    ctx: ml.Context,
    run: Runs,
    x: ml.Tensor,
    cache: RecurrentCache,
    layer: int,
    kernel: ml.Tensor,
) -> ml.Tensor:
    """The causal convolution per channel, x (sequences, length, channels) -> the same shape. ``kernel``
    (taps, channels), oldest first. The state "conv" of ``layer``, (sequences, channels, taps - 1), has the
    previous inputs, oldest first, and advances in the cache.
    """
    states = cache.conv_state(ctx, layer)
    state = states if run.rows is None else states.rows(ctx, run.states)
    past, length = kernel.shape[0] - 1, x.shape[1]
    result, inputs = nn.causal_conv1d(ctx, x, state, kernel)
    *inside, latest = (
        inputs.slice(ctx, 1, end, end + past).permute(ctx, 0, 2, 1) for end in (*run.cuts, length)
    )
    run.deliver(ctx, cache, "conv", layer, [state.contiguous(ctx) for state in inside])
    if run.rows is None:
        cache.set_conv_state(ctx, layer, latest)
    else:
        ctx.forward(states.set_rows(ctx, latest.cast(ctx, states.dtype), run.states))
    return result


def by_runs(ctx: ml.Context, step: Step, compute: Callable[[Runs], ml.Tensor]) -> ml.Tensor:
    """The results (tokens, size) of all runs; ``compute`` returns (sequences * length, size) for each."""
    result: ml.Tensor | None = None
    for run in step.plans["runs"]:
        part = compute(run)
        if run.rows is None:
            return part
        if result is None:
            result = ctx.empty((len(step.batch), part.shape[1]), part.dtype)
        result.set_rows(ctx, part, run.rows)
    assert result is not None
    return result


def recur(
    ctx: ml.Context,
    run: Runs,
    step: Step,
    layer: int,
    tokens: Sequence[ml.Tensor],
) -> ml.Tensor:
    """The outputs of ``scan`` for a run; the state "recurrent" of ``layer`` advances in the cache."""
    cache, masks = step.cache, step.tensors[MASKS]
    states = cache.recurrent_state(ctx, layer)
    state = states if run.rows is None else states.rows(ctx, run.states)
    out, (*inside, state) = scan(ctx, tokens, state, masks, run.cuts)
    run.deliver(ctx, cache, "recurrent", layer, inside)
    if run.rows is None:
        cache.set_recurrent_state(ctx, layer, state)
    else:
        ctx.forward(states.set_rows(ctx, state, run.states))
    return out


def split_heads(ctx: ml.Context, x: ml.Tensor, heads: int) -> ml.Tensor:
    """(sequences, length, heads * dim) -> F32 (sequences, heads, length, dim)."""
    sequences, length, size = x.shape
    wide = x.cast(ctx, DType.F32).reshape(ctx, sequences, length, heads, size // heads)
    return wide.permute(ctx, 0, 2, 1, 3)


def repeat_heads(ctx: ml.Context, x: ml.Tensor, heads: int) -> ml.Tensor:
    """(sequences, key_heads, length, dim) -> (sequences, heads, length, dim), with each head repeated."""
    sequences, key_heads, length, dim = x.shape
    if key_heads == heads:
        return x
    x = x.contiguous(ctx).reshape(ctx, sequences, key_heads, 1, length, dim)
    return x.repeat(ctx, 2, heads // key_heads).reshape(ctx, sequences, heads, length, dim)
