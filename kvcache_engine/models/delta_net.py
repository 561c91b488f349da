"""A gated delta net layer: projections, a short convolution, the delta rule, a gated norm.

transformers' Qwen3NextGatedDeltaNet and Qwen3_5GatedDeltaNet. Its states, which a RecurrentCache keeps per
sequence, are the convolution's last inputs and the delta rule's matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import ml
from kvcache import StateSpec
from kvcache_engine.models.state_runs import Runs, by_runs, convolve, recur, repeat_heads, split_heads
from kvcache_engine.models.step import Step
from kvcache_engine.weights import Linear, Loader
from ml import DType, nn

__all__ = ["DeltaNet", "DeltaSizes", "delta_shapes", "load_delta_net"]


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The numbers of heads, and the size of a key and a value per head; ``kernel`` is the convolution's
    length.
    """

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
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def states(self) -> dict[str, StateSpec]:
        """The states that a layer keeps for a sequence."""
        matrices = self.value_heads, self.key_dim, self.value_dim
        conv = StateSpec((self.channels, self.kernel - 1))
        return {"conv": conv, "recurrent": StateSpec(matrices, DType.F32)}


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
        """x (tokens, hidden) -> the same shape; the states of the pass advance in the cache."""
        sizes, tokens = self.sizes, x.shape[0]
        joined = self.projection(ctx, x)
        start, stop = sizes.channels, sizes.channels + sizes.values
        gate = joined.slice(ctx, 1, start, stop)
        write, fade = self._rates(ctx, joined.slice(ctx, 1, stop, stop + 2 * sizes.value_heads))
        mixed = joined.slice(ctx, 1, 0, start)
        result = by_runs(ctx, step, lambda run: self._run(ctx, run, (mixed, write, fade), step))
        heads = result.reshape(ctx, tokens * sizes.value_heads, sizes.value_dim)
        heads = heads.rms_norm(ctx, self.norm, self.eps).reshape(ctx, tokens, sizes.values)
        return self.output(ctx, heads.mul(ctx, gate.silu(ctx)))

    def _rates(self, ctx: ml.Context, ba: ml.Tensor) -> tuple[ml.Tensor, ml.Tensor]:
        """beta and g, F32 (tokens, value_heads), from b and a, concatenated."""
        heads = self.sizes.value_heads
        ba = ba.cast(ctx, DType.F32)
        time = nn.softplus(ctx, ba.slice(ctx, 1, heads, 2 * heads).add(ctx, self.time_bias))
        return ba.slice(ctx, 1, 0, heads).sigmoid(ctx), time.mul(ctx, self.decay)

    def _run(
        self, ctx: ml.Context, run: Runs, inputs: tuple[ml.Tensor, ml.Tensor, ml.Tensor], step: Step
    ) -> ml.Tensor:
        """The output (sequences * length, values) for one run of sequences."""
        sizes, cache = self.sizes, step.cache
        mixed, write, fade = (run.gather(ctx, x) for x in inputs)
        mixed = convolve(ctx, run, mixed, cache, self.index, self.kernel).silu(ctx)
        keys, dim = sizes.keys, sizes.key_dim
        query, key = (
            nn.l2_norm(ctx, split_heads(ctx, mixed.slice(ctx, 2, start, start + keys), sizes.key_heads))
            for start in (0, keys)
        )
        query, key = (repeat_heads(ctx, x, sizes.value_heads) for x in (query.scale(ctx, dim**-0.5), key))
        value = split_heads(ctx, mixed.slice(ctx, 2, 2 * keys, sizes.channels), sizes.value_heads)
        write, fade = (x.permute(ctx, 0, 2, 1).contiguous(ctx) for x in (write, fade))
        out = recur(ctx, run, step, self.index, (query, key, value, fade, write))
        out = out.permute(ctx, 0, 2, 1, 3).contiguous(ctx)
        return out.reshape(ctx, -1, sizes.values).cast(ctx, inputs[0].dtype)


def delta_shapes(prefix: str, hidden: int, sizes: DeltaSizes, split: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that ``load_delta_net`` reads."""
    heads, keys, values = sizes.value_heads, sizes.keys, sizes.values
    if split:
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    else:
        rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.in_proj_{name}.weight": (count, hidden) for name, count in rows.items()
    }
    return shapes | {
        f"{prefix}.conv1d.weight": (sizes.channels, 1, sizes.kernel),
        f"{prefix}.A_log": (heads,),
        f"{prefix}.dt_bias": (heads,),
        f"{prefix}.norm.weight": (sizes.value_dim,),
        f"{prefix}.out_proj.weight": (hidden, values),
    }


def load_delta_net(
    load: Loader, ctx: ml.Context, prefix: str, index: int, sizes: DeltaSizes, split: bool, eps: float
) -> DeltaNet:
    """Load layer ``index`` from the tensors under ``prefix``; ``split`` as in Qwen3NextConfig."""
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
    """Reorder rows stored by key head (its q, k, v and z; its b and a) to all of q, k, v, z, b and a."""
    qkvz, ba = stored
    groups, hidden = sizes.value_heads // sizes.key_heads, qkvz.shape[1]
    ends = np.cumsum([sizes.key_dim, sizes.key_dim, groups * sizes.value_dim])
    parts = np.split(qkvz.reshape(sizes.key_heads, -1, hidden), ends, axis=1)
    parts += np.split(ba.reshape(sizes.key_heads, -1, hidden), 2, axis=1)
    return [part.reshape(-1, hidden) for part in parts]
