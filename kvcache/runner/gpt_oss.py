"""gpt-oss, written once on ml.nn: sliding and full layers by turns, attention sinks, experts.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (arXiv 2508.10925); transformers'
modeling_gpt_oss.py. Unquantised weights only. Each head has a logit that takes part in the softmax and
is dropped; biases are everywhere; an expert's gate and up are stored by turns and clamped::

    (min(up, limit) + 1) * gate * sigmoid(alpha * gate)    gate <= limit, -limit <= up <= limit
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ml
from kvcache.cache import Batch, Cache
from kvcache.runner.attention import Attention, load_attention
from kvcache.runner.config import ModelConfig
from kvcache.runner.decoder import CausalModel, Layer, Step
from kvcache.runner.feedforward import Activation
from kvcache.runner.layer_types import (
    FULL,
    SLIDING,
    Shape,
    attention_shapes,
    common_fields,
    layer_types,
    model_shapes,
    parse_rope,
    refuse,
    sliding_cache,
    sliding_tokens,
)
from kvcache.runner.loader import Loader
from kvcache.runner.routing import SparseMLP, load_experts
from kvcache.wrapper import WrapperCache
from ml import nn

__all__ = ["GptOss", "GptOssConfig", "make_cache", "parse", "shapes"]

_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "sliding_window": 128, "attention_bias": True,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096, "rope_theta": 150_000.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GptOssConfig(ModelConfig):
    """``window`` counts the token itself, as config.json does; ``alpha`` and ``limit`` as above."""

    kinds: tuple[str, ...]
    window: int
    experts: int
    experts_per_token: int
    alpha: float
    limit: float

    def cached_tokens(self, max_sequences: int, capacity: int, max_batch: int) -> int:
        windows = [self.window if kind == _SLIDING else None for kind in self.kinds]
        return sliding_tokens(windows, max_sequences, capacity, max_batch)


def parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> GptOssConfig:
    refuse(raw, {"hidden_act": ["silu", "swish"]})
    fields = common_fields(raw, generation, "GptOssForCausalLM", _DEFAULTS)
    raw = {**_DEFAULTS, **raw}
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw["rope_parameters"] = _YARN
    kinds = layer_types(raw, (_SLIDING, _FULL), lambda i: _FULL if i % 2 else _SLIDING)
    return GptOssConfig(
        **(fields | {"layer_types": kinds}),
        rope=parse_rope(raw, fields["head_dim"], 150_000.0),
        kinds=kinds,
        window=int(fields["sliding_window"] or fields["max_positions"]),
        experts=raw["num_local_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        alpha=float(raw.get("swiglu_alpha", 1.702)),
        limit=float(raw.get("swiglu_limit", 7.0)),
    )


def shapes(config: GptOssConfig) -> dict[str, Shape]:
    """The name and shape of every tensor."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    layer = attention_shapes(config) | {
        "self_attn.sinks": (config.heads,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
        "mlp.experts.down_proj": (experts, inner, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }
    return model_shapes(config, lambda _: layer)


def make_cache(
    config: GptOssConfig, dtype: ml.DType | None = None, memory: int | None = None
) -> WrapperCache:
    """For the two types of layers; ``memory`` as SlidingWindowCache has it, any ``dtype`` alike."""
    return sliding_cache(config.window, config.rope, config.rope, memory)


class GptOss(CausalModel[GptOssConfig]):
    """The weights of a model and its forward pass."""

    cache_type = WrapperCache
    shapes = staticmethod(shapes)

    def make_cache(self) -> WrapperCache:
        return make_cache(self.config)

    def _begin(self, ctx: ml.Context, batch: Batch, cache: Cache) -> Step:
        return Step(batch, cache, {_FULL: nn.Rotation(ctx, batch.positions, self.config.rope)})

    def _layer(self, load: Loader, ctx: ml.Context, i: int) -> Layer:
        config, prefix = self.config, f"model.layers.{i}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return _Layer(
            SLIDING if config.kinds[i] == _SLIDING else FULL,
            config.rms_norm_eps,
            load.norm(ctx, f"{prefix}.input_layernorm"),
            load.norm(ctx, f"{prefix}.post_attention_layernorm"),
            load_attention(load, ctx, attention, config, sinks=load.tensor(ctx, f"{attention}.sinks")),
            SparseMLP(
                load.linear(ctx, f"{mlp}.router"),
                load_experts(load, ctx, f"{mlp}.experts", _clamped(config), _gate_first),
                config.experts_per_token,
                "softmax of top",
            ),
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    kind: int
    eps: float
    norm: ml.Tensor
    mlp_norm: ml.Tensor
    attention: Attention
    mlp: SparseMLP

    def mix(self, ctx: ml.Context, hidden: ml.Tensor, step: Step) -> ml.Tensor:
        step.cache.set_layer_type(self.kind)
        normed = hidden.rms_norm(ctx, self.norm, self.eps)
        return hidden.add(ctx, self.attention(ctx, normed, step.cache, step.rotations[_FULL]))

    def feed(self, ctx: ml.Context, hidden: ml.Tensor) -> ml.Tensor:
        return hidden.add(ctx, self.mlp(ctx, hidden.rms_norm(ctx, self.mlp_norm, self.eps)))


def _gate_first(rows: np.ndarray) -> np.ndarray:
    """Rows gate, up, gate, up, ... as all of gate, then all of up."""
    return np.concatenate((rows[::2], rows[1::2]))


def _clamped(config: GptOssConfig) -> Activation:
    alpha, limit = config.alpha, config.limit

    def activation(ctx: ml.Context, gate: ml.Tensor, up: ml.Tensor) -> ml.Tensor:
        gate, up = gate.clamp(ctx, None, limit), up.clamp(ctx, -limit, limit)
        gated = gate.mul(ctx, gate.scale(ctx, alpha).sigmoid(ctx))
        return gated.add(ctx, up.mul(ctx, gated))

    return activation
