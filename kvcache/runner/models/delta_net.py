"""A gated delta net layer: projections, a short convolution, the delta rule, a gated norm.

transformers' Qwen3NextGatedDeltaNet and Qwen3_5GatedDeltaNet. The convolution's last inputs and the
delta rule's matrices are the states that a RecurrentCache keeps per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import ml
from kvcache.caches.recurrent import RecurrentCache
from kvcache.runner.models.decoder import Step
from kvcache.runner.models.delta import chunk_masks, chunk_size, gated_delta_scan
from kvcache.runner.weights import Linear, Loader
from ml import DType

__all__ = ["DeltaNet", "DeltaSizes", "Runs", "begin_delta", "delta_shapes", "load_delta_net"]

_MASKS = "delta chunk masks"


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Heads, and the size of a key and a value of one head; ``kernel`` is the convolution's length."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class Runs:
    """Sequences of a batch that have equally many tokens in it, so that they are computed together.

    ``states[i]`` is the place of the i-th among the states of the pass; ``rows`` are the tokens of the
    first, then of the second, ...: None where these are all tokens of the batch in its order. After ``cuts``
    of their tokens the cache wants the state of one of ``sequences``, or of several.
    """

    states: np.ndarray
    length: int
    rows: np.ndarray | None
    sequences: tuple[int, ...]
    cuts: tuple[int, ...] = ()

    def deliver(
        self, ctx: ml.Context, cache: RecurrentCache, name: str, layer: int, states: Sequence[ml.Tensor]
    ) -> None:
        """Give the cache the states (sequences, *shape) after each of ``cuts``."""
        for count, state in zip(self.cuts, states, strict=True):
            cache.deliver_states(ctx, name, state, [(seq, count) for seq in self.sequences], layer)

    def gather(self, ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
        """(tokens, size) -> (sequences, length, size)."""
        if self.rows is not None:
            x = x.rows(ctx, self.rows)
        elif x.shape[1] != x.strides[0] and x.shape[0] > 1:
            x = x.contiguous(ctx)
        return x.reshape(ctx, len(self.states), self.length, x.shape[1])


def begin_delta(ctx: ml.Context, step: Step) -> Step:
    """Add to a step what all delta nets of a pass share."""
    sequences = np.asarray(step.batch.sequences)
    step.plans["runs"] = runs = _runs(sequences, step.cache.wanted_states())
    longest = max(run.length for run in runs)
    step.tensors[_MASKS] = chunk_masks(ctx, chunk_size(longest))
    return step


def _runs(sequences: np.ndarray, wanted: Mapping[int, tuple[int, ...]]) -> list[Runs]:
    order = tuple(dict.fromkeys(sequences.tolist()))
    by_length: dict[int, list[tuple[int, np.ndarray]]] = {}
    for place, seq in enumerate(order):
        rows = np.flatnonzero(sequences == seq)
        by_length.setdefault(rows.size, []).append((place, rows))
    found = []
    for length, members in by_length.items():
        rows = np.concatenate([rows for _, rows in members])
        everything = np.array_equal(rows, np.arange(sequences.size))
        states = np.array([place for place, _ in members])
        own = tuple(order[place] for place, _ in members)
        cuts = {count for seq in own for count in wanted.get(seq, ())}
        found.append(Runs(states, length, None if everything else rows, own, tuple(sorted(cuts))))
    return found


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """``projection``: hidden -> queries, keys, values, z (all values' sizes), b and a (value heads each).

    ``kernel`` (kernel, channels, 1): the convolution's weights, oldest first; ``decay`` = -exp(A_log)
    and ``time_bias`` F32 (value_heads,); ``norm`` (value_dim,).
    """

    index: int
    sizes: DeltaSizes
    eps: float
    projection: Linear
    kernel: ml.Tensor
    decay: ml.Tensor
    time_bias: ml.Tensor
    norm: ml.Tensor
    output: Linear

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        """x (tokens, hidden) -> the same; the states of the pass move on in the cache."""
        sizes, tokens = self.sizes, x.shape[0]
        joined = self.projection(ctx, x)
        start, stop = sizes.channels, sizes.channels + sizes.values
        gate = joined.slice(ctx, 1, start, stop)
        write, fade = self._rates(ctx, joined.slice(ctx, 1, stop, stop + 2 * sizes.value_heads))
        mixed = joined.slice(ctx, 1, 0, start)
        result: ml.Tensor | None = None
        for run in step.plans["runs"]:
            part = self._run(ctx, run, (mixed, write, fade), step)
            if run.rows is None:
                result = part
            else:
                result = ctx.empty((tokens, sizes.values), x.dtype) if result is None else result
                result.set_rows(ctx, part, run.rows)
        assert result is not None
        heads = result.reshape(ctx, tokens * sizes.value_heads, sizes.value_dim)
        heads = heads.rms_norm(ctx, self.norm, self.eps).reshape(ctx, tokens, sizes.values)
        return self.output(ctx, heads.mul(ctx, gate.silu(ctx)))

    def _rates(self, ctx: ml.Context, ba: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        """beta and g, F32 (tokens, value_heads), of b and a side by side."""
        heads = self.sizes.value_heads
        ba = ba.cast(ctx, DType.F32)
        time = _softplus(ctx, ba.slice(ctx, 1, heads, 2 * heads).add(ctx, self.time_bias))
        return ba.slice(ctx, 1, 0, heads).sigmoid(ctx), time.mul(ctx, self.decay)

    def _run(
        self, ctx: ml.Context, run: Runs, inputs: tuple[ml.Tensor, ml.Tensor, ml.Tensor], step: Step
    ) -> ml.Tensor:
        """(sequences * length, values) of one run of sequences."""
        sizes, cache = self.sizes, step.cache
        mixed, write, fade = (run.gather(ctx, x) for x in inputs)
        mixed = self._convolve(ctx, run, mixed, cache)
        keys, dim = sizes.keys, sizes.key_dim
        query, key = (
            _unit(ctx, _heads(ctx, mixed.slice(ctx, 2, start, start + keys), sizes.key_heads))
            for start in (0, keys)
        )
        query, key = (_repeat_heads(ctx, x, sizes.value_heads) for x in (query.scale(ctx, dim**-0.5), key))
        value = _heads(ctx, mixed.slice(ctx, 2, 2 * keys, sizes.channels), sizes.value_heads)
        write, fade = (x.permute(ctx, 0, 2, 1).contiguous(ctx) for x in (write, fade))
        states = cache.recurrent_state(ctx, self.index)
        state = states if run.rows is None else states.rows(ctx, run.states)
        tokens = query, key, value, fade, write
        out, (*inside, state) = gated_delta_scan(ctx, *tokens, state, step.tensors[_MASKS], run.cuts)
        run.deliver(ctx, cache, "recurrent", self.index, inside)
        if run.rows is None:
            cache.set_recurrent_state(ctx, self.index, state)
        else:
            ctx.forward(states.set_rows(ctx, state, run.states))
        out = out.permute(ctx, 0, 2, 1, 3).contiguous(ctx)
        return out.reshape(ctx, -1, sizes.values).cast(ctx, inputs[0].dtype)

    def _convolve(self, ctx: ml.Context, run: Runs, x: ml.Tensor, cache: RecurrentCache) -> ml.Tensor:
        """silu of the causal convolution per channel, x (sequences, length, channels) -> the same.

        The state is (sequences, channels, kernel - 1): the inputs before these, oldest first.
        """
        states = cache.conv_state(ctx, self.index)
        state = states if run.rows is None else states.rows(ctx, run.states)
        past = self.sizes.kernel - 1
        known = state.cast(ctx, x.dtype).permute(ctx, 0, 2, 1).concat(ctx, x, 1)
        length = x.shape[1]
        result = known.slice(ctx, 1, past, past + length).mul(ctx, self._tap(ctx, past))
        for i in range(past):
            result = result.add(ctx, known.slice(ctx, 1, i, i + length).mul(ctx, self._tap(ctx, i)))
        *inside, latest = (
            known.slice(ctx, 1, end, end + past).permute(ctx, 0, 2, 1) for end in (*run.cuts, length)
        )
        run.deliver(ctx, cache, "conv", self.index, [state.contiguous(ctx) for state in inside])
        if run.rows is None:
            cache.set_conv_state(ctx, self.index, latest)
        else:
            ctx.forward(states.set_rows(ctx, latest.cast(ctx, states.dtype), run.states))
        return result.silu(ctx)

    def _tap(self, ctx: ml.Context, i: int) -> ml.Tensor:
        """(1, channels): what the input ``kernel - 1 - i`` steps back is multiplied by."""
        return self.kernel.slice(ctx, 0, i, i + 1)


def _heads(ctx: ml.Context, x: ml.Tensor, heads: int) -> ml.Tensor:
    """(sequences, length, heads * dim) -> F32 (sequences, heads, length, dim)."""
    sequences, length, size = x.shape
    wide = x.cast(ctx, DType.F32).reshape(ctx, sequences, length, heads, size // heads)
    return wide.permute(ctx, 0, 2, 1, 3)


def _unit(ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
    """``x / sqrt(sum(x**2) + 1e-6)`` over the last axis: a scaled RMS norm."""
    dim = x.shape[-1]
    return x.rms_norm(ctx, None, 1e-6 / dim).scale(ctx, dim**-0.5)


def _repeat_heads(ctx: ml.Context, x: ml.Tensor, heads: int) -> ml.Tensor:
    """(sequences, key_heads, length, dim) -> (sequences, heads, length, dim), each head several times."""
    sequences, key_heads, length, dim = x.shape
    if key_heads == heads:
        return x
    x = x.contiguous(ctx).reshape(ctx, sequences, key_heads, 1, length, dim)
    return x.repeat(ctx, 2, heads // key_heads).reshape(ctx, sequences, heads, length, dim)


def _softplus(ctx: ml.Context, x: ml.Tensor) -> ml.Tensor:
    """log(1 + exp(x)), without overflow."""
    one = ctx.full((1,), 1.0, DType.F32)
    return x.relu(ctx).add(ctx, x.abs(ctx).neg(ctx).exp(ctx).add(ctx, one).log(ctx))


def delta_shapes(prefix: str, hidden: int, sizes: DeltaSizes, split: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that ``load_delta_net`` reads."""
    heads, keys, values = sizes.value_heads, sizes.keys, sizes.values
    if split:
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    else:
        rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}.in_proj_{name}.weight": (count, hidden) for name, count in rows.items()
    }
    return found | {
        f"{prefix}.conv1d.weight": (sizes.channels, 1, sizes.kernel),
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.norm.weight": (sizes.value_dim,),
        f"{prefix}.out_proj.weight": (hidden, values),
    }


