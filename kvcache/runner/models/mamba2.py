"""Mamba-2, written once on ml.nn: a model whose only memory are the states of its layers.

transformers' modeling_mamba2.py::

    hidden += mixer(norm(hidden))

transformers adds up the layers in F32 (``residual_in_fp32``); here they are added in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml
from kvcache.cache import Batch, Cache
from kvcache.caches.recurrent import RecurrentCache
from kvcache.runner.config import common_fields, refuse
from kvcache.runner.models.decoder import CausalModel, Layer, Names, Step, model_shapes
from kvcache.runner.models.mamba_mixer import Mamba2Mixer, MambaSizes, load_mamba, mamba_shapes
from kvcache.runner.models.recurrent import StateConfig, recurrent_cache, time_limits
from kvcache.runner.models.state_runs import begin_runs
from kvcache.runner.weights import Loader, Shape
from kvcache.storage.layer_shape import LayerShape
from ml import nn

__all__ = ["Mamba2", "Mamba2Config", "make_cache", "parse", "shapes"]

NAMES = Names("backbone.embeddings", "backbone.layers", "backbone.norm_f")


@dataclass(frozen=True, slots=True)
class Mamba2Config(StateConfig):
    """No layer stores anything of a token."""

    mamba: MambaSizes

    @property
    def cached_layers(self) -> dict[int, LayerShape]:
        return {}

    @property
    def state_values(self) -> int:
        return self.layers * self.mamba.state_values


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Mamba2Config:
    """Mamba2ForCausalLM."""
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


def shapes(config: Mamba2Config) -> dict[str, Shape]:
    """The name and shape of every tensor."""
    layer = {"norm.weight": (config.hidden_size,), **mamba_shapes("mixer", config.hidden_size, config.mamba)}
    return model_shapes(config, lambda _: layer, NAMES)


def make_cache(config: Mamba2Config, dtype: ml.DType | None = None, **options: Any) -> RecurrentCache:
    """A cache for the states.

    ``dtype`` is that of the model's activations; ``options`` go to RecurrentCache.
    """
    return recurrent_cache(config.mamba, None, dtype, options)


@dataclass(frozen=True, slots=True)
class _Layer:
    eps: float
    norm: ml.Tensor
    mixer: Mamba2Mixer

    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        return hidden.add(ctx, self.mixer(ctx, hidden.rms_norm(ctx, self.norm, self.eps), step))

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return hidden


class Mamba2(CausalModel[Mamba2Config]):
    """The weights of a model and its forward pass."""

    cache_type = RecurrentCache
    names = NAMES
    cache_of = staticmethod(make_cache)
    shapes = staticmethod(shapes)

    def begin_pass(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return begin_runs(ctx, Step(batch, cache))

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"{NAMES.layers}.{i}"
        mixer = load_mamba(load, ctx, f"{prefix}.mixer", i, config.mamba, config.rms_norm_eps)
        return _Layer(config.rms_norm_eps, load.norm(ctx, f"{prefix}.norm"), mixer)
