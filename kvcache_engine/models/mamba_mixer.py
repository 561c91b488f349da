"""A Mamba-2 mixer: one projection, a short convolution, the state-space recurrence, a gate.

transformers' Mamba2Mixer and FalconH1Mixer::

    z, xBC, dt = in_proj(hidden)        x, B, C = silu(conv(xBC))        dt = softplus(dt + dt_bias)
    out_proj(gated(scan(C, B, dt x, dt A) + D x, z))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import ml
from kvcache import StateSpec
from kvcache_engine.models.recurrences import state_space_rule
from kvcache_engine.models.state_runs import Runs, by_runs, convolve, recur, repeat_heads, split_heads
from kvcache_engine.models.step import Step
from kvcache_engine.weights import Linear, Loader, Shape
from ml import DType, nn

__all__ = ["Mamba2Mixer", "MambaSizes", "load_mamba", "mamba_shapes"]


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """``heads`` of ``head_dim``; ``groups`` of them share B and C, of ``state`` numbers each.

    ``kernel`` is the convolution's length. ``normed``: an RMS norm by group, after the gate or before it
    (``norm_first``).
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    normed: bool = True
    norm_first: bool = False
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def rows(self) -> tuple[int, int, int, int, int]:
        """Of ``in_proj``: z, x, B, C and dt."""
        shared = self.groups * self.state
        return self.inner, self.inner, shared, shared, self.heads

    @property
    def states(self) -> dict[str, StateSpec]:
        """What a layer keeps of a sequence."""
        matrices = self.heads, self.state, self.head_dim
        conv = StateSpec((self.channels, self.kernel - 1))
        return {"conv": conv, "recurrent": StateSpec(matrices, DType.F32)}


@dataclass(frozen=True, slots=True)
class Mamba2Mixer:
    """``kernel`` (taps, channels), oldest first; ``decay`` = -exp(A_log), ``time_bias`` and ``skip`` F32
    (heads,); ``norm`` (inner,).
    """

    index: int
    sizes: MambaSizes
    eps: float
    projection: Linear
    kernel: ml.Tensor
    conv_bias: ml.Tensor | None
    decay: ml.Tensor
    time_bias: ml.Tensor
    skip: ml.Tensor
    norm: ml.Tensor | None
    output: Linear

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        """x (tokens, hidden) -> the same; the states of the pass move on in the cache."""
        sizes = self.sizes
        joined = self.projection(ctx, x)
        start, stop = sizes.inner, sizes.inner + sizes.channels
        gate, mixed = joined.slice(ctx, 1, 0, start), joined.slice(ctx, 1, start, stop)
        time = joined.slice(ctx, 1, stop, stop + sizes.heads).cast(ctx, DType.F32)
        time = nn.softplus(ctx, time.add(ctx, self.time_bias))
        result = by_runs(ctx, step, lambda run: self._run(ctx, run, mixed, time, step))
        return self.output(ctx, self._gated(ctx, result, gate))

    def _run(self, ctx: ml.Context, run: Runs, mixed: ml.Tensor, time: ml.Tensor, step: Step) -> ml.Tensor:
        """(sequences * length, inner) of one run of sequences."""
        sizes, cache, dtype = self.sizes, step.cache, mixed.dtype
        mixed, time = run.gather(ctx, mixed), run.gather(ctx, time)
        mixed = convolve(ctx, run, mixed, cache, self.index, self.kernel, self.conv_bias).silu(ctx)
        inner, shared = sizes.inner, sizes.groups * sizes.state
        x = split_heads(ctx, mixed.slice(ctx, 2, 0, inner), sizes.heads)
        key, query = (
            repeat_heads(
                ctx,
                split_heads(ctx, mixed.slice(ctx, 2, begin, begin + shared), sizes.groups),
                sizes.heads,
            )
            for begin in (inner, inner + shared)
        )
        time = time.permute(ctx, 0, 2, 1).contiguous(ctx)  # (sequences, heads, length)
        decay = time.mul(ctx, self.decay.reshape(ctx, sizes.heads, 1))
        value = x.mul(ctx, time.reshape(ctx, *time.shape, 1))
        out = recur(ctx, run, step, self.index, state_space_rule, (query, key, value, decay))
        out = out.add(ctx, x.mul(ctx, self.skip.reshape(ctx, sizes.heads, 1, 1)))
        return out.permute(ctx, 0, 2, 1, 3).contiguous(ctx).reshape(ctx, -1, inner).cast(ctx, dtype)

    def _gated(self, ctx: ml.Context, x: ml.Tensor, gate: ml.Tensor) -> ml.Tensor:
        if self.norm is None:
            return x.mul(ctx, gate.silu(ctx))
        if not self.sizes.norm_first:
            x = x.mul(ctx, gate.silu(ctx))
        tokens, groups = x.shape[0], self.sizes.groups
        x = x.reshape(ctx, tokens * groups, self.sizes.inner // groups).rms_norm(ctx, None, self.eps)
        x = x.reshape(ctx, tokens, self.sizes.inner).mul(ctx, self.norm)
        return x.mul(ctx, gate.silu(ctx)) if self.sizes.norm_first else x


def mamba_shapes(prefix: str, hidden: int, sizes: MambaSizes) -> dict[str, Shape]:
    """The tensors that ``load_mamba`` reads."""
    found: dict[str, Shape] = {
        f"{prefix}.in_proj.weight": (sum(sizes.rows), hidden),
        f"{prefix}.conv1d.weight": (sizes.channels, 1, sizes.kernel),
        f"{prefix}.out_proj.weight": (hidden, sizes.inner),
        **{f"{prefix}.{name}": (sizes.heads,) for name in ("A_log", "D", "dt_bias")},
    }
    if sizes.conv_bias:
        found[f"{prefix}.conv1d.bias"] = (sizes.channels,)
    if sizes.normed:
        found[f"{prefix}.norm.weight"] = (sizes.inner,)
    return found


def load_mamba(
    load: Loader,
    ctx: ml.Context,
    prefix: str,
    index: int,
    sizes: MambaSizes,
    eps: float,
    inputs: Sequence[float] = (1.0,) * 5,
    output: float = 1.0,
) -> Mamba2Mixer:
    """Of the tensors below ``prefix``, for layer ``index``.

    ``inputs`` multiply z, x, B, C and dt as they leave their projection, ``output`` what leaves the mixer.
    """
    wide = np.repeat(np.asarray(inputs, np.float32), sizes.rows)[:, None]
    projection = load.take(f"{prefix}.in_proj.weight").astype(np.float32) * wide
    narrow = load.take(f"{prefix}.out_proj.weight").astype(np.float32) * np.float32(output)
    decay, time_bias, skip = (
        load.take(f"{prefix}.{name}").astype(np.float32) for name in ("A_log", "dt_bias", "D")
    )
    return Mamba2Mixer(
        index,
        sizes,
        eps,
        projection=load.joined(ctx, [projection]),
        kernel=load.put(ctx, np.ascontiguousarray(load.take(f"{prefix}.conv1d.weight")[:, 0].T)),
        conv_bias=load.tensor(ctx, f"{prefix}.conv1d.bias") if sizes.conv_bias else None,
        decay=load.put(ctx, -np.exp(decay), DType.F32),
        time_bias=load.put(ctx, time_bias, DType.F32),
        skip=load.put(ctx, skip, DType.F32),
        norm=load.norm(ctx, f"{prefix}.norm") if sizes.normed else None,
        output=load.joined(ctx, [narrow]),
    )
