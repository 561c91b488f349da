"""LFM2, written once on ml.nn: gated short convolutions, and attention in some layers.

Liquid AI, "LFM2", 2025; transformers' modeling_lfm2.py::

    hidden += out_proj(c * conv(b * x))      b, c, x of in_proj(norm(hidden))
    hidden += attention(norm(hidden))        queries and keys normalised by head
    hidden += mlp(norm(hidden))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache import StateSpec
from kvcache_engine.config import common_fields, refuse
from kvcache_engine.models.attention import Attention, attention_shapes, load_attention, qk_norm
from kvcache_engine.models.decoder import Names
from kvcache_engine.models.feedforward import GatedMLP, load_mlp, mlp_shapes
from kvcache_engine.models.layer_types import FULL_ATTENTION, layer_types
from kvcache_engine.models.recurrent import RecurrentModel, StateConfig
from kvcache_engine.models.state_runs import Runs, by_runs, convolve
from kvcache_engine.models.step import Step
from kvcache_engine.weights import Linear, Loader, Shape
from ml.nn import parse_rope

__all__ = ["LFM2", "LFM2Config", "parse"]

NAMES = Names("model.embed_tokens", "model.layers", "model.embedding_norm")
NORMS, PROJECTIONS = ("operator_norm", "ffn_norm"), ("w1", "w3", "w2")
CONV = "conv"
RENAMED = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
"""Tensors of attention, as others call them and as LFM2 does."""


@dataclass(frozen=True, slots=True)
class LFM2Config(StateConfig):
    """``kinds``: "conv" or "full_attention" by layer; ``taps`` is the convolutions' length."""

    kinds: tuple[str, ...]
    taps: int
    conv_bias: bool

    @property
    def attending(self) -> Sequence[int]:
        return [i for i, kind in enumerate(self.kinds) if kind == FULL_ATTENTION]

    @property
    def states(self) -> dict[str, StateSpec]:
        return {"conv": StateSpec((self.hidden_size, self.taps - 1))}


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> LFM2Config:
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    inner = raw.get("block_ff_dim") or raw["intermediate_size"]
    if raw["block_auto_adjust_ff_dim"]:
        multiple = raw["block_multiple_of"]
        inner = int(float(raw["block_ffn_dim_multiplier"] or 1.0) * int(2 * inner / 3))
        inner = multiple * -(-inner // multiple)
    raw = {
        **raw,
        "tie_word_embeddings": raw.get("tie_embedding", raw["tie_word_embeddings"]),
        "rms_norm_eps": raw["norm_eps"],
        "intermediate_size": inner,
    }
    common = common_fields(raw, generation, "Lfm2ForCausalLM")
    full = raw.get("full_attn_idxs")
    kinds = layer_types(
        raw, (CONV, FULL_ATTENTION), lambda i: FULL_ATTENTION if full is None or i in full else CONV
    )
    return LFM2Config(
        **(common | {"qk_norm": True}),
        rope=parse_rope(raw, common["head_dim"]),
        kinds=kinds,
        taps=raw["conv_L_cache"],
        conv_bias=bool(raw["conv_bias"]),
    )


def _renamed(name: str) -> str:
    for plain, theirs in RENAMED.items():
        name = name.replace(plain, theirs)
    return name


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """``projection``: hidden -> b, c and x, of hidden each; ``kernel`` (taps, hidden), oldest first."""

    index: int
    projection: Linear
    kernel: ml.Tensor
    bias: ml.Tensor | None
    output: Linear

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        """x (tokens, hidden) -> the same; the states of the pass move on in the cache."""
        hidden = x.shape[1]
        joined = self.projection(ctx, x)
        before, after, inner = (joined.slice(ctx, 1, i * hidden, (i + 1) * hidden) for i in range(3))
        inputs = before.mul(ctx, inner)

        def convolved(run: Runs) -> ml.Tensor:
            x = run.gather(ctx, inputs)
            x = convolve(ctx, run, x, step.cache, self.index, self.kernel, self.bias)
            return x.reshape(ctx, -1, hidden)

        return self.output(ctx, by_runs(ctx, step, convolved).mul(ctx, after))


class LFM2(RecurrentModel[LFM2Config]):
    names = NAMES
    norm_names = NORMS

    @classmethod
    def mixer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden = config.hidden_size
        if config.kinds[i] == FULL_ATTENTION:
            return {_renamed(name): shape for name, shape in attention_shapes(config).items()}
        found: dict[str, Shape] = {"conv.conv.weight": (hidden, 1, config.taps)}
        for name, rows in (("in", 3 * hidden), ("out", hidden)):
            found[f"conv.{name}_proj.weight"] = (rows, hidden)
            if config.conv_bias:
                found[f"conv.{name}_proj.bias"] = (rows,)
        if config.conv_bias:
            found["conv.conv.bias"] = (hidden,)
        return found

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        return mlp_shapes("feed_forward", config.hidden_size, config.intermediate_size, names=PROJECTIONS)

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> Attention | ShortConvolution:
        config, attention = self.config, f"{prefix}.self_attn"
        if config.kinds[i] != FULL_ATTENTION:
            return self._convolution(load, ctx, f"{prefix}.conv", i)
        norm = qk_norm(load, ctx, attention, config, suffix="layernorm")
        output = load.summed(ctx, f"{attention}.out_proj")
        return load_attention(load, ctx, attention, config, qk_norm=norm, output=output)

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> GatedMLP:
        return load_mlp(load, ctx, f"{prefix}.feed_forward", names=PROJECTIONS)

    def _convolution(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> ShortConvolution:
        return ShortConvolution(
            i,
            load.linear(ctx, f"{prefix}.in_proj"),
            load.put(ctx, np.ascontiguousarray(load.take(f"{prefix}.conv.weight")[:, 0].T)),
            load.tensor(ctx, f"{prefix}.conv.bias") if self.config.conv_bias else None,
            load.linear(ctx, f"{prefix}.out_proj"),
        )