def load_delta_net(
    load: Loader, ctx: ml.Context, prefix: str, index: int, sizes: DeltaSizes, split: bool, eps: float
) -> DeltaNet:
    """Of the tensors below ``prefix``, for layer ``index``; ``split`` as Qwen3NextConfig has it."""
    names = ("qkv", "z", "b", "a") if split else ("qkvz", "ba")
    stored = [load.take(f"{prefix}.in_proj_{name}.weight") for name in names]
    kernel = load.take(f"{prefix}.conv1d.weight")[:, 0].T
    decay = -np.exp(load.take(f"{prefix}.A_log").astype(np.float32))
    return DeltaNet(
        index,
        sizes,
        eps,
        projection=load.joined(ctx, stored if split else _by_kind(stored, sizes)),
        kernel=load.put(ctx, np.ascontiguousarray(kernel)),
        decay=load.put(ctx, decay, DType.F32),
        time_bias=load.put(ctx, load.take(f"{prefix}.dt_bias").astype(np.float32), DType.F32),
        norm=load.norm(ctx, f"{prefix}.norm"),
        output=load.linear(ctx, f"{prefix}.out_proj"),
    )


def _by_kind(stored: list[np.ndarray], sizes: DeltaSizes) -> list[np.ndarray]:
    """Rows stored by key head (its q, k, v and z; its b and a) as all of q, of k, of v, of z, b, a."""
    qkvz, ba = stored
    groups, hidden = sizes.value_heads // sizes.key_heads, qkvz.shape[1]
    ends = np.cumsum([sizes.key_dim, sizes.key_dim, groups * sizes.value_dim])
    parts = np.split(qkvz.reshape(sizes.key_heads, -1, hidden), ends, axis=1)
    parts += np.split(ba.reshape(sizes.key_heads, -1, hidden), 2, axis=1)
    return [part.reshape(-1, hidden) for part in parts]
