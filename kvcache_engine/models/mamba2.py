"""Mamba-2, written once on ml.nn: a model whose only memory are the states of its layers.

transformers' modeling_mamba2.py::

    hidden += mixer(norm(hidden))

transformers adds up the layers in F32 (``residual_in_fp32``); here they are added in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml
from kvcache import StateSpec
from kvcache_engine.config import common_fields, refuse
from kvcache_engine.models.decoder import Names
from kvcache_engine.models.mamba_mixer import Mamba2Mixer, MambaSizes, load_mamba, mamba_shapes
from kvcache_engine.models.recurrent import RecurrentModel, StateConfig, time_limits
from kvcache_engine.models.step import Layer, Step
from kvcache_engine.weights import Loader, Shape
from ml import nn

__all__ = ["Mamba2", "Mamba2Config", "parse"]

NAMES = Names("backbone.embeddings", "backbone.layers", "backbone.norm_f")


@dataclass(frozen=True, slots=True)
class Mamba2Config(StateConfig):
    """No layer stores anything of a token."""

    mamba: MambaSizes

    @property
    def attending(self) -> Sequence[int]:
        return ()

    @property
    def states(self) -> dict[str, StateSpec]:
        return self.mamba.states


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Mamba2Config:
    refuse(raw, {"hidden_act": ["silu", "swish"], "use_bias": [False]})
    time_limits(raw)
    heads, dim = raw["num_heads"], raw["head_dim"]
    raw = {
        **raw, "num_attention_heads": heads, "intermediate_size": heads * dim,
        "max_position_embeddings": 1 << 30, "rms_norm_eps": raw["layer_norm_epsilon"],
    }  # fmt: skip
    common = common_fields(raw, generation, "Mamba2ForCausalLM")
    sizes = MambaSizes(
        heads, dim, raw["n_groups"], raw["state_size"], raw["conv_kernel"],
        conv_bias=bool(raw["use_conv_bias"]),
    )  # fmt: skip
    return Mamba2Config(**common, rope=nn.RopeSpec(2, 10_000.0), mamba=sizes)


@dataclass(frozen=True, slots=True)
class _Layer:
    eps: float
    norm: ml.Tensor
    mixer: Mamba2Mixer

    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        return hidden.add(ctx, self.mixer(ctx, hidden.rms_norm(ctx, self.norm, self.eps), step))

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return hidden


class Mamba2(RecurrentModel[Mamba2Config]):
    names = NAMES

    @classmethod
    def layer_shapes(cls, config: Any, i: int) -> dict[str, Shape]:
        hidden = config.hidden_size
        return {"norm.weight": (hidden,), **mamba_shapes("mixer", hidden, config.mamba)}

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"{NAMES.layers}.{i}"
        mixer = load_mamba(load, ctx, f"{prefix}.mixer", i, config.mamba, config.rms_norm_eps)
        return _Layer(config.rms_norm_eps, load.norm(ctx, f"{prefix}.norm"), mixer)
