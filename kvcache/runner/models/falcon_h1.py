"""Falcon-H1, written once on ml.nn: attention and a Mamba-2 mixer side by side in every layer.

TII, "Falcon-H1", 2025 (arXiv 2507.22448); transformers' modeling_falcon_h1.py::

    hidden += mixer(norm(hidden)) + attention(norm(hidden))
    hidden += mlp(norm(hidden))

Its multipliers are part of the weights here: they are multiplied to them as they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache.cache import Batch, Cache
from kvcache.caches.recurrent import RecurrentCache
from kvcache.runner.config import common_fields, refuse
from kvcache.runner.models.attention import Attention, attention_shapes, load_attention
from kvcache.runner.models.decoder import CausalModel, Layer, Names, Step, model_shapes
from kvcache.runner.models.feedforward import GatedMLP, mlp_shapes
from kvcache.runner.models.mamba_mixer import Mamba2Mixer, MambaSizes, load_mamba, mamba_shapes
from kvcache.runner.models.prenorm import PreNormLayer, load_norms, norm_shapes
from kvcache.runner.models.recurrent import StateConfig, recurrent_cache, time_limits
from kvcache.runner.models.state_runs import begin_runs
from kvcache.runner.rope_config import parse_rope
from kvcache.runner.weights import Linear, Loader, Shape
from ml import nn

__all__ = ["FalconH1", "FalconH1Config", "make_cache", "parse", "shapes"]

NAMES = Names("model.embed_tokens", "model.layers", "model.final_layernorm")
NORMS = ("input_layernorm", "pre_ff_layernorm")


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What the outputs of projections, of the embedding and of the head are multiplied by."""

    embedding: float
    head: float
    query: float
    key: float
    attention: float
    mixer: tuple[float, ...]
    mixer_output: float
    gate: float
    down: float


@dataclass(frozen=True, slots=True)
class FalconH1Config(StateConfig):
    """``mamba`` is the mixer of every layer."""

    mamba: MambaSizes
    multipliers: Multipliers

    @property
    def state_values(self) -> int:
        return self.layers * self.mamba.state_values


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> FalconH1Config:
    """FalconH1ForCausalLM."""
    plain = "attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"
    refuse(raw, {"hidden_act": ["silu", "swish"], **{name: [False] for name in plain}})
    time_limits(raw)
    common = common_fields(raw, generation, "FalconH1ForCausalLM")
    heads, inner = raw["mamba_n_heads"], raw["mamba_d_ssm"]
    inner = inner or int(raw["mamba_expand"] * raw["hidden_size"])
    sizes = MambaSizes(
        heads, inner // heads, raw["mamba_n_groups"], raw["mamba_d_state"], raw["mamba_d_conv"],
        normed=bool(raw["mamba_rms_norm"]),
        norm_first=bool(raw["mamba_norm_before_gate"]),
        conv_bias=bool(raw["mamba_conv_bias"]),
    )  # fmt: skip

    def number(name: str) -> float:
        return float(raw.get(f"{name}_multiplier") or 1.0)

    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    inputs = raw.get("ssm_multipliers") or (1.0,) * 5
    multipliers = Multipliers(
        embedding=number("embedding"),
        head=number("lm_head"),
        query=number("attention_in"),
        key=number("attention_in") * number("key"),
        attention=number("attention_out"),
        mixer=tuple(number("ssm_in") * float(one) for one in inputs),
        mixer_output=number("ssm_out"),
        gate=float(gate),
        down=float(down),
    )
    rope = parse_rope(raw, common["head_dim"])
    return FalconH1Config(**common, rope=rope, mamba=sizes, multipliers=multipliers)


def shapes(config: FalconH1Config) -> dict[str, Shape]:
    """The name and shape of every tensor."""
    hidden = config.hidden_size
    layer = (
        norm_shapes(hidden, NORMS) | attention_shapes(config) | mamba_shapes("mamba", hidden, config.mamba)
    )
    layer |= mlp_shapes("feed_forward", hidden, config.intermediate_size)
    return model_shapes(config, lambda _: layer, NAMES)


def make_cache(config: FalconH1Config, dtype: ml.DType | None = None, **options: Any) -> RecurrentCache:
    """A cache for the states and the keys of every layer.

    ``dtype`` is that of the model's activations; ``options`` go to RecurrentCache.
    """
    return recurrent_cache(config.mamba, nn.rope_shift(config.rope), dtype, options)


@dataclass(frozen=True, slots=True)
class _Both:
    """A layer's mixer and its attention, of the same input."""

    mixer: Mamba2Mixer
    attention: Attention

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        return self.mixer(ctx, x, step).add(ctx, self.attention(ctx, x, step))


class FalconH1(CausalModel[FalconH1Config]):
    """The weights of a model and its forward pass."""

    cache_type = RecurrentCache
    names = NAMES
    cache_of = staticmethod(make_cache)
    shapes = staticmethod(shapes)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return begin_runs(ctx, super().begin_pass(ctx, batch, cache))

    def embed(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        return super().embed(ctx, batch).scale(ctx, self.config.multipliers.embedding)

    def logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return super().logits(ctx, hidden).scale(ctx, self.config.multipliers.head)

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix, by = self.config, f"{NAMES.layers}.{i}", self.config.multipliers

        def scaled(*parts: tuple[str, float]) -> Linear:
            arrays = [
                load.take(f"{prefix}.{name}_proj.weight").astype(np.float32) * np.float32(factor)
                for name, factor in parts
            ]
            return load.joined(ctx, arrays)

        attention = load_attention(
            load,
            ctx,
            f"{prefix}.self_attn",
            config,
            qkv=scaled(("self_attn.q", by.query), ("self_attn.k", by.key), ("self_attn.v", by.query)),
            output=scaled(("self_attn.o", by.attention)),
        )
        mixer = load_mamba(
            load, ctx, f"{prefix}.mamba", i, config.mamba, config.rms_norm_eps, by.mixer, by.mixer_output
        )
        mlp = GatedMLP(
            scaled(("feed_forward.gate", by.gate), ("feed_forward.up", 1.0)),
            scaled(("feed_forward.down", by.down)),
        )
        norms = load_norms(load, ctx, prefix, names=NORMS)
        return PreNormLayer(config.rms_norm_eps, norms, _Both(mixer, attention), mlp)
