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
from kvcache import StateSpec
from kvcache.cache import Batch
from kvcache_engine.config import common_fields, refuse
from kvcache_engine.models.attention import Attention, attention_shapes, load_attention
from kvcache_engine.models.decoder import Names
from kvcache_engine.models.feedforward import GatedMLP, mlp_shapes
from kvcache_engine.models.mamba_mixer import Mamba2Mixer, MambaSizes, load_mamba, mamba_shapes
from kvcache_engine.models.recurrent import RecurrentModel, StateConfig, time_limits
from kvcache_engine.models.step import Step
from kvcache_engine.weights import Linear, Loader, Shape
from ml.nn import parse_rope

__all__ = ["FalconH1", "FalconH1Config", "parse"]

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
    def states(self) -> dict[str, StateSpec]:
        return self.mamba.states

    @property
    def state_layers(self) -> int:
        return self.layers


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> FalconH1Config:
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


@dataclass(frozen=True, slots=True)
class _Both:
    """A layer's mixer and its attention, of the same input."""

    mixer: Mamba2Mixer
    attention: Attention

    def __call__(self, ctx: ml.Context, x: ml.Tensor, step: Step) -> ml.Tensor:
        return self.mixer(ctx, x, step).add(ctx, self.attention(ctx, x, step))


class FalconH1(RecurrentModel[FalconH1Config]):
    names = NAMES
    norm_names = NORMS

    @classmethod
    def mixer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        return attention_shapes(config) | mamba_shapes("mamba", config.hidden_size, config.mamba)

    @classmethod
    def mlp_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        return mlp_shapes("feed_forward", config.hidden_size, config.intermediate_size)

    def embed(self, ctx: ml.Context, batch: Batch) -> ml.Tensor:
        return super().embed(ctx, batch).scale(ctx, self.config.multipliers.embedding)

    def logits(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return super().logits(ctx, hidden).scale(ctx, self.config.multipliers.head)

    def mixer(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> _Both:
        config, by, attention = self.config, self.config.multipliers, f"{prefix}.self_attn"
        factors = {"q": by.query, "k": by.key, "v": by.query}
        qkv = _scaled(load, ctx, {f"{attention}.{name}_proj": by for name, by in factors.items()})
        output = _scaled(load, ctx, {f"{attention}.o_proj": by.attention})
        return _Both(
            load_mamba(
                load, ctx, f"{prefix}.mamba", i, config.mamba, config.rms_norm_eps, by.mixer, by.mixer_output
            ),
            load_attention(load, ctx, attention, config, qkv=qkv, output=output),
        )

    def mlp(self, load: Loader, ctx: ml.Context, prefix: str, i: int) -> GatedMLP:
        by, prefix = self.config.multipliers, f"{prefix}.feed_forward"
        return GatedMLP(
            _scaled(load, ctx, {f"{prefix}.gate_proj": by.gate, f"{prefix}.up_proj": 1.0}),
            _scaled(load, ctx, {f"{prefix}.down_proj": by.down}),
        )


def _scaled(load: Loader, ctx: ml.Context, factors: Mapping[str, float]) -> Linear:
    """Several maps joined, each times its factor."""
    return load.joined(
        ctx,
        [
            load.take(f"{name}.weight").astype(np.float32) * np.float32(factor)
            for name, factor in factors.items()
        ],
    )
